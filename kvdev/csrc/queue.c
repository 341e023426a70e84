#include "queue_int.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

#define PAUSES_MAX 128u                  /* a few microseconds */
#define CHECKS_PER_TURN 1u               /* a command's payload is tens of microseconds: then devices may have room again */

/* ---- dispatch ---- */

/* One command of the device's list. 1 started or ended, 0 it has to wait. */
static int dispatch_one(struct kvdev_queue *q, struct device *device, struct list *list, uint64_t now)
{
    uint32_t index = list->head;
    /* Off the list before it starts: an error completes it, and its node goes elsewhere. */
    list->head = q->nodes[index].next;
    q->stats.pending_count--;
    q->stats.in_flight_count++;
    int error = device->ops->start(q, device, index, now);
    if (!error)
        return 1;
    q->stats.pending_count++;
    q->stats.in_flight_count--;
    if (error == -EAGAIN) {
        list_push_front(q, list, index);
        return 0;
    }
    queue_node_refuse(q, index, error, now);
    return 1;
}

/* Moves pending commands to queue pairs: by priority, devices taking turns command by command. */
static void dispatch(struct kvdev_queue *q, uint64_t now)
{
    if (!q->stats.pending_count)
        return;
    for (uint32_t i = 0; i < q->path_count; i++)
        q->paths[i].is_blocked = 0;
    for (uint32_t i = 0; i < q->driven_count; i++)
        q->devices[q->driven[i]].is_blocked = 0;
    for (uint32_t priority = 0; priority < KVDEV_QUEUE_PRIORITY_COUNT; priority++) {
        struct rotation *rotation = &q->rotations[priority];
        uint32_t waiting = 0;
        while (waiting < rotation->count) {
            uint32_t device_index = rotation->entries[rotation->head];
            struct device *device = &q->devices[device_index];
            rotation->head = (rotation->head + 1) % KVDEV_QUEUE_DEVICES_MAX;
            rotation->count--;
            device->is_active[priority] = 0;
            struct list *list = &device->pending[priority];
            if (list->head == NODE_NONE)
                continue;
            if (dispatch_one(q, device, list, now))
                waiting = 0;
            else
                waiting++;
            if (list->head != NODE_NONE)
                device_activate(q, device_index, priority);
        }
    }
}

/* ---- submit ---- */

uint32_t queue_io_refusal(const struct kvdev_queue *q, const struct kvdev_io *io)
{
    if (io->device_index >= KVDEV_QUEUE_DEVICES_MAX || !q->devices[io->device_index].ops)
        return KVDEV_REFUSED_DEVICE;
    if (io->priority >= KVDEV_QUEUE_PRIORITY_COUNT)
        return KVDEV_REFUSED_PRIORITY;
    if (io->group_addr & 7)
        return KVDEV_REFUSED_GROUP;
    const struct device *device = &q->devices[io->device_index];
    return device->ops->check(device, io);
}

static int submit(struct kvdev_queue *q, const struct kvdev_io *ios, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        q->refused_reason = queue_io_refusal(q, &ios[i]);
        q->refused_index = i;
        if (q->refused_reason)
            return -EINVAL;
    }
    if (n > q->free_count)
        return -EAGAIN;
    uint64_t now = now_ns();
    for (size_t i = 0; i < n; i++)
        node_accept(q, &ios[i], now);
    return 0;
}

int kvdev_queue_submit(struct kvdev_queue *q, const struct kvdev_io *ios, size_t n)
{
    if (queue_enter(q))
        return -EBUSY;
    int error = submit(q, ios, n);
    queue_leave(q);
    return error;
}

void kvdev_queue_refusal_read(const struct kvdev_queue *q, size_t *index, uint32_t *reason)
{
    *index = q->refused_index;
    *reason = q->refused_reason;
}

/* ---- poll ---- */

static size_t deliver(struct kvdev_queue *q, struct kvdev_io_done *done, size_t max)
{
    size_t count = 0;
    while (count < max && q->done.head != NODE_NONE) {
        uint32_t index = list_pop(q, &q->done);
        done[count++] = node_report(&q->nodes[index]);
        node_give(q, index);
    }
    q->stats.done_count -= (uint32_t)count;
    q->stats.completed += count;
    return count;
}

/* The same turn over the devices that have a driver. */
static int turn_driven(struct kvdev_queue *q, uint64_t now, uint64_t *next_deadline_ns)
{
    int has_moved = 0;
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        if (!device->driver->outstanding(device->object))
            continue;
        has_moved |= device->driver->send(device->object);
        if (device->driver->receive(device->object, now)) {
            has_moved = 1;
            dispatch(q, now);
            device->driver->send(device->object);
        }
        uint64_t deadline = device->driver->deadlines(device->object, now);
        if (deadline < *next_deadline_ns)
            *next_deadline_ns = deadline;
    }
    return has_moved | queue_driven_check(q, CHECKS_PER_TURN);
}

/* One turn over queue pairs and devices; 1 if anything moved. */
int queue_turn(struct kvdev_queue *q, uint64_t now, uint64_t *next_deadline_ns)
{
    int has_moved = 0;
    *next_deadline_ns = UINT64_MAX;
    if (now >= q->fail_due_ns)
        queue_devices_expire(q, now);
    if (now >= q->delayed_due_ns)
        queue_delayed_release(q, now);
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            qpair_association_check(q->paths[i].qp);
    dispatch(q, now);
    for (uint32_t i = 0; i < q->path_count; i++) {
        struct kvdev_qpair *qp = q->paths[i].qp;
        if (!qp || !(qp->outstanding || qpair_has_unsent(qp) || !qpair_is_ready(qp)))
            continue;
        if (qpair_has_unsent(qp))
            has_moved |= kvdev_qpair_send(qp, now);
        if (kvdev_qpair_receive(qp)) {
            has_moved = 1;
            /* What has come made room: fill it and answer R2Ts before looking at the others. */
            dispatch(q, now);
            if (qpair_has_unsent(qp))
                kvdev_qpair_send(qp, now);
        }
        uint64_t deadline = kvdev_qpair_deadlines(qp, now);
        if (deadline < *next_deadline_ns)
            *next_deadline_ns = deadline;
        if (!qpair_is_ready(qp))
            queue_controller_check(q, &q->paths[i]);
    }
    uint64_t due = q->delayed_due_ns < q->fail_due_ns ? q->delayed_due_ns : q->fail_due_ns;
    if (due < *next_deadline_ns)
        *next_deadline_ns = due;
    return has_moved | turn_driven(q, now, next_deadline_ns);
}

/* Sleeps until a socket or a device has something, or until_ns. 1 when a signal came. */
int queue_sleep_until(struct kvdev_queue *q, uint64_t now, uint64_t until_ns)
{
    struct pollfd fds[KVDEV_QUEUE_QPAIRS_MAX + KVDEV_QUEUE_DEVICES_MAX * KVDEV_QUEUE_DRIVER_FDS_MAX + 1];
    nfds_t n = 0;
    fds[n++] = (struct pollfd){ .fd = q->wake_fd, .events = POLLIN };
    for (uint32_t i = 0; i < q->path_count; i++) {
        if (!q->paths[i].qp)
            continue;
        short events = 0;
        int fd = kvdev_qpair_wait_fd(q->paths[i].qp, &events);
        if (fd < 0 || !q->paths[i].qp->outstanding)
            continue;
        fds[n++] = (struct pollfd){ .fd = fd, .events = events };
    }
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        if (!device->driver->outstanding(device->object))
            continue;
        int count = device->driver->wait(device->object, fds + n);
        if (count < 0)
            return 0;
        n += (nfds_t)count;
    }
    uint64_t left = until_ns > now ? until_ns - now : 0;
    struct timespec ts = { .tv_sec = (time_t)(left / NS_PER_S), .tv_nsec = (long)(left % NS_PER_S) };
    q->stats.sleeps++;
    int count = ppoll(fds, n, &ts, NULL);
    if (count > 0 && fds[0].revents) {
        /* Also what an intruder wrote while nobody was here: left there, it would end every sleep. */
        uint64_t wakes;
        ssize_t got = read(q->wake_fd, &wakes, sizeof wakes);
        (void)got;
    }
    return count < 0 && errno == EINTR;
}

uint64_t queue_in_flight_bytes(const struct kvdev_queue *q)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            sum += q->paths[i].qp->in_flight_bytes;
    return sum;
}

/* Waits a moment without a system call, twice as long as the last time: a socket asked all the time is locked
 * whenever the kernel wants to put data into it. */
void queue_relax(uint32_t *pauses)
{
    for (uint32_t i = 0; i < *pauses; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory");
#else
        __asm__ volatile("" ::: "memory");
#endif
    }
    if (*pauses < PAUSES_MAX)
        *pauses *= 2;
}

/* Works until `want` completions wait to be handed back, *is_done is set, or the time is over. */
void queue_work(struct kvdev_queue *q, size_t want, const int *is_done, uint64_t timeout_ns)
{
    uint64_t now = now_ns();
    uint64_t deadline = add_ns(now, timeout_ns);
    uint64_t moved_ns = now;
    uint32_t pauses = PAUSES_MIN;
    for (;;) {
        uint64_t next = UINT64_MAX;
        if (atomic_load_explicit(&q->intruders, memory_order_relaxed))
            queue_step_aside(q, 0);
        int has_moved = queue_turn(q, now, &next);
        if (is_done ? *is_done : q->stats.done_count >= want)
            return;
        if (!outstanding_below(q))
            return;
        now = now_ns();
        if (now >= deadline)
            return;
        if (has_moved) {
            moved_ns = now;
            pauses = PAUSES_MIN;
            continue;
        }
        if (now - moved_ns < q->options.spin_ns && queue_in_flight_bytes(q) <= SPIN_MAX_BYTES) {
            queue_relax(&pauses);
            now = now_ns();
            continue;
        }
        if (queue_sleep_until(q, now, deadline < next ? deadline : next) && !is_done)
            return;
        now = now_ns();
    }
}

int kvdev_queue_poll(struct kvdev_queue *q, struct kvdev_io_done *done, size_t max, size_t min_count,
                     uint64_t timeout_ns, size_t *count)
{
    *count = 0;
    if (queue_enter(q))
        return -EBUSY;
    q->stats.polls++;
    size_t want = min_count < max ? min_count : max;
    /* What is there already is enough, but a look at the sockets keeps them moving. */
    queue_work(q, want ? want : 1, NULL, want ? timeout_ns : 0);
    if (!want)
        queue_driven_check(q, UINT32_MAX); /* who looks only once may be away for long */
    *count = deliver(q, done, max);
    queue_leave(q);
    return 0;
}

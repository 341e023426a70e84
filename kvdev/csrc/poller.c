#include "poller.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "queue_int.h"

#define INTAKE_MAX 256u            /* commands of one turn, so that completions are not kept waiting */
#define LEAVING_NS 1000000ull      /* while stopping: a submitter that leaves wakes nobody */
#define WAIT_SLICE_NS 100000000ull /* a waiter looks so often whether anything can still come */
#define WATCH_NS 100000000ull      /* the thread looks so often whether an association has lost its admin connection */

/* One place of the submission ring. */
struct cell {
    _Atomic uint64_t sequence; /* position + 1 once what is here has been written */
    struct kvdev_channel *channel;
    struct kvdev_io io;
};

struct kvdev_channel {
    struct kvdev_poller *poller; /* held */
    uint32_t mask;               /* of the completion ring */
    uint32_t capacity;
    int fd;
    _Atomic uint64_t outstanding;
    _Atomic uint32_t is_closed;
    _Atomic uint32_t is_signalled; /* fd has been written and not been read since */
    _Atomic uint64_t want;         /* completions that must be there before fd is written */
    _Alignas(64) _Atomic uint64_t tail; /* the thread's */
    struct kvdev_channel *next_touched; /* the thread's: channels of one turn */
    uint32_t is_touched;
    _Alignas(64) _Atomic uint64_t head; /* the taker's */
    struct kvdev_io_done *done;
};

struct kvdev_poller {
    struct kvdev_queue *queue;
    pthread_t thread;
    pid_t pid;
    atomic_uint holders;
    pthread_mutex_t life_lock;       /* over is_running, for whoever needs the thread out of the way */
    uint32_t is_running;
    struct kvdev_poller_options options;
    struct cell *cells;
    struct kvdev_channel **channels; /* by node: who gets its completion */
    struct kvdev_channel *touched;
    _Atomic uint64_t turns;          /* written by the thread alone, as are the next ones */
    _Atomic uint64_t sleeps;
    _Atomic uint64_t taken;
    _Atomic uint64_t wakes;
    _Atomic uint64_t stop_ns;        /* when what is outstanding is given up; 0: it goes on */
    atomic_uint submitters;          /* inside submit */
    _Alignas(64) _Atomic uint64_t tail; /* the submitters' */
    _Alignas(64) _Atomic uint64_t head; /* the thread's */
    _Alignas(64) _Atomic uint32_t is_asleep;
};

static void stat_add(_Atomic uint64_t *stat, uint64_t n)
{
    atomic_store_explicit(stat, atomic_load_explicit(stat, memory_order_relaxed) + n, memory_order_relaxed);
}

/* ---- the submission ring ---- */

static int ring_push(struct kvdev_poller *p, struct kvdev_channel *channel, const struct kvdev_io *ios, size_t n)
{
    uint32_t mask = p->options.ring_size - 1;
    uint64_t tail = atomic_load_explicit(&p->tail, memory_order_relaxed);
    do {
        uint64_t head = atomic_load_explicit(&p->head, memory_order_acquire);
        /* A tail older than head is a tail of the past: the exchange fails and brings the present one. */
        if (head <= tail && tail - head + n > p->options.ring_size)
            return -EAGAIN;
    } while (!atomic_compare_exchange_weak_explicit(&p->tail, &tail, tail + n, memory_order_relaxed,
                                                    memory_order_relaxed));
    for (size_t i = 0; i < n; i++) {
        struct cell *cell = &p->cells[(tail + i) & mask];
        cell->channel = channel;
        cell->io = ios[i];
        atomic_store_explicit(&cell->sequence, tail + i + 1, memory_order_release);
    }
    return 0;
}

/* The oldest command that has been written whole, NULL if there is none. */
static const struct cell *ring_peek(const struct kvdev_poller *p)
{
    uint64_t head = atomic_load_explicit(&p->head, memory_order_relaxed);
    const struct cell *cell = &p->cells[head & (p->options.ring_size - 1)];
    return atomic_load_explicit(&cell->sequence, memory_order_acquire) == head + 1 ? cell : NULL;
}

static void ring_pop(struct kvdev_poller *p)
{
    uint64_t head = atomic_load_explicit(&p->head, memory_order_relaxed);
    atomic_store_explicit(&p->head, head + 1, memory_order_release);
}

static void wake(struct kvdev_poller *p)
{
    /* With the fence of the thread's between saying that it sleeps and its last look at the ring: one of the two sees
     * the other. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&p->is_asleep, memory_order_relaxed) &&
        atomic_exchange_explicit(&p->is_asleep, 0, memory_order_relaxed))
        queue_wake(p->queue);
}

/* ---- completions ---- */

static uint64_t ready_count(const struct kvdev_channel *channel)
{
    return atomic_load_explicit(&channel->tail, memory_order_acquire) -
           atomic_load_explicit(&channel->head, memory_order_acquire);
}

/* 1 if fd was written now. */
static int signal_raise(struct kvdev_channel *channel)
{
    uint64_t one = 1;
    if (atomic_exchange(&channel->is_signalled, 1))
        return 0;
    ssize_t n = write(channel->fd, &one, sizeof one);
    (void)n;
    return 1;
}

/* Makes fd unreadable. Whoever put a completion there before finds is_signalled set and does not write: so look at the
 * ring afterwards. */
static void signal_clear(struct kvdev_channel *channel)
{
    uint64_t count;
    if (!atomic_load(&channel->is_signalled))
        return;
    ssize_t n = read(channel->fd, &count, sizeof count);
    (void)n;
    atomic_exchange(&channel->is_signalled, 0);
}

static void channel_put(struct kvdev_poller *p, struct kvdev_channel *channel, const struct kvdev_io_done *done)
{
    uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_relaxed);
    channel->done[tail & channel->mask] = *done; /* there is room: outstanding is at most the capacity */
    atomic_store_explicit(&channel->tail, tail + 1, memory_order_release);
    if (channel->is_touched)
        return;
    channel->is_touched = 1;
    channel->next_touched = p->touched;
    p->touched = channel;
}

/* Tells the channels that got something. */
static void touched_signal(struct kvdev_poller *p)
{
    while (p->touched) {
        struct kvdev_channel *channel = p->touched;
        p->touched = channel->next_touched;
        channel->is_touched = 0;
        /* With the one of a waiter that says what it wants and looks at the ring then. */
        atomic_thread_fence(memory_order_seq_cst);
        if (ready_count(channel) >= atomic_load(&channel->want))
            stat_add(&p->wakes, (uint64_t)signal_raise(channel));
    }
}

static int deliver(struct kvdev_poller *p)
{
    struct kvdev_queue *q = p->queue;
    uint32_t count = 0;
    uint32_t index;
    while ((index = list_pop(q, &q->done)) != NODE_NONE) {
        struct kvdev_io_done done = node_report(&q->nodes[index]);
        channel_put(p, p->channels[index], &done);
        node_give(q, index);
        count++;
    }
    q->stats.done_count -= count;
    q->stats.completed += count;
    touched_signal(p);
    return count != 0;
}

static void refuse(struct kvdev_poller *p, const struct cell *cell, int error, uint32_t reason, uint64_t now)
{
    struct kvdev_io_done done = { .tag = cell->io.tag,
                                  .submit_ns = now,
                                  .complete_ns = now,
                                  .error = error,
                                  .qpair_index = QPAIR_NONE,
                                  .device_index = cell->io.device_index,
                                  .result = reason };
    channel_put(p, cell->channel, &done);
}

/* Moves commands from the ring to the queue, as many as it has room for; 1 if there were any. */
static int intake(struct kvdev_poller *p, uint64_t now)
{
    struct kvdev_queue *q = p->queue;
    const struct cell *cell;
    uint32_t count = 0;
    while (count < INTAKE_MAX && q->free_count && (cell = ring_peek(p))) {
        uint32_t reason = queue_io_refusal(q, &cell->io);
        if (reason)
            refuse(p, cell, -EINVAL, reason, now);
        else
            p->channels[node_accept(q, &cell->io, now)] = cell->channel;
        ring_pop(p);
        count++;
    }
    stat_add(&p->taken, count);
    return count != 0;
}

/* ---- the thread ---- */

/* Gives up what is outstanding, in the ring and in the queue. */
static void give_up(struct kvdev_poller *p, uint64_t now)
{
    const struct cell *cell;
    while ((cell = ring_peek(p))) {
        refuse(p, cell, -ECANCELED, 0, now);
        ring_pop(p);
    }
    queue_give_up(p->queue);
    deliver(p);
}

/* Stopping, and nothing is left: no submitter is inside, so that nothing can come any more either. */
static int is_over(const struct kvdev_poller *p)
{
    return !atomic_load(&p->submitters) && !ring_peek(p) && !outstanding_below(p->queue) &&
           !p->queue->stats.done_count;
}

static void doze(struct kvdev_poller *p, uint64_t now, uint64_t until_ns)
{
    atomic_store_explicit(&p->is_asleep, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (!ring_peek(p) || !p->queue->free_count) {
        uint64_t watch_ns = outstanding_below(p->queue) ? now + WATCH_NS : UINT64_MAX;
        queue_sleep_until(p->queue, now, watch_ns < until_ns ? watch_ns : until_ns);
        stat_add(&p->sleeps, 1);
    }
    atomic_store_explicit(&p->is_asleep, 0, memory_order_relaxed);
}

static void run(struct kvdev_poller *p)
{
    struct kvdev_queue *q = p->queue;
    uint64_t now = now_ns();
    uint64_t moved_ns = now;
    uint32_t pauses = PAUSES_MIN;
    for (;;) {
        uint64_t next = UINT64_MAX;
        if (queue_is_wanted(q)) {
            queue_step_aside(q, 1);
            now = now_ns();
        }
        int has_moved = intake(p, now);
        has_moved |= queue_turn(q, now, &next);
        has_moved |= deliver(p);
        stat_add(&p->turns, 1);
        now = now_ns();
        uint64_t stop_ns = atomic_load(&p->stop_ns);
        if (stop_ns && is_over(p))
            return;
        if (stop_ns && now >= stop_ns)
            give_up(p, now);
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
        if (stop_ns && next > now + LEAVING_NS)
            next = now + LEAVING_NS;
        doze(p, now, stop_ns && stop_ns < next ? stop_ns : next);
        now = now_ns();
    }
}

static void *poller_main(void *arg)
{
    struct kvdev_poller *p = arg;
    struct kvdev_queue *q = p->queue;
    pthread_mutex_lock(&q->lock);
    run(p);
    pthread_mutex_unlock(&q->lock);
    /* Not while a guest is inside: it would share the data path with whoever enters next. */
    pthread_mutex_lock(&q->guest_lock);
    pthread_mutex_lock(&q->lock);
    atomic_store(&q->is_polled, 0);
    queue_leave(q);
    pthread_mutex_unlock(&q->guest_lock);
    return NULL;
}

static int thread_start(struct kvdev_poller *p)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = -pthread_attr_init(&attributes);
    if (error)
        return error;
    if (p->options.core >= 0) {
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET((size_t)p->options.core, &cores);
        error = -pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores);
    }
    /* Signals are for the threads that have a use for them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!error)
        error = -pthread_create(&p->thread, &attributes, poller_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* ---- life ---- */

static void poller_put(struct kvdev_poller *p)
{
    if (atomic_fetch_sub(&p->holders, 1) != 1)
        return;
    pthread_mutex_destroy(&p->life_lock);
    free(p->cells);
    free(p->channels);
    free(p);
}

/* Takes the queue over for the thread. */
static int queue_take_over(struct kvdev_queue *q)
{
    if (queue_enter(q))
        return -EBUSY;
    if (outstanding_below(q) || q->stats.done_count) {
        queue_leave(q);
        return -EBUSY;
    }
    atomic_store(&q->is_polled, 1);
    pthread_mutex_unlock(&q->lock); /* busy stays set: the thread goes on with it */
    return 0;
}

int kvdev_poller_create(struct kvdev_queue *queue, const struct kvdev_poller_options *options,
                        struct kvdev_poller **ret)
{
    uint32_t size = options->ring_size;
    *ret = NULL;
    if (size < 2 || size > KVDEV_POLLER_RING_MAX || size & (size - 1) || options->core >= CPU_SETSIZE)
        return -EINVAL;
    struct kvdev_poller *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p)
        return -ENOMEM;
    memset(p, 0, sizeof *p);
    p->queue = queue;
    p->pid = getpid();
    p->options = *options;
    p->cells = calloc(size, sizeof *p->cells);
    p->channels = calloc(queue->options.capacity, sizeof *p->channels);
    atomic_init(&p->holders, 1);
    pthread_mutex_init(&p->life_lock, NULL);
    int error = p->cells && p->channels ? queue_take_over(queue) : -ENOMEM;
    if (!error) {
        error = thread_start(p);
        if (error) {
            pthread_mutex_lock(&queue->lock);
            atomic_store(&queue->is_polled, 0);
            queue_leave(queue);
        }
    }
    if (error) {
        poller_put(p);
        return error;
    }
    p->is_running = 1;
    *ret = p;
    return 0;
}

int kvdev_poller_stop(struct kvdev_poller *p, uint64_t timeout_ns)
{
    if (getpid() != p->pid)
        return -ECHILD;
    uint64_t stop_ns = add_ns(now_ns(), timeout_ns);
    pthread_mutex_lock(&p->life_lock);
    if (p->is_running) {
        atomic_store(&p->stop_ns, stop_ns);
        queue_wake(p->queue);
        pthread_join(p->thread, NULL);
        p->is_running = 0;
    }
    pthread_mutex_unlock(&p->life_lock);
    return 0;
}

int kvdev_poller_abandon(struct kvdev_poller *p)
{
    if (getpid() != p->pid)
        return -ECHILD;
    pthread_mutex_lock(&p->life_lock);
    /* A stopped one has completed everything. */
    int error = p->is_running ? queue_visit(p->queue) : 0;
    if (!error && p->is_running) {
        give_up(p, now_ns());
        queue_visit_end(p->queue);
    }
    pthread_mutex_unlock(&p->life_lock);
    return error;
}

void kvdev_poller_destroy(struct kvdev_poller *p)
{
    if (!p || kvdev_poller_stop(p, 0))
        return;
    poller_put(p);
}

void kvdev_poller_stats_read(const struct kvdev_poller *p, struct kvdev_poller_stats *ret)
{
    *ret = (struct kvdev_poller_stats){ .turns = atomic_load(&p->turns),
                                        .sleeps = atomic_load(&p->sleeps),
                                        .taken = atomic_load(&p->taken),
                                        .wakes = atomic_load(&p->wakes) };
}

/* ---- channels ---- */

static uint32_t power_of_two_at_least(uint32_t n)
{
    uint32_t p = 1;
    while (p < n)
        p <<= 1;
    return p;
}

int kvdev_channel_create(struct kvdev_poller *p, uint32_t capacity, struct kvdev_channel **ret)
{
    *ret = NULL;
    if (!capacity || capacity > p->options.ring_size)
        return -EINVAL;
    struct kvdev_channel *channel = aligned_alloc(64, (sizeof *channel + 63) & ~(size_t)63);
    if (!channel)
        return -ENOMEM;
    memset(channel, 0, sizeof *channel);
    uint32_t size = power_of_two_at_least(capacity);
    channel->poller = p;
    channel->capacity = capacity;
    channel->mask = size - 1;
    atomic_init(&channel->want, 1);
    channel->done = calloc(size, sizeof *channel->done);
    channel->fd = channel->done ? eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) : -1;
    if (channel->fd < 0) {
        int error = channel->done ? -errno : -ENOMEM;
        free(channel->done);
        free(channel);
        return error;
    }
    atomic_fetch_add(&p->holders, 1);
    *ret = channel;
    return 0;
}

int kvdev_channel_submit(struct kvdev_channel *channel, const struct kvdev_io *ios, size_t n)
{
    struct kvdev_poller *p = channel->poller;
    int error = 0;
    if (getpid() != p->pid)
        return -ECHILD;
    /* Counted first, looked at second: whoever closes or stops does it the other way round. */
    atomic_fetch_add(&p->submitters, 1);
    uint64_t before = atomic_fetch_add(&channel->outstanding, n);
    if (atomic_load(&channel->is_closed) || atomic_load(&p->stop_ns))
        error = -ESHUTDOWN;
    else if (before + n > channel->capacity)
        error = -EAGAIN;
    else
        error = ring_push(p, channel, ios, n);
    if (error)
        atomic_fetch_sub(&channel->outstanding, n);
    else
        wake(p);
    atomic_fetch_sub(&p->submitters, 1);
    return error;
}

/* What is there. */
static size_t take(struct kvdev_channel *channel, struct kvdev_io_done *done, size_t max)
{
    uint64_t head = atomic_load_explicit(&channel->head, memory_order_relaxed);
    size_t count = 0;
    for (int has_looked_again = 0;; has_looked_again = 1) {
        uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_acquire);
        while (count < max && head != tail)
            done[count++] = channel->done[head++ & channel->mask];
        atomic_store_explicit(&channel->head, head, memory_order_release);
        if (head != tail || has_looked_again)
            break;
        signal_clear(channel);
    }
    atomic_fetch_sub(&channel->outstanding, count);
    if (ready_count(channel))
        signal_raise(channel);
    return count;
}

static void wait_for(struct kvdev_channel *channel, size_t min_count, uint64_t timeout_ns)
{
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    for (;;) {
        uint64_t outstanding = atomic_load(&channel->outstanding);
        uint64_t want = min_count < outstanding ? min_count : outstanding;
        uint64_t now = now_ns();
        atomic_store(&channel->want, want ? want : 1);
        atomic_thread_fence(memory_order_seq_cst); /* with the one in touched_signal */
        if (ready_count(channel) >= want || now >= deadline)
            break;
        uint64_t left = deadline - now < WAIT_SLICE_NS ? deadline - now : WAIT_SLICE_NS;
        struct pollfd pfd = { .fd = channel->fd, .events = POLLIN };
        struct timespec ts = { .tv_sec = 0, .tv_nsec = (long)left };
        int n = ppoll(&pfd, 1, &ts, NULL);
        if (n < 0)
            break;
        if (n > 0)
            signal_clear(channel);
    }
    atomic_store(&channel->want, 1); /* and take, which comes next, looks at what is there */
}

size_t kvdev_channel_poll(struct kvdev_channel *channel, struct kvdev_io_done *done, size_t max, size_t min_count,
                          uint64_t timeout_ns)
{
    size_t want = min_count < max ? min_count : max;
    if (want && ready_count(channel) < want)
        wait_for(channel, want, timeout_ns);
    return take(channel, done, max);
}

int kvdev_channel_fd(const struct kvdev_channel *channel)
{
    return channel->fd;
}

size_t kvdev_channel_outstanding(const struct kvdev_channel *channel)
{
    return atomic_load(&channel->outstanding);
}

void kvdev_channel_close(struct kvdev_channel *channel)
{
    atomic_store(&channel->is_closed, 1);
}

void kvdev_channel_destroy(struct kvdev_channel *channel)
{
    struct kvdev_poller *p = channel ? channel->poller : NULL;
    if (!p || getpid() != p->pid)
        return;
    kvdev_channel_close(channel);
    if (atomic_load(&channel->outstanding) != ready_count(channel))
        kvdev_poller_abandon(p);
    /* The thread may still be telling this channel of its last completion: have it stand aside once. */
    pthread_mutex_lock(&p->life_lock);
    if (p->is_running) {
        queue_intrude(p->queue);
        queue_retire(p->queue);
    }
    pthread_mutex_unlock(&p->life_lock);
    close(channel->fd);
    free(channel->done);
    free(channel);
    poller_put(p);
}

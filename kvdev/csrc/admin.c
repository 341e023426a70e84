#include "admin.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull
#define OPC_AER 0x0c
#define OPC_KEEP_ALIVE 0x18
/* Cookies of the thread's own commands; a caller's is the address of its struct call, never so small. */
#define COOKIE_KEEP_ALIVE 1u
#define COOKIE_AER 2u
#define ROOM_RESERVED 1u   /* a slot that callers leave free, so that Keep Alive never has to wait */
#define WAIT_STEP_NS (60 * NS_PER_S)

struct call {
    int is_done;
    int error;
    uint8_t cqe[KVDEV_CQE_BYTES];
};

struct handle {
    struct kvdev_admin *admin;
    struct kvdev_qpair *qp;      /* NULL: the entry is free */
    struct kvdev_admin_info info;
    uint64_t keep_alive_due_ns;
    uint32_t aer_target;
    uint32_t waiters;            /* threads inside execute or event_take */
    uint32_t event_head;
    uint32_t event_count;
    uint32_t events[KVDEV_ADMIN_EVENTS_MAX];
    uint64_t looked_ns;          /* traffic based: when the last look was */
    int is_traffic_based;
    int is_keep_alive_out;
    int is_keep_alive_refused;
    int is_releasing;
    pthread_cond_t changed;
};

struct kvdev_admin {
    pthread_mutex_t lock;        /* over everything, the queue pairs included; never held while waiting */
    pthread_t thread;
    pid_t pid;
    int wake_fd;
    int notice_fd;
    int is_stopping;
    uint32_t handle_count;       /* entries ever used */
    struct handle handles[KVDEV_ADMIN_QPAIRS_MAX];
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static uint64_t add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static void wake(struct kvdev_admin *admin)
{
    uint64_t one = 1;
    /* Full means that a wake-up is pending already. */
    ssize_t n = write(admin->wake_fd, &one, sizeof one);
    (void)n;
}

static void notice(const struct kvdev_admin *admin)
{
    uint64_t one = 1;
    if (admin->notice_fd >= 0) {
        ssize_t n = write(admin->notice_fd, &one, sizeof one);
        (void)n;
    }
}

/* Waits for a change of the handle, with the lock held; 1 when the deadline has passed. */
static int handle_wait(struct handle *handle, uint64_t deadline_ns)
{
    uint64_t now = now_ns();
    if (now >= deadline_ns)
        return 1;
    uint64_t until = deadline_ns - now > WAIT_STEP_NS ? now + WAIT_STEP_NS : deadline_ns;
    struct timespec ts = { .tv_sec = (time_t)(until / NS_PER_S), .tv_nsec = (long)(until % NS_PER_S) };
    pthread_cond_timedwait(&handle->changed, &handle->admin->lock, &ts);
    return 0;
}

/* ---- the thread's own commands ---- */

static int aer_start(struct handle *handle)
{
    uint8_t sqe[KVDEV_SQE_BYTES] = { OPC_AER };
    if (kvdev_qpair_room(handle->qp) <= ROOM_RESERVED)
        return -EAGAIN;
    int error = kvdev_qpair_start(handle->qp, sqe, NULL, 0, KVDEV_DIR_NONE, COOKIE_AER, 0);
    if (!error)
        handle->info.aer_outstanding++;
    return error;
}

static void on_event(struct handle *handle, int error, const uint8_t *cqe)
{
    handle->info.aer_outstanding--;
    if (error || (kvdev_load_le16(cqe + 14) >> 1 & 0x7ff))
        return; /* refused (limit exceeded, aborted): not asked for again */
    if (handle->event_count == KVDEV_ADMIN_EVENTS_MAX) {
        handle->info.events_dropped++;
    } else {
        uint32_t tail = (handle->event_head + handle->event_count++) % KVDEV_ADMIN_EVENTS_MAX;
        handle->events[tail] = kvdev_load_le32(cqe);
    }
    notice(handle->admin);
    if (handle->info.aer_outstanding < handle->aer_target)
        aer_start(handle);
}

static void on_qpair_done(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns,
                          uint64_t at_ns)
{
    struct handle *handle = owner;
    (void)send_ns;
    if (cookie == COOKIE_KEEP_ALIVE) {
        handle->is_keep_alive_out = 0;
        if (!error) {
            handle->info.keep_alives_done++;
            handle->info.keep_alive_last_ns = at_ns;
            if (kvdev_load_le16(cqe + 14) >> 1 & 0x7ff) {
                /* A controller that does not take it will let the association expire. */
                handle->info.keep_alive_errors++;
                handle->is_keep_alive_refused = 1;
            }
        }
    } else if (cookie == COOKIE_AER) {
        on_event(handle, error, cqe);
    } else {
        struct call *call = (struct call *)(uintptr_t)cookie;
        call->is_done = 1;
        call->error = error == -EIO ? 0 : error; /* -EIO: the verdict is in the CQE's status */
        memcpy(call->cqe, cqe, sizeof call->cqe);
    }
    pthread_cond_broadcast(&handle->changed);
}

/* Base 3.9, TCP 3.4: a Keep Alive every KATO / 2; one not answered within KATO is a lost connection. Traffic based,
 * what was sent and answered since the last look makes it needless. */
static void keep_alive(struct handle *handle, uint64_t now)
{
    uint64_t kato_ns = (uint64_t)handle->info.keep_alive_ms * NS_PER_MS;
    if (handle->is_keep_alive_refused) {
        kvdev_qpair_kill(handle->qp, KVDEV_FAULT_TIMEOUT, -ETIMEDOUT, "keep alive, refused");
        return;
    }
    if (now < handle->keep_alive_due_ns)
        return;
    handle->keep_alive_due_ns = now + kato_ns / (handle->is_traffic_based ? 4 : 2);
    if (handle->is_keep_alive_out)
        return; /* its own time limit decides */
    uint64_t looked_ns = handle->looked_ns;
    handle->looked_ns = now;
    if (handle->is_traffic_based && kvdev_qpair_traffic_ns(handle->qp) > looked_ns)
        return;
    uint8_t sqe[KVDEV_SQE_BYTES] = { OPC_KEEP_ALIVE };
    if (!kvdev_qpair_start(handle->qp, sqe, NULL, 0, KVDEV_DIR_NONE, COOKIE_KEEP_ALIVE, now + kato_ns)) {
        handle->is_keep_alive_out = 1;
        handle->info.keep_alives_sent++;
        handle->info.keep_alive_sent_ns = now;
    }
}

static void note_loss(struct handle *handle)
{
    if (kvdev_qpair_is_ready(handle->qp) || handle->info.lost_ns)
        return;
    struct kvdev_qpair_fault fault;
    kvdev_qpair_fault_read(handle->qp, &fault);
    handle->info.lost_ns = fault.at_ns ? fault.at_ns : now_ns();
    notice(handle->admin);
    pthread_cond_broadcast(&handle->changed);
}

/* One turn of one queue pair; returns when it wants the next at the latest. */
static uint64_t handle_turn(struct handle *handle, uint64_t now)
{
    struct kvdev_qpair *qp = handle->qp;
    uint64_t next = UINT64_MAX;
    kvdev_qpair_receive(qp);
    if (kvdev_qpair_is_ready(qp) && handle->info.keep_alive_ms) {
        keep_alive(handle, now);
        next = handle->keep_alive_due_ns;
    }
    if (kvdev_qpair_has_unsent(qp))
        kvdev_qpair_send(qp, now);
    uint64_t deadline = kvdev_qpair_deadlines(qp, now);
    note_loss(handle);
    return deadline < next ? deadline : next;
}

static void *thread_main(void *argument)
{
    struct kvdev_admin *admin = argument;
    struct pollfd fds[KVDEV_ADMIN_QPAIRS_MAX + 1];
    pthread_mutex_lock(&admin->lock);
    while (!admin->is_stopping) {
        uint64_t now = now_ns();
        uint64_t next = UINT64_MAX;
        nfds_t n = 0;
        fds[n++] = (struct pollfd){ .fd = admin->wake_fd, .events = POLLIN };
        for (uint32_t i = 0; i < admin->handle_count; i++) {
            struct handle *handle = &admin->handles[i];
            if (!handle->qp)
                continue;
            uint64_t due = handle_turn(handle, now);
            if (due < next)
                next = due;
            short events = 0;
            int fd = kvdev_qpair_wait_fd(handle->qp, &events);
            if (fd >= 0)
                fds[n++] = (struct pollfd){ .fd = fd, .events = events };
        }
        pthread_mutex_unlock(&admin->lock);
        now = now_ns();
        uint64_t left = next > now ? next - now : 0;
        if (left > WAIT_STEP_NS)
            left = WAIT_STEP_NS;
        struct timespec ts = { .tv_sec = (time_t)(left / NS_PER_S), .tv_nsec = (long)(left % NS_PER_S) };
        if (ppoll(fds, n, &ts, NULL) > 0 && fds[0].revents) {
            uint64_t wakes;
            ssize_t got = read(admin->wake_fd, &wakes, sizeof wakes);
            (void)got;
        }
        pthread_mutex_lock(&admin->lock);
    }
    pthread_mutex_unlock(&admin->lock);
    return NULL;
}

/* ---- life ---- */

static int locks_init(struct kvdev_admin *admin)
{
    pthread_condattr_t attr;
    int error = pthread_mutex_init(&admin->lock, NULL);
    if (error)
        return -error;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    for (uint32_t i = 0; i < KVDEV_ADMIN_QPAIRS_MAX; i++) {
        admin->handles[i].admin = admin;
        pthread_cond_init(&admin->handles[i].changed, &attr);
    }
    pthread_condattr_destroy(&attr);
    return 0;
}

int kvdev_admin_create(struct kvdev_admin **ret)
{
    *ret = NULL;
    struct kvdev_admin *admin = calloc(1, sizeof *admin);
    if (!admin)
        return -ENOMEM;
    int error = locks_init(admin);
    if (error) {
        free(admin);
        return error;
    }
    admin->pid = getpid();
    admin->notice_fd = -1;
    admin->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (admin->wake_fd < 0) {
        error = -errno;
        free(admin);
        return error;
    }
    /* Signals are for the threads that know what to do with them. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&admin->thread, NULL, thread_main, admin);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        close(admin->wake_fd);
        free(admin);
        return -error;
    }
    pthread_setname_np(admin->thread, "kvdev-admin");
    *ret = admin;
    return 0;
}

static int is_foreign(const struct kvdev_admin *admin)
{
    return admin->pid != getpid();
}

static struct handle *handle_of(struct kvdev_admin *admin, uint32_t index)
{
    if (index >= admin->handle_count || !admin->handles[index].qp || admin->handles[index].is_releasing)
        return NULL;
    return &admin->handles[index];
}

/* With the lock held; waits for callers to leave, which the death of the queue pair makes prompt. */
static void handle_release(struct handle *handle)
{
    handle->is_releasing = 1;
    uint32_t own = handle->info.aer_outstanding + (handle->is_keep_alive_out ? 1u : 0u);
    if (kvdev_qpair_outstanding(handle->qp) > own)
        kvdev_qpair_kill(handle->qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "given up");
    pthread_cond_broadcast(&handle->changed);
    while (handle->waiters)
        pthread_cond_wait(&handle->changed, &handle->admin->lock);
    kvdev_qpair_owner_set(handle->qp, NULL, NULL);
    kvdev_qpair_destroy(handle->qp);
    handle->qp = NULL;
    handle->is_releasing = 0;
    wake(handle->admin);
}

void kvdev_admin_destroy(struct kvdev_admin *admin)
{
    if (!admin)
        return;
    if (is_foreign(admin)) {
        /* A fork: the thread is not here and the lock may be held for ever. The memory is let go with the process. */
        close(admin->wake_fd);
        return;
    }
    pthread_mutex_lock(&admin->lock);
    for (uint32_t i = 0; i < admin->handle_count; i++)
        if (handle_of(admin, i))
            handle_release(&admin->handles[i]);
    admin->is_stopping = 1;
    pthread_mutex_unlock(&admin->lock);
    wake(admin);
    pthread_join(admin->thread, NULL);
    for (uint32_t i = 0; i < KVDEV_ADMIN_QPAIRS_MAX; i++)
        pthread_cond_destroy(&admin->handles[i].changed);
    pthread_mutex_destroy(&admin->lock);
    close(admin->wake_fd);
    free(admin);
}

int kvdev_admin_adopt(struct kvdev_admin *admin, struct kvdev_qpair *qp, uint32_t keep_alive_ms, uint32_t *ret)
{
    if (is_foreign(admin))
        return -ECHILD;
    int error = -ENOSPC;
    pthread_mutex_lock(&admin->lock);
    for (uint32_t i = 0; i < KVDEV_ADMIN_QPAIRS_MAX; i++) {
        struct handle *handle = &admin->handles[i];
        if (handle->qp)
            continue;
        memset(&handle->info, 0, sizeof handle->info);
        handle->info.keep_alive_ms = keep_alive_ms;
        handle->info.keep_alive_sent_ns = handle->looked_ns = now_ns();
        handle->keep_alive_due_ns = handle->looked_ns + (uint64_t)keep_alive_ms * NS_PER_MS / 2;
        handle->is_traffic_based = handle->is_keep_alive_refused = 0;
        handle->aer_target = handle->event_head = handle->event_count = 0;
        handle->is_keep_alive_out = 0;
        handle->qp = qp;
        kvdev_qpair_hold(qp);
        kvdev_qpair_owner_set(qp, on_qpair_done, handle);
        if (i >= admin->handle_count)
            admin->handle_count = i + 1;
        *ret = i;
        error = 0;
        break;
    }
    pthread_mutex_unlock(&admin->lock);
    wake(admin);
    return error;
}

int kvdev_admin_release(struct kvdev_admin *admin, uint32_t index)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle)
        handle_release(handle);
    pthread_mutex_unlock(&admin->lock);
    return handle ? 0 : -EINVAL;
}

int kvdev_admin_keep_alive_set(struct kvdev_admin *admin, uint32_t index, uint32_t keep_alive_ms)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle) {
        handle->info.keep_alive_ms = keep_alive_ms;
        handle->keep_alive_due_ns = now_ns() + (uint64_t)keep_alive_ms * NS_PER_MS / 2;
    }
    pthread_mutex_unlock(&admin->lock);
    wake(admin);
    return handle ? 0 : -EINVAL;
}

int kvdev_admin_traffic_based_set(struct kvdev_admin *admin, uint32_t index, int is_traffic_based)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle)
        handle->is_traffic_based = is_traffic_based;
    pthread_mutex_unlock(&admin->lock);
    return handle ? 0 : -EINVAL;
}

int kvdev_admin_notice_set(struct kvdev_admin *admin, int fd)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    admin->notice_fd = fd;
    pthread_mutex_unlock(&admin->lock);
    return 0;
}

/* ---- commands of callers ---- */

static int execute(struct handle *handle, const uint8_t *sqe, void *data, uint32_t len, uint32_t direction,
                   uint64_t deadline_ns, struct call *call)
{
    while (kvdev_qpair_room(handle->qp) <= ROOM_RESERVED) {
        if (handle->is_releasing)
            return -ECANCELED;
        if (!kvdev_qpair_is_ready(handle->qp))
            return -ENOTCONN;
        if (handle_wait(handle, deadline_ns))
            return -ETIMEDOUT; /* never sent: the connection is not to blame */
    }
    int error = kvdev_qpair_start(handle->qp, sqe, data, len, direction, (uintptr_t)call, deadline_ns);
    if (error)
        return error;
    kvdev_qpair_send(handle->qp, now_ns());
    wake(handle->admin);
    while (!call->is_done) {
        /* Over the deadline whoever comes first kills the queue pair, which completes the call: its memory
         * is then out of reach of the thread. */
        if (handle_wait(handle, deadline_ns))
            kvdev_qpair_deadlines(handle->qp, now_ns());
    }
    return handle->is_releasing && call->error ? -ECANCELED : call->error;
}

int kvdev_admin_execute(struct kvdev_admin *admin, uint32_t index, const uint8_t *sqe, void *data, uint32_t len,
                        uint32_t direction, uint64_t timeout_ns, uint8_t *cqe)
{
    if (is_foreign(admin))
        return -ECHILD;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    struct call call = { 0 };
    int error = -ENOTCONN; /* released meanwhile by whoever gave the association up */
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle) {
        handle->waiters++;
        error = execute(handle, sqe, data, len, direction, deadline, &call);
        handle->waiters--;
        note_loss(handle);
        pthread_cond_broadcast(&handle->changed);
    }
    pthread_mutex_unlock(&admin->lock);
    if (!error)
        memcpy(cqe, call.cqe, sizeof call.cqe);
    return error;
}

int kvdev_admin_events_arm(struct kvdev_admin *admin, uint32_t index, uint32_t count)
{
    if (is_foreign(admin))
        return -ECHILD;
    if (!count || count > KVDEV_ADMIN_AER_MAX)
        return -EINVAL;
    int error = -EINVAL;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle) {
        error = 0;
        handle->aer_target = count;
        while (!error && handle->info.aer_outstanding < count)
            error = aer_start(handle);
    }
    pthread_mutex_unlock(&admin->lock);
    wake(admin);
    return error;
}

int kvdev_admin_event_take(struct kvdev_admin *admin, uint32_t index, uint64_t timeout_ns, uint32_t *ret)
{
    if (is_foreign(admin))
        return -ECHILD;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    int error = -EINVAL;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle) {
        handle->waiters++;
        error = 0;
        while (!handle->event_count && !error) {
            if (handle->is_releasing)
                error = -ECANCELED;
            else if (!kvdev_qpair_is_ready(handle->qp))
                error = -ENOTCONN;
            else if (handle_wait(handle, deadline))
                error = -EAGAIN;
        }
        if (!error) {
            *ret = handle->events[handle->event_head];
            handle->event_head = (handle->event_head + 1) % KVDEV_ADMIN_EVENTS_MAX;
            handle->event_count--;
        }
        handle->waiters--;
        pthread_cond_broadcast(&handle->changed);
    }
    pthread_mutex_unlock(&admin->lock);
    return error;
}

/* ---- reading state ---- */

int kvdev_admin_info_read(struct kvdev_admin *admin, uint32_t index, struct kvdev_admin_info *ret)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle) {
        note_loss(handle);
        *ret = handle->info;
        ret->is_alive = (uint32_t)kvdev_qpair_is_ready(handle->qp);
        ret->events_pending = handle->event_count;
    }
    pthread_mutex_unlock(&admin->lock);
    return handle ? 0 : -EINVAL;
}

int kvdev_admin_qpair_info_read(struct kvdev_admin *admin, uint32_t index, struct kvdev_qpair_info *ret)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle)
        kvdev_qpair_info_read(handle->qp, ret);
    pthread_mutex_unlock(&admin->lock);
    return handle ? 0 : -EINVAL;
}

int kvdev_admin_fault_read(struct kvdev_admin *admin, uint32_t index, struct kvdev_qpair_fault *ret)
{
    if (is_foreign(admin))
        return -ECHILD;
    pthread_mutex_lock(&admin->lock);
    struct handle *handle = handle_of(admin, index);
    if (handle)
        kvdev_qpair_fault_read(handle->qp, ret);
    pthread_mutex_unlock(&admin->lock);
    return handle ? 0 : -EINVAL;
}

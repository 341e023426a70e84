/* The target's tables, its control queue and its threads' start and end. */
#include "target.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "target_int.h"

#define POLLERS_MAX 64u
#define DRAIN_LOOK_NS 2000000u
#define WORKERS_MAX 64u
#define EPOLL_TAG_EVENT ((uint64_t)1)
#define EPOLL_TAG_LISTENER ((uint64_t)2)

static int cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int err = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return -err;
}

static struct timespec deadline_after(uint64_t timeout_ns)
{
    uint64_t at = target_now_ns() + timeout_ns;
    return (struct timespec){ .tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u) };
}

/* ---- between threads ---- */

void target_poller_kick(struct poller *poller)
{
    uint64_t one = 1;
    ssize_t put = write(poller->event_fd, &one, sizeof(one));
    (void)put; /* full: a kick is pending anyway */
}

void target_scan_all(struct kvdev_target *target)
{
    for (uint32_t i = 0; target->pollers && i < target->opts.poller_count; i++) {
        atomic_store(&target->pollers[i].scan, 1);
        target_poller_kick(&target->pollers[i]);
    }
}

void target_inbox_push(struct poller *poller, struct request *request)
{
    pthread_mutex_lock(&poller->inbox_lock);
    list_push(&poller->inbox, request);
    int was_pending = (int)atomic_exchange(&poller->inbox_pending, 1);
    pthread_mutex_unlock(&poller->inbox_lock);
    if (!was_pending)
        target_poller_kick(poller);
}

void target_work_push(struct kvdev_target *target, struct request *request)
{
    pthread_mutex_lock(&target->work_lock);
    list_push(&target->work, request);
    pthread_cond_signal(&target->work_ready);
    pthread_mutex_unlock(&target->work_lock);
}

void target_held_push(struct kvdev_target *target, struct request *request)
{
    pthread_mutex_lock(&target->work_lock);
    list_push(&target->held, request);
    target->held_due_ns = 0;
    pthread_cond_signal(&target->work_ready);
    pthread_mutex_unlock(&target->work_lock);
}

void kvdev_target_release(struct kvdev_target *target)
{
    pthread_mutex_lock(&target->work_lock);
    target->held_due_ns = 0;
    pthread_cond_broadcast(&target->work_ready);
    pthread_mutex_unlock(&target->work_lock);
}

void target_control_push(struct kvdev_target *target, struct request *request)
{
    pthread_mutex_lock(&target->control_lock);
    request->control_sequence = ++target->control_sequence;
    list_push(&target->control, request);
    pthread_cond_signal(&target->control_ready);
    pthread_mutex_unlock(&target->control_lock);
}

void target_control_push_closed(struct kvdev_target *target, struct connection *connection)
{
    pthread_mutex_lock(&target->control_lock);
    connection->control_sequence = ++target->control_sequence;
    connection->next_event = NULL;
    if (target->control_closed_last)
        target->control_closed_last->next_event = connection;
    else
        target->control_closed_first = connection;
    target->control_closed_last = connection;
    pthread_cond_signal(&target->control_ready);
    pthread_mutex_unlock(&target->control_lock);
}

void target_namespace_put(struct kvdev_target *target, struct target_namespace *ns)
{
    if (atomic_fetch_sub(&ns->outstanding, 1) == 1 && !atomic_load(&ns->bdev)) {
        pthread_mutex_lock(&target->lock);
        pthread_cond_broadcast(&target->changed);
        pthread_mutex_unlock(&target->lock);
    }
}

/* Whether a held request is to be held no longer because nothing will come of it. */
static int is_hopeless(struct kvdev_target *target, struct request *request)
{
    return atomic_load(&target->stopping) || !atomic_load(&request->ns->bdev) ||
           atomic_load(&request->connection->is_closed);
}

/* A held request whose time has come; else held_due_ns says when to look again. Under work_lock. */
static struct request *held_take(struct kvdev_target *target)
{
    uint64_t now = target_now_ns();
    if (!target->held.first || target->held_due_ns > now)
        return NULL;
    uint64_t due = UINT64_MAX;
    struct request *before = NULL;
    for (struct request *request = target->held.first; request; before = request, request = request->next) {
        int is_over = is_hopeless(target, request);
        int is_pending = !kvdev_bdev_is_resumed(&request->hold);
        if (!is_over && (is_pending || request->hold.due_ns > now)) {
            uint64_t again = is_pending ? UINT64_MAX : request->hold.due_ns;
            due = again < due ? again : due;
            continue;
        }
        if (before)
            before->next = request->next;
        else
            target->held.first = request->next;
        if (target->held.last == request)
            target->held.last = before;
        request->next = NULL;
        request->error = is_over && is_pending ? -ECANCELED : 0;
        return request;
    }
    target->held_due_ns = due;
    return NULL;
}

static void work_wait(struct kvdev_target *target)
{
    if (!target->held.first || target->held_due_ns == UINT64_MAX) {
        pthread_cond_wait(&target->work_ready, &target->work_lock);
        return;
    }
    struct timespec at = {(time_t)(target->held_due_ns / 1000000000u), (long)(target->held_due_ns % 1000000000u)};
    pthread_cond_timedwait(&target->work_ready, &target->work_lock, &at);
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    struct kvdev_target *target = worker->target;
    pthread_mutex_lock(&target->work_lock);
    for (;;) {
        struct request *request = held_take(target);
        int is_cancelled = request && request->error;
        if (!request)
            request = list_pop(&target->work);
        if (!request && atomic_load(&target->stopping))
            break;
        if (!request) {
            work_wait(target);
            continue;
        }
        pthread_mutex_unlock(&target->work_lock);
        if (!is_cancelled)
            command_execute(request);
        target_inbox_push(request->connection->poller, request);
        pthread_mutex_lock(&target->work_lock);
    }
    pthread_mutex_unlock(&target->work_lock);
    return NULL;
}

/* ---- life ---- */

static int opts_check(const struct kvdev_target_opts *opts)
{
    if (opts->poller_count == 0 || opts->poller_count > POLLERS_MAX || opts->worker_count == 0 ||
        opts->worker_count > WORKERS_MAX || opts->connections_max == 0 || opts->subsystems_max == 0 ||
        opts->controllers_max == 0 || opts->controllers_max > 0xffff || opts->listeners_max == 0 || opts->buffer_count == 0)
        return -EINVAL;
    if (opts->buffer_bytes < KVDEV_TARGET_STAGE_BYTES || opts->buffer_bytes % 4096 != 0)
        return -EINVAL;
    return 0;
}

static int poller_init(struct kvdev_target *target, struct poller *poller, uint32_t index)
{
    poller->target = target;
    poller->index = index;
    poller->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    poller->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (poller->epoll_fd < 0 || poller->event_fd < 0)
        return -errno;
    struct epoll_event event = { .events = EPOLLIN, .data.u64 = EPOLL_TAG_EVENT };
    if (epoll_ctl(poller->epoll_fd, EPOLL_CTL_ADD, poller->event_fd, &event) != 0)
        return -errno;
    size_t bytes = (size_t)target->opts.buffer_count * target->opts.buffer_bytes;
    poller->buffers = calloc(target->opts.buffer_count, sizeof(*poller->buffers));
    uint8_t *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map != MAP_FAILED)
        poller->buffer_map = map;
    if (!poller->buffers || !poller->buffer_map)
        return -ENOMEM;
    for (uint32_t i = 0; i < target->opts.buffer_count; i++)
        poller->buffers[i] = map + (size_t)(target->opts.buffer_count - 1 - i) * target->opts.buffer_bytes;
    poller->buffer_count = target->opts.buffer_count;
    return 0;
}

static void poller_deinit(struct kvdev_target *target, struct poller *poller)
{
    while (poller->connections) {
        struct connection *connection = poller->connections;
        poller->connections = connection->next_of_poller;
        munmap(connection, connection->map_bytes);
    }
    while (poller->inbox_connections) {
        struct connection *connection = poller->inbox_connections;
        poller->inbox_connections = connection->next_event;
        close(connection->fd);
        munmap(connection, connection->map_bytes);
    }
    if (poller->epoll_fd >= 0)
        close(poller->epoll_fd);
    if (poller->event_fd >= 0)
        close(poller->event_fd);
    if (poller->buffer_map)
        munmap(poller->buffer_map, (size_t)target->opts.buffer_count * target->opts.buffer_bytes);
    free(poller->buffers);
    pthread_mutex_destroy(&poller->inbox_lock);
}

static void gates_free(struct target_controller *controller)
{
    free(controller->gates);
    free(controller->abort_ns);
    controller->gates = NULL;
    controller->abort_ns = NULL;
}

static int gates_make(struct target_controller *controller, uint32_t nsid_max)
{
    controller->gates = calloc(nsid_max, sizeof *controller->gates);
    controller->abort_ns = calloc(nsid_max, sizeof *controller->abort_ns);
    if (controller->gates && controller->abort_ns)
        return 0;
    gates_free(controller);
    return -ENOMEM;
}

static void namespaces_free(struct target_subsystem *subsystem)
{
    for (uint32_t i = 0; subsystem->namespaces && i < subsystem->nsid_max; i++)
        pthread_mutex_destroy(&subsystem->namespaces[i].fused_lock);
    free(subsystem->namespaces);
    memset(subsystem, 0, sizeof(*subsystem));
}

static void target_free(struct kvdev_target *target)
{
    for (uint32_t i = 0; target->pollers && i < target->opts.poller_count; i++)
        poller_deinit(target, &target->pollers[i]);
    for (uint32_t i = 0; target->listeners && i < target->opts.listeners_max; i++) {
        if (target->listeners[i].id)
            close(target->listeners[i].fd);
    }
    for (uint32_t i = 0; target->subsystems && i < target->opts.subsystems_max; i++)
        namespaces_free(&target->subsystems[i]);
    free(target->pollers);
    free(target->workers);
    free(target->listeners);
    free(target->subsystems);
    for (uint32_t i = 0; target->controllers && i < target->opts.controllers_max; i++)
        gates_free(&target->controllers[i]);
    free(target->controllers);
    free(target->connections);
    pthread_mutex_destroy(&target->lock);
    pthread_mutex_destroy(&target->work_lock);
    pthread_mutex_destroy(&target->control_lock);
    pthread_cond_destroy(&target->changed);
    pthread_cond_destroy(&target->work_ready);
    pthread_cond_destroy(&target->control_ready);
    free(target);
}

static int target_tables(struct kvdev_target *target)
{
    const struct kvdev_target_opts *opts = &target->opts;
    target->pollers = calloc(opts->poller_count, sizeof(*target->pollers));
    target->workers = calloc(opts->worker_count, sizeof(*target->workers));
    target->listeners = calloc(opts->listeners_max, sizeof(*target->listeners));
    target->subsystems = calloc(opts->subsystems_max, sizeof(*target->subsystems));
    target->controllers = calloc(opts->controllers_max, sizeof(*target->controllers));
    target->connections = calloc(opts->connections_max, sizeof(struct connection *));
    if (!target->pollers || !target->workers || !target->listeners || !target->subsystems || !target->controllers ||
        !target->connections)
        return -ENOMEM;
    for (uint32_t i = 0; i < opts->poller_count; i++) {
        target->pollers[i].epoll_fd = -1;
        target->pollers[i].event_fd = -1;
        pthread_mutex_init(&target->pollers[i].inbox_lock, NULL);
    }
    return 0;
}

static int threads_start(struct kvdev_target *target)
{
    for (uint32_t i = 0; i < target->opts.poller_count; i++) {
        int err = pthread_create(&target->pollers[i].thread, NULL, target_poller_main, &target->pollers[i]);
        if (err)
            return -err;
        target->pollers[i].is_started = 1;
    }
    for (uint32_t i = 0; i < target->opts.worker_count; i++) {
        target->workers[i].target = target;
        int err = pthread_create(&target->workers[i].thread, NULL, worker_main, &target->workers[i]);
        if (err)
            return -err;
        target->workers[i].is_started = 1;
    }
    return 0;
}

int kvdev_target_create(const struct kvdev_target_opts *opts, struct kvdev_target **ret)
{
    int err = opts_check(opts);
    if (err)
        return err;
    struct kvdev_target *target = calloc(1, sizeof(*target));
    if (!target)
        return -ENOMEM;
    target->opts = *opts;
    pthread_mutex_init(&target->lock, NULL);
    pthread_mutex_init(&target->work_lock, NULL);
    pthread_mutex_init(&target->control_lock, NULL);
    cond_init(&target->changed);
    cond_init(&target->work_ready);
    cond_init(&target->control_ready);
    target->transport = (struct kvdev_target_transport){
        .max_io_size = 131072 < opts->buffer_bytes ? 131072 : opts->buffer_bytes,
        .in_capsule_data_size = 4096,
        .maxh2cdata = 131072,
        .queue_depth_max = 128,
        .c2h_success = 1,
        .hdgst = 1,
        .ddgst = 1,
    };
    err = target_tables(target);
    for (uint32_t i = 0; !err && i < opts->poller_count; i++)
        err = poller_init(target, &target->pollers[i], i);
    if (!err)
        err = threads_start(target);
    if (err) {
        kvdev_target_destroy(target, 1000000000u);
        return err;
    }
    *ret = target;
    return 0;
}

int kvdev_target_destroy(struct kvdev_target *target, uint64_t timeout_ns)
{
    if (!target)
        return 0;
    /* pthread_clockjoin_np is not in every libc this builds on; the wall clock's jumps only shift the bound. */
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    uint64_t at = (uint64_t)deadline.tv_sec * 1000000000u + (uint64_t)deadline.tv_nsec + timeout_ns;
    deadline.tv_sec = (time_t)(at / 1000000000u);
    deadline.tv_nsec = (long)(at % 1000000000u);
    atomic_store(&target->stopping, 1);
    target_scan_all(target);
    kvdev_target_release(target);
    kvdev_target_control_wake(target);
    int err = 0;
    for (uint32_t i = 0; target->pollers && i < target->opts.poller_count; i++) {
        if (target->pollers[i].is_started && pthread_timedjoin_np(target->pollers[i].thread, NULL, &deadline) != 0)
            err = -ETIMEDOUT;
    }
    for (uint32_t i = 0; target->workers && i < target->opts.worker_count; i++) {
        if (target->workers[i].is_started && pthread_timedjoin_np(target->workers[i].thread, NULL, &deadline) != 0)
            err = -ETIMEDOUT;
    }
    if (err)
        return err;
    target_free(target);
    return 0;
}

int kvdev_target_set_transport(struct kvdev_target *target, const struct kvdev_target_transport *transport)
{
    if (transport->max_io_size < 4096 || transport->max_io_size > target->opts.buffer_bytes ||
        transport->max_io_size % 4096 != 0 || transport->in_capsule_data_size > KVDEV_TARGET_IN_CAPSULE_MAX ||
        transport->in_capsule_data_size % 16 != 0 || transport->maxh2cdata < KVDEV_PDU_MAXH2CDATA_MIN ||
        transport->maxh2cdata % 4 != 0 || transport->queue_depth_max < 2 || transport->queue_depth_max > 4096 ||
        transport->cpda > 31)
        return -EINVAL;
    pthread_mutex_lock(&target->lock);
    target->transport = *transport;
    pthread_mutex_unlock(&target->lock);
    return 0;
}

/* ---- listeners ---- */

int kvdev_target_listener_add(struct kvdev_target *target, int fd, struct kvdev_tls_context *tls, uint32_t *ret_id)
{
    int err = -ENOSPC;
    pthread_mutex_lock(&target->lock);
    for (uint32_t slot = 0; slot < target->opts.listeners_max; slot++) {
        struct listener *listener = &target->listeners[slot];
        if (listener->id)
            continue;
        *listener = (struct listener){ .fd = fd, .id = ++target->listener_id_next, .tls = tls };
        *ret_id = listener->id;
        struct epoll_event event = { .events = EPOLLIN, .data.u64 = EPOLL_TAG_LISTENER + 16 * (uint64_t)slot };
        err = epoll_ctl(target->pollers[0].epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -errno;
        if (err)
            memset(listener, 0, sizeof(*listener));
        break;
    }
    pthread_mutex_unlock(&target->lock);
    return err;
}

static struct listener *listener_find(struct kvdev_target *target, uint32_t id)
{
    for (uint32_t slot = 0; slot < target->opts.listeners_max; slot++) {
        if (target->listeners[slot].id == id)
            return &target->listeners[slot];
    }
    return NULL;
}

int kvdev_target_listener_remove(struct kvdev_target *target, uint32_t id, uint64_t timeout_ns)
{
    struct timespec deadline = deadline_after(timeout_ns);
    int err = 0;
    pthread_mutex_lock(&target->lock);
    struct listener *listener = id ? listener_find(target, id) : NULL;
    if (!listener) {
        pthread_mutex_unlock(&target->lock);
        return -ENOENT;
    }
    listener->is_closing = 1;
    target_scan_all(target);
    while (listener_find(target, id) && err != ETIMEDOUT)
        err = pthread_cond_timedwait(&target->changed, &target->lock, &deadline);
    err = listener_find(target, id) ? -ETIMEDOUT : 0;
    pthread_mutex_unlock(&target->lock);
    return err;
}

/* ---- subsystems, namespaces, controllers ---- */

int kvdev_target_subsystem_create(struct kvdev_target *target, uint32_t nsid_max, int32_t *ret)
{
    if (nsid_max == 0 || nsid_max > 1024)
        return -EINVAL;
    struct target_namespace *namespaces = calloc(nsid_max, sizeof(*namespaces));
    if (!namespaces)
        return -ENOMEM;
    for (uint32_t i = 0; i < nsid_max; i++)
        pthread_mutex_init(&namespaces[i].fused_lock, NULL);
    int err = -ENOSPC;
    pthread_mutex_lock(&target->lock);
    for (uint32_t i = 0; i < target->opts.subsystems_max && err; i++) {
        if (target->subsystems[i].namespaces)
            continue;
        target->subsystems[i] = (struct target_subsystem){ .namespaces = namespaces, .nsid_max = nsid_max };
        *ret = (int32_t)i;
        err = 0;
    }
    pthread_mutex_unlock(&target->lock);
    if (err) {
        struct target_subsystem unused = { .namespaces = namespaces, .nsid_max = nsid_max };
        namespaces_free(&unused);
    }
    return err;
}

static struct target_subsystem *subsystem_at(struct kvdev_target *target, int32_t index)
{
    if (index < 0 || (uint32_t)index >= target->opts.subsystems_max || !target->subsystems[index].namespaces)
        return NULL;
    return &target->subsystems[index];
}

/* Connections of all controllers of a subsystem; target->lock is held. */
static uint32_t subsystem_connections(const struct kvdev_target *target, const struct target_subsystem *subsystem)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < target->opts.controllers_max; i++) {
        if (target->controllers[i].subsystem == subsystem)
            count += atomic_load(&target->controllers[i].connection_count);
    }
    return count;
}

int kvdev_target_subsystem_destroy(struct kvdev_target *target, int32_t index, uint64_t timeout_ns)
{
    struct timespec deadline = deadline_after(timeout_ns);
    int err = 0;
    pthread_mutex_lock(&target->lock);
    struct target_subsystem *subsystem = subsystem_at(target, index);
    if (!subsystem) {
        pthread_mutex_unlock(&target->lock);
        return -ENOENT;
    }
    for (uint32_t i = 0; i < target->opts.controllers_max; i++) {
        if (target->controllers[i].subsystem == subsystem)
            atomic_store(&target->controllers[i].is_dead, 1);
    }
    target_scan_all(target);
    while (subsystem_connections(target, subsystem) > 0 && err != ETIMEDOUT)
        err = pthread_cond_timedwait(&target->changed, &target->lock, &deadline);
    if (subsystem_connections(target, subsystem) > 0) {
        pthread_mutex_unlock(&target->lock);
        return -ETIMEDOUT;
    }
    for (uint32_t i = 0; i < target->opts.controllers_max; i++) {
        if (target->controllers[i].subsystem == subsystem)
            target->controllers[i].subsystem = NULL;
    }
    namespaces_free(subsystem);
    pthread_mutex_unlock(&target->lock);
    return 0;
}

int kvdev_target_namespace_set(struct kvdev_target *target, int32_t index, uint32_t nsid, struct kvdev_bdev *bdev)
{
    int err = 0;
    pthread_mutex_lock(&target->lock);
    struct target_subsystem *subsystem = subsystem_at(target, index);
    if (!subsystem || nsid == 0 || nsid > subsystem->nsid_max)
        err = -ENOENT;
    else if (atomic_load(&subsystem->namespaces[nsid - 1].bdev))
        err = -EEXIST;
    else {
        atomic_store(&subsystem->namespaces[nsid - 1].fused_map, 0);
        atomic_store(&subsystem->namespaces[nsid - 1].bdev, bdev);
    }
    pthread_mutex_unlock(&target->lock);
    return err;
}

int kvdev_target_namespace_clear(struct kvdev_target *target, int32_t index, uint32_t nsid, uint64_t timeout_ns)
{
    pthread_mutex_lock(&target->lock);
    struct target_subsystem *subsystem = subsystem_at(target, index);
    if (!subsystem || nsid == 0 || nsid > subsystem->nsid_max) {
        pthread_mutex_unlock(&target->lock);
        return -ENOENT;
    }
    struct target_namespace *ns = &subsystem->namespaces[nsid - 1];
    atomic_store(&ns->bdev, NULL);
    kvdev_target_release(target);
    for (int attempt = 0; attempt < 2 && atomic_load(&ns->outstanding) > 0; attempt++) {
        if (attempt == 1) {
            atomic_store(&ns->evict, 1);
            target_scan_all(target);
        }
        struct timespec deadline = deadline_after(timeout_ns);
        int err = 0;
        while (atomic_load(&ns->outstanding) > 0 && err != ETIMEDOUT)
            err = pthread_cond_timedwait(&target->changed, &target->lock, &deadline);
    }
    int err = atomic_load(&ns->outstanding) > 0 ? -ETIMEDOUT : 0;
    atomic_store(&ns->evict, 0);
    pthread_mutex_unlock(&target->lock);
    return err;
}

int kvdev_target_controller_create(struct kvdev_target *target, int32_t index, uint32_t host_tag, int32_t *ret)
{
    int err = -ENOSPC;
    pthread_mutex_lock(&target->lock);
    struct target_subsystem *subsystem = subsystem_at(target, index);
    for (uint32_t i = 0; subsystem && i < target->opts.controllers_max; i++) {
        struct target_controller *controller = &target->controllers[i];
        int is_free = controller->in_use == 0 ||
                      (controller->in_use == 2 && atomic_load(&controller->connection_count) == 0);
        if (!is_free)
            continue;
        gates_free(controller); /* of the slot's last controller, whose connections are gone */
        err = gates_make(controller, subsystem->nsid_max);
        if (err) {
            controller->in_use = 0;
            break;
        }
        controller->in_use = 1;
        controller->host_tag = host_tag;
        controller->subsystem = subsystem;
        atomic_store(&controller->is_ready, 0);
        atomic_store(&controller->is_dead, 0);
        /* The generation keeps a Connect that was granted for a slot's last controller from its next one. */
        uint32_t generation = (((uint32_t)atomic_load(&controller->number) >> 16) + 1) & 0x7fff;
        *ret = (int32_t)(generation << 16 | i);
        atomic_store(&controller->number, *ret);
        err = 0;
        break;
    }
    pthread_mutex_unlock(&target->lock);
    return subsystem ? err : -ENOENT;
}

static struct target_controller *controller_at(struct kvdev_target *target, int32_t number)
{
    if (number < 0 || TARGET_CONTROLLER_SLOT(number) >= target->opts.controllers_max)
        return NULL;
    struct target_controller *controller = &target->controllers[TARGET_CONTROLLER_SLOT(number)];
    return controller->in_use == 1 && atomic_load(&controller->number) == number ? controller : NULL;
}

int kvdev_target_controller_set_ready(struct kvdev_target *target, int32_t index, int is_ready)
{
    pthread_mutex_lock(&target->lock);
    struct target_controller *controller = controller_at(target, index);
    if (controller)
        atomic_store(&controller->is_ready, is_ready ? 1u : 0u);
    pthread_mutex_unlock(&target->lock);
    return controller ? 0 : -ENOENT;
}

int kvdev_target_controller_gate_set(struct kvdev_target *target, int32_t index, uint32_t nsid, uint32_t gate)
{
    pthread_mutex_lock(&target->lock);
    struct target_controller *controller = controller_at(target, index);
    int is_there = controller && controller->subsystem && nsid && nsid <= controller->subsystem->nsid_max;
    if (is_there)
        atomic_store(&controller->gates[nsid - 1], gate);
    pthread_mutex_unlock(&target->lock);
    return is_there ? 0 : -ENOENT;
}

static int is_one_of(uint32_t tag, const uint32_t *tags, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (tags[i] == tag)
            return 1;
    }
    return 0;
}

int target_is_drained(const struct drain *drain, const struct connection *connection)
{
    if (!is_one_of(connection->host_tag, drain->host_tags, drain->host_count))
        return 1;
    for (uint16_t i = 0; i < connection->request_count; i++) {
        const struct request *request = &connection->requests[i];
        if (request->state != REQUEST_FREE && request->state != REQUEST_SENDING && request->ns == drain->ns &&
            request->arrival_ns <= drain->before_ns)
            return 0;
    }
    return 1;
}

static void aborts_set(struct kvdev_target *target, const struct target_subsystem *subsystem, uint32_t nsid,
                       const struct drain *drain)
{
    for (uint32_t i = 0; i < target->opts.controllers_max; i++) {
        struct target_controller *controller = &target->controllers[i];
        if (controller->in_use && controller->subsystem == subsystem &&
            is_one_of(controller->host_tag, drain->host_tags, drain->host_count))
            atomic_store(&controller->abort_ns[nsid - 1], drain->before_ns);
    }
}

static void drain_forget(struct kvdev_target *target, struct drain *drain)
{
    struct drain **link = &target->drains;
    while (*link != drain)
        link = &(*link)->next;
    *link = drain->next;
}

int kvdev_target_abort_hosts(struct kvdev_target *target, int32_t index, uint32_t nsid, const uint32_t *host_tags,
                             uint32_t count, uint64_t timeout_ns)
{
    uint32_t pollers = target->opts.poller_count;
    uint64_t all = pollers == 64 ? UINT64_MAX : ((uint64_t)1 << pollers) - 1;
    pthread_mutex_lock(&target->lock);
    struct target_subsystem *subsystem = subsystem_at(target, index);
    if (!subsystem || nsid == 0 || nsid > subsystem->nsid_max) {
        pthread_mutex_unlock(&target->lock);
        return -ENOENT;
    }
    struct drain drain = { .next = target->drains,
                           .ns = &subsystem->namespaces[nsid - 1],
                           .host_tags = host_tags,
                           .host_count = count,
                           .before_ns = target_now_ns() };
    aborts_set(target, subsystem, nsid, &drain);
    target->drains = &drain;
    for (uint32_t attempt = 0; attempt < 2 && drain.idle_map != all; attempt++) {
        uint64_t end_ns = target_now_ns() + timeout_ns;
        drain.evict = attempt;
        while (drain.idle_map != all && target_now_ns() < end_ns) {
            /* Nothing tells when a command has ended: the pollers are asked until they have none. */
            struct timespec again = deadline_after(DRAIN_LOOK_NS);
            target_scan_all(target);
            pthread_cond_timedwait(&target->changed, &target->lock, &again);
        }
    }
    int err = drain.idle_map == all ? 0 : -ETIMEDOUT;
    drain_forget(target, &drain);
    pthread_mutex_unlock(&target->lock);
    return err;
}

static int controller_end(struct kvdev_target *target, int32_t index, uint32_t in_use)
{
    pthread_mutex_lock(&target->lock);
    struct target_controller *controller = controller_at(target, index);
    if (controller) {
        atomic_store(&controller->is_dead, 1);
        controller->in_use = in_use;
    }
    pthread_mutex_unlock(&target->lock);
    target_scan_all(target);
    return controller ? 0 : -ENOENT;
}

int kvdev_target_controller_kill(struct kvdev_target *target, int32_t index)
{
    return controller_end(target, index, 1);
}

int kvdev_target_controller_destroy(struct kvdev_target *target, int32_t index)
{
    return controller_end(target, index, 2);
}

static struct connection *connection_find(struct kvdev_target *target, uint32_t number)
{
    for (uint32_t i = 0; i < target->opts.connections_max; i++) {
        if (target->connections[i] && target->connections[i]->number == number)
            return target->connections[i];
    }
    return NULL;
}

int kvdev_target_disconnect(struct kvdev_target *target, uint32_t number)
{
    pthread_mutex_lock(&target->lock);
    struct connection *connection = connection_find(target, number);
    if (connection)
        atomic_store(&connection->kill, 1);
    pthread_mutex_unlock(&target->lock);
    if (!connection)
        return -ENOENT;
    target_scan_all(target);
    return 0;
}

int kvdev_target_connection_read(struct kvdev_target *target, uint32_t number,
                                 struct kvdev_target_connection_info *ret)
{
    pthread_mutex_lock(&target->lock);
    struct connection *connection = connection_find(target, number);
    if (connection)
        *ret = connection->info;
    pthread_mutex_unlock(&target->lock);
    return connection ? 0 : -ENOENT;
}

/* ---- control thread ---- */

static void event_of_request(const struct request *request, struct kvdev_target_event *event)
{
    const struct connection *connection = request->connection;
    memset(event, 0, sizeof(*event));
    event->type = KVDEV_TARGET_EVENT_CAPSULE;
    event->handle = (uint64_t)(uintptr_t)request;
    event->arrival_ns = request->arrival_ns;
    event->data_addr = (uint64_t)(uintptr_t)request->data;
    event->data_len = request->direction == KVDEV_DIR_H2C ? request->data_len : 0;
    event->data_room = request->direction == KVDEV_DIR_C2H ? request->data_len : 0;
    event->connection = connection->number;
    event->listener = connection->listener_id;
    event->controller = connection->controller_number;
    event->qid = connection->qid;
    if (connection->tls) {
        struct kvdev_tls_info info;
        kvdev_tls_link_read(connection->tls, &info);
        event->tls_tag = info.tag;
    }
    memcpy(event->sqe, request->raw_sqe, sizeof(event->sqe));
}

static uint32_t control_take(struct kvdev_target *target, struct kvdev_target_event *events, uint32_t max)
{
    uint32_t n = 0;
    while (n < max) {
        struct request *request = target->control.first;
        struct connection *connection = target->control_closed_first;
        if (!request && !connection)
            break;
        if (request && (!connection || request->control_sequence < connection->control_sequence)) {
            list_pop(&target->control);
            event_of_request(request, &events[n++]);
            continue;
        }
        target->control_closed_first = connection->next_event;
        if (!target->control_closed_first)
            target->control_closed_last = NULL;
        events[n++] = connection->closed_event;
        struct poller *poller = connection->poller;
        atomic_store(&connection->was_closed_event_taken, 1); /* its poller may free it from here on */
        atomic_store(&poller->scan, 1);
        target_poller_kick(poller);
    }
    return n;
}

int kvdev_target_control_wait(struct kvdev_target *target, struct kvdev_target_event *events, uint32_t max,
                              uint64_t timeout_ns, uint32_t *count)
{
    struct timespec deadline = deadline_after(timeout_ns);
    int err = 0;
    pthread_mutex_lock(&target->control_lock);
    while (!target->control.first && !target->control_closed_first && !target->control_woken && err != ETIMEDOUT)
        err = pthread_cond_timedwait(&target->control_ready, &target->control_lock, &deadline);
    target->control_woken = 0;
    *count = control_take(target, events, max);
    pthread_mutex_unlock(&target->control_lock);
    return 0;
}

void kvdev_target_control_wake(struct kvdev_target *target)
{
    pthread_mutex_lock(&target->control_lock);
    target->control_woken = 1;
    pthread_cond_signal(&target->control_ready);
    pthread_mutex_unlock(&target->control_lock);
}

int kvdev_target_complete(struct kvdev_target *target, const struct kvdev_target_completion *completion)
{
    struct request *request = (struct request *)(uintptr_t)completion->handle;
    if (!request || request->state != REQUEST_CONTROL || request->connection->target != target)
        return -EINVAL;
    if (completion->action == KVDEV_TARGET_ACTION_BIND &&
        (completion->controller < 0 ||
         TARGET_CONTROLLER_SLOT(completion->controller) >= target->opts.controllers_max ||
         completion->sqsize == 0 || completion->sqsize >= request->connection->transport.queue_depth_max))
        return -EINVAL;
    request->completion = *completion;
    target_inbox_push(request->connection->poller, request);
    return 0;
}

int kvdev_target_poller_stat_read(struct kvdev_target *target, uint32_t index, struct kvdev_target_poller_stat *ret)
{
    if (index >= target->opts.poller_count)
        return -ENOENT;
    struct poller *poller = &target->pollers[index];
    *ret = (struct kvdev_target_poller_stat){
        .busy_ns = atomic_load(&poller->busy_ns),
        .idle_ns = atomic_load(&poller->idle_ns),
        .command_count = atomic_load(&poller->command_count),
        .rx_bytes = atomic_load(&poller->rx_bytes),
        .tx_bytes = atomic_load(&poller->tx_bytes),
        .fault_count = atomic_load(&poller->fault_count),
        .refused_count = atomic_load(&poller->refused_count),
        .buffers_free = atomic_load(&poller->buffers_free),
        .admin_qpairs = atomic_load(&poller->admin_qpairs),
        .io_qpairs = atomic_load(&poller->io_qpairs),
        .admin_qpairs_now = atomic_load(&poller->admin_qpairs_now),
        .io_qpairs_now = atomic_load(&poller->io_qpairs_now),
        .unbound_now = atomic_load(&poller->unbound_now),
        .thread_id = atomic_load(&poller->thread_id),
    };
    return 0;
}

/* Life of the queue, and the tables of its devices, queue pairs and controllers. */
#include "queue_int.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CAPACITY_MAX (1u << 20)
#define WINDOW_DEFAULT_BYTES (1u << 20)  /* what stays in the caches of both ends at full speed */
#define TIMEOUT_DEFAULT_NS 30000000000ull
#define SPIN_DEFAULT_NS 20000ull

int kvdev_queue_create(const struct kvdev_queue_options *options, struct kvdev_queue **ret)
{
    *ret = NULL;
    if (!options->capacity || options->capacity > CAPACITY_MAX)
        return -EINVAL;
    struct kvdev_queue *q = calloc(1, sizeof *q);
    if (!q)
        return -ENOMEM;
    q->nodes = calloc(options->capacity, sizeof *q->nodes);
    if (!q->nodes) {
        free(q);
        return -ENOMEM;
    }
    q->options = *options;
    if (!q->options.window_size_bytes)
        q->options.window_size_bytes = WINDOW_DEFAULT_BYTES;
    if (!q->options.command_timeout_ns)
        q->options.command_timeout_ns = TIMEOUT_DEFAULT_NS;
    if (!q->options.spin_ns)
        q->options.spin_ns = SPIN_DEFAULT_NS;
    q->stats.capacity = options->capacity;
    atomic_flag_clear(&q->busy);
    q->free_head = NODE_NONE;
    for (uint32_t i = options->capacity; i-- > 0;)
        node_give(q, i);
    q->done.head = q->done.tail = NODE_NONE;
    q->delayed.head = q->delayed.tail = NODE_NONE;
    q->unchecked.head = q->unchecked.tail = NODE_NONE;
    q->delayed_due_ns = q->fail_due_ns = UINT64_MAX;
    q->notice_fd = -1;
    atomic_init(&q->intruders, 0);
    atomic_init(&q->guests, 0);
    atomic_init(&q->is_polled, 0);
    q->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int error = q->wake_fd < 0 ? -errno : -pthread_mutex_init(&q->lock, NULL);
    if (!error)
        error = -pthread_mutex_init(&q->guest_lock, NULL);
    if (!error)
        error = -pthread_cond_init(&q->calm, NULL);
    if (error) {
        if (q->wake_fd >= 0)
            close(q->wake_fd);
        free(q->nodes);
        free(q);
        return error;
    }
    *ret = q;
    return 0;
}

static void path_drop(struct kvdev_queue *q, uint32_t index)
{
    struct path *path = &q->paths[index];
    if (path->qp->outstanding)
        kvdev_qpair_kill(path->qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "given up");
    kvdev_qpair_owner_set(path->qp, NULL, NULL);
    kvdev_qpair_destroy(path->qp);
    path->qp = NULL;
}

void kvdev_queue_destroy(struct kvdev_queue *q)
{
    /* One that a background poller drives is still in use; in a fork its thread is missing and its locks stay taken. */
    if (!q || atomic_load(&q->is_polled))
        return;
    for (uint32_t i = 0; i < KVDEV_QUEUE_PASSTHROUGH_MAX; i++)
        q->passthroughs[i].half = NULL; /* nobody waits any more */
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            path_drop(q, i);
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        device->driver->detach(device->object);
    }
    close(q->wake_fd);
    pthread_cond_destroy(&q->calm);
    pthread_mutex_destroy(&q->guest_lock);
    pthread_mutex_destroy(&q->lock);
    free(q->nodes);
    free(q);
}

void queue_wake(struct kvdev_queue *q)
{
    uint64_t one = 1;
    ssize_t n = write(q->wake_fd, &one, sizeof one);
    (void)n;
}

void queue_intrude(struct kvdev_queue *q)
{
    atomic_fetch_add(&q->intruders, 1);
    queue_wake(q);
    pthread_mutex_lock(&q->lock);
}

void queue_retire(struct kvdev_queue *q)
{
    atomic_fetch_sub(&q->intruders, 1);
    pthread_cond_broadcast(&q->calm);
    pthread_mutex_unlock(&q->lock);
}

void queue_step_aside(struct kvdev_queue *q, int has_guests)
{
    while (atomic_load(&q->intruders) || (has_guests && atomic_load(&q->guests)))
        pthread_cond_wait(&q->calm, &q->lock);
}

int queue_visit(struct kvdev_queue *q)
{
    if (!queue_enter(q))
        return 0;
    if (!atomic_load(&q->is_polled))
        return -EBUSY;
    pthread_mutex_lock(&q->guest_lock);
    if (!atomic_load(&q->is_polled)) { /* it has ended meanwhile */
        pthread_mutex_unlock(&q->guest_lock);
        return queue_enter(q);
    }
    atomic_fetch_add(&q->guests, 1);
    queue_intrude(q);
    /* From here on it is the data path: the poller waits for guests, and intruders come in between as they do there. */
    atomic_fetch_sub(&q->intruders, 1);
    q->is_guest_inside = 1;
    return 0;
}

void queue_visit_end(struct kvdev_queue *q)
{
    if (!q->is_guest_inside) {
        queue_leave(q);
        return;
    }
    q->is_guest_inside = 0;
    atomic_fetch_sub(&q->guests, 1);
    pthread_cond_broadcast(&q->calm);
    pthread_mutex_unlock(&q->lock);
    pthread_mutex_unlock(&q->guest_lock);
}

/* ---- the tables ---- */

static void path_take(struct kvdev_queue *q, uint32_t index, struct kvdev_qpair *qp, uint32_t controller)
{
    struct path *path = &q->paths[index];
    *path = (struct path){ .queue = q, .qp = qp, .index = index, .controller = (uint16_t)controller };
    kvdev_qpair_hold(qp);
    kvdev_qpair_owner_set(qp, queue_on_qpair_done, path);
    if (index >= q->path_count)
        q->path_count = index + 1;
}

int kvdev_queue_qpair_add(struct kvdev_queue *q, struct kvdev_qpair *qp, uint32_t *ret)
{
    if (queue_visit(q))
        return -EBUSY;
    int error = -ENOSPC;
    for (uint32_t i = 0; i < KVDEV_QUEUE_QPAIRS_MAX; i++) {
        struct path *path = &q->paths[i];
        if (path->qp)
            continue;
        path_take(q, i, qp, CONTROLLER_NONE);
        *ret = i;
        error = 0;
        break;
    }
    queue_visit_end(q);
    return error;
}

int kvdev_queue_qpair_remove(struct kvdev_queue *q, uint32_t qpair_index)
{
    if (queue_visit(q))
        return -EBUSY;
    int error = -EINVAL;
    if (qpair_index < q->path_count && q->paths[qpair_index].qp) {
        kvdev_qpair_close(q->paths[qpair_index].qp);
        path_drop(q, qpair_index);
        /* No device may reach whatever gets this handle next. */
        for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
            struct device *device = &q->devices[i];
            uint16_t kept = 0;
            for (uint16_t k = 0; k < device->active_count; k++)
                if (device->active[k] != qpair_index)
                    device->active[kept++] = device->active[k];
            device->active_count = kept;
        }
        error = 0;
    }
    queue_visit_end(q);
    return error;
}

static int is_geometry_valid(const struct kvdev_queue_namespace *ns)
{
    return ns->block_size_bytes >= 512 && !(ns->block_size_bytes & (ns->block_size_bytes - 1)) && ns->block_count;
}

static int namespace_is_valid(const struct kvdev_queue *q, const struct kvdev_queue_namespace *ns)
{
    if (!is_geometry_valid(ns) || !ns->qpair_count || ns->qpair_count > KVDEV_QUEUE_DEVICE_QPAIRS_MAX)
        return 0;
    for (uint32_t i = 0; i < ns->qpair_count; i++)
        if (ns->qpair_index[i] >= q->path_count || !q->paths[ns->qpair_index[i]].qp)
            return 0;
    return 1;
}

static void device_init(struct device *device, const struct device_ops *ops)
{
    device->ops = ops;
    device->driver = NULL;
    device->generation++;
    memset(&device->recovery, 0, sizeof device->recovery);
    device->is_recovering = device->is_failed = device->has_lost_writes = 0;
    /* Queue pairs of one controller share its commands by what is in flight. */
    device->recovery.policy = KVDEV_PATHS_QUEUE_DEPTH;
    device->error = 0;
    device->active_count = 0;
    device->leg_count = device->turn = device->current = 0;
    device->no_path_ns = 0;
    for (uint32_t priority = 0; priority < KVDEV_QUEUE_PRIORITY_COUNT; priority++)
        device->pending[priority] = (struct list){ NODE_NONE, NODE_NONE };
}

/* Index of a free entry, with nothing pending; KVDEV_QUEUE_DEVICES_MAX when the table is full. */
uint32_t queue_device_take(struct kvdev_queue *q, const struct device_ops *ops)
{
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
        if (q->devices[i].ops)
            continue;
        device_init(&q->devices[i], ops);
        return i;
    }
    return KVDEV_QUEUE_DEVICES_MAX;
}

int kvdev_queue_namespace_add(struct kvdev_queue *q, const struct kvdev_queue_namespace *ns, uint32_t *ret)
{
    if (queue_visit(q))
        return -EBUSY;
    int error = namespace_is_valid(q, ns) ? 0 : -EINVAL;
    if (!error) {
        uint32_t index = queue_device_take(q, &queue_namespace_ops);
        if (index < KVDEV_QUEUE_DEVICES_MAX) {
            struct device *device = &q->devices[index];
            device->ns = *ns;
            for (uint16_t k = 0; k < ns->qpair_count; k++)
                device->active[k] = (uint16_t)ns->qpair_index[k];
            device->active_count = ns->qpair_count;
            *ret = index;
        } else {
            error = -ENOSPC;
        }
    }
    queue_visit_end(q);
    return error;
}

void queue_device_cancel(struct kvdev_queue *q, struct device *device, int error)
{
    uint64_t now = now_ns();
    for (uint32_t priority = 0; priority < KVDEV_QUEUE_PRIORITY_COUNT; priority++) {
        uint32_t index;
        while ((index = list_pop(q, &device->pending[priority])) != NODE_NONE)
            queue_node_refuse(q, index, error, now);
    }
}

int kvdev_queue_device_remove(struct kvdev_queue *q, uint32_t device_index)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || !q->devices[device_index].ops)
        return -EINVAL;
    if (queue_visit(q))
        return -EBUSY;
    queue_device_cancel(q, &q->devices[device_index], -ECANCELED);
    if (q->devices[device_index].driver)
        queue_driver_drop(q, device_index);
    queue_delayed_cancel(q, device_index, -ECANCELED);
    q->devices[device_index].ops = NULL;
    q->devices[device_index].active_count = 0;
    queue_visit_end(q);
    return 0;
}

int kvdev_queue_device_is_alive(const struct kvdev_queue *q, uint32_t device_index)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || !q->devices[device_index].ops)
        return 0;
    return q->devices[device_index].ops->is_alive(q, &q->devices[device_index]);
}


void queue_give_up(struct kvdev_queue *q)
{
    q->is_abandoning = 1;
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++)
        if (q->devices[i].ops)
            queue_device_cancel(q, &q->devices[i], -ECANCELED);
    queue_delayed_cancel(q, KVDEV_QUEUE_DEVICES_MAX, -ECANCELED);
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp && q->paths[i].qp->outstanding) {
            kvdev_qpair_kill(q->paths[i].qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "given up");
            queue_controller_check(q, &q->paths[i]);
        }
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        if (device->driver->outstanding(device->object))
            device->driver->give_up(device->object, -ENOTCONN);
    }
    queue_driven_check(q, UINT32_MAX);
    q->is_abandoning = 0;
}

int kvdev_queue_abandon(struct kvdev_queue *q)
{
    if (queue_visit(q))
        return -EBUSY;
    queue_give_up(q);
    queue_visit_end(q);
    return 0;
}

/* ---- recovery: the tables, changed by the thread that makes associations ---- */

static struct controller *controller_at(struct kvdev_queue *q, uint32_t index)
{
    return index < KVDEV_QUEUE_CONTROLLERS_MAX && q->controllers[index].in_use ? &q->controllers[index] : NULL;
}

static void devices_rebuild(struct kvdev_queue *q, uint32_t controller)
{
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++)
        if (q->devices[i].ops && leg_of(&q->devices[i], controller))
            queue_device_rebuild(q, &q->devices[i]);
}

int kvdev_queue_controller_add(struct kvdev_queue *q, uint32_t *ret)
{
    int error = -ENOSPC;
    queue_intrude(q);
    for (uint32_t i = 0; i < KVDEV_QUEUE_CONTROLLERS_MAX && error; i++) {
        if (q->controllers[i].in_use)
            continue;
        q->controllers[i] = (struct controller){ .in_use = 1 };
        *ret = i;
        error = 0;
    }
    queue_retire(q);
    return error;
}

static int qpairs_add(struct kvdev_queue *q, uint32_t controller, struct kvdev_qpair *const *qpairs, uint32_t count,
                      uint32_t *indexes)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < KVDEV_QUEUE_QPAIRS_MAX && taken < count; i++)
        if (!q->paths[i].qp)
            indexes[taken++] = i;
    if (taken < count)
        return -ENOSPC;
    for (uint32_t i = 0; i < count; i++)
        path_take(q, indexes[i], qpairs[i], controller);
    return 0;
}

int kvdev_queue_controller_up(struct kvdev_queue *q, uint32_t controller_index,
                              const struct kvdev_queue_association *association, struct kvdev_qpair *const *qpairs,
                              uint32_t *indexes)
{
    queue_intrude(q);
    struct controller *controller = controller_at(q, controller_index);
    int error = !controller || controller->is_up || !association->qpair_count ? -EINVAL : 0;
    if (!error)
        error = qpairs_add(q, controller_index, qpairs, association->qpair_count, indexes);
    if (!error) {
        controller->is_up = 1;
        controller->has_fallen = controller->has_ana_error = 0;
        controller->has_ana = association->has_ana;
        controller->made_ns = association->made_ns;
        memcpy(controller->retry_delay_ns, association->retry_delay_ns, sizeof controller->retry_delay_ns);
        devices_rebuild(q, controller_index);
    }
    queue_retire(q);
    return error;
}

static void controller_take_down(struct kvdev_queue *q, uint32_t index, uint64_t fence_ns)
{
    struct controller *controller = &q->controllers[index];
    if (fence_ns != UINT64_MAX || controller->is_up)
        controller->fence_ns = fence_ns;
    controller->is_up = controller->has_fallen = 0;
    for (uint32_t i = 0; i < q->path_count; i++) {
        if (!q->paths[i].qp || q->paths[i].controller != index)
            continue;
        kvdev_qpair_close(q->paths[i].qp);
        path_drop(q, i);
    }
    for (uint32_t i = q->delayed.head; i != NODE_NONE; i = q->nodes[i].next) {
        struct node *node = &q->nodes[i];
        if (node->due_ns != UINT64_MAX || node->controller != index)
            continue;
        node->due_ns = controller->fence_ns;
        if (node->due_ns < q->delayed_due_ns)
            q->delayed_due_ns = node->due_ns;
    }
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
        struct device *device = &q->devices[i];
        struct leg *leg = device->ops ? leg_of(device, index) : NULL;
        if (!leg)
            continue;
        if (leg->dirty_ns)
            queue_dirty_hand_over(q, device, leg);
        /* The next association has to show first that the namespace is the same. */
        leg->state = KVDEV_PATH_UNUSABLE;
        queue_device_rebuild(q, device);
    }
}

int kvdev_queue_controller_down(struct kvdev_queue *q, uint32_t controller_index, uint64_t fence_ns)
{
    queue_intrude(q);
    int error = controller_at(q, controller_index) ? 0 : -EINVAL;
    if (!error)
        controller_take_down(q, controller_index, fence_ns);
    queue_retire(q);
    return error;
}

int kvdev_queue_controller_remove(struct kvdev_queue *q, uint32_t controller_index)
{
    queue_intrude(q);
    int error = controller_at(q, controller_index) ? 0 : -EINVAL;
    if (!error) {
        controller_take_down(q, controller_index, UINT64_MAX);
        for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
            struct device *device = &q->devices[i];
            struct leg *leg = device->ops ? leg_of(device, controller_index) : NULL;
            if (!leg)
                continue;
            *leg = device->legs[--device->leg_count];
            queue_device_rebuild(q, device);
        }
        q->controllers[controller_index].in_use = 0;
        /* Held writes whose fence will never be known end when their device fails or is removed. */
    }
    queue_retire(q);
    return error;
}

int kvdev_queue_controller_read(struct kvdev_queue *q, uint32_t controller_index,
                                struct kvdev_queue_controller_info *ret)
{
    memset(ret, 0, sizeof *ret);
    queue_intrude(q);
    const struct controller *controller = controller_at(q, controller_index);
    if (controller) {
        ret->fence_ns = controller->fence_ns;
        ret->is_up = controller->is_up;
        ret->has_fallen = controller->has_fallen;
        ret->has_ana_error = controller->has_ana_error;
        for (uint32_t i = q->delayed.head; i != NODE_NONE; i = q->nodes[i].next)
            ret->held_count += q->nodes[i].is_uncertain && q->nodes[i].controller == controller_index;
    }
    queue_retire(q);
    return controller ? 0 : -EINVAL;
}

int kvdev_queue_multipath_add(struct kvdev_queue *q, const struct kvdev_queue_namespace *ns,
                              const struct kvdev_queue_recovery *recovery, uint32_t *ret)
{
    int is_valid = !ns->qpair_count && is_geometry_valid(ns) && recovery->policy <= KVDEV_PATHS_QUEUE_DEPTH &&
                   recovery->retry_count <= 255;
    if (!is_valid)
        return -EINVAL;
    queue_intrude(q);
    uint32_t index = queue_device_take(q, &queue_namespace_ops);
    if (index < KVDEV_QUEUE_DEVICES_MAX) {
        struct device *device = &q->devices[index];
        device->ns = *ns;
        device->recovery = *recovery;
        device->is_recovering = 1;
        queue_device_rebuild(q, device);
        *ret = index;
    }
    queue_retire(q);
    return index < KVDEV_QUEUE_DEVICES_MAX ? 0 : -ENOSPC;
}

static struct device *multipath_at(struct kvdev_queue *q, uint32_t index)
{
    int is_there = index < KVDEV_QUEUE_DEVICES_MAX && q->devices[index].ops && q->devices[index].is_recovering;
    return is_there ? &q->devices[index] : NULL;
}

int kvdev_queue_path_set(struct kvdev_queue *q, uint32_t device_index, uint32_t controller_index, uint32_t state)
{
    queue_intrude(q);
    struct device *device = multipath_at(q, device_index);
    struct controller *controller = controller_at(q, controller_index);
    int error = device && controller && state <= KVDEV_PATH_UNUSABLE ? 0 : -EINVAL;
    struct leg *leg = error ? NULL : leg_of(device, controller_index);
    if (!error && !leg) {
        if (device->leg_count == KVDEV_QUEUE_DEVICE_PATHS_MAX) {
            error = -ENOSPC;
        } else {
            leg = &device->legs[device->leg_count++];
            *leg = (struct leg){ .controller = (uint16_t)controller_index };
        }
    }
    if (leg) {
        leg->state = (uint8_t)state;
        leg->is_suspect = 0;
        controller->has_ana_error = 0;
        queue_device_rebuild(q, device);
    }
    queue_retire(q);
    return error;
}

int kvdev_queue_device_resize(struct kvdev_queue *q, uint32_t device_index, uint64_t block_count)
{
    queue_intrude(q);
    struct device *device = multipath_at(q, device_index);
    if (device && block_count)
        device->ns.block_count = block_count;
    queue_retire(q);
    return device && block_count ? 0 : -EINVAL;
}

int kvdev_queue_device_fail(struct kvdev_queue *q, uint32_t device_index, int error)
{
    queue_intrude(q);
    struct device *device = multipath_at(q, device_index);
    if (device) {
        device->error = error;
        if (error) {
            queue_device_cancel(q, device, error);
            queue_delayed_cancel(q, device_index, error);
        }
    }
    queue_retire(q);
    return device ? 0 : -EINVAL;
}

int kvdev_queue_notice_set(struct kvdev_queue *q, int fd)
{
    queue_intrude(q);
    q->notice_fd = fd;
    queue_retire(q);
    return 0;
}

/* ---- reading state ---- */

void kvdev_queue_stats_read(const struct kvdev_queue *q, struct kvdev_queue_stats *ret)
{
    *ret = q->stats;
}

size_t kvdev_queue_outstanding(const struct kvdev_queue *q)
{
    return (size_t)outstanding_below(q) + q->stats.done_count;
}

uint32_t kvdev_queue_attention(const struct kvdev_queue *q)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        count += device->driver->wants_attention(device->object) != 0;
    }
    return count;
}

void kvdev_queue_window_set(struct kvdev_queue *q, uint32_t window_size_bytes)
{
    q->options.window_size_bytes = window_size_bytes ? window_size_bytes : WINDOW_DEFAULT_BYTES;
}

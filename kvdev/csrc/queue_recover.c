/* Which commands go on after a connection was lost or an error came, by which paths, and what a flush vouches for. */
#include "queue_int.h"

#include <unistd.h>

#define LOSSES_MAX 32u                   /* a command that so many connections died under is likely the cause */
#define RETRY_DELAY_NS 100000000ull      /* before a retry where the controller asks for no delay of its own */
#define STATUS_DNR 0x4000u

void queue_notice(const struct kvdev_queue *q)
{
    uint64_t one = 1;
    if (q->notice_fd >= 0) {
        /* Full means that a notice is pending already. */
        ssize_t n = write(q->notice_fd, &one, sizeof one);
        (void)n;
    }
}

/* ---- paths ---- */

static void fail_due_update(struct kvdev_queue *q)
{
    q->fail_due_ns = UINT64_MAX;
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
        const struct device *device = &q->devices[i];
        if (!device->ops || !device->is_recovering || !device->no_path_ns || device->is_failed)
            continue;
        uint64_t due = add_ns(device->no_path_ns, device->recovery.fail_after_ns);
        if (due < q->fail_due_ns)
            q->fail_due_ns = due;
    }
}

/* Chooses the queue pairs in use: of the best ANA state there is, and with active/passive of one controller, which
 * stays until it fails or is no longer among the best. */
void queue_device_rebuild(struct kvdev_queue *q, struct device *device)
{
    uint8_t best = KVDEV_PATH_UNUSABLE;
    for (uint32_t i = 0; i < device->leg_count; i++)
        if (is_leg_usable(q, &device->legs[i]) && device->legs[i].state < best)
            best = device->legs[i].state;
    if (device->recovery.policy == KVDEV_PATHS_ACTIVE_PASSIVE && best != KVDEV_PATH_UNUSABLE) {
        for (uint32_t i = 0; i < device->leg_count; i++) {
            const struct leg *leg = &device->legs[device->current % device->leg_count];
            if (is_leg_usable(q, leg) && leg->state == best)
                break;
            device->current = (device->current + 1) % device->leg_count;
        }
    }
    device->active_count = 0;
    for (uint32_t i = 0; i < device->leg_count; i++) {
        const struct leg *leg = &device->legs[i];
        if (!is_leg_usable(q, leg) || leg->state != best)
            continue;
        if (device->recovery.policy == KVDEV_PATHS_ACTIVE_PASSIVE && i != device->current)
            continue;
        for (uint32_t k = 0; k < q->path_count && device->active_count < KVDEV_QUEUE_DEVICE_ACTIVE_MAX; k++)
            if (q->paths[k].qp && q->paths[k].controller == leg->controller)
                device->active[device->active_count++] = (uint16_t)k;
    }
    if (device->active_count) {
        device->no_path_ns = 0;
        device->is_failed = 0;
    } else if (!device->no_path_ns) {
        device->no_path_ns = now_ns();
    }
    fail_due_update(q);
}

/* Tells the supervisor, once per association, that a queue pair of it is dead. */
void queue_controller_check(struct kvdev_queue *q, const struct path *path)
{
    if (path->controller == CONTROLLER_NONE || qpair_is_ready(path->qp))
        return;
    struct controller *controller = &q->controllers[path->controller];
    if (!controller->is_up || controller->has_fallen)
        return;
    controller->has_fallen = 1;
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++)
        if (q->devices[i].ops && leg_of(&q->devices[i], path->controller))
            queue_device_rebuild(q, &q->devices[i]);
    queue_notice(q);
}

/* Devices without a usable controller for too long: what waits for one fails, and what comes fails at once. */
void queue_devices_expire(struct kvdev_queue *q, uint64_t now)
{
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
        struct device *device = &q->devices[i];
        if (!device->ops || !device->is_recovering || !device->no_path_ns || device->is_failed ||
            now < add_ns(device->no_path_ns, device->recovery.fail_after_ns))
            continue;
        device->is_failed = 1;
        queue_device_cancel(q, device, -ENOTCONN);
        queue_delayed_cancel(q, i, -ENOTCONN);
    }
    fail_due_update(q);
}

/* ---- commands ---- */

static void requeue(struct kvdev_queue *q, uint32_t index)
{
    const struct node *node = &q->nodes[index];
    q->stats.requeued++;
    q->stats.pending_count++;
    list_push_front(q, &q->devices[node->io.device_index].pending[node->io.priority], index);
    device_activate(q, node->io.device_index, node->io.priority);
}

static void delay(struct kvdev_queue *q, uint32_t index, uint64_t due_ns)
{
    q->nodes[index].due_ns = due_ns;
    q->stats.pending_count++;
    list_push(q, &q->delayed, index);
    if (due_ns < q->delayed_due_ns)
        q->delayed_due_ns = due_ns;
}

static void hold(struct kvdev_queue *q, uint32_t index, uint32_t controller)
{
    const struct controller *entry = &q->controllers[controller];
    q->nodes[index].controller = (uint16_t)controller;
    q->stats.held++;
    delay(q, index, entry->is_up ? UINT64_MAX : entry->fence_ns);
}

/* The connection died under a command. 0: it goes on; else the error it ends with. */
static int recover_loss(struct kvdev_queue *q, const struct path *path, uint32_t index, int error, uint64_t send_ns)
{
    struct node *node = &q->nodes[index];
    const struct kvdev_queue_recovery *recovery = &q->devices[node->io.device_index].recovery;
    if (is_fused(q, node))
        return queue_node_error(q, node, error); /* one half of a pair is never sent without the other */
    if (!send_ns) {
        requeue(q, index);
        return 0;
    }
    if (error == -ETIMEDOUT && ++node->retries > recovery->retry_count)
        return queue_node_error(q, node, error);
    if (node->passthrough || ++node->losses > LOSSES_MAX)
        return queue_node_error(q, node, error);
    if (!changes_data(q, node))
        requeue(q, index);
    else if (recovery->is_uncertain_reported)
        return queue_node_error(q, node, error);
    else
        hold(q, index, path->controller);
    return 0;
}

static void suspect(struct kvdev_queue *q, struct device *device, uint32_t controller)
{
    struct leg *leg = leg_of(device, controller);
    if (!leg)
        return;
    leg->is_suspect = 1;
    q->controllers[controller].has_ana_error = 1;
    queue_device_rebuild(q, device);
    queue_notice(q);
}

/* The controller completed a command with an error status (Base 4.2.3). As recover_loss. */
static int recover_status(struct kvdev_queue *q, const struct path *path, uint32_t index, uint16_t status,
                          uint64_t now)
{
    struct node *node = &q->nodes[index];
    struct device *device = &q->devices[node->io.device_index];
    const struct controller *controller = &q->controllers[path->controller];
    uint64_t wait_ns = RETRY_DELAY_NS;
    uint16_t code = status & 0x7ff;
    if (node->passthrough && controller->has_ana && code >= 0x301 && code <= 0x303)
        suspect(q, device, path->controller); /* it fails, but not the next one */
    if (status & STATUS_DNR || node->passthrough)
        return queue_node_error(q, node, -EIO);
    switch (code) {
    case 0x301: /* ANA persistent loss, inaccessible, transition */
    case 0x302:
    case 0x303:
        if (controller->has_ana) {
            if (++node->losses > LOSSES_MAX)
                return queue_node_error(q, node, -EIO);
            suspect(q, device, path->controller);
            requeue(q, index);
            return 0;
        }
        break;
    case 0x300: /* internal, controller or host path error, aborted by the host: the path is at fault */
    case 0x360:
    case 0x370:
    case 0x371:
        if (device->leg_count > 1) {
            device->current++;
            queue_device_rebuild(q, device);
        }
        break;
    case 0x022: /* transient transport error: most likely a data digest */
        wait_ns = 0;
        break;
    case 0x005: /* power loss, submission queue deleted: it was aborted */
    case 0x008:
    case 0x021: /* interrupted, media not ready, namespace not ready */
    case 0x024:
    case 0x082:
        break;
    default:
        return queue_node_error(q, node, -EIO);
    }
    if (++node->retries > device->recovery.retry_count)
        return queue_node_error(q, node, -EIO);
    uint32_t crd = (uint32_t)status >> 11 & 3;
    if (crd && controller->retry_delay_ns[crd - 1])
        wait_ns = controller->retry_delay_ns[crd - 1];
    if (wait_ns) {
        node->controller = CONTROLLER_NONE;
        q->stats.requeued++;
        delay(q, index, add_ns(now, wait_ns));
    } else {
        requeue(q, index);
    }
    return 0;
}

/* A command failed. 0: it goes on; else the error it ends with. */
int queue_recover(struct kvdev_queue *q, const struct path *path, uint32_t index, int error, uint16_t status,
                   uint64_t send_ns, uint64_t now)
{
    struct node *node = &q->nodes[index];
    const struct device *device = &q->devices[node->io.device_index];
    int is_lost = error == -ENOTCONN || error == -ETIMEDOUT;
    if (is_lost && send_ns && changes_data(q, node))
        node->is_uncertain = 1;
    if (!device->ops || !device->is_recovering || device->generation != node->generation || device->error ||
        q->is_abandoning)
        return queue_node_error(q, node, error);
    if (is_lost)
        return recover_loss(q, path, index, error, send_ns);
    return recover_status(q, path, index, status, now);
}

/* Commands whose time has come are pending again. */
void queue_delayed_release(struct kvdev_queue *q, uint64_t now)
{
    struct list list = q->delayed;
    uint32_t index;
    q->delayed = (struct list){ NODE_NONE, NODE_NONE };
    q->delayed_due_ns = UINT64_MAX;
    while ((index = list_pop(q, &list)) != NODE_NONE) {
        struct node *node = &q->nodes[index];
        if (node->due_ns <= now) {
            list_push_front(q, &q->devices[node->io.device_index].pending[node->io.priority], index);
            device_activate(q, node->io.device_index, node->io.priority);
            continue;
        }
        list_push(q, &q->delayed, index);
        if (node->due_ns < q->delayed_due_ns)
            q->delayed_due_ns = node->due_ns;
    }
}

/* Ends the delayed commands of one device; of all with KVDEV_QUEUE_DEVICES_MAX. */
void queue_delayed_cancel(struct kvdev_queue *q, uint32_t device_index, int error)
{
    struct list list = q->delayed;
    uint64_t now = now_ns();
    uint32_t index;
    q->delayed = (struct list){ NODE_NONE, NODE_NONE };
    while ((index = list_pop(q, &list)) != NODE_NONE) {
        if (device_index == KVDEV_QUEUE_DEVICES_MAX || q->nodes[index].io.device_index == device_index)
            queue_node_refuse(q, index, error, now);
        else
            list_push(q, &q->delayed, index);
    }
}

/* ---- flushes: which writes they vouch for ----
 *
 * A flush covers what its controller completed (Base 7.2). So each controller that completed writes since the last
 * one gets it; and where such a controller was lost, with whatever cache it had, one that shares the cache and was
 * there before those writes and ever since vouches for them, or else the flush fails once. */

void queue_dirty_hand_over(const struct kvdev_queue *q, struct device *device, struct leg *lost)
{
    struct leg *heir = NULL;
    for (uint32_t i = 0; device->recovery.is_cache_shared && i < device->leg_count && !heir; i++) {
        struct leg *leg = &device->legs[i];
        if (leg != lost && is_leg_usable(q, leg) && q->controllers[leg->controller].made_ns < lost->dirty_ns)
            heir = leg;
    }
    if (!heir) {
        device->has_lost_writes = 1;
        device->lost_count++;
    } else {
        if (!heir->dirty_ns || lost->dirty_ns < heir->dirty_ns)
            heir->dirty_ns = lost->dirty_ns;
        if (lost->written_ns > heir->written_ns)
            heir->written_ns = lost->written_ns;
    }
    lost->dirty_ns = lost->written_ns = 0;
}

/* The controller that has to be flushed next; CONTROLLER_NONE when any will do. */
uint32_t queue_flush_controller(const struct kvdev_queue *q, struct device *device)
{
    for (uint32_t i = 0; i < device->leg_count; i++) {
        struct leg *leg = &device->legs[i];
        if (!leg->dirty_ns)
            continue;
        if (is_leg_usable(q, leg))
            return leg->controller;
        if (!is_controller_usable(q, leg->controller))
            continue; /* settled when it is taken down */
        queue_dirty_hand_over(q, device, leg);
    }
    return CONTROLLER_NONE;
}

/* A flush succeeded on one controller. 0: the next one has to be flushed; 1: it is done, error is its result. */
static int flush_done(struct kvdev_queue *q, struct device *device, const struct path *path, uint32_t index,
                      int *error)
{
    struct node *node = &q->nodes[index];
    struct leg *leg = leg_of(device, path->controller);
    if (leg)
        leg->dirty_ns = leg->written_ns < node->send_ns ? 0 : node->send_ns;
    for (uint32_t i = 0; i < device->leg_count; i++) {
        const struct leg *other = &device->legs[i];
        if (other != leg && other->dirty_ns && other->dirty_ns < node->submit_ns) {
            requeue(q, index);
            return 0;
        }
    }
    if (device->has_lost_writes) {
        device->has_lost_writes = 0;
        q->stats.uncertain++;
        *error = -KVDEV_EUNCERTAIN;
    }
    return 1;
}

/* Bookkeeping of a success on a namespace with a volatile cache. As flush_done. */
int queue_cache_note(struct kvdev_queue *q, const struct path *path, uint32_t index, uint64_t now, int *error)
{
    const struct node *node = &q->nodes[index];
    struct device *device = &q->devices[node->io.device_index];
    if (!device->ops || device->generation != node->generation ||
        (node->passthrough && !is_fused(q, node)))
        return 1;
    if (node->io.opcode == OPC_FLUSH)
        return flush_done(q, device, path, index, error);
    if (changes_data(q, node)) {
        struct leg *leg = leg_of(device, path->controller);
        /* When it was sent: by the time that its completion is seen, a restarted target may have a new controller. */
        if (leg && (!leg->dirty_ns || node->send_ns < leg->dirty_ns))
            leg->dirty_ns = node->send_ns;
        if (leg)
            leg->written_ns = now;
    }
    return 1;
}

/* Another process's writes, which a flush of ours has to vouch for: the controller that does was there before them. */
static void writes_note(const struct kvdev_queue *q, struct device *device, uint64_t sent_ns)
{
    for (uint32_t i = 0; i < device->leg_count; i++) {
        struct leg *leg = &device->legs[i];
        if (!is_leg_usable(q, leg) || q->controllers[leg->controller].made_ns >= sent_ns)
            continue;
        if (!leg->dirty_ns || sent_ns < leg->dirty_ns)
            leg->dirty_ns = sent_ns;
        leg->written_ns = now_ns();
        return;
    }
    device->has_lost_writes = 1;
    device->lost_count++;
}

int kvdev_queue_writes_note(struct kvdev_queue *q, uint32_t device_index, uint64_t sent_ns)
{
    queue_intrude(q);
    struct device *device = device_index < KVDEV_QUEUE_DEVICES_MAX ? &q->devices[device_index] : NULL;
    int error = device && device->ops ? 0 : -EINVAL;
    if (!error && device->recovery.has_volatile_cache && device->leg_count)
        writes_note(q, device, sent_ns);
    queue_retire(q);
    return error;
}

uint32_t kvdev_queue_lost_count(struct kvdev_queue *q, uint32_t device_index)
{
    queue_intrude(q);
    uint32_t count = device_index < KVDEV_QUEUE_DEVICES_MAX ? q->devices[device_index].lost_count : 0;
    queue_retire(q);
    return count;
}

#include "queue.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"
#include "queue_device.h"

#define NODE_NONE 0xffffffffu
#define QPAIR_NONE 0xffffu
#define CAPACITY_MAX (1u << 20)
#define BLOCKS_MAX 65536u                /* NLB is 16 bits, 0's based */
#define WINDOW_DEFAULT_BYTES (1u << 20)  /* what stays in the caches of both ends at full speed */
#define TIMEOUT_DEFAULT_NS 30000000000ull
#define SPIN_DEFAULT_NS 20000ull
#define SPIN_MAX_BYTES (256u << 10)      /* with more in flight, sleeping loses nothing and lets data gather */
#define PAUSES_MIN 8u
#define PAUSES_MAX 128u                  /* a few microseconds */
#define IDLE_CHECK_NS 5000000ull         /* an idle connection is looked at before it is trusted again */
#define DSM_RANGES_MAX 256u
#define DSM_RANGE_BYTES 16u
#define NS_PER_S 1000000000ull
#define CONTROLLER_NONE 0xffffu
#define LOSSES_MAX 32u                   /* a command that so many connections died under is likely the cause */
#define RETRY_DELAY_NS 100000000ull      /* before a retry where the controller asks for no delay of its own */
#define STATUS_DNR 0x4000u

#define OPC_FLUSH 0x00
#define OPC_WRITE 0x01
#define OPC_READ 0x02
#define OPC_COMPARE 0x05
#define OPC_WRITE_ZEROES 0x08
#define OPC_DSM 0x09
#define OPC_VERIFY 0x0c
#define OPC_COPY 0x19
#define COPY_RANGE_BYTES 32u
#define COPY_RANGES_MAX 256u
#define SQE_FUSE_FIRST 0x01u
#define SQE_FUSE_SECOND 0x02u
#define CDW12_FUA (1u << 30)
#define CDW12_DEAC (1u << 25)
#define CDW11_DSM_DEALLOCATE (1u << 2)

/* One accepted command: free, then pending, then in flight, then done, then free again. */
struct node {
    struct kvdev_io io;
    uint64_t submit_ns;
    uint64_t send_ns;
    uint64_t complete_ns;
    uint64_t deadline_ns;    /* 0: from the queue's time limit when it starts */
    uint32_t next;
    int32_t error;
    uint32_t result;
    uint16_t status;
    uint16_t qpair_index;
    uint8_t passthrough;     /* index + 1 into the passthrough table; 0 for a plain command */
    uint8_t is_uncertain;    /* it was sent on a connection that is lost, and changes data */
    uint8_t losses;
    uint8_t retries;
    uint16_t controller;     /* whose fence a held command waits for */
    uint16_t generation;     /* of its device */
    uint64_t due_ns;         /* a held or delayed command is pending again then */
};

struct passthrough {
    uint8_t sqe[KVDEV_SQE_BYTES];
    uint8_t *data;
    uint32_t len;
    uint32_t direction;
    uint8_t *cqe;            /* set for execute: the caller waits for it here */
    int *is_done;
    int *error;
    uint64_t *send_ns;
    uint32_t mate;           /* of the first half of a fused pair: the node of the second, until that is started */
    uint8_t is_fused;
    uint8_t in_use;
};

struct list {
    uint32_t head;
    uint32_t tail;
};

struct device;

/* What a kind of device does: NVMe/TCP namespaces, and those with a driver of their own. */
struct device_ops {
    /* Reason to refuse a command, KVDEV_REFUSED_NONE if there is none. */
    uint32_t (*check)(const struct device *device, const struct kvdev_io *io);
    /* Hands one command down: 0, -EAGAIN (no room, nothing of lower priority may pass), -ENOTCONN (all paths
     * dead), -EINVAL (it cannot be sent). */
    int (*start)(struct kvdev_queue *queue, struct device *device, uint32_t node_index, uint64_t now_ns);
    int (*is_alive)(const struct kvdev_queue *queue, const struct device *device);
};

/* One controller of a namespace. */
struct leg {
    uint16_t controller;
    uint8_t state;                /* KVDEV_PATH_* */
    uint8_t is_suspect;           /* an ANA error came: unusable until its state is set again */
    uint64_t dirty_ns;            /* when the first write was sent that has completed and no flush covers; 0: none */
    uint64_t written_ns;          /* when the last one did */
};

struct device {
    const struct device_ops *ops; /* NULL: the entry is free */
    struct kvdev_queue_namespace ns;
    const struct kvdev_queue_driver *driver; /* NULL for a namespace */
    void *object;                 /* the driver's */
    int is_blocked;               /* of a driver's device, like a path's */
    struct kvdev_queue_recovery recovery;
    struct list pending[KVDEV_QUEUE_PRIORITY_COUNT];
    uint8_t is_active[KVDEV_QUEUE_PRIORITY_COUNT];
    uint8_t is_recovering;
    uint8_t is_failed;            /* no usable controller for longer than fail_after_ns */
    uint8_t has_lost_writes;      /* completed, not flushed, and nobody vouches for them: the next flush says so */
    int error;                    /* what commands complete with, 0 in good times */
    uint16_t generation;
    uint16_t active_count;
    uint16_t active[KVDEV_QUEUE_DEVICE_ACTIVE_MAX]; /* queue pairs in use */
    uint32_t turn;                /* round robin */
    uint32_t current;             /* active/passive: the leg */
    uint32_t leg_count;
    struct leg legs[KVDEV_QUEUE_DEVICE_PATHS_MAX];
    uint64_t no_path_ns;          /* since when there is no usable controller; 0 while there is one */
};

/* One controller address: at most one association at a time. */
struct controller {
    uint8_t in_use;
    uint8_t is_up;
    uint8_t has_fallen;
    uint8_t has_ana;
    uint8_t has_ana_error;
    uint64_t made_ns;
    uint64_t fence_ns;
    uint64_t retry_delay_ns[3];
};

struct path {
    struct kvdev_queue *queue;
    struct kvdev_qpair *qp;       /* NULL: the entry is free */
    uint64_t last_done_ns;
    uint32_t index;
    uint16_t controller;          /* CONTROLLER_NONE for a queue pair of its own */
    int is_blocked;               /* in this dispatch pass something of higher rank waits for it */
};

/* Devices with commands pending at one priority, each at most once. */
struct rotation {
    uint16_t entries[KVDEV_QUEUE_DEVICES_MAX];
    uint32_t head;
    uint32_t count;
};

struct kvdev_queue {
    struct kvdev_queue_options options;
    struct kvdev_queue_stats stats;
    atomic_flag busy;             /* finds two threads on the data path, which is misuse */
    pthread_mutex_t lock;         /* held by the data path while it is inside, sleep included; intruders wake it */
    pthread_cond_t calm;
    atomic_uint intruders;
    int wake_fd;
    int notice_fd;
    int is_abandoning;
    struct list delayed;          /* commands that wait for their due_ns; counted as pending */
    uint64_t delayed_due_ns;      /* none of them is due earlier */
    uint64_t fail_due_ns;         /* no device runs out of patience earlier */
    struct controller controllers[KVDEV_QUEUE_CONTROLLERS_MAX];
    struct node *nodes;
    uint32_t free_head;
    uint32_t free_count;
    struct list done;
    uint32_t path_count;          /* entries ever used: the loops' bound */
    struct path paths[KVDEV_QUEUE_QPAIRS_MAX];
    struct device devices[KVDEV_QUEUE_DEVICES_MAX];
    uint32_t driven_count;        /* devices that have a driver */
    uint16_t driven[KVDEV_QUEUE_DEVICES_MAX];
    struct rotation rotations[KVDEV_QUEUE_PRIORITY_COUNT];
    struct passthrough passthroughs[KVDEV_QUEUE_PASSTHROUGH_MAX];
    size_t refused_index;
    uint32_t refused_reason;
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

/* ---- lists of nodes ---- */

static void list_push(struct kvdev_queue *q, struct list *list, uint32_t index)
{
    q->nodes[index].next = NODE_NONE;
    if (list->head == NODE_NONE)
        list->head = index;
    else
        q->nodes[list->tail].next = index;
    list->tail = index;
}

static void list_push_front(struct kvdev_queue *q, struct list *list, uint32_t index)
{
    q->nodes[index].next = list->head;
    if (list->head == NODE_NONE)
        list->tail = index;
    list->head = index;
}

static uint32_t list_pop(struct kvdev_queue *q, struct list *list)
{
    uint32_t index = list->head;
    if (index != NODE_NONE)
        list->head = q->nodes[index].next;
    return index;
}

static uint32_t node_take(struct kvdev_queue *q)
{
    uint32_t index = q->free_head;
    q->free_head = q->nodes[index].next;
    q->free_count--;
    return index;
}

static void node_give(struct kvdev_queue *q, uint32_t index)
{
    q->nodes[index].next = q->free_head;
    q->free_head = index;
    q->free_count++;
}

/* ---- completion ---- */

static void group_count_down(const struct node *node)
{
    struct kvdev_io_group *group = (struct kvdev_io_group *)(uintptr_t)node->io.group_addr;
    if (node->error && !group->error) {
        group->error = node->error;
        group->status = node->status;
    }
    if (!group->remaining)
        return;
    if (group->remaining == 1) {
        group->complete_ns = node->complete_ns;
        /* Now, while the page is still in the cache. */
        if ((group->flags & KVDEV_GROUP_CRC32C) && !group->error)
            group->crc32c = kvdev_crc32c(0, (const void *)(uintptr_t)group->buf_addr, group->byte_count);
    }
    /* Last: whoever sees 0 finds the rest of the group written. */
    __atomic_store_n(&group->remaining, group->remaining - 1, __ATOMIC_RELEASE);
}

static void node_done(struct kvdev_queue *q, uint32_t index, int error, uint16_t status, uint32_t result)
{
    struct node *node = &q->nodes[index];
    node->error = error;
    node->status = status;
    node->result = result;
    if (error)
        q->stats.failed++;
    if (node->io.group_addr)
        group_count_down(node);
    if (node->passthrough) {
        struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
        pass->in_use = 0;
        if (pass->is_done) {
            *pass->is_done = 1;
            *pass->error = error;
            if (pass->send_ns)
                *pass->send_ns = node->send_ns;
            node_give(q, index);
            return;
        }
    }
    list_push(q, &q->done, index);
    q->stats.done_count++;
}

/* The error that is known for certain: a write lost once has an unknown fate until it succeeds. */
static int node_error(struct kvdev_queue *q, const struct node *node, int error)
{
    if (!node->is_uncertain)
        return error;
    q->stats.uncertain++;
    return -KVDEV_EUNCERTAIN;
}

/* The second half of a fused pair that has not been started: it is nobody's but the first one's. */
static uint32_t mate_take(struct kvdev_queue *q, const struct node *node)
{
    if (!node->passthrough)
        return NODE_NONE;
    struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
    uint32_t mate = pass->mate;
    pass->mate = NODE_NONE;
    return mate;
}

/* A pending command that will not be sent (again). */
static void node_refuse(struct kvdev_queue *q, uint32_t index, int error, uint64_t now)
{
    struct node *node = &q->nodes[index];
    uint32_t mate = mate_take(q, node);
    if (mate != NODE_NONE)
        node_refuse(q, mate, error, now);
    if (!node->is_uncertain)
        node->send_ns = 0;
    node->complete_ns = now;
    node->qpair_index = QPAIR_NONE;
    q->stats.pending_count--;
    node_done(q, index, node_error(q, node, error), 0, 0);
}

static void notice(const struct kvdev_queue *q)
{
    uint64_t one = 1;
    if (q->notice_fd >= 0) {
        /* Full means that a notice is pending already. */
        ssize_t n = write(q->notice_fd, &one, sizeof one);
        (void)n;
    }
}

/* ---- recovery: which commands go on after what ---- */

static void device_activate(struct kvdev_queue *q, uint32_t device_index, uint32_t priority);

static int is_controller_usable(const struct kvdev_queue *q, uint32_t index)
{
    return q->controllers[index].is_up && !q->controllers[index].has_fallen;
}

static int is_leg_usable(const struct kvdev_queue *q, const struct leg *leg)
{
    return is_controller_usable(q, leg->controller) && leg->state != KVDEV_PATH_UNUSABLE && !leg->is_suspect;
}

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
static void device_rebuild(struct kvdev_queue *q, struct device *device)
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

static struct leg *leg_of(struct device *device, uint32_t controller)
{
    for (uint32_t i = 0; i < device->leg_count; i++)
        if (device->legs[i].controller == controller)
            return &device->legs[i];
    return NULL;
}

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

static int is_fused(const struct kvdev_queue *q, const struct node *node)
{
    return node->passthrough && q->passthroughs[node->passthrough - 1].is_fused;
}

static int changes_data(const struct kvdev_queue *q, const struct node *node)
{
    if (node->passthrough && !is_fused(q, node))
        return q->passthroughs[node->passthrough - 1].direction != KVDEV_DIR_C2H;
    return node->io.opcode == OPC_WRITE || node->io.opcode == OPC_WRITE_ZEROES || node->io.opcode == OPC_DSM ||
           node->io.opcode == OPC_COPY;
}

/* The connection died under a command. 0: it goes on; else the error it ends with. */
static int recover_loss(struct kvdev_queue *q, const struct path *path, uint32_t index, int error, uint64_t send_ns)
{
    struct node *node = &q->nodes[index];
    const struct kvdev_queue_recovery *recovery = &q->devices[node->io.device_index].recovery;
    if (is_fused(q, node))
        return node_error(q, node, error); /* one half of a pair is never sent without the other */
    if (!send_ns) {
        requeue(q, index);
        return 0;
    }
    if (error == -ETIMEDOUT && ++node->retries > recovery->retry_count)
        return node_error(q, node, error);
    if (node->passthrough || ++node->losses > LOSSES_MAX)
        return node_error(q, node, error);
    if (!changes_data(q, node))
        requeue(q, index);
    else if (recovery->is_uncertain_reported)
        return node_error(q, node, error);
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
    device_rebuild(q, device);
    notice(q);
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
        return node_error(q, node, -EIO);
    switch (code) {
    case 0x301: /* ANA persistent loss, inaccessible, transition */
    case 0x302:
    case 0x303:
        if (controller->has_ana) {
            if (++node->losses > LOSSES_MAX)
                return node_error(q, node, -EIO);
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
            device_rebuild(q, device);
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
        return node_error(q, node, -EIO);
    }
    if (++node->retries > device->recovery.retry_count)
        return node_error(q, node, -EIO);
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
static int recover(struct kvdev_queue *q, const struct path *path, uint32_t index, int error, uint16_t status,
                   uint64_t send_ns, uint64_t now)
{
    struct node *node = &q->nodes[index];
    const struct device *device = &q->devices[node->io.device_index];
    int is_lost = error == -ENOTCONN || error == -ETIMEDOUT;
    if (is_lost && send_ns && changes_data(q, node))
        node->is_uncertain = 1;
    if (!device->ops || !device->is_recovering || device->generation != node->generation || device->error ||
        q->is_abandoning)
        return node_error(q, node, error);
    if (is_lost)
        return recover_loss(q, path, index, error, send_ns);
    return recover_status(q, path, index, status, now);
}

/* Commands whose time has come are pending again. */
static void delayed_release(struct kvdev_queue *q, uint64_t now)
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
static void delayed_cancel(struct kvdev_queue *q, uint32_t device_index, int error)
{
    struct list list = q->delayed;
    uint64_t now = now_ns();
    uint32_t index;
    q->delayed = (struct list){ NODE_NONE, NODE_NONE };
    while ((index = list_pop(q, &list)) != NODE_NONE) {
        if (device_index == KVDEV_QUEUE_DEVICES_MAX || q->nodes[index].io.device_index == device_index)
            node_refuse(q, index, error, now);
        else
            list_push(q, &q->delayed, index);
    }
}

/* ---- flushes: which writes they vouch for ----
 *
 * A flush covers what its controller completed (Base 7.2). So each controller that completed writes since the last
 * one gets it; and where such a controller was lost, with whatever cache it had, one that shares the cache and was
 * there before those writes and ever since vouches for them, or else the flush fails once. */

static void dirty_hand_over(const struct kvdev_queue *q, struct device *device, struct leg *lost)
{
    struct leg *heir = NULL;
    for (uint32_t i = 0; device->recovery.is_cache_shared && i < device->leg_count && !heir; i++) {
        struct leg *leg = &device->legs[i];
        if (leg != lost && is_leg_usable(q, leg) && q->controllers[leg->controller].made_ns < lost->dirty_ns)
            heir = leg;
    }
    if (!heir) {
        device->has_lost_writes = 1;
    } else {
        if (!heir->dirty_ns || lost->dirty_ns < heir->dirty_ns)
            heir->dirty_ns = lost->dirty_ns;
        if (lost->written_ns > heir->written_ns)
            heir->written_ns = lost->written_ns;
    }
    lost->dirty_ns = lost->written_ns = 0;
}

/* The controller that has to be flushed next; CONTROLLER_NONE when any will do. */
static uint32_t flush_controller(const struct kvdev_queue *q, struct device *device)
{
    for (uint32_t i = 0; i < device->leg_count; i++) {
        struct leg *leg = &device->legs[i];
        if (!leg->dirty_ns)
            continue;
        if (is_leg_usable(q, leg))
            return leg->controller;
        if (!is_controller_usable(q, leg->controller))
            continue; /* settled when it is taken down */
        dirty_hand_over(q, device, leg);
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
static int cache_note(struct kvdev_queue *q, const struct path *path, uint32_t index, uint64_t now, int *error)
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

static void on_qpair_done(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns,
                          uint64_t at_ns)
{
    struct path *path = owner;
    struct kvdev_queue *q = path->queue;
    uint32_t index = (uint32_t)cookie;
    struct node *node = &q->nodes[index];
    uint16_t status = (uint16_t)(kvdev_load_le16(cqe + 14) >> 1);
    if (send_ns || !node->is_uncertain)
        node->send_ns = send_ns; /* of an uncertain one 0 would say that it never left this host */
    node->complete_ns = at_ns;
    node->qpair_index = (uint16_t)path->index;
    path->last_done_ns = at_ns;
    q->stats.in_flight_count--;
    if (node->passthrough && q->passthroughs[node->passthrough - 1].cqe)
        memcpy(q->passthroughs[node->passthrough - 1].cqe, cqe, KVDEV_CQE_BYTES);
    if (!error && (status & 0x7ff))
        error = -EIO;
    if (error) {
        error = recover(q, path, index, error, status, send_ns, at_ns);
        if (!error)
            return;
    } else if (q->devices[node->io.device_index].recovery.has_volatile_cache &&
               !cache_note(q, path, index, at_ns, &error)) {
        return;
    }
    node_done(q, index, error, status, kvdev_load_le32(cqe));
}

/* ---- NVMe/TCP namespaces ---- */

static int is_payload_opcode(uint8_t opcode)
{
    return opcode == OPC_WRITE || opcode == OPC_READ || opcode == OPC_COMPARE;
}

static uint32_t namespace_check(const struct device *device, const struct kvdev_io *io)
{
    const struct kvdev_queue_namespace *ns = &device->ns;
    uint8_t opcode = io->opcode;
    if (!is_payload_opcode(opcode) && opcode != OPC_FLUSH && opcode != OPC_WRITE_ZEROES && opcode != OPC_DSM &&
        opcode != OPC_VERIFY && opcode != OPC_COPY)
        return KVDEV_REFUSED_OPCODE;
    if (opcode == OPC_FLUSH)
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if (opcode == OPC_DSM && io->byte_count) {
        if (io->byte_count % DSM_RANGE_BYTES || io->byte_count > DSM_RANGES_MAX * DSM_RANGE_BYTES)
            return KVDEV_REFUSED_LENGTH;
        return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
    }
    if (!io->lba_count || (opcode != OPC_DSM && io->lba_count > BLOCKS_MAX))
        return KVDEV_REFUSED_COUNT;
    if (io->slba > ns->block_count || io->lba_count > ns->block_count - io->slba)
        return KVDEV_REFUSED_RANGE;
    if (opcode == OPC_COPY) {
        if (!io->byte_count || io->byte_count % COPY_RANGE_BYTES || io->byte_count > COPY_RANGES_MAX * COPY_RANGE_BYTES)
            return KVDEV_REFUSED_LENGTH;
        return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
    }
    if (!is_payload_opcode(opcode))
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if ((uint64_t)io->lba_count * ns->block_size_bytes != io->byte_count)
        return KVDEV_REFUSED_LENGTH;
    if (ns->max_transfer_bytes && io->byte_count > ns->max_transfer_bytes)
        return KVDEV_REFUSED_TRANSFER;
    return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
}

/* The ready queue pair with the fewest bytes in flight that takes so many more; NULL if none does. */
static struct path *path_choose(struct kvdev_queue *q, struct device *device, uint32_t bytes, uint32_t slots,
                                uint64_t now, int *is_any_ready)
{
    struct path *best = NULL;
    uint32_t best_bytes = UINT32_MAX;
    uint32_t count = device->active_count;
    uint32_t first = 0;
    *is_any_ready = 0;
    if (device->recovery.policy == KVDEV_PATHS_ROUND_ROBIN && count)
        first = device->turn % count;
    for (uint32_t i = 0; i < count && i < device->active_count; i++) {
        uint32_t at = first + i < count ? first + i : first + i - count;
        struct path *path = &q->paths[device->active[at]];
        if (!path->qp || !kvdev_qpair_is_ready(path->qp))
            continue;
        uint32_t outstanding = kvdev_qpair_outstanding(path->qp);
        if (!outstanding && now > path->last_done_ns + IDLE_CHECK_NS) {
            /* It may have been closed while nobody looked; a command sent into that would have an unknown fate. */
            kvdev_qpair_receive(path->qp);
            path->last_done_ns = now;
            if (!kvdev_qpair_is_ready(path->qp))
                continue;
        }
        *is_any_ready = 1;
        uint32_t in_flight = kvdev_qpair_in_flight_bytes(path->qp);
        int fits = !in_flight || (in_flight <= q->options.window_size_bytes &&
                                  bytes <= q->options.window_size_bytes - in_flight);
        if (path->is_blocked || !fits || kvdev_qpair_room(path->qp) < slots || in_flight >= best_bytes)
            continue;
        best = path;
        best_bytes = in_flight;
        if (device->recovery.policy == KVDEV_PATHS_ROUND_ROBIN) {
            device->turn = at + 1;
            break;
        }
    }
    return best;
}

/* A queue pair of one controller, whatever else is in flight on it. */
static struct path *path_of_controller(struct kvdev_queue *q, uint32_t controller)
{
    for (uint32_t i = 0; i < q->path_count; i++) {
        struct path *path = &q->paths[i];
        if (path->qp && path->controller == controller && kvdev_qpair_room(path->qp))
            return path;
    }
    return NULL;
}

static void sqe_build(const struct device *device, const struct kvdev_io *io, uint8_t *wire)
{
    uint32_t nlb_0based = io->lba_count - 1;
    memset(wire, 0, KVDEV_SQE_BYTES);
    wire[0] = io->opcode;
    kvdev_store_le32(wire + 4, device->ns.nsid);
    if (io->opcode == OPC_FLUSH)
        return;
    if (io->opcode == OPC_DSM) {
        kvdev_store_le32(wire + 40, io->byte_count ? io->byte_count / DSM_RANGE_BYTES - 1 : 0);
        kvdev_store_le32(wire + 44, CDW11_DSM_DEALLOCATE);
        return;
    }
    if (io->opcode == OPC_COPY)
        nlb_0based = io->byte_count / COPY_RANGE_BYTES - 1;
    if ((io->flags & KVDEV_IO_FUA) && io->opcode != OPC_COMPARE && io->opcode != OPC_VERIFY)
        nlb_0based |= CDW12_FUA;
    if ((io->flags & KVDEV_IO_DEALLOCATE) && io->opcode == OPC_WRITE_ZEROES)
        nlb_0based |= CDW12_DEAC;
    kvdev_store_le64(wire + 40, io->slba);
    kvdev_store_le32(wire + 48, nlb_0based);
}

/* Both halves one after the other, with nothing between: the first is refused as any command, and the second with it. */
static int passthrough_start(struct kvdev_queue *q, struct path *path, uint32_t index, uint64_t deadline)
{
    const struct node *node = &q->nodes[index];
    const struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
    int error =
        kvdev_qpair_start(path->qp, pass->sqe, pass->data, pass->len, pass->direction, index, deadline);
    uint32_t mate = error ? NODE_NONE : mate_take(q, node);
    if (mate == NODE_NONE)
        return error;
    q->stats.pending_count--;
    q->stats.in_flight_count++;
    pass = &q->passthroughs[q->nodes[mate].passthrough - 1];
    /* The queue pair had room for two. */
    return kvdev_qpair_start(path->qp, pass->sqe, pass->data, pass->len, pass->direction, mate, deadline);
}

static int namespace_start(struct kvdev_queue *q, struct device *device, uint32_t index, uint64_t now)
{
    struct node *node = &q->nodes[index];
    const struct kvdev_io *io = &node->io;
    int is_any_ready = 0;
    uint32_t bytes = node->passthrough ? q->passthroughs[node->passthrough - 1].len : io->byte_count;
    if (device->error)
        return device->error;
    struct path *path = path_choose(q, device, bytes, is_fused(q, node) ? 2 : 1, now, &is_any_ready);
    if (!path) {
        if (!is_any_ready && (!device->is_recovering || device->is_failed))
            return -ENOTCONN;
        for (uint32_t i = 0; i < device->active_count; i++)
            q->paths[device->active[i]].is_blocked = 1;
        return -EAGAIN;
    }
    if (io->opcode == OPC_FLUSH && !node->passthrough && device->recovery.has_volatile_cache) {
        uint32_t controller = flush_controller(q, device);
        if (controller != CONTROLLER_NONE && controller != path->controller)
            path = path_of_controller(q, controller);
        if (!path)
            return -EAGAIN;
    }
    uint64_t deadline = node->deadline_ns ? node->deadline_ns : add_ns(now, q->options.command_timeout_ns);
    if (node->passthrough)
        return passthrough_start(q, path, index, deadline);
    uint8_t sqe[KVDEV_SQE_BYTES];
    sqe_build(device, io, sqe);
    if (io->opcode == OPC_DSM && !io->byte_count) {
        uint8_t range[DSM_RANGE_BYTES] = { 0 };
        kvdev_store_le32(range + 4, io->lba_count);
        kvdev_store_le64(range + 8, io->slba);
        return kvdev_qpair_start_inline(path->qp, sqe, range, sizeof range, index, deadline);
    }
    uint32_t direction = !io->byte_count ? KVDEV_DIR_NONE : io->opcode == OPC_READ ? KVDEV_DIR_C2H : KVDEV_DIR_H2C;
    return kvdev_qpair_start(path->qp, sqe, io->byte_count ? (void *)(uintptr_t)io->buf_addr : NULL, io->byte_count,
                             direction, index, deadline);
}

static int namespace_is_alive(const struct kvdev_queue *q, const struct device *device)
{
    for (uint32_t i = 0; i < device->active_count; i++) {
        const struct kvdev_qpair *qp = q->paths[device->active[i]].qp;
        if (qp && kvdev_qpair_is_ready(qp))
            return 1;
    }
    return 0;
}

static const struct device_ops namespace_ops = { namespace_check, namespace_start, namespace_is_alive };

/* ---- devices with a driver ---- */

static void on_driver_done(void *owner, uint64_t cookie, int error, uint16_t status, uint64_t send_ns, uint64_t at_ns)
{
    struct kvdev_queue *q = owner;
    uint32_t index = (uint32_t)cookie;
    struct node *node = &q->nodes[index];
    node->send_ns = send_ns;
    node->complete_ns = at_ns;
    node->qpair_index = QPAIR_NONE;
    q->stats.in_flight_count--;
    node_done(q, index, error, status, 0);
}

static uint32_t driven_check(const struct device *device, const struct kvdev_io *io)
{
    return device->driver->check(device->object, io);
}

static int driven_start(struct kvdev_queue *q, struct device *device, uint32_t index, uint64_t now)
{
    struct node *node = &q->nodes[index];
    if (device->is_blocked)
        return -EAGAIN;
    uint64_t deadline = node->deadline_ns ? node->deadline_ns : add_ns(now, q->options.command_timeout_ns);
    int error = device->driver->start(device->object, &node->io, index, deadline, now);
    if (error == -EAGAIN)
        device->is_blocked = 1;
    return error;
}

static int driven_is_alive(const struct kvdev_queue *q, const struct device *device)
{
    (void)q;
    return device->driver->is_alive(device->object);
}

static const struct device_ops driven_ops = { driven_check, driven_start, driven_is_alive };

/* ---- dispatch ---- */

static void device_activate(struct kvdev_queue *q, uint32_t device_index, uint32_t priority)
{
    struct rotation *rotation = &q->rotations[priority];
    if (q->devices[device_index].is_active[priority])
        return;
    q->devices[device_index].is_active[priority] = 1;
    rotation->entries[(rotation->head + rotation->count) % KVDEV_QUEUE_DEVICES_MAX] = (uint16_t)device_index;
    rotation->count++;
}

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
    node_refuse(q, index, error, now);
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

/* ---- life ---- */

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
    q->delayed_due_ns = q->fail_due_ns = UINT64_MAX;
    q->notice_fd = -1;
    atomic_init(&q->intruders, 0);
    q->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int error = q->wake_fd < 0 ? -errno : -pthread_mutex_init(&q->lock, NULL);
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
    if (kvdev_qpair_outstanding(path->qp))
        kvdev_qpair_kill(path->qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "given up");
    kvdev_qpair_owner_set(path->qp, NULL, NULL);
    kvdev_qpair_destroy(path->qp);
    path->qp = NULL;
}

void kvdev_queue_destroy(struct kvdev_queue *q)
{
    if (!q)
        return;
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            path_drop(q, i);
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        device->driver->detach(device->object);
    }
    close(q->wake_fd);
    pthread_cond_destroy(&q->calm);
    pthread_mutex_destroy(&q->lock);
    free(q->nodes);
    free(q);
}

static int enter(struct kvdev_queue *q)
{
    if (atomic_flag_test_and_set_explicit(&q->busy, memory_order_acquire))
        return -EBUSY;
    pthread_mutex_lock(&q->lock);
    return 0;
}

static void leave(struct kvdev_queue *q)
{
    pthread_mutex_unlock(&q->lock);
    atomic_flag_clear_explicit(&q->busy, memory_order_release);
}

/* Another thread wants to change the tables: makes the data path step aside, asleep or not. */
static void intrude(struct kvdev_queue *q)
{
    uint64_t one = 1;
    atomic_fetch_add(&q->intruders, 1);
    ssize_t n = write(q->wake_fd, &one, sizeof one);
    (void)n;
    pthread_mutex_lock(&q->lock);
}

static void retire(struct kvdev_queue *q)
{
    atomic_fetch_sub(&q->intruders, 1);
    pthread_cond_broadcast(&q->calm);
    pthread_mutex_unlock(&q->lock);
}

/* Lets intruders in. What they do is short and bounded. */
static void step_aside(struct kvdev_queue *q)
{
    while (atomic_load(&q->intruders))
        pthread_cond_wait(&q->calm, &q->lock);
}

/* ---- the tables ---- */

static void path_take(struct kvdev_queue *q, uint32_t index, struct kvdev_qpair *qp, uint32_t controller)
{
    struct path *path = &q->paths[index];
    *path = (struct path){ .queue = q, .qp = qp, .index = index, .controller = (uint16_t)controller };
    kvdev_qpair_hold(qp);
    kvdev_qpair_owner_set(qp, on_qpair_done, path);
    if (index >= q->path_count)
        q->path_count = index + 1;
}

int kvdev_queue_qpair_add(struct kvdev_queue *q, struct kvdev_qpair *qp, uint32_t *ret)
{
    if (enter(q))
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
    leave(q);
    return error;
}

int kvdev_queue_qpair_remove(struct kvdev_queue *q, uint32_t qpair_index)
{
    if (enter(q))
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
    leave(q);
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
static uint32_t device_take(struct kvdev_queue *q, const struct device_ops *ops)
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
    if (enter(q))
        return -EBUSY;
    int error = namespace_is_valid(q, ns) ? 0 : -EINVAL;
    if (!error) {
        uint32_t index = device_take(q, &namespace_ops);
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
    leave(q);
    return error;
}

int kvdev_queue_device_add(struct kvdev_queue *q, const struct kvdev_queue_driver *driver, void *object, uint32_t *ret)
{
    if (enter(q))
        return -EBUSY;
    int error = driver->attach(object, on_driver_done, q);
    if (!error) {
        uint32_t index = device_take(q, &driven_ops);
        if (index < KVDEV_QUEUE_DEVICES_MAX) {
            q->devices[index].driver = driver;
            q->devices[index].object = object;
            q->driven[q->driven_count++] = (uint16_t)index;
            *ret = index;
        } else {
            driver->detach(object);
            error = -ENOSPC;
        }
    }
    leave(q);
    return error;
}

static int driver_swap(struct kvdev_queue *q, struct device *device, void *object)
{
    int error = device->driver->attach(object, on_driver_done, q);
    if (error)
        return error;
    device->driver->detach(device->object);
    device->object = object;
    return 0;
}

int kvdev_queue_device_replace(struct kvdev_queue *q, uint32_t device_index, void *object)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || q->devices[device_index].ops != &driven_ops)
        return -EINVAL;
    if (enter(q))
        return -EBUSY;
    struct device *device = &q->devices[device_index];
    int error = driver_swap(q, device, object);
    leave(q);
    return error;
}

static void device_cancel_pending(struct kvdev_queue *q, struct device *device, int error)
{
    uint64_t now = now_ns();
    for (uint32_t priority = 0; priority < KVDEV_QUEUE_PRIORITY_COUNT; priority++) {
        uint32_t index;
        while ((index = list_pop(q, &device->pending[priority])) != NODE_NONE)
            node_refuse(q, index, error, now);
    }
}

static void driver_drop(struct kvdev_queue *q, uint32_t device_index)
{
    struct device *device = &q->devices[device_index];
    device->driver->detach(device->object);
    device->driver = NULL;
    device->object = NULL;
    for (uint32_t i = 0; i < q->driven_count; i++)
        if (q->driven[i] == device_index)
            q->driven[i] = q->driven[--q->driven_count];
}

int kvdev_queue_device_remove(struct kvdev_queue *q, uint32_t device_index)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || !q->devices[device_index].ops)
        return -EINVAL;
    if (enter(q))
        return -EBUSY;
    device_cancel_pending(q, &q->devices[device_index], -ECANCELED);
    if (q->devices[device_index].driver)
        driver_drop(q, device_index);
    delayed_cancel(q, device_index, -ECANCELED);
    q->devices[device_index].ops = NULL;
    q->devices[device_index].active_count = 0;
    leave(q);
    return 0;
}

int kvdev_queue_device_is_alive(const struct kvdev_queue *q, uint32_t device_index)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || !q->devices[device_index].ops)
        return 0;
    return q->devices[device_index].ops->is_alive(q, &q->devices[device_index]);
}

/* Tells the supervisor, once per association, that a queue pair of it is dead. */
static void controller_check(struct kvdev_queue *q, const struct path *path)
{
    if (path->controller == CONTROLLER_NONE || kvdev_qpair_is_ready(path->qp))
        return;
    struct controller *controller = &q->controllers[path->controller];
    if (!controller->is_up || controller->has_fallen)
        return;
    controller->has_fallen = 1;
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++)
        if (q->devices[i].ops && leg_of(&q->devices[i], path->controller))
            device_rebuild(q, &q->devices[i]);
    notice(q);
}

int kvdev_queue_abandon(struct kvdev_queue *q)
{
    if (enter(q))
        return -EBUSY;
    q->is_abandoning = 1;
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++)
        if (q->devices[i].ops)
            device_cancel_pending(q, &q->devices[i], -ECANCELED);
    delayed_cancel(q, KVDEV_QUEUE_DEVICES_MAX, -ECANCELED);
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp && kvdev_qpair_outstanding(q->paths[i].qp)) {
            kvdev_qpair_kill(q->paths[i].qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "given up");
            controller_check(q, &q->paths[i]);
        }
    for (uint32_t i = 0; i < q->driven_count; i++) {
        const struct device *device = &q->devices[q->driven[i]];
        if (device->driver->outstanding(device->object))
            device->driver->give_up(device->object, -ENOTCONN);
    }
    q->is_abandoning = 0;
    leave(q);
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
            device_rebuild(q, &q->devices[i]);
}

int kvdev_queue_controller_add(struct kvdev_queue *q, uint32_t *ret)
{
    int error = -ENOSPC;
    intrude(q);
    for (uint32_t i = 0; i < KVDEV_QUEUE_CONTROLLERS_MAX && error; i++) {
        if (q->controllers[i].in_use)
            continue;
        q->controllers[i] = (struct controller){ .in_use = 1 };
        *ret = i;
        error = 0;
    }
    retire(q);
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
    intrude(q);
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
    retire(q);
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
            dirty_hand_over(q, device, leg);
        /* The next association has to show first that the namespace is the same. */
        leg->state = KVDEV_PATH_UNUSABLE;
        device_rebuild(q, device);
    }
}

int kvdev_queue_controller_down(struct kvdev_queue *q, uint32_t controller_index, uint64_t fence_ns)
{
    intrude(q);
    int error = controller_at(q, controller_index) ? 0 : -EINVAL;
    if (!error)
        controller_take_down(q, controller_index, fence_ns);
    retire(q);
    return error;
}

int kvdev_queue_controller_remove(struct kvdev_queue *q, uint32_t controller_index)
{
    intrude(q);
    int error = controller_at(q, controller_index) ? 0 : -EINVAL;
    if (!error) {
        controller_take_down(q, controller_index, UINT64_MAX);
        for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
            struct device *device = &q->devices[i];
            struct leg *leg = device->ops ? leg_of(device, controller_index) : NULL;
            if (!leg)
                continue;
            *leg = device->legs[--device->leg_count];
            device_rebuild(q, device);
        }
        q->controllers[controller_index].in_use = 0;
        /* Held writes whose fence will never be known end when their device fails or is removed. */
    }
    retire(q);
    return error;
}

int kvdev_queue_controller_read(struct kvdev_queue *q, uint32_t controller_index,
                                struct kvdev_queue_controller_info *ret)
{
    memset(ret, 0, sizeof *ret);
    intrude(q);
    const struct controller *controller = controller_at(q, controller_index);
    if (controller) {
        ret->fence_ns = controller->fence_ns;
        ret->is_up = controller->is_up;
        ret->has_fallen = controller->has_fallen;
        ret->has_ana_error = controller->has_ana_error;
        for (uint32_t i = q->delayed.head; i != NODE_NONE; i = q->nodes[i].next)
            ret->held_count += q->nodes[i].is_uncertain && q->nodes[i].controller == controller_index;
    }
    retire(q);
    return controller ? 0 : -EINVAL;
}

int kvdev_queue_multipath_add(struct kvdev_queue *q, const struct kvdev_queue_namespace *ns,
                              const struct kvdev_queue_recovery *recovery, uint32_t *ret)
{
    int is_valid = !ns->qpair_count && is_geometry_valid(ns) && recovery->policy <= KVDEV_PATHS_QUEUE_DEPTH &&
                   recovery->retry_count <= 255;
    if (!is_valid)
        return -EINVAL;
    intrude(q);
    uint32_t index = device_take(q, &namespace_ops);
    if (index < KVDEV_QUEUE_DEVICES_MAX) {
        struct device *device = &q->devices[index];
        device->ns = *ns;
        device->recovery = *recovery;
        device->is_recovering = 1;
        device_rebuild(q, device);
        *ret = index;
    }
    retire(q);
    return index < KVDEV_QUEUE_DEVICES_MAX ? 0 : -ENOSPC;
}

static struct device *multipath_at(struct kvdev_queue *q, uint32_t index)
{
    int is_there = index < KVDEV_QUEUE_DEVICES_MAX && q->devices[index].ops && q->devices[index].is_recovering;
    return is_there ? &q->devices[index] : NULL;
}

int kvdev_queue_path_set(struct kvdev_queue *q, uint32_t device_index, uint32_t controller_index, uint32_t state)
{
    intrude(q);
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
        device_rebuild(q, device);
    }
    retire(q);
    return error;
}

int kvdev_queue_device_resize(struct kvdev_queue *q, uint32_t device_index, uint64_t block_count)
{
    intrude(q);
    struct device *device = multipath_at(q, device_index);
    if (device && block_count)
        device->ns.block_count = block_count;
    retire(q);
    return device && block_count ? 0 : -EINVAL;
}

int kvdev_queue_device_fail(struct kvdev_queue *q, uint32_t device_index, int error)
{
    intrude(q);
    struct device *device = multipath_at(q, device_index);
    if (device) {
        device->error = error;
        if (error) {
            device_cancel_pending(q, device, error);
            delayed_cancel(q, device_index, error);
        }
    }
    retire(q);
    return device ? 0 : -EINVAL;
}

int kvdev_queue_notice_set(struct kvdev_queue *q, int fd)
{
    intrude(q);
    q->notice_fd = fd;
    retire(q);
    return 0;
}

/* ---- submit ---- */

static uint32_t io_refusal(const struct kvdev_queue *q, const struct kvdev_io *io)
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
        q->refused_reason = io_refusal(q, &ios[i]);
        q->refused_index = i;
        if (q->refused_reason)
            return -EINVAL;
    }
    if (n > q->free_count)
        return -EAGAIN;
    uint64_t now = now_ns();
    for (size_t i = 0; i < n; i++) {
        uint32_t index = node_take(q);
        struct node *node = &q->nodes[index];
        node->io = ios[i];
        node->submit_ns = now;
        node->deadline_ns = 0;
        node->passthrough = 0;
        node->is_uncertain = node->losses = node->retries = 0;
        node->generation = q->devices[node->io.device_index].generation;
        if (node->io.group_addr) {
            struct kvdev_io_group *group = (struct kvdev_io_group *)(uintptr_t)node->io.group_addr;
            if (!group->submit_ns)
                group->submit_ns = now;
        }
        list_push(q, &q->devices[node->io.device_index].pending[node->io.priority], index);
        device_activate(q, node->io.device_index, node->io.priority);
    }
    q->stats.submitted += n;
    q->stats.pending_count += (uint32_t)n;
    return 0;
}

int kvdev_queue_submit(struct kvdev_queue *q, const struct kvdev_io *ios, size_t n)
{
    if (enter(q))
        return -EBUSY;
    int error = submit(q, ios, n);
    leave(q);
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
        const struct node *node = &q->nodes[index];
        done[count++] = (struct kvdev_io_done){
            .tag = node->io.tag,
            .submit_ns = node->submit_ns,
            .send_ns = node->send_ns,
            .complete_ns = node->complete_ns,
            .error = node->error,
            .status = node->status,
            .qpair_index = node->qpair_index,
            .device_index = node->io.device_index,
            .result = node->result,
        };
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
    return has_moved;
}

/* Devices without a usable controller for too long: what waits for one fails, and what comes fails at once. */
static void devices_expire(struct kvdev_queue *q, uint64_t now)
{
    for (uint32_t i = 0; i < KVDEV_QUEUE_DEVICES_MAX; i++) {
        struct device *device = &q->devices[i];
        if (!device->ops || !device->is_recovering || !device->no_path_ns || device->is_failed ||
            now < add_ns(device->no_path_ns, device->recovery.fail_after_ns))
            continue;
        device->is_failed = 1;
        device_cancel_pending(q, device, -ENOTCONN);
        delayed_cancel(q, i, -ENOTCONN);
    }
    fail_due_update(q);
}

/* One turn over queue pairs and devices; 1 if anything moved. */
static int turn(struct kvdev_queue *q, uint64_t now, uint64_t *next_deadline_ns)
{
    int has_moved = 0;
    *next_deadline_ns = UINT64_MAX;
    if (now >= q->fail_due_ns)
        devices_expire(q, now);
    if (now >= q->delayed_due_ns)
        delayed_release(q, now);
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            kvdev_qpair_association_check(q->paths[i].qp);
    dispatch(q, now);
    for (uint32_t i = 0; i < q->path_count; i++) {
        struct kvdev_qpair *qp = q->paths[i].qp;
        if (!qp || !(kvdev_qpair_outstanding(qp) || kvdev_qpair_has_unsent(qp) || !kvdev_qpair_is_ready(qp)))
            continue;
        if (kvdev_qpair_has_unsent(qp))
            has_moved |= kvdev_qpair_send(qp, now);
        if (kvdev_qpair_receive(qp)) {
            has_moved = 1;
            /* What has come made room: fill it and answer R2Ts before looking at the others. */
            dispatch(q, now);
            if (kvdev_qpair_has_unsent(qp))
                kvdev_qpair_send(qp, now);
        }
        uint64_t deadline = kvdev_qpair_deadlines(qp, now);
        if (deadline < *next_deadline_ns)
            *next_deadline_ns = deadline;
        if (!kvdev_qpair_is_ready(qp))
            controller_check(q, &q->paths[i]);
    }
    uint64_t due = q->delayed_due_ns < q->fail_due_ns ? q->delayed_due_ns : q->fail_due_ns;
    if (due < *next_deadline_ns)
        *next_deadline_ns = due;
    return has_moved | turn_driven(q, now, next_deadline_ns);
}

/* Sleeps until a socket or a device has something, or until_ns. 1 when a signal came. */
static int sleep_until(struct kvdev_queue *q, uint64_t now, uint64_t until_ns)
{
    struct pollfd fds[KVDEV_QUEUE_QPAIRS_MAX + KVDEV_QUEUE_DEVICES_MAX * KVDEV_QUEUE_DRIVER_FDS_MAX + 1];
    nfds_t n = 0;
    fds[n++] = (struct pollfd){ .fd = q->wake_fd, .events = POLLIN };
    for (uint32_t i = 0; i < q->path_count; i++) {
        if (!q->paths[i].qp)
            continue;
        short events = 0;
        int fd = kvdev_qpair_wait_fd(q->paths[i].qp, &events);
        if (fd < 0 || !kvdev_qpair_outstanding(q->paths[i].qp))
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

static uint64_t in_flight_bytes(const struct kvdev_queue *q)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < q->path_count; i++)
        if (q->paths[i].qp)
            sum += kvdev_qpair_in_flight_bytes(q->paths[i].qp);
    return sum;
}

/* Waits a moment without a system call, twice as long as the last time: a socket asked all the time is locked
 * whenever the kernel wants to put data into it. */
static void relax(uint32_t *pauses)
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

static uint32_t outstanding_below(const struct kvdev_queue *q)
{
    return q->stats.pending_count + q->stats.in_flight_count;
}

/* Works until `want` completions wait to be handed back, *is_done is set, or the time is over. */
static void work(struct kvdev_queue *q, size_t want, const int *is_done, uint64_t timeout_ns)
{
    uint64_t now = now_ns();
    uint64_t deadline = add_ns(now, timeout_ns);
    uint64_t moved_ns = now;
    uint32_t pauses = PAUSES_MIN;
    for (;;) {
        uint64_t next = UINT64_MAX;
        if (atomic_load_explicit(&q->intruders, memory_order_relaxed))
            step_aside(q);
        int has_moved = turn(q, now, &next);
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
        if (now - moved_ns < q->options.spin_ns && in_flight_bytes(q) <= SPIN_MAX_BYTES) {
            relax(&pauses);
            now = now_ns();
            continue;
        }
        if (sleep_until(q, now, deadline < next ? deadline : next) && !is_done)
            return;
        now = now_ns();
    }
}

int kvdev_queue_poll(struct kvdev_queue *q, struct kvdev_io_done *done, size_t max, size_t min_count,
                     uint64_t timeout_ns, size_t *count)
{
    *count = 0;
    if (enter(q))
        return -EBUSY;
    q->stats.polls++;
    size_t want = min_count < max ? min_count : max;
    /* What is there already is enough, but a look at the sockets keeps them moving. */
    work(q, want ? want : 1, NULL, want ? timeout_ns : 0);
    *count = deliver(q, done, max);
    leave(q);
    return 0;
}

/* ---- passthrough ---- */

/* A node with a passthrough entry, on no list yet; NODE_NONE when there is no room. */
static uint32_t passthrough_take(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                                 void *data, uint32_t len, uint32_t direction, uint64_t deadline_ns)
{
    if (!q->free_count)
        return NODE_NONE;
    for (uint32_t i = 0; i < KVDEV_QUEUE_PASSTHROUGH_MAX; i++) {
        struct passthrough *pass = &q->passthroughs[i];
        if (pass->in_use)
            continue;
        *pass = (struct passthrough){
            .data = data, .len = len, .direction = direction, .mate = NODE_NONE, .in_use = 1
        };
        memcpy(pass->sqe, sqe, sizeof pass->sqe);
        uint32_t index = node_take(q);
        struct node *node = &q->nodes[index];
        memset(&node->io, 0, sizeof node->io);
        node->io.tag = tag;
        node->io.device_index = device_index;
        node->submit_ns = now_ns();
        node->deadline_ns = deadline_ns;
        node->passthrough = (uint8_t)(i + 1);
        node->is_uncertain = node->losses = node->retries = 0;
        node->generation = q->devices[device_index].generation;
        q->stats.submitted++;
        q->stats.pending_count++;
        return index;
    }
    return NODE_NONE;
}

static void passthrough_queue(struct kvdev_queue *q, uint32_t device_index, uint32_t index)
{
    list_push_front(q, &q->devices[device_index].pending[0], index);
    device_activate(q, device_index, 0);
}

static int passthrough_add(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe, void *data,
                           uint32_t len, uint32_t direction, struct passthrough **ret, uint64_t deadline_ns)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || q->devices[device_index].ops != &namespace_ops || len & 3 ||
        direction > KVDEV_DIR_H2C || (direction == KVDEV_DIR_NONE) != (len == 0) || (len && !data)) {
        q->refused_reason = KVDEV_REFUSED_NONE;
        return -EINVAL;
    }
    uint32_t index = passthrough_take(q, device_index, tag, sqe, data, len, direction, deadline_ns);
    if (index == NODE_NONE)
        return -EAGAIN;
    *ret = &q->passthroughs[q->nodes[index].passthrough - 1];
    passthrough_queue(q, device_index, index);
    return 0;
}

int kvdev_queue_passthrough(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                            void *data, uint32_t len, uint32_t direction)
{
    struct passthrough *pass = NULL;
    if (enter(q))
        return -EBUSY;
    int error = passthrough_add(q, device_index, tag, sqe, data, len, direction, &pass, 0);
    leave(q);
    return error;
}

/* Takes an execute whose time is over while it is still pending off its list; 1 if it was there. */
static int passthrough_withdraw(struct kvdev_queue *q, uint32_t device_index, const struct passthrough *pass)
{
    struct list *list = &q->devices[device_index].pending[0];
    uint32_t before = NODE_NONE;
    for (uint32_t i = list->head; i != NODE_NONE; before = i, i = q->nodes[i].next) {
        const struct node *node = &q->nodes[i];
        if (!node->passthrough || &q->passthroughs[node->passthrough - 1] != pass)
            continue;
        if (before == NODE_NONE)
            list->head = node->next;
        else
            q->nodes[before].next = node->next;
        if (list->tail == i)
            list->tail = before;
        node_refuse(q, i, -ETIMEDOUT, now_ns());
        return 1;
    }
    return 0;
}

int kvdev_queue_execute(struct kvdev_queue *q, uint32_t device_index, const uint8_t *sqe, void *data, uint32_t len,
                        uint32_t direction, uint64_t timeout_ns, uint8_t *cqe)
{
    int is_done = 0;
    int result = 0;
    struct passthrough *pass = NULL;
    if (enter(q))
        return -EBUSY;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    int error = passthrough_add(q, device_index, 0, sqe, data, len, direction, &pass, deadline);
    if (!error) {
        pass->cqe = cqe;
        pass->is_done = &is_done;
        pass->error = &result;
        for (;;) {
            uint64_t now = now_ns();
            work(q, 0, &is_done, now < deadline ? deadline - now : 0);
            if (is_done || passthrough_withdraw(q, device_index, pass))
                break;
        }
        /* -EIO is a verdict on the command, and that is in the CQE's status. */
        error = result == -EIO ? 0 : result;
    }
    leave(q);
    return error;
}

/* ---- compare and write ---- */

/* One half: its node, on no list. */
static uint32_t half_take(struct kvdev_queue *q, uint32_t device_index, const struct kvdev_io *io, uint32_t fuse,
                          uint64_t deadline_ns)
{
    uint8_t sqe[KVDEV_SQE_BYTES];
    sqe_build(&q->devices[device_index], io, sqe);
    sqe[1] |= (uint8_t)fuse;
    uint32_t index = passthrough_take(q, device_index, 0, sqe, (void *)(uintptr_t)io->buf_addr, io->byte_count,
                                      KVDEV_DIR_H2C, deadline_ns);
    if (index != NODE_NONE) {
        q->nodes[index].io.opcode = io->opcode;
        q->passthroughs[q->nodes[index].passthrough - 1].is_fused = 1;
    }
    return index;
}

static void half_give(struct kvdev_queue *q, uint32_t index)
{
    q->passthroughs[q->nodes[index].passthrough - 1].in_use = 0;
    q->stats.submitted--;
    q->stats.pending_count--;
    node_give(q, index);
}

static void half_watch(struct kvdev_queue *q, uint32_t index, struct kvdev_queue_half *half, int *is_done)
{
    struct passthrough *pass = &q->passthroughs[q->nodes[index].passthrough - 1];
    pass->cqe = half->cqe;
    pass->is_done = is_done;
    pass->error = &half->error;
    pass->send_ns = &half->send_ns;
}

int kvdev_queue_compare_and_write(struct kvdev_queue *q, const struct kvdev_io *compare, const struct kvdev_io *write,
                                  uint64_t timeout_ns, struct kvdev_queue_half *compare_ret,
                                  struct kvdev_queue_half *write_ret)
{
    uint32_t device_index = compare->device_index;
    int has_first = 0, has_second = 0;
    if (enter(q))
        return -EBUSY;
    int error = -EINVAL;
    if (compare->opcode == OPC_COMPARE && write->opcode == OPC_WRITE && write->device_index == device_index &&
        !io_refusal(q, compare) && !io_refusal(q, write) && q->devices[device_index].ops == &namespace_ops) {
        uint64_t deadline = add_ns(now_ns(), timeout_ns);
        uint32_t first = half_take(q, device_index, compare, SQE_FUSE_FIRST, deadline);
        uint32_t second =
            first == NODE_NONE ? NODE_NONE : half_take(q, device_index, write, SQE_FUSE_SECOND, deadline);
        error = second == NODE_NONE ? -EAGAIN : 0;
        if (error && first != NODE_NONE)
            half_give(q, first);
        if (!error) {
            struct passthrough *pass = &q->passthroughs[q->nodes[first].passthrough - 1];
            half_watch(q, first, compare_ret, &has_first);
            half_watch(q, second, write_ret, &has_second);
            pass->mate = second;
            passthrough_queue(q, device_index, first);
            while (!has_first || !has_second) {
                uint64_t now = now_ns();
                work(q, 0, has_first ? &has_second : &has_first, now < deadline ? deadline - now : 0);
                if (!has_first)
                    passthrough_withdraw(q, device_index, pass);
            }
        }
    }
    leave(q);
    return error;
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

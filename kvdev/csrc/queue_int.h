/* Shared by the files of the queue (queue.h): its tables, the life of a command, what one file asks of another.
 *
 *   queue.c              submit, dispatch, poll: the data path
 *   queue_complete.c     a command has ended
 *   queue_namespace.c    how a command goes to an NVMe/TCP namespace, by which queue pair
 *   queue_driven.c       how one goes to a device with a driver
 *   queue_passthrough.c  commands given as an SQE, and fused pairs
 *   queue_recover.c      which commands go on after a loss or an error
 *   queue_table.c        life of the queue, its devices, queue pairs and controllers
 *
 * Everything here is called by the thread that is inside the queue (queue_enter, queue_intrude). */
#ifndef KVDEV_QUEUE_INT_H
#define KVDEV_QUEUE_INT_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "qpair_int.h"
#include "queue_device.h"

#define NODE_NONE 0xffffffffu
#define QPAIR_NONE 0xffffu
#define CONTROLLER_NONE 0xffffu
#define OPC_FLUSH 0x00
#define OPC_WRITE 0x01
#define OPC_READ 0x02
#define OPC_COMPARE 0x05
#define OPC_WRITE_ZEROES 0x08
#define OPC_DSM 0x09
#define OPC_VERIFY 0x0c
#define OPC_COPY 0x19

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
    struct kvdev_queue_half *half; /* set for calls: the caller waits for it here */
    uint32_t path_index;     /* once it was sent: by which queue pair */
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
    uint32_t lost_count;          /* how often that came about: for those whose flush is not the next one */
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
    atomic_int is_polled;         /* a background poller's thread is on the data path, for good */
    atomic_uint guests;           /* threads that want the data path of such a queue for one command */
    pthread_mutex_t guest_lock;   /* held by the one that has it */
    int is_guest_inside;
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
    struct list unchecked;        /* commands of devices that have a driver, whose checksums are due; they count as in flight */
    uint32_t driven_count;        /* devices that have a driver */
    uint16_t driven[KVDEV_QUEUE_DEVICES_MAX];
    struct rotation rotations[KVDEV_QUEUE_PRIORITY_COUNT];
    struct passthrough passthroughs[KVDEV_QUEUE_PASSTHROUGH_MAX];
    size_t refused_index;
    uint32_t refused_reason;
};
/* ---- lists of nodes ---- */

static inline void list_push(struct kvdev_queue *q, struct list *list, uint32_t index)
{
    q->nodes[index].next = NODE_NONE;
    if (list->head == NODE_NONE)
        list->head = index;
    else
        q->nodes[list->tail].next = index;
    list->tail = index;
}

static inline void list_push_front(struct kvdev_queue *q, struct list *list, uint32_t index)
{
    q->nodes[index].next = list->head;
    if (list->head == NODE_NONE)
        list->tail = index;
    list->head = index;
}

static inline uint32_t list_pop(struct kvdev_queue *q, struct list *list)
{
    uint32_t index = list->head;
    if (index != NODE_NONE)
        list->head = q->nodes[index].next;
    return index;
}

static inline uint32_t node_take(struct kvdev_queue *q)
{
    uint32_t index = q->free_head;
    q->free_head = q->nodes[index].next;
    q->free_count--;
    return index;
}

static inline void node_give(struct kvdev_queue *q, uint32_t index)
{
    q->nodes[index].next = q->free_head;
    q->free_head = index;
    q->free_count++;
}

/* The second half of a fused pair that has not been started: it is nobody's but the first one's. */
static inline uint32_t mate_take(struct kvdev_queue *q, const struct node *node)
{
    if (!node->passthrough)
        return NODE_NONE;
    struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
    uint32_t mate = pass->mate;
    pass->mate = NODE_NONE;
    return mate;
}

static inline int is_controller_usable(const struct kvdev_queue *q, uint32_t index)
{
    return q->controllers[index].is_up && !q->controllers[index].has_fallen;
}

static inline int is_leg_usable(const struct kvdev_queue *q, const struct leg *leg)
{
    return is_controller_usable(q, leg->controller) && leg->state != KVDEV_PATH_UNUSABLE && !leg->is_suspect;
}

static inline struct leg *leg_of(struct device *device, uint32_t controller)
{
    for (uint32_t i = 0; i < device->leg_count; i++)
        if (device->legs[i].controller == controller)
            return &device->legs[i];
    return NULL;
}

static inline int is_fused(const struct kvdev_queue *q, const struct node *node)
{
    return node->passthrough && q->passthroughs[node->passthrough - 1].is_fused;
}

static inline int changes_data(const struct kvdev_queue *q, const struct node *node)
{
    if (node->passthrough && !is_fused(q, node))
        return q->passthroughs[node->passthrough - 1].direction != KVDEV_DIR_C2H;
    return node->io.opcode == OPC_WRITE || node->io.opcode == OPC_WRITE_ZEROES || node->io.opcode == OPC_DSM ||
           node->io.opcode == OPC_COPY;
}

static inline void device_activate(struct kvdev_queue *q, uint32_t device_index, uint32_t priority)
{
    struct rotation *rotation = &q->rotations[priority];
    if (q->devices[device_index].is_active[priority])
        return;
    q->devices[device_index].is_active[priority] = 1;
    rotation->entries[(rotation->head + rotation->count) % KVDEV_QUEUE_DEVICES_MAX] = (uint16_t)device_index;
    rotation->count++;
}

static inline uint32_t outstanding_below(const struct kvdev_queue *q)
{
    return q->stats.pending_count + q->stats.in_flight_count;
}

/* A pending command in the place of a free node, of which there is one. */
static inline uint32_t node_accept(struct kvdev_queue *q, const struct kvdev_io *io, uint64_t now)
{
    uint32_t index = node_take(q);
    struct node *node = &q->nodes[index];
    node->io = *io;
    node->submit_ns = now;
    node->deadline_ns = 0;
    node->passthrough = 0;
    node->is_uncertain = node->losses = node->retries = 0;
    node->generation = q->devices[io->device_index].generation;
    if (io->group_addr) {
        struct kvdev_io_group *group = (struct kvdev_io_group *)(uintptr_t)io->group_addr;
        if (!group->submit_ns)
            group->submit_ns = now;
    }
    list_push(q, &q->devices[io->device_index].pending[io->priority], index);
    device_activate(q, io->device_index, io->priority);
    q->stats.submitted++;
    q->stats.pending_count++;
    return index;
}

/* What the caller hears of a command that is done. */
static inline struct kvdev_io_done node_report(const struct node *node)
{
    return (struct kvdev_io_done){
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
}

/* ---- one thread at a time ----
 *
 * The data path is one thread's: a caller's from queue_enter to queue_leave, or a background poller's. Others come in
 * between (queue_intrude) for a moment, or as guests (queue_visit) of a background poller for one command, whose waits
 * they then do themselves. */

static inline int queue_enter(struct kvdev_queue *q)
{
    if (atomic_flag_test_and_set_explicit(&q->busy, memory_order_acquire))
        return -EBUSY;
    pthread_mutex_lock(&q->lock);
    return 0;
}

static inline void queue_leave(struct kvdev_queue *q)
{
    pthread_mutex_unlock(&q->lock);
    atomic_flag_clear_explicit(&q->busy, memory_order_release);
}

/* Whether a background poller has to stand aside. */
static inline int queue_is_wanted(struct kvdev_queue *q)
{
    return atomic_load_explicit(&q->intruders, memory_order_relaxed) ||
           atomic_load_explicit(&q->guests, memory_order_relaxed);
}

/* ---- queue.c ---- */

#define SPIN_MAX_BYTES (256u << 10)      /* with more in flight, sleeping loses nothing and lets data gather */
#define PAUSES_MIN 8u

uint32_t queue_io_refusal(const struct kvdev_queue *q, const struct kvdev_io *io);
/* Works until `want` completions wait to be handed back, *is_done is set, or the time is over. */
void queue_work(struct kvdev_queue *q, size_t want, const int *is_done, uint64_t timeout_ns);
/* One turn over queue pairs and devices; 1 if anything moved. */
int queue_turn(struct kvdev_queue *q, uint64_t now, uint64_t *next_deadline_ns);
/* Sleeps until a socket or a device has something, somebody wakes the queue, or until_ns. 1 when a signal came. */
int queue_sleep_until(struct kvdev_queue *q, uint64_t now, uint64_t until_ns);
uint64_t queue_in_flight_bytes(const struct kvdev_queue *q);
/* Waits a moment without a system call, longer each time. */
void queue_relax(uint32_t *pauses);

/* ---- queue_complete.c ---- */

/* The command is over: its group hears of it, and the next poll hands it back. */
void queue_node_done(struct kvdev_queue *q, uint32_t index, int error, uint16_t status, uint32_t result);
/* The error that is known for certain: a write lost once has an unknown fate until it succeeds. */
int queue_node_error(struct kvdev_queue *q, const struct node *node, int error);
/* A pending command that will not be sent (again). */
void queue_node_refuse(struct kvdev_queue *q, uint32_t index, int error, uint64_t now);
void queue_on_qpair_done(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns,
                         uint64_t at_ns);

/* ---- queue_namespace.c ---- */

extern const struct device_ops queue_namespace_ops;
void queue_sqe_build(const struct device *device, const struct kvdev_io *io, uint8_t *wire);

/* ---- queue_driven.c ---- */

extern const struct device_ops queue_driven_ops;
void queue_driver_drop(struct kvdev_queue *q, uint32_t device_index);
/* Ends up to so many commands whose checksums are due; 1 if there was one. */
int queue_driven_check(struct kvdev_queue *q, uint32_t max);

/* ---- queue_recover.c ---- */

void queue_notice(const struct kvdev_queue *q);
/* Chooses the queue pairs in use. */
void queue_device_rebuild(struct kvdev_queue *q, struct device *device);
/* A command failed. 0: it goes on; else the error it ends with. */
int queue_recover(struct kvdev_queue *q, const struct path *path, uint32_t index, int error, uint16_t status,
                  uint64_t send_ns, uint64_t now);
/* Bookkeeping of a success on a namespace with a volatile cache. 1: it is done, *error is its result. */
int queue_cache_note(struct kvdev_queue *q, const struct path *path, uint32_t index, uint64_t now, int *error);
/* The controller that has to be flushed next; CONTROLLER_NONE when any will do. */
uint32_t queue_flush_controller(const struct kvdev_queue *q, struct device *device);
void queue_dirty_hand_over(const struct kvdev_queue *q, struct device *device, struct leg *lost);
/* Commands whose time has come are pending again. */
void queue_delayed_release(struct kvdev_queue *q, uint64_t now);
/* Ends the delayed commands of one device; of all with KVDEV_QUEUE_DEVICES_MAX. */
void queue_delayed_cancel(struct kvdev_queue *q, uint32_t device_index, int error);
/* Devices without a usable controller for too long: what waits for one fails, and what comes fails at once. */
void queue_devices_expire(struct kvdev_queue *q, uint64_t now);
/* Tells the supervisor, once per association, that a queue pair of it is dead. */
void queue_controller_check(struct kvdev_queue *q, const struct path *path);

/* ---- queue_table.c ---- */

/* Another thread wants to change the tables: makes the data path step aside, asleep or not, until queue_retire. */
void queue_intrude(struct kvdev_queue *q);
void queue_retire(struct kvdev_queue *q);
/* Lets intruders in, and guests of a background poller. */
void queue_step_aside(struct kvdev_queue *q, int has_guests);
/* As queue_enter, also where a background poller drives the queue. */
int queue_visit(struct kvdev_queue *q);
void queue_visit_end(struct kvdev_queue *q);
/* Ends a sleep of the data path, now or the next one. */
void queue_wake(struct kvdev_queue *q);
/* kvdev_queue_abandon, for the thread on the data path. */
void queue_give_up(struct kvdev_queue *q);
/* Index of a free entry, with nothing pending; KVDEV_QUEUE_DEVICES_MAX when the table is full. */
uint32_t queue_device_take(struct kvdev_queue *q, const struct device_ops *ops);
void queue_device_cancel(struct kvdev_queue *q, struct device *device, int error);

#endif

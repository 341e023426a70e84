/* The caller-driven I/O queue: a table of devices, the queue pairs under them, one poller.
 *
 * submit copies commands into a bounded pending ring; poll moves them to queue pairs by priority,
 * keeps a window of bytes in flight on each, and hands completions back. Every accepted command
 * completes exactly once. One thread at a time may call into a queue; a second one gets -EBUSY.
 * All memory is allocated by create. Payload memory is the caller's again when its completion has
 * been returned by poll (or its group's remaining is 0). */
#ifndef KVDEV_QUEUE_H
#define KVDEV_QUEUE_H

#include "io.h"
#include "qpair.h"

/* cdef begin */
#define KVDEV_QUEUE_PRIORITY_COUNT 8
#define KVDEV_QUEUE_QPAIRS_MAX 128
#define KVDEV_QUEUE_DEVICES_MAX 256
#define KVDEV_QUEUE_DEVICE_QPAIRS_MAX 16
#define KVDEV_QUEUE_PASSTHROUGH_MAX 16
#define KVDEV_QUEUE_CONTROLLERS_MAX 256
#define KVDEV_QUEUE_DEVICE_PATHS_MAX 16   /* controllers that one namespace is reached through */
#define KVDEV_QUEUE_DEVICE_ACTIVE_MAX 64  /* queue pairs in use for one namespace at a time */

/* How a namespace with several usable controllers spreads its commands. */
#define KVDEV_PATHS_ACTIVE_PASSIVE 0 /* one controller until it fails or a better one (ANA) is there */
#define KVDEV_PATHS_ROUND_ROBIN 1    /* queue pair after queue pair */
#define KVDEV_PATHS_QUEUE_DEPTH 2    /* where the fewest bytes are in flight */

/* State of one controller for one namespace. */
#define KVDEV_PATH_OPTIMIZED 0
#define KVDEV_PATH_NON_OPTIMIZED 1
#define KVDEV_PATH_UNUSABLE 2        /* ANA says so, or the namespace is not (the same) there */

/* Why submit refused a command (kvdev_queue_refusal_read). */
#define KVDEV_REFUSED_NONE 0
#define KVDEV_REFUSED_DEVICE 1    /* device_index is not in the table */
#define KVDEV_REFUSED_OPCODE 2
#define KVDEV_REFUSED_COUNT 3     /* lba_count 0, or over 65536, or over the transfer limit */
#define KVDEV_REFUSED_RANGE 4     /* slba + lba_count lies beyond the namespace */
#define KVDEV_REFUSED_LENGTH 5    /* byte_count is not lba_count blocks */
#define KVDEV_REFUSED_BUFFER 6    /* buf_addr 0 with payload */
#define KVDEV_REFUSED_PRIORITY 7  /* over KVDEV_QUEUE_PRIORITY_COUNT - 1 */
#define KVDEV_REFUSED_TRANSFER 8  /* byte_count is over the device's max_transfer_bytes */
#define KVDEV_REFUSED_GROUP 9     /* group_addr is not a multiple of 8 */
#define KVDEV_REFUSED_UNSHARED 10 /* the payload lies outside the memory shared with the device */
#define KVDEV_REFUSED_RANGES 11   /* more deallocate ranges than the device takes at once */

struct kvdev_queue_options {
    uint32_t capacity;             /* commands accepted and not yet handed back, 1..1048576 */
    uint32_t window_size_bytes;    /* payload in flight per queue pair; 0 means 1 MiB */
    uint64_t command_timeout_ns;   /* per command once sent; 0 means 30 s */
    uint64_t spin_ns;              /* poll looks so long before it sleeps, with up to 256 KiB in flight; with more
                                      it sleeps at once; 0 means 20 us */
};

struct kvdev_queue_namespace {
    uint32_t nsid;
    uint32_t block_size_bytes;
    uint64_t block_count;
    uint32_t max_transfer_bytes;   /* from MDTS; 0 means no limit */
    uint16_t qpair_count;          /* 0 for a namespace with controllers (kvdev_queue_path_set) */
    uint16_t reserved;
    uint32_t qpair_index[16];      /* handles of kvdev_queue_qpair_add, all of this namespace's controller */
};

/* What becomes of the commands of a namespace whose connections are lost. */
struct kvdev_queue_recovery {
    uint64_t fail_after_ns;        /* without a usable controller for so long, commands fail; UINT64_MAX never */
    uint32_t retry_count;          /* per command, after an error status or its own time limit, at most 255 */
    uint8_t policy;                /* KVDEV_PATHS_* */
    uint8_t is_uncertain_reported; /* lost writes complete with -KVDEV_EUNCERTAIN at once, instead of waiting for
                                      the fence and being sent again */
    uint8_t has_volatile_cache;    /* a flush vouches only for writes whose controller is known to have lived on */
    uint8_t is_cache_shared;       /* a controller that lived on vouches for the writes of one that did not */
};

/* A new association of a controller: connected queue pairs, nothing of it in the queue yet. */
struct kvdev_queue_association {
    uint64_t made_ns;
    uint64_t retry_delay_ns[3];    /* CRDT1 to CRDT3; 0 where there is none */
    uint32_t qpair_count;
    uint8_t has_ana;               /* its ANA errors mean that the log has changed */
    uint8_t reserved[3];
};

struct kvdev_queue_controller_info {
    uint64_t fence_ns;             /* the latest that was given; writes lost before it have no effect after it */
    uint32_t held_count;           /* lost writes that wait for the fence */
    uint8_t is_up;
    uint8_t has_fallen;            /* a queue pair of it died, kvdev_queue_controller_down is due */
    uint8_t has_ana_error;         /* since the last kvdev_queue_path_set: read the ANA log */
    uint8_t reserved;
};

struct kvdev_queue_stats {
    uint64_t submitted;
    uint64_t completed;            /* handed back by poll */
    uint64_t failed;
    uint64_t polls;
    uint64_t sleeps;               /* times poll waited in the kernel */
    uint32_t pending_count;        /* accepted, not yet on a queue pair */
    uint32_t in_flight_count;
    uint32_t done_count;           /* completed, not yet handed back */
    uint32_t capacity;
    uint64_t requeued;             /* commands sent again after a loss, a path error or a transient status */
    uint64_t held;                 /* writes that had to wait for a fence */
    uint64_t uncertain;            /* completed with -KVDEV_EUNCERTAIN */
};

struct kvdev_queue;

int kvdev_queue_create(const struct kvdev_queue_options *options, struct kvdev_queue **ret);
/* Resets the queue pairs that have commands outstanding; they and their memory stay the caller's. */
void kvdev_queue_destroy(struct kvdev_queue *queue);

/* The queue drives qp from now on; the caller keeps owning it and frees it after remove or destroy. */
int kvdev_queue_qpair_add(struct kvdev_queue *queue, struct kvdev_qpair *qp, uint32_t *ret);
/* Closes the queue pair; what is outstanding on it completes with -ENOTCONN at the next poll. The handle may be
 * given out again. */
int kvdev_queue_qpair_remove(struct kvdev_queue *queue, uint32_t qpair_index);
int kvdev_queue_namespace_add(struct kvdev_queue *queue, const struct kvdev_queue_namespace *ns, uint32_t *ret);
/* What is pending for it completes with -ECANCELED; what is in flight goes on. */
int kvdev_queue_device_remove(struct kvdev_queue *queue, uint32_t device_index);

/* ---- recovery: from any thread, also while another one polls, which is woken and goes on with what it finds ---- */

/* A place for the associations that follow each other with one controller address. */
int kvdev_queue_controller_add(struct kvdev_queue *queue, uint32_t *ret);
/* Takes it down as well, and out of every namespace. */
int kvdev_queue_controller_remove(struct kvdev_queue *queue, uint32_t controller_index);
/* Adds the queue pairs of a new association (indexes: room for as many) and uses them. */
int kvdev_queue_controller_up(struct kvdev_queue *queue, uint32_t controller_index,
                              const struct kvdev_queue_association *association, struct kvdev_qpair *const *qpairs,
                              uint32_t *indexes);
/* Closes and removes its queue pairs. Reads on them are sent again on other paths as soon as there are some; writes
 * that were sent wait until fence_ns (UINT64_MAX: not known yet, call again), when the controller can no longer
 * execute them (Base 9.6.2). */
int kvdev_queue_controller_down(struct kvdev_queue *queue, uint32_t controller_index, uint64_t fence_ns);
int kvdev_queue_controller_read(struct kvdev_queue *queue, uint32_t controller_index,
                                struct kvdev_queue_controller_info *ret);
/* Makes a namespace with controllers; it has none yet, and its commands wait. ns->qpair_count is 0. */
int kvdev_queue_multipath_add(struct kvdev_queue *queue, const struct kvdev_queue_namespace *ns,
                              const struct kvdev_queue_recovery *recovery, uint32_t *ret);
/* Adds the controller to the namespace, or changes its state there; it counts while the controller is up, and
 * starts as unusable with every association. */
int kvdev_queue_path_set(struct kvdev_queue *queue, uint32_t device_index, uint32_t controller_index, uint32_t state);
/* Another process of this host has completed writes on the device, the first of them sent at sent_ns: the next flush vouches
 * for them too, or fails as it would for writes of this queue's own. */
int kvdev_queue_writes_note(struct kvdev_queue *queue, uint32_t device_index, uint64_t sent_ns);
/* How often completed writes may have been lost with a cache: the flush that says so may be another user's of the queue. */
uint32_t kvdev_queue_lost_count(struct kvdev_queue *queue, uint32_t device_index);
/* A namespace that has grown or shrunk; commands beyond its end are refused from now on. */
int kvdev_queue_device_resize(struct kvdev_queue *queue, uint32_t device_index, uint64_t block_count);
/* While error is not 0, commands of the device complete with it (-ENODEV: it is gone or another one). */
int kvdev_queue_device_fail(struct kvdev_queue *queue, uint32_t device_index, int error);
/* An eventfd of the caller that is written when a controller falls or meets an ANA error; -1 for none. */
int kvdev_queue_notice_set(struct kvdev_queue *queue, int fd);

/* 1 while at least one queue pair of the device is ready. */
int kvdev_queue_device_is_alive(const struct kvdev_queue *queue, uint32_t device_index);

/* Takes all n commands or none. -EAGAIN: they do not fit, poll first. -EINVAL: one is refused, see
 * kvdev_queue_refusal_read. Nothing is sent before the next poll. */
int kvdev_queue_submit(struct kvdev_queue *queue, const struct kvdev_io *ios, size_t n);
void kvdev_queue_refusal_read(const struct kvdev_queue *queue, size_t *index, uint32_t *reason);

/* Works until min_count completions are there, timeout_ns has passed, nothing is outstanding, or a signal
 * arrived; hands back up to max. timeout_ns 0 looks once and never sleeps. Always 0 unless misused. */
int kvdev_queue_poll(struct kvdev_queue *queue, struct kvdev_io_done *done, size_t max, size_t min_count,
                     uint64_t timeout_ns, size_t *count);

/* A full 64-byte SQE for the device's controller (NSID as given in it), on one of the device's queue pairs,
 * among the commands of this priority class 0. It completes like any other: tag, status, result. */
int kvdev_queue_passthrough(struct kvdev_queue *queue, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                            void *data, uint32_t len, uint32_t direction);

/* How a command of a call ended. */
struct kvdev_queue_half {
    uint64_t send_ns;              /* 0: it never left this host */
    int32_t error;                 /* 0, or -errno; -EIO with the verdict in the CQE */
    int32_t is_done;
    uint8_t cqe[16];
};

/* What a caller waits for, a slice at a time: one command, or the halves of a fused pair. All zero before the start;
 * the call and its payload are the queue's from a start that returned 0 until a wait that does, or a cancel. */
struct kvdev_queue_call {
    struct kvdev_queue_half halves[2];
    uint64_t deadline_ns;
    uint32_t device_index;
    uint32_t half_count;
    uint32_t passthrough_index[2];
};

/* As kvdev_queue_passthrough, with the end in call->halves[0]. A command that does not end within timeout_ns takes its
 * queue pair down. */
int kvdev_queue_call_start(struct kvdev_queue *queue, uint32_t device_index, const uint8_t *sqe, void *data,
                           uint32_t len, uint32_t direction, uint64_t timeout_ns, struct kvdev_queue_call *call);
/* A fused pair on one queue pair, its halves next to each other: a compare and a write of the same blocks, which
 * happens only if the blocks were equal. The write (halves[1]) is done if its error is 0, is not if it never left this
 * host or has an error status, and -KVDEV_EUNCERTAIN if nobody knows. It is sent once. */
int kvdev_queue_pair_start(struct kvdev_queue *queue, const struct kvdev_io *compare, const struct kvdev_io *write,
                           uint64_t timeout_ns, struct kvdev_queue_call *call);
/* Works until the call has ended: 0. -EAGAIN: slice_ns is over first, and it goes on. Other completions stay for the
 * next poll. */
int kvdev_queue_call_wait(struct kvdev_queue *queue, struct kvdev_queue_call *call, uint64_t slice_ns);
/* Ends it now, from any thread: what was sent takes its queue pair down. Of one that has ended, or never started,
 * nothing changes. */
void kvdev_queue_call_cancel(struct kvdev_queue *queue, struct kvdev_queue_call *call);

/* Gives up on everything outstanding: queue pairs with commands are reset, their commands complete with -ENOTCONN,
 * pending ones with -ECANCELED, at the next poll. No payload is touched after it returns. */
int kvdev_queue_abandon(struct kvdev_queue *queue);

void kvdev_queue_stats_read(const struct kvdev_queue *queue, struct kvdev_queue_stats *ret);
size_t kvdev_queue_outstanding(const struct kvdev_queue *queue);
/* Devices whose owner has to look at them: a connection ended, or the device changed. */
uint32_t kvdev_queue_attention(const struct kvdev_queue *queue);
void kvdev_queue_window_set(struct kvdev_queue *queue, uint32_t window_size_bytes);
/* cdef end */

#endif

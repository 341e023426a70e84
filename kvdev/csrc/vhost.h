/* The rings of one vhost-user-blk device: split virtqueues in memory shared with a back end process.
 *
 * Not here: the handshake and every other message (kvdev/vhost); this part is given what they agreed on.
 * Trust: nothing that the back end may write is read back but the used rings, the status bytes and its wishes about
 * notifications. Descriptors, commands and indices are kept on our side; what a used ring says is checked against
 * them, and the first lie ends the device (kvdev_vhost_fault). An answer ends one command that is in flight, or none.
 * Memory: all of it is allocated by create. Payload must lie in a region added before, or be marked
 * KVDEV_IO_MAY_COPY: then it goes through a bounce buffer. Once the device is dead the back end may still write to the
 * payload of what was in flight, until its process has ended: kvdev_vhost_spans_read names that memory.
 * Threads: a device belongs to the queue it is attached to. Times are CLOCK_MONOTONIC nanoseconds.
 * Spec: Virtual I/O Device 1.2, sections 2.7 and 5.2; vhost-user protocol of QEMU. */
#ifndef KVDEV_VHOST_H
#define KVDEV_VHOST_H

#include "io.h"
#include "queue.h"

/* cdef begin */
#define KVDEV_VHOST_QUEUES_MAX 16
#define KVDEV_VHOST_QUEUE_SIZE_MAX 1024
#define KVDEV_VHOST_REGIONS_MAX 8
#define KVDEV_VHOST_SEGMENTS_MAX 126   /* payload descriptors of one command */
#define KVDEV_VHOST_RANGES_MAX 16      /* deallocate ranges of one command */
#define KVDEV_VHOST_BOUNCE_PIECES 64

#define KVDEV_VHOST_IDLE 0     /* not started */
#define KVDEV_VHOST_READY 1
#define KVDEV_VHOST_HELD 2     /* the connection is gone; commands wait for resume or their deadline */
#define KVDEV_VHOST_DEAD 3     /* never comes back */

#define KVDEV_VHOST_FAULT_NONE 0
#define KVDEV_VHOST_FAULT_CLOSED 1   /* the back end closed the connection */
#define KVDEV_VHOST_FAULT_TIMEOUT 2  /* a command did not end in time */
#define KVDEV_VHOST_FAULT_RING 3     /* a used ring lies: field, expected, actual */
#define KVDEV_VHOST_FAULT_MESSAGE 4  /* bytes on the socket that nobody asked for */
#define KVDEV_VHOST_FAULT_LOCAL 5    /* given up by us */

struct kvdev_vhost_params {
    uint64_t control_addr;           /* shared memory, zeroed, for rings, commands and bounce buffers; 4 KiB aligned */
    uint64_t control_size_bytes;     /* at least kvdev_vhost_control_size */
    uint64_t block_count;
    uint32_t block_size_bytes;
    uint32_t max_transfer_bytes;
    uint32_t segment_size_bytes;     /* largest payload descriptor; 0: no limit */
    uint32_t segment_count;          /* payload descriptors per command */
    uint32_t discard_sectors_max;    /* of one range, 512-byte sectors */
    uint32_t discard_ranges_max;     /* of one command */
    uint32_t write_zeroes_sectors_max;
    uint32_t bounce_size_bytes;      /* a multiple of 64 * 4096, or 0 */
    uint32_t window_size_bytes;      /* payload in flight per virtqueue; one command always fits */
    uint16_t queue_count;
    uint16_t queue_size;             /* descriptors per virtqueue, a power of two */
    uint8_t has_indirect;
    uint8_t has_event_idx;
    uint8_t has_flush;               /* without: no volatile cache, a flush completes at once */
    uint8_t has_discard;
    uint8_t has_write_zeroes;
    uint8_t may_unmap_zeroes;
    uint8_t is_read_only;
    uint8_t reserved;
};

struct kvdev_vhost_ring {            /* what the back end has to be told of one virtqueue */
    uint64_t desc_addr;
    uint64_t avail_addr;
    uint64_t used_addr;
    uint16_t base;                   /* next avail entry to take, nothing being in flight but what is to be resubmitted */
    uint16_t queue_size;
    uint16_t slot_count;             /* commands that fit */
    uint16_t in_flight_count;
};

struct kvdev_vhost_info {
    uint32_t state;
    uint32_t in_flight_count;
    uint64_t commands;
    uint64_t kicks;                  /* system calls that told the back end of new commands */
    uint64_t wakes;                  /* times its notification was asked for, to sleep */
    uint64_t bounced_commands;
    uint64_t bounced_bytes;
    uint64_t unaligned_commands;     /* payload not at a multiple of 512: the back end has to copy it */
    uint32_t span_count;
    uint8_t is_attached;
    uint8_t has_backend_message;     /* its own channel has something to read */
    uint8_t reserved[2];
};

struct kvdev_vhost_fault {
    uint32_t kind;                   /* KVDEV_VHOST_FAULT_* */
    int32_t error;                   /* -errno that outstanding commands completed with */
    uint32_t queue_index;            /* or 0xffffffff */
    uint32_t reserved;
    uint64_t expected;
    uint64_t actual;
    char field[32];
    char text[160];
};

struct kvdev_vhost_span {            /* payload memory that was in the back end's hands */
    uint64_t addr;
    uint64_t size_bytes;
};

struct kvdev_vhost;

/* Shared memory that these parameters need; 0 when one of them is out of range. */
uint64_t kvdev_vhost_control_size(const struct kvdev_vhost_params *params);
int kvdev_vhost_create(const struct kvdev_vhost_params *params, struct kvdev_vhost **ret);
/* Frees it, at the latest when its queue lets go. NULL is allowed. */
void kvdev_vhost_destroy(struct kvdev_vhost *vhost);

/* From now on payload may lie there; the caller keeps it mapped as long as the device lives. */
int kvdev_vhost_region_add(struct kvdev_vhost *vhost, uint64_t addr, uint64_t size_bytes);
int kvdev_vhost_ring_read(struct kvdev_vhost *vhost, uint32_t queue_index, struct kvdev_vhost_ring *ret);

/* The back end knows the rings: work may begin. The descriptors stay the caller's, open until the device is
 * destroyed, dead, or started again. socket_fd is watched for its end, channel_fd (or -1) for messages of the back end;
 * kick_fds are queue_count eventfds, call_fd is one eventfd for all virtqueues.
 * is_held_on_loss: when the connection ends, commands wait for another start instead of failing.
 * On a held device the commands in flight go on: the new back end finds them in the rings. */
int kvdev_vhost_start(struct kvdev_vhost *vhost, int socket_fd, int channel_fd, const int *kick_fds, int call_fd,
                      uint32_t is_held_on_loss);

/* Makes it a device of the queue, or the successor of one (whose commands complete with -ENOTCONN). */
int kvdev_vhost_attach(struct kvdev_vhost *vhost, struct kvdev_queue *queue, uint32_t *ret);
int kvdev_vhost_succeed(struct kvdev_vhost *vhost, struct kvdev_queue *queue, uint32_t device_index);

void kvdev_vhost_capacity_set(struct kvdev_vhost *vhost, uint64_t block_count);
/* Ends the device: what is in flight completes with error at the next poll, the socket is shut down. */
void kvdev_vhost_kill(struct kvdev_vhost *vhost, int error, const char *text);

void kvdev_vhost_info_read(const struct kvdev_vhost *vhost, struct kvdev_vhost_info *ret);
void kvdev_vhost_fault_read(const struct kvdev_vhost *vhost, struct kvdev_vhost_fault *ret);
/* Payload of the commands that were in flight when the device died; at most max of them, returns how many. */
size_t kvdev_vhost_spans_read(const struct kvdev_vhost *vhost, struct kvdev_vhost_span *spans, size_t max);
/* The owner has seen the state as it is now. */
void kvdev_vhost_attention_clear(struct kvdev_vhost *vhost);
/* cdef end */

#endif

/* What a kind of device must be able to do to be driven by a queue beside the NVMe/TCP namespaces.
 *
 * A driver's functions are called by the one thread that is inside the queue. A command that start took ends with
 * exactly one call of the done function; until then its payload is the driver's. */
#ifndef KVDEV_QUEUE_DEVICE_H
#define KVDEV_QUEUE_DEVICE_H

#include <poll.h>

#include "queue.h"

#define KVDEV_QUEUE_DRIVER_FDS_MAX 3

/* error 0, or -errno; status is an NVMe status field (io.h); send_ns 0 tells a command that never left this host. */
typedef void kvdev_queue_done_fn(void *owner, uint64_t cookie, int error, uint16_t status, uint64_t send_ns,
                                 uint64_t now_ns);

struct kvdev_queue_driver {
    /* A queue drives the object from now on. 0, or -EBUSY when another one does. */
    int (*attach)(void *object, kvdev_queue_done_fn *done, void *owner);
    /* It does so no longer: what is outstanding is completed (-ENOTCONN) before this returns. */
    void (*detach)(void *object);
    /* KVDEV_REFUSED_*: why submit must not take this command. */
    uint32_t (*check)(const void *object, const struct kvdev_io *io);
    /* 0, -EAGAIN (no room now) or -ENOTCONN (dead). It may complete at once. */
    int (*start)(void *object, const struct kvdev_io *io, uint64_t cookie, uint64_t deadline_ns, uint64_t now_ns);
    /* Lets the peer see what was started; 1 if there was anything. */
    int (*send)(void *object);
    /* Completes what the peer has finished; 1 if there was anything. */
    int (*receive)(void *object, uint64_t now_ns);
    /* Gives up the device when a command is over its deadline. Returns the next deadline, UINT64_MAX if none. */
    uint64_t (*deadlines)(void *object, uint64_t now_ns);
    /* Before the queue sleeps: asks to be woken and says through what; their number, or -EAGAIN when there is
     * something to receive already. */
    int (*wait)(void *object, struct pollfd fds[KVDEV_QUEUE_DRIVER_FDS_MAX]);
    /* Completes everything outstanding with error; the device is dead. */
    void (*give_up)(void *object, int error);
    uint32_t (*outstanding)(const void *object);
    int (*is_alive)(const void *object);
    /* 1: its owner has to look at it (kvdev_queue_attention). */
    int (*wants_attention)(const void *object);
};

int kvdev_queue_device_add(struct kvdev_queue *queue, const struct kvdev_queue_driver *driver, void *object,
                           uint32_t *ret);
/* Another object of the same driver under the same index: a device that was connected again. What is outstanding on
 * the old one completes with -ENOTCONN, what is pending goes to the new one. */
int kvdev_queue_device_replace(struct kvdev_queue *queue, uint32_t device_index, void *object);

#endif

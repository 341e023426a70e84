/* The background poller: a thread of its own that drives a queue, for callers on any number of other threads.
 *
 * Callers submit through channels. A channel's commands go over one ring, which all of them share and which takes no
 * lock, to the thread; completions come back on the channel, which has an eventfd to wait on. Nothing in here waits for a
 * caller, and a caller waits only in kvdev_channel_poll.
 * Payload memory is the caller's again when its completion has been taken, or when kvdev_poller_stop has returned. */
#ifndef KVDEV_POLLER_H
#define KVDEV_POLLER_H

#include "queue.h"

/* cdef begin */
#define KVDEV_POLLER_RING_MAX 65536

struct kvdev_poller_options {
    uint32_t ring_size;        /* commands submitted and not yet taken by the thread; a power of two, 2..65536 */
    int32_t core;              /* the CPU that the thread stays on; -1: any */
};

struct kvdev_poller_stats {
    uint64_t turns;            /* looks at the queue's connections */
    uint64_t sleeps;           /* times that the thread waited in the kernel */
    uint64_t taken;            /* commands that came over the ring */
    uint64_t wakes;            /* times that a channel's eventfd was written */
};

struct kvdev_poller;
struct kvdev_channel;

/* Starts the thread. Until the poller is stopped, submit and poll of the queue are -EBUSY, and all else that may be done
 * with a queue is done while the thread stands aside. -EBUSY: somebody else drives the queue, or has commands on it;
 * -EINVAL: the thread cannot run on this core. The queue must outlive stop. */
int kvdev_poller_create(struct kvdev_queue *queue, const struct kvdev_poller_options *options,
                        struct kvdev_poller **ret);
/* Ends the thread: nothing new is taken, what is outstanding has timeout_ns to complete and is given up then as
 * kvdev_queue_abandon says. Every command completes; no payload is touched after it returns. -ECHILD in a fork. */
int kvdev_poller_stop(struct kvdev_poller *poller, uint64_t timeout_ns);
/* As kvdev_queue_abandon, with what is still in the ring; it is everybody's that is given up. -ECHILD in a fork. */
int kvdev_poller_abandon(struct kvdev_poller *poller);
/* Stops it if it was not stopped. Channels keep what they need of it. In a fork nothing is freed. */
void kvdev_poller_destroy(struct kvdev_poller *poller);
void kvdev_poller_stats_read(const struct kvdev_poller *poller, struct kvdev_poller_stats *ret);

/* capacity: commands submitted and not yet taken back, 1..ring_size. */
int kvdev_channel_create(struct kvdev_poller *poller, uint32_t capacity, struct kvdev_channel **ret);
/* Takes all n commands or none, from any thread, without waiting. -EAGAIN: no room in the channel or the ring;
 * -ESHUTDOWN: the channel is closed or the poller stopped; -ECHILD: this process is a fork. A command that the queue
 * refuses completes with -EINVAL and the KVDEV_REFUSED_* in its result. */
int kvdev_channel_submit(struct kvdev_channel *channel, const struct kvdev_io *ios, size_t n);
/* Up to max completions, as soon as min_count are there (fewer, when fewer are outstanding), or what there is when
 * timeout_ns has passed or a signal came; min_count 0 does not wait. One thread at a time. When none is left the eventfd is
 * not readable. */
size_t kvdev_channel_poll(struct kvdev_channel *channel, struct kvdev_io_done *done, size_t max, size_t min_count,
                          uint64_t timeout_ns);
/* Readable while there are completions; nobody else may read it. */
int kvdev_channel_fd(const struct kvdev_channel *channel);
/* Commands submitted whose completion has not been taken. */
size_t kvdev_channel_outstanding(const struct kvdev_channel *channel);
/* Nothing more is accepted. What is outstanding completes. */
void kvdev_channel_close(struct kvdev_channel *channel);
/* With nobody else inside. What is outstanding is given up as kvdev_poller_abandon says. In a fork nothing is freed. */
void kvdev_channel_destroy(struct kvdev_channel *channel);
/* cdef end */

#endif

/* The admin thread: one C thread that owns the admin queue pairs of a process.
 *
 * It sends Keep Alive at half the KATO, whatever the callers do (it needs no interpreter), notices a dead
 * controller, runs admin commands for any thread and keeps Asynchronous Event Requests outstanding.
 * A process that forks has no such thread in the child: the child must not use its parent's handles
 * (calls return -ECHILD there), and must create its own. */
#ifndef KVDEV_ADMIN_H
#define KVDEV_ADMIN_H

#include "qpair.h"

/* cdef begin */
#define KVDEV_ADMIN_QPAIRS_MAX 256
#define KVDEV_ADMIN_EVENTS_MAX 64
#define KVDEV_ADMIN_AER_MAX 8

struct kvdev_admin_info {
    uint32_t is_alive;             /* the queue pair is ready */
    uint32_t keep_alive_ms;        /* the KATO in use; 0 none */
    uint64_t keep_alives_sent;
    uint64_t keep_alives_done;
    uint64_t keep_alive_last_ns;   /* when the last completion came */
    uint64_t keep_alive_errors;    /* completions with an error status */
    uint64_t lost_ns;              /* when the connection was lost; 0 while it lives */
    uint64_t events_dropped;       /* asynchronous events that found KVDEV_ADMIN_EVENTS_MAX unread */
    uint32_t aer_outstanding;
    uint32_t events_pending;       /* to be taken */
    uint64_t keep_alive_sent_ns;   /* when the controller's timer may have been started anew for the last time */
};

struct kvdev_admin;

int kvdev_admin_create(struct kvdev_admin **ret);
/* Stops the thread; waiting callers return -ECANCELED. Adopted queue pairs stay the caller's, untouched. */
void kvdev_admin_destroy(struct kvdev_admin *admin);

/* The thread drives qp from now on. keep_alive_ms is the KATO; 0 sends none. ret is the handle. */
int kvdev_admin_adopt(struct kvdev_admin *admin, struct kvdev_qpair *qp, uint32_t keep_alive_ms, uint32_t *ret);
/* Gives the queue pair back; callers that wait on it return -ECANCELED and it is closed if they had commands out. */
int kvdev_admin_release(struct kvdev_admin *admin, uint32_t handle);
/* Another KATO (0 stops keep alive: after CC.SHN, or when the effective value was read back). */
int kvdev_admin_keep_alive_set(struct kvdev_admin *admin, uint32_t handle, uint32_t keep_alive_ms);

/* Traffic based keep alive (CTRATT.TBKAS): every KATO / 4 a look at what has been completed, by any queue pair of the
 * association, of what was sent since the last look; a Keep Alive only where that is nothing. */
int kvdev_admin_traffic_based_set(struct kvdev_admin *admin, uint32_t handle, int is_traffic_based);
/* An eventfd of the caller that is written when a connection is lost or an event has come; -1 for none. */
int kvdev_admin_notice_set(struct kvdev_admin *admin, int fd);

/* Like kvdev_qpair_execute, from any thread. A command over its time takes the connection down:
 * -ETIMEDOUT. The memory of data is free on return, whatever is returned. */
int kvdev_admin_execute(struct kvdev_admin *admin, uint32_t handle, const uint8_t *sqe, void *data, uint32_t len,
                        uint32_t direction, uint64_t timeout_ns, uint8_t *cqe);

/* Keeps count (AERL + 1 at most, and KVDEV_ADMIN_AER_MAX) event requests outstanding, re-armed by themselves. */
int kvdev_admin_events_arm(struct kvdev_admin *admin, uint32_t handle, uint32_t count);
/* The next event's completion DW0: waits up to timeout_ns; -EAGAIN none came, -ENOTCONN none will. */
int kvdev_admin_event_take(struct kvdev_admin *admin, uint32_t handle, uint64_t timeout_ns, uint32_t *ret);

int kvdev_admin_info_read(struct kvdev_admin *admin, uint32_t handle, struct kvdev_admin_info *ret);
int kvdev_admin_qpair_info_read(struct kvdev_admin *admin, uint32_t handle, struct kvdev_qpair_info *ret);
int kvdev_admin_fault_read(struct kvdev_admin *admin, uint32_t handle, struct kvdev_qpair_fault *ret);
/* cdef end */

#endif

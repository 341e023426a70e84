/* Data path of the embedded NVMe/TCP target: listening sockets, queue pairs, I/O commands.
 *
 * Poller threads own the connections and run each to completion: receive machine in target role, I/O commands
 * on block devices, responses. Worker threads run what may wait for a disk. Fabrics and Admin commands are
 * handed to one control thread of the caller (kvdev_target_control_wait) and completed by handle.
 *
 * Data of more than KVDEV_TARGET_STAGE_BYTES moves between the socket and a memory device without a buffer in
 * between. Smaller transfers, and writes whose data digest is still to be checked, are staged, so that no
 * metadata-sized write is seen in part by a reader or left in part by a lost connection; one logical block is
 * never seen or sent in part.
 *
 * Every count is bounded by the options; nothing is allocated per command. Spec: TCP Transport 1.0, 3. */
#ifndef KVDEV_TARGET_H
#define KVDEV_TARGET_H

#include <stddef.h>
#include <stdint.h>

#include "bdev.h"
#include "tls.h"

/* cdef begin */
#define KVDEV_TARGET_STAGE_BYTES 16384
#define KVDEV_TARGET_IN_CAPSULE_MAX 131072

#define KVDEV_TARGET_EVENT_CAPSULE 1   /* a Fabrics or Admin command to complete by its handle */
#define KVDEV_TARGET_EVENT_CLOSED 2    /* a connection is gone; its number is not used again */

#define KVDEV_TARGET_GATE_ANA 0xffff         /* the status of an ANA state: SCT 3, SC 1 to 3 */
#define KVDEV_TARGET_GATE_NO_READS 0x10000   /* a reservation conflict */
#define KVDEV_TARGET_GATE_NO_WRITES 0x20000

#define KVDEV_TARGET_ACTION_NONE 0
#define KVDEV_TARGET_ACTION_BIND 1     /* a Connect was granted: the connection becomes that queue */
#define KVDEV_TARGET_ACTION_ADMIT 2    /* the host is authenticated: the queue takes all its commands */
#define KVDEV_TARGET_ACTION_END 3      /* the connection ends once this completion is sent */

struct kvdev_target_opts {
    uint32_t poller_count;
    uint32_t worker_count;
    uint32_t connections_max;
    uint32_t subsystems_max;
    uint32_t controllers_max;
    uint32_t listeners_max;
    uint32_t buffer_count;         /* per poller, for transfers that cannot go straight */
    uint32_t buffer_bytes;         /* of one of them; the largest max_io_size */
    uint32_t connect_timeout_ms;   /* from accept to a granted Connect */
    uint32_t linger_timeout_ms;    /* from a C2HTermReq to closing */
};

struct kvdev_target_transport {    /* holds for connections accepted later */
    uint32_t max_io_size;          /* bytes of one command */
    uint32_t in_capsule_data_size; /* I/O queues */
    uint32_t maxh2cdata;
    uint16_t queue_depth_max;      /* entries of an I/O or Admin queue */
    uint8_t c2h_success;           /* SUCCESS instead of a response where SQ flow control is off */
    uint8_t hdgst;                 /* digests granted to who asks */
    uint8_t ddgst;
    uint8_t cpda;                  /* alignment demanded of the host's data, 0's based dwords */
    uint8_t reserved[2];
};

struct kvdev_target_event {
    uint64_t handle;               /* CAPSULE: for kvdev_target_complete */
    uint64_t arrival_ns;           /* CLOCK_MONOTONIC */
    uint64_t data_addr;            /* received data, or room for data to the host; valid until completed */
    uint32_t data_len;             /* bytes received */
    uint32_t data_room;            /* bytes that go to the host on success; zeroed */
    uint32_t connection;
    uint32_t listener;
    int32_t controller;            /* -1 before Connect is granted */
    int32_t reason;                /* CLOSED: 0 end of file, or -errno; -EPROTO: see fault_text */
    uint16_t qid;
    uint8_t type;
    uint8_t reserved;
    uint32_t fault_fes;            /* CLOSED with -EPROTO */
    uint32_t tls_tag;              /* of the key the connection came in with; 0 without TLS */
    uint8_t sqe[64];
    char fault_text[120];
};

struct kvdev_target_completion {
    uint64_t handle;
    uint32_t dw0;
    uint32_t dw1;
    uint16_t status;               /* SC in 7:0, SCT in 10:8, DNR in 14 */
    uint8_t action;
    uint8_t sq_flow_control_off;   /* BIND */
    uint16_t qid;                  /* BIND */
    uint16_t sqsize;               /* BIND, 0's based */
    int32_t controller;            /* BIND */
    uint8_t must_authenticate;     /* BIND: only Authentication Send and Receive until ADMIT */
    uint8_t reserved[7];
};

struct kvdev_target_connection_info {
    char peer_address[64];
    char local_address[64];
    uint16_t peer_port;
    uint16_t local_port;
    uint8_t hdgst;
    uint8_t ddgst;
    uint8_t poller;
    uint8_t reserved;
};

struct kvdev_target_poller_stat {
    uint64_t busy_ns;
    uint64_t idle_ns;
    uint64_t command_count;
    uint64_t rx_bytes;
    uint64_t tx_bytes;
    uint64_t fault_count;
    uint64_t refused_count;        /* connections beyond connections_max */
    uint32_t buffers_free;         /* of buffer_count */
    uint32_t admin_qpairs;         /* since start */
    uint32_t io_qpairs;
    uint32_t admin_qpairs_now;
    uint32_t io_qpairs_now;
    uint32_t unbound_now;
    int32_t thread_id;
};

struct kvdev_target;

int kvdev_target_create(const struct kvdev_target_opts *opts, struct kvdev_target **ret);
/* Close everything and end the threads within timeout_ns, then free all. -ETIMEDOUT: a worker is stuck in the
 * kernel; the object is leaked on purpose. No other call may run or follow. Devices must outlive the call. */
int kvdev_target_destroy(struct kvdev_target *target, uint64_t timeout_ns);
int kvdev_target_set_transport(struct kvdev_target *target, const struct kvdev_target_transport *transport);

/* A bound, listening, non-blocking socket; the target owns the descriptor on success. Ids are not used again. */
int kvdev_target_listener_add(struct kvdev_target *target, int fd, struct kvdev_tls_context *tls, uint32_t *ret_id);
/* Stop accepting and end the connections that came in through it; returns when the socket is closed. */
int kvdev_target_listener_remove(struct kvdev_target *target, uint32_t id, uint64_t timeout_ns);

int kvdev_target_subsystem_create(struct kvdev_target *target, uint32_t nsid_max, int32_t *ret);
/* Its namespaces are cleared and its controllers killed before; waits for their last connection. */
int kvdev_target_subsystem_destroy(struct kvdev_target *target, int32_t subsystem, uint64_t timeout_ns);
int kvdev_target_namespace_set(struct kvdev_target *target, int32_t subsystem, uint32_t nsid,
                               struct kvdev_bdev *bdev);
/* On return no I/O runs on what the namespace was: waits timeout_ns, then ends the connections that still
 * have some, then waits again. */
int kvdev_target_namespace_clear(struct kvdev_target *target, int32_t subsystem, uint32_t nsid,
                                 uint64_t timeout_ns);

/* Look at the held operations again: a filter was resumed, or limits changed. */
void kvdev_target_release(struct kvdev_target *target);

/* host_tag: a number of the caller's for the host, the same for all its controllers. */
int kvdev_target_controller_create(struct kvdev_target *target, int32_t subsystem, uint32_t host_tag, int32_t *ret);
/* Whether its I/O queues execute commands. */
int kvdev_target_controller_set_ready(struct kvdev_target *target, int32_t controller, int is_ready);
/* What keeps its I/O to a namespace out; 0 lets all through. Commands that have begun go on. */
int kvdev_target_controller_gate_set(struct kvdev_target *target, int32_t controller, uint32_t nsid, uint32_t gate);
/* Abort what these hosts have begun on a namespace, and wait until nothing of it is left: their connections are ended
 * when it takes timeout_ns; -ETIMEDOUT when it takes as long again. */
int kvdev_target_abort_hosts(struct kvdev_target *target, int32_t subsystem, uint32_t nsid, const uint32_t *host_tags,
                             uint32_t count, uint64_t timeout_ns);
/* End all its connections. */
int kvdev_target_controller_kill(struct kvdev_target *target, int32_t controller);
/* End all its connections and give the number back once they are gone. */
int kvdev_target_controller_destroy(struct kvdev_target *target, int32_t controller);
int kvdev_target_disconnect(struct kvdev_target *target, uint32_t connection);

/* Wait for events: at least one, or the timeout (*count 0), or a wake. One thread. */
int kvdev_target_control_wait(struct kvdev_target *target, struct kvdev_target_event *events, uint32_t max,
                              uint64_t timeout_ns, uint32_t *count);
void kvdev_target_control_wake(struct kvdev_target *target);
/* Complete a command handed out by control_wait; each handle once, whether or not its connection still is. */
int kvdev_target_complete(struct kvdev_target *target, const struct kvdev_target_completion *completion);
/* -ENOENT when it is gone. */
int kvdev_target_connection_read(struct kvdev_target *target, uint32_t connection,
                                 struct kvdev_target_connection_info *ret);
int kvdev_target_poller_stat_read(struct kvdev_target *target, uint32_t poller,
                                  struct kvdev_target_poller_stat *ret);
/* cdef end */

#endif

/* Inside of the target: what its three source files share.
 *
 * Who touches what: a connection and its requests belong to one poller thread; a request is lent to a worker
 * (EXECUTING) or to the control thread (CONTROL) and comes back through the poller's inbox. Listener,
 * controller and namespace tables are read by every thread: slots never move, fields are atomic or under
 * target->lock. */
#ifndef KVDEV_TARGET_INT_H
#define KVDEV_TARGET_INT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/socket.h>

#include "bdev.h"
#include "pdu.h"
#include "target.h"

#define TARGET_RX_BYTES 16384        /* receive buffer of a connection */
#define TARGET_RX_TAIL_BYTES 128     /* of it used behind payload: the next header, not the next payload */
#define TARGET_RX_BUDGET 4           /* receive calls of one connection before the others have a turn */
#define TARGET_IOV_MAX 64            /* pieces of one send call */
#define TARGET_EPOLL_MAX 64
#define TARGET_TICK_MS 20            /* while a connection waits for a deadline */
#define TARGET_STASH_BYTES 4096      /* largest logical block sent whole from a memory device */
#define TARGET_HEAD_BYTES 352        /* header, data digest and response of one command */
#define TARGET_FUSED_SHIFT 20        /* 1 MiB */
#define TARGET_COPY_RANGES_MAX 128u  /* MSRC */
#define TARGET_COPY_RANGE_BYTES 32u
#define TARGET_INLINE_FILL_MAX ((uint64_t)1 << 20) /* a longer fill is a worker's: a poller serves others meanwhile */

/* NVMe status codes as kvdev_target_completion.status has them. */
#define ST_SUCCESS 0x0000
#define ST_DNR 0x4000
#define ST_INVALID_OPCODE (0x0001 | ST_DNR)
#define ST_INVALID_FIELD (0x0002 | ST_DNR)
#define ST_CID_CONFLICT 0x0003
#define ST_DATA_TRANSFER_ERROR 0x0004
#define ST_INTERNAL_ERROR 0x0006
#define ST_ABORTED_FAILED_FUSED (0x0009 | ST_DNR)
#define ST_ABORTED_MISSING_FUSED (0x000a | ST_DNR)
#define ST_INVALID_NAMESPACE (0x000b | ST_DNR)
#define ST_COMMAND_SEQUENCE (0x000c | ST_DNR)
#define ST_DATA_SGL_LENGTH (0x000f | ST_DNR)
#define ST_SGL_TYPE (0x0011 | ST_DNR)
#define ST_ATOMIC_WRITE_UNIT (0x0014 | ST_DNR)
#define ST_SGL_OFFSET (0x0016 | ST_DNR)
#define ST_ABORTED_PREEMPT (0x001b | ST_DNR)
#define ST_WRITE_PROTECTED (0x0020 | ST_DNR)
#define ST_TRANSIENT_TRANSPORT 0x0022
#define ST_LBA_RANGE (0x0080 | ST_DNR)
#define ST_CAPACITY_EXCEEDED 0x0081
#define ST_RESERVATION_CONFLICT (0x0083 | ST_DNR)
#define ST_SIZE_LIMIT (0x0183 | ST_DNR)
#define ST_WRITE_FAULT 0x0280
#define ST_READ_ERROR 0x0281
#define ST_COMPARE_FAILURE (0x0285 | ST_DNR)
#define ST_AUTHENTICATION_REQUIRED (0x0191 | ST_DNR)

enum request_state {
    REQUEST_FREE,
    REQUEST_CAPSULE,     /* in-capsule data is arriving */
    REQUEST_WAIT_BUFFER, /* on the poller's wait list */
    REQUEST_R2T_QUEUED,  /* on the connection's send list */
    REQUEST_R2T_SENT,    /* H2CData may arrive */
    REQUEST_FUSED,       /* its data is there, the other half of its pair is not ready */
    REQUEST_EXECUTING,   /* a worker has it */
    REQUEST_CONTROL,     /* the control thread has it */
    REQUEST_SENDING,     /* on the connection's send list */
};

enum fused_state {
    FUSED_NONE,
    FUSED_OPEN,          /* fused_first waits for the command after it */
    FUSED_FAILED,        /* the first half has failed: the second is aborted when it comes */
};

enum connection_state {
    CONNECTION_WAIT_IC,
    CONNECTION_WAIT_CONNECT,
    CONNECTION_LIVE,
    CONNECTION_LINGER,   /* faulted: the Term PDU is going out, input is thrown away */
    CONNECTION_CLOSED,   /* no socket; waits for lent requests */
};

struct segment {
    const uint8_t *at;
    size_t len;
};

struct target_namespace {
    _Atomic(struct kvdev_bdev *) bdev;
    _Atomic uint32_t outstanding;
    _Atomic uint32_t evict; /* end connections with I/O on it */
    /* Pieces of TARGET_FUSED_SHIFT, modulo 64, that a fused pair was ever sent to: there what changes data takes
     * fused_lock, so that nothing comes between the halves. */
    _Atomic uint64_t fused_map;
    pthread_mutex_t fused_lock;
};

struct target_subsystem {
    struct target_namespace *namespaces; /* index nsid - 1; NULL: free slot */
    uint32_t nsid_max;
};

struct target_controller {
    uint32_t in_use; /* under target->lock; 2: free once its connections are gone */
    _Atomic int32_t number; /* generation and slot: what callers know it by */
    _Atomic uint32_t is_ready;
    _Atomic uint32_t is_dead;
    _Atomic uint32_t connection_count;
    struct target_subsystem *subsystem;
    uint32_t host_tag;
    /* By nsid - 1: KVDEV_TARGET_GATE_*, 0 lets all I/O through; then what came before is aborted (Preempt and Abort). */
    _Atomic uint32_t *gates;
    _Atomic uint64_t *abort_ns;
};

struct connection;
struct poller;

struct request {
    struct request *next; /* of the one list it is on */
    struct connection *connection;
    uint8_t *stage; /* KVDEV_TARGET_STAGE_BYTES of its own, more if in-capsule data needs it */
    uint8_t *buffer; /* from the poller's pool, or NULL */
    uint8_t *data; /* stage, buffer, or the device's memory */
    struct target_namespace *ns;
    struct kvdev_bdev *bdev;
    struct request *mate; /* the other half of a fused pair */
    uint64_t offset;
    uint64_t length; /* of the operation on the device */
    uint64_t arrival_ns;
    uint64_t admitted_ns; /* when the device took it on; 0: not held back */
    struct kvdev_bdev_hold hold;
    uint64_t control_sequence;
    uint32_t data_len; /* to move over the wire */
    uint32_t block_size;
    uint32_t dw0;
    uint32_t dw1;
    int32_t error; /* of the operation, -errno */
    uint16_t status;
    uint16_t fuse_status; /* not 0: what this half of a broken pair ends with once its data is there */
    uint16_t index;
    uint8_t state;
    uint8_t fuse; /* SQE bits: 1 first half, 2 second */
    uint8_t direction; /* enum kvdev_pdu_direction */
    uint8_t op; /* KVDEV_BDEV_OP_* */
    uint8_t op_flags;
    uint8_t is_direct;
    uint8_t is_control;
    uint8_t has_cid; /* its CID is marked outstanding */
    uint8_t is_bad_digest;
    uint8_t is_abandoned; /* a held event request whose CID the host has used again: no response */
    uint8_t segment_index;
    uint8_t segment_count;
    uint8_t is_read_response;
    struct segment segments[3];
    struct kvdev_target_completion completion;
    struct kvdev_pdu_r2t r2t;
    struct kvdev_sqe sqe;
    uint8_t raw_sqe[KVDEV_SQE_BYTES];
    uint8_t head[TARGET_HEAD_BYTES];
};

struct request_list {
    struct request *first;
    struct request *last;
};

struct connection {
    struct kvdev_target *target;
    struct poller *poller;
    struct connection *next_of_poller;
    struct connection *next_dirty;
    struct connection *next_event; /* CLOSED events on the control queue; handed-over ones in an inbox */
    int fd;
    struct kvdev_tls_link *tls; /* fd is then the near end of a pump */
    uint32_t number;
    uint32_t slot;
    uint32_t listener_id;
    uint8_t state;
    uint8_t is_dirty;
    uint8_t wants_out;
    uint8_t is_connecting;
    uint8_t sq_flow_control_off;
    uint8_t fused; /* enum fused_state */
    uint8_t shut;
    uint8_t must_authenticate;
    uint8_t is_ending; /* closes when all that is to be sent is sent; takes nothing in */
    uint16_t qid;
    uint16_t sq_entries;
    uint16_t sq_head;
    uint16_t request_limit;
    uint16_t request_count; /* of requests[] */
    uint16_t outstanding;
    uint32_t r2t_open; /* requests in R2T_SENT */
    uint32_t lent; /* requests with a worker or the control thread */
    uint64_t control_sequence;
    uint32_t host_tag; /* of its controller; stays when that is gone */
    int32_t controller_number;
    struct target_controller *controller;
    struct request *fused_first; /* FUSED_OPEN */
    _Atomic uint32_t kill;
    _Atomic uint32_t is_closed; /* for the workers: nobody waits for its requests */
    _Atomic uint32_t was_closed_event_taken; /* by the control thread, which touches it no more */
    uint64_t deadline_ns; /* of WAIT_IC, WAIT_CONNECT, LINGER */
    struct kvdev_target_transport transport;
    struct kvdev_pdu_rx rx;
    struct request *rx_request;
    struct request_list free;
    struct request_list tx;
    uint8_t control_out[KVDEV_PDU_BUILD_MAX]; /* ICResp or C2HTermReq */
    uint32_t control_len;
    uint32_t control_sent;
    struct kvdev_target_event closed_event;
    struct kvdev_target_connection_info info;
    size_t map_bytes;
    struct request *requests;
    uint8_t cid_outstanding[8192]; /* one bit per CID */
    uint8_t stash[TARGET_STASH_BYTES];
    uint8_t rx_buf[TARGET_RX_BYTES];
};

struct listener {
    int fd;
    uint32_t id; /* 0: free slot */
    uint8_t is_closing;
    uint8_t is_paused; /* out of descriptors: tried again at the next tick */
    struct kvdev_tls_context *tls; /* NULL: plain TCP */
};

struct poller {
    struct kvdev_target *target;
    pthread_t thread;
    uint32_t index;
    int epoll_fd;
    int event_fd;
    uint8_t is_started;
    struct connection *connections;
    struct connection *dirty;
    struct request_list wait_buffer;
    uint8_t **buffers; /* free large buffers, a stack */
    uint32_t buffer_count;
    uint8_t *buffer_map;
    uint64_t now_ns;
    uint32_t deadline_count; /* connections with a deadline */
    _Atomic uint32_t scan; /* look for connections to end */
    pthread_mutex_t inbox_lock;
    struct request_list inbox; /* under inbox_lock */
    struct connection *inbox_connections; /* under inbox_lock */
    _Atomic uint32_t inbox_pending;
    /* statistics, written by the poller only */
    _Atomic uint64_t busy_ns, idle_ns, command_count, rx_bytes, tx_bytes, fault_count, refused_count;
    _Atomic uint32_t buffers_free;
    _Atomic uint32_t admin_qpairs, io_qpairs, admin_qpairs_now, io_qpairs_now, unbound_now;
    _Atomic int32_t thread_id;
};

struct worker {
    struct kvdev_target *target;
    pthread_t thread;
    uint8_t is_started;
};

/* A Preempt and Abort that waits for the commands of some hosts on a namespace; on the caller's stack. */
struct drain {
    struct drain *next;
    const struct target_namespace *ns;
    const uint32_t *host_tags;
    uint32_t host_count;
    uint32_t evict;     /* end the connections that still have some */
    uint64_t before_ns; /* commands that arrived later do not count */
    uint64_t idle_map;  /* pollers that have none left, or none any more */
};

struct kvdev_target {
    struct kvdev_target_opts opts;
    struct poller *pollers;
    struct worker *workers;
    _Atomic uint32_t stopping;

    pthread_mutex_t lock; /* the tables below */
    pthread_cond_t changed; /* a listener closed, a namespace became idle, a connection was freed */
    struct kvdev_target_transport transport;
    struct listener *listeners;
    uint32_t listener_id_next;
    struct target_subsystem *subsystems;
    struct target_controller *controllers;
    struct connection **connections; /* by slot */
    uint32_t connection_number_next;
    uint32_t poller_next;
    struct drain *drains;

    pthread_mutex_t work_lock;
    pthread_cond_t work_ready;
    struct request_list work;
    struct request_list held; /* not to run before a time, or before a filter is resumed */
    uint64_t held_due_ns; /* no held request is due before */

    pthread_mutex_t control_lock;
    pthread_cond_t control_ready;
    struct request_list control;
    struct connection *control_closed_first;
    struct connection *control_closed_last;
    uint64_t control_sequence; /* keeps CLOSED behind the capsules of its connection */
    uint8_t control_woken;
};

static inline void list_push(struct request_list *list, struct request *request)
{
    request->next = NULL;
    if (list->last)
        list->last->next = request;
    else
        list->first = request;
    list->last = request;
}

static inline void list_push_front(struct request_list *list, struct request *request)
{
    request->next = list->first;
    list->first = request;
    if (!list->last)
        list->last = request;
}

static inline struct request *list_pop(struct request_list *list)
{
    struct request *request = list->first;
    if (request) {
        list->first = request->next;
        if (!list->first)
            list->last = NULL;
        request->next = NULL;
    }
    return request;
}

#define OPC_FABRICS 0x7f
#define OPC_FLUSH 0x00
#define OPC_WRITE 0x01
#define OPC_READ 0x02
#define OPC_COMPARE 0x05
#define OPC_WRITE_ZEROES 0x08
#define OPC_DSM 0x09
#define OPC_VERIFY 0x0c
#define OPC_RESERVATION_REGISTER 0x0d
#define OPC_RESERVATION_REPORT 0x0e
#define OPC_RESERVATION_ACQUIRE 0x11
#define OPC_RESERVATION_RELEASE 0x15
#define OPC_COPY 0x19
#define CDW12_FUA (1u << 30)

/* Opcodes that io_start knows, one bit each; all are below 32. */
#define NVM_OPCODES                                                                                                  \
    (1u << OPC_FLUSH | 1u << OPC_WRITE | 1u << OPC_READ | 1u << OPC_COMPARE | 1u << OPC_WRITE_ZEROES | 1u << OPC_DSM | \
     1u << OPC_VERIFY | 1u << OPC_COPY)
#define SQE_FUSE_MASK 3u

#define TARGET_CONTROLLER_SLOT(number) ((uint32_t)(number) & 0xffffu)

uint64_t target_now_ns(void);

/* target.c */
void target_work_push(struct kvdev_target *target, struct request *request);
void target_held_push(struct kvdev_target *target, struct request *request);
void target_control_push(struct kvdev_target *target, struct request *request);
void target_control_push_closed(struct kvdev_target *target, struct connection *connection);
void target_poller_kick(struct poller *poller);
void target_scan_all(struct kvdev_target *target);
void target_inbox_push(struct poller *poller, struct request *request);
void target_namespace_put(struct kvdev_target *target, struct target_namespace *ns);
/* Whether a connection has nothing left of what a drain waits for; on its poller. */
int target_is_drained(const struct drain *drain, const struct connection *connection);

/* target_poller.c */
void *target_poller_main(void *poller);
void connection_fault(struct connection *connection, const struct kvdev_pdu_fault *fault);
void connection_close(struct connection *connection, int reason);
void connection_end(struct connection *connection);
void connection_mark_dirty(struct connection *connection);

/* target_command.c */
void command_capsule(struct connection *connection);
void command_h2c_data(struct connection *connection);
void command_payload_done(struct connection *connection);
void command_buffer_granted(struct request *request);
void command_returned(struct request *request);
void command_release(struct request *request);
/* On a worker or on the poller: carry out the operation and set request->error. */
void command_execute(struct request *request);
/* The R2T went out whole. */
void command_r2t_sent(struct request *request);
void command_respond(struct request *request);
void command_fail(struct request *request, uint16_t status);
uint16_t command_status_of(int error, int op);
/* Run it here, or lend it to a worker; the mate of a fused pair goes with its second half. */
void command_run(struct request *request);

/* target_nvm.c: ranges, copies, fused pairs. */
uint64_t nvm_fused_pieces(const struct request *request, uint64_t offset, uint64_t length);
uint16_t nvm_dsm_check(struct request *request);
void nvm_dsm_execute(struct request *request);
uint16_t nvm_copy_prepare(struct request *request, const struct kvdev_bdev_info *info);
uint16_t nvm_copy_check(struct request *request);
void nvm_copy_execute(struct request *request);
/* A command comes in on an I/O queue: the status it is to end with for its place in a fused pair, or success. */
uint16_t fused_admit(struct request *request);
uint16_t fused_check(const struct request *request, const struct kvdev_bdev_info *info);
/* A half of a pair cannot go on: it ends with this status, and the other half with what follows from that. */
void fused_fail(struct request *request, uint16_t status);
void fused_data_ready(struct request *request);
void fused_execute(struct request *request);
void fused_finish(struct request *second);
void fused_forget(struct request *request);

#endif

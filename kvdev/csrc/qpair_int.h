/* Shared by the files of the queue pair (qpair.h), and what the queue asks of one for every command.
 *
 *   qpair.c          commands and PDUs of a connection that stands
 *   qpair_connect.c  making it, and one synchronous command */
#ifndef KVDEV_QPAIR_INT_H
#define KVDEV_QPAIR_INT_H

#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>

#include "qpair.h"

#define SLOT_NONE 0xffffffffu
#define NS_PER_S 1000000000ull

enum request_state {
    REQUEST_FREE = 0,
    REQUEST_QUEUED = 1, /* its capsule header is not with the kernel yet: the controller cannot know the CID */
    REQUEST_SENT = 2,
    REQUEST_HELD = 3,   /* completed while a PDU with its memory is half sent; ends when that PDU has left */
};

struct request {
    struct kvdev_pdu_cmd cmd;
    uint8_t *data;
    uint64_t cookie;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    uint64_t send_ns;
    int held_error;
    uint16_t cid;
    uint8_t state;
    uint8_t opcode;
    uint8_t generation;
    uint8_t has_ddgst_error;
    uint8_t may_be_short;
    uint16_t tx_items;    /* items of the send ring that name it */
    uint8_t cqe[KVDEV_CQE_BYTES];
    uint8_t inline_data[16];
};

struct tx_item {
    uint8_t head[KVDEV_PDU_BUILD_MAX];
    const uint8_t *payload;
    uint32_t head_len;
    uint32_t payload_len;
    uint32_t ddgst_len;
    uint32_t sent;
    uint32_t slot;        /* SLOT_NONE for a PDU of no command */
    uint8_t ddgst[KVDEV_PDU_DIGEST_BYTES];
    uint8_t is_capsule;
    uint8_t ends_r2t;
};

struct r2t {
    uint32_t slot;
    uint32_t offset;
    uint32_t length;
    uint32_t done; /* bytes put into H2CData PDUs */
    uint16_t ttag;
};

struct kvdev_qpair {
    struct kvdev_qpair_params params;
    struct kvdev_pdu_rx rx;
    struct kvdev_qpair_fault fault;
    struct kvdev_qpair_info counters; /* only its counter fields are kept up to date */
    int fd;
    struct kvdev_tls_context *tls_context;
    struct kvdev_tls_link *tls; /* fd is then the near end of a pump */
    uint32_t state;
    int is_ic_done;
    int is_draining;      /* dead, H2CTermReq sent, waiting for the controller to close */
    uint64_t drain_deadline_ns;
    kvdev_qpair_done_fn *done;
    void *owner;
    atomic_uint holders;
    pid_t pid;
    atomic_int is_dead;           /* what other threads may read of state */
    atomic_int is_cancelled;
    _Atomic uint64_t traffic_ns;  /* of the admin queue pair: send time of the newest command completed */
    struct kvdev_qpair *admin;    /* of its association; held */

    struct request *requests;
    uint16_t *free_ring;  /* first in, first out: a slot rests as long as possible before its next generation */
    uint32_t slot_count;
    uint32_t free_head;
    uint32_t free_count;
    uint32_t outstanding;
    uint32_t in_flight_bytes;
    uint64_t deadline_min_ns; /* no command is due earlier */
    uint32_t rx_slot;     /* whose payload is being received */
    uint32_t payload_len_last; /* of the last C2HData */
    uint16_t sqhd;

    struct tx_item *tx;
    uint32_t tx_mask;
    uint32_t tx_head;
    uint32_t tx_tail;
    uint32_t h2c_items;
    int is_tx_blocked;

    struct r2t *r2ts;
    uint32_t r2t_mask;
    uint32_t r2t_head;
    uint32_t r2t_tail;

    uint8_t *ring;
    uint32_t ring_size;
    uint32_t ring_pos;
    uint32_t ring_len;
};

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static inline uint64_t add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* ---- what the public functions of the same name do, without a call ---- */

static inline int qpair_is_ready(const struct kvdev_qpair *qp)
{
    return qp->state == KVDEV_QPAIR_READY;
}

static inline uint32_t qpair_room(const struct kvdev_qpair *qp)
{
    return qp->state == KVDEV_QPAIR_READY ? qp->free_count : 0;
}

static inline int qpair_has_unsent(const struct kvdev_qpair *qp)
{
    return qp->tx_head != qp->tx_tail || qp->r2t_head != qp->r2t_tail;
}

static inline void qpair_association_check(struct kvdev_qpair *qp)
{
    if (qp->admin && qp->state == KVDEV_QPAIR_READY && atomic_load_explicit(&qp->admin->is_dead, memory_order_acquire))
        kvdev_qpair_kill(qp, KVDEV_FAULT_ASSOCIATION, -ENOTCONN, "association");
}

/* ---- qpair.c ---- */

/* Reads what is there; 1 if anything was, the end of the connection included. */
int qpair_receive(struct kvdev_qpair *qp);
/* Ends the connection over a fault in what the peer sent, which is told to it. */
void qpair_kill_fault(struct kvdev_qpair *qp, const struct kvdev_pdu_fault *fault, uint32_t kind, int error,
                      const char *name);

/* ---- qpair_connect.c ---- */

/* Waits for events on the connection until the deadline, or a cancel; 1 ready, 0 not. */
int qpair_wait(const struct kvdev_qpair *qp, short events, uint64_t deadline_ns);

#endif

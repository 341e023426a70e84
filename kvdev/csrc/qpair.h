/* One NVMe/TCP queue pair of the host: socket, command table, both directions of the stream.
 *
 * A queue pair is driven by exactly one thread at a time: its creator (kvdev_qpair_execute), then the
 * queue (queue.h) or the admin thread (admin.h) it is given to. Nothing here blocks but connect,
 * execute and destroy, and those end by their time limit. All memory is allocated by create.
 *
 * Death: the first fault is recorded and kept; an H2CTermReq is sent as far as that is possible without
 * waiting, every outstanding command completes with an error, and from then on no caller's memory is
 * read or written. Times are CLOCK_MONOTONIC nanoseconds. */
#ifndef KVDEV_QPAIR_H
#define KVDEV_QPAIR_H

#include <stddef.h>
#include <stdint.h>

#include "tls.h"
#include "pdu.h"

/* cdef begin */
#define KVDEV_DIGEST_OFF 0     /* do not ask for it; a peer that turns it on is at fault */
#define KVDEV_DIGEST_PREFER 1  /* ask for it, go on without when the controller refuses */
#define KVDEV_DIGEST_REQUIRE 2 /* ask for it, fail to connect when the controller refuses */

#define KVDEV_QPAIR_IDLE 0     /* not connected yet */
#define KVDEV_QPAIR_READY 1    /* ICResp accepted; commands may be sent */
#define KVDEV_QPAIR_DEAD 2     /* a fault was recorded, or closed; never comes back */

#define KVDEV_FAULT_NONE 0
#define KVDEV_FAULT_SOCKET 1   /* a socket call failed: error is its -errno */
#define KVDEV_FAULT_CLOSED 2   /* the peer closed the connection */
#define KVDEV_FAULT_TIMEOUT 3  /* operation did not end in time (connect, ICResp, command, keep alive) */
#define KVDEV_FAULT_PROTOCOL 4 /* the peer broke a rule: fes, fei, field, expected, actual say which */
#define KVDEV_FAULT_DIGEST 5   /* header digest mismatch: expected and actual */
#define KVDEV_FAULT_REFUSED 6  /* the controller refused a digest that is required: field names it */
#define KVDEV_FAULT_TERM 7     /* the controller sent C2HTermReq: fes and fei are the peer's */
#define KVDEV_FAULT_LOCAL 8    /* closed by us */
#define KVDEV_FAULT_ASSOCIATION 9 /* the admin queue pair of its association is dead */

#define KVDEV_QPAIR_CANCEL_MS 50

struct kvdev_qpair_params {
    uint16_t qid;                   /* 0 is the admin queue */
    uint16_t queue_size;            /* SQ entries as agreed by Connect, 2..4096; queue_size - 1 commands fit */
    uint8_t header_digest;          /* KVDEV_DIGEST_* */
    uint8_t data_digest;            /* KVDEV_DIGEST_* */
    uint8_t hpda;                   /* 0..31: data alignment asked of the controller, 0's based dwords */
    uint8_t maxr2t_0based;          /* 0..15: R2Ts outstanding per command */
    uint32_t rcvbuf_size_bytes;     /* SO_RCVBUF; 0 leaves the kernel's automatic sizing */
    uint32_t sndbuf_size_bytes;     /* SO_SNDBUF; 0 likewise */
    uint32_t in_capsule_size_bytes; /* I/O commands with up to so much data send it in the capsule (IOCCSZ * 16 - 64);
                                       Fabrics and admin commands always have 8192 */
};

struct kvdev_qpair_info {
    uint32_t state;                 /* KVDEV_QPAIR_* */
    uint32_t maxh2cdata;
    uint32_t outstanding_count;
    uint32_t in_flight_bytes;
    uint16_t qid;
    uint16_t queue_size;
    uint8_t cpda;                   /* 0's based dwords, as the controller demands */
    uint8_t hdgst;                  /* 1 when in use */
    uint8_t ddgst;
    uint8_t pfv;
    uint16_t sqhd;                  /* of the last CQE that carried one */
    uint16_t reserved;
    char local_address[64];         /* "127.0.0.1:40312", "[::1]:4420" */
    char peer_address[64];
    uint64_t rx_bytes;
    uint64_t tx_bytes;
    uint64_t rx_calls;              /* system calls that read the socket, those that found nothing included */
    uint64_t tx_calls;
    uint64_t rx_empty_calls;
    uint64_t commands;
    uint64_t ddgst_errors;          /* commands failed by a data digest */
    uint64_t short_transfers;       /* successes refused because not every byte had moved */
};

struct kvdev_qpair_fault {
    uint32_t kind;                  /* KVDEV_FAULT_* */
    int32_t error;                  /* -errno that connect or execute returned for it */
    uint16_t fes;                   /* Fatal Error Status, TCP 3.6.2.4 */
    uint8_t pdu_type;
    uint8_t is_term_sent;           /* the H2CTermReq was handed to the kernel whole */
    uint32_t fei;
    uint32_t field_offset;          /* in the PDU */
    uint32_t cid;                   /* of the command it happened on, or 0xffffffff */
    uint32_t opcode;                /* of the command that was over its time, or 0xffffffff */
    uint32_t is_admin;              /* that opcode is of the admin command set */
    uint64_t expected;
    uint64_t actual;
    uint64_t at_ns;
    char field[32];
    char operation[32];
    char text[192];                 /* protocol and digest faults: what was expected and what came */
};

struct kvdev_qpair;

int kvdev_qpair_create(const struct kvdev_qpair_params *params, struct kvdev_qpair **ret);

/* Connects and exchanges ICReq/ICResp within timeout_ns. address is numeric (IPv4 or IPv6, zone allowed).
 * 0, or the -errno of the fault: -ECONNREFUSED..., -ETIMEDOUT, -EPROTO (peer broke a rule),
 * -ENOPROTOOPT (required digest refused). After a failure only fault, info and destroy are of use. */
int kvdev_qpair_connect(struct kvdev_qpair *qp, const char *address, uint16_t port, uint64_t timeout_ns);
/* Before connect: let it go over TLS. The context is needed until connect returns. */
void kvdev_qpair_tls_set(struct kvdev_qpair *qp, struct kvdev_tls_context *context);
/* -ENOENT without TLS. */
int kvdev_qpair_tls_read(struct kvdev_qpair *qp, struct kvdev_tls_info *ret);

/* One synchronous command: the queue pair must not be in a queue or with the admin thread. sqe is the
 * 64-byte command; CID, PSDT and SGL1 are filled in here. data[0..len) belongs to the call;
 * direction is an enum kvdev_pdu_direction.
 * 0 with cqe set (its status may be an error), -ETIMEDOUT (the queue pair is then dead), -ENOTCONN, or
 * another -errno of the fault. */
int kvdev_qpair_execute(struct kvdev_qpair *qp, const uint8_t *sqe, void *data, uint32_t len, uint32_t direction,
                        uint64_t timeout_ns, uint8_t *cqe);

/* Ends a connect or execute that another thread is inside, within KVDEV_QPAIR_CANCEL_MS, and each one after; the
 * queue pair dies with -ECANCELED. */
void kvdev_qpair_cancel(struct kvdev_qpair *qp);

void kvdev_qpair_info_read(const struct kvdev_qpair *qp, struct kvdev_qpair_info *ret);
/* kind is KVDEV_FAULT_NONE while the queue pair is well. */
void kvdev_qpair_fault_read(const struct kvdev_qpair *qp, struct kvdev_qpair_fault *ret);
/* After Identify: in-capsule limit of I/O commands. */
void kvdev_qpair_in_capsule_set(struct kvdev_qpair *qp, uint32_t size_bytes);
/* An I/O queue pair of admin's association: losing the admin connection loses it too (Base 3.3.2.4). admin's memory
 * and socket stay until qp is destroyed. Once, before qp is given to a queue. */
int kvdev_qpair_join(struct kvdev_qpair *qp, struct kvdev_qpair *admin);

/* Closes the socket. With commands outstanding the connection is reset, so that no byte of a write
 * that was given up still leaves this host; idle, it is closed in order. */
void kvdev_qpair_close(struct kvdev_qpair *qp);
/* Closes and frees; waits at most 100 ms for a controller that was sent an H2CTermReq. A queue or admin thread that
 * still drives it keeps it until it lets go. NULL is allowed. */
void kvdev_qpair_destroy(struct kvdev_qpair *qp);
/* cdef end */

/* What a poller uses. */

/* One more holder; kvdev_qpair_destroy drops one, the last closes and frees. */
void kvdev_qpair_hold(struct kvdev_qpair *qp);

/* A command ended. error 0: cqe is the controller's (or the one SUCCESS stands for), any status;
 * error -EIO: cqe status was replaced by ours (data digest, short transfer); other -errno: the queue pair
 * died, send_ns 0 tells a command that never left this host. The callback may start commands. */
typedef void kvdev_qpair_done_fn(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns,
                                 uint64_t now_ns);

/* When the last command was sent that this association has completed, on any of its queue pairs; of the admin one. */
uint64_t kvdev_qpair_traffic_ns(const struct kvdev_qpair *qp);

/* Sets who hears of completions; NULL drops them. */
void kvdev_qpair_owner_set(struct kvdev_qpair *qp, kvdev_qpair_done_fn *done, void *owner);

/* Takes a command: 0, -EAGAIN (no slot), -ENOTCONN (dead). It leaves with the next progress.
 * deadline_ns 0 means none. The inline form sends up to 16 bytes that it copies: one DSM range. */
int kvdev_qpair_start(struct kvdev_qpair *qp, const uint8_t *sqe, void *data, uint32_t len, uint32_t direction,
                      uint64_t cookie, uint64_t deadline_ns);
int kvdev_qpair_start_inline(struct kvdev_qpair *qp, const uint8_t *sqe, const uint8_t *data, uint32_t len,
                             uint64_t cookie, uint64_t deadline_ns);

/* Sends what is queued; 1 if anything moved, 0 if not; deaths show in the state. */
int kvdev_qpair_send(struct kvdev_qpair *qp, uint64_t now_ns);
/* Receives up to a bounded amount and completes commands; 1 if anything moved. */
int kvdev_qpair_receive(struct kvdev_qpair *qp);
/* Kills the queue pair when a command is over its deadline. Returns the next deadline, UINT64_MAX if none. */
uint64_t kvdev_qpair_deadlines(struct kvdev_qpair *qp, uint64_t now_ns);
/* Records the fault (unless there is one) and completes everything outstanding. */
/* Kills a ready queue pair whose association is lost. The admin queue pair may belong to another thread. */
void kvdev_qpair_association_check(struct kvdev_qpair *qp);
void kvdev_qpair_kill(struct kvdev_qpair *qp, uint32_t kind, int error, const char *operation);

int kvdev_qpair_is_ready(const struct kvdev_qpair *qp);
uint32_t kvdev_qpair_room(const struct kvdev_qpair *qp);
uint32_t kvdev_qpair_in_flight_bytes(const struct kvdev_qpair *qp);
uint32_t kvdev_qpair_outstanding(const struct kvdev_qpair *qp);
int kvdev_qpair_has_unsent(const struct kvdev_qpair *qp);
/* Socket to wait on, -1 when closed; events is what to wait for (POLLIN, POLLOUT). */
int kvdev_qpair_wait_fd(const struct kvdev_qpair *qp, short *events);

#endif

#include "qpair_int.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.h"

#define QUEUE_SIZE_MAX 4096u          /* a CID is 12 bits of slot under 4 bits of generation */
#define RX_RING_IO_BYTES (128u << 10) /* headers and small payloads of many PDUs in one read */
#define RX_RING_ADMIN_BYTES (16u << 10)
#define RX_TAIL_BYTES 512u            /* read behind a large payload: the next headers, hardly any payload to copy */
#define RX_LARGE_BYTES 32768u         /* payload PDUs from this size on are received without the ring */
#define RX_BUDGET_BYTES (512u << 10)  /* one receive call, so that queue pairs take turns */
#define H2C_ITEMS_MAX 16u             /* H2CData PDUs queued at once: capsules wait behind no more */
#define H2C_PDU_BYTES_MAX (256u << 10) /* our own limit of one H2CData, below any MAXH2CDATA worth having */
#define IOV_COUNT_MAX 96u
#define LAST_READS_MAX 32             /* a socket buffer's worth after the peer has closed */
#define TERM_WAIT_NS 100000000ull     /* destroy waits so long for the peer to read our H2CTermReq and close */
#define DRAIN_NS 30000000000ull       /* TCP 3.5: the controller closes within 30 s */
#define CID_NONE 0xffffffffu
#define OPCODE_NONE 0xffffffffu
#define OPC_FABRICS 0x7f
#define FCTYPE_AUTHENTICATION_RECEIVE 0x06
#define STATUS_TRANSFER_ERROR 0x04    /* 00/04h Data Transfer Error */
#define STATUS_TRANSIENT 0x22         /* 00/22h Transient Transport Error */

static uint32_t power_of_two_at_least(uint32_t n)
{
    uint32_t p = 1;
    while (p < n)
        p <<= 1;
    return p;
}


/* ---- life ---- */

int kvdev_qpair_create(const struct kvdev_qpair_params *params, struct kvdev_qpair **ret)
{
    *ret = NULL;
    if (params->queue_size < 2 || params->queue_size > QUEUE_SIZE_MAX || params->hpda > 31 ||
        params->maxr2t_0based > 15 || params->header_digest > KVDEV_DIGEST_REQUIRE ||
        params->data_digest > KVDEV_DIGEST_REQUIRE)
        return -EINVAL;
    struct kvdev_qpair *qp = calloc(1, sizeof *qp);
    if (!qp)
        return -ENOMEM;
    qp->params = *params;
    qp->fd = -1;
    qp->slot_count = params->queue_size - 1u; /* Base 3.3.2: one SQ entry stays empty */
    qp->ring_size = params->qid ? RX_RING_IO_BYTES : RX_RING_ADMIN_BYTES;
    qp->deadline_min_ns = UINT64_MAX;
    qp->rx_slot = SLOT_NONE;
    atomic_init(&qp->holders, 1);
    qp->pid = getpid();
    atomic_init(&qp->is_dead, 0);
    atomic_init(&qp->is_cancelled, 0);
    atomic_init(&qp->traffic_ns, 0);
    uint32_t tx_size = power_of_two_at_least(qp->slot_count + H2C_ITEMS_MAX + 1u);
    uint32_t r2t_size = power_of_two_at_least(qp->slot_count * (params->maxr2t_0based + 1u));
    qp->tx_mask = tx_size - 1u;
    qp->r2t_mask = r2t_size - 1u;
    qp->requests = calloc(qp->slot_count, sizeof *qp->requests);
    qp->free_ring = calloc(qp->slot_count, sizeof *qp->free_ring);
    qp->tx = calloc(tx_size, sizeof *qp->tx);
    qp->r2ts = calloc(r2t_size, sizeof *qp->r2ts);
    qp->ring = malloc(qp->ring_size);
    if (!qp->requests || !qp->free_ring || !qp->tx || !qp->r2ts || !qp->ring) {
        kvdev_qpair_destroy(qp);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < qp->slot_count; i++)
        qp->free_ring[i] = (uint16_t)i;
    qp->free_count = qp->slot_count;
    *ret = qp;
    return 0;
}

void kvdev_qpair_hold(struct kvdev_qpair *qp)
{
    atomic_fetch_add(&qp->holders, 1);
}

static void socket_close(struct kvdev_qpair *qp, int is_reset)
{
    if (qp->fd < 0)
        return;
    /* In a fork the socket is still the parent's: only the descriptor goes. */
    if (is_reset && getpid() == qp->pid) {
        struct linger hard = { .l_onoff = 1, .l_linger = 0 };
        setsockopt(qp->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }
    close(qp->fd);
    qp->fd = -1;
    qp->is_draining = 0;
}

/* Reads and forgets what the peer still sends, so that closing does not reset away our H2CTermReq. */
static void drain(struct kvdev_qpair *qp, uint64_t now)
{
    for (int i = 0; i < 16 && qp->is_draining; i++) {
        ssize_t n = recv(qp->fd, qp->ring, qp->ring_size, MSG_DONTWAIT);
        if (n > 0)
            continue;
        if (n == 0 || (errno != EAGAIN && errno != EINTR) || now >= qp->drain_deadline_ns)
            socket_close(qp, 0);
        return;
    }
}

void kvdev_qpair_destroy(struct kvdev_qpair *qp)
{
    if (!qp || atomic_fetch_sub(&qp->holders, 1) != 1)
        return;
    qp->done = NULL;
    if (qp->is_draining) {
        uint64_t deadline = add_ns(now_ns(), TERM_WAIT_NS);
        while (qp->is_draining && qpair_wait(qp, POLLIN, deadline) && now_ns() < deadline)
            drain(qp, 0);
    }
    kvdev_qpair_close(qp);
    kvdev_qpair_destroy(qp->admin);
    kvdev_tls_link_put(qp->tls);
    free(qp->requests);
    free(qp->free_ring);
    free(qp->tx);
    free(qp->r2ts);
    free(qp->ring);
    free(qp);
}

void kvdev_qpair_owner_set(struct kvdev_qpair *qp, kvdev_qpair_done_fn *done, void *owner)
{
    qp->done = done;
    qp->owner = owner;
}

int kvdev_qpair_join(struct kvdev_qpair *qp, struct kvdev_qpair *admin)
{
    if (qp->admin || !qp->params.qid || admin->params.qid)
        return -EINVAL;
    atomic_fetch_add(&admin->holders, 1);
    qp->admin = admin;
    return 0;
}

void kvdev_qpair_in_capsule_set(struct kvdev_qpair *qp, uint32_t size_bytes)
{
    qp->params.in_capsule_size_bytes = size_bytes;
}

/* ---- completion ---- */

static void slot_free(struct kvdev_qpair *qp, uint32_t slot)
{
    uint32_t tail = qp->free_head + qp->free_count;
    if (tail >= qp->slot_count)
        tail -= qp->slot_count;
    qp->free_ring[tail] = (uint16_t)slot;
    qp->free_count++;
}

static void request_finish(struct kvdev_qpair *qp, uint32_t slot, int error)
{
    struct request *req = &qp->requests[slot];
    uint64_t cookie = req->cookie;
    uint64_t send_ns = req->state == REQUEST_QUEUED ? 0 : req->send_ns;
    uint8_t cqe[KVDEV_CQE_BYTES];
    memcpy(cqe, req->cqe, sizeof cqe);
    qp->outstanding--;
    qp->in_flight_bytes -= req->cmd.length;
    req->state = REQUEST_FREE;
    req->data = NULL;
    slot_free(qp, slot);
    if (qp->done)
        qp->done(qp->owner, cookie, error, cqe, send_ns, now_ns());
}

/* Forgets R2Ts of a command that ended before they were served (TCP 3.3.2.2). */
static void r2ts_drop(struct kvdev_qpair *qp, uint32_t slot)
{
    uint32_t kept = qp->r2t_head;
    for (uint32_t i = qp->r2t_head; i != qp->r2t_tail; i++) {
        struct r2t entry = qp->r2ts[i & qp->r2t_mask];
        if (entry.slot != slot)
            qp->r2ts[kept++ & qp->r2t_mask] = entry;
    }
    qp->r2t_tail = kept;
}

/* Empties queued PDUs of a command that has ended; one that is half sent must go on to its end. */
static void tx_items_drop(struct kvdev_qpair *qp, uint32_t slot)
{
    for (uint32_t i = qp->tx_head; i != qp->tx_tail; i++) {
        struct tx_item *item = &qp->tx[i & qp->tx_mask];
        if (item->slot != slot || item->sent)
            continue;
        item->head_len = item->payload_len = item->ddgst_len = 0;
        item->slot = SLOT_NONE;
        qp->requests[slot].tx_items--;
    }
}

/* The controller has completed the command: cqe is checked against what really moved. */
static void request_complete(struct kvdev_qpair *qp, uint32_t slot, const uint8_t *wire_cqe)
{
    struct request *req = &qp->requests[slot];
    int error = 0;
    uint16_t status_p = kvdev_load_le16(wire_cqe + 14);
    memcpy(req->cqe, wire_cqe, sizeof req->cqe);
    atomic_store_explicit(qp->admin ? &qp->admin->traffic_ns : &qp->traffic_ns, req->send_ns, memory_order_relaxed);
    if ((status_p >> 1 & 0x7ff) == 0) {
        int has_moved_all = req->cmd.direction == KVDEV_DIR_C2H ? kvdev_pdu_cmd_is_complete(&req->cmd)
                            : req->cmd.direction == KVDEV_DIR_H2C
                                ? req->cmd.requested == req->cmd.length && !req->cmd.r2t_count && !req->tx_items
                                : 1;
        if (req->has_ddgst_error) {
            /* TCP 3.5: the data is not what was sent, whatever the controller says; the connection is sound. */
            kvdev_store_le16(req->cqe + 14, STATUS_TRANSIENT << 1);
            qp->counters.ddgst_errors++;
            error = -EIO;
        } else if (!has_moved_all && !req->may_be_short) {
            kvdev_store_le16(req->cqe + 14, STATUS_TRANSFER_ERROR << 1);
            qp->counters.short_transfers++;
            error = -EIO;
        }
    }
    if (req->cmd.r2t_count)
        r2ts_drop(qp, slot);
    if (req->tx_items)
        tx_items_drop(qp, slot);
    if (req->tx_items) {
        req->state = REQUEST_HELD;
        req->held_error = error;
        return;
    }
    request_finish(qp, slot, error);
}

/* ---- death ---- */

static void name_copy(char *dst, size_t size, const char *src)
{
    snprintf(dst, size, "%s", src ? src : "");
}

static void term_send(struct kvdev_qpair *qp, const struct kvdev_pdu_fault *fault)
{
    uint8_t term[KVDEV_PDU_BUILD_MAX];
    size_t len = kvdev_pdu_build_term(term, &qp->rx, fault);
    /* Inside a half-sent PDU a Term PDU would be taken for its data: then only the reset speaks. */
    if (!len || qp->fd < 0 || (qp->tx_head != qp->tx_tail && qp->tx[qp->tx_head & qp->tx_mask].sent))
        return;
    ssize_t n = send(qp->fd, term, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n != (ssize_t)len)
        return;
    qp->fault.is_term_sent = 1;
    shutdown(qp->fd, SHUT_WR);
    qp->is_draining = 1;
    qp->drain_deadline_ns = add_ns(qp->fault.at_ns, DRAIN_NS);
}

static void die(struct kvdev_qpair *qp, const struct kvdev_pdu_fault *fault)
{
    uint64_t now = qp->fault.at_ns;
    qp->state = KVDEV_QPAIR_DEAD;
    atomic_store(&qp->is_dead, 1);
    qp->ring_pos = qp->ring_len = 0;
    if (fault)
        term_send(qp, fault);
    if (!qp->is_draining)
        socket_close(qp, qp->outstanding != 0);
    qp->tx_head = qp->tx_tail;
    qp->r2t_head = qp->r2t_tail;
    qp->h2c_items = 0;
    for (uint32_t slot = 0; slot < qp->slot_count; slot++) {
        struct request *req = &qp->requests[slot];
        if (req->state == REQUEST_FREE)
            continue;
        if (req->state == REQUEST_HELD) {
            request_finish(qp, slot, req->held_error);
            continue;
        }
        int is_overdue = qp->fault.kind == KVDEV_FAULT_TIMEOUT && req->deadline_ns <= now;
        memset(req->cqe, 0, sizeof req->cqe);
        request_finish(qp, slot, is_overdue ? -ETIMEDOUT : -ENOTCONN);
    }
}

static void fault_begin(struct kvdev_qpair *qp, uint32_t kind, int error, const char *operation)
{
    memset(&qp->fault, 0, sizeof qp->fault);
    qp->fault.kind = kind;
    qp->fault.error = error;
    qp->fault.cid = CID_NONE;
    qp->fault.opcode = OPCODE_NONE;
    qp->fault.at_ns = now_ns();
    name_copy(qp->fault.operation, sizeof qp->fault.operation, operation);
}

void kvdev_qpair_kill(struct kvdev_qpair *qp, uint32_t kind, int error, const char *operation)
{
    if (qp->state == KVDEV_QPAIR_DEAD)
        return;
    fault_begin(qp, kind, error, operation);
    die(qp, NULL);
}

void qpair_kill_fault(struct kvdev_qpair *qp, const struct kvdev_pdu_fault *fault, uint32_t kind, int error,
                       const char *field)
{
    if (qp->state == KVDEV_QPAIR_DEAD)
        return;
    fault_begin(qp, kind, error, qp->is_ic_done ? "receive" : "ICResp");
    qp->fault.fes = fault->fes;
    qp->fault.fei = fault->fei;
    qp->fault.pdu_type = fault->pdu_type;
    qp->fault.field_offset = fault->field_offset;
    qp->fault.expected = fault->expected;
    qp->fault.actual = fault->actual;
    if (qp->rx.pdu.type == fault->pdu_type && qp->is_ic_done)
        qp->fault.cid = qp->rx.pdu.cccid;
    name_copy(qp->fault.field, sizeof qp->fault.field, field);
    kvdev_pdu_fault_text(fault, qp->fault.text, sizeof qp->fault.text);
    die(qp, fault);
}

static void kill_protocol(struct kvdev_qpair *qp, const struct kvdev_pdu_fault *fault)
{
    qpair_kill_fault(qp, fault, fault->fes == KVDEV_FES_HDGST ? KVDEV_FAULT_DIGEST : KVDEV_FAULT_PROTOCOL, -EPROTO,
               kvdev_pdu_rule_field(fault->rule));
}

void kvdev_qpair_close(struct kvdev_qpair *qp)
{
    if (qp->state != KVDEV_QPAIR_DEAD)
        kvdev_qpair_kill(qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "close");
    socket_close(qp, 0);
}

/* ---- starting a command ---- */

static int start(struct kvdev_qpair *qp, const uint8_t *sqe, void *data, const uint8_t *inline_data, uint32_t len,
                 uint32_t direction, uint64_t cookie, uint64_t deadline_ns)
{
    if (qp->state != KVDEV_QPAIR_READY)
        return -ENOTCONN;
    if ((direction == KVDEV_DIR_NONE) != (len == 0) || len & 3 || direction > KVDEV_DIR_H2C)
        return -EINVAL;
    if (!qp->free_count)
        return -EAGAIN;
    uint32_t slot = qp->free_ring[qp->free_head];
    qp->free_head = qp->free_head + 1 == qp->slot_count ? 0 : qp->free_head + 1;
    qp->free_count--;

    struct request *req = &qp->requests[slot];
    memset(&req->cmd, 0, sizeof req->cmd);
    if (inline_data) {
        memcpy(req->inline_data, inline_data, len);
        data = req->inline_data;
    }
    req->generation = (uint8_t)((req->generation + 1) & 0xf);
    req->cid = (uint16_t)((uint32_t)req->generation << 12 | slot);
    req->cmd.length = len;
    req->cmd.direction = (uint8_t)direction;
    req->data = data;
    req->cookie = cookie;
    req->deadline_ns = deadline_ns ? deadline_ns : UINT64_MAX;
    req->send_ns = 0;
    req->opcode = sqe[0];
    /* Base 2.1, 6.1: AL is room for a message whose length is in the message itself. */
    req->may_be_short = sqe[0] == OPC_FABRICS && sqe[4] == FCTYPE_AUTHENTICATION_RECEIVE;
    req->has_ddgst_error = 0;
    req->tx_items = 1;
    req->state = REQUEST_QUEUED;

    int is_admin = !qp->params.qid || sqe[0] == OPC_FABRICS;
    uint32_t in_capsule_max = is_admin ? KVDEV_PDU_IN_CAPSULE_ADMIN : qp->params.in_capsule_size_bytes;
    int is_in_capsule = direction == KVDEV_DIR_H2C && len <= in_capsule_max;
    uint8_t out[KVDEV_SQE_BYTES];
    memcpy(out, sqe, sizeof out);
    out[1] = (uint8_t)((sqe[1] & 0x3f) | KVDEV_SQE_PSDT_SGL);
    kvdev_store_le16(out + 2, req->cid);
    memset(out + 24, 0, 16);
    kvdev_store_le32(out + 32, len);
    out[39] = is_in_capsule ? KVDEV_SGL_IN_CAPSULE : KVDEV_SGL_TRANSPORT;

    struct tx_item *item = &qp->tx[qp->tx_tail++ & qp->tx_mask];
    item->head_len =
        (uint32_t)kvdev_pdu_build_capsule_cmd(item->head, &qp->rx.link, out, is_in_capsule ? len : 0);
    item->slot = slot;
    item->sent = 0;
    item->is_capsule = 1;
    item->ends_r2t = 0;
    item->payload = is_in_capsule ? data : NULL;
    item->payload_len = is_in_capsule ? len : 0;
    item->ddgst_len = 0;
    if (is_in_capsule) {
        req->cmd.requested = len;
        if (qp->rx.link.ddgst) {
            kvdev_pdu_build_ddgst(item->ddgst, kvdev_crc32c(0, data, len));
            item->ddgst_len = KVDEV_PDU_DIGEST_BYTES;
        }
    }
    qp->outstanding++;
    qp->in_flight_bytes += len;
    qp->counters.commands++;
    if (req->deadline_ns < qp->deadline_min_ns)
        qp->deadline_min_ns = req->deadline_ns;
    return 0;
}

int kvdev_qpair_start(struct kvdev_qpair *qp, const uint8_t *sqe, void *data, uint32_t len, uint32_t direction,
                      uint64_t cookie, uint64_t deadline_ns)
{
    return start(qp, sqe, data, NULL, len, direction, cookie, deadline_ns);
}

int kvdev_qpair_start_inline(struct kvdev_qpair *qp, const uint8_t *sqe, const uint8_t *data, uint32_t len,
                             uint64_t cookie, uint64_t deadline_ns)
{
    if (len > sizeof qp->requests[0].inline_data)
        return -EINVAL;
    return start(qp, sqe, NULL, data, len, KVDEV_DIR_H2C, cookie, deadline_ns);
}

/* ---- sending ---- */

/* Turns granted R2Ts into H2CData PDUs while there is room, in the order the R2Ts came. */
static void h2c_fill(struct kvdev_qpair *qp)
{
    while (qp->r2t_head != qp->r2t_tail && qp->h2c_items < H2C_ITEMS_MAX) {
        struct r2t *r2t = &qp->r2ts[qp->r2t_head & qp->r2t_mask];
        struct request *req = &qp->requests[r2t->slot];
        uint32_t left = r2t->length - r2t->done;
        uint32_t limit = qp->rx.link.maxh2cdata;
        /* With data digests an R2T is answered whole where MAXH2CDATA allows: Linux nvmet (seen with 6.1) checks
         * the digest of the last PDU against the whole command and drops the connection otherwise. */
        if (!qp->rx.link.ddgst && limit > H2C_PDU_BYTES_MAX)
            limit = H2C_PDU_BYTES_MAX;
        uint32_t len = left < limit ? left : limit;
        int is_last = len == left;
        uint32_t offset = r2t->offset + r2t->done;
        struct tx_item *item = &qp->tx[qp->tx_tail++ & qp->tx_mask];
        item->head_len = (uint32_t)kvdev_pdu_build_h2c_data(item->head, &qp->rx.link, req->cid, r2t->ttag, offset,
                                                            len, is_last);
        item->payload = req->data + offset;
        item->payload_len = len;
        item->ddgst_len = 0;
        if (qp->rx.link.ddgst) {
            kvdev_pdu_build_ddgst(item->ddgst, kvdev_crc32c(0, item->payload, len));
            item->ddgst_len = KVDEV_PDU_DIGEST_BYTES;
        }
        item->slot = r2t->slot;
        item->sent = 0;
        item->is_capsule = 0;
        item->ends_r2t = (uint8_t)is_last;
        req->tx_items++;
        qp->h2c_items++;
        r2t->done += len;
        if (is_last)
            qp->r2t_head++;
    }
}

static uint32_t item_size(const struct tx_item *item)
{
    return item->head_len + item->payload_len + item->ddgst_len;
}

/* Adds what is left of an item to the vector; returns the entries used. */
static uint32_t item_iov(const struct tx_item *item, struct iovec *iov)
{
    uint32_t n = 0;
    uint32_t skip = item->sent;
    const uint8_t *parts[3] = { item->head, item->payload, item->ddgst };
    const uint32_t lens[3] = { item->head_len, item->payload_len, item->ddgst_len };
    for (int i = 0; i < 3; i++) {
        if (skip >= lens[i]) {
            skip -= lens[i];
            continue;
        }
        iov[n].iov_base = (void *)(uintptr_t)(parts[i] + skip);
        iov[n].iov_len = lens[i] - skip;
        skip = 0;
        n++;
    }
    return n;
}

static void item_sent(struct kvdev_qpair *qp, struct tx_item *item)
{
    if (!item->is_capsule)
        qp->h2c_items--;
    if (item->slot == SLOT_NONE)
        return;
    struct request *req = &qp->requests[item->slot];
    req->tx_items--;
    if (item->ends_r2t && req->cmd.r2t_count)
        req->cmd.r2t_count--;
    if (req->state == REQUEST_HELD && !req->tx_items)
        request_finish(qp, item->slot, req->held_error);
}

static void tx_advance(struct kvdev_qpair *qp, size_t sent, uint64_t now)
{
    while (qp->tx_head != qp->tx_tail) {
        struct tx_item *item = &qp->tx[qp->tx_head & qp->tx_mask];
        uint32_t left = item_size(item) - item->sent;
        uint32_t part = sent < left ? (uint32_t)sent : left;
        item->sent += part;
        sent -= part;
        if (item->is_capsule && item->slot != SLOT_NONE && item->sent >= item->head_len) {
            struct request *req = &qp->requests[item->slot];
            if (req->state == REQUEST_QUEUED) {
                req->state = REQUEST_SENT;
                req->send_ns = now;
            }
        }
        if (part < left)
            return;
        qp->tx_head++;
        item_sent(qp, item);
    }
}

/* What the controller completed before it closed is still in the socket: those commands have a known fate. */
static void send_failed(struct kvdev_qpair *qp, int error)
{
    for (int i = 0; i < LAST_READS_MAX && qp->state == KVDEV_QPAIR_READY && qpair_receive(qp); i++)
        ;
    kvdev_qpair_kill(qp, KVDEV_FAULT_SOCKET, error, "send");
}

int kvdev_qpair_send(struct kvdev_qpair *qp, uint64_t now)
{
    int has_moved = 0;
    while (qp->state == KVDEV_QPAIR_READY) {
        h2c_fill(qp);
        if (qp->tx_head == qp->tx_tail) {
            qp->is_tx_blocked = 0;
            return has_moved;
        }
        struct iovec iov[IOV_COUNT_MAX];
        uint32_t n = 0;
        uint32_t i = qp->tx_head;
        for (; i != qp->tx_tail && n + 3 <= IOV_COUNT_MAX; i++)
            n += item_iov(&qp->tx[i & qp->tx_mask], iov + n);
        int has_more = i != qp->tx_tail || qp->r2t_head != qp->r2t_tail;
        struct msghdr msg = { .msg_iov = iov, .msg_iovlen = n };
        ssize_t sent = 0;
        if (n) {
            sent = sendmsg(qp->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL | (has_more ? MSG_MORE : 0));
            qp->counters.tx_calls++;
        }
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == ENOBUFS) {
                qp->is_tx_blocked = 1;
                return has_moved;
            }
            send_failed(qp, -errno);
            return 1;
        }
        qp->counters.tx_bytes += (uint64_t)sent;
        has_moved = 1;
        tx_advance(qp, (size_t)sent, now);
    }
    return has_moved;
}

/* ---- receiving ---- */

/* The slot of an outstanding command the controller knows; SLOT_NONE for any other CID. */
static uint32_t slot_of(const struct kvdev_qpair *qp, uint16_t cid)
{
    uint32_t slot = cid & 0xfffu;
    if (slot >= qp->slot_count || qp->requests[slot].state != REQUEST_SENT || qp->requests[slot].cid != cid)
        return SLOT_NONE;
    return slot;
}

static void on_capsule_resp(struct kvdev_qpair *qp)
{
    const uint8_t *cqe = qp->rx.head + 8;
    uint16_t cid = kvdev_load_le16(cqe + 12);
    uint32_t slot = slot_of(qp, cid);
    if (slot == SLOT_NONE) {
        struct kvdev_pdu_fault fault;
        kvdev_pdu_fault_set(&fault, KVDEV_RULE_RESP_CID, qp->rx.pdu.type, 0, cid);
        kvdev_pdu_rx_fail(&qp->rx, &fault);
        kill_protocol(qp, &fault);
        return;
    }
    uint16_t sqhd = kvdev_load_le16(cqe + 8);
    qp->sqhd = sqhd;
    request_complete(qp, slot, cqe);
}

static void on_c2h_data(struct kvdev_qpair *qp)
{
    struct kvdev_pdu_fault fault;
    uint32_t slot = slot_of(qp, qp->rx.pdu.cccid);
    struct kvdev_pdu_cmd *cmd = slot == SLOT_NONE ? NULL : &qp->requests[slot].cmd;
    if (kvdev_pdu_cmd_c2h(cmd, &qp->rx.pdu, &fault)) {
        kvdev_pdu_rx_fail(&qp->rx, &fault);
        kill_protocol(qp, &fault);
        return;
    }
    qp->rx_slot = slot;
    qp->payload_len_last = qp->rx.pdu.data_len;
    kvdev_pdu_rx_set_payload(&qp->rx, qp->requests[slot].data + qp->rx.pdu.datao);
}

static void on_r2t(struct kvdev_qpair *qp)
{
    struct kvdev_pdu_fault fault;
    uint32_t slot = slot_of(qp, qp->rx.pdu.cccid);
    struct kvdev_pdu_cmd *cmd = slot == SLOT_NONE ? NULL : &qp->requests[slot].cmd;
    if (kvdev_pdu_cmd_r2t(cmd, &qp->rx.pdu, qp->params.maxr2t_0based, &fault)) {
        kvdev_pdu_rx_fail(&qp->rx, &fault);
        kill_protocol(qp, &fault);
        return;
    }
    /* Room is certain: cmd_r2t keeps every command under MAXR2T + 1, and the ring holds that for each slot. */
    struct r2t *r2t = &qp->r2ts[qp->r2t_tail++ & qp->r2t_mask];
    r2t->slot = slot;
    r2t->ttag = qp->rx.pdu.ttag;
    r2t->offset = qp->rx.pdu.datao;
    r2t->length = qp->rx.pdu.datal;
    r2t->done = 0;
}

static void on_c2h_term(struct kvdev_qpair *qp)
{
    if (qp->state == KVDEV_QPAIR_DEAD)
        return;
    fault_begin(qp, KVDEV_FAULT_TERM, -ECONNRESET, qp->is_ic_done ? "receive" : "ICResp");
    qp->fault.fes = qp->rx.pdu.fes;
    qp->fault.fei = qp->rx.pdu.fei;
    qp->fault.pdu_type = qp->rx.pdu.type;
    die(qp, NULL);
}

static void on_data_done(struct kvdev_qpair *qp)
{
    uint32_t slot = qp->rx_slot;
    qp->rx_slot = SLOT_NONE;
    if (slot == SLOT_NONE)
        return;
    if (!qp->rx.ddgst_ok)
        qp->requests[slot].has_ddgst_error = 1;
    if (qp->rx.pdu.flags & KVDEV_PDU_FLAG_SUCCESS) {
        /* TCP 3.3.2.1: stands for a completion with DW0 and status 0 and no SQHD update. */
        uint8_t cqe[KVDEV_CQE_BYTES] = { 0 };
        kvdev_store_le16(cqe + 12, qp->requests[slot].cid);
        request_complete(qp, slot, cqe);
    }
}

static void on_header(struct kvdev_qpair *qp)
{
    switch (qp->rx.pdu.type) {
    case KVDEV_PDU_IC_RESP:
        qp->is_ic_done = 1;
        break;
    case KVDEV_PDU_CAPSULE_RESP:
        on_capsule_resp(qp);
        break;
    case KVDEV_PDU_C2H_DATA:
        on_c2h_data(qp);
        break;
    case KVDEV_PDU_R2T:
        on_r2t(qp);
        break;
    case KVDEV_PDU_C2H_TERM:
        on_c2h_term(qp);
        break;
    default: /* the machine lets no other type through to a host */
        break;
    }
}

static void on_event(struct kvdev_qpair *qp, int event)
{
    switch (event) {
    case KVDEV_PDU_HEADER:
        on_header(qp);
        break;
    case KVDEV_PDU_DATA_DONE:
        on_data_done(qp);
        break;
    case KVDEV_PDU_FAULT:
        kill_protocol(qp, &qp->rx.fault);
        break;
    default:
        break;
    }
}

static void parse_ring(struct kvdev_qpair *qp)
{
    while (qp->ring_pos < qp->ring_len) {
        size_t used = 0;
        int event = kvdev_pdu_rx_step(&qp->rx, qp->ring + qp->ring_pos, qp->ring_len - qp->ring_pos, &used);
        qp->ring_pos += (uint32_t)used;
        on_event(qp, event);
    }
    qp->ring_pos = qp->ring_len = 0;
}

/* One read: what is missing of the payload straight to its place, and what follows into the ring. */
static ssize_t read_once(struct kvdev_qpair *qp, size_t *asked)
{
    uint8_t *dst = NULL;
    size_t want = 0;
    struct iovec iov[2];
    int n = 0;
    kvdev_pdu_rx_payload_want(&qp->rx, &dst, &want);
    if (want) {
        iov[n].iov_base = dst;
        iov[n].iov_len = want;
        n++;
    }
    iov[n].iov_base = qp->ring;
    /* What follows is likely like what came before: of a large payload only the header may land in the ring,
     * or it would have to be copied; small ones are cheaper to copy than to ask for one by one. */
    iov[n].iov_len = qp->payload_len_last >= RX_LARGE_BYTES ? RX_TAIL_BYTES : qp->ring_size;
    *asked = want + iov[n].iov_len;
    n++;
    ssize_t got = readv(qp->fd, iov, n);
    qp->counters.rx_calls++;
    if (got <= 0)
        return got;
    qp->counters.rx_bytes += (uint64_t)got;
    size_t landed = (size_t)got < want ? (size_t)got : want;
    qp->ring_len = (uint32_t)((size_t)got - landed);
    if (landed)
        on_event(qp, kvdev_pdu_rx_payload_landed(&qp->rx, landed));
    return got;
}

int qpair_receive(struct kvdev_qpair *qp)
{
    size_t total = 0;
    while (qp->fd >= 0 && !qp->is_draining && total < RX_BUDGET_BYTES) {
        size_t asked = 0;
        ssize_t got = read_once(qp, &asked);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN) {
                qp->counters.rx_empty_calls++;
                break;
            }
            kvdev_qpair_kill(qp, KVDEV_FAULT_SOCKET, -errno, qp->is_ic_done ? "receive" : "ICResp");
            return 1;
        }
        if (got == 0) {
            kvdev_qpair_kill(qp, KVDEV_FAULT_CLOSED, -ECONNRESET, qp->is_ic_done ? "receive" : "ICResp");
            return 1;
        }
        total += (size_t)got;
        parse_ring(qp);
        /* A short read emptied the socket: asking again would only cost a call. */
        if ((size_t)got < asked)
            break;
    }
    return total != 0;
}

int kvdev_qpair_receive(struct kvdev_qpair *qp)
{
    if (qp->is_draining)
        drain(qp, now_ns());
    return qp->state == KVDEV_QPAIR_READY ? qpair_receive(qp) : 0;
}

uint64_t kvdev_qpair_deadlines(struct kvdev_qpair *qp, uint64_t now)
{
    if (now < qp->deadline_min_ns)
        return qp->deadline_min_ns;
    uint64_t next = UINT64_MAX;
    for (uint32_t slot = 0; slot < qp->slot_count; slot++) {
        const struct request *req = &qp->requests[slot];
        if (req->state == REQUEST_FREE)
            continue;
        if (req->deadline_ns <= now) {
            uint16_t cid = req->cid;
            uint8_t opcode = req->opcode;
            kvdev_qpair_kill(qp, KVDEV_FAULT_TIMEOUT, -ETIMEDOUT, "command");
            qp->fault.cid = cid;
            qp->fault.opcode = opcode;
            qp->fault.is_admin = !qp->params.qid;
            qp->deadline_min_ns = UINT64_MAX;
            return UINT64_MAX;
        }
        if (req->deadline_ns < next)
            next = req->deadline_ns;
    }
    qp->deadline_min_ns = next;
    return next;
}

void kvdev_qpair_association_check(struct kvdev_qpair *qp)
{
    qpair_association_check(qp);
}

/* ---- reading state ---- */

uint64_t kvdev_qpair_traffic_ns(const struct kvdev_qpair *qp)
{
    return atomic_load_explicit(&qp->traffic_ns, memory_order_relaxed);
}

void kvdev_qpair_info_read(const struct kvdev_qpair *qp, struct kvdev_qpair_info *ret)
{
    *ret = qp->counters;
    ret->state = qp->state;
    ret->maxh2cdata = qp->rx.link.maxh2cdata;
    ret->outstanding_count = qp->outstanding;
    ret->in_flight_bytes = qp->in_flight_bytes;
    ret->qid = qp->params.qid;
    ret->queue_size = qp->params.queue_size;
    ret->cpda = qp->rx.link.send_pda;
    ret->hdgst = qp->is_ic_done && qp->rx.link.hdgst;
    ret->ddgst = qp->is_ic_done && qp->rx.link.ddgst;
    ret->sqhd = qp->sqhd;
}

void kvdev_qpair_fault_read(const struct kvdev_qpair *qp, struct kvdev_qpair_fault *ret)
{
    *ret = qp->fault;
}

int kvdev_qpair_is_ready(const struct kvdev_qpair *qp)
{
    return qpair_is_ready(qp);
}

uint32_t kvdev_qpair_room(const struct kvdev_qpair *qp)
{
    return qpair_room(qp);
}

uint32_t kvdev_qpair_in_flight_bytes(const struct kvdev_qpair *qp)
{
    return qp->in_flight_bytes;
}

uint32_t kvdev_qpair_outstanding(const struct kvdev_qpair *qp)
{
    return qp->outstanding;
}

int kvdev_qpair_has_unsent(const struct kvdev_qpair *qp)
{
    return qpair_has_unsent(qp);
}

int kvdev_qpair_wait_fd(const struct kvdev_qpair *qp, short *events)
{
    if (qp->fd < 0)
        return -1;
    *events = POLLIN;
    if (qp->state == KVDEV_QPAIR_READY && qpair_has_unsent(qp))
        *events |= POLLOUT;
    return qp->fd;
}

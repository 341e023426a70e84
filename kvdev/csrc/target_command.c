/* Commands of the target: from a capsule to the operation on a device and to the response's segments. */
#include <errno.h>
#include <string.h>

#include "crc32c.h"
#include "target_int.h"

#define OPC_ADMIN_ASYNC_EVENT_REQUEST 0x0c
#define FCTYPE_CONNECT 0x01
#define FCTYPE_AUTHENTICATION_SEND 0x05
#define FCTYPE_AUTHENTICATION_RECEIVE 0x06
#define DSM_ATTRIBUTE_DEALLOCATE (1u << 2)
#define DSM_RANGE_BYTES 16u

static int is_authentication(const struct kvdev_sqe *sqe)
{
    uint8_t fctype = (uint8_t)sqe->nsid;
    return sqe->opc == OPC_FABRICS &&
           (fctype == FCTYPE_AUTHENTICATION_SEND || fctype == FCTYPE_AUTHENTICATION_RECEIVE);
}

static int cid_mark(struct connection *connection, uint16_t cid)
{
    uint8_t bit = (uint8_t)(1u << (cid & 7));
    if (connection->cid_outstanding[cid >> 3] & bit)
        return 0;
    connection->cid_outstanding[cid >> 3] |= bit;
    return 1;
}

/* SPDK's host, when it detaches, forgets its Asynchronous Event Requests and uses their CIDs for the commands
 * that shut the controller down. The strict answer, Command ID Conflict, would keep it from an orderly
 * shutdown; so on the Admin queue a held event request gives way to the command that takes its CID. */
static int event_request_gives_way(struct connection *connection, uint16_t cid)
{
    if (connection->state != CONNECTION_LIVE || connection->qid != 0)
        return 0;
    for (uint16_t i = 0; i < connection->request_count; i++) {
        struct request *request = &connection->requests[i];
        if (request->state == REQUEST_CONTROL && request->has_cid && request->sqe.cid == cid &&
            request->sqe.opc == OPC_ADMIN_ASYNC_EVENT_REQUEST) {
            request->is_abandoned = 1;
            request->has_cid = 0; /* the mark goes over to the new command */
            return 1;
        }
    }
    return 0;
}

static void buffer_return(struct request *request)
{
    struct poller *poller = request->connection->poller;
    if (!request->buffer)
        return;
    poller->buffers[poller->buffer_count++] = request->buffer;
    request->buffer = NULL;
}

/* The request is over, its response sent or its connection gone: nothing of it is touched after. */
void command_release(struct request *request)
{
    struct connection *connection = request->connection;
    if (request->state == REQUEST_FREE)
        return;
    if (request->state == REQUEST_R2T_SENT)
        connection->r2t_open--;
    if (request->has_cid)
        connection->cid_outstanding[request->sqe.cid >> 3] &= (uint8_t) ~(1u << (request->sqe.cid & 7));
    if (request->fuse)
        fused_forget(request);
    if (request->ns) {
        target_namespace_put(connection->target, request->ns);
        request->ns = NULL;
    }
    buffer_return(request);
    if (connection->rx_request == request)
        connection->rx_request = NULL;
    request->state = REQUEST_FREE;
    connection->outstanding--;
    list_push_front(&connection->free, request); /* last in, first out: its staging memory is warm */
}

/* ---- responses ---- */

static size_t response_build(struct request *request, uint8_t *at)
{
    struct connection *connection = request->connection;
    uint8_t wire[KVDEV_CQE_BYTES];
    struct kvdev_cqe cqe = {
        .dw0 = request->dw0,
        .dw1 = request->dw1,
        .sqhd = connection->sq_flow_control_off ? 0 : connection->sq_head,
        .sqid = 0,
        .cid = request->sqe.cid,
        .status_p = (uint16_t)(request->status << 1),
    };
    if (request->is_control && request->completion.action == KVDEV_TARGET_ACTION_BIND &&
        request->completion.sq_flow_control_off)
        cqe.sqhd = 0xffff; /* Base 2.2, 6.3: how a controller agrees to go without SQ flow control */
    kvdev_cqe_store(&cqe, wire);
    return kvdev_pdu_build_capsule_resp(at, &connection->rx.link, wire);
}

/* Queue the response: data to the host first where there is some and the status is success. */
void command_respond(struct request *request)
{
    struct connection *connection = request->connection;
    const struct kvdev_pdu_link *link = &connection->rx.link;
    size_t at = 0;
    int has_data = request->is_read_response && request->status == ST_SUCCESS && request->data_len > 0;
    request->segment_index = 0;
    request->segment_count = 0;
    if (has_data) {
        int is_success_in_data = connection->sq_flow_control_off && connection->transport.c2h_success &&
                                 request->dw0 == 0 && request->dw1 == 0;
        uint8_t flags = KVDEV_PDU_FLAG_LAST;
        if (is_success_in_data)
            flags |= KVDEV_PDU_FLAG_SUCCESS;
        at = kvdev_pdu_build_c2h_data(request->head, link, request->sqe.cid, 0, request->data_len, flags);
        request->segments[0] = (struct segment){ request->head, at };
        request->segments[1] = (struct segment){ request->data, request->data_len };
        size_t tail = at;
        if (link->ddgst) {
            kvdev_pdu_build_ddgst(request->head + at, kvdev_crc32c(0, request->data, request->data_len));
            at += KVDEV_PDU_DIGEST_BYTES;
        }
        if (!is_success_in_data)
            at += response_build(request, request->head + at);
        request->segments[2] = (struct segment){ request->head + tail, at - tail };
        request->segment_count = 3;
    } else {
        at = response_build(request, request->head);
        request->segments[0] = (struct segment){ request->head, at };
        request->segment_count = 1;
    }
    request->state = REQUEST_SENDING;
    list_push(&connection->tx, request);
    connection_mark_dirty(connection);
}

void command_fail(struct request *request, uint16_t status)
{
    request->status = status;
    command_respond(request);
}

static void request_r2t(struct request *request)
{
    struct connection *connection = request->connection;
    size_t len = kvdev_pdu_build_r2t(request->head, &connection->rx.link, request->sqe.cid,
                                     (uint16_t)(request->index + 1), 0, request->data_len);
    request->r2t = (struct kvdev_pdu_r2t){
        .offset = 0, .length = request->data_len, .received = 0, .cccid = request->sqe.cid, .active = 0
    };
    request->segments[0] = (struct segment){ request->head, len };
    request->segment_index = 0;
    request->segment_count = 1;
    request->state = REQUEST_R2T_QUEUED;
    list_push(&connection->tx, request);
    connection_mark_dirty(connection);
}

void command_r2t_sent(struct request *request)
{
    request->state = REQUEST_R2T_SENT;
    request->r2t.active = 1;
    request->connection->r2t_open++;
}

/* ---- operations ---- */

uint16_t command_status_of(int error, int op)
{
    switch (error) {
    case 0:
        return ST_SUCCESS;
    case -EILSEQ:
        return ST_COMPARE_FAILURE;
    case -EROFS:
        return ST_WRITE_PROTECTED;
    case -ENOSPC:
    case -EDQUOT:
        return ST_CAPACITY_EXCEEDED;
    case -EINVAL:
        return ST_INVALID_FIELD;
    case -EIO:
        return op == KVDEV_BDEV_OP_READ || op == KVDEV_BDEV_OP_COMPARE || op == KVDEV_BDEV_OP_VERIFY ? ST_READ_ERROR
                                                                                                     : ST_WRITE_FAULT;
    default:
        /* An injected NVMe status goes to the host as it is. */
        return -error & KVDEV_BDEV_NVME_ERROR ? (uint16_t)(-error & 0x7ff) : ST_INTERNAL_ERROR;
    }
}

static void execute_plain(struct request *request)
{
    if (request->sqe.opc == OPC_DSM) {
        nvm_dsm_execute(request);
        return;
    }
    if (request->sqe.opc == OPC_COPY) {
        nvm_copy_execute(request);
        return;
    }
    uint64_t start_ns = request->admitted_ns ? request->admitted_ns : target_now_ns();
    request->error = kvdev_bdev_execute_from(request->bdev, request->op, request->op_flags, request->offset,
                                             request->length, request->data, start_ns);
}

void command_execute(struct request *request)
{
    if (request->mate) {
        fused_execute(request);
        return;
    }
    int is_shared = kvdev_bdev_changes(request->op) && nvm_fused_pieces(request, request->offset, request->length);
    if (is_shared)
        pthread_mutex_lock(&request->ns->fused_lock);
    execute_plain(request);
    if (is_shared)
        pthread_mutex_unlock(&request->ns->fused_lock);
}

/* It is done: the response, or those of both halves of a fused pair. */
static void finish(struct request *request)
{
    if (request->mate) {
        fused_finish(request);
        return;
    }
    request->status = command_status_of(request->error, request->op);
    command_respond(request);
}

static void lend(struct request *request)
{
    request->state = REQUEST_EXECUTING;
    request->connection->lent++;
    if (request->mate) {
        request->mate->state = REQUEST_EXECUTING;
        request->connection->lent++;
    }
}

/* Preempt and Abort: this command came before it. */
static int is_preempted(const struct request *request)
{
    const struct target_controller *controller = request->connection->controller;
    return atomic_load_explicit(&controller->abort_ns[request->sqe.nsid - 1], memory_order_relaxed) >=
           request->arrival_ns;
}

void command_run(struct request *request)
{
    struct connection *connection = request->connection;
    if (is_preempted(request)) {
        if (request->mate)
            command_fail(request->mate, ST_ABORTED_PREEMPT);
        command_fail(request, ST_ABORTED_PREEMPT);
        return;
    }
    int is_long = request->sqe.opc == OPC_COPY ||
                  (request->length > TARGET_INLINE_FILL_MAX &&
                   (request->op == KVDEV_BDEV_OP_WRITE_ZEROES || request->op == KVDEV_BDEV_OP_DEALLOCATE));
    if (kvdev_bdev_is_held(request->bdev)) {
        uint64_t now = target_now_ns();
        request->admitted_ns = now;
        lend(request);
        if (kvdev_bdev_admit(request->bdev, request->op, request->offset, request->length, now, &request->hold))
            target_held_push(connection->target, request);
        else
            target_work_push(connection->target, request);
        return;
    }
    if (kvdev_bdev_may_block(request->bdev) || is_long) {
        lend(request);
        target_work_push(connection->target, request);
        return;
    }
    command_execute(request);
    finish(request);
}

/* A large buffer of the poller's pool when one is free: command_buffer_granted goes on with it. */
static void buffer_take(struct request *request)
{
    struct poller *poller = request->connection->poller;
    if (poller->buffer_count == 0 || poller->wait_buffer.first) {
        request->state = REQUEST_WAIT_BUFFER;
        list_push(&poller->wait_buffer, request);
        return;
    }
    request->buffer = poller->buffers[--poller->buffer_count];
    command_buffer_granted(request);
}

/* The ranges of a Dataset Management or Copy command are there. */
static void ranges_ready(struct request *request)
{
    int is_copy = request->sqe.opc == OPC_COPY;
    uint16_t status = is_copy ? nvm_copy_check(request) : nvm_dsm_check(request);
    if (status != ST_SUCCESS)
        command_fail(request, status);
    else if (is_copy)
        buffer_take(request);
    else if (!(request->sqe.cdw11 & DSM_ATTRIBUTE_DEALLOCATE))
        command_respond(request); /* access hints only: nothing to do */
    else
        command_run(request);
}

/* All data of a command that takes data is there. */
static void data_ready(struct request *request)
{
    if (request->is_bad_digest) {
        /* TCP 3.3.1.1: the command fails, the connection goes on */
        fused_fail(request, ST_TRANSIENT_TRANSPORT);
        return;
    }
    if (request->is_control) {
        request->state = REQUEST_CONTROL;
        request->connection->lent++;
        target_control_push(request->connection->target, request);
        return;
    }
    if (request->is_direct) {
        kvdev_bdev_account(request->bdev, request->op, request->offset, request->length,
                           target_now_ns() - request->arrival_ns, 0);
        command_respond(request);
        return;
    }
    if (request->fuse)
        fused_data_ready(request);
    else if (request->sqe.opc == OPC_DSM || request->sqe.opc == OPC_COPY)
        ranges_ready(request);
    else
        command_run(request);
}

/* The request has memory for its data: a read or a control command starts, a write asks for its data. */
static void memory_ready(struct request *request)
{
    if (request->direction == KVDEV_DIR_H2C) {
        request_r2t(request);
        return;
    }
    if (request->is_control) {
        memset(request->data, 0, request->data_len);
        data_ready(request);
        return;
    }
    command_run(request);
}

void command_buffer_granted(struct request *request)
{
    if (request->sqe.opc == OPC_COPY && !request->is_control) {
        command_run(request); /* its ranges stay where they are */
        return;
    }
    request->data = request->buffer;
    memory_ready(request);
}

/* Give a request that cannot go straight its memory: its own stage, or a large buffer when one is free. */
static void memory_take(struct request *request)
{
    if (request->data_len <= KVDEV_TARGET_STAGE_BYTES) {
        request->data = request->stage;
        memory_ready(request);
        return;
    }
    buffer_take(request);
}

/* The control thread has decided on a Connect. */
static void connect_decided(struct request *request)
{
    const struct kvdev_target_completion *done = &request->completion;
    struct connection *connection = request->connection;
    connection->is_connecting = 0;
    if (done->action != KVDEV_TARGET_ACTION_BIND)
        return;
    struct kvdev_target *target = connection->target;
    struct target_controller *controller = &target->controllers[TARGET_CONTROLLER_SLOT(done->controller)];
    if (atomic_load(&controller->is_dead) || atomic_load(&controller->number) != done->controller) {
        /* Its association ended while Connect was decided. */
        request->completion.action = KVDEV_TARGET_ACTION_NONE;
        request->status = ST_COMMAND_SEQUENCE;
        request->dw0 = 0;
        return;
    }
    atomic_fetch_add(&controller->connection_count, 1);
    connection->controller = controller;
    connection->controller_number = done->controller;
    connection->host_tag = controller->host_tag;
    connection->qid = done->qid;
    connection->sq_entries = (uint16_t)(done->sqsize + 1);
    connection->request_limit = connection->sq_entries;
    connection->sq_flow_control_off = done->sq_flow_control_off;
    connection->must_authenticate = done->must_authenticate;
    connection->sq_head = (uint16_t)(1 % connection->sq_entries);
    connection->state = CONNECTION_LIVE;
    connection->deadline_ns = 0;
    struct poller *poller = connection->poller;
    poller->deadline_count--;
    atomic_fetch_sub(&poller->unbound_now, 1);
    atomic_fetch_add(done->qid ? &poller->io_qpairs : &poller->admin_qpairs, 1);
    atomic_fetch_add(done->qid ? &poller->io_qpairs_now : &poller->admin_qpairs_now, 1);
    /* Fabrics commands may carry that much on any queue; other commands are held to their own limit. */
    connection->rx.link.in_capsule_max = KVDEV_PDU_IN_CAPSULE_ADMIN;
    if (done->qid && connection->transport.in_capsule_data_size > KVDEV_PDU_IN_CAPSULE_ADMIN)
        connection->rx.link.in_capsule_max = connection->transport.in_capsule_data_size;
}

void command_returned(struct request *request)
{
    struct connection *connection = request->connection;
    struct request *mate = request->mate;
    connection->lent -= mate ? 2 : 1;
    if (connection->state == CONNECTION_CLOSED || connection->state == CONNECTION_LINGER || request->is_abandoned) {
        command_release(request);
        if (mate)
            command_release(mate);
        atomic_store(&connection->poller->scan, 1); /* it may have been the last one */
        return;
    }
    if (!request->is_control) {
        finish(request);
        return;
    }
    request->status = request->completion.status;
    request->dw0 = request->completion.dw0;
    request->dw1 = request->completion.dw1;
    if (connection->state == CONNECTION_WAIT_CONNECT)
        connect_decided(request);
    if (request->completion.action == KVDEV_TARGET_ACTION_ADMIT)
        connection->must_authenticate = 0;
    command_respond(request);
    if (request->completion.action == KVDEV_TARGET_ACTION_END)
        connection_end(connection);
}

/* ---- capsules ---- */

/* Check the SGL of a command that moves `need` bytes (I/O) or its SGL's length (control, need 0). */
static uint16_t sgl_check(const struct request *request, uint32_t need, uint32_t capsule_len)
{
    const struct kvdev_sqe *sqe = &request->sqe;
    if ((sqe->flags >> 6) != 1)
        return ST_INVALID_FIELD; /* PSDT: SGLs only over Fabrics */
    if (sqe->sgl_type == KVDEV_SGL_IN_CAPSULE && request->direction == KVDEV_DIR_H2C) {
        if (sqe->sgl_addr != 0)
            return ST_SGL_OFFSET; /* ICDOFF is 0 and nothing comes before the data */
        if (sqe->sgl_len != capsule_len || sqe->sgl_len < need)
            return ST_DATA_SGL_LENGTH;
        return ST_SUCCESS;
    }
    if (sqe->sgl_type != KVDEV_SGL_TRANSPORT)
        return ST_SGL_TYPE;
    if (sqe->sgl_len < need || capsule_len != 0)
        return ST_DATA_SGL_LENGTH;
    return ST_SUCCESS;
}

static void move_data(struct request *request, uint32_t capsule_len)
{
    if (request->direction == KVDEV_DIR_H2C && capsule_len > 0) {
        request->data = request->stage;
        data_ready(request);
        return;
    }
    memory_take(request);
}

static void control_start(struct request *request, uint32_t capsule_len)
{
    const struct kvdev_sqe *sqe = &request->sqe;
    struct connection *connection = request->connection;
    uint8_t code = sqe->opc == OPC_FABRICS ? (uint8_t)sqe->nsid : sqe->opc;
    request->is_control = 1;
    request->direction = sqe->sgl_len ? code & 3 : KVDEV_DIR_NONE;
    /* Opcode bits 1:0 say host to controller 01b and controller to host 10b. */
    request->direction = request->direction == 1   ? KVDEV_DIR_H2C
                         : request->direction == 2 ? KVDEV_DIR_C2H
                                                   : KVDEV_DIR_NONE;
    request->is_read_response = request->direction == KVDEV_DIR_C2H;
    request->data_len = 0;
    if (request->direction == KVDEV_DIR_NONE) {
        request->data = request->stage;
        data_ready(request);
        return;
    }
    uint16_t status = sgl_check(request, 0, capsule_len);
    if (status == ST_SUCCESS && (sqe->sgl_len > connection->transport.max_io_size || sqe->sgl_len % 4 != 0))
        status = ST_INVALID_FIELD;
    if (status != ST_SUCCESS) {
        request->is_read_response = 0;
        command_fail(request, status);
        return;
    }
    request->data_len = sqe->sgl_len;
    move_data(request, capsule_len);
}

/* What a reservation may deny a command: NVM Command Set 5.6, Base 8.1.22.1. */
static uint32_t access_of(uint8_t opc)
{
    switch (opc) {
    case OPC_READ:
    case OPC_COMPARE:
    case OPC_VERIFY:
        return KVDEV_TARGET_GATE_NO_READS;
    case OPC_COPY:
        return KVDEV_TARGET_GATE_NO_READS | KVDEV_TARGET_GATE_NO_WRITES;
    default:
        return KVDEV_TARGET_GATE_NO_WRITES; /* Flush is among the writes */
    }
}

static uint16_t namespace_get(struct request *request)
{
    struct connection *connection = request->connection;
    struct target_subsystem *subsystem = connection->controller->subsystem;
    uint32_t nsid = request->sqe.nsid;
    if (nsid == 0 || nsid > subsystem->nsid_max)
        return ST_INVALID_NAMESPACE;
    struct target_namespace *ns = &subsystem->namespaces[nsid - 1];
    uint32_t gate = atomic_load_explicit(&connection->controller->gates[nsid - 1], memory_order_relaxed);
    if (gate) {
        if (gate & KVDEV_TARGET_GATE_ANA)
            return (uint16_t)gate;
        if (gate & access_of(request->sqe.opc))
            return ST_RESERVATION_CONFLICT;
    }
    /* Counted first, looked at second: kvdev_target_namespace_clear does it the other way round, so one of
     * the two always sees the other. */
    atomic_fetch_add(&ns->outstanding, 1);
    struct kvdev_bdev *bdev = atomic_load(&ns->bdev);
    if (!bdev) {
        target_namespace_put(connection->target, ns);
        return ST_INVALID_NAMESPACE;
    }
    request->ns = ns;
    request->bdev = bdev;
    return ST_SUCCESS;
}

static uint16_t io_range(struct request *request, const struct kvdev_bdev_info *info)
{
    const struct kvdev_sqe *sqe = &request->sqe;
    uint64_t slba = (uint64_t)sqe->cdw10 | ((uint64_t)sqe->cdw11 << 32);
    uint64_t lba_count = (uint64_t)(sqe->cdw12 & 0xffff) + 1;
    if (slba > info->block_count || lba_count > info->block_count - slba)
        return ST_LBA_RANGE;
    request->offset = slba * info->block_size;
    request->length = lba_count * info->block_size;
    if (sqe->cdw12 & CDW12_FUA)
        request->op_flags = KVDEV_BDEV_FUA;
    return ST_SUCCESS;
}

/* Verify moves no data; it is held to the same limit, since VSL is MDTS. */
static uint16_t transfer_prepare(struct request *request, const struct kvdev_bdev_info *info)
{
    uint8_t opc = request->sqe.opc;
    uint16_t status = io_range(request, info);
    if (status != ST_SUCCESS)
        return status;
    if (request->length > request->connection->transport.max_io_size)
        return ST_INVALID_FIELD;
    if (opc == OPC_VERIFY) {
        request->op = KVDEV_BDEV_OP_VERIFY;
        return ST_SUCCESS;
    }
    request->data_len = (uint32_t)request->length;
    request->direction = opc == OPC_READ ? KVDEV_DIR_C2H : KVDEV_DIR_H2C;
    request->is_read_response = opc == OPC_READ;
    request->op = opc == OPC_READ ? KVDEV_BDEV_OP_READ : opc == OPC_WRITE ? KVDEV_BDEV_OP_WRITE : KVDEV_BDEV_OP_COMPARE;
    return ST_SUCCESS;
}

static uint16_t io_prepare(struct request *request, const struct kvdev_bdev_info *info)
{
    if (request->sqe.opc == OPC_READ || request->sqe.opc == OPC_WRITE)
        return transfer_prepare(request, info);
    switch (request->sqe.opc) {
    case OPC_FLUSH:
        request->op = KVDEV_BDEV_OP_FLUSH;
        request->offset = 0;
        request->length = info->block_count * info->block_size;
        return ST_SUCCESS;
    case OPC_WRITE_ZEROES:
        request->op = KVDEV_BDEV_OP_WRITE_ZEROES;
        return io_range(request, info);
    case OPC_DSM:
        request->op = KVDEV_BDEV_OP_DEALLOCATE;
        request->direction = KVDEV_DIR_H2C;
        request->data_len = ((request->sqe.cdw10 & 0xff) + 1) * DSM_RANGE_BYTES;
        return ST_SUCCESS;
    case OPC_COPY:
        return nvm_copy_prepare(request, info);
    default:
        return transfer_prepare(request, info);
    }
}

static int is_nvm(uint8_t opc)
{
    return opc < 32 && NVM_OPCODES >> opc & 1;
}

static uint16_t io_check(struct request *request, uint32_t capsule_len, struct kvdev_bdev_info *info)
{
    struct connection *connection = request->connection;
    const struct kvdev_sqe *sqe = &request->sqe;
    if (!atomic_load(&connection->controller->is_ready))
        return ST_COMMAND_SEQUENCE;
    if (!is_nvm(sqe->opc)) {
        if (sqe->opc != OPC_FABRICS)
            return ST_INVALID_OPCODE;
        return (uint8_t)sqe->nsid == FCTYPE_CONNECT ? ST_COMMAND_SEQUENCE : ST_INVALID_FIELD;
    }
    uint16_t status = namespace_get(request);
    if (status != ST_SUCCESS)
        return status;
    kvdev_bdev_info_read(request->bdev, info);
    status = io_prepare(request, info);
    if (status == ST_SUCCESS && request->fuse)
        status = fused_check(request, info);
    if (status == ST_SUCCESS && request->data_len > 0)
        status = sgl_check(request, request->data_len, capsule_len);
    if (status == ST_SUCCESS && info->is_readonly && kvdev_bdev_changes(request->op))
        status = ST_WRITE_PROTECTED;
    return status;
}

static void io_start(struct request *request, uint32_t capsule_len)
{
    struct connection *connection = request->connection;
    struct kvdev_bdev_info info;
    uint16_t status = io_check(request, capsule_len, &info);
    if (status != ST_SUCCESS) {
        request->is_read_response = 0;
        fused_fail(request, status);
        return;
    }
    request->block_size = info.block_size;
    if (request->data_len == 0) {
        command_run(request);
        return;
    }
    /* Under a data digest, a write is checked before it reaches the device, and a read is a copy: its bytes could
     * change between digest and socket. */
    if (request->data_len > KVDEV_TARGET_STAGE_BYTES && request->op <= KVDEV_BDEV_OP_WRITE && capsule_len == 0 &&
        !connection->rx.link.ddgst && !request->fuse &&
        (request->op == KVDEV_BDEV_OP_READ || !nvm_fused_pieces(request, request->offset, request->length))) {
        request->data = kvdev_bdev_direct(request->bdev, request->offset, request->length);
        if (request->data) {
            request->is_direct = 1;
            if (request->direction == KVDEV_DIR_H2C) {
                request_r2t(request);
                return;
            }
            kvdev_bdev_account(request->bdev, request->op, request->offset, request->length,
                               target_now_ns() - request->arrival_ns, 0);
            command_respond(request);
            return;
        }
    }
    move_data(request, capsule_len);
}

/* The control thread keeps the reservations. */
static int is_reservation(uint8_t opc)
{
    return opc == OPC_RESERVATION_REGISTER || opc == OPC_RESERVATION_REPORT || opc == OPC_RESERVATION_ACQUIRE ||
           opc == OPC_RESERVATION_RELEASE;
}

/* A command as nearly all are: nothing of what capsule_start weighs applies to it. */
static int is_plain_io(const struct request *request)
{
    const struct connection *connection = request->connection;
    return connection->qid && is_nvm(request->sqe.opc) && !(request->sqe.flags & SQE_FUSE_MASK) &&
           connection->fused == FUSED_NONE && request->has_cid && !request->is_bad_digest &&
           connection->state == CONNECTION_LIVE && !connection->must_authenticate;
}

static void capsule_start(struct request *request, uint32_t capsule_len)
{
    struct connection *connection = request->connection;
    if (is_plain_io(request)) {
        io_start(request, capsule_len);
        return;
    }
    uint16_t status = connection->qid ? fused_admit(request) : ST_SUCCESS;
    if (!request->has_cid)
        status = ST_CID_CONFLICT;
    else if (request->is_bad_digest)
        status = ST_TRANSIENT_TRANSPORT;
    else if (status == ST_SUCCESS && request->fuse && is_reservation(request->sqe.opc))
        status = ST_INVALID_FIELD;
    if (status != ST_SUCCESS) {
        fused_fail(request, status);
        return;
    }
    if (connection->state == CONNECTION_WAIT_CONNECT) {
        int is_connect = request->sqe.opc == OPC_FABRICS && (uint8_t)request->sqe.nsid == FCTYPE_CONNECT;
        if (!is_connect || connection->is_connecting) {
            command_fail(request, ST_COMMAND_SEQUENCE);
            return;
        }
        connection->is_connecting = 1;
        control_start(request, capsule_len);
        if (request->state == REQUEST_SENDING)
            connection->is_connecting = 0; /* refused before anybody decided on it */
        return;
    }
    int is_auth = is_authentication(&request->sqe);
    if (connection->must_authenticate && !is_auth) {
        fused_fail(request, ST_AUTHENTICATION_REQUIRED); /* Base 2.1, 6.3 */
        return;
    }
    if (connection->qid == 0 || is_auth || is_reservation(request->sqe.opc))
        control_start(request, capsule_len);
    else
        io_start(request, capsule_len);
}

static void request_reset(struct request *request)
{
    request->ns = NULL;
    request->bdev = NULL;
    request->mate = NULL;
    request->fuse = 0;
    request->fuse_status = ST_SUCCESS;
    request->data = NULL;
    request->buffer = NULL;
    request->admitted_ns = 0;
    request->offset = 0;
    request->length = 0;
    request->data_len = 0;
    request->dw0 = 0;
    request->dw1 = 0;
    request->error = 0;
    request->status = ST_SUCCESS;
    request->direction = KVDEV_DIR_NONE;
    request->op = 0;
    request->op_flags = 0;
    request->is_direct = 0;
    request->is_control = 0;
    request->has_cid = 0;
    request->is_bad_digest = 0;
    request->is_abandoned = 0;
    request->is_read_response = 0;
    request->segment_count = 0;
    request->r2t.active = 0;
    request->completion.action = KVDEV_TARGET_ACTION_NONE;
}

/* A CapsuleCmd's header is there. */
void command_capsule(struct connection *connection)
{
    struct kvdev_pdu_rx *rx = &connection->rx;
    if (connection->outstanding >= connection->request_limit || !connection->free.first) {
        struct kvdev_pdu_fault fault;
        kvdev_pdu_fault_set(&fault, KVDEV_RULE_CAPSULE_OVERRUN, KVDEV_PDU_CAPSULE_CMD, connection->request_limit,
                            (uint64_t)connection->outstanding + 1);
        /* Base 2.2, 3.3.2: a submit to a full queue ends the association. */
        if (connection->controller)
            atomic_store(&connection->controller->is_dead, 1);
        connection_fault(connection, &fault);
        return;
    }
    struct request *request = connection->free.first;
    memcpy(request->raw_sqe, rx->head + 8, KVDEV_SQE_BYTES);
    kvdev_sqe_load(request->raw_sqe, &request->sqe);
    if (connection->qid && rx->pdu.data_len > connection->transport.in_capsule_data_size &&
        request->sqe.opc != OPC_FABRICS) {
        struct kvdev_pdu_fault fault;
        kvdev_pdu_fault_set(&fault, KVDEV_RULE_IN_CAPSULE_MAX, KVDEV_PDU_CAPSULE_CMD,
                            connection->transport.in_capsule_data_size, rx->pdu.data_len);
        connection_fault(connection, &fault);
        return;
    }
    list_pop(&connection->free);
    connection->outstanding++;
    request_reset(request);
    request->arrival_ns = connection->poller->now_ns;
    if (connection->sq_entries)
        connection->sq_head = (uint16_t)((connection->sq_head + 1u) % connection->sq_entries);
    atomic_store_explicit(&connection->poller->command_count,
                          atomic_load_explicit(&connection->poller->command_count, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    request->state = REQUEST_CAPSULE;
    request->has_cid = (uint8_t)(cid_mark(connection, request->sqe.cid) ||
                                 event_request_gives_way(connection, request->sqe.cid));
    if (rx->pdu.data_len > 0) {
        connection->rx_request = request;
        /* The machine holds in-capsule data to in_capsule_max, which is at most a stage. */
        kvdev_pdu_rx_set_payload(rx, request->stage);
        return;
    }
    capsule_start(request, 0);
}

/* An H2CData's header is there. */
void command_h2c_data(struct connection *connection)
{
    struct kvdev_pdu_rx *rx = &connection->rx;
    struct kvdev_pdu_fault fault;
    int32_t index = kvdev_pdu_ttag_index(rx->pdu.ttag, connection->request_count);
    struct request *request = index < 0 ? NULL : &connection->requests[index];
    if (request && request->state != REQUEST_R2T_SENT)
        request = NULL; /* no R2T of that tag is out */
    if (kvdev_pdu_r2t_h2c(request ? &request->r2t : NULL, &rx->pdu, &fault) != 0) {
        connection_fault(connection, &fault);
        return;
    }
    connection->rx_request = request;
    kvdev_pdu_rx_set_payload(rx, request->data + rx->pdu.datao);
}

/* The payload of the PDU in hand is complete. */
void command_payload_done(struct connection *connection)
{
    struct kvdev_pdu_rx *rx = &connection->rx;
    struct request *request = connection->rx_request;
    connection->rx_request = NULL;
    if (!request)
        return; /* thrown away: its command is over */
    if (!rx->ddgst_ok)
        request->is_bad_digest = 1;
    if (request->state == REQUEST_CAPSULE) {
        capsule_start(request, rx->pdu.data_len);
        return;
    }
    if (!request->r2t.active) {
        connection->r2t_open--;
        request->state = REQUEST_CAPSULE;
        data_ready(request);
    }
}

/* Fuzzer of the host: a queue with one queue pair, and in the controller's place a peer that keeps account.
 *
 * Held after every step: each submitted command completes exactly once; a completed command's memory is never touched
 * again; no byte around a payload changes; what the host sends is always a legal stream; a legal exchange ends in
 * success with the right bytes; a named wrong ends the queue pair with the H2CTermReq that the checklist names;
 * nothing is allocated while a connection lives. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "queue.h"
#include "wire.h"

#define COMMANDS_MAX 24u
#define R2TS_MAX 4u
#define GUARD_BYTES 64u
#define GUARD_BYTE 0xa5
#define BLOCK_BYTES 512u
#define CONNECTIONS_MAX 6u
#define POLLS_MAX 4000000u /* a drain that takes more looks is a hang */
#define NSID 7u

enum phase { PHASE_FREE, PHASE_SUBMITTED, PHASE_SEEN, PHASE_ANSWERED };

struct grant {
    uint16_t ttag;
    uint32_t offset;
    uint32_t length;
    uint32_t got;
};

struct command {
    uint8_t phase;
    uint8_t opcode;
    uint8_t direction;
    uint8_t last_sent;
    uint8_t is_damaged; /* a data digest that did not match was sent */
    uint16_t cid;
    uint16_t status;    /* answered with */
    uint32_t tag;
    uint32_t len;
    uint32_t sent;      /* C2H */
    uint32_t asked;     /* H2C: in the capsule or by R2T */
    uint32_t arrived;   /* H2C */
    uint32_t grant_count;
    struct grant grants[R2TS_MAX];
    uint8_t *memory;
    uint8_t *data;
};

struct host {
    struct source *source;
    struct kvdev_queue *queue;
    struct kvdev_qpair *qp;
    struct wire *wire;
    struct kvdev_qpair_params params;
    struct kvdev_pdu_link link;   /* as the host agreed to it: its receiving side */
    struct kvdev_pdu_link sender; /* the same seen from the peer */
    struct kvdev_pdu_rx rx;       /* the peer's receiver */
    uint32_t qpair_index;
    uint32_t device_index;
    int is_wild;       /* something random was sent: the account is no longer exact */
    int is_over;       /* the connection is to end */
    int has_term;      /* an H2CTermReq came */
    uint32_t patience; /* so many chances for something wrong are let go */
    uint32_t tag_next;
    uint32_t rx_tag;   /* whose H2CData is arriving */
    uint64_t allocations;
    struct command commands[COMMANDS_MAX];
    uint8_t landing[FUZZ_DATA_MAX];
    struct pdu pdu;
};

static struct host host;

/* ---- commands ---- */

static void guards_check(const struct command *command)
{
    for (uint32_t i = 0; i < GUARD_BYTES; i++) {
        if (command->memory[i] != GUARD_BYTE || command->data[command->len + i] != GUARD_BYTE)
            fuzz_fail("command %u: a byte beside its payload was written", command->tag);
    }
    if (command->direction == KVDEV_DIR_H2C && memcmp(command->data, pattern_of(command->tag), command->len))
        fuzz_fail("command %u: the payload of a write was changed", command->tag);
}

static void submit(struct host *h)
{
    static const uint8_t opcodes[] = { 2, 2, 2, 1, 1, 1, 5, 8, 0, 9 };
    static const uint32_t counts[] = { 1, 1, 1, 2, 3, 8, 9, 64, 65, 128 };
    struct command *command = NULL;
    uint8_t opcode = opcodes[below(h->source, sizeof opcodes)];
    uint32_t lba_count = counts[below(h->source, 32) % (below(h->source, 8) ? 7u : 10u)];
    uint32_t index = 0;
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        if (h->commands[i].phase == PHASE_FREE && !command) {
            command = &h->commands[i];
            index = i;
        } else if (h->commands[i].phase != PHASE_FREE && h->commands[i].opcode == opcode && (opcode == 0 || opcode == 9)) {
            return; /* flush and deallocate carry nothing to tell two of them apart */
        }
    }
    if (!command)
        return;
    int has_payload = opcode == 1 || opcode == 2 || opcode == 5;
    memset(command, 0, sizeof *command);
    command->opcode = opcode;
    command->tag = ++h->tag_next;
    command->len = has_payload ? lba_count * BLOCK_BYTES : opcode == 9 ? 16 : 0;
    command->direction = !command->len ? KVDEV_DIR_NONE : opcode == 2 ? KVDEV_DIR_C2H : KVDEV_DIR_H2C;
    struct kvdev_io io = { .tag = (uint64_t)command->tag << 8 | index,
                           .slba = (uint64_t)index * 256,
                           .device_index = h->device_index,
                           .opcode = opcode,
                           .priority = (uint8_t)below(h->source, KVDEV_QUEUE_PRIORITY_COUNT),
                           .lba_count = opcode == 0 ? 0 : lba_count };
    if (has_payload) {
        command->memory = malloc(2 * GUARD_BYTES + command->len);
        command->data = command->memory + GUARD_BYTES;
        memset(command->memory, GUARD_BYTE, 2 * GUARD_BYTES + command->len);
        if (opcode != 2)
            memcpy(command->data, pattern_of(command->tag), command->len);
        io.buf_addr = (uint64_t)(uintptr_t)command->data;
        io.byte_count = command->len;
    }
    if (kvdev_queue_submit(h->queue, &io, 1)) {
        free(command->memory);
        return;
    }
    command->phase = PHASE_SUBMITTED;
    fuzz_report.commands++;
}

static void completion_check(const struct host *h, const struct command *command, const struct kvdev_io_done *done)
{
    int is_answered = command->phase == PHASE_ANSWERED;
    int is_success = !done->error && !done->status;
    if (is_success)
        fuzz_report.completed++;
    if (h->is_wild)
        return;
    if (is_success && !is_answered)
        fuzz_fail("command %u: success that nobody sent", command->tag);
    if (is_success && command->direction == KVDEV_DIR_C2H &&
        memcmp(command->data, pattern_of(command->tag), command->len))
        fuzz_fail("command %u: success with other bytes than were sent", command->tag);
    if (!is_answered || (done->error && done->error != -EIO && !kvdev_qpair_is_ready(h->qp)))
        return; /* the answer may have been on its way when the connection ended */
    uint32_t moved = command->direction == KVDEV_DIR_C2H ? command->sent : command->arrived;
    uint16_t expected = command->status;
    if (command->direction == KVDEV_DIR_H2C && !expected && command->asked == command->len && is_success)
        return; /* the last of its data passed the answer on the way */
    if (!expected && command->is_damaged)
        expected = 0x22; /* C3: Transient Transport Error */
    else if (!expected && moved != command->len)
        expected = 0x04; /* D5: Data Transfer Error */
    if (done->error != (expected ? -EIO : 0) || done->status != expected)
        fuzz_fail("command %u: completed with error %d status 0x%x, expected status 0x%x", command->tag, done->error,
                  done->status, expected);
}

static void completed(struct host *h, const struct kvdev_io_done *done)
{
    struct command *command = &h->commands[done->tag & 0xff];
    if ((done->tag & 0xff) >= COMMANDS_MAX || command->phase == PHASE_FREE || command->tag != done->tag >> 8)
        fuzz_fail("completion with tag 0x%llx that is not outstanding", (unsigned long long)done->tag);
    if (command->memory)
        guards_check(command);
    completion_check(h, command, done);
    free(command->memory); /* the sanitizer watches it from here on */
    command->phase = PHASE_FREE;
}

/* ---- what the host sends ---- */

static struct command *command_by_cid(struct host *h, uint16_t cid)
{
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        if (h->commands[i].phase == PHASE_SEEN && h->commands[i].cid == cid)
            return &h->commands[i];
    }
    return NULL;
}

static void saw_capsule(struct host *h)
{
    struct kvdev_sqe sqe;
    struct command *command = NULL;
    kvdev_sqe_load(h->rx.head + 8, &sqe);
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        struct command *c = &h->commands[i];
        int is_named = sqe.opc == 0 || sqe.opc == 9 || sqe.cdw10 / 256 == i;
        if (c->phase == PHASE_SUBMITTED && c->opcode == sqe.opc && is_named)
            command = c;
    }
    if (!command || sqe.nsid != NSID)
        fuzz_fail("the host sent a command nobody submitted: opcode 0x%02x", sqe.opc);
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        if (h->commands[i].phase == PHASE_SEEN && h->commands[i].cid == sqe.cid)
            fuzz_fail("CID 0x%x is used twice at a time", sqe.cid);
    }
    int is_in_capsule = h->rx.pdu.data_len != 0;
    if ((sqe.flags >> 6) != 1 || sqe.sgl_len != command->len ||
        sqe.sgl_type != (is_in_capsule ? KVDEV_SGL_IN_CAPSULE : KVDEV_SGL_TRANSPORT) ||
        (is_in_capsule && (command->direction != KVDEV_DIR_H2C || h->rx.pdu.data_len != command->len)))
        fuzz_fail("command %u: SGL 0x%02x of %u bytes for %u", command->tag, sqe.sgl_type, sqe.sgl_len, command->len);
    command->phase = PHASE_SEEN;
    command->cid = sqe.cid;
    if (is_in_capsule) {
        command->asked = command->len;
        h->rx_tag = command->tag;
        kvdev_pdu_rx_set_payload(&h->rx, h->landing);
    }
}

static void saw_h2c_data(struct host *h)
{
    const struct kvdev_pdu *pdu = &h->rx.pdu;
    struct command *command = command_by_cid(h, pdu->cccid);
    h->rx_tag = 0;
    if (!command) {
        /* Its completion is on the way: what was half sent goes on to its end. */
        kvdev_pdu_rx_set_payload(&h->rx, h->landing);
        return;
    }
    struct grant *grant = NULL;
    for (uint32_t i = 0; i < command->grant_count; i++) {
        if (command->grants[i].got < command->grants[i].length) {
            grant = &command->grants[i]; /* E5: those of one command in the order they came */
            break;
        }
    }
    if (h->is_wild) {
        kvdev_pdu_rx_set_payload(&h->rx, h->landing);
        return;
    }
    if (!grant || grant->ttag != pdu->ttag || pdu->datao != grant->offset + grant->got ||
        pdu->datal > grant->length - grant->got || pdu->datal > h->link.maxh2cdata)
        fuzz_fail("H2CData that no R2T asked for: command %u, DATAO %u, DATAL %u", command->tag, pdu->datao, pdu->datal);
    grant->got += pdu->datal;
    if (!(pdu->flags & KVDEV_PDU_FLAG_LAST) != (grant->got != grant->length))
        fuzz_fail("LAST_PDU is not on the last H2CData");
    h->rx_tag = command->tag;
    kvdev_pdu_rx_set_payload(&h->rx, h->landing);
}

static void saw_payload(struct host *h)
{
    if (!h->rx.ddgst_ok)
        fuzz_fail("the host sent a wrong data digest");
    for (uint32_t i = 0; i < COMMANDS_MAX && h->rx_tag; i++) {
        struct command *command = &h->commands[i];
        if (command->phase != PHASE_SEEN || command->tag != h->rx_tag)
            continue;
        uint32_t datao = h->rx.pdu.type == KVDEV_PDU_H2C_DATA ? h->rx.pdu.datao : 0;
        int is_range = command->opcode == 9; /* built by the queue */
        if (!is_range && memcmp(h->landing, pattern_of(command->tag) + datao, h->rx.pdu.data_len))
            fuzz_fail("command %u: other bytes were sent than were submitted", command->tag);
        command->arrived += h->rx.pdu.data_len;
        /* Served grants make room for the next. */
        while (command->grant_count && command->grants[0].got == command->grants[0].length) {
            command->grant_count--;
            memmove(command->grants, command->grants + 1, sizeof command->grants - sizeof command->grants[0]);
        }
    }
}

static void saw_header(struct host *h, const struct verdict *verdict)
{
    switch (h->rx.pdu.type) {
    case KVDEV_PDU_CAPSULE_CMD:
        saw_capsule(h);
        break;
    case KVDEV_PDU_H2C_DATA:
        saw_h2c_data(h);
        break;
    case KVDEV_PDU_H2C_TERM:
        h->has_term = 1;
        if (verdict)
            term_check(&h->rx, verdict, &h->pdu);
        else if (!h->is_wild)
            fuzz_fail("H2CTermReq without cause: FES %u FEI 0x%x", h->rx.pdu.fes, h->rx.pdu.fei);
        break;
    default:
        break;
    }
}

/* The peer reads everything that has come. */
static void look(struct host *h, const struct verdict *verdict)
{
    struct wire *wire = h->wire;
    while (wire->tx_at < wire->tx_len) {
        size_t used = 0;
        if (h->has_term)
            fuzz_fail("bytes behind an H2CTermReq");
        int event = kvdev_pdu_rx_step(&h->rx, wire->tx + wire->tx_at, wire->tx_len - wire->tx_at, &used);
        wire->tx_at += used;
        if (event == KVDEV_PDU_FAULT) {
            char text[160];
            kvdev_pdu_fault_text(&h->rx.fault, text, sizeof text);
            fuzz_fail("the host broke the protocol: %s", text);
        }
        if (event == KVDEV_PDU_HEADER)
            saw_header(h, verdict);
        else if (event == KVDEV_PDU_DATA_DONE)
            saw_payload(h);
    }
    wire->tx_at = wire->tx_len = 0;
}

static size_t poll_once(struct host *h, const struct verdict *verdict)
{
    struct kvdev_io_done done[8];
    size_t count = 0;
    if (kvdev_queue_poll(h->queue, done, 8, 0, 0, &count))
        fuzz_fail("poll is refused");
    /* What left for the wire is older than what was handed back. */
    look(h, verdict);
    for (size_t i = 0; i < count; i++)
        completed(h, &done[i]);
    return count;
}

/* Poll until the host has read everything and sends nothing more. */
static void settle(struct host *h, const struct verdict *verdict)
{
    uint32_t calm = 0;
    for (uint32_t i = 0; calm < 2; i++) {
        size_t unread = wire_unread(h->wire);
        size_t room = h->wire->room;
        int has_moved = poll_once(h, verdict) != 0 || unread != wire_unread(h->wire) || room != h->wire->room;
        calm = has_moved ? 0 : calm + 1;
        if (i > POLLS_MAX)
            fuzz_fail("the queue never comes to rest");
    }
}

/* ---- what the peer sends ---- */

static void put(struct host *h, int is_mutated)
{
    fuzz_report.pdus++;
    wire_put(h->wire, h->pdu.bytes, h->pdu.len, is_mutated);
}

static struct command *pick(struct host *h, int direction)
{
    uint32_t start = below(h->source, COMMANDS_MAX);
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        struct command *command = &h->commands[(start + i) % COMMANDS_MAX];
        if (command->phase == PHASE_SEEN && (direction < 0 || command->direction == direction))
            return command;
    }
    return NULL;
}

static void build_resp(struct host *h, uint16_t cid, uint16_t status)
{
    uint8_t wire[KVDEV_CQE_BYTES];
    struct kvdev_cqe cqe = { .dw0 = below(h->source, 2) ? 0 : take32(h->source),
                             .sqhd = (uint16_t)take(h->source),
                             .cid = cid,
                             .status_p = (uint16_t)(status << 1) };
    kvdev_cqe_store(&cqe, wire);
    pdu_finish(&h->pdu, &h->sender, kvdev_pdu_build_capsule_resp(h->pdu.bytes, &h->sender, wire), NULL, 0);
}

static void build_c2h(struct host *h, const struct command *command, uint32_t len, uint8_t flags)
{
    size_t head = kvdev_pdu_build_c2h_data(h->pdu.bytes, &h->sender, command->cid, command->sent, len, flags);
    pdu_finish(&h->pdu, &h->sender, head, pattern_of(command->tag) + command->sent, len);
}

static uint32_t piece(struct host *h, uint32_t left)
{
    switch (below(h->source, 4)) {
    case 0:
        return 4 * (1 + below(h->source, left / 4));
    case 1:
        return left < 8 ? left : 4;
    default:
        return left;
    }
}

static void answered(struct command *command, uint16_t status)
{
    command->phase = PHASE_ANSWERED;
    command->status = status;
}

/* A legal PDU that moves the command on, in h->pdu, and the account with it; `command` may have been answered then. */
static void advance(struct host *h, struct command *command)
{
    static const uint16_t statuses[] = { 0x0006, 0x4080, 0x0281, 0x0022, 0x4002 };
    uint32_t left = command->len - (command->direction == KVDEV_DIR_C2H ? command->sent : command->asked);
    uint32_t whim = below(h->source, 32);
    if (whim == 0) { /* fails at any time */
        uint16_t status = statuses[below(h->source, 5)];
        build_resp(h, command->cid, status);
        answered(command, status);
    } else if (whim == 1) { /* claims success, whatever has moved */
        build_resp(h, command->cid, 0);
        answered(command, 0);
    } else if (command->direction == KVDEV_DIR_C2H && !command->last_sent) {
        uint32_t len = piece(h, left);
        int is_last = len == left && (below(h->source, 4) != 0);
        int is_success = is_last && below(h->source, 2);
        uint8_t flags = (uint8_t)((is_last ? KVDEV_PDU_FLAG_LAST : 0) | (is_success ? KVDEV_PDU_FLAG_SUCCESS : 0));
        build_c2h(h, command, len, flags);
        if (h->link.ddgst && below(h->source, 16) == 0) {
            h->pdu.bytes[h->pdu.data_at + below(h->source, h->pdu.data_len)] ^= 0x10;
            command->is_damaged = 1;
        }
        command->sent += len;
        command->last_sent = (uint8_t)(is_last || command->sent == command->len);
        if (is_success)
            answered(command, 0);
    } else if (command->direction == KVDEV_DIR_H2C && left && command->grant_count <= h->params.maxr2t_0based) {
        struct grant *grant = &command->grants[command->grant_count++];
        *grant = (struct grant){ .ttag = (uint16_t)take16(h->source), .offset = command->asked };
        grant->length = piece(h, left);
        command->asked += grant->length;
        pdu_finish(&h->pdu, &h->sender,
                   kvdev_pdu_build_r2t(h->pdu.bytes, &h->sender, command->cid, grant->ttag, grant->offset, grant->length),
                   NULL, 0);
    } else if (command->direction == KVDEV_DIR_H2C && command->arrived < command->len) {
        h->pdu.len = 0; /* its data is still to come */
    } else {
        build_resp(h, command->cid, 0);
        answered(command, 0);
    }
}

static void legal(struct host *h)
{
    struct command *command = pick(h, -1);
    if (!command)
        return;
    int was_damaged = command->is_damaged;
    advance(h, command);
    if (!h->pdu.len)
        return;
    int is_decorated = below(h->source, 4) && pdu_decorate(&h->pdu, h->source, &h->sender);
    put(h, is_decorated || command->is_damaged != was_damaged);
}

/* ---- named wrongs against commands ---- */

static int wrong(struct verdict *verdict, uint16_t fes, uint32_t fei)
{
    *verdict = (struct verdict){ .fes = fes, .fei = fei, .header_len = 24 };
    return 1;
}

/* A CID that is not outstanding: wrong slot, or the right one of another generation. */
static uint16_t cid_unknown(struct host *h)
{
    uint16_t cid = (uint16_t)take16(h->source);
    while (command_by_cid(h, cid))
        cid = (uint16_t)(cid + 1 + below(h->source, 2) * 0x1000);
    return cid;
}

static int wrong_c2h(struct host *h, struct verdict *ret)
{
    static const uint8_t direction_of[] = { KVDEV_DIR_C2H, KVDEV_DIR_C2H, KVDEV_DIR_C2H, KVDEV_DIR_C2H,
                                            KVDEV_DIR_C2H, KVDEV_DIR_C2H, KVDEV_DIR_H2C };
    uint32_t kind = below(h->source, 7);
    struct command *command = pick(h, direction_of[kind]);
    if (!command)
        return 0;
    uint32_t left = command->len - command->sent;
    if (kind == 6) { /* D1: data for a write */
        build_c2h(h, command, 4, 0);
        return wrong(ret, KVDEV_FES_SEQUENCE, 0);
    }
    if (command->last_sent) { /* D1: data behind LAST_PDU; where all has come, first beyond the buffer */
        build_c2h(h, command, 4, KVDEV_PDU_FLAG_LAST);
        return left ? wrong(ret, KVDEV_FES_SEQUENCE, 0) : 0;
    }
    build_c2h(h, command, left, KVDEV_PDU_FLAG_LAST);
    switch (kind) {
    case 0:
        pdu_set16(&h->pdu, &h->sender, 8, cid_unknown(h));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 8);
    case 1: { /* D2: a gap or a repetition */
        if (command->len < 16)
            return 0;
        build_c2h(h, command, 4, 0);
        uint32_t datao = 4 * below(h->source, command->len / 4);
        if (datao == command->sent)
            return 0;
        pdu_set32(&h->pdu, &h->sender, 12, datao);
        return wrong(ret, KVDEV_FES_SEQUENCE, 0);
    }
    case 2: { /* D2: beyond the buffer, by little, by much, or around 2^32 */
        static const uint32_t beyond[] = { 4, 4096, 0x7ffffffc, 0xfffffffc };
        uint32_t by = beyond[below(h->source, 4)];
        pdu_set32(&h->pdu, &h->sender, 12, by == 4 ? command->sent + 4 : by < command->len ? command->len : by);
        return wrong(ret, KVDEV_FES_OUT_OF_RANGE, 0);
    }
    case 3: /* D3 */
        h->pdu.bytes[1] = (uint8_t)((h->pdu.bytes[1] & ~KVDEV_PDU_FLAG_LAST) | KVDEV_PDU_FLAG_SUCCESS);
        pdu_seal(&h->pdu, &h->sender);
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 1);
    case 4: /* D6, D2: no data, or no whole dwords */
        pdu_set32(&h->pdu, &h->sender, 16, below(h->source, 2) ? 0 : left + 1 + below(h->source, 3));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 16);
    default:
        pdu_set32(&h->pdu, &h->sender, 12, command->sent + 1 + below(h->source, 3));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 12);
    }
}

static void build_r2t(struct host *h, uint16_t cid, uint32_t offset, uint32_t len)
{
    size_t head = kvdev_pdu_build_r2t(h->pdu.bytes, &h->sender, cid, (uint16_t)take(h->source), offset, len);
    pdu_finish(&h->pdu, &h->sender, head, NULL, 0);
}

static int wrong_r2t(struct host *h, struct verdict *ret)
{
    uint32_t kind = below(h->source, 6);
    struct command *command = pick(h, kind == 0 ? KVDEV_DIR_C2H : KVDEV_DIR_H2C);
    if (!command)
        return 0;
    uint32_t left = command->len - command->asked;
    if (kind > 1 && command->grant_count > h->params.maxr2t_0based) { /* E4: one more than MAXR2T */
        if (h->wire->room == WIRE_ROOM_UNLIMITED)
            return 0; /* the host may have served it already */
        build_r2t(h, command->cid, command->asked, left ? left : 4);
        return wrong(ret, KVDEV_FES_LIMIT, 0);
    }
    build_r2t(h, command->cid, command->asked, left ? left : 4);
    switch (kind) {
    case 0:
        return wrong(ret, KVDEV_FES_SEQUENCE, 0); /* for a read */
    case 1:
        pdu_set16(&h->pdu, &h->sender, 8, cid_unknown(h));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 8);
    case 2:
        if (below(h->source, 2)) {
            pdu_set32(&h->pdu, &h->sender, 16, 0);
            return wrong(ret, KVDEV_FES_OUT_OF_RANGE, 0);
        }
        pdu_set32(&h->pdu, &h->sender, 16, 1 + below(h->source, 3));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 16);
    case 3: { /* skipped ahead, or asked for again */
        if (left < 8 && !command->asked)
            return 0;
        uint32_t offset = left >= 8 && below(h->source, 2) ? command->asked + 4 : command->asked ? command->asked - 4 : 4;
        build_r2t(h, command->cid, offset, 4);
        return wrong(ret, KVDEV_FES_SEQUENCE, 0);
    }
    case 4:
        build_r2t(h, command->cid, command->asked, left + 4 + 4 * below(h->source, 64));
        return wrong(ret, KVDEV_FES_OUT_OF_RANGE, 0);
    default: /* around 2^32 */
        build_r2t(h, command->cid, 0xfffffffc, 8);
        return wrong(ret, KVDEV_FES_OUT_OF_RANGE, 0);
    }
}

/* One PDU wrong in a named way goes out: the queue pair must end as the verdict says. */
static void violate(struct host *h)
{
    struct verdict verdict;
    int is_wrong;
    if (!kvdev_qpair_outstanding(h->qp))
        submit(h);
    settle(h, NULL); /* so that the account is exact */
    if (h->is_wild || !kvdev_qpair_is_ready(h->qp) || !kvdev_qpair_outstanding(h->qp))
        return; /* an idle connection is not read */
    switch (below(h->source, 4)) {
    case 0:
        is_wrong = wrong_c2h(h, &verdict);
        break;
    case 1:
        is_wrong = wrong_r2t(h, &verdict);
        break;
    case 2: /* P4: a completion of no command */
        build_resp(h, cid_unknown(h), 0);
        is_wrong = wrong(&verdict, KVDEV_FES_INVALID_HEADER, 20);
        break;
    default: {
        struct command *command = pick(h, -1);
        if (!command || h->wire->room == 0)
            return;
        struct command before = *command;
        advance(h, command);
        *command = before; /* it will not be taken */
        is_wrong = h->pdu.len && pdu_violate(&h->pdu, h->source, &h->link, KVDEV_PDU_HOST, &verdict);
        break;
    }
    }
    if (!is_wrong)
        return;
    fuzz_report.violations++;
    int was_mid_pdu = h->rx.head_len != h->rx.head_want || h->rx.data_left || h->rx.tail_len % 4;
    put(h, 1);
    settle(h, &verdict);
    struct kvdev_qpair_fault fault;
    kvdev_qpair_fault_read(h->qp, &fault);
    if (kvdev_qpair_is_ready(h->qp) || (fault.kind != KVDEV_FAULT_PROTOCOL && fault.kind != KVDEV_FAULT_DIGEST))
        fuzz_fail("a PDU wrong with FES %u FEI 0x%x is accepted (fault %u)", verdict.fes, verdict.fei, fault.kind);
    if (fault.fes != verdict.fes || fault.fei != verdict.fei)
        fuzz_fail("fault says FES %u FEI 0x%x, expected FES %u FEI 0x%x: %s", fault.fes, fault.fei, verdict.fes,
                  verdict.fei, fault.text);
    if (verdict.fes && h->wire->room == WIRE_ROOM_UNLIMITED && !was_mid_pdu && !h->has_term)
        fuzz_fail("no H2CTermReq with FES %u FEI 0x%x was sent: %s", verdict.fes, verdict.fei, fault.text);
    if (fault.is_term_sent != h->has_term)
        fuzz_fail("the fault says H2CTermReq sent: %d, on the wire: %d", fault.is_term_sent, h->has_term);
    h->is_over = 1;
}

/* Something changed at random: from here on only what holds always is held. */
static void mutate(struct host *h)
{
    struct command *command = pick(h, -1);
    struct command before = { 0 };
    if (!command) {
        build_resp(h, (uint16_t)take16(h->source), 0);
    } else {
        before = *command;
        advance(h, command);
    }
    int is_changed = h->pdu.len && pdu_mutate(&h->pdu, h->source, &h->link);
    if (command)
        *command = before; /* what became of it is not known */
    if (!is_changed)
        return;
    h->is_wild = 1;
    put(h, 1);
    if (below(h->source, 4))
        settle(h, NULL);
}

/* ---- a connection's life ---- */

static void ending(struct host *h)
{
    switch (below(h->source, 6)) {
    case 0:
        h->wire->end = 1;
        break;
    case 1:
        h->wire->end = ECONNRESET;
        break;
    case 2:
        h->wire->send_error = EPIPE;
        h->wire->end = 1;
        break;
    case 3:
        kvdev_queue_abandon(h->queue);
        break;
    case 4: { /* a legal C2HTermReq */
        memset(h->pdu.bytes, 0, 152);
        h->pdu.bytes[0] = KVDEV_PDU_C2H_TERM;
        h->pdu.bytes[2] = 24;
        h->pdu.len = 24 + below(h->source, 129);
        kvdev_store_le32(h->pdu.bytes + 4, h->pdu.len);
        kvdev_store_le16(h->pdu.bytes + 8, (uint16_t)(1 + below(h->source, 6)));
        put(h, 0);
        break;
    }
    default:
        wire_now_ns += 60000000000ull; /* past every command's time */
        break;
    }
    h->is_over = 1;
    settle(h, NULL);
}

static void step(struct host *h)
{
    static const size_t cuts[] = { 0, 0, 0, 1, 3, 24, 100, 1500 };
    uint32_t op = below(h->source, 64);
    if (op >= 32 && op < 59 && h->patience) {
        h->patience--;
        op = below(h->source, 24);
    }
    if (op < 8) {
        submit(h);
    } else if (op < 24) {
        legal(h);
    } else if (op < 30) {
        (void)poll_once(h, NULL);
    } else if (op < 32) {
        settle(h, NULL);
    } else if (op < 43) {
        violate(h);
    } else if (op < 59) {
        mutate(h);
    } else if (op < 61) {
        h->wire->cut_max = cuts[below(h->source, 8)];
        h->wire->cut_is_random = (int)below(h->source, 2);
    } else if (op < 62) {
        h->wire->room = below(h->source, 3) ? WIRE_ROOM_UNLIMITED : take16(h->source) % 3000;
    } else if (op < 63) {
        wire_now_ns += take32(h->source);
    } else {
        ending(h);
    }
    if (wire_allocation_count != h->allocations)
        fuzz_fail("memory was allocated after the connection was made");
}

/* Answer everything legally; then nothing may be outstanding. */
static void finish(struct host *h)
{
    h->wire->room = WIRE_ROOM_UNLIMITED;
    for (uint32_t turn = 0; turn < 4096; turn++) {
        settle(h, NULL);
        struct command *command = pick(h, -1);
        if (!command)
            break;
        advance(h, command);
        if (h->pdu.len)
            put(h, 0);
    }
    settle(h, NULL);
    if (!kvdev_qpair_is_ready(h->qp)) {
        struct kvdev_qpair_fault fault;
        kvdev_qpair_fault_read(h->qp, &fault);
        fuzz_fail("a legal exchange ended the queue pair: %s %s", fault.operation, fault.text);
    }
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        if (h->commands[i].phase != PHASE_FREE)
            fuzz_fail("command %u never completes", h->commands[i].tag);
    }
}

/* The IC exchange, legal or not; 1 when the queue pair is ready. */
static int connect_host(struct host *h)
{
    static const uint8_t alignments[] = { 0, 0, 0, 1, 3, 7, 15, 31 };
    struct verdict verdict;
    uint8_t digests = (uint8_t)below(h->source, 16);
    memset(&h->params, 0, sizeof h->params);
    h->params.qid = (uint16_t)(1 + below(h->source, 3));
    h->params.queue_size = (uint16_t)(2 + below(h->source, 15));
    h->params.header_digest = digests & 1 ? KVDEV_DIGEST_PREFER : KVDEV_DIGEST_OFF;
    h->params.data_digest = digests & 2 ? KVDEV_DIGEST_PREFER : KVDEV_DIGEST_OFF;
    h->params.hpda = alignments[below(h->source, 8)];
    h->params.maxr2t_0based = (uint8_t)below(h->source, R2TS_MAX);
    h->params.in_capsule_size_bytes = below(h->source, 2) ? 0 : 4096;
    struct kvdev_pdu_link asked = { .hdgst = digests & 1, .ddgst = digests >> 1 & 1, .recv_pda = h->params.hpda };
    h->link = asked;
    h->link.hdgst = asked.hdgst && !(digests & 4);
    h->link.ddgst = asked.ddgst && !(digests & 8);
    h->link.send_pda = alignments[below(h->source, 8)];
    h->link.maxh2cdata = 4096 + 4 * below(h->source, 4096);
    h->sender = h->link;
    h->sender.send_pda = h->link.recv_pda;
    h->sender.recv_pda = h->link.send_pda;
    size_t len = kvdev_pdu_build_ic_resp(h->pdu.bytes, &h->sender);
    pdu_finish(&h->pdu, &h->link, len, NULL, 0);
    fuzz_report.pdus++;
    uint32_t whim = below(h->source, 16);
    int is_wrong = whim == 0 && pdu_violate_ic(&h->pdu, h->source, &asked, KVDEV_PDU_HOST, &verdict);
    h->is_wild = whim == 1 && pdu_mutate(&h->pdu, h->source, &h->link);
    fuzz_report.violations += (uint64_t)is_wrong;
    fuzz_report.connections++;
    h->wire = wire_new(0, take(h->source));
    wire_put(h->wire, h->pdu.bytes, h->pdu.len, is_wrong || h->is_wild);
    h->wire->end = whim == 2;
    h->wire->cut_max = below(h->source, 4) ? 0 : 1 + below(h->source, 128);
    if (kvdev_qpair_create(&h->params, &h->qp))
        fuzz_fail("a queue pair could not be made");
    int error = kvdev_qpair_connect(h->qp, "127.0.0.1", 4420, 1000000000u);
    if (h->is_wild && !error) { /* whatever it was, the host has agreed to it */
        struct kvdev_qpair_info info;
        kvdev_qpair_info_read(h->qp, &info);
        h->link.hdgst = h->sender.hdgst = info.hdgst;
        h->link.ddgst = h->sender.ddgst = info.ddgst;
        h->link.send_pda = h->sender.recv_pda = info.cpda;
        h->link.maxh2cdata = h->sender.maxh2cdata = info.maxh2cdata;
    }
    /* The peer's own receiver: ICReq first, then as agreed. */
    struct kvdev_pdu_link offer = h->sender;
    offer.in_capsule_max = KVDEV_PDU_IN_CAPSULE_ADMIN;
    offer.hdgst = h->link.hdgst;
    offer.ddgst = h->link.ddgst;
    if (kvdev_pdu_rx_init(&h->rx, KVDEV_PDU_TARGET, &offer))
        fuzz_fail("the peer's receiver does not start");
    h->has_term = 0;
    look(h, is_wrong ? &verdict : NULL);
    if (is_wrong) {
        struct kvdev_qpair_fault fault;
        kvdev_qpair_fault_read(h->qp, &fault);
        if (error != -EPROTO || fault.fes != verdict.fes || fault.fei != verdict.fei || h->has_term != (verdict.fes != 0))
            fuzz_fail("ICResp wrong with FES %u FEI %u: error %d, FES %u FEI %u", verdict.fes, verdict.fei, error,
                      fault.fes, fault.fei);
    } else if (error && !h->is_wild) {
        fuzz_fail("a legal ICResp is refused: %d", error);
    }
    return !error;
}

static void connection_run(struct host *h)
{
    struct kvdev_queue_namespace ns = { .nsid = NSID, .block_size_bytes = BLOCK_BYTES, .block_count = 65536,
                                        .max_transfer_bytes = FUZZ_DATA_MAX, .qpair_count = 1 };
    static const uint32_t patiences[] = { 0, 0, 0, 0, 1, 6, 24, 1000 };
    h->is_over = 0;
    h->patience = patiences[below(h->source, 8)];
    if (connect_host(h)) {
        if (kvdev_queue_qpair_add(h->queue, h->qp, &h->qpair_index))
            fuzz_fail("the queue takes no queue pair");
        ns.qpair_index[0] = h->qpair_index;
        if (kvdev_queue_namespace_add(h->queue, &ns, &h->device_index))
            fuzz_fail("the queue takes no namespace");
        h->allocations = wire_allocation_count;
        for (uint32_t i = 0; i < 3; i++)
            submit(h);
        while (!h->is_over && kvdev_qpair_is_ready(h->qp) && !source_is_over(h->source))
            step(h);
        if (!h->is_over && !h->is_wild && kvdev_qpair_is_ready(h->qp) && !h->wire->send_error && !h->wire->end)
            finish(h);
        kvdev_queue_qpair_remove(h->queue, h->qpair_index);
        kvdev_queue_device_remove(h->queue, h->device_index);
        settle(h, NULL);
        for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
            if (h->commands[i].phase != PHASE_FREE)
                fuzz_fail("command %u does not complete when its queue pair is gone", h->commands[i].tag);
        }
    }
    h->wire->end = 1;
    kvdev_qpair_destroy(h->qp);
    fuzz_report.mutated += wire_mutated_taken(h->wire);
}

void fuzz_host(struct source *source)
{
    struct kvdev_queue_options options = { .capacity = COMMANDS_MAX };
    struct host *h = &host;
    memset(h->commands, 0, sizeof h->commands);
    h->source = source;
    h->tag_next = 0;
    options.window_size_bytes = below(source, 2) ? 0 : 16384;
    if (kvdev_queue_create(&options, &h->queue))
        fuzz_fail("a queue could not be made");
    for (uint32_t i = 0; i < CONNECTIONS_MAX && !source_is_over(source); i++)
        connection_run(h);
    kvdev_queue_destroy(h->queue);
    wires_reset();
}

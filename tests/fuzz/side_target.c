/* Fuzzer of the target: its poller runs here, on two connections at most, and in the hosts' place peers keep account.
 *
 * Held: each command of a legal exchange gets exactly one answer, the right one, with the right bytes; the device holds
 * what was written and nothing else; what the target sends is always a legal stream; a named wrong ends the
 * connection with the C2HTermReq that the checklist names, and the other connection goes on; in the end no request,
 * buffer or connection is left over. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "target.h"
#include "target_int.h"
#include "wire.h"

#define PEERS_MAX 2u
#define COMMANDS_MAX 8u
#define BLOCK_BYTES 512u
#define PLACE_BYTES 36864u /* of the device; no two commands at a time touch the same place */
#define PLACE_COUNT 16u
#define NSID_PLAIN 1u
#define NSID_LENT 2u       /* a filter over the same device: its operations go through the worker's list */
#define MAXH2CDATA 8192u
#define QUEUE_DEPTH 8u
#define HELD_MAX 16u
#define TURNS_MAX 2000000u

enum phase { PHASE_FREE, PHASE_SENT, PHASE_GRANTED };

struct command {
    uint8_t phase;
    uint8_t opcode;
    uint8_t is_data_lost;   /* its capsule or data was sent with a wrong digest */
    uint8_t is_capsule_cut; /* its capsule is not whole on the wire yet */
    uint16_t cid;
    uint16_t status;        /* the answer due */
    uint16_t ttag;
    uint32_t tag;
    uint32_t place;
    uint32_t len;
    uint32_t granted;
    uint32_t sent;          /* H2C */
    uint32_t got;           /* C2H */
};

struct peer {
    struct wire *wire;
    struct kvdev_pdu_link link;   /* as the target agreed to it */
    struct kvdev_pdu_link sender;
    struct kvdev_pdu_rx rx;
    struct verdict verdict;       /* due */
    struct pdu wrong;             /* it answers this */
    uint32_t in_capsule_size;     /* of an I/O queue */
    uint16_t queue_entries;
    uint8_t qid;
    uint8_t is_connected;
    uint8_t is_wild;
    uint8_t is_ending;            /* a named wrong was sent, or the peer has closed */
    uint8_t is_deaf;              /* its ICReq was mutated: it knows no more how to read the answers */
    uint8_t has_verdict;
    uint8_t has_term;
    uint16_t cid_next;
    uint32_t rx_index;            /* of the command whose data is arriving; COMMANDS_MAX none */
    uint32_t patience;
    struct command commands[COMMANDS_MAX];
    uint8_t landing[FUZZ_DATA_MAX];
};

struct bench {
    struct source *source;
    struct kvdev_target *target;
    struct kvdev_bdev *device;
    struct kvdev_bdev *filter;
    uint8_t *memory;              /* of the device */
    uint8_t *expected;
    int is_any_wild;
    uint8_t was_used[PLACE_COUNT];
    uint8_t place_state[PLACE_COUNT]; /* 0 free, 1 in use, 2 in use and its content is not known */
    int32_t subsystem;
    int32_t controllers[PEERS_MAX]; /* each connection has an association of its own */
    uint32_t tag_next;
    uint32_t peer_count;
    uint32_t turn_count;
    int is_finishing;
    uint64_t held[HELD_MAX];      /* handles of control commands not answered yet */
    uint32_t held_count;
    uint32_t accept_due;
    struct peer peers[PEERS_MAX];
    struct pdu pdu;
};

static struct bench bench;

/* ---- places of the device ---- */

static uint8_t *expected_at(struct bench *b, uint32_t place)
{
    return b->expected + (size_t)place * PLACE_BYTES;
}

static void place_check(struct bench *b, uint32_t place)
{
    if (memcmp(b->memory + (size_t)place * PLACE_BYTES, expected_at(b, place), PLACE_BYTES))
        fuzz_fail("place %u of the device does not hold what was written", place);
}

static void place_free(struct bench *b, uint32_t place)
{
    if (b->is_any_wild)
        return; /* until the end anything may still be written to it */
    if (b->place_state[place] == 2)
        memcpy(expected_at(b, place), b->memory + (size_t)place * PLACE_BYTES, PLACE_BYTES);
    else
        place_check(b, place);
    b->place_state[place] = 0;
}

/* From here on the peer may write anywhere on the device, but nowhere else. */
static void go_wild(struct bench *b, struct peer *peer)
{
    peer->is_wild = 1;
    b->is_any_wild = 1;
    memset(b->place_state, 2, sizeof b->place_state);
}

/* ---- what the target sends ---- */

static struct command *command_by_cid(struct peer *peer, uint16_t cid)
{
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        if (peer->commands[i].phase != PHASE_FREE && peer->commands[i].cid == cid)
            return &peer->commands[i];
    }
    return NULL;
}

static int is_payload_write(const struct command *command)
{
    return command->opcode == 1;
}

/* The command's one answer is here. */
static void answered(struct bench *b, struct peer *peer, struct command *command, uint16_t status)
{
    uint16_t expected = command->is_data_lost ? 0x22 : command->status;
    if (b->is_any_wild && command->opcode == 5 && status == 0x4285)
        expected = status; /* who knows what it was compared with */
    if (!peer->is_wild && status != expected)
        fuzz_fail("command %u (opcode 0x%02x) is answered with 0x%x, expected 0x%x", command->tag, command->opcode, status,
                  expected);
    if (!peer->is_wild && !status && command->opcode == 2 && command->got != command->len)
        fuzz_fail("a read succeeds after %u of %u bytes", command->got, command->len);
    if (!b->is_any_wild && !status && is_payload_write(command))
        memcpy(expected_at(b, command->place), pattern_of(command->tag), command->len);
    if (!b->is_any_wild && !status && command->opcode == 8)
        memset(expected_at(b, command->place), 0, command->len);
    if (command->place < PLACE_COUNT)
        place_free(b, command->place);
    command->phase = PHASE_FREE;
    fuzz_report.completed += !status;
}

static void saw_resp(struct bench *b, struct peer *peer)
{
    struct kvdev_cqe cqe;
    kvdev_cqe_load(peer->rx.head + 8, &cqe);
    struct command *command = command_by_cid(peer, cqe.cid);
    if (!command) {
        if (!peer->is_wild)
            fuzz_fail("a response for CID 0x%x, which is not outstanding", cqe.cid);
        return;
    }
    answered(b, peer, command, kvdev_cqe_status(&cqe));
}

static void saw_c2h(struct bench *b, struct peer *peer)
{
    const struct kvdev_pdu *pdu = &peer->rx.pdu;
    struct command *command = command_by_cid(peer, pdu->cccid);
    (void)b;
    peer->rx_index = COMMANDS_MAX;
    if (command && !peer->is_wild) {
        int is_control = peer->qid == 0;
        if ((command->opcode != 2 && !is_control) || pdu->datao != command->got || pdu->datal > command->len - command->got)
            fuzz_fail("C2HData nobody asked for: command %u, DATAO %u, DATAL %u of %u", command->tag, pdu->datao,
                      pdu->datal, command->len);
        peer->rx_index = (uint32_t)(command - peer->commands);
    } else if (!peer->is_wild) {
        fuzz_fail("C2HData for CID 0x%x, which is not outstanding", pdu->cccid);
    }
    kvdev_pdu_rx_set_payload(&peer->rx, pdu->datal <= sizeof peer->landing ? peer->landing : NULL);
}

static void saw_data(struct bench *b, struct peer *peer)
{
    const struct kvdev_pdu *pdu = &peer->rx.pdu;
    if (!peer->rx.ddgst_ok)
        fuzz_fail("the target sent a wrong data digest");
    if (peer->rx_index == COMMANDS_MAX)
        return;
    struct command *command = &peer->commands[peer->rx_index];
    if (peer->qid && !b->is_any_wild && memcmp(peer->landing, expected_at(b, command->place) + pdu->datao, pdu->datal))
        fuzz_fail("command %u: a read gives other bytes than were written", command->tag);
    command->got += pdu->datal;
    if (pdu->flags & KVDEV_PDU_FLAG_SUCCESS)
        answered(b, peer, command, 0);
}

static void saw_r2t(struct bench *b, struct peer *peer)
{
    const struct kvdev_pdu *pdu = &peer->rx.pdu;
    struct command *command = command_by_cid(peer, pdu->cccid);
    (void)b;
    if (peer->is_wild)
        return;
    if (!command || command->phase != PHASE_SENT || pdu->datao || pdu->datal != command->len)
        fuzz_fail("R2T for CID 0x%x at %u of %u bytes is not due", pdu->cccid, pdu->datao, pdu->datal);
    command->phase = PHASE_GRANTED;
    command->ttag = pdu->ttag;
    command->granted = pdu->datal;
}

static void saw_header(struct bench *b, struct peer *peer)
{
    switch (peer->rx.pdu.type) {
    case KVDEV_PDU_CAPSULE_RESP:
        saw_resp(b, peer);
        break;
    case KVDEV_PDU_C2H_DATA:
        saw_c2h(b, peer);
        break;
    case KVDEV_PDU_R2T:
        saw_r2t(b, peer);
        break;
    case KVDEV_PDU_C2H_TERM:
        peer->has_term = 1;
        if (peer->has_verdict)
            term_check(&peer->rx, &peer->verdict, &peer->wrong);
        else if (!peer->is_wild)
            fuzz_fail("C2HTermReq without cause: FES %u FEI 0x%x", peer->rx.pdu.fes, peer->rx.pdu.fei);
        break;
    default:
        break;
    }
}

static void look(struct bench *b, struct peer *peer)
{
    struct wire *wire = peer->wire;
    while (!peer->is_deaf && wire->tx_at < wire->tx_len) {
        size_t used = 0;
        if (peer->has_term)
            fuzz_fail("bytes behind a C2HTermReq");
        int event = kvdev_pdu_rx_step(&peer->rx, wire->tx + wire->tx_at, wire->tx_len - wire->tx_at, &used);
        wire->tx_at += used;
        if (event == KVDEV_PDU_FAULT) {
            char text[160];
            kvdev_pdu_fault_text(&peer->rx.fault, text, sizeof text);
            fuzz_fail("the target broke the protocol: %s", text);
        }
        if (event == KVDEV_PDU_HEADER)
            saw_header(b, peer);
        else if (event == KVDEV_PDU_DATA_DONE)
            saw_data(b, peer);
    }
    wire->tx_at = wire->tx_len = 0;
}

/* ---- what the peers send ---- */

static void put(struct bench *b, struct peer *peer, int is_mutated)
{
    fuzz_report.pdus++;
    wire_put(peer->wire, b->pdu.bytes, b->pdu.len, is_mutated);
}

static uint32_t outstanding(const struct peer *peer)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < COMMANDS_MAX; i++)
        count += peer->commands[i].phase != PHASE_FREE;
    return count;
}

static void build_capsule(struct bench *b, struct peer *peer, const struct kvdev_sqe *sqe, const uint8_t *data,
                          uint32_t data_len)
{
    uint8_t wire[KVDEV_SQE_BYTES];
    kvdev_sqe_store(sqe, wire);
    size_t head = kvdev_pdu_build_capsule_cmd(b->pdu.bytes, &peer->sender, wire, data_len);
    pdu_finish(&b->pdu, &peer->sender, head, data, data_len);
}

static struct command *command_new(struct bench *b, struct peer *peer)
{
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        struct command *command = &peer->commands[i];
        if (command->phase != PHASE_FREE)
            continue;
        memset(command, 0, sizeof *command);
        command->phase = PHASE_SENT;
        command->tag = ++b->tag_next;
        command->place = PLACE_COUNT;
        do
            command->cid = peer->cid_next++;
        while (peer->cid_next && command_by_cid(peer, command->cid) != command);
        fuzz_report.commands++;
        return command;
    }
    return NULL;
}

/* Admin: what the control thread will complete with success, data or none. */
static void build_control(struct bench *b, struct peer *peer, struct command *command)
{
    static const uint8_t opcodes[] = { 0x06, 0x06, 0x02, 0x0c, 0x09, 0x81 };
    struct kvdev_sqe sqe = { .flags = KVDEV_SQE_PSDT_SGL, .cid = command->cid, .sgl_type = KVDEV_SGL_TRANSPORT };
    sqe.opc = command->opcode = opcodes[below(b->source, sizeof opcodes)];
    if ((sqe.opc & 3) == 2)
        command->len = sqe.sgl_len = below(b->source, 2) ? 4096 : 4 * (1 + below(b->source, 8192));
    uint32_t data_len = 0;
    if (sqe.opc == 0x81) { /* Security Send: data to the controller */
        data_len = 4 * (1 + below(b->source, 1024));
        command->len = sqe.sgl_len = data_len;
        if (below(b->source, 2))
            sqe.sgl_type = KVDEV_SGL_IN_CAPSULE;
        else
            data_len = 0;
    }
    build_capsule(b, peer, &sqe, pattern_of(command->tag), data_len);
}

/* I/O whose answer is known before. */
static void build_io(struct bench *b, struct peer *peer, struct command *command)
{
    static const uint8_t opcodes[] = { 1, 1, 1, 2, 2, 2, 5, 8, 0, 0x7c };
    static const uint32_t counts[] = { 1, 1, 2, 8, 16, 33, 64, 72 };
    struct kvdev_sqe sqe = { .flags = KVDEV_SQE_PSDT_SGL, .cid = command->cid, .sgl_type = KVDEV_SGL_TRANSPORT };
    uint32_t lba_count = counts[below(b->source, 64) % (below(b->source, 6) ? 4u : 8u)];
    uint32_t start = below(b->source, PLACE_COUNT);
    for (uint32_t i = 0; i < PLACE_COUNT && command->place == PLACE_COUNT; i++) {
        if (!b->place_state[(start + i) % PLACE_COUNT] || b->is_any_wild)
            command->place = (start + i) % PLACE_COUNT;
    }
    sqe.opc = command->opcode = opcodes[below(b->source, sizeof opcodes)];
    sqe.nsid = below(b->source, 4) ? NSID_PLAIN : NSID_LENT;
    command->len = lba_count * BLOCK_BYTES;
    if (command->place == PLACE_COUNT) { /* all in use: nothing that touches one */
        sqe.opc = command->opcode = 0;
        lba_count = 1;
    } else {
        b->was_used[command->place] = 1;
        if (!b->is_any_wild)
            b->place_state[command->place] = 1;
    }
    sqe.cdw10 = command->place < PLACE_COUNT ? command->place * (PLACE_BYTES / BLOCK_BYTES) : 0;
    sqe.cdw12 = lba_count - 1;
    uint32_t whim = below(b->source, 24);
    if (whim == 0) {
        sqe.nsid = 3 + take(b->source);
        command->status = 0x400b;
    } else if (whim == 1 && sqe.opc && sqe.opc != 0x7c) {
        sqe.cdw10 = PLACE_COUNT * (PLACE_BYTES / BLOCK_BYTES) - lba_count + 1 + below(b->source, 256);
        command->status = 0x4080;
    }
    if (sqe.opc == 0x7c)
        command->status = 0x4001;
    int has_data = sqe.opc == 1 || sqe.opc == 2 || sqe.opc == 5;
    uint32_t data_len = 0;
    const uint8_t *data = pattern_of(command->tag);
    if (sqe.opc == 5 && command->place < PLACE_COUNT) /* it compares equal where it comes in the capsule */
        data = expected_at(b, command->place);
    if (has_data)
        sqe.sgl_len = command->len;
    if ((sqe.opc == 1 || sqe.opc == 5) && command->len <= peer->link.in_capsule_max && below(b->source, 2)) {
        data_len = command->len;
        sqe.sgl_type = KVDEV_SGL_IN_CAPSULE;
        command->sent = command->len;
    }
    build_capsule(b, peer, &sqe, data, data_len);
}

static struct command *start_command(struct bench *b, struct peer *peer)
{
    /* One entry of the queue stays empty (Base 3.3.2.1). */
    if (!peer->is_connected || outstanding(peer) + 1 >= peer->queue_entries || outstanding(peer) + 1 >= COMMANDS_MAX)
        return NULL;
    struct command *command = command_new(b, peer);
    if (!command)
        return NULL;
    if (peer->qid)
        build_io(b, peer, command);
    else
        build_control(b, peer, command);
    return command;
}

/* The next H2CData of a granted command into b->pdu; 0 if none is due. */
static int build_h2c(struct bench *b, struct peer *peer, struct command *command, int is_whole)
{
    uint32_t left = command->granted - command->sent;
    uint32_t len = left < MAXH2CDATA ? left : MAXH2CDATA;
    if (command->phase != PHASE_GRANTED || !left)
        return 0;
    if (!is_whole && below(b->source, 2))
        len = 4 * (1 + below(b->source, len / 4));
    const uint8_t *data = command->opcode == 5 ? expected_at(b, command->place) : pattern_of(command->tag);
    size_t head = kvdev_pdu_build_h2c_data(b->pdu.bytes, &peer->sender, command->cid, command->ttag, command->sent, len,
                                           len == left);
    pdu_finish(&b->pdu, &peer->sender, head, data + command->sent, len);
    return 1;
}

static struct command *pick_granted(struct bench *b, struct peer *peer)
{
    uint32_t start = below(b->source, COMMANDS_MAX);
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        struct command *command = &peer->commands[(start + i) % COMMANDS_MAX];
        if (command->phase == PHASE_GRANTED && command->sent < command->granted)
            return command;
    }
    return NULL;
}

/* One bit of the payload wrong under a data digest: that command fails, the connection goes on (C4). */
static int damage(struct bench *b, struct peer *peer, struct command *command)
{
    if (!peer->link.ddgst || !b->pdu.data_len || below(b->source, 16))
        return 0;
    b->pdu.bytes[b->pdu.data_at + below(b->source, b->pdu.data_len)] ^= 0x20;
    command->is_data_lost = 1;
    return 1;
}

static void put_legal(struct bench *b, struct peer *peer, struct command *command)
{
    int is_damaged = damage(b, peer, command);
    int is_decorated = below(b->source, 4) && pdu_decorate(&b->pdu, b->source, &peer->sender);
    put(b, peer, is_damaged || is_decorated);
}

static void legal_h2c(struct bench *b, struct peer *peer)
{
    struct command *command = pick_granted(b, peer);
    if (!command || !build_h2c(b, peer, command, 0))
        return;
    command->sent += b->pdu.data_len;
    if (is_payload_write(command) && !peer->is_wild)
        b->place_state[command->place] = 2; /* partly written until its answer, perhaps */
    put_legal(b, peer, command);
}

static void legal_command(struct bench *b, struct peer *peer)
{
    struct command *command = start_command(b, peer);
    if (command)
        put_legal(b, peer, command);
}

/* ---- named wrongs ---- */

static int wrong(struct verdict *verdict, uint16_t fes, uint32_t fei, uint32_t header_len)
{
    *verdict = (struct verdict){ .fes = fes, .fei = fei, .header_len = header_len };
    return 1;
}

static int wrong_h2c(struct bench *b, struct peer *peer, struct verdict *ret)
{
    struct command *command = pick_granted(b, peer);
    const struct kvdev_pdu_link *link = &peer->sender;
    if (!command || !build_h2c(b, peer, command, 1))
        return 0;
    uint32_t left = command->granted - command->sent;
    switch (below(b->source, 8)) {
    case 0: { /* D10: TTAG 0, beyond the table, or of no R2T */
        static const uint16_t ttags[] = { 0, QUEUE_DEPTH + 2, 0x7fff, 0xffff };
        pdu_set16(&b->pdu, link, 10, ttags[below(b->source, 4)]);
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 10, 24);
    }
    case 1:
        pdu_set16(&b->pdu, link, 8, (uint16_t)(command->cid + 1 + below(b->source, 65535)));
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 8, 24);
    case 2: /* a gap, or what was sent already */
        if (left < 8 && !command->sent)
            return 0;
        (void)kvdev_pdu_build_h2c_data(b->pdu.bytes, link, command->cid, command->ttag,
                                       left >= 8 ? command->sent + 4 : command->sent - 4, 4, 0);
        pdu_finish(&b->pdu, link, kvdev_pdu_build_h2c_data(b->pdu.bytes, link, command->cid, command->ttag,
                                                           left >= 8 ? command->sent + 4 : command->sent - 4, 4, 0),
                   pattern_of(0), 4);
        return wrong(ret, KVDEV_FES_SEQUENCE, 0, 24);
    case 3:
        pdu_set32(&b->pdu, link, 12, below(b->source, 2) ? command->granted : 0xfffffffc);
        return wrong(ret, KVDEV_FES_OUT_OF_RANGE, 0, 24);
    case 4: /* beyond MAXH2CDATA */
        pdu_finish(&b->pdu, link, kvdev_pdu_build_h2c_data(b->pdu.bytes, link, command->cid, command->ttag, command->sent,
                                                           MAXH2CDATA + 4, 0),
                   pattern_of(0), MAXH2CDATA + 4);
        return wrong(ret, KVDEV_FES_LIMIT, 0, 24);
    case 5:
        pdu_set32(&b->pdu, link, 16, below(b->source, 2) ? 0 : b->pdu.data_len + 1);
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 16, 24);
    case 6: /* LAST_PDU where it does not belong, or missing */
        b->pdu.bytes[1] ^= KVDEV_PDU_FLAG_LAST;
        pdu_seal(&b->pdu, link);
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 1, 24);
    default: /* DATAL is not what PLEN leaves */
        pdu_set32(&b->pdu, link, 16, b->pdu.data_len + 4);
        return wrong(ret, KVDEV_FES_INVALID_HEADER, 4, 24);
    }
}

/* In-capsule data beyond the limit. */
static int wrong_capsule(struct bench *b, struct peer *peer, struct verdict *ret)
{
    struct kvdev_sqe sqe = { .opc = 1, .flags = KVDEV_SQE_PSDT_SGL, .cid = 0xfff0, .nsid = NSID_PLAIN,
                             .sgl_type = KVDEV_SGL_IN_CAPSULE };
    uint32_t len = peer->link.in_capsule_max + 4 + 4 * below(b->source, 64);
    sqe.sgl_len = len;
    build_capsule(b, peer, &sqe, pattern_of(1), len);
    return wrong(ret, KVDEV_FES_INVALID_HEADER, 4, 72);
}

/* Everything the target still has of the account is over once it has seen something wrong. */
static void abandon(struct bench *b, struct peer *peer)
{
    peer->is_ending = 1;
    for (uint32_t i = 0; i < COMMANDS_MAX; i++) {
        struct command *command = &peer->commands[i];
        if (command->phase != PHASE_FREE && command->place < PLACE_COUNT && command->opcode != 2 && command->opcode != 5)
            b->place_state[command->place] = 2;
    }
}

static void violate(struct bench *b, struct peer *peer)
{
    struct verdict verdict;
    int is_wrong = 0;
    if (!peer->is_connected || peer->is_wild)
        return;
    switch (below(b->source, 3)) {
    case 0:
        is_wrong = wrong_h2c(b, peer, &verdict);
        break;
    case 1:
        is_wrong = below(b->source, 4) == 0 && wrong_capsule(b, peer, &verdict);
        break;
    default: {
        struct command *command = pick_granted(b, peer);
        if (command && below(b->source, 2)) {
            is_wrong = build_h2c(b, peer, command, 1);
        } else if ((command = start_command(b, peer)) != NULL) {
            /* It is never taken. */
            if (command->place < PLACE_COUNT && !b->is_any_wild)
                b->place_state[command->place] = 0;
            command->phase = PHASE_FREE;
            is_wrong = 1;
        }
        is_wrong = is_wrong && pdu_violate(&b->pdu, b->source, &peer->link, KVDEV_PDU_TARGET, &verdict);
        break;
    }
    }
    if (!is_wrong)
        return;
    fuzz_report.violations++;
    peer->verdict = verdict;
    peer->has_verdict = 1;
    memcpy(peer->wrong.bytes, b->pdu.bytes, KVDEV_PDU_BUILD_MAX);
    put(b, peer, 1);
    abandon(b, peer);
}

static void mutate(struct bench *b, struct peer *peer)
{
    struct command *command = pick_granted(b, peer);
    int is_new = !command || !build_h2c(b, peer, command, 1);
    if (is_new && !start_command(b, peer))
        return;
    if (!pdu_mutate(&b->pdu, b->source, &peer->link)) {
        if (is_new)
            put(b, peer, 0);
        return;
    }
    go_wild(b, peer);
    put(b, peer, 1);
}

/* ---- a connection's life ---- */

static void build_connect(struct bench *b, struct peer *peer, struct command *command)
{
    struct kvdev_sqe sqe = { .opc = 0x7f, .flags = KVDEV_SQE_PSDT_SGL, .cid = command->cid, .nsid = 1,
                             .sgl_type = KVDEV_SGL_IN_CAPSULE, .sgl_len = 1024 };
    command->opcode = 0x7f;
    build_capsule(b, peer, &sqe, pattern_of(command->tag), 1024);
}

static void open_peer(struct bench *b)
{
    static const uint8_t alignments[] = { 0, 0, 0, 1, 3, 7, 15, 31 };
    static const uint32_t patiences[] = { 0, 0, 1, 3, 6, 12, 24, 1000 };
    struct peer *peer = &b->peers[b->peer_count];
    struct kvdev_target_transport transport = { .max_io_size = 65536, .in_capsule_data_size = below(b->source, 2) ? 4096 : 0,
                                                .maxh2cdata = MAXH2CDATA, .queue_depth_max = QUEUE_DEPTH,
                                                .c2h_success = (uint8_t)below(b->source, 2),
                                                .cpda = alignments[below(b->source, 8)] };
    uint32_t digests = below(b->source, 16);
    transport.hdgst = (uint8_t)(digests & 1);
    transport.ddgst = (uint8_t)(digests >> 1 & 1);
    if (kvdev_target_set_transport(b->target, &transport))
        fuzz_fail("the transport is refused");
    struct kvdev_pdu_link asked = { .hdgst = (uint8_t)(digests >> 2 & 1), .ddgst = (uint8_t)(digests >> 3 & 1),
                                    .recv_pda = alignments[below(b->source, 8)], .maxr2t = below(b->source, 4) };
    memset(peer, 0, offsetof(struct peer, landing));
    peer->in_capsule_size = transport.in_capsule_data_size;
    peer->wire = wire_new(b->peer_count++, take(b->source));
    b->accept_due = 1;
    peer->qid = (uint8_t)(below(b->source, 4) != 0);
    peer->queue_entries = (uint16_t)(2 + below(b->source, QUEUE_DEPTH - 1));
    peer->cid_next = (uint16_t)take16(b->source);
    peer->patience = patiences[below(b->source, 8)];
    peer->rx_index = COMMANDS_MAX;
    /* The target's side as it will agree; ours mirrors it. */
    peer->link = (struct kvdev_pdu_link){ .hdgst = transport.hdgst && asked.hdgst, .ddgst = transport.ddgst && asked.ddgst,
                                          .recv_pda = transport.cpda, .send_pda = asked.recv_pda,
                                          .maxh2cdata = MAXH2CDATA, .in_capsule_max = KVDEV_PDU_IN_CAPSULE_ADMIN };
    if (kvdev_pdu_rx_init(&peer->rx, KVDEV_PDU_HOST, &asked))
        fuzz_fail("the peer's receiver does not start");
    peer->sender = peer->link;
    peer->sender.send_pda = transport.cpda;
    peer->sender.recv_pda = asked.recv_pda;
    pdu_finish(&b->pdu, &peer->link, kvdev_pdu_build_ic_req(b->pdu.bytes, &asked), NULL, 0);
    uint32_t whim = below(b->source, 16);
    int is_wrong = whim == 0 && pdu_violate_ic(&b->pdu, b->source, &asked, KVDEV_PDU_TARGET, &peer->verdict);
    if (whim == 1 && pdu_mutate(&b->pdu, b->source, &peer->link)) {
        go_wild(b, peer);
        peer->is_deaf = 1;
    }
    fuzz_report.violations += (uint64_t)is_wrong;
    fuzz_report.connections++;
    peer->has_verdict = peer->is_ending = (uint8_t)is_wrong;
    if (is_wrong)
        memcpy(peer->wrong.bytes, b->pdu.bytes, KVDEV_PDU_BUILD_MAX);
    put(b, peer, is_wrong || peer->is_wild);
    if (is_wrong)
        return;
    if (below(b->source, 2)) { /* Connect right behind it, glued */
        struct command *command = command_new(b, peer);
        build_connect(b, peer, command);
        put(b, peer, 0);
    }
}

static void close_peer(struct bench *b, struct peer *peer)
{
    peer->wire->end = below(b->source, 2) ? 1 : ECONNRESET;
    abandon(b, peer);
}

/* ---- the control thread's and the worker's work ---- */

static void complete(struct bench *b, uint64_t handle, const struct kvdev_target_event *event)
{
    struct kvdev_target_completion done = { .handle = handle };
    if (event && event->sqe[0] == 0x7f && event->controller < 0) {
        struct peer *peer = NULL;
        for (uint32_t i = 0; i < b->peer_count; i++) {
            struct command *command = command_by_cid(&b->peers[i], kvdev_load_le16(event->sqe + 2));
            if (event->connection == i + 1 && (command || b->peers[i].is_wild))
                peer = &b->peers[i];
        }
        if (peer) {
            done.action = KVDEV_TARGET_ACTION_BIND;
            done.qid = peer->qid;
            done.controller = b->controllers[peer - b->peers];
            done.sqsize = (uint16_t)(peer->queue_entries - 1);
            done.sq_flow_control_off = (uint8_t)(peer->cid_next & 1);
            peer->is_connected = 1;
            peer->link.in_capsule_max = peer->qid ? peer->in_capsule_size : KVDEV_PDU_IN_CAPSULE_ADMIN;
        }
    }
    if (kvdev_target_complete(b->target, &done))
        fuzz_fail("a completion is refused");
}

static int control_run(struct bench *b)
{
    struct kvdev_target_event events[4];
    uint32_t count = 0;
    if (!b->target->control.first && !b->target->control_closed_first)
        return 0;
    kvdev_target_control_wait(b->target, events, 4, 0, &count);
    for (uint32_t i = 0; i < count; i++) {
        if (events[i].type != KVDEV_TARGET_EVENT_CAPSULE)
            continue;
        uint8_t opcode = events[i].sqe[0];
        if (!b->is_finishing && opcode != 0x7f && b->held_count < HELD_MAX && below(b->source, 4) == 0)
            b->held[b->held_count++] = events[i].handle;
        else
            complete(b, events[i].handle, &events[i]);
    }
    return 1;
}

static int worker_run(struct bench *b)
{
    struct request *request = list_pop(&b->target->work);
    if (!request)
        return 0;
    command_execute(request);
    target_inbox_push(request->connection->poller, request);
    return 1;
}

/* ---- the poller's loop, seen from inside its epoll_wait ---- */

static int stop(struct bench *b)
{
    atomic_store(&b->target->stopping, 1);
    return 0;
}

static uint32_t ready(struct bench *b, struct epoll_event *events, uint32_t max)
{
    uint32_t count = 0;
    struct poller *poller = &b->target->pollers[0];
    if (atomic_load(&poller->inbox_pending) || atomic_load(&poller->scan))
        events[count++] = (struct epoll_event){ .events = EPOLLIN, .data.u64 = 1 };
    if (b->accept_due) {
        b->accept_due = 0;
        events[count++] = (struct epoll_event){ .events = EPOLLIN, .data.u64 = 2 };
    }
    for (uint32_t i = 0; i < b->peer_count && count < max; i++) {
        struct wire *wire = b->peers[i].wire;
        uint32_t bits = 0;
        if (!wire->is_open || !wire->is_watched)
            continue;
        if (wire_is_readable(wire))
            bits |= EPOLLIN;
        if (wire->watch.events & EPOLLOUT && wire->room)
            bits |= EPOLLOUT;
        if (bits)
            events[count++] = (struct epoll_event){ .events = bits, .data = wire->watch.data };
    }
    return count;
}

/* A connection that broke a rule must be told so and wait for its peer's end; then it ends. */
static void settled(struct bench *b, struct peer *peer)
{
    if (peer->has_verdict && peer->wire->room == WIRE_ROOM_UNLIMITED) {
        if (peer->verdict.fes && !peer->has_term)
            fuzz_fail("no C2HTermReq with FES %u FEI 0x%x was sent", peer->verdict.fes, peer->verdict.fei);
        if (peer->verdict.fes ? !peer->wire->is_shut : peer->wire->is_open)
            fuzz_fail("the connection goes on after a PDU wrong with FES %u FEI 0x%x", peer->verdict.fes, peer->verdict.fei);
    }
    if (peer->has_term || peer->wire->is_shut)
        peer->wire->end = 1;
    (void)b;
}

static int is_alive(const struct peer *peer)
{
    return peer->wire->is_open && !peer->is_ending && !peer->wire->end && !peer->wire->is_shut;
}

static void step(struct bench *b)
{
    static const size_t cuts[] = { 0, 0, 0, 1, 3, 24, 100, 1500 };
    struct peer *peer = &b->peers[below(b->source, b->peer_count)];
    uint32_t op = below(b->source, 64);
    if (!is_alive(peer)) {
        if (b->peer_count < PEERS_MAX)
            open_peer(b);
        return;
    }
    if (!peer->is_connected && !outstanding(peer)) {
        struct command *command = command_new(b, peer);
        build_connect(b, peer, command);
        put(b, peer, 0);
        return;
    }
    if (op >= 34 && op < 58 && peer->patience) {
        peer->patience--;
        op = below(b->source, 34);
    }
    if (op < 16) {
        legal_command(b, peer);
    } else if (op < 34) {
        legal_h2c(b, peer);
    } else if (op < 46) {
        violate(b, peer);
    } else if (op < 58) {
        mutate(b, peer);
    } else if (op < 59) {
        close_peer(b, peer);
    } else if (op < 60) {
        if (b->peer_count < PEERS_MAX)
            open_peer(b);
    } else if (op < 61) {
        peer->wire->cut_max = cuts[below(b->source, 8)];
        peer->wire->cut_is_random = (int)below(b->source, 2);
    } else if (op < 62) {
        peer->wire->room = below(b->source, 3) ? WIRE_ROOM_UNLIMITED : take16(b->source) % 3000;
    } else if (op < 63) {
        if (b->held_count)
            complete(b, b->held[--b->held_count], NULL);
    } else {
        wire_now_ns += take16(b->source) * 1000u;
    }
}

/* Everything that was begun legally is brought to its end; 1 while there is something to do. */
static int finish(struct bench *b)
{
    int has_moved = 0;
    b->is_finishing = 1;
    while (b->held_count) {
        complete(b, b->held[--b->held_count], NULL);
        has_moved = 1;
    }
    for (uint32_t i = 0; i < b->peer_count; i++) {
        struct peer *peer = &b->peers[i];
        peer->wire->cut_max = 0;
        if (peer->wire->room != WIRE_ROOM_UNLIMITED) {
            peer->wire->room = WIRE_ROOM_UNLIMITED;
            has_moved = 1;
        }
        struct command *command = is_alive(peer) && !peer->is_wild ? pick_granted(b, peer) : NULL;
        if (command && build_h2c(b, peer, command, 1)) {
            command->sent += b->pdu.data_len;
            put(b, peer, 0);
            has_moved = 1;
        }
    }
    return has_moved;
}

/* All is quiet: nothing of a living legal connection may be unanswered. Then the peers hang up. */
static int hang_up(struct bench *b)
{
    int was_open = 0;
    for (uint32_t i = 0; i < b->peer_count; i++) {
        struct peer *peer = &b->peers[i];
        if (is_alive(peer) && !peer->is_wild && outstanding(peer))
            fuzz_fail("%u commands of a legal connection are never answered", outstanding(peer));
        if (peer->wire->is_open && !peer->wire->end) {
            peer->wire->end = 1;
            abandon(b, peer);
            was_open = 1;
        }
    }
    return was_open;
}

static int turn(struct epoll_event *events, int max)
{
    struct bench *b = &bench;
    if (++b->turn_count > TURNS_MAX)
        fuzz_fail("the poller never comes to rest");
    for (;;) {
        for (uint32_t i = 0; i < b->peer_count; i++)
            look(b, &b->peers[i]);
        uint32_t count = ready(b, events, (uint32_t)max);
        if (count)
            return (int)count;
        if (worker_run(b) || control_run(b))
            continue;
        for (uint32_t i = 0; i < b->peer_count; i++)
            settled(b, &b->peers[i]);
        if (!source_is_over(b->source)) {
            uint32_t steps = 1 + below(b->source, 3); /* a few PDUs glued, or one by one */
            for (uint32_t i = 0; i < steps; i++)
                step(b);
            continue;
        }
        count = ready(b, events, (uint32_t)max);
        if (count)
            return (int)count;
        if (finish(b) || hang_up(b))
            continue;
        return stop(b);
    }
}

static void bench_open(struct bench *b)
{
    struct kvdev_target_opts opts = { .poller_count = 1, .worker_count = 1, .connections_max = PEERS_MAX, .subsystems_max = 1,
                                      .controllers_max = 2, .listeners_max = 1, .buffer_count = 2, .buffer_bytes = 65536,
                                      .connect_timeout_ms = 3600000, .linger_timeout_ms = 3600000 };
    uint32_t listener = 0;
    if (!b->device) { /* once: its content is carried on and known */
        if (kvdev_bdev_create_memory(BLOCK_BYTES, PLACE_COUNT * PLACE_BYTES / BLOCK_BYTES, 0, &b->device) ||
            kvdev_bdev_create_filter(b->device, &b->filter))
            fuzz_fail("no device");
        b->memory = kvdev_bdev_direct(b->device, 0, PLACE_COUNT * PLACE_BYTES);
        b->expected = malloc(PLACE_COUNT * PLACE_BYTES);
        memcpy(b->expected, b->memory, PLACE_COUNT * PLACE_BYTES);
    }
    if (kvdev_target_create(&opts, &b->target) || kvdev_target_subsystem_create(b->target, 2, &b->subsystem) ||
        kvdev_target_namespace_set(b->target, b->subsystem, NSID_PLAIN, b->device) ||
        kvdev_target_namespace_set(b->target, b->subsystem, NSID_LENT, b->filter) ||
        kvdev_target_listener_add(b->target, WIRE_FD_LISTENER, NULL, &listener))
        fuzz_fail("no target");
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        if (kvdev_target_controller_create(b->target, b->subsystem, i + 1, &b->controllers[i]) ||
            kvdev_target_controller_set_ready(b->target, b->controllers[i], 1))
            fuzz_fail("no controller");
    }
}

static void bench_close(struct bench *b)
{
    struct kvdev_target_poller_stat stat;
    if (kvdev_target_poller_stat_read(b->target, 0, &stat))
        fuzz_fail("no figures");
    if (stat.admin_qpairs_now || stat.io_qpairs_now || stat.unbound_now || b->target->pollers[0].buffer_count != 2)
        fuzz_fail("left over: %u admin, %u I/O, %u unbound connections, %u of 2 buffers free", stat.admin_qpairs_now,
                  stat.io_qpairs_now, stat.unbound_now, b->target->pollers[0].buffer_count);
    for (uint32_t i = 0; i < 2; i++) {
        if (atomic_load(&b->target->subsystems[b->subsystem].namespaces[i].outstanding))
            fuzz_fail("an operation on namespace %u never ends", i + 1);
    }
    for (uint32_t i = 0; i < b->peer_count; i++)
        fuzz_report.mutated += wire_mutated_taken(b->peers[i].wire);
    if (kvdev_target_destroy(b->target, 1))
        fuzz_fail("the target does not end");
    b->is_any_wild = 0;
    for (uint32_t i = 0; i < PLACE_COUNT; i++) {
        if (b->place_state[i] || b->was_used[i])
            place_free(b, i);
        b->was_used[i] = 0;
    }
    if (fuzz_report.inputs % 16 == 0) { /* and nothing was written beside them, in the last few inputs */
        for (uint32_t i = 0; i < PLACE_COUNT; i++)
            place_check(b, i);
    }
}

void fuzz_target(struct source *source)
{
    struct bench *b = &bench;
    b->source = source;
    b->peer_count = b->held_count = b->turn_count = b->tag_next = b->accept_due = 0;
    b->is_finishing = 0;
    bench_open(b);
    wire_epoll_turn = turn;
    open_peer(b);
    target_poller_main(&b->target->pollers[0]);
    bench_close(b);
    wires_reset();
}

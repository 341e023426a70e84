#include "pdu.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "crc32c.h"

#define COMMON_BYTES 8u
#define IC_BYTES 128u
#define TERM_BYTES 24u
#define PDA_MAX 31u

/* Offsets of fields in a PDU; they are the FEI of an invalid header field. */
enum {
    AT_TYPE = 0,
    AT_FLAGS = 1,
    AT_HLEN = 2,
    AT_PDO = 3,
    AT_PLEN = 4,
    AT_PFV = 8,
    AT_PDA = 10,
    AT_DGST = 11,
    AT_IC_MAX = 12,
    AT_FES = 8,
    AT_FEI = 10, /* four bytes, not aligned */
    AT_CCCID = 8,
    AT_TTAG = 10,
    AT_DATAO = 12,
    AT_DATAL = 16,
    AT_ENTRY = 8, /* SQE or CQE */
    AT_SQE_CID = 10,
    AT_CQE_CID = 20,
};

enum state { STATE_IDLE, STATE_HEAD, STATE_PAD, STATE_DATA, STATE_TAIL, STATE_FAULT };

/* ---- the rules ---- */

enum relation { EXACT, AT_LEAST, AT_MOST, MULTIPLE, BITS };

enum fei { FEI_ZERO, FEI_OFFSET, FEI_DIGEST };

struct rule {
    const char *name;
    const char *field;
    const char *note; /* said after the numbers, or NULL */
    uint8_t offset;
    uint8_t fes;
    uint8_t fei;
    uint8_t relation;
};

#define HEADER_ROW(name, field, offset, relation, note)                                                               \
    {name, field, note, offset, KVDEV_FES_INVALID_HEADER, FEI_OFFSET, relation}
#define OTHER_ROW(name, field, offset, fes, relation, note) {name, field, note, offset, fes, FEI_ZERO, relation}

static const struct rule rules[KVDEV_RULE_COUNT] = {
    [KVDEV_RULE_NONE] = OTHER_ROW("none", "", 0, KVDEV_FES_NONE, EXACT, NULL),
    [KVDEV_RULE_TYPE_UNKNOWN] = HEADER_ROW("type_unknown", "type", AT_TYPE, BITS, "no such PDU type"),
    [KVDEV_RULE_TYPE_DIRECTION] = HEADER_ROW("type_direction", "type", AT_TYPE, BITS, "not sent in this direction"),
    [KVDEV_RULE_IC_FIRST] =
        OTHER_ROW("ic_first", "type", AT_TYPE, KVDEV_FES_SEQUENCE, BITS, "before the connection is initialised"),
    [KVDEV_RULE_IC_TWICE] =
        OTHER_ROW("ic_twice", "type", AT_TYPE, KVDEV_FES_SEQUENCE, BITS, "the connection is already initialised"),
    [KVDEV_RULE_HLEN] = HEADER_ROW("hlen", "hlen", AT_HLEN, EXACT, NULL),
    [KVDEV_RULE_PLEN_SHORT] = HEADER_ROW("plen_short", "plen", AT_PLEN, AT_LEAST, NULL),
    [KVDEV_RULE_FLAG_HDGST] = HEADER_ROW("flag_hdgst", "flags", AT_FLAGS, BITS, "header digest flag"),
    [KVDEV_RULE_HDGST] = {"hdgst", "hdgst", "header digest", AT_TYPE, KVDEV_FES_HDGST, FEI_DIGEST, BITS},
    [KVDEV_RULE_PLEN] = HEADER_ROW("plen", "plen", AT_PLEN, EXACT, NULL),
    [KVDEV_RULE_PDO_SHORT] = HEADER_ROW("pdo_short", "pdo", AT_PDO, AT_LEAST, NULL),
    [KVDEV_RULE_PDO_ALIGN] = HEADER_ROW("pdo_align", "pdo", AT_PDO, MULTIPLE, NULL),
    [KVDEV_RULE_FLAG_DDGST] = HEADER_ROW("flag_ddgst", "flags", AT_FLAGS, BITS, "data digest flag"),
    [KVDEV_RULE_TERM_HLEN] = OTHER_ROW("term_hlen", "hlen", AT_HLEN, KVDEV_FES_NONE, EXACT, NULL),
    [KVDEV_RULE_TERM_PLEN] = OTHER_ROW("term_plen", "plen", AT_PLEN, KVDEV_FES_NONE, AT_MOST, "and at least 24"),

    [KVDEV_RULE_PFV] = {"pfv", "pfv", "PDU format version", AT_PFV, KVDEV_FES_UNSUPPORTED, FEI_OFFSET, EXACT},
    [KVDEV_RULE_PDA] = HEADER_ROW("pda", "pda", AT_PDA, AT_MOST, "PDU data alignment"),
    [KVDEV_RULE_DGST_UNREQUESTED] =
        HEADER_ROW("dgst_unrequested", "dgst", AT_DGST, BITS, "a digest enabled that was not asked for"),
    [KVDEV_RULE_MAXH2CDATA_MIN] = HEADER_ROW("maxh2cdata_min", "maxh2cdata", AT_IC_MAX, AT_LEAST, NULL),
    [KVDEV_RULE_MAXH2CDATA_ALIGN] = HEADER_ROW("maxh2cdata_align", "maxh2cdata", AT_IC_MAX, MULTIPLE, NULL),

    [KVDEV_RULE_DATAL_ZERO] = HEADER_ROW("datal_zero", "datal", AT_DATAL, AT_LEAST, NULL),
    [KVDEV_RULE_DATAL_ALIGN] = HEADER_ROW("datal_align", "datal", AT_DATAL, MULTIPLE, NULL),
    [KVDEV_RULE_DATAO_ALIGN] = HEADER_ROW("datao_align", "datao", AT_DATAO, MULTIPLE, NULL),
    [KVDEV_RULE_SUCCESS_NOT_LAST] = HEADER_ROW("success_not_last", "flags", AT_FLAGS, BITS, "SUCCESS without LAST_PDU"),
    [KVDEV_RULE_DATAL_MAXH2CDATA] =
        OTHER_ROW("datal_maxh2cdata", "datal", AT_DATAL, KVDEV_FES_LIMIT, AT_MOST, "MAXH2CDATA"),
    [KVDEV_RULE_IN_CAPSULE_MAX] =
        HEADER_ROW("in_capsule_max", "plen", AT_PLEN, AT_MOST, "bytes of in-capsule data"),

    [KVDEV_RULE_R2TL_ZERO] = OTHER_ROW("r2tl_zero", "r2tl", AT_DATAL, KVDEV_FES_OUT_OF_RANGE, AT_LEAST, NULL),
    [KVDEV_RULE_R2TL_ALIGN] = HEADER_ROW("r2tl_align", "r2tl", AT_DATAL, MULTIPLE, NULL),
    [KVDEV_RULE_R2TO_ALIGN] = HEADER_ROW("r2to_align", "r2to", AT_DATAO, MULTIPLE, NULL),

    [KVDEV_RULE_C2H_CCCID] = HEADER_ROW("c2h_cccid", "cccid", AT_CCCID, BITS, "no such command is outstanding"),
    [KVDEV_RULE_C2H_DIRECTION] = OTHER_ROW("c2h_direction", "cccid", AT_CCCID, KVDEV_FES_SEQUENCE, BITS,
                                           "the command moves no data to the host"),
    [KVDEV_RULE_C2H_AFTER_LAST] =
        OTHER_ROW("c2h_after_last", "cccid", AT_CCCID, KVDEV_FES_SEQUENCE, BITS, "data after LAST_PDU"),
    [KVDEV_RULE_C2H_RANGE] = OTHER_ROW("c2h_range", "datao", AT_DATAO, KVDEV_FES_OUT_OF_RANGE, AT_MOST,
                                       "end of the data in the command's buffer"),
    [KVDEV_RULE_C2H_DATAO] = OTHER_ROW("c2h_datao", "datao", AT_DATAO, KVDEV_FES_SEQUENCE, EXACT, NULL),
    [KVDEV_RULE_RESP_CID] = HEADER_ROW("resp_cid", "cid", AT_CQE_CID, BITS, "no such command is outstanding"),
    [KVDEV_RULE_R2T_CCCID] = HEADER_ROW("r2t_cccid", "cccid", AT_CCCID, BITS, "no such command is outstanding"),
    [KVDEV_RULE_R2T_DIRECTION] = OTHER_ROW("r2t_direction", "cccid", AT_CCCID, KVDEV_FES_SEQUENCE, BITS,
                                           "the command moves no data to the controller"),
    [KVDEV_RULE_R2T_RANGE] = OTHER_ROW("r2t_range", "r2to", AT_DATAO, KVDEV_FES_OUT_OF_RANGE, AT_MOST,
                                       "end of the data in the command's buffer"),
    [KVDEV_RULE_R2T_R2TO] = OTHER_ROW("r2t_r2to", "r2to", AT_DATAO, KVDEV_FES_SEQUENCE, EXACT, NULL),
    [KVDEV_RULE_R2T_LIMIT] = OTHER_ROW("r2t_limit", "cccid", AT_CCCID, KVDEV_FES_LIMIT, AT_MOST,
                                       "R2Ts outstanding for the command"),

    [KVDEV_RULE_H2C_TTAG] = HEADER_ROW("h2c_ttag", "ttag", AT_TTAG, BITS, "no R2T with this tag is outstanding"),
    [KVDEV_RULE_H2C_CCCID] = HEADER_ROW("h2c_cccid", "cccid", AT_CCCID, BITS, NULL),
    [KVDEV_RULE_H2C_RANGE] =
        OTHER_ROW("h2c_range", "datao", AT_DATAO, KVDEV_FES_OUT_OF_RANGE, AT_MOST, "end of the data asked for"),
    [KVDEV_RULE_H2C_DATAO] = OTHER_ROW("h2c_datao", "datao", AT_DATAO, KVDEV_FES_SEQUENCE, EXACT, NULL),
    [KVDEV_RULE_H2C_LAST_EARLY] =
        HEADER_ROW("h2c_last_early", "flags", AT_FLAGS, BITS, "LAST_PDU before the R2T's data is complete"),
    [KVDEV_RULE_H2C_LAST_MISSING] =
        HEADER_ROW("h2c_last_missing", "flags", AT_FLAGS, BITS, "the R2T's last data without LAST_PDU"),

    [KVDEV_RULE_CAPSULE_OVERRUN] = OTHER_ROW("capsule_overrun", "cid", AT_SQE_CID, KVDEV_FES_SEQUENCE, AT_MOST,
                                             "commands outstanding in the queue"),
};

static const struct rule *rule_row(int rule)
{
    if (rule <= KVDEV_RULE_NONE || rule >= KVDEV_RULE_COUNT || !rules[rule].name)
        return NULL;
    return &rules[rule];
}

const char *kvdev_pdu_rule_field(int rule)
{
    const struct rule *row = rule_row(rule);

    return row ? row->field : NULL;
}

const char *kvdev_pdu_rule_name(int rule)
{
    const struct rule *row = rule_row(rule);

    return row ? row->name : NULL;
}

const char *kvdev_pdu_type_name(int type)
{
    switch (type) {
    case KVDEV_PDU_IC_REQ:
        return "ICReq";
    case KVDEV_PDU_IC_RESP:
        return "ICResp";
    case KVDEV_PDU_H2C_TERM:
        return "H2CTermReq";
    case KVDEV_PDU_C2H_TERM:
        return "C2HTermReq";
    case KVDEV_PDU_CAPSULE_CMD:
        return "CapsuleCmd";
    case KVDEV_PDU_CAPSULE_RESP:
        return "CapsuleResp";
    case KVDEV_PDU_H2C_DATA:
        return "H2CData";
    case KVDEV_PDU_C2H_DATA:
        return "C2HData";
    case KVDEV_PDU_R2T:
        return "R2T";
    default:
        return "PDU";
    }
}

int kvdev_pdu_fault_set(struct kvdev_pdu_fault *fault, int rule, uint8_t pdu_type, uint64_t expected, uint64_t actual)
{
    const struct rule *row = rule_row(rule);

    memset(fault, 0, sizeof *fault);
    if (!row)
        return -EINVAL;
    fault->rule = (uint16_t)rule;
    fault->fes = row->fes;
    fault->fei = row->fei == FEI_OFFSET ? row->offset : row->fei == FEI_DIGEST ? (uint32_t)actual : 0;
    fault->expected = expected;
    fault->actual = actual;
    fault->pdu_type = pdu_type;
    fault->field_offset = row->offset;
    return -EPROTO;
}

size_t kvdev_pdu_fault_text(const struct kvdev_pdu_fault *fault, char *text, size_t size)
{
    static const char *const words[] = {
        [EXACT] = "", [AT_LEAST] = "at least ", [AT_MOST] = "at most ", [MULTIPLE] = "a multiple of "};
    const struct rule *row = rule_row(fault->rule);
    const char *open = "", *note = "", *close = "";
    int n;

    if (!size)
        return 0;
    if (!row) {
        text[0] = 0;
        return 0;
    }
    if (row->note) {
        open = " (";
        note = row->note;
        close = ")";
    }
    if (row->relation != BITS)
        n = snprintf(text, size, "%s %s+0x%x: expected %s%llu, got %llu%s%s%s", kvdev_pdu_type_name(fault->pdu_type),
                     row->field, row->offset, words[row->relation], (unsigned long long)fault->expected,
                     (unsigned long long)fault->actual, open, note, close);
    else if (fault->expected == fault->actual)
        n = snprintf(text, size, "%s %s+0x%x: got 0x%02llx%s%s%s", kvdev_pdu_type_name(fault->pdu_type), row->field,
                     row->offset, (unsigned long long)fault->actual, open, note, close);
    else
        n = snprintf(text, size, "%s %s+0x%x: expected 0x%02llx, got 0x%02llx%s%s%s",
                     kvdev_pdu_type_name(fault->pdu_type), row->field, row->offset,
                     (unsigned long long)fault->expected, (unsigned long long)fault->actual, open, note, close);
    if (n < 0) {
        text[0] = 0;
        return 0;
    }
    return (size_t)n < size ? (size_t)n : size - 1;
}

/* ---- what a type is ---- */

static uint32_t header_bytes(uint8_t type)
{
    switch (type) {
    case KVDEV_PDU_IC_REQ:
    case KVDEV_PDU_IC_RESP:
        return IC_BYTES;
    case KVDEV_PDU_CAPSULE_CMD:
        return 72;
    case KVDEV_PDU_H2C_TERM:
    case KVDEV_PDU_C2H_TERM:
    case KVDEV_PDU_CAPSULE_RESP:
    case KVDEV_PDU_H2C_DATA:
    case KVDEV_PDU_C2H_DATA:
    case KVDEV_PDU_R2T:
        return 24;
    default:
        return 0;
    }
}

static int is_for(uint8_t type, uint8_t role)
{
    switch (type) {
    case KVDEV_PDU_IC_REQ:
    case KVDEV_PDU_H2C_TERM:
    case KVDEV_PDU_CAPSULE_CMD:
    case KVDEV_PDU_H2C_DATA:
        return role == KVDEV_PDU_TARGET;
    default:
        return role == KVDEV_PDU_HOST;
    }
}

static int is_ic(uint8_t type)
{
    return type == KVDEV_PDU_IC_REQ || type == KVDEV_PDU_IC_RESP;
}

static int is_term(uint8_t type)
{
    return type == KVDEV_PDU_H2C_TERM || type == KVDEV_PDU_C2H_TERM;
}

static uint32_t digest_bytes(uint8_t enabled)
{
    return enabled ? KVDEV_PDU_DIGEST_BYTES : 0;
}

static uint32_t pda_bytes(uint8_t pda)
{
    return (pda + 1u) * 4;
}

/* ---- checks of one PDU ---- */

#define RETURN_FAULT(rule, expected, actual)                                                                          \
    return kvdev_pdu_fault_set(&rx->fault, (rule), rx->head[AT_TYPE], (expected), (actual))

/* The common header is here: is it a PDU we can take now, and how long is its header? */
static int check_common(struct kvdev_pdu_rx *rx)
{
    const uint8_t type = rx->head[AT_TYPE], flags = rx->head[AT_FLAGS], hlen = rx->head[AT_HLEN];
    const uint32_t plen = kvdev_load_le32(rx->head + AT_PLEN);
    const uint32_t own = header_bytes(type);
    uint32_t want;

    if (!own)
        RETURN_FAULT(KVDEV_RULE_TYPE_UNKNOWN, type, type);
    if (!is_for(type, rx->role))
        RETURN_FAULT(KVDEV_RULE_TYPE_DIRECTION, type, type);
    if (is_term(type)) { /* TCP 3.5: a Term PDU that is itself wrong is ignored, and the connection closed */
        if (hlen != TERM_BYTES)
            RETURN_FAULT(KVDEV_RULE_TERM_HLEN, TERM_BYTES, hlen);
        if (plen < TERM_BYTES || plen > TERM_BYTES + KVDEV_PDU_TERM_DATA_MAX)
            RETURN_FAULT(KVDEV_RULE_TERM_PLEN, TERM_BYTES + KVDEV_PDU_TERM_DATA_MAX, plen);
        rx->head_want = plen;
        return 0;
    }
    if (!rx->ic_done && !is_ic(type))
        RETURN_FAULT(KVDEV_RULE_IC_FIRST, type, type);
    if (rx->ic_done && is_ic(type))
        RETURN_FAULT(KVDEV_RULE_IC_TWICE, type, type);
    if (hlen != own)
        RETURN_FAULT(KVDEV_RULE_HLEN, own, hlen);
    want = own;
    if (!is_ic(type)) {
        if ((flags & KVDEV_PDU_FLAG_HDGST) != (rx->link.hdgst ? KVDEV_PDU_FLAG_HDGST : 0))
            RETURN_FAULT(KVDEV_RULE_FLAG_HDGST, rx->link.hdgst ? KVDEV_PDU_FLAG_HDGST : 0,
                         flags & KVDEV_PDU_FLAG_HDGST);
        want += digest_bytes(rx->link.hdgst);
    }
    if (plen < want)
        RETURN_FAULT(KVDEV_RULE_PLEN_SHORT, want, plen);
    rx->head_want = want;
    return 0;
}

static int check_ic(struct kvdev_pdu_rx *rx)
{
    struct kvdev_pdu *pdu = &rx->pdu;

    pdu->pfv = kvdev_load_le16(rx->head + AT_PFV);
    pdu->pda = rx->head[AT_PDA];
    pdu->dgst = rx->head[AT_DGST] & 3;
    pdu->max = kvdev_load_le32(rx->head + AT_IC_MAX);
    if (pdu->plen != IC_BYTES)
        RETURN_FAULT(KVDEV_RULE_PLEN, IC_BYTES, pdu->plen);
    if (pdu->pfv != 0)
        RETURN_FAULT(KVDEV_RULE_PFV, 0, pdu->pfv);
    if (pdu->pda > PDA_MAX)
        RETURN_FAULT(KVDEV_RULE_PDA, PDA_MAX, pdu->pda);
    if (rx->role == KVDEV_PDU_HOST) {
        const uint8_t asked = (uint8_t)((rx->link.hdgst ? 1 : 0) | (rx->link.ddgst ? 2 : 0));

        if (pdu->dgst & ~asked)
            RETURN_FAULT(KVDEV_RULE_DGST_UNREQUESTED, asked, pdu->dgst);
        if (pdu->max < KVDEV_PDU_MAXH2CDATA_MIN)
            RETURN_FAULT(KVDEV_RULE_MAXH2CDATA_MIN, KVDEV_PDU_MAXH2CDATA_MIN, pdu->max);
        if (pdu->max % 4)
            RETURN_FAULT(KVDEV_RULE_MAXH2CDATA_ALIGN, 4, pdu->max);
        rx->link.maxh2cdata = pdu->max;
    } else {
        rx->link.maxr2t = pdu->max;
    }
    rx->link.hdgst = rx->link.hdgst && (pdu->dgst & 1);
    rx->link.ddgst = rx->link.ddgst && (pdu->dgst & 2);
    rx->link.send_pda = pdu->pda;
    rx->ic_done = 1;
    return 0;
}

/* Where the data starts, and that its digest flag is as agreed; for every PDU that carries data. */
static int check_data_offset(struct kvdev_pdu_rx *rx, uint32_t head_bytes)
{
    const struct kvdev_pdu *pdu = &rx->pdu;
    const uint32_t align = pda_bytes(rx->link.recv_pda);
    const uint8_t flag = rx->link.ddgst ? KVDEV_PDU_FLAG_DDGST : 0;

    if ((pdu->flags & KVDEV_PDU_FLAG_DDGST) != flag)
        RETURN_FAULT(KVDEV_RULE_FLAG_DDGST, flag, pdu->flags & KVDEV_PDU_FLAG_DDGST);
    if (pdu->pdo < head_bytes)
        RETURN_FAULT(KVDEV_RULE_PDO_SHORT, head_bytes, pdu->pdo);
    if (pdu->pdo % align)
        RETURN_FAULT(KVDEV_RULE_PDO_ALIGN, align, pdu->pdo);
    rx->pad_left = pdu->pdo - head_bytes;
    return 0;
}

static int check_capsule_cmd(struct kvdev_pdu_rx *rx, uint32_t head_bytes)
{
    struct kvdev_pdu *pdu = &rx->pdu;
    const uint32_t tail = digest_bytes(rx->link.ddgst);

    pdu->cccid = kvdev_load_le16(rx->head + AT_SQE_CID);
    if (pdu->plen == head_bytes) { /* no data: PDO is reserved, no data digest */
        if (pdu->flags & KVDEV_PDU_FLAG_DDGST)
            RETURN_FAULT(KVDEV_RULE_FLAG_DDGST, 0, KVDEV_PDU_FLAG_DDGST);
        return 0;
    }
    if (check_data_offset(rx, head_bytes))
        return -EPROTO;
    if (pdu->plen <= pdu->pdo + tail)
        RETURN_FAULT(KVDEV_RULE_PLEN_SHORT, pdu->pdo + tail + 1, pdu->plen);
    pdu->data_len = pdu->plen - pdu->pdo - tail;
    if (pdu->data_len > rx->link.in_capsule_max)
        RETURN_FAULT(KVDEV_RULE_IN_CAPSULE_MAX, rx->link.in_capsule_max, pdu->data_len);
    return 0;
}

static int check_data(struct kvdev_pdu_rx *rx, uint32_t head_bytes)
{
    struct kvdev_pdu *pdu = &rx->pdu;
    uint64_t whole;

    pdu->cccid = kvdev_load_le16(rx->head + AT_CCCID);
    if (pdu->type == KVDEV_PDU_H2C_DATA)
        pdu->ttag = kvdev_load_le16(rx->head + AT_TTAG);
    pdu->datao = kvdev_load_le32(rx->head + AT_DATAO);
    pdu->datal = kvdev_load_le32(rx->head + AT_DATAL);
    if (check_data_offset(rx, head_bytes))
        return -EPROTO;
    if (pdu->datal == 0)
        RETURN_FAULT(KVDEV_RULE_DATAL_ZERO, 4, 0);
    if (pdu->datal % 4)
        RETURN_FAULT(KVDEV_RULE_DATAL_ALIGN, 4, pdu->datal);
    if (pdu->datao % 4)
        RETURN_FAULT(KVDEV_RULE_DATAO_ALIGN, 4, pdu->datao);
    whole = (uint64_t)pdu->pdo + pdu->datal + digest_bytes(rx->link.ddgst);
    if (pdu->plen != whole)
        RETURN_FAULT(KVDEV_RULE_PLEN, whole, pdu->plen);
    if (pdu->type == KVDEV_PDU_C2H_DATA) {
        if ((pdu->flags & KVDEV_PDU_FLAG_SUCCESS) && !(pdu->flags & KVDEV_PDU_FLAG_LAST))
            RETURN_FAULT(KVDEV_RULE_SUCCESS_NOT_LAST, KVDEV_PDU_FLAG_SUCCESS | KVDEV_PDU_FLAG_LAST,
                         pdu->flags & (KVDEV_PDU_FLAG_SUCCESS | KVDEV_PDU_FLAG_LAST));
    } else if (pdu->datal > rx->link.maxh2cdata) {
        RETURN_FAULT(KVDEV_RULE_DATAL_MAXH2CDATA, rx->link.maxh2cdata, pdu->datal);
    }
    pdu->data_len = pdu->datal;
    return 0;
}

static int check_r2t(struct kvdev_pdu_rx *rx, uint32_t head_bytes)
{
    struct kvdev_pdu *pdu = &rx->pdu;

    pdu->cccid = kvdev_load_le16(rx->head + AT_CCCID);
    pdu->ttag = kvdev_load_le16(rx->head + AT_TTAG);
    pdu->datao = kvdev_load_le32(rx->head + AT_DATAO);
    pdu->datal = kvdev_load_le32(rx->head + AT_DATAL);
    if (pdu->plen != head_bytes)
        RETURN_FAULT(KVDEV_RULE_PLEN, head_bytes, pdu->plen);
    if (pdu->datal == 0)
        RETURN_FAULT(KVDEV_RULE_R2TL_ZERO, 4, 0);
    if (pdu->datal % 4)
        RETURN_FAULT(KVDEV_RULE_R2TL_ALIGN, 4, pdu->datal);
    if (pdu->datao % 4)
        RETURN_FAULT(KVDEV_RULE_R2TO_ALIGN, 4, pdu->datao);
    return 0;
}

/* B6: reserved bits are no fault, but worth counting. */
static int has_reserved_bits(const struct kvdev_pdu_rx *rx)
{
    const uint8_t *head = rx->head;

    switch (head[AT_TYPE]) {
    case KVDEV_PDU_IC_REQ:
    case KVDEV_PDU_IC_RESP:
        return head[AT_FLAGS] != 0 || (head[AT_DGST] & ~3) != 0;
    case KVDEV_PDU_CAPSULE_CMD:
        return (head[AT_FLAGS] & ~(KVDEV_PDU_FLAG_HDGST | KVDEV_PDU_FLAG_DDGST)) != 0;
    case KVDEV_PDU_CAPSULE_RESP:
        return (head[AT_FLAGS] & ~KVDEV_PDU_FLAG_HDGST) != 0;
    case KVDEV_PDU_R2T:
        return (head[AT_FLAGS] & ~KVDEV_PDU_FLAG_HDGST) != 0 || kvdev_load_le32(head + 20) != 0;
    case KVDEV_PDU_H2C_DATA:
        return (head[AT_FLAGS] & 0xf8) != 0 || kvdev_load_le32(head + 20) != 0;
    case KVDEV_PDU_C2H_DATA:
        return (head[AT_FLAGS] & 0xf0) != 0 || kvdev_load_le16(head + 10) != 0 || kvdev_load_le32(head + 20) != 0;
    default:
        return 0;
    }
}

/* The whole header is here, with its digest: digest first, then meaning. */
static int check_header(struct kvdev_pdu_rx *rx)
{
    struct kvdev_pdu *pdu = &rx->pdu;
    const uint8_t type = rx->head[AT_TYPE], hlen = rx->head[AT_HLEN];
    const uint32_t head_bytes = rx->head_want;
    int error = 0;

    memset(pdu, 0, sizeof *pdu);
    pdu->type = type;
    pdu->flags = rx->head[AT_FLAGS];
    pdu->hlen = hlen;
    pdu->pdo = rx->head[AT_PDO];
    pdu->plen = kvdev_load_le32(rx->head + AT_PLEN);
    rx->pad_left = 0;
    if (is_term(type)) {
        pdu->fes = kvdev_load_le16(rx->head + AT_FES);
        pdu->fei = kvdev_load_le32(rx->head + AT_FEI);
        pdu->term_data_len = (uint16_t)(pdu->plen - TERM_BYTES);
        return 0;
    }
    rx->head_len = hlen;
    if (head_bytes > hlen) {
        const uint32_t expected = kvdev_crc32c(0, rx->head, hlen);
        const uint32_t actual = kvdev_load_le32(rx->head + hlen);

        if (expected != actual)
            RETURN_FAULT(KVDEV_RULE_HDGST, expected, actual);
    }
    switch (type) {
    case KVDEV_PDU_IC_REQ:
    case KVDEV_PDU_IC_RESP:
        error = check_ic(rx);
        break;
    case KVDEV_PDU_CAPSULE_CMD:
        error = check_capsule_cmd(rx, head_bytes);
        break;
    case KVDEV_PDU_CAPSULE_RESP:
        pdu->cccid = kvdev_load_le16(rx->head + AT_CQE_CID);
        if (pdu->plen != head_bytes)
            RETURN_FAULT(KVDEV_RULE_PLEN, head_bytes, pdu->plen);
        break;
    case KVDEV_PDU_H2C_DATA:
    case KVDEV_PDU_C2H_DATA:
        error = check_data(rx, head_bytes);
        break;
    default:
        error = check_r2t(rx, head_bytes);
        break;
    }
    if (!error && has_reserved_bits(rx))
        rx->reserved_count++;
    return error;
}

/* ---- the machine ---- */

int kvdev_pdu_rx_init_agreed(struct kvdev_pdu_rx *rx, int role, const struct kvdev_pdu_link *link)
{
    int error = kvdev_pdu_rx_init(rx, role, link);

    if (!error)
        rx->ic_done = 1;
    return error;
}

int kvdev_pdu_rx_init(struct kvdev_pdu_rx *rx, int role, const struct kvdev_pdu_link *link)
{
    if ((role != KVDEV_PDU_HOST && role != KVDEV_PDU_TARGET) || link->recv_pda > PDA_MAX || link->send_pda > PDA_MAX)
        return -EINVAL;
    if (role == KVDEV_PDU_TARGET && (link->maxh2cdata < KVDEV_PDU_MAXH2CDATA_MIN || link->maxh2cdata % 4))
        return -EINVAL;
    memset(rx, 0, sizeof *rx);
    rx->link = *link;
    rx->role = (uint8_t)role;
    rx->state = STATE_IDLE;
    return 0;
}

void kvdev_pdu_rx_fail(struct kvdev_pdu_rx *rx, const struct kvdev_pdu_fault *fault)
{
    if (rx->state == STATE_FAULT)
        return; /* the first one is what the peer is told */
    rx->fault = *fault;
    rx->state = STATE_FAULT;
    rx->payload = NULL;
}

static int data_done(struct kvdev_pdu_rx *rx)
{
    rx->state = STATE_IDLE;
    rx->payload = NULL;
    return KVDEV_PDU_DATA_DONE;
}

/* Header, digest and padding are in: give the event, and be ready for what follows. */
static int give_header(struct kvdev_pdu_rx *rx)
{
    rx->payload = NULL;
    rx->data_left = rx->pdu.data_len;
    rx->ddgst_expected = 0;
    rx->ddgst_actual = 0;
    rx->ddgst_ok = 1;
    rx->tail_len = 0;
    rx->state = rx->data_left ? STATE_DATA : STATE_IDLE;
    rx->pdu_count++;
    return KVDEV_PDU_HEADER;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Collect header bytes; 1 when the state moved on, 0 when more are needed, -EPROTO. */
static int take_head(struct kvdev_pdu_rx *rx, const uint8_t *buf, size_t len, size_t *used)
{
    const size_t n = smaller(rx->head_want - rx->head_len, len);

    memcpy(rx->head + rx->head_len, buf, n);
    rx->head_len += (uint32_t)n;
    *used += n;
    if (rx->head_len < rx->head_want)
        return 0;
    if (rx->head_want == COMMON_BYTES) /* every header is longer, so this is the first stop */
        return check_common(rx) ? -EPROTO : 1;
    if (check_header(rx))
        return -EPROTO;
    rx->state = STATE_PAD;
    return 1;
}

static int take_data(struct kvdev_pdu_rx *rx, const uint8_t *buf, size_t len, size_t *used)
{
    const size_t n = smaller(rx->data_left, len);

    /* These bytes came in one receive with a header; the rest is received in place. */
    if (rx->payload) {
        memcpy(rx->payload, buf, n);
        rx->payload += n;
    }
    if (rx->link.ddgst)
        rx->ddgst_expected = kvdev_crc32c(rx->ddgst_expected, buf, n);
    rx->data_left -= (uint32_t)n;
    *used += n;
    return rx->data_left == 0;
}

static int take_tail(struct kvdev_pdu_rx *rx, const uint8_t *buf, size_t len, size_t *used)
{
    const size_t n = smaller(sizeof rx->tail - rx->tail_len, len);

    memcpy(rx->tail + rx->tail_len, buf, n);
    rx->tail_len += (uint32_t)n;
    *used += n;
    if (rx->tail_len < sizeof rx->tail)
        return 0;
    rx->ddgst_actual = kvdev_load_le32(rx->tail);
    rx->ddgst_ok = rx->ddgst_actual == rx->ddgst_expected;
    return 1;
}

int kvdev_pdu_rx_step(struct kvdev_pdu_rx *rx, const uint8_t *buf, size_t len, size_t *consumed)
{
    size_t used = 0;
    int moved;

    *consumed = 0;
    if (rx->state == STATE_FAULT)
        return KVDEV_PDU_FAULT;
    while (used < len) {
        switch (rx->state) {
        case STATE_IDLE:
            rx->head_len = 0;
            rx->head_want = COMMON_BYTES;
            rx->state = STATE_HEAD;
            continue;
        case STATE_HEAD:
            moved = take_head(rx, buf + used, len - used, &used);
            *consumed = used;
            if (moved < 0) {
                rx->state = STATE_FAULT;
                return KVDEV_PDU_FAULT;
            }
            if (rx->state == STATE_PAD && !rx->pad_left)
                return give_header(rx);
            continue;
        case STATE_PAD: {
            const uint32_t n = (uint32_t)smaller(rx->pad_left, len - used);

            rx->pad_left -= n;
            used += n;
            *consumed = used;
            if (!rx->pad_left)
                return give_header(rx);
            continue;
        }
        case STATE_DATA:
            moved = take_data(rx, buf + used, len - used, &used);
            *consumed = used;
            if (!moved)
                continue;
            if (!rx->link.ddgst)
                return data_done(rx);
            rx->state = STATE_TAIL;
            continue;
        case STATE_TAIL:
            moved = take_tail(rx, buf + used, len - used, &used);
            *consumed = used;
            if (moved)
                return data_done(rx);
            continue;
        default:
            return KVDEV_PDU_FAULT;
        }
    }
    return KVDEV_PDU_NEED_MORE;
}

void kvdev_pdu_rx_set_payload(struct kvdev_pdu_rx *rx, void *dst)
{
    if (rx->state == STATE_DATA)
        rx->payload = dst;
}

size_t kvdev_pdu_rx_payload_want(const struct kvdev_pdu_rx *rx, uint8_t **dst, size_t *len)
{
    if (rx->state != STATE_DATA || !rx->payload) {
        *dst = NULL;
        *len = 0;
        return 0;
    }
    *dst = rx->payload;
    *len = rx->data_left;
    return rx->data_left;
}

int kvdev_pdu_rx_payload_landed(struct kvdev_pdu_rx *rx, size_t n)
{
    if (rx->state != STATE_DATA || !rx->payload || n == 0)
        return KVDEV_PDU_NEED_MORE;
    n = smaller(n, rx->data_left);
    if (rx->link.ddgst)
        rx->ddgst_expected = kvdev_crc32c(rx->ddgst_expected, rx->payload, n);
    rx->payload += n;
    rx->data_left -= (uint32_t)n;
    if (rx->data_left)
        return KVDEV_PDU_NEED_MORE;
    if (!rx->link.ddgst)
        return data_done(rx);
    rx->state = STATE_TAIL;
    return KVDEV_PDU_NEED_MORE;
}

/* ---- rules against commands ---- */

int kvdev_pdu_cmd_c2h(struct kvdev_pdu_cmd *cmd, const struct kvdev_pdu *pdu, struct kvdev_pdu_fault *fault)
{
    const uint64_t end = (uint64_t)pdu->datao + pdu->datal;

    if (!cmd)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_C2H_CCCID, pdu->type, pdu->cccid, pdu->cccid);
    if (cmd->direction != KVDEV_DIR_C2H)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_C2H_DIRECTION, pdu->type, pdu->cccid, pdu->cccid);
    if (cmd->last_seen)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_C2H_AFTER_LAST, pdu->type, pdu->cccid, pdu->cccid);
    if (end > cmd->length)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_C2H_RANGE, pdu->type, cmd->length, end);
    if (pdu->datao != cmd->received)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_C2H_DATAO, pdu->type, cmd->received, pdu->datao);
    cmd->received = (uint32_t)end;
    if (pdu->flags & KVDEV_PDU_FLAG_LAST)
        cmd->last_seen = 1;
    return 0;
}

int kvdev_pdu_cmd_r2t(struct kvdev_pdu_cmd *cmd, const struct kvdev_pdu *pdu, uint32_t maxr2t,
                      struct kvdev_pdu_fault *fault)
{
    const uint64_t end = (uint64_t)pdu->datao + pdu->datal;

    if (!cmd)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2T_CCCID, pdu->type, pdu->cccid, pdu->cccid);
    if (cmd->direction != KVDEV_DIR_H2C)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2T_DIRECTION, pdu->type, pdu->cccid, pdu->cccid);
    if (cmd->r2t_count > maxr2t)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2T_LIMIT, pdu->type, (uint64_t)maxr2t + 1,
                                   (uint64_t)cmd->r2t_count + 1);
    if (pdu->datal == 0) /* the machine refuses it before; not to depend on that */
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2TL_ZERO, pdu->type, 4, 0);
    if (end > cmd->length)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2T_RANGE, pdu->type, cmd->length, end);
    if (pdu->datao != cmd->requested)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_R2T_R2TO, pdu->type, cmd->requested, pdu->datao);
    cmd->requested = (uint32_t)end;
    cmd->r2t_count++;
    return 0;
}

int kvdev_pdu_cmd_is_complete(const struct kvdev_pdu_cmd *cmd)
{
    return cmd->direction != KVDEV_DIR_C2H || cmd->received == cmd->length;
}

int32_t kvdev_pdu_ttag_index(uint16_t ttag, uint32_t count)
{
    return ttag >= 1 && ttag <= count ? ttag - 1 : -1;
}

int kvdev_pdu_r2t_h2c(struct kvdev_pdu_r2t *r2t, const struct kvdev_pdu *pdu, struct kvdev_pdu_fault *fault)
{
    const uint64_t end = (uint64_t)pdu->datao + pdu->datal;
    const int is_last = (pdu->flags & KVDEV_PDU_FLAG_LAST) != 0;
    uint64_t next, limit;

    if (!r2t || !r2t->active)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_TTAG, pdu->type, pdu->ttag, pdu->ttag);
    if (pdu->cccid != r2t->cccid)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_CCCID, pdu->type, r2t->cccid, pdu->cccid);
    next = (uint64_t)r2t->offset + r2t->received;
    limit = (uint64_t)r2t->offset + r2t->length;
    if (end > limit)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_RANGE, pdu->type, limit, end);
    if (pdu->datao != next)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_DATAO, pdu->type, next, pdu->datao);
    if (is_last && end < limit)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_LAST_EARLY, pdu->type, 0, KVDEV_PDU_FLAG_LAST);
    if (!is_last && end == limit)
        return kvdev_pdu_fault_set(fault, KVDEV_RULE_H2C_LAST_MISSING, pdu->type, KVDEV_PDU_FLAG_LAST, 0);
    r2t->received += pdu->datal;
    if (is_last)
        r2t->active = 0;
    return 0;
}

/* ---- building ---- */

static void build_common(uint8_t *buf, uint8_t type, uint8_t flags, uint32_t hlen, uint32_t pdo, uint32_t plen)
{
    buf[AT_TYPE] = type;
    buf[AT_FLAGS] = flags;
    buf[AT_HLEN] = (uint8_t)hlen;
    buf[AT_PDO] = (uint8_t)pdo;
    kvdev_store_le32(buf + AT_PLEN, plen);
}

/* Bytes up to the data: header, digest, padding to the alignment the peer asked for. At most 128. */
static uint32_t data_offset(const struct kvdev_pdu_link *link, uint32_t hlen)
{
    const uint32_t align = pda_bytes(link->send_pda & PDA_MAX);

    return (hlen + digest_bytes(link->hdgst) + align - 1) / align * align;
}

/* Add the header's digest and zero padding up to `end`. */
static size_t seal(uint8_t *buf, const struct kvdev_pdu_link *link, uint32_t hlen, uint32_t end)
{
    uint32_t at = hlen;

    if (link->hdgst) {
        kvdev_store_le32(buf + hlen, kvdev_crc32c(0, buf, hlen));
        at += KVDEV_PDU_DIGEST_BYTES;
    }
    if (end > at)
        memset(buf + at, 0, end - at);
    return end > at ? end : at;
}

static uint8_t hdgst_flag(const struct kvdev_pdu_link *link)
{
    return link->hdgst ? KVDEV_PDU_FLAG_HDGST : 0;
}

static uint8_t ddgst_flag(const struct kvdev_pdu_link *link)
{
    return link->ddgst ? KVDEV_PDU_FLAG_DDGST : 0;
}

static size_t build_ic(uint8_t *buf, uint8_t type, const struct kvdev_pdu_link *link, uint32_t max)
{
    memset(buf, 0, IC_BYTES);
    build_common(buf, type, 0, IC_BYTES, 0, IC_BYTES);
    buf[AT_PDA] = link->recv_pda;
    buf[AT_DGST] = (uint8_t)((link->hdgst ? 1 : 0) | (link->ddgst ? 2 : 0));
    kvdev_store_le32(buf + AT_IC_MAX, max);
    return IC_BYTES;
}

size_t kvdev_pdu_build_ic_req(uint8_t *buf, const struct kvdev_pdu_link *link)
{
    return build_ic(buf, KVDEV_PDU_IC_REQ, link, link->maxr2t);
}

size_t kvdev_pdu_build_ic_resp(uint8_t *buf, const struct kvdev_pdu_link *link)
{
    return build_ic(buf, KVDEV_PDU_IC_RESP, link, link->maxh2cdata);
}

size_t kvdev_pdu_build_capsule_cmd(uint8_t *buf, const struct kvdev_pdu_link *link, const uint8_t *sqe,
                                   uint32_t data_len)
{
    const uint32_t bare = 72 + digest_bytes(link->hdgst);
    const uint32_t pdo = data_len ? data_offset(link, 72) : 0;

    memcpy(buf + AT_ENTRY, sqe, KVDEV_SQE_BYTES);
    if (data_len)
        build_common(buf, KVDEV_PDU_CAPSULE_CMD, hdgst_flag(link) | ddgst_flag(link), 72, pdo,
                     pdo + data_len + digest_bytes(link->ddgst));
    else
        build_common(buf, KVDEV_PDU_CAPSULE_CMD, hdgst_flag(link), 72, 0, bare);
    return seal(buf, link, 72, pdo);
}

size_t kvdev_pdu_build_capsule_resp(uint8_t *buf, const struct kvdev_pdu_link *link, const uint8_t *cqe)
{
    memcpy(buf + AT_ENTRY, cqe, KVDEV_CQE_BYTES);
    build_common(buf, KVDEV_PDU_CAPSULE_RESP, hdgst_flag(link), 24, 0, 24 + digest_bytes(link->hdgst));
    return seal(buf, link, 24, 0);
}

static size_t build_data(uint8_t *buf, const struct kvdev_pdu_link *link, uint8_t type, uint8_t flags, uint16_t cccid,
                         uint16_t ttag, uint32_t datao, uint32_t datal)
{
    const uint32_t pdo = data_offset(link, 24);

    build_common(buf, type, (uint8_t)(flags | hdgst_flag(link) | ddgst_flag(link)), 24, pdo,
                 pdo + datal + digest_bytes(link->ddgst));
    kvdev_store_le16(buf + AT_CCCID, cccid);
    kvdev_store_le16(buf + AT_TTAG, ttag);
    kvdev_store_le32(buf + AT_DATAO, datao);
    kvdev_store_le32(buf + AT_DATAL, datal);
    kvdev_store_le32(buf + 20, 0);
    return seal(buf, link, 24, pdo);
}

size_t kvdev_pdu_build_h2c_data(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid, uint16_t ttag,
                                uint32_t datao, uint32_t datal, int is_last)
{
    return build_data(buf, link, KVDEV_PDU_H2C_DATA, is_last ? KVDEV_PDU_FLAG_LAST : 0, cccid, ttag, datao, datal);
}

size_t kvdev_pdu_build_c2h_data(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid, uint32_t datao,
                                uint32_t datal, uint8_t flags)
{
    return build_data(buf, link, KVDEV_PDU_C2H_DATA, flags & (KVDEV_PDU_FLAG_LAST | KVDEV_PDU_FLAG_SUCCESS), cccid, 0,
                      datao, datal);
}

size_t kvdev_pdu_build_r2t(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid, uint16_t ttag,
                           uint32_t r2to, uint32_t r2tl)
{
    build_common(buf, KVDEV_PDU_R2T, hdgst_flag(link), 24, 0, 24 + digest_bytes(link->hdgst));
    kvdev_store_le16(buf + AT_CCCID, cccid);
    kvdev_store_le16(buf + AT_TTAG, ttag);
    kvdev_store_le32(buf + AT_DATAO, r2to);
    kvdev_store_le32(buf + AT_DATAL, r2tl);
    kvdev_store_le32(buf + 20, 0);
    return seal(buf, link, 24, 0);
}

size_t kvdev_pdu_build_term(uint8_t *buf, const struct kvdev_pdu_rx *rx, const struct kvdev_pdu_fault *fault)
{
    const uint32_t data_len = (uint32_t)smaller(rx->head_len, KVDEV_PDU_TERM_DATA_MAX);

    if (fault->fes == KVDEV_FES_NONE)
        return 0;
    memset(buf, 0, TERM_BYTES);
    build_common(buf, rx->role == KVDEV_PDU_HOST ? KVDEV_PDU_H2C_TERM : KVDEV_PDU_C2H_TERM, 0, TERM_BYTES, 0,
                 TERM_BYTES + data_len);
    kvdev_store_le16(buf + AT_FES, fault->fes);
    kvdev_store_le32(buf + AT_FEI, fault->fei);
    memcpy(buf + TERM_BYTES, rx->head, data_len);
    return TERM_BYTES + data_len;
}

void kvdev_pdu_build_ddgst(uint8_t *buf, uint32_t crc)
{
    kvdev_store_le32(buf, crc);
}

/* ---- queue entries ---- */

void kvdev_sqe_load(const uint8_t *wire, struct kvdev_sqe *ret)
{
    ret->opc = wire[0];
    ret->flags = wire[1];
    ret->cid = kvdev_load_le16(wire + 2);
    ret->nsid = kvdev_load_le32(wire + 4);
    ret->cdw2 = kvdev_load_le32(wire + 8);
    ret->cdw3 = kvdev_load_le32(wire + 12);
    ret->mptr = kvdev_load_le64(wire + 16);
    ret->sgl_addr = kvdev_load_le64(wire + 24);
    ret->sgl_len = kvdev_load_le32(wire + 32);
    memcpy(ret->sgl_reserved, wire + 36, sizeof ret->sgl_reserved);
    ret->sgl_type = wire[39];
    ret->cdw10 = kvdev_load_le32(wire + 40);
    ret->cdw11 = kvdev_load_le32(wire + 44);
    ret->cdw12 = kvdev_load_le32(wire + 48);
    ret->cdw13 = kvdev_load_le32(wire + 52);
    ret->cdw14 = kvdev_load_le32(wire + 56);
    ret->cdw15 = kvdev_load_le32(wire + 60);
}

void kvdev_sqe_store(const struct kvdev_sqe *sqe, uint8_t *wire)
{
    wire[0] = sqe->opc;
    wire[1] = sqe->flags;
    kvdev_store_le16(wire + 2, sqe->cid);
    kvdev_store_le32(wire + 4, sqe->nsid);
    kvdev_store_le32(wire + 8, sqe->cdw2);
    kvdev_store_le32(wire + 12, sqe->cdw3);
    kvdev_store_le64(wire + 16, sqe->mptr);
    kvdev_store_le64(wire + 24, sqe->sgl_addr);
    kvdev_store_le32(wire + 32, sqe->sgl_len);
    memcpy(wire + 36, sqe->sgl_reserved, sizeof sqe->sgl_reserved);
    wire[39] = sqe->sgl_type;
    kvdev_store_le32(wire + 40, sqe->cdw10);
    kvdev_store_le32(wire + 44, sqe->cdw11);
    kvdev_store_le32(wire + 48, sqe->cdw12);
    kvdev_store_le32(wire + 52, sqe->cdw13);
    kvdev_store_le32(wire + 56, sqe->cdw14);
    kvdev_store_le32(wire + 60, sqe->cdw15);
}

void kvdev_cqe_load(const uint8_t *wire, struct kvdev_cqe *ret)
{
    ret->dw0 = kvdev_load_le32(wire);
    ret->dw1 = kvdev_load_le32(wire + 4);
    ret->sqhd = kvdev_load_le16(wire + 8);
    ret->sqid = kvdev_load_le16(wire + 10);
    ret->cid = kvdev_load_le16(wire + 12);
    ret->status_p = kvdev_load_le16(wire + 14);
}

void kvdev_cqe_store(const struct kvdev_cqe *cqe, uint8_t *wire)
{
    kvdev_store_le32(wire, cqe->dw0);
    kvdev_store_le32(wire + 4, cqe->dw1);
    kvdev_store_le16(wire + 8, cqe->sqhd);
    kvdev_store_le16(wire + 10, cqe->sqid);
    kvdev_store_le16(wire + 12, cqe->cid);
    kvdev_store_le16(wire + 14, cqe->status_p);
}

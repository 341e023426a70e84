/* PDUs and what can be wrong with them, with the answer that TCP Transport 1.0 section 3 asks for. */
#include <string.h>

#include "crc32c.h"
#include "fuzz.h"

#define IC_BYTES 128u
#define TERM_BYTES 24u

void pdu_finish(struct pdu *pdu, const struct kvdev_pdu_link *link, size_t head_len, const uint8_t *data,
                uint32_t data_len)
{
    pdu->hlen = pdu->bytes[2];
    pdu->len = pdu->data_at = (uint32_t)head_len;
    pdu->data_len = data_len;
    if (!data_len)
        return;
    memcpy(pdu->bytes + pdu->len, data, data_len);
    pdu->len += data_len;
    if (link->ddgst) {
        kvdev_pdu_build_ddgst(pdu->bytes + pdu->len, kvdev_crc32c(0, data, data_len));
        pdu->len += KVDEV_PDU_DIGEST_BYTES;
    }
}

void pdu_seal(struct pdu *pdu, const struct kvdev_pdu_link *link)
{
    if (link->hdgst && pdu->bytes[0] > KVDEV_PDU_C2H_TERM)
        kvdev_store_le32(pdu->bytes + pdu->hlen, kvdev_crc32c(0, pdu->bytes, pdu->hlen));
}

void pdu_set16(struct pdu *pdu, const struct kvdev_pdu_link *link, uint32_t at, uint16_t value)
{
    kvdev_store_le16(pdu->bytes + at, value);
    pdu_seal(pdu, link);
}

void pdu_set32(struct pdu *pdu, const struct kvdev_pdu_link *link, uint32_t at, uint32_t value)
{
    kvdev_store_le32(pdu->bytes + at, value);
    pdu_seal(pdu, link);
}

static int verdict_set(struct verdict *verdict, uint16_t fes, uint32_t fei, uint32_t header_len)
{
    *verdict = (struct verdict){ .fes = fes, .fei = fei, .header_len = header_len };
    return 1;
}

static uint8_t type_unknown(struct source *source)
{
    uint8_t type = (uint8_t)take(source);
    return type <= KVDEV_PDU_R2T && type != 8 ? (uint8_t)(0x80 | type) : type;
}

static uint8_t type_other_way(struct source *source, int role)
{
    static const uint8_t to_host[] = { KVDEV_PDU_IC_RESP, KVDEV_PDU_C2H_TERM, KVDEV_PDU_CAPSULE_RESP,
                                       KVDEV_PDU_C2H_DATA, KVDEV_PDU_R2T };
    static const uint8_t to_target[] = { KVDEV_PDU_IC_REQ, KVDEV_PDU_H2C_TERM, KVDEV_PDU_CAPSULE_CMD,
                                         KVDEV_PDU_H2C_DATA };
    return role == KVDEV_PDU_HOST ? to_target[below(source, sizeof to_target)] : to_host[below(source, sizeof to_host)];
}

static void ic_again(struct pdu *pdu, const struct kvdev_pdu_link *link, int role)
{
    struct kvdev_pdu_link plain = *link;
    plain.maxh2cdata = KVDEV_PDU_MAXH2CDATA_MIN;
    size_t len = role == KVDEV_PDU_HOST ? kvdev_pdu_build_ic_resp(pdu->bytes, &plain)
                                        : kvdev_pdu_build_ic_req(pdu->bytes, &plain);
    pdu_finish(pdu, link, len, NULL, 0);
}

/* A Term PDU whose own length is wrong: it is ignored and the connection closed (F2). */
static void term_malformed(struct pdu *pdu, struct source *source, int role)
{
    static const uint32_t plens[] = { 0, 7, 23, 153, 0x7fffffff, 0xffffffff };
    memset(pdu->bytes, 0, TERM_BYTES);
    pdu->bytes[0] = role == KVDEV_PDU_HOST ? KVDEV_PDU_C2H_TERM : KVDEV_PDU_H2C_TERM;
    pdu->bytes[2] = TERM_BYTES;
    kvdev_store_le32(pdu->bytes + 4, plens[below(source, 6)]);
    if (below(source, 4) == 0) {
        pdu->bytes[2] = 25;
        kvdev_store_le32(pdu->bytes + 4, TERM_BYTES);
    }
    pdu->len = pdu->data_at = TERM_BYTES;
    pdu->hlen = TERM_BYTES;
    pdu->data_len = 0;
}

static int violate_length(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link,
                          struct verdict *ret)
{
    uint32_t head = pdu->hlen + (link->hdgst ? KVDEV_PDU_DIGEST_BYTES : 0u);
    uint32_t plen = kvdev_load_le32(pdu->bytes + 4);
    if (below(source, 2)) { /* shorter than its own header: seen at once */
        pdu_set32(pdu, link, 4, below(source, head));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 4, 8);
    }
    if (pdu->bytes[0] == KVDEV_PDU_CAPSULE_CMD)
        return 0; /* its PLEN is what says how much data it has */
    pdu_set32(pdu, link, 4, below(source, 2) ? plen + 4 : 0xffffffff - below(source, 256));
    return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 4, pdu->hlen);
}

static int violate_offset(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link,
                          struct verdict *ret)
{
    uint32_t head = pdu->hlen + (link->hdgst ? KVDEV_PDU_DIGEST_BYTES : 0u);
    if (!pdu->data_len)
        return 0;
    pdu->bytes[3] = below(source, 2) ? (uint8_t)below(source, head) : (uint8_t)(pdu->bytes[3] + 1 + below(source, 3));
    pdu_seal(pdu, link);
    return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 3, pdu->hlen);
}

static int violate_digest(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link,
                          struct verdict *ret)
{
    if (!link->hdgst)
        return 0;
    /* A bit behind the common header, or of the digest itself. */
    pdu->bytes[8 + below(source, pdu->hlen - 4)] ^= (uint8_t)(1u << below(source, 8));
    return verdict_set(ret, KVDEV_FES_HDGST, kvdev_load_le32(pdu->bytes + pdu->hlen), pdu->hlen);
}

int pdu_violate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link, int role,
                struct verdict *ret)
{
    switch (below(source, 10)) {
    case 0:
        pdu->bytes[0] = type_unknown(source);
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 0, 8);
    case 1:
        pdu->bytes[0] = type_other_way(source, role);
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 0, 8);
    case 2:
        ic_again(pdu, link, role);
        return verdict_set(ret, KVDEV_FES_SEQUENCE, 0, 8);
    case 3:
        pdu->bytes[2] ^= (uint8_t)(1 + below(source, 255));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 2, 8);
    case 4:
        pdu->bytes[1] ^= KVDEV_PDU_FLAG_HDGST;
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 1, 8);
    case 5:
        term_malformed(pdu, source, role);
        return verdict_set(ret, KVDEV_FES_NONE, 0, 0);
    case 6:
        return violate_length(pdu, source, link, ret);
    case 7:
        return violate_offset(pdu, source, link, ret);
    case 8:
        if (pdu->bytes[0] == KVDEV_PDU_CAPSULE_RESP || pdu->bytes[0] == KVDEV_PDU_R2T)
            return 0; /* reserved there */
        pdu->bytes[1] ^= KVDEV_PDU_FLAG_DDGST;
        pdu_seal(pdu, link);
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 1, pdu->hlen);
    default:
        return violate_digest(pdu, source, link, ret);
    }
}

int pdu_violate_ic(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link, int role,
                   struct verdict *ret)
{
    switch (below(source, 8)) {
    case 0:
        kvdev_store_le16(pdu->bytes + 8, (uint16_t)(1 + below(source, 65535)));
        return verdict_set(ret, KVDEV_FES_UNSUPPORTED, 8, IC_BYTES);
    case 1:
        pdu->bytes[10] = (uint8_t)(32 + below(source, 224));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 10, IC_BYTES);
    case 2:
        kvdev_store_le32(pdu->bytes + 4, 129 + take16(source));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 4, IC_BYTES);
    case 3:
        pdu->bytes[2] ^= (uint8_t)(1 + below(source, 255));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 2, 8);
    case 4:
        pdu->bytes[0] = role == KVDEV_PDU_HOST ? KVDEV_PDU_CAPSULE_RESP : KVDEV_PDU_CAPSULE_CMD;
        return verdict_set(ret, KVDEV_FES_SEQUENCE, 0, 8);
    case 5:
        if (role != KVDEV_PDU_HOST || (link->hdgst && link->ddgst))
            return 0;
        pdu->bytes[11] = 3; /* a digest nobody asked for */
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 11, IC_BYTES);
    case 6:
        if (role != KVDEV_PDU_HOST)
            return 0;
        kvdev_store_le32(pdu->bytes + 12, below(source, 2) ? below(source, 4096) : 4096 + 1 + below(source, 3));
        return verdict_set(ret, KVDEV_FES_INVALID_HEADER, 12, IC_BYTES);
    default:
        term_malformed(pdu, source, role);
        return verdict_set(ret, KVDEV_FES_NONE, 0, 0);
    }
}

int pdu_decorate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link)
{
    uint8_t *head = pdu->bytes;
    uint32_t pad_at = pdu->hlen + (link->hdgst ? KVDEV_PDU_DIGEST_BYTES : 0u);
    uint8_t value = (uint8_t)(1 + below(source, 255));
    if (pdu->data_len && pdu->data_at > pad_at && below(source, 2)) { /* no digest covers padding */
        head[pad_at + below(source, pdu->data_at - pad_at)] = value;
        return 1;
    }
    uint32_t where = below(source, 8);
    switch (head[0]) {
    case KVDEV_PDU_CAPSULE_CMD:
        head[1] |= (uint8_t)(0x04u << where % 6);
        break;
    case KVDEV_PDU_CAPSULE_RESP:
        if (where < 4)
            head[1] |= (uint8_t)(0x02u << where);
        else if (where < 6)
            head[18 + where % 2] ^= value; /* SQID, which nobody needs */
        else
            head[22] ^= 1; /* the phase tag, which a fabric does not use */
        break;
    case KVDEV_PDU_R2T:
        if (where < 4)
            head[1] |= (uint8_t)(0x02u << where);
        else
            head[20 + where % 4] = value;
        break;
    case KVDEV_PDU_H2C_DATA:
        if (where < 4)
            head[1] |= (uint8_t)(0x08u << where);
        else
            head[20 + where % 4] = value;
        break;
    case KVDEV_PDU_C2H_DATA:
        if (where < 4)
            head[1] |= (uint8_t)(0x10u << where);
        else
            head[where < 6 ? 10 + where % 2 : 20 + where % 4] = value;
        break;
    default:
        return 0;
    }
    pdu_seal(pdu, link);
    return 1;
}

int pdu_mutate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link)
{
    static const uint32_t odd[] = { 0, 1, 3, 7, 8, 23, 24, 25, 127, 128, 4095, 0x7fffffff, 0x80000000, 0xfffffffc, 0xffffffff };
    uint32_t head = pdu->len < 32 ? pdu->len : 32;
    uint32_t reach = below(source, 8) ? head : pdu->len < 65536 ? pdu->len : 65535;
    uint32_t at = below(source, reach);
    uint8_t before[8];
    memcpy(before, pdu->bytes + (at & ~7u), sizeof before);
    int is_same = 0;
    switch (below(source, 6)) {
    case 0:
        pdu->bytes[at] ^= (uint8_t)(1u << below(source, 8));
        break;
    case 1:
        pdu->bytes[at] = (uint8_t)take(source);
        is_same = !memcmp(before, pdu->bytes + (at & ~7u), sizeof before);
        break;
    case 2:
        at &= ~3u;
        kvdev_store_le32(pdu->bytes + at, odd[below(source, sizeof odd / sizeof odd[0])]);
        is_same = !memcmp(before, pdu->bytes + (at & ~7u), sizeof before);
        break;
    case 3: /* bytes lost */
        if (pdu->len - at > 1) {
            memmove(pdu->bytes + at, pdu->bytes + at + 1, pdu->len - at - 1);
            pdu->len--;
        }
        return 1;
    case 4: /* the end is missing */
        pdu->len = at ? at : 1;
        return 1;
    default: /* a byte too many */
        if (pdu->len < sizeof pdu->bytes) {
            memmove(pdu->bytes + at + 1, pdu->bytes + at, pdu->len - at);
            pdu->bytes[at] = (uint8_t)take(source);
            pdu->len++;
        }
        return 1;
    }
    if (!is_same && below(source, 4))
        pdu_seal(pdu, link); /* so that the rules behind the digest are reached */
    return !is_same;
}

void term_check(const struct kvdev_pdu_rx *rx, const struct verdict *verdict, const struct pdu *sent)
{
    uint32_t len = rx->pdu.term_data_len;
    fuzz_report.terms++;
    if (rx->pdu.fes != verdict->fes || rx->pdu.fei != verdict->fei)
        fuzz_fail("Term PDU says FES %u FEI 0x%x, expected FES %u FEI 0x%x", rx->pdu.fes, rx->pdu.fei, verdict->fes,
                  verdict->fei);
    if (len < verdict->header_len || len > KVDEV_PDU_TERM_DATA_MAX || memcmp(rx->head + TERM_BYTES, sent->bytes, len))
        fuzz_fail("Term PDU carries %u bytes that are not the header at fault (%u bytes)", len, verdict->header_len);
}

#include "pdu_fuzz.h"

#include <string.h>

#include "crc32c.h"

#define STREAM_MAX 16384u
#define PDUS_MAX 6u
#define PAYLOAD_MAX 2048u
#define GUARD 32u
#define GUARD_BYTE 0xa5

struct rng {
    uint64_t state;
};

static uint64_t next(struct rng *rng) /* splitmix64 */
{
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t below(struct rng *rng, uint32_t limit)
{
    return (uint32_t)(next(rng) % limit);
}

struct stream {
    uint8_t bytes[STREAM_MAX];
    uint32_t len;
    uint32_t pdu_count;
    uint32_t start[PDUS_MAX + 1];
    int role;
    int is_agreed;
    struct kvdev_pdu_link receiver; /* the receiver's link at its start */
};

static uint8_t random_pda(struct rng *rng)
{
    static const uint8_t usual[] = {0, 0, 1, 3, 7, 15, 31};

    return usual[below(rng, sizeof usual)];
}

/* Append payload and its digest. */
static void put_payload(struct stream *s, struct rng *rng, uint32_t data_len, int has_digest)
{
    for (uint32_t i = 0; i < data_len; i += 4)
        kvdev_store_le32(s->bytes + s->len + i, (uint32_t)next(rng)); /* lengths are dword multiples */
    if (has_digest) {
        kvdev_pdu_build_ddgst(s->bytes + s->len + data_len, kvdev_crc32c(0, s->bytes + s->len, data_len));
        s->len += KVDEV_PDU_DIGEST_BYTES;
    }
    s->len += data_len;
}

static void put_pdu(struct stream *s, struct rng *rng, const struct kvdev_pdu_link *sender, uint32_t kind)
{
    uint8_t entry[KVDEV_SQE_BYTES];
    uint8_t *const at = s->bytes + s->len;
    const uint32_t data_len = 4 * (1 + below(rng, PAYLOAD_MAX / 4));
    const uint32_t offset = 4 * below(rng, 1u << 20);
    const uint16_t cid = (uint16_t)next(rng), tag = (uint16_t)next(rng);

    for (uint32_t i = 0; i < sizeof entry; i += 8)
        kvdev_store_le64(entry + i, next(rng));
    if (s->role == KVDEV_PDU_HOST) {
        if (kind == 0) {
            s->len += (uint32_t)kvdev_pdu_build_capsule_resp(at, sender, entry);
        } else if (kind == 1) {
            s->len += (uint32_t)kvdev_pdu_build_r2t(at, sender, cid, tag, offset, data_len);
        } else {
            s->len += (uint32_t)kvdev_pdu_build_c2h_data(at, sender, cid, offset, data_len,
                                                         kind == 2 ? 0 : KVDEV_PDU_FLAG_LAST | KVDEV_PDU_FLAG_SUCCESS);
            put_payload(s, rng, data_len, sender->ddgst);
        }
    } else {
        if (kind == 0) {
            s->len += (uint32_t)kvdev_pdu_build_capsule_cmd(at, sender, entry, 0);
        } else if (kind == 1) {
            s->len += (uint32_t)kvdev_pdu_build_capsule_cmd(at, sender, entry, data_len);
            put_payload(s, rng, data_len, sender->ddgst);
        } else {
            s->len += (uint32_t)kvdev_pdu_build_h2c_data(at, sender, cid, tag, offset, data_len, kind == 2);
            put_payload(s, rng, data_len, sender->ddgst);
        }
    }
}

static void make_stream(struct stream *s, struct rng *rng)
{
    struct kvdev_pdu_link sender;
    const uint32_t count = 1 + below(rng, PDUS_MAX);

    memset(&s->receiver, 0, sizeof s->receiver);
    s->len = 0;
    s->role = (int)below(rng, 2);
    s->is_agreed = below(rng, 4) != 0;
    s->receiver.hdgst = (uint8_t)below(rng, 2);
    s->receiver.ddgst = (uint8_t)below(rng, 2);
    s->receiver.recv_pda = random_pda(rng);
    s->receiver.maxh2cdata = KVDEV_PDU_MAXH2CDATA_MIN;
    s->receiver.in_capsule_max = KVDEV_PDU_IN_CAPSULE_ADMIN;
    sender = s->receiver;
    sender.send_pda = s->receiver.recv_pda;
    sender.recv_pda = random_pda(rng);
    s->pdu_count = count;
    for (uint32_t i = 0; i < count; i++) {
        s->start[i] = s->len;
        if (i == 0 && !s->is_agreed)
            s->len += (uint32_t)(s->role == KVDEV_PDU_HOST ? kvdev_pdu_build_ic_resp(s->bytes, &sender)
                                                           : kvdev_pdu_build_ic_req(s->bytes, &sender));
        else
            put_pdu(s, rng, &sender, below(rng, 4));
    }
    s->start[count] = s->len;
}

/* Change one PDU's bytes, mostly in its header; half of the time with its header digest made right again,
 * so that the rules behind the digest are reached. */
static void mutate(struct stream *s, struct rng *rng)
{
    static const uint32_t odd_values[] = {0, 1, 7, 8, 23, 24, 25, 127, 0x7fffffff, 0x80000000, 0xfffffffc, 0xffffffff};
    const uint32_t index = below(rng, s->pdu_count);
    uint8_t *const pdu = s->bytes + s->start[index];
    const uint32_t len = s->start[index + 1] - s->start[index];
    const uint8_t hlen = pdu[2];
    const uint32_t reach = below(rng, 4) ? (len < 24 ? len : 24) : len;

    switch (below(rng, 5)) {
    case 0:
        pdu[below(rng, reach)] ^= (uint8_t)(1u << below(rng, 8));
        break;
    case 1:
        pdu[below(rng, reach)] = (uint8_t)next(rng);
        break;
    case 2:
        if (reach >= 4)
            kvdev_store_le32(pdu + below(rng, reach / 4) * 4,
                             odd_values[below(rng, sizeof odd_values / sizeof odd_values[0])]);
        break;
    case 3: /* one byte lost */
        memmove(pdu, pdu + 1, s->len - s->start[index] - 1);
        s->len--;
        s->start[index + 1] = s->len;
        s->pdu_count = index + 1;
        return;
    default: /* the stream ends early */
        s->len -= below(rng, len);
        s->start[index + 1] = s->len;
        s->pdu_count = index + 1;
        return;
    }
    if (s->receiver.hdgst && below(rng, 2) && hlen + 4u <= len && (index || s->is_agreed))
        kvdev_store_le32(pdu + hlen, kvdev_crc32c(0, pdu, hlen));
}

/* What one receiver reported, as a running checksum, and whether it broke a bound. */
struct trace {
    uint32_t crc;
    uint32_t header_count;
    uint32_t data_count;
    uint32_t digest_error_count;
    uint32_t fault_rule;
    int is_broken;
};

static void note(struct trace *trace, const void *what, size_t len)
{
    trace->crc = kvdev_crc32c(trace->crc, what, len);
}

/* A receiver's payload buffer: it ends where the array ends, so that a sanitizer sees the first byte too many. */
struct landing {
    uint8_t bytes[GUARD + PAYLOAD_MAX];
    uint32_t data_len; /* 0: nowhere */
};

static void on_header(struct kvdev_pdu_rx *rx, struct trace *trace, struct landing *landing)
{
    static const uint8_t kind = 'H';

    note(trace, &kind, 1);
    note(trace, &rx->pdu, sizeof rx->pdu);
    note(trace, rx->head, rx->head_len);
    trace->header_count++;
    landing->data_len = rx->pdu.data_len <= PAYLOAD_MAX ? rx->pdu.data_len : 0;
    if (landing->data_len) {
        memset(landing->bytes, GUARD_BYTE, sizeof landing->bytes);
        kvdev_pdu_rx_set_payload(rx, landing->bytes + sizeof landing->bytes - landing->data_len);
    }
}

static void on_data(const struct kvdev_pdu_rx *rx, struct trace *trace, struct landing *landing)
{
    static const uint8_t kind = 'D';

    note(trace, &kind, 1);
    note(trace, &rx->ddgst_ok, 1);
    trace->data_count++;
    trace->digest_error_count += !rx->ddgst_ok;
    if (landing->data_len)
        note(trace, landing->bytes + sizeof landing->bytes - landing->data_len, landing->data_len);
    for (size_t i = 0; landing->data_len && i < sizeof landing->bytes - landing->data_len; i++)
        trace->is_broken |= landing->bytes[i] != GUARD_BYTE;
    landing->data_len = 0;
}

static void on_fault(const struct kvdev_pdu_rx *rx, struct trace *trace)
{
    static const uint8_t kind = 'F';
    uint8_t term[KVDEV_PDU_BUILD_MAX];
    const size_t n = kvdev_pdu_build_term(term, rx, &rx->fault);

    note(trace, &kind, 1);
    note(trace, &rx->fault, sizeof rx->fault);
    note(trace, term, n);
    trace->fault_rule = rx->fault.rule;
    trace->is_broken |= n > 152 || (rx->fault.fes == KVDEV_FES_NONE) != (n == 0) ||
                        !kvdev_pdu_rule_name(rx->fault.rule);
}

enum way { WAY_WHOLE, WAY_CUT, WAY_DIRECT };

static void receive(const struct stream *s, enum way way, struct rng *rng, struct trace *trace)
{
    struct kvdev_pdu_rx rx;
    struct landing landing;
    uint8_t piece[STREAM_MAX]; /* pieces end where it ends */
    uint32_t at = 0;

    memset(trace, 0, sizeof *trace);
    landing.data_len = 0;
    if (s->is_agreed)
        trace->is_broken |= kvdev_pdu_rx_init_agreed(&rx, s->role, &s->receiver) != 0;
    else
        trace->is_broken |= kvdev_pdu_rx_init(&rx, s->role, &s->receiver) != 0;
    while (at < s->len) {
        uint32_t n = s->len - at, used = 0;
        uint8_t *bytes;

        if (way != WAY_WHOLE) {
            const uint32_t cut = 1 + below(rng, below(rng, 3) ? 40 : 700);

            n = n < cut ? n : cut;
        }
        bytes = piece + sizeof piece - n;
        memcpy(bytes, s->bytes + at, n);
        while (used < n) {
            uint8_t *dst;
            size_t want, consumed;
            int event;

            if (way == WAY_DIRECT && kvdev_pdu_rx_payload_want(&rx, &dst, &want)) {
                consumed = want < n - used ? want : n - used;
                memcpy(dst, bytes + used, consumed);
                event = kvdev_pdu_rx_payload_landed(&rx, consumed);
            } else {
                event = kvdev_pdu_rx_step(&rx, bytes + used, n - used, &consumed);
                trace->is_broken |= consumed > n - used;
                trace->is_broken |= event == KVDEV_PDU_NEED_MORE && consumed != n - used;
            }
            used += (uint32_t)consumed;
            if (event == KVDEV_PDU_HEADER) {
                on_header(&rx, trace, &landing);
            } else if (event == KVDEV_PDU_DATA_DONE) {
                on_data(&rx, trace, &landing);
            } else if (event == KVDEV_PDU_FAULT) {
                on_fault(&rx, trace);
                return;
            } else if (event != KVDEV_PDU_NEED_MORE) {
                trace->is_broken = 1;
                return;
            }
        }
        at += n;
    }
}

void kvdev_pdu_fuzz(uint64_t seed, uint64_t pdu_count, struct kvdev_pdu_fuzz_report *ret)
{
    struct stream stream;
    struct trace whole, cut, direct;

    memset(ret, 0, sizeof *ret);
    for (uint64_t i = 0; ret->pdu_count < pdu_count; i++) {
        struct rng rng = {seed + i};
        uint32_t mutations;

        make_stream(&stream, &rng);
        ret->pdu_count += stream.pdu_count;
        ret->stream_count++;
        mutations = below(&rng, 4);
        for (uint32_t m = 0; m < mutations && stream.len > stream.start[stream.pdu_count - 1]; m++)
            mutate(&stream, &rng);
        ret->mutation_count += mutations;
        receive(&stream, WAY_WHOLE, &rng, &whole);
        receive(&stream, WAY_CUT, &rng, &cut);
        receive(&stream, WAY_DIRECT, &rng, &direct);
        ret->header_count += whole.header_count;
        ret->data_count += whole.data_count;
        ret->digest_error_count += whole.digest_error_count;
        ret->fault_count += whole.fault_rule != 0;
        ret->rule_count[whole.fault_rule]++;
        if (!mutations && (whole.fault_rule || whole.digest_error_count || whole.header_count != stream.pdu_count))
            ret->unmutated_fault_count++;
        if (memcmp(&whole, &cut, sizeof whole) != 0 || memcmp(&whole, &direct, sizeof whole) != 0 || whole.is_broken) {
            if (!ret->mismatch_count)
                ret->mismatch_seed = seed + i;
            ret->mismatch_count++;
        }
    }
}

uint64_t kvdev_pdu_parse_many(const struct kvdev_pdu_link *link, uint64_t count)
{
    struct kvdev_pdu_link sender = *link;
    struct kvdev_pdu_rx rx;
    uint8_t pdu[KVDEV_PDU_BUILD_MAX + 8];
    uint64_t accepted = 0;
    size_t len;

    sender.send_pda = link->recv_pda;
    len = kvdev_pdu_build_c2h_data(pdu, &sender, 1, 0, 4, KVDEV_PDU_FLAG_LAST);
    kvdev_store_le32(pdu + len, 0x01020304);
    if (link->ddgst)
        kvdev_pdu_build_ddgst(pdu + len + 4, kvdev_crc32c(0, pdu + len, 4));
    len += 4 + (link->ddgst ? 4u : 0u);
    if (kvdev_pdu_rx_init_agreed(&rx, KVDEV_PDU_HOST, link))
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        size_t used, at = 0;

        while (at < len) {
            int event = kvdev_pdu_rx_step(&rx, pdu + at, len - at, &used);

            at += used;
            if (event == KVDEV_PDU_FAULT)
                return accepted;
            accepted += event == KVDEV_PDU_DATA_DONE && rx.ddgst_ok;
        }
    }
    return accepted;
}

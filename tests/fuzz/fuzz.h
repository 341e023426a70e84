/* What the two fuzzers share: the input read as decisions, PDUs and what may be wrong with them, the report.
 *
 * An input is a string of decisions: what the peer of the side under test does next, legal, wrong in one named way, or
 * mutated at random. The peer keeps its own account of every command, so a legal exchange must go through, a
 * named wrong must be answered as the checklist says, and after anything every command still ends once. */
#ifndef KVDEV_FUZZ_H
#define KVDEV_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "pdu.h"

#define FUZZ_DATA_MAX 65536u
#define FUZZ_PATTERN_BYTES (FUZZ_DATA_MAX + 65536u)

/* ---- decisions ---- */

struct source {
    const uint8_t *at;
    const uint8_t *end;
};

static inline int source_is_over(const struct source *source)
{
    return source->at == source->end;
}

/* The next byte; 0 behind the end. */
static inline uint32_t take(struct source *source)
{
    return source->at < source->end ? *source->at++ : 0u;
}

static inline uint32_t take16(struct source *source)
{
    uint32_t high = take(source);
    return high << 8 | take(source);
}

static inline uint32_t take32(struct source *source)
{
    uint32_t high = take16(source);
    return high << 16 | take16(source);
}

/* Less than limit, which is at most 65536. */
static inline uint32_t below(struct source *source, uint32_t limit)
{
    return limit < 2 ? 0 : (limit <= 256 ? take(source) : take16(source)) % limit;
}

static inline uint64_t fuzz_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- the report ---- */

struct fuzz_report {
    uint64_t inputs;
    uint64_t connections;
    uint64_t pdus;       /* sent to the side under test */
    uint64_t mutated;    /* of them changed: wrong in a named way, or at random */
    uint64_t violations; /* of them wrong in a named way, with the answer checked */
    uint64_t terms;      /* Term PDUs of the side under test that were checked */
    uint64_t commands;
    uint64_t completed;  /* with success */
};

extern struct fuzz_report fuzz_report;
/* Ends the program; says which input. */
void fuzz_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* ---- the pattern payloads are made of ---- */

extern uint8_t fuzz_pattern[FUZZ_PATTERN_BYTES];
/* The payload of command number `tag`: FUZZ_DATA_MAX bytes. */
static inline const uint8_t *pattern_of(uint32_t tag)
{
    return fuzz_pattern + (size_t)(tag % 4093u) * 16u;
}

/* ---- PDUs ---- */

struct pdu {
    uint8_t bytes[KVDEV_PDU_BUILD_MAX + FUZZ_DATA_MAX + 2 * KVDEV_PDU_DIGEST_BYTES];
    uint32_t len;
    uint32_t hlen;
    uint32_t data_at;  /* where its payload begins; len if it has none */
    uint32_t data_len;
};

/* What the side under test must answer to a named wrong. */
struct verdict {
    uint16_t fes; /* 0: nothing, it closes */
    uint32_t fei;
    uint32_t header_len; /* bytes of the header it has seen, at least: the Term PDU's data */
};

/* Behind the header that a kvdev_pdu_build_* function made: payload and digest. */
void pdu_finish(struct pdu *pdu, const struct kvdev_pdu_link *link, size_t head_len, const uint8_t *data,
                uint32_t data_len);
/* The header's digest made right again. */
void pdu_seal(struct pdu *pdu, const struct kvdev_pdu_link *link);
/* Wrong in one of the ways any PDU can be; 0 if this way does not apply. role: of who receives it. */
int pdu_violate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link, int role,
                struct verdict *ret);
/* Wrong in the ways an ICReq or ICResp can be. */
int pdu_violate_ic(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link, int role,
                   struct verdict *ret);
/* Reserved bits, padding or a field without meaning changed: it must be taken as if they were not (B6). */
int pdu_decorate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link);
/* Changed at random; 0 if it came out the same. */
int pdu_mutate(struct pdu *pdu, struct source *source, const struct kvdev_pdu_link *link);
/* One header field set and the digest made right. */
void pdu_set16(struct pdu *pdu, const struct kvdev_pdu_link *link, uint32_t at, uint16_t value);
void pdu_set32(struct pdu *pdu, const struct kvdev_pdu_link *link, uint32_t at, uint32_t value);
/* Checks a Term PDU against the verdict and the header that was sent. */
void term_check(const struct kvdev_pdu_rx *rx, const struct verdict *verdict, const struct pdu *sent);

/* ---- the fuzzers ---- */

void fuzz_host(struct source *source);
void fuzz_target(struct source *source);
/* One input: its first byte says which. */
void fuzz_one(const uint8_t *bytes, size_t len);
void fuzz_setup(void);

#endif

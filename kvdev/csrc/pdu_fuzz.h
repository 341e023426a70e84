/* A seeded mutation loop over the PDU machine: the property tests' inner loop, at C speed.
 *
 * Each stream of a few legal PDUs is mutated (or not), then given to three receivers: whole, cut at
 * random, and cut at random with payload received in place. All three must report the same events. */
#ifndef KVDEV_PDU_FUZZ_H
#define KVDEV_PDU_FUZZ_H

#include <stdint.h>

#include "pdu.h"

/* cdef begin */
struct kvdev_pdu_fuzz_report {
    uint64_t stream_count;
    uint64_t pdu_count;          /* PDUs put into streams */
    uint64_t mutation_count;
    uint64_t header_count;       /* events of the whole-stream receiver */
    uint64_t data_count;
    uint64_t fault_count;
    uint64_t digest_error_count; /* data digests that did not match */
    uint64_t unmutated_fault_count; /* must stay 0: a legal stream was refused */
    uint64_t mismatch_count;     /* must stay 0: receivers disagree, or a bound was broken */
    uint64_t mismatch_seed;      /* of the first such stream */
    uint64_t rule_count[64];     /* faults by enum kvdev_pdu_rule */
};

/* Run streams until `pdu_count` PDUs were made, the first with `seed`, the next with seed + 1, ... */
void kvdev_pdu_fuzz(uint64_t seed, uint64_t pdu_count, struct kvdev_pdu_fuzz_report *ret);
/* Parse the same legal C2HData header `count` times, for benchmarks; returns the number accepted. */
uint64_t kvdev_pdu_parse_many(const struct kvdev_pdu_link *link, uint64_t count);
/* cdef end */

_Static_assert(KVDEV_RULE_COUNT <= 64, "the report has a counter per rule");

#endif

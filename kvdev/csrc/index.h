/* The page table in memory: key to slot, the order in which pages go, slots free and on their way to be free.
 *
 * The table image is the caller's: the blocks as they lie on media, read into place and written from
 * place. The index adds a hash over it, two list links and a state byte per slot, and the list of
 * slots whose change has no journal record yet. It does no I/O and takes no lock: one caller at a
 * time. A slot whose entry media may still hold is never handed out before its free record is
 * settled, so a write can only ever hit a slot that no recovery would believe in.
 * Layouts: docs/on-disk-format.md. */
#ifndef KVDEV_INDEX_H
#define KVDEV_INDEX_H

#include <stddef.h>
#include <stdint.h>

#include "page_table.h"

/* cdef begin */
struct kvdev_index_stat {
    uint32_t slot_count;
    uint32_t live_count;
    uint32_t free_count;
    uint32_t reserved_count;
    uint32_t leaving_count;      /* freed, but media may still hold the entry */
    uint32_t quarantined_count;  /* a write of unknown fate may still land there */
    uint32_t pending_count;      /* at most this many records are due */
    uint32_t pending_limit;
    uint32_t dirty_block_count;
    uint32_t pinned_count;       /* live, and never evicted */
    uint32_t duplicate_count;    /* entries dropped at load because a younger one has the key */
    uint64_t evicted_count;
    uint64_t expired_count;      /* pages that went by their age */
    uint64_t next_generation;
    uint64_t memory_bytes;       /* besides the table image */
};

#define KVDEV_SLOT_NONE 0xffffffff
#define KVDEV_POLICY_LRU 0      /* numbers of the record on media */
#define KVDEV_POLICY_FIFO 1
#define KVDEV_POLICY_NONE 2
#define KVDEV_POLICY_LFU 3
#define KVDEV_POLICY_S3FIFO 4
#define KVDEV_OUTCOME_WRITTEN 0
#define KVDEV_OUTCOME_FAILED 1
#define KVDEV_OUTCOME_UNKNOWN 2

struct kvdev_index;

struct kvdev_index_config {
    uint8_t uuid[16];
    uint64_t next_generation;
    uint32_t block_bytes;
    uint32_t slot_count;
    uint32_t pending_limit;
    uint32_t policy;             /* KVDEV_POLICY_ */
    uint32_t quota_pages;        /* what the policy is to expect */
    uint32_t algorithm;          /* KVDEV_CHECKSUM_ of its pages */
    uint32_t has_ages;           /* 1: last use is the second in which a page was stored, and pages expire by it */
};

int kvdev_index_create(uint8_t *table, const struct kvdev_index_config *config, struct kvdev_index **ret);
void kvdev_index_destroy(struct kvdev_index *index);
/* Build everything from the table image. -EPROTO: a page has another checksum than the index's. */
int kvdev_index_load(struct kvdev_index *index);
uint8_t *kvdev_index_dirty_map(struct kvdev_index *index);
/* The counters a batch asks for: pending, live, free, reserved. A stat counts dirty blocks as well. */
void kvdev_index_counts(const struct kvdev_index *index, uint32_t *counts);
void kvdev_index_stat(const struct kvdev_index *index, struct kvdev_index_stat *ret);

/* Grants of the keys that are stored, KVDEV_SLOT_NONE for the others; returns how many are. Touched
 * keys count as used, the first of the batch as the latest of all. */
uint32_t kvdev_index_lookup(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int touch,
                            struct kvdev_grant *grants);
/* Whether keys are stored, and how many from the first on, by 64 bits of a hash and its place: for a key that
 * is not, the answer is yes once in 2^60 times. What reads or changes pages compares whole keys. */
uint32_t kvdev_index_contains(const struct kvdev_index *index, const uint8_t *keys, uint32_t count,
                              uint8_t *found);
uint32_t kvdev_index_prefix(const struct kvdev_index *index, const uint8_t *keys, uint32_t count);
/* All or nothing: -ENOSPC when fewer slots are free. */
int kvdev_index_reserve(struct kvdev_index *index, uint32_t count, uint32_t length,
                        struct kvdev_grant *grants);
/* Turn written grants into entries with the sums of their bytes, give the others back. done[i] 1: stored. -ENOBUFS: commit first. */
int kvdev_index_commit(struct kvdev_index *index, const uint8_t *keys, struct kvdev_grant *grants,
                       const void *sums, const uint8_t *outcome, uint32_t count, uint8_t *done);
int kvdev_index_remove(struct kvdev_index *index, const uint8_t *keys, uint32_t count, uint8_t *done);
/* As remove, by grant: an entry that has another generation by now stays. */
int kvdev_index_withdraw(struct kvdev_index *index, const struct kvdev_grant *grants, uint32_t count,
                         uint8_t *done);
/* 1 where the grant's entry is still the one it was given for. */
void kvdev_index_confirm(const struct kvdev_index *index, const struct kvdev_grant *grants, uint32_t count,
                         uint8_t *valid);
/* Keep pages from being evicted, or allow it again: they count as used then. Pins are this index's, not
 * media's; what replaces a pinned page is pinned. done[i] 1: stored. Returns how many are. */
uint32_t kvdev_index_pin(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int is_pinned,
                         uint8_t *done);
/* Remove up to `count` pages by the policy, none of those whose keys are to be kept. */
int kvdev_index_evict(struct kvdev_index *index, uint32_t count, const uint8_t *kept_keys, uint32_t kept_count,
                      uint32_t *evicted);
/* With ages: the second it is now, which pages stored from here on get. */
void kvdev_index_set_clock(struct kvdev_index *index, uint32_t clock);
/* Remove up to `max` pages stored before `clock`, pinned or not, as far as there is room for their records; who
 * is not the owner forgets them, without records. Returns how many; `oldest` is the second of the oldest one left,
 * UINT32_MAX when there is none. */
uint32_t kvdev_index_expire(struct kvdev_index *index, uint32_t clock, uint32_t max, int is_owner,
                            uint32_t *oldest);
/* Hand out slots below `slot_limit` only; those behind stay unused when they become free. */
void kvdev_index_limit_slots(struct kvdev_index *index, uint32_t slot_limit);
/* Pages that were copied to reserved slots: the new entries take the old ones' place in everything. done[i] 0:
 * the old one is not there any more, the slot was given back. -ENOBUFS: commit first. */
int kvdev_index_move(struct kvdev_index *index, const struct kvdev_grant *from, const struct kvdev_grant *to,
                     uint32_t count, uint8_t *done);

/* Records due, in order; they are then in flight until settled (durable) or failed. */
uint32_t kvdev_index_collect(struct kvdev_index *index, struct kvdev_entry *records, uint32_t max);
void kvdev_index_settle(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count);
/* Make the table's entries of slots that the records free live again, or free for good. While they live
 * the table can be written without losing what they name before what replaces it is durable. */
void kvdev_index_revive(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count,
                        int is_live);
/* The records' fate is unknown: live ones are withdrawn, and all get a free record due. */
uint32_t kvdev_index_fail(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count);
/* The data of entries without a record may be lost: withdraw them. */
uint32_t kvdev_index_drop_pending(struct kvdev_index *index);

/* Free quarantined slots; others stay as they are. */
void kvdev_index_release(struct kvdev_index *index, const uint32_t *slots, uint32_t count);
/* For an index that follows another owner's journal: take over what the records say, where the table's block does
 * not include them. -EINVAL, and nothing taken, when one is not of this table. Such an index reserves nothing. */
int kvdev_index_follow(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count,
                       uint64_t first_sequence);

/* Table blocks that differ from media, ascending; seal writes their headers. */
uint32_t kvdev_index_dirty_blocks(const struct kvdev_index *index, uint32_t *blocks, uint32_t max);
void kvdev_index_seal(struct kvdev_index *index, const uint32_t *blocks, uint32_t count,
                      uint64_t sequence, uint64_t epoch);
void kvdev_index_clear_dirty(struct kvdev_index *index, const uint32_t *blocks, uint32_t count);
/* cdef end */

#endif

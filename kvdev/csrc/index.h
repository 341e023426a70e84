/* The page table in memory: key to slot, least recent use, slots free and on their way to be free.
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

/* cdef begin */
struct kvdev_media_header {      /* first 64 bytes of every structure on media; little endian */
    uint64_t magic;
    uint16_t version;
    uint16_t count;              /* entries, records or members that follow */
    uint32_t size_bytes;         /* what the checksum covers, header included */
    uint32_t crc32c;             /* over size_bytes with this field zero */
    uint32_t index;              /* which of its kind this is: table block, journal position, ... */
    uint8_t uuid[16];            /* volume or KV namespace it belongs to */
    uint64_t sequence;
    uint64_t epoch;
    uint64_t durable_sequence;   /* journal: everything up to here was durable before this block */
};

struct kvdev_entry {             /* one slot, in the table and as a journal record */
    uint8_t key[32];
    uint64_t generation;
    uint64_t checksum;
    uint32_t length;
    uint32_t last_use;
    uint8_t state;               /* 0 free, 1 live */
    uint8_t algorithm;           /* 1: crc32c of the bytes, crc32c of identity and that */
    uint16_t reserved;
    uint32_t slot_index;
};

struct kvdev_grant {             /* leave to read or write one slot, as long as its generation stands */
    uint64_t generation;
    uint64_t checksum;
    uint32_t slot_index;         /* KVDEV_SLOT_NONE: the key is not stored */
    uint32_t length;
};

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
    uint64_t next_generation;
    uint64_t memory_bytes;       /* besides the table image */
};

#define KVDEV_SLOT_NONE 0xffffffff
#define KVDEV_OUTCOME_WRITTEN 0
#define KVDEV_OUTCOME_FAILED 1
#define KVDEV_OUTCOME_UNKNOWN 2

struct kvdev_index;

/* Structures on media. A check returns 0, or -EBADMSG (magic), -EPROTO (version), -EMSGSIZE (size),
 * -EILSEQ (checksum), -ESTALE (uuid); uuid NULL accepts any. */
void kvdev_media_seal(uint8_t *block);
int kvdev_media_check(const uint8_t *block, size_t limit, uint64_t magic, const uint8_t *uuid);
/* Seal `count` blocks that follow one another. */
void kvdev_media_seal_many(uint8_t *blocks, uint32_t block_bytes, uint32_t count);

uint32_t kvdev_table_entries_per_block(uint32_t block_bytes);
void kvdev_table_format(uint8_t *table, uint32_t block_bytes, uint32_t first_block, uint32_t block_count,
                        uint32_t slot_count, const uint8_t *uuid);
/* Check every block; a bad one is formatted empty and its index stored in `bad` (the first `bad_max`). */
uint32_t kvdev_table_check(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint32_t *bad, uint32_t bad_max);
/* Blocks that moved: each valid one replaces the table's block of its index if its sequence is higher. */
uint32_t kvdev_table_merge(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint8_t *moved, uint32_t moved_count);
/* Replay the records of one journal block: each counts where the table's block has not included it. */
int kvdev_table_apply(uint8_t *table, uint32_t block_bytes, uint32_t slot_count, uint8_t *block_dirty,
                      const struct kvdev_entry *records, uint32_t count, uint64_t first_sequence);

uint64_t kvdev_entry_checksum(const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                              uint32_t length, uint32_t crc32c);

int kvdev_index_create(uint8_t *table, uint32_t block_bytes, uint32_t slot_count, uint32_t pending_limit,
                       const uint8_t *uuid, uint64_t next_generation, struct kvdev_index **ret);
void kvdev_index_destroy(struct kvdev_index *index);
/* Build everything from the table image. */
int kvdev_index_load(struct kvdev_index *index);
uint8_t *kvdev_index_dirty_map(struct kvdev_index *index);
/* The counters a batch asks for: pending, live, free, reserved. A stat counts dirty blocks as well. */
void kvdev_index_counts(const struct kvdev_index *index, uint32_t *counts);
void kvdev_index_stat(const struct kvdev_index *index, struct kvdev_index_stat *ret);

/* Grants of the keys that are stored, KVDEV_SLOT_NONE for the others; returns how many are. Touched
 * keys become the latest used, the first of the batch the latest of all. */
uint32_t kvdev_index_lookup(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int touch,
                            struct kvdev_grant *grants);
uint32_t kvdev_index_contains(const struct kvdev_index *index, const uint8_t *keys, uint32_t count,
                              uint8_t *found);
uint32_t kvdev_index_prefix(const struct kvdev_index *index, const uint8_t *keys, uint32_t count);
/* Position of the first key that repeats an earlier one, or count. `scratch`: room for 4 * count words. */
uint32_t kvdev_index_find_duplicate(const uint8_t *keys, uint32_t count, uint32_t *scratch);
/* All or nothing: -ENOSPC when fewer slots are free. */
int kvdev_index_reserve(struct kvdev_index *index, uint32_t count, uint32_t length,
                        struct kvdev_grant *grants);
/* Turn written grants into entries, give the others back. done[i] 1: stored. -ENOBUFS: commit first. */
int kvdev_index_commit(struct kvdev_index *index, const uint8_t *keys, struct kvdev_grant *grants,
                       const uint32_t *crc32c, const uint8_t *outcome, uint32_t count, uint8_t *done);
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
int kvdev_index_evict(struct kvdev_index *index, uint32_t count, uint32_t *evicted);
/* 1 where key, generation and bytes match the grant's checksum and its length is `length`; how many do. */
uint32_t kvdev_index_verify(const struct kvdev_index *index, const uint8_t *keys,
                            const struct kvdev_grant *grants, const uint32_t *crc32c, uint32_t length,
                            uint32_t count, uint8_t *valid);

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

/* Bytes between scattered places: copies `size_bytes` for each pair of addresses. */
void kvdev_copy_many(const uint64_t *to, const uint64_t *from, uint32_t size_bytes, uint32_t count);
void kvdev_crc32c_many(const uint64_t *from, uint64_t size_bytes, uint32_t count, uint32_t *crc32c);
/* cdef end */

_Static_assert(sizeof(struct kvdev_media_header) == 64, "a media header is 64 bytes");
_Static_assert(offsetof(struct kvdev_media_header, crc32c) == 16, "the checksum stands at byte 16");
_Static_assert(offsetof(struct kvdev_media_header, sequence) == 40, "the sequence stands at byte 40");
_Static_assert(sizeof(struct kvdev_entry) == 64, "an entry is 64 bytes");
_Static_assert(offsetof(struct kvdev_entry, slot_index) == 60, "the slot index ends an entry");
_Static_assert(sizeof(struct kvdev_grant) == 24, "a grant is 24 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "media structures are used in place");

#endif

/* The page table as it lies on media: the header of every structure, table blocks, entries, their checksum.
 *
 * Works on images in the caller's memory; knows no index and does no I/O. Layouts: docs/on-disk-format.md. */
#ifndef KVDEV_PAGE_TABLE_H
#define KVDEV_PAGE_TABLE_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
/* Checksums of pages, by their number on media. Arrays of sums are uint32_t for CRC32C, uint64_t for NH-64. */
#define KVDEV_CHECKSUM_CRC32C 1
#define KVDEV_CHECKSUM_NH64 2

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
    uint8_t algorithm;           /* KVDEV_CHECKSUM_ */
    uint16_t use;                /* how the eviction policy has seen it used; 0: not */
    uint32_t slot_index;
};

struct kvdev_grant {             /* leave to read or write one slot, as long as its generation stands */
    uint64_t generation;
    uint64_t checksum;
    uint32_t slot_index;         /* KVDEV_SLOT_NONE: the key is not stored */
    uint32_t length;
};

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

/* An entry's checksum, which binds `sum`, the one of the page's bytes, to what the page is; and `sum` out of it. */
uint64_t kvdev_entry_checksum(uint32_t algorithm, const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                              uint32_t length, uint64_t sum);
uint64_t kvdev_entry_sum(uint32_t algorithm, const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                         uint32_t length, uint64_t checksum);
uint64_t kvdev_sum_at(uint32_t algorithm, const void *sums, uint32_t index);
/* 1 where key, generation and sum of the bytes match the grant's checksum and its length is `length`; how many do. */
uint32_t kvdev_grants_verify(uint32_t algorithm, const uint8_t *uuid, const uint8_t *keys,
                             const struct kvdev_grant *grants, const void *sums, uint32_t length, uint32_t count,
                             uint8_t *valid);
/* The sums that the grants' bytes must have. */
void kvdev_grants_sums(uint32_t algorithm, const uint8_t *uuid, const uint8_t *keys, const struct kvdev_grant *grants,
                       uint32_t count, void *sums);
/* The slot of the first live entry with another algorithm than this, or `slot_count`. */
uint32_t kvdev_table_find_algorithm(const uint8_t *table, uint32_t block_bytes, uint32_t slot_count,
                                    uint32_t algorithm);
/* cdef end */

_Static_assert(sizeof(struct kvdev_media_header) == 64, "a media header is 64 bytes");
_Static_assert(offsetof(struct kvdev_media_header, crc32c) == 16, "the checksum stands at byte 16");
_Static_assert(offsetof(struct kvdev_media_header, sequence) == 40, "the sequence stands at byte 40");
_Static_assert(sizeof(struct kvdev_entry) == 64, "an entry is 64 bytes");
_Static_assert(offsetof(struct kvdev_entry, slot_index) == 60, "the slot index ends an entry");
_Static_assert(sizeof(struct kvdev_grant) == 24, "a grant is 24 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "media structures are used in place");

#endif

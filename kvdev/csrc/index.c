#include "index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "crc32c.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define HEADER_BYTES 64u
#define TABLE_MAGIC 0x4c4254565645444bull /* "KDEVVTBL" as bytes */
#define FORMAT_VERSION 1u
#define NONE KVDEV_SLOT_NONE
#define LOOKAHEAD 16u /* keys between the fetch of a line and its use: as many misses overlap */
#define GROUP 256u    /* keys whose slots are found before any is used; a power of two */
#define LINE_TAGS 10u
#define LINE_LOAD 7u        /* slots for each line: few lines overflow, 9.1 bytes a slot */
#define OVERFLOW_MAX 0xffffu
#define HUGE_BYTES ((size_t)2 << 20)

enum slot_state { SLOT_FREE, SLOT_RESERVED, SLOT_LIVE, SLOT_LEAVING, SLOT_QUARANTINED };
#define STATE_MASK 0x07u
#define FLAG_DUE 0x08u      /* its record has not been collected */
#define FLAG_ON_MEDIA 0x10u /* a recovery might find the entry live */
#define FLAG_PINNED 0x20u   /* live, and not in the list that evictions take from */

/* One cache line of the hash: the key's home is a line, what finds it full goes to the next one. */
struct line {
    uint16_t tag[LINE_TAGS]; /* 16 bits of the key's hash, 0 for an empty place */
    uint16_t overflow;       /* keys that passed this line because it was full; sticks at OVERFLOW_MAX */
    uint16_t unused;
    uint32_t slot[LINE_TAGS];
};
_Static_assert(sizeof(struct line) == 64, "a line of the hash is a cache line");

struct link {
    uint32_t prev;
    uint32_t next;
};
_Static_assert(sizeof(struct link) == sizeof(uint64_t), "links are lent to a sort of 64-bit pairs");

struct kvdev_index {
    uint8_t *table;
    struct line *lines;
    struct link *links; /* of the list the slot is in; a free slot uses next alone */
    uint32_t *pending;
    uint8_t *flags;
    uint8_t *block_dirty;
    uint32_t block_bytes;
    uint32_t per_block;
    uint32_t block_count;
    uint32_t slot_count;
    uint32_t line_count;
    uint64_t per_block_magic; /* slot / per_block is slot * magic >> shift: a division costs as much as a probe */
    unsigned per_block_shift;
    uint32_t pending_limit;
    uint32_t pending_count;
    uint32_t newest; /* list of live slots by last use */
    uint32_t oldest;
    uint32_t free_head;
    uint32_t free_tail;
    uint32_t state_count[8];
    uint32_t duplicate_count;
    uint32_t pinned_count;
    uint32_t clock;
    uint64_t evicted_count;
    uint64_t next_generation;
    uint64_t memory_bytes;
    uint8_t uuid[16];
};

/* --- structures on media ------------------------------------------------------------------- */

static uint32_t media_crc(const uint8_t *block, uint32_t size)
{
    static const uint8_t zero[4];
    uint32_t crc = kvdev_crc32c(0, block, offsetof(struct kvdev_media_header, crc32c));
    crc = kvdev_crc32c(crc, zero, sizeof(zero));
    return kvdev_crc32c(crc, block + 20, size - 20);
}

void kvdev_media_seal(uint8_t *block)
{
    struct kvdev_media_header head;
    memcpy(&head, block, sizeof(head));
    head.crc32c = media_crc(block, head.size_bytes);
    memcpy(block, &head, sizeof(head));
}

void kvdev_media_seal_many(uint8_t *blocks, uint32_t block_bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        kvdev_media_seal(blocks + (size_t)i * block_bytes);
    }
}

int kvdev_media_check(const uint8_t *block, size_t limit, uint64_t magic, const uint8_t *uuid)
{
    struct kvdev_media_header head;
    if (limit < sizeof(head)) {
        return -EMSGSIZE;
    }
    memcpy(&head, block, sizeof(head));
    if (head.magic != magic) {
        return -EBADMSG;
    }
    if (head.size_bytes < sizeof(head) || head.size_bytes > limit) {
        return -EMSGSIZE;
    }
    if (head.crc32c != media_crc(block, head.size_bytes)) {
        return -EILSEQ;
    }
    if (head.version != FORMAT_VERSION) {
        return -EPROTO;
    }
    if (uuid != NULL && memcmp(uuid, head.uuid, sizeof(head.uuid)) != 0) {
        return -ESTALE;
    }
    return 0;
}

uint32_t kvdev_table_entries_per_block(uint32_t block_bytes)
{
    return (block_bytes - HEADER_BYTES) / (uint32_t)sizeof(struct kvdev_entry);
}

static uint32_t entries_in_block(uint32_t per_block, uint32_t slot_count, uint32_t block)
{
    uint64_t first = (uint64_t)block * per_block;
    uint64_t left = slot_count - first;
    return left < per_block ? (uint32_t)left : per_block;
}

void kvdev_table_format(uint8_t *table, uint32_t block_bytes, uint32_t first_block, uint32_t block_count,
                        uint32_t slot_count, const uint8_t *uuid)
{
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    for (uint32_t i = 0; i < block_count; i++) {
        uint8_t *block = table + (size_t)i * block_bytes;
        uint32_t index = first_block + i;
        uint32_t count = entries_in_block(per_block, slot_count, index);
        struct kvdev_media_header head = {
            .magic = TABLE_MAGIC,
            .version = FORMAT_VERSION,
            .count = (uint16_t)count,
            .size_bytes = block_bytes,
            .index = index,
        };
        memset(block, 0, block_bytes);
        memcpy(head.uuid, uuid, sizeof(head.uuid));
        memcpy(block, &head, sizeof(head));
        for (uint32_t k = 0; k < count; k++) {
            uint32_t slot = index * per_block + k;
            memcpy(block + HEADER_BYTES + (size_t)k * sizeof(struct kvdev_entry)
                       + offsetof(struct kvdev_entry, slot_index),
                   &slot, sizeof(slot));
        }
        kvdev_media_seal(block);
    }
}

/* Whether a table block is intact and says what its place demands. */
static int table_block_ok(const uint8_t *block, uint32_t block_bytes, uint32_t index, uint32_t slot_count,
                          const uint8_t *uuid)
{
    struct kvdev_media_header head;
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    if (kvdev_media_check(block, block_bytes, TABLE_MAGIC, uuid) != 0) {
        return 0;
    }
    memcpy(&head, block, sizeof(head));
    if (head.size_bytes != block_bytes || head.index != index
        || head.count != entries_in_block(per_block, slot_count, index)) {
        return 0;
    }
    const struct kvdev_entry *entries = (const struct kvdev_entry *)(const void *)(block + HEADER_BYTES);
    for (uint32_t k = 0; k < head.count; k++) {
        if (entries[k].slot_index != index * per_block + k || entries[k].state > 1) {
            return 0;
        }
    }
    return 1;
}

uint32_t kvdev_table_check(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint32_t *bad, uint32_t bad_max)
{
    uint32_t bad_count = 0;
    for (uint32_t i = 0; i < block_count; i++) {
        uint8_t *block = table + (size_t)i * block_bytes;
        if (table_block_ok(block, block_bytes, i, slot_count, uuid)) {
            continue;
        }
        if (bad_count < bad_max) {
            bad[bad_count] = i;
        }
        bad_count++;
        kvdev_table_format(block, block_bytes, i, 1, slot_count, uuid);
    }
    return bad_count;
}

uint32_t kvdev_table_merge(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint8_t *moved, uint32_t moved_count)
{
    uint32_t merged = 0;
    for (uint32_t i = 0; i < moved_count; i++) {
        const uint8_t *block = moved + (size_t)i * block_bytes;
        struct kvdev_media_header head;
        struct kvdev_media_header old;
        memcpy(&head, block, sizeof(head));
        if (head.index >= block_count || !table_block_ok(block, block_bytes, head.index, slot_count, uuid)) {
            continue;
        }
        uint8_t *place = table + (size_t)head.index * block_bytes;
        memcpy(&old, place, sizeof(old));
        if (!table_block_ok(place, block_bytes, head.index, slot_count, uuid) || head.sequence > old.sequence) {
            memcpy(place, block, block_bytes);
            merged++;
        }
    }
    return merged;
}

static struct kvdev_entry *entry_at(uint8_t *table, uint32_t block_bytes, uint32_t per_block, uint32_t slot)
{
    return (struct kvdev_entry *)(void *)(table + (size_t)(slot / per_block) * block_bytes + HEADER_BYTES
                                          + (size_t)(slot % per_block) * sizeof(struct kvdev_entry));
}

int kvdev_table_apply(uint8_t *table, uint32_t block_bytes, uint32_t slot_count, uint8_t *block_dirty,
                      const struct kvdev_entry *records, uint32_t count, uint64_t first_sequence)
{
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    for (uint32_t i = 0; i < count; i++) {
        if (records[i].slot_index >= slot_count || records[i].state > 1) {
            return -EINVAL;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        uint64_t included;
        memcpy(&included,
               table + (size_t)(slot / per_block) * block_bytes
                   + offsetof(struct kvdev_media_header, sequence),
               sizeof(included));
        if (first_sequence + i > included) {
            *entry_at(table, block_bytes, per_block, slot) = records[i];
            block_dirty[slot / per_block] = 1;
        }
    }
    return 0;
}

uint64_t kvdev_entry_checksum(const uint8_t *uuid, const uint8_t *key, uint64_t generation, uint32_t length,
                              uint32_t crc32c)
{
    uint8_t identity[64];
    memcpy(identity, uuid, 16);
    memcpy(identity + 16, key, 32);
    memcpy(identity + 48, &generation, 8);
    memcpy(identity + 56, &length, 4);
    memcpy(identity + 60, &crc32c, 4);
    return (uint64_t)kvdev_crc32c(0, identity, sizeof(identity)) << 32 | crc32c;
}

/* --- hash ---------------------------------------------------------------------------------- */

static uint64_t hash_key(const uint8_t *key)
{
    uint64_t word[4];
    memcpy(word, key, sizeof(word));
    uint64_t h = (word[0] ^ (word[1] << 23 | word[1] >> 41)) * 0x9e3779b97f4a7c15ull;
    h ^= (word[2] ^ (word[3] << 41 | word[3] >> 23)) * 0xc2b2ae3d27d4eb4full;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ull;
    return h ^ h >> 32;
}

/* The high half of the hash chooses the line, 16 bits of the low half are the tag. */
static uint32_t home_of(const struct kvdev_index *index, uint64_t hash)
{
    return (uint32_t)((hash >> 32) * index->line_count >> 32);
}

static uint16_t tag_of(uint64_t hash)
{
    uint16_t tag = (uint16_t)hash;
    return tag != 0 ? tag : 1;
}

static uint32_t block_of(const struct kvdev_index *index, uint32_t slot)
{
    return (uint32_t)(slot * index->per_block_magic >> index->per_block_shift);
}

static struct kvdev_entry *entry_of(const struct kvdev_index *index, uint32_t slot)
{
    uint32_t block = block_of(index, slot);
    return (struct kvdev_entry *)(void *)(index->table + (size_t)block * index->block_bytes + HEADER_BYTES
                                          + (size_t)(slot - block * index->per_block)
                                                * sizeof(struct kvdev_entry));
}

static uint32_t next_line(const struct kvdev_index *index, uint32_t line)
{
    return line + 1 == index->line_count ? 0 : line + 1;
}

/* Places of a line that hold the tag, a bit each. Plain enough for the compiler to do with vectors. */
static uint32_t tag_matches(const struct line *line, uint16_t tag)
{
#ifdef __SSE2__
    __m128i wanted = _mm_set1_epi16((short)tag);
    __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)(const void *)line->tag), wanted);
    __m128i high = _mm_cmpeq_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(line->tag + 8)), wanted);
    uint32_t bits = (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
    return bits & ((1u << LINE_TAGS) - 1);
#else
    uint32_t bits = 0;
    for (uint32_t i = 0; i < LINE_TAGS; i++) {
        bits |= (uint32_t)(line->tag[i] == tag) << i;
    }
    return bits;
#endif
}

/* Of two 32-byte keys, without branches: the compiler keeps it in registers. */
static int keys_equal(const uint8_t *a, const uint8_t *b)
{
    uint64_t x[4];
    uint64_t y[4];
    memcpy(x, a, sizeof(x));
    memcpy(y, b, sizeof(y));
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

static uint32_t find(const struct kvdev_index *index, const uint8_t *key, uint64_t hash)
{
    uint16_t tag = tag_of(hash);
    uint32_t at = home_of(index, hash);
    /* Bounded: a turn over all lines, though one that never overflowed ends it. */
    for (uint32_t turn = 0; turn < index->line_count; turn++) {
        const struct line *line = &index->lines[at];
        for (uint32_t bits = tag_matches(line, tag); bits != 0; bits &= bits - 1) {
            uint32_t slot = line->slot[__builtin_ctz(bits)];
            if (keys_equal(entry_of(index, slot)->key, key)) {
                return slot;
            }
        }
        if (line->overflow == 0) {
            break;
        }
        at = next_line(index, at);
    }
    return NONE;
}

/* The key is not there yet, and there are more places than slots. */
static void hash_insert(struct kvdev_index *index, uint64_t hash, uint32_t slot)
{
    uint32_t at = home_of(index, hash);
    for (;;) {
        struct line *line = &index->lines[at];
        uint32_t empty = tag_matches(line, 0);
        if (empty != 0) {
            uint32_t place = (uint32_t)__builtin_ctz(empty);
            line->tag[place] = tag_of(hash);
            line->slot[place] = slot;
            return;
        }
        if (line->overflow != OVERFLOW_MAX) {
            line->overflow++;
        }
        at = next_line(index, at);
    }
}

/* The slot is there, under this hash: lines between its home and its place count one key less passing. */
static void hash_delete(struct kvdev_index *index, uint64_t hash, uint32_t slot)
{
    uint16_t tag = tag_of(hash);
    uint32_t at = home_of(index, hash);
    for (;;) {
        struct line *line = &index->lines[at];
        for (uint32_t bits = tag_matches(line, tag); bits != 0; bits &= bits - 1) {
            uint32_t place = (uint32_t)__builtin_ctz(bits);
            if (line->slot[place] == slot) {
                line->tag[place] = 0;
                return;
            }
        }
        if (line->overflow != OVERFLOW_MAX) {
            line->overflow--;
        }
        at = next_line(index, at);
    }
}

#define UNSURE (NONE - 1) /* no slot: the key may be in a further line */

/* Look into the key's line and fetch the entry that it names first; its slot, NONE or UNSURE. */
static inline uint32_t first_candidate(const struct kvdev_index *index, uint64_t hash)
{
    const struct line *line = &index->lines[home_of(index, hash)];
    uint32_t bits = tag_matches(line, tag_of(hash));
    if (bits == 0) {
        return line->overflow == 0 ? NONE : UNSURE;
    }
    uint32_t slot = line->slot[__builtin_ctz(bits)];
    __builtin_prefetch(entry_of(index, slot));
    return slot;
}

/* --- lists and states ---------------------------------------------------------------------- */

static uint32_t state_of(const struct kvdev_index *index, uint32_t slot)
{
    return index->flags[slot] & STATE_MASK;
}

static void set_state(struct kvdev_index *index, uint32_t slot, enum slot_state state)
{
    index->state_count[state_of(index, slot)]--;
    index->flags[slot] = (uint8_t)((index->flags[slot] & ~STATE_MASK) | (uint32_t)state);
    index->state_count[state]++;
}

static void use_push(struct kvdev_index *index, uint32_t slot)
{
    index->links[slot] = (struct link){ .prev = NONE, .next = index->newest };
    if (index->newest != NONE) {
        index->links[index->newest].prev = slot;
    } else {
        index->oldest = slot;
    }
    index->newest = slot;
}

static void use_unlink(struct kvdev_index *index, uint32_t slot)
{
    struct link link = index->links[slot];
    if (link.prev != NONE) {
        index->links[link.prev].next = link.next;
    } else {
        index->newest = link.next;
    }
    if (link.next != NONE) {
        index->links[link.next].prev = link.prev;
    } else {
        index->oldest = link.prev;
    }
}

/* To the end of the free list: a slot rests as long as there are others. */
static void free_push(struct kvdev_index *index, uint32_t slot)
{
    set_state(index, slot, SLOT_FREE);
    index->links[slot].next = NONE;
    if (index->free_tail != NONE) {
        index->links[index->free_tail].next = slot;
    } else {
        index->free_head = slot;
    }
    index->free_tail = slot;
}

static uint32_t free_pop(struct kvdev_index *index)
{
    uint32_t slot = index->free_head;
    index->free_head = index->links[slot].next;
    if (index->free_head == NONE) {
        index->free_tail = NONE;
    }
    return slot;
}

static void due(struct kvdev_index *index, uint32_t slot)
{
    if (!(index->flags[slot] & FLAG_DUE)) {
        index->flags[slot] |= FLAG_DUE;
        index->pending[index->pending_count++] = slot;
    }
}

/* Whether `count` more slots can become due. */
static int pending_has_room(const struct kvdev_index *index, uint64_t count)
{
    return index->pending_count + count <= index->pending_limit;
}

static void clear_entry(struct kvdev_entry *entry)
{
    memset(entry->key, 0, sizeof(entry->key));
    entry->state = 0;
    entry->checksum = 0;
    entry->length = 0;
}

/* A live slot leaves: at once if media never knew it, else when its free record is durable. Until then
 * its entry keeps what it said, free by its state alone, so that it can be revived. */
static void retire(struct kvdev_index *index, uint32_t slot)
{
    struct kvdev_entry *entry = entry_of(index, slot);
    hash_delete(index, hash_key(entry->key), slot);
    if (index->flags[slot] & FLAG_PINNED) {
        index->flags[slot] &= (uint8_t)~FLAG_PINNED;
        index->pinned_count--;
    } else {
        use_unlink(index, slot);
    }
    if (index->flags[slot] & FLAG_ON_MEDIA) {
        entry->state = 0;
        set_state(index, slot, SLOT_LEAVING);
        due(index, slot);
    } else {
        clear_entry(entry);
        index->flags[slot] &= (uint8_t)~FLAG_DUE;
        free_push(index, slot);
    }
}

/* --- life ---------------------------------------------------------------------------------- */

/* Memory of large tables: whole huge pages where the kernel has them, for a probe that misses the cache
 * should not miss the TLB as well. */
static void *alloc_table(size_t size_bytes)
{
    if (size_bytes < HUGE_BYTES) {
        return aligned_alloc(64, (size_bytes + 63) & ~(size_t)63);
    }
    void *memory = aligned_alloc(HUGE_BYTES, (size_bytes + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1));
    if (memory != NULL) {
        (void)madvise(memory, size_bytes, MADV_HUGEPAGE); /* without it the same, slower */
    }
    return memory;
}

void kvdev_index_destroy(struct kvdev_index *index)
{
    if (index == NULL) {
        return;
    }
    free(index->lines);
    free(index->links);
    free(index->pending);
    free(index->flags);
    free(index->block_dirty);
    free(index);
}

/* slot / per_block without a division: exact for slots below 2^31, as the error of the rounded-up
 * quotient stays below 2^shift / 2^31. */
static void set_per_block(struct kvdev_index *index, uint32_t per_block)
{
    unsigned bits = 0;
    while (1u << bits < per_block) {
        bits++;
    }
    index->per_block = per_block;
    index->per_block_shift = 31 + bits;
    index->per_block_magic = ((uint64_t)1 << index->per_block_shift) / per_block + 1;
}

int kvdev_index_create(uint8_t *table, uint32_t block_bytes, uint32_t slot_count, uint32_t pending_limit,
                       const uint8_t *uuid, uint64_t next_generation, struct kvdev_index **ret)
{
    if (slot_count == 0 || slot_count >= NONE / 2 || block_bytes < 128 || pending_limit == 0) {
        return -EINVAL;
    }
    struct kvdev_index *index = calloc(1, sizeof(*index));
    if (index == NULL) {
        return -ENOMEM;
    }
    index->table = table;
    index->block_bytes = block_bytes;
    set_per_block(index, kvdev_table_entries_per_block(block_bytes));
    index->block_count = (slot_count + index->per_block - 1) / index->per_block;
    index->slot_count = slot_count;
    index->line_count = slot_count / LINE_LOAD + 2;
    index->pending_limit = pending_limit;
    index->next_generation = next_generation;
    memcpy(index->uuid, uuid, sizeof(index->uuid));
    index->lines = alloc_table((size_t)index->line_count * sizeof(*index->lines));
    index->links = alloc_table((size_t)slot_count * sizeof(*index->links));
    index->flags = alloc_table(slot_count);
    index->pending = calloc(pending_limit, sizeof(*index->pending));
    index->block_dirty = calloc(index->block_count, sizeof(*index->block_dirty));
    if (index->lines == NULL || index->links == NULL || index->pending == NULL || index->flags == NULL
        || index->block_dirty == NULL) {
        kvdev_index_destroy(index);
        return -ENOMEM;
    }
    memset(index->lines, 0, (size_t)index->line_count * sizeof(*index->lines));
    memset(index->flags, 0, slot_count);
    index->memory_bytes = sizeof(*index) + (uint64_t)index->line_count * sizeof(*index->lines)
                          + (uint64_t)slot_count * (sizeof(*index->links) + 1) + (uint64_t)pending_limit * 4
                          + index->block_count;
    *ret = index;
    return 0;
}

uint8_t *kvdev_index_dirty_map(struct kvdev_index *index)
{
    return index->block_dirty;
}

/* Sort `count` pairs (last use, slot) by last use, stable: a pass for each byte in which they differ. */
static void sort_by_use(uint64_t *pairs, uint64_t *spare, uint32_t count)
{
    uint64_t *from = pairs;
    uint64_t *to = spare;
    for (unsigned shift = 32; shift < 64; shift += 8) {
        uint32_t starts[257] = { 0 };
        for (uint32_t i = 0; i < count; i++) {
            starts[(from[i] >> shift & 0xff) + 1]++;
        }
        if (count == 0 || starts[(from[0] >> shift & 0xff) + 1] == count) {
            continue;
        }
        for (uint32_t i = 0; i < 256; i++) {
            starts[i + 1] += starts[i];
        }
        for (uint32_t i = 0; i < count; i++) {
            to[starts[from[i] >> shift & 0xff]++] = from[i];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != pairs) {
        memcpy(pairs, from, (size_t)count * sizeof(*pairs));
    }
}

/* Drop the older of two entries that claim one key: a crash may leave both. */
static void load_live(struct kvdev_index *index, uint32_t slot)
{
    struct kvdev_entry *entry = entry_of(index, slot);
    uint64_t hash = hash_key(entry->key);
    uint32_t rival = find(index, entry->key, hash);
    uint32_t loser = NONE;
    if (rival != NONE) {
        index->duplicate_count++;
        loser = entry_of(index, rival)->generation < entry->generation ? rival : slot;
    }
    set_state(index, slot, SLOT_LIVE);
    index->flags[slot] |= FLAG_ON_MEDIA;
    if (loser == rival && rival != NONE) {
        hash_delete(index, hash, rival);
    }
    if (loser != slot) {
        hash_insert(index, hash, slot);
    }
    if (loser != NONE) {
        struct kvdev_entry *gone = entry_of(index, loser);
        clear_entry(gone);
        set_state(index, loser, SLOT_LEAVING);
    }
}

/* Insert every live entry, in slot order, with the lines of the ones ahead on their way. */
static void load_hash(struct kvdev_index *index)
{
    uint32_t ahead = 0;
    for (uint32_t slot = 0; slot < index->slot_count; slot++) {
        for (; ahead < index->slot_count && ahead <= slot + LOOKAHEAD; ahead++) {
            const struct kvdev_entry *entry = entry_of(index, ahead);
            if (entry->state == 1) {
                __builtin_prefetch(&index->lines[home_of(index, hash_key(entry->key))], 1);
            }
        }
        if (entry_of(index, slot)->state == 1) {
            load_live(index, slot);
        }
    }
}

int kvdev_index_load(struct kvdev_index *index)
{
    uint64_t *pairs = malloc((size_t)index->slot_count * sizeof(*pairs));
    uint32_t live = 0;
    if (pairs == NULL) {
        return -ENOMEM;
    }
    memset(index->lines, 0, (size_t)index->line_count * sizeof(*index->lines));
    memset(index->flags, 0, index->slot_count);
    memset(index->state_count, 0, sizeof(index->state_count));
    index->state_count[SLOT_FREE] = index->slot_count;
    index->newest = index->oldest = index->free_head = index->free_tail = NONE;
    index->pending_count = index->duplicate_count = index->pinned_count = index->clock = 0;
    load_hash(index);
    for (uint32_t slot = 0; slot < index->slot_count; slot++) {
        if (state_of(index, slot) == SLOT_LIVE) {
            uint32_t last_use = entry_of(index, slot)->last_use;
            pairs[live++] = (uint64_t)last_use << 32 | slot;
            index->clock = last_use > index->clock ? last_use : index->clock;
        }
    }
    /* The links hold nothing yet: they are the sort's other array. */
    sort_by_use(pairs, (uint64_t *)(void *)index->links, live);
    for (uint32_t slot = 0; slot < index->slot_count; slot++) {
        if (state_of(index, slot) == SLOT_FREE) {
            free_push(index, slot);
        } else if (state_of(index, slot) == SLOT_LEAVING) {
            if (pending_has_room(index, 1)) {
                due(index, slot);
            } else {
                set_state(index, slot, SLOT_QUARANTINED); /* found again at the next load */
            }
        }
    }
    for (uint32_t i = 0; i < live; i++) {
        __builtin_prefetch(&index->links[(uint32_t)pairs[i + LOOKAHEAD < live ? i + LOOKAHEAD : i]], 1);
        use_push(index, (uint32_t)pairs[i]);
    }
    free(pairs);
    return 0;
}

void kvdev_index_counts(const struct kvdev_index *index, uint32_t *counts)
{
    counts[0] = index->pending_count;
    counts[1] = index->state_count[SLOT_LIVE];
    counts[2] = index->state_count[SLOT_FREE];
    counts[3] = index->state_count[SLOT_RESERVED];
}

void kvdev_index_stat(const struct kvdev_index *index, struct kvdev_index_stat *ret)
{
    uint32_t dirty = 0;
    for (uint32_t i = 0; i < index->block_count; i++) {
        dirty += index->block_dirty[i];
    }
    *ret = (struct kvdev_index_stat){
        .slot_count = index->slot_count,
        .live_count = index->state_count[SLOT_LIVE],
        .free_count = index->state_count[SLOT_FREE],
        .reserved_count = index->state_count[SLOT_RESERVED],
        .leaving_count = index->state_count[SLOT_LEAVING],
        .quarantined_count = index->state_count[SLOT_QUARANTINED],
        .pending_count = index->pending_count,
        .pending_limit = index->pending_limit,
        .dirty_block_count = dirty,
        .duplicate_count = index->duplicate_count,
        .pinned_count = index->pinned_count,
        .evicted_count = index->evicted_count,
        .next_generation = index->next_generation,
        .memory_bytes = index->memory_bytes,
    };
}

/* --- batches ------------------------------------------------------------------------------- */

/* Slots of up to GROUP keys. Three steps run behind one another, LOOKAHEAD keys apart: fetch a key's
 * line; look into it and fetch the entry it names; compare. So the misses of many keys overlap. */
static void find_group(const struct kvdev_index *index, const uint8_t *keys, uint32_t count, uint32_t *slots)
{
    uint64_t hashes[GROUP];
    for (uint32_t i = 0; i < count + 2 * LOOKAHEAD; i++) {
        if (i < count) {
            hashes[i] = hash_key(keys + (size_t)i * 32);
            __builtin_prefetch(&index->lines[home_of(index, hashes[i])]);
        }
        uint32_t middle = i - LOOKAHEAD; /* wraps far above count */
        if (middle < count) {
            slots[middle] = first_candidate(index, hashes[middle]);
        }
        uint32_t last = i - 2 * LOOKAHEAD;
        if (last < count) {
            const uint8_t *key = keys + (size_t)last * 32;
            uint32_t slot = slots[last];
            if (slot == UNSURE || (slot != NONE && !keys_equal(entry_of(index, slot)->key, key))) {
                slots[last] = find(index, key, hashes[last]);
            }
        }
    }
}

static uint32_t group_size(uint32_t left)
{
    return left < GROUP ? left : GROUP;
}

uint32_t kvdev_index_lookup(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int touch,
                            struct kvdev_grant *grants)
{
    uint32_t slots[GROUP];
    uint32_t hits = 0;
    if (touch) {
        index->clock++;
    }
    for (uint32_t done = 0; done < count; done += GROUP) {
        uint32_t group = group_size(count - done);
        find_group(index, keys + (size_t)done * 32, group, slots);
        for (uint32_t i = 0; i < group; i++) {
            struct kvdev_grant *grant = &grants[done + i];
            *grant = (struct kvdev_grant){ .slot_index = slots[i] };
            if (slots[i] == NONE) {
                continue;
            }
            const struct kvdev_entry *entry = entry_of(index, slots[i]);
            grant->generation = entry->generation;
            grant->checksum = entry->checksum;
            grant->length = entry->length;
            hits++;
        }
    }
    /* Last to first: of one batch the first key counts as the latest used, so that a prefix outlives
     * what continues it. */
    for (uint32_t i = touch ? count : 0; i-- > 0;) {
        uint32_t slot = grants[i].slot_index;
        if (slot != NONE) {
            entry_of(index, slot)->last_use = index->clock;
            if (!(index->flags[slot] & FLAG_PINNED)) {
                use_unlink(index, slot);
                use_push(index, slot);
            }
        }
    }
    return hits;
}

uint32_t kvdev_index_contains(const struct kvdev_index *index, const uint8_t *keys, uint32_t count,
                              uint8_t *found)
{
    uint32_t slots[GROUP];
    uint32_t hits = 0;
    for (uint32_t done = 0; done < count; done += GROUP) {
        uint32_t group = group_size(count - done);
        find_group(index, keys + (size_t)done * 32, group, slots);
        for (uint32_t i = 0; i < group; i++) {
            found[done + i] = slots[i] != NONE;
            hits += slots[i] != NONE;
        }
    }
    return hits;
}

uint32_t kvdev_index_prefix(const struct kvdev_index *index, const uint8_t *keys, uint32_t count)
{
    uint32_t slots[GROUP];
    for (uint32_t done = 0; done < count; done += GROUP) {
        uint32_t group = group_size(count - done);
        find_group(index, keys + (size_t)done * 32, group, slots);
        for (uint32_t i = 0; i < group; i++) {
            if (slots[i] == NONE) {
                return done + i;
            }
        }
    }
    return count;
}

uint32_t kvdev_index_find_duplicate(const uint8_t *keys, uint32_t count, uint32_t *scratch)
{
    uint32_t room = 1;
    while (room < count * 2u && room < 1u << 31) {
        room <<= 1;
    }
    memset(scratch, 0, (size_t)room * sizeof(*scratch));
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        uint32_t place = (uint32_t)hash_key(key) & (room - 1);
        while (scratch[place] != 0) {
            if (memcmp(keys + (size_t)(scratch[place] - 1) * 32, key, 32) == 0) {
                return i;
            }
            place = (place + 1) & (room - 1);
        }
        scratch[place] = i + 1;
    }
    return count;
}

int kvdev_index_reserve(struct kvdev_index *index, uint32_t count, uint32_t length,
                        struct kvdev_grant *grants)
{
    if (index->state_count[SLOT_FREE] < count) {
        return -ENOSPC;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = free_pop(index);
        set_state(index, slot, SLOT_RESERVED);
        grants[i] = (struct kvdev_grant){
            .generation = index->next_generation++,
            .slot_index = slot,
            .length = length,
        };
    }
    return 0;
}

static int grant_is_in(const struct kvdev_index *index, const struct kvdev_grant *grant, uint32_t state)
{
    return grant->slot_index < index->slot_count && state_of(index, grant->slot_index) == state;
}

static void store_entry(struct kvdev_index *index, const uint8_t *key, struct kvdev_grant *grant,
                        uint32_t crc32c)
{
    uint64_t hash = hash_key(key);
    uint32_t older = find(index, key, hash);
    uint32_t slot = grant->slot_index;
    struct kvdev_entry *entry = entry_of(index, slot);
    grant->checksum = kvdev_entry_checksum(index->uuid, key, grant->generation, grant->length, crc32c);
    /* Due before its predecessor's free record: a cut between them leaves the key with one of the two. */
    set_state(index, slot, SLOT_LIVE);
    due(index, slot);
    /* What replaces a pinned page is pinned. */
    int is_pinned = older != NONE && (index->flags[older] & FLAG_PINNED) != 0;
    if (older != NONE) {
        retire(index, older);
    }
    *entry = (struct kvdev_entry){
        .generation = grant->generation,
        .checksum = grant->checksum,
        .length = grant->length,
        .last_use = index->clock,
        .state = 1,
        .algorithm = 1,
        .slot_index = slot,
    };
    memcpy(entry->key, key, sizeof(entry->key));
    hash_insert(index, hash, slot);
    if (is_pinned) {
        index->flags[slot] |= FLAG_PINNED;
        index->pinned_count++;
    } else {
        use_push(index, slot);
    }
}

uint32_t kvdev_index_pin(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int is_pinned,
                         uint8_t *done)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        uint32_t slot = find(index, key, hash_key(key));
        done[i] = slot != NONE;
        found += done[i];
        if (slot == NONE || ((index->flags[slot] & FLAG_PINNED) != 0) == (is_pinned != 0)) {
            continue;
        }
        if (is_pinned) {
            use_unlink(index, slot);
            index->flags[slot] |= FLAG_PINNED;
            index->pinned_count++;
        } else {
            index->flags[slot] &= (uint8_t)~FLAG_PINNED;
            index->pinned_count--;
            entry_of(index, slot)->last_use = index->clock;
            use_push(index, slot);
        }
    }
    return found;
}

int kvdev_index_commit(struct kvdev_index *index, const uint8_t *keys, struct kvdev_grant *grants,
                       const uint32_t *crc32c, const uint8_t *outcome, uint32_t count, uint8_t *done)
{
    if (!pending_has_room(index, 2 * (uint64_t)count)) {
        return -ENOBUFS;
    }
    index->clock++;
    for (uint32_t i = count; i-- > 0;) { /* last to first, as in lookup */
        done[i] = 0;
        if (!grant_is_in(index, &grants[i], SLOT_RESERVED)) {
            continue;
        }
        if (outcome[i] == KVDEV_OUTCOME_WRITTEN) {
            store_entry(index, keys + (size_t)i * 32, &grants[i], crc32c[i]);
            done[i] = 1;
        } else if (outcome[i] == KVDEV_OUTCOME_FAILED) {
            free_push(index, grants[i].slot_index);
        } else {
            set_state(index, grants[i].slot_index, SLOT_QUARANTINED);
        }
    }
    return 0;
}

int kvdev_index_remove(struct kvdev_index *index, const uint8_t *keys, uint32_t count, uint8_t *done)
{
    if (!pending_has_room(index, count)) {
        return -ENOBUFS;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        uint32_t slot = find(index, key, hash_key(key));
        done[i] = slot != NONE;
        if (slot != NONE) {
            retire(index, slot);
        }
    }
    return 0;
}

static int grant_is_current(const struct kvdev_index *index, const struct kvdev_grant *grant)
{
    return grant_is_in(index, grant, SLOT_LIVE)
           && entry_of(index, grant->slot_index)->generation == grant->generation;
}

int kvdev_index_withdraw(struct kvdev_index *index, const struct kvdev_grant *grants, uint32_t count,
                         uint8_t *done)
{
    if (!pending_has_room(index, count)) {
        return -ENOBUFS;
    }
    for (uint32_t i = 0; i < count; i++) {
        done[i] = (uint8_t)grant_is_current(index, &grants[i]);
        if (done[i]) {
            retire(index, grants[i].slot_index);
        }
    }
    return 0;
}

void kvdev_index_confirm(const struct kvdev_index *index, const struct kvdev_grant *grants, uint32_t count,
                         uint8_t *valid)
{
    for (uint32_t i = 0; i < count; i++) {
        valid[i] = (uint8_t)grant_is_current(index, &grants[i]);
    }
}

int kvdev_index_evict(struct kvdev_index *index, uint32_t count, uint32_t *evicted)
{
    if (!pending_has_room(index, count)) {
        return -ENOBUFS;
    }
    *evicted = 0;
    while (*evicted < count && index->oldest != NONE) {
        retire(index, index->oldest);
        index->evicted_count++;
        (*evicted)++;
    }
    return 0;
}

uint32_t kvdev_index_verify(const struct kvdev_index *index, const uint8_t *keys,
                            const struct kvdev_grant *grants, const uint32_t *crc32c, uint32_t length,
                            uint32_t count, uint8_t *valid)
{
    uint32_t valid_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t expected = kvdev_entry_checksum(index->uuid, keys + (size_t)i * 32, grants[i].generation,
                                                 grants[i].length, crc32c[i]);
        valid[i] = expected == grants[i].checksum && grants[i].length == length;
        valid_count += valid[i];
    }
    return valid_count;
}

/* --- records ------------------------------------------------------------------------------- */

/* Take the records due of live slots, or those of freed ones, in the order in which they became due. */
static uint32_t collect_state(struct kvdev_index *index, uint8_t state, struct kvdev_entry *records,
                              uint32_t count, uint32_t max)
{
    for (uint32_t i = 0; i < index->pending_count && count < max; i++) {
        uint32_t slot = index->pending[i];
        /* A slot may stand in the list twice, freed and stored again: one record says it all. */
        if (!(index->flags[slot] & FLAG_DUE) || entry_of(index, slot)->state != state) {
            continue;
        }
        index->flags[slot] = (uint8_t)((index->flags[slot] & ~FLAG_DUE) | FLAG_ON_MEDIA);
        index->block_dirty[block_of(index, slot)] = 1;
        records[count] = *entry_of(index, slot);
        if (state == 0) {
            clear_entry(&records[count]);
        }
        count++;
    }
    return count;
}

uint32_t kvdev_index_collect(struct kvdev_index *index, struct kvdev_entry *records, uint32_t max)
{
    /* A cut may leave any first part of the records. With all new pages before all freed slots it leaves a
     * replaced page or its successor, also where a page was replaced twice since the last commit. */
    uint32_t count = collect_state(index, 1, records, 0, max);
    count = collect_state(index, 0, records, count, max);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < index->pending_count; i++) {
        if (index->flags[index->pending[i]] & FLAG_DUE) {
            index->pending[kept++] = index->pending[i];
        }
    }
    index->pending_count = kept;
    return count;
}

void kvdev_index_settle(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        if (records[i].state == 0 && state_of(index, slot) == SLOT_LEAVING) {
            index->flags[slot] &= (uint8_t)~FLAG_ON_MEDIA;
            clear_entry(entry_of(index, slot));
            free_push(index, slot);
        }
    }
}

void kvdev_index_revive(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count,
                        int is_live)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        struct kvdev_entry *entry = entry_of(index, slot);
        /* Length 0: it was cleared, in an attempt before this one or by the load. */
        if (records[i].state != 0 || state_of(index, slot) != SLOT_LEAVING || entry->length == 0) {
            continue;
        }
        if (is_live) {
            entry->state = 1;
        } else {
            clear_entry(entry);
        }
    }
}

uint32_t kvdev_index_fail(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count)
{
    uint32_t withdrawn = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        if (records[i].state == 1 && state_of(index, slot) == SLOT_LIVE
            && entry_of(index, slot)->generation == records[i].generation) {
            retire(index, slot);
            withdrawn++;
        } else if (state_of(index, slot) == SLOT_LEAVING) {
            due(index, slot);
        }
    }
    return withdrawn;
}

uint32_t kvdev_index_drop_pending(struct kvdev_index *index)
{
    uint32_t withdrawn = 0;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < index->pending_count; i++) {
        uint32_t slot = index->pending[i];
        if (!(index->flags[slot] & FLAG_DUE)) {
            continue;
        }
        if (state_of(index, slot) == SLOT_LIVE) {
            retire(index, slot);
            withdrawn++;
        } else {
            index->pending[kept++] = slot;
        }
    }
    index->pending_count = kept;
    return withdrawn;
}

void kvdev_index_release(struct kvdev_index *index, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i] < index->slot_count && state_of(index, slots[i]) == SLOT_QUARANTINED) {
            free_push(index, slots[i]);
        }
    }
}

/* A live slot that is found no more; nobody reserves in an index that follows. */
static void forget(struct kvdev_index *index, uint32_t slot)
{
    if (state_of(index, slot) != SLOT_LIVE) {
        return;
    }
    hash_delete(index, hash_key(entry_of(index, slot)->key), slot);
    use_unlink(index, slot);
    set_state(index, slot, SLOT_FREE);
}

int kvdev_index_follow(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count,
                       uint64_t first_sequence)
{
    for (uint32_t i = 0; i < count; i++) {
        if (records[i].slot_index >= index->slot_count || records[i].state > 1) {
            return -EINVAL;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        struct kvdev_media_header head;
        memcpy(&head, index->table + (size_t)block_of(index, slot) * index->block_bytes, sizeof(head));
        if (first_sequence + i <= head.sequence) {
            continue;
        }
        forget(index, slot);
        *entry_of(index, slot) = records[i];
        if (records[i].state == 0) {
            continue;
        }
        uint64_t hash = hash_key(records[i].key);
        uint32_t rival = find(index, records[i].key, hash);
        if (rival != NONE && entry_of(index, rival)->generation > records[i].generation) {
            entry_of(index, slot)->state = 0; /* its free record is on its way */
            continue;
        }
        if (rival != NONE) {
            forget(index, rival);
        }
        set_state(index, slot, SLOT_LIVE);
        hash_insert(index, hash, slot);
        use_push(index, slot);
    }
    return 0;
}

uint32_t kvdev_index_dirty_blocks(const struct kvdev_index *index, uint32_t *blocks, uint32_t max)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < index->block_count && count < max; i++) {
        if (index->block_dirty[i]) {
            blocks[count++] = i;
        }
    }
    return count;
}

void kvdev_index_seal(struct kvdev_index *index, const uint32_t *blocks, uint32_t count, uint64_t sequence,
                      uint64_t epoch)
{
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *block = index->table + (size_t)blocks[i] * index->block_bytes;
        struct kvdev_media_header head;
        memcpy(&head, block, sizeof(head));
        head.sequence = sequence;
        head.epoch = epoch;
        memcpy(block, &head, sizeof(head));
        kvdev_media_seal(block);
    }
}

void kvdev_index_clear_dirty(struct kvdev_index *index, const uint32_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        index->block_dirty[blocks[i]] = 0;
    }
}

/* --- bytes --------------------------------------------------------------------------------- */

void kvdev_copy_many(const uint64_t *to, const uint64_t *from, uint32_t size_bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], size_bytes);
    }
}

void kvdev_crc32c_many(const uint64_t *from, uint64_t size_bytes, uint32_t count, uint32_t *crc32c)
{
    for (uint32_t i = 0; i < count; i++) {
        crc32c[i] = kvdev_crc32c(0, (const void *)(uintptr_t)from[i], size_bytes);
    }
}

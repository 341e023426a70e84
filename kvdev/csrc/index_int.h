/* Inside of the index: the hash over the table image, the order in which pages go, and the states of slots. */
#ifndef KVDEV_INDEX_INT_H
#define KVDEV_INDEX_INT_H

#include <string.h>

#include "index.h"

#define KVDEV_INDEX_LOOKAHEAD 16u /* keys between the fetch of a line and its use: as many misses overlap */
#define KVDEV_INDEX_GROUP 256u    /* keys hashed before any is looked up: bounds what stands on the stack */

/* Memory of large tables: whole huge pages where the kernel has them, for a probe that misses the cache
 * should not miss the TLB as well. */
void *kvdev_index_alloc(size_t size_bytes);

/* --- the caller's table image ---------------------------------------------------------------- */

struct kvdev_image {
    uint8_t *blocks;
    uint64_t magic; /* slot / per_block is slot * magic >> shift: a division costs as much as a probe */
    uint32_t block_bytes;
    uint32_t per_block;
    unsigned shift;
};

void kvdev_image_init(struct kvdev_image *image, uint8_t *blocks, uint32_t block_bytes);

static inline uint32_t kvdev_image_block(const struct kvdev_image *image, uint32_t slot)
{
    return (uint32_t)(slot * image->magic >> image->shift);
}

static inline struct kvdev_entry *kvdev_image_entry(const struct kvdev_image *image, uint32_t slot)
{
    uint32_t block = kvdev_image_block(image, slot);
    return (struct kvdev_entry *)(void *)(image->blocks + (size_t)block * image->block_bytes
                                          + sizeof(struct kvdev_media_header)
                                          + (size_t)(slot - block * image->per_block)
                                                * sizeof(struct kvdev_entry));
}

/* --- hash ------------------------------------------------------------------------------------ */

#define KVDEV_HASH_WAYS 8u

/* What the hash makes of a key: where to begin, and 64 further bits to know it by. */
struct kvdev_mark {
    uint64_t print;
    uint32_t home;
};

/* Lines of eight prints, a cache line each; a key that finds its home full goes to a line behind. The slots
 * stand in an array of their own, so that asking whether a key is there costs one miss. */
struct kvdev_hash {
    uint64_t *prints; /* of each place: 0 empty, 1 given up while keys passed the line, else a key's */
    uint32_t *slots;
    uint16_t *passed; /* keys that went past the line because it was full; sticks at 65535 */
    uint64_t seed[4];
    uint32_t line_count;
};

int kvdev_hash_init(struct kvdev_hash *hash, uint32_t slot_count, const uint8_t *uuid);
void kvdev_hash_deinit(struct kvdev_hash *hash);
void kvdev_hash_clear(struct kvdev_hash *hash);
uint64_t kvdev_hash_bytes(const struct kvdev_hash *hash);
struct kvdev_mark kvdev_hash_mark(const struct kvdev_hash *hash, const uint8_t *key);
void kvdev_hash_prefetch(const struct kvdev_hash *hash, struct kvdev_mark mark);
/* The slot whose entry has this key, all 32 bytes compared; KVDEV_SLOT_NONE when there is none. */
uint32_t kvdev_hash_find(const struct kvdev_hash *hash, const struct kvdev_image *image, const uint8_t *key,
                         struct kvdev_mark mark);
/* The key is not there yet, and there are more places than slots. */
void kvdev_hash_insert(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot);
/* Insert the key of a slot's entry, unless it is there: then the slot that has it. For loading. */
uint32_t kvdev_hash_enter(struct kvdev_hash *hash, const struct kvdev_image *image, struct kvdev_mark mark,
                          uint32_t slot);
/* The slot is there, under this mark. */
void kvdev_hash_delete(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot);
/* The slot's key moves to another slot. */
void kvdev_hash_replace(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot, uint32_t new_slot);
/* Slots of up to KVDEV_INDEX_GROUP keys, their misses overlapping. */
void kvdev_hash_find_group(const struct kvdev_hash *hash, const struct kvdev_image *image, const uint8_t *keys,
                           uint32_t count, uint32_t *slots);
/* Which keys are there, by their marks; returns how many are. */
uint32_t kvdev_hash_contains(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t count, uint8_t *found);
/* How many keys from the first on are there, by their marks. */
uint32_t kvdev_hash_prefix(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t count);

/* --- order ----------------------------------------------------------------------------------- */

#define KVDEV_ORDER_LISTS 16u

struct kvdev_link {
    uint32_t prev; /* towards the newest */
    uint32_t next; /* towards the oldest */
};
_Static_assert(sizeof(struct kvdev_link) == sizeof(uint64_t), "links are lent to a sort of 64-bit pairs");

/* In which order live pages go: one list or several by the policy, each from the newest to the oldest. A
 * list is a ring through an element behind the slots', so that a page leaves it without knowing which. */
struct kvdev_order {
    const struct kvdev_image *image;
    struct kvdev_link *links;
    uint32_t *ghosts;      /* s3fifo: pages that went lately, by their print; else NULL */
    uint32_t slot_count;
    uint32_t capacity;     /* pages that the policy is to expect: the quota */
    uint32_t policy;       /* KVDEV_POLICY_ */
    uint32_t small_count;  /* s3fifo: pages of the small list, and of the main one */
    uint32_t main_count;
    uint32_t gone_count;   /* s3fifo: evictions since the stamp last moved */
    uint32_t used_count;   /* lfu: uses since all counts were last lowered */
    uint16_t stamp;        /* s3fifo: the ghosts' clock, 64 ticks for as many evictions as the capacity */
    uint8_t base;          /* lfu: how often all counts were lowered, and the list of count 0 */
};

int kvdev_order_init(struct kvdev_order *order, const struct kvdev_image *image, uint32_t slot_count,
                     uint32_t capacity, uint32_t policy);
void kvdev_order_deinit(struct kvdev_order *order);
void kvdev_order_clear(struct kvdev_order *order);
uint64_t kvdev_order_bytes(const struct kvdev_order *order);
/* A page that was stored just now, with the uses of the one it replaces. */
void kvdev_order_add(struct kvdev_order *order, uint32_t slot, uint64_t print, uint16_t use);
/* A page from media, used later than all before it. */
void kvdev_order_load(struct kvdev_order *order, uint32_t slot);
/* A page that is back from being pinned, or kept. */
void kvdev_order_restore(struct kvdev_order *order, uint32_t slot);
void kvdev_order_touch(struct kvdev_order *order, uint32_t slot);
void kvdev_order_remove(struct kvdev_order *order, uint32_t slot);
/* The new slot takes the old one's place. */
void kvdev_order_move(struct kvdev_order *order, uint32_t slot, uint32_t new_slot);
/* Which page goes next, KVDEV_SLOT_NONE when none is in the order. */
uint32_t kvdev_order_next(struct kvdev_order *order);
/* A page is about to go, by the policy. */
void kvdev_order_gone(struct kvdev_order *order, uint64_t print);

/* --- index ----------------------------------------------------------------------------------- */

enum slot_state { SLOT_FREE, SLOT_RESERVED, SLOT_LIVE, SLOT_LEAVING, SLOT_QUARANTINED };
#define STATE_MASK 0x07u
#define FLAG_DUE 0x08u      /* its record has not been collected */
#define FLAG_ON_MEDIA 0x10u /* a recovery might find the entry live */
#define FLAG_PINNED 0x20u   /* live, and not in the order that evictions take from */
#define FLAG_KEPT 0x40u     /* live, and out of the order while others are evicted */

struct kvdev_index {
    struct kvdev_image image;
    struct kvdev_hash hash;
    struct kvdev_order order; /* live pages that are not pinned; a free slot uses the links' next alone */
    struct kvdev_order ages;  /* with ages: all live pages by when they were stored */
    uint32_t *pending;
    uint8_t *flags;
    uint8_t *block_dirty;
    uint32_t block_count;
    uint32_t slot_count;
    uint32_t slot_limit;
    uint32_t pending_limit;
    uint32_t pending_count;
    uint32_t free_head;
    uint32_t free_tail;
    uint32_t state_count[8];
    uint32_t duplicate_count;
    uint32_t pinned_count;
    uint32_t clock;
    int has_ages;
    uint32_t algorithm;
    uint64_t evicted_count;
    uint64_t expired_count;
    uint64_t next_generation;
    uint8_t uuid[16];
};

static inline struct kvdev_entry *entry_of(const struct kvdev_index *index, uint32_t slot)
{
    return kvdev_image_entry(&index->image, slot);
}

static inline uint32_t block_of(const struct kvdev_index *index, uint32_t slot)
{
    return kvdev_image_block(&index->image, slot);
}

static inline uint32_t state_of(const struct kvdev_index *index, uint32_t slot)
{
    return index->flags[slot] & STATE_MASK;
}

static inline void set_state(struct kvdev_index *index, uint32_t slot, enum slot_state state)
{
    index->state_count[state_of(index, slot)]--;
    index->flags[slot] = (uint8_t)((index->flags[slot] & ~STATE_MASK) | (uint32_t)state);
    index->state_count[state]++;
}

/* To the end of the free list: a slot rests as long as there are others. */
static inline void free_push(struct kvdev_index *index, uint32_t slot)
{
    struct kvdev_link *links = index->order.links;
    if (slot >= index->slot_limit) {
        set_state(index, slot, SLOT_QUARANTINED);
        return;
    }
    set_state(index, slot, SLOT_FREE);
    links[slot].next = KVDEV_SLOT_NONE;
    if (index->free_tail != KVDEV_SLOT_NONE) {
        links[index->free_tail].next = slot;
    } else {
        index->free_head = slot;
    }
    index->free_tail = slot;
}

static inline void due(struct kvdev_index *index, uint32_t slot)
{
    if (!(index->flags[slot] & FLAG_DUE)) {
        index->flags[slot] |= FLAG_DUE;
        index->pending[index->pending_count++] = slot;
    }
}

/* Whether `count` more slots can become due. */
static inline int pending_has_room(const struct kvdev_index *index, uint64_t count)
{
    return index->pending_count + count <= index->pending_limit;
}

static inline void clear_entry(struct kvdev_entry *entry)
{
    memset(entry->key, 0, sizeof(entry->key));
    entry->state = 0;
    entry->checksum = 0;
    entry->length = 0;
}

#endif

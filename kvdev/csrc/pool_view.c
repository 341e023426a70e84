#include "pool_view.h"

#include <stddef.h>
#include <string.h>

#define HEADER_BYTES 64u
#define PROBE_COUNT 16u      /* places a key may stand in, one after the other */
#define PLACES_PER_SLOT 4u   /* at a quarter full, sixteen places of live keys in a row do not happen */
#define READ_COUNT 4u        /* looks at an entry that is being written */
#define AHEAD 16u            /* keys between the fetch of hint or entry and its use: as many misses overlap */
#define HOMES (4u * AHEAD)   /* keys whose home is kept: a power of two, more than two distances */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

static uint32_t home_of(const struct kvdev_view *view, const uint8_t *key)
{
    uint64_t word[4];
    memcpy(word, key, sizeof(word));
    uint64_t hash = mix(word[0] ^ view->seed);
    hash = mix(hash ^ word[1]);
    hash = mix(hash ^ word[2]);
    hash = mix(hash ^ word[3]);
    return (uint32_t)hash & (view->hint_count - 1);
}

static const struct kvdev_entry *entry_of(const struct kvdev_view *view, uint32_t slot)
{
    uint32_t per_block = (view->block_bytes - HEADER_BYTES) / (uint32_t)sizeof(struct kvdev_entry);
    return (const struct kvdev_entry *)(const void *)(view->table
                                                      + (size_t)(slot / per_block) * view->block_bytes
                                                      + HEADER_BYTES
                                                      + (size_t)(slot % per_block)
                                                            * sizeof(struct kvdev_entry));
}

/* Copy an entry that its owner may be writing; 0 while it does not hold still. */
static int read_entry(const struct kvdev_view *view, uint32_t slot, struct kvdev_entry *ret)
{
    const volatile uint64_t *words = (const volatile uint64_t *)(const volatile void *)entry_of(view, slot);
    uint64_t first[8];
    uint64_t again[8];
    for (uint32_t attempt = 0; attempt < READ_COUNT; attempt++) {
        for (uint32_t i = 0; i < 8; i++) {
            first[i] = words[i];
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        for (uint32_t i = 8; i-- > 0;) {
            again[i] = words[i];
        }
        if (memcmp(first, again, sizeof(first)) == 0) {
            memcpy(ret, first, sizeof(*ret));
            return 1;
        }
    }
    return 0;
}

uint32_t kvdev_view_hint_count(uint32_t slot_count)
{
    uint32_t count = 64;
    while (count < 1u << 31 && count < (uint64_t)slot_count * PLACES_PER_SLOT) {
        count <<= 1;
    }
    return count;
}

/* Whether a place says nothing true any more: its slot is free, or its key belongs elsewhere. */
static int is_stale(const struct kvdev_view *view, uint32_t place, uint32_t hint)
{
    const struct kvdev_entry *entry = entry_of(view, hint - 1);
    if (entry->state != 1) {
        return 1;
    }
    return ((place - home_of(view, entry->key)) & (view->hint_count - 1)) >= PROBE_COUNT;
}

static void insert(const struct kvdev_view *view, const uint8_t *key, uint32_t slot)
{
    uint32_t home = home_of(view, key);
    uint32_t chosen = home; /* where all places are taken, its home gives way: that key is missed */
    int is_chosen = 0;
    for (uint32_t i = 0; i < PROBE_COUNT; i++) {
        uint32_t place = (home + i) & (view->hint_count - 1);
        uint32_t hint = view->hints[place];
        if (hint == slot + 1) {
            return; /* the same slot stood here before: it is found again as it is */
        }
        if (!is_chosen && (hint == 0 || hint > view->slot_count || is_stale(view, place, hint))) {
            chosen = place;
            is_chosen = 1;
        }
        if (hint == 0) {
            break;
        }
    }
    __atomic_store_n(&view->hints[chosen], slot + 1, __ATOMIC_RELEASE);
}

void kvdev_view_insert(const struct kvdev_view *view, const uint8_t *keys, const struct kvdev_grant *grants,
                       uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (grants[i].slot_index < view->slot_count) {
            insert(view, keys + (size_t)i * 32, grants[i].slot_index);
        }
    }
}

void kvdev_view_fill(const struct kvdev_view *view)
{
    for (uint32_t slot = 0; slot < view->slot_count; slot++) {
        const struct kvdev_entry *entry = entry_of(view, slot);
        if (entry->state == 1) {
            insert(view, entry->key, slot);
        }
    }
}

static uint32_t find(const struct kvdev_view *view, const uint8_t *key, uint32_t home, struct kvdev_grant *grant)
{
    uint64_t newest = 0;
    uint32_t found = 0;
    *grant = (struct kvdev_grant){ .slot_index = KVDEV_SLOT_NONE };
    for (uint32_t i = 0; i < PROBE_COUNT; i++) {
        uint32_t hint = __atomic_load_n(&view->hints[(home + i) & (view->hint_count - 1)], __ATOMIC_ACQUIRE);
        struct kvdev_entry entry;
        if (hint == 0) {
            break;
        }
        if (hint > view->slot_count || !read_entry(view, hint - 1, &entry) || entry.state != 1
            || memcmp(entry.key, key, sizeof(entry.key)) != 0 || (found != 0 && entry.generation < newest)) {
            continue;
        }
        newest = entry.generation;
        found = 1;
        *grant = (struct kvdev_grant){ .generation = entry.generation,
                                       .checksum = entry.checksum,
                                       .slot_index = hint - 1,
                                       .length = entry.length };
    }
    return found;
}

/* Fetch the entry that the first hint names: where it is another key's, finding goes on without. */
static void fetch_entry(const struct kvdev_view *view, uint32_t home)
{
    uint32_t hint = __atomic_load_n(&view->hints[home], __ATOMIC_RELAXED);
    if (hint != 0 && hint <= view->slot_count) {
        __builtin_prefetch(entry_of(view, hint - 1));
    }
}

uint32_t kvdev_view_lookup(const struct kvdev_view *view, const uint8_t *keys, uint32_t count, int is_prefix,
                           struct kvdev_grant *grants)
{
    uint32_t homes[HOMES];
    uint32_t hits = 0;
    for (uint32_t i = 0; i < count + 2 * AHEAD; i++) {
        if (i < count) {
            homes[i % HOMES] = home_of(view, keys + (size_t)i * 32);
            __builtin_prefetch(&view->hints[homes[i % HOMES]]);
        }
        uint32_t middle = i - AHEAD; /* wraps far above the count */
        if (middle < count) {
            fetch_entry(view, homes[middle % HOMES]);
        }
        uint32_t last = i - 2 * AHEAD;
        if (last >= count) {
            continue;
        }
        uint32_t found = find(view, keys + (size_t)last * 32, homes[last % HOMES], &grants[last]);
        hits += found;
        if (is_prefix && !found) {
            break;
        }
    }
    return hits;
}

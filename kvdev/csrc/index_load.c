/* An index is built from a table image: hash, free slots, and the order in which pages go. */
#include "index_int.h"

#include <errno.h>
#include <stdlib.h>

#define NONE KVDEV_SLOT_NONE
#define LOOKAHEAD KVDEV_INDEX_LOOKAHEAD
#define LINE_WORDS 8u /* 64-bit words of a cache line: who writes in a row at many places fetches the next one */
#define LOAD_PARTS 256u         /* of 30 million pages, one is 2 MiB of the hash; and as many places to write to are in reach */
#define LOAD_LINES_MIN (1u << 15) /* a hash of 3 MiB is in reach as a whole */

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
            uint32_t place = starts[from[i] >> shift & 0xff]++;
            __builtin_prefetch(&to[place + LINE_WORDS], 1);
            to[place] = from[i];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != pairs) {
        memcpy(pairs, from, (size_t)count * sizeof(*pairs));
    }
}

/* The younger of two entries that claim one key stays: a crash may leave both. */
static void load_enter(struct kvdev_index *index, uint32_t slot, struct kvdev_mark mark)
{
    uint32_t rival = kvdev_hash_enter(&index->hash, &index->image, mark, slot);
    if (rival == NONE) {
        return;
    }
    uint64_t generation = entry_of(index, slot)->generation;
    uint64_t other = entry_of(index, rival)->generation;
    uint32_t loser = slot;
    index->duplicate_count++;
    if (other < generation || (other == generation && slot < rival)) {
        kvdev_hash_replace(&index->hash, mark, rival, slot);
        loser = rival;
    }
    clear_entry(entry_of(index, loser));
    set_state(index, loser, SLOT_LEAVING);
}

/* Enter the marks of one part, with the lines of those ahead on their way. */
static void load_part(struct kvdev_index *index, const uint64_t *prints, const uint64_t *places, uint32_t count)
{
    for (uint32_t ahead = 0; ahead < count + LOOKAHEAD; ahead++) {
        uint32_t i = ahead - LOOKAHEAD; /* wraps far above the count */
        if (ahead < count) {
            kvdev_hash_prefetch(&index->hash, (struct kvdev_mark){ .home = (uint32_t)(places[ahead] >> 32) });
        }
        if (i < count) {
            load_enter(index, (uint32_t)places[i],
                       (struct kvdev_mark){ .print = prints[i], .home = (uint32_t)(places[i] >> 32) });
        }
    }
}

/* Insert every live entry; returns how many have another checksum. Marks are sorted into parts of the hash first, so
 * that what is written at random stays within the reach of caches and TLB. Every part has room for its share; marks
 * beyond it are entered at once, as there are few. Both arrays are lent, an element for each slot. */
static uint32_t load_hash(struct kvdev_index *index, uint64_t *prints, uint64_t *places)
{
    uint32_t part_count = index->hash.line_count < LOAD_LINES_MIN ? 1 : LOAD_PARTS;
    uint64_t scale = ((uint64_t)part_count << 32) / index->hash.line_count;
    uint32_t room = index->slot_count / part_count;
    uint32_t used[LOAD_PARTS] = { 0 };
    uint32_t foreign = 0;
    for (uint32_t slot = 0; slot < index->slot_count; slot++) {
        const struct kvdev_entry *entry = entry_of(index, slot);
        if (entry->state != 1) {
            continue;
        }
        struct kvdev_mark mark = kvdev_hash_mark(&index->hash, entry->key);
        uint32_t part = (uint32_t)(mark.home * scale >> 32);
        foreign += entry->algorithm != index->algorithm;
        set_state(index, slot, SLOT_LIVE);
        index->flags[slot] |= FLAG_ON_MEDIA;
        if (used[part] == room) {
            load_enter(index, slot, mark);
            continue;
        }
        size_t place = (size_t)part * room + used[part]++;
        __builtin_prefetch(&prints[place + LINE_WORDS], 1);
        __builtin_prefetch(&places[place + LINE_WORDS], 1);
        prints[place] = mark.print;
        places[place] = (uint64_t)mark.home << 32 | slot;
    }
    for (uint32_t part = 0; part < part_count; part++) {
        load_part(index, prints + (size_t)part * room, places + (size_t)part * room, used[part]);
    }
    return foreign;
}

/* Slots that hold no page: free ones, and those whose free record is due. */
static void load_free(struct kvdev_index *index)
{
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
}

static void load_order(struct kvdev_index *index, const uint64_t *pairs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        __builtin_prefetch(&index->order.links[(uint32_t)pairs[i + LOOKAHEAD < count ? i + LOOKAHEAD : i]], 1);
        kvdev_order_load(&index->order, (uint32_t)pairs[i]);
        if (index->has_ages) {
            kvdev_order_load(&index->ages, (uint32_t)pairs[i]);
        }
    }
}

int kvdev_index_load(struct kvdev_index *index)
{
    uint64_t *pairs = kvdev_index_alloc((size_t)index->slot_count * sizeof(*pairs));
    uint32_t live = 0;
    if (pairs == NULL) {
        return -ENOMEM;
    }
    kvdev_hash_clear(&index->hash);
    memset(index->flags, 0, index->slot_count);
    memset(index->state_count, 0, sizeof(index->state_count));
    index->state_count[SLOT_FREE] = index->slot_count;
    index->slot_limit = index->slot_count;
    index->free_head = index->free_tail = NONE;
    index->pending_count = index->duplicate_count = index->pinned_count = index->clock = 0;
    /* The links hold nothing yet: they are lent here, and to the sort. */
    if (load_hash(index, pairs, (uint64_t *)(void *)index->order.links) != 0) {
        free(pairs);
        return -EPROTO;
    }
    for (uint32_t slot = 0; slot < index->slot_count; slot++) {
        if (state_of(index, slot) == SLOT_LIVE) {
            uint32_t last_use = entry_of(index, slot)->last_use;
            pairs[live++] = (uint64_t)last_use << 32 | slot;
            index->clock = last_use > index->clock ? last_use : index->clock;
        }
    }
    sort_by_use(pairs, (uint64_t *)(void *)index->order.links, live);
    kvdev_order_clear(&index->order);
    if (index->has_ages) {
        kvdev_order_clear(&index->ages);
    }
    load_free(index);
    load_order(index, pairs, live);
    free(pairs);
    return 0;
}

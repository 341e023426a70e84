#include "index_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define NONE KVDEV_SLOT_NONE
#define GROUP KVDEV_INDEX_GROUP
#define HUGE_BYTES ((size_t)2 << 20)

/* --- lists and states ---------------------------------------------------------------------- */

static uint32_t free_pop(struct kvdev_index *index)
{
    uint32_t slot = index->free_head;
    index->free_head = index->order.links[slot].next;
    if (index->free_head == NONE) {
        index->free_tail = NONE;
    }
    return slot;
}

/* The slot's entry names nothing any more: free at once if media never knew it, else when its free record is
 * durable. Until then it keeps what it said, free by its state alone, so that it can be revived. */
static void leave(struct kvdev_index *index, uint32_t slot)
{
    struct kvdev_entry *entry = entry_of(index, slot);
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

/* A live page goes. */
static void retire(struct kvdev_index *index, uint32_t slot)
{
    kvdev_hash_delete(&index->hash, kvdev_hash_mark(&index->hash, entry_of(index, slot)->key), slot);
    if (index->flags[slot] & FLAG_PINNED) {
        index->flags[slot] &= (uint8_t)~FLAG_PINNED;
        index->pinned_count--;
    } else {
        kvdev_order_remove(&index->order, slot);
    }
    if (index->has_ages) {
        kvdev_order_remove(&index->ages, slot);
    }
    leave(index, slot);
}

/* --- life ---------------------------------------------------------------------------------- */

void *kvdev_index_alloc(size_t size_bytes)
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
    kvdev_hash_deinit(&index->hash);
    kvdev_order_deinit(&index->order);
    kvdev_order_deinit(&index->ages);
    free(index->pending);
    free(index->flags);
    free(index->block_dirty);
    free(index);
}

static int allocate(struct kvdev_index *index, const struct kvdev_index_config *config)
{
    const struct kvdev_image *image = &index->image;
    if (kvdev_hash_init(&index->hash, config->slot_count, config->uuid) != 0
        || kvdev_order_init(&index->order, image, config->slot_count, config->quota_pages, config->policy) != 0) {
        return -ENOMEM;
    }
    if (index->has_ages
        && kvdev_order_init(&index->ages, image, config->slot_count, config->quota_pages, KVDEV_POLICY_FIFO)
               != 0) {
        return -ENOMEM;
    }
    index->flags = kvdev_index_alloc(config->slot_count);
    index->pending = calloc(config->pending_limit, sizeof(*index->pending));
    index->block_dirty = calloc(index->block_count, sizeof(*index->block_dirty));
    if (index->flags == NULL || index->pending == NULL || index->block_dirty == NULL) {
        return -ENOMEM;
    }
    memset(index->flags, 0, config->slot_count);
    return 0;
}

int kvdev_index_create(uint8_t *table, const struct kvdev_index_config *config, struct kvdev_index **ret)
{
    if (config->slot_count == 0 || config->slot_count >= NONE / 2 || config->block_bytes < 128
        || config->pending_limit == 0 || config->policy > KVDEV_POLICY_S3FIFO
        || config->algorithm < KVDEV_CHECKSUM_CRC32C || config->algorithm > KVDEV_CHECKSUM_NH64) {
        return -EINVAL;
    }
    struct kvdev_index *index = calloc(1, sizeof(*index));
    if (index == NULL) {
        return -ENOMEM;
    }
    kvdev_image_init(&index->image, table, config->block_bytes);
    index->block_count = (config->slot_count + index->image.per_block - 1) / index->image.per_block;
    index->slot_count = index->slot_limit = config->slot_count;
    index->pending_limit = config->pending_limit;
    index->next_generation = config->next_generation;
    index->has_ages = config->has_ages != 0;
    index->algorithm = config->algorithm;
    memcpy(index->uuid, config->uuid, sizeof(index->uuid));
    if (allocate(index, config) != 0) {
        kvdev_index_destroy(index);
        return -ENOMEM;
    }
    *ret = index;
    return 0;
}

static uint64_t memory_bytes(const struct kvdev_index *index)
{
    uint64_t ages = index->has_ages ? kvdev_order_bytes(&index->ages) : 0;
    return sizeof(*index) + kvdev_hash_bytes(&index->hash) + kvdev_order_bytes(&index->order) + ages
           + index->slot_count + (uint64_t)index->pending_limit * sizeof(*index->pending) + index->block_count;
}

uint8_t *kvdev_index_dirty_map(struct kvdev_index *index)
{
    return index->block_dirty;
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
        .expired_count = index->expired_count,
        .next_generation = index->next_generation,
        .memory_bytes = memory_bytes(index),
    };
}

/* --- batches ------------------------------------------------------------------------------- */

static uint32_t group_size(uint32_t left)
{
    return left < GROUP ? left : GROUP;
}

/* Last to first: of one batch the first key counts as the latest used, so that a prefix outlives what
 * continues it. */
static void touch_batch(struct kvdev_index *index, const struct kvdev_grant *grants, uint32_t count)
{
    index->clock += !index->has_ages;
    for (uint32_t i = count; i-- > 0;) {
        uint32_t slot = grants[i].slot_index;
        if (slot == NONE) {
            continue;
        }
        if (!index->has_ages) {
            entry_of(index, slot)->last_use = index->clock;
        }
        if (!(index->flags[slot] & FLAG_PINNED)) {
            kvdev_order_touch(&index->order, slot);
        }
    }
}

uint32_t kvdev_index_lookup(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int touch,
                            struct kvdev_grant *grants)
{
    uint32_t slots[GROUP];
    uint32_t hits = 0;
    for (uint32_t done = 0; done < count; done += GROUP) {
        uint32_t group = group_size(count - done);
        kvdev_hash_find_group(&index->hash, &index->image, keys + (size_t)done * 32, group, slots);
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
    if (touch) {
        touch_batch(index, grants, count);
    }
    return hits;
}

uint32_t kvdev_index_contains(const struct kvdev_index *index, const uint8_t *keys, uint32_t count,
                              uint8_t *found)
{
    return kvdev_hash_contains(&index->hash, keys, count, found);
}

uint32_t kvdev_index_prefix(const struct kvdev_index *index, const uint8_t *keys, uint32_t count)
{
    return kvdev_hash_prefix(&index->hash, keys, count);
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

static void store_entry(struct kvdev_index *index, const uint8_t *key, struct kvdev_grant *grant, uint64_t sum)
{
    struct kvdev_mark mark = kvdev_hash_mark(&index->hash, key);
    uint32_t older = kvdev_hash_find(&index->hash, &index->image, key, mark);
    uint32_t slot = grant->slot_index;
    struct kvdev_entry *entry = entry_of(index, slot);
    grant->checksum = kvdev_entry_checksum(index->algorithm, index->uuid, key, grant->generation, grant->length,
                                           sum);
    /* Due before its predecessor's free record: a cut between them leaves the key with one of the two. */
    set_state(index, slot, SLOT_LIVE);
    due(index, slot);
    /* What replaces a pinned page is pinned, and has been used as often. */
    int is_pinned = older != NONE && (index->flags[older] & FLAG_PINNED) != 0;
    uint16_t use = older != NONE ? entry_of(index, older)->use : 0;
    if (older != NONE) {
        retire(index, older);
    }
    *entry = (struct kvdev_entry){
        .generation = grant->generation,
        .checksum = grant->checksum,
        .length = grant->length,
        .last_use = index->clock,
        .state = 1,
        .algorithm = (uint8_t)index->algorithm,
        .use = use,
        .slot_index = slot,
    };
    memcpy(entry->key, key, sizeof(entry->key));
    kvdev_hash_insert(&index->hash, mark, slot);
    if (is_pinned) {
        index->flags[slot] |= FLAG_PINNED;
        index->pinned_count++;
    } else {
        kvdev_order_add(&index->order, slot, mark.print, use);
    }
    if (index->has_ages) {
        kvdev_order_restore(&index->ages, slot);
    }
}

static uint32_t find_key(const struct kvdev_index *index, const uint8_t *key)
{
    return kvdev_hash_find(&index->hash, &index->image, key, kvdev_hash_mark(&index->hash, key));
}

uint32_t kvdev_index_pin(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int is_pinned,
                         uint8_t *done)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        uint32_t slot = find_key(index, key);
        done[i] = slot != NONE;
        found += done[i];
        if (slot == NONE || ((index->flags[slot] & FLAG_PINNED) != 0) == (is_pinned != 0)) {
            continue;
        }
        if (is_pinned) {
            kvdev_order_remove(&index->order, slot);
            index->flags[slot] |= FLAG_PINNED;
            index->pinned_count++;
        } else {
            index->flags[slot] &= (uint8_t)~FLAG_PINNED;
            index->pinned_count--;
            if (!index->has_ages) {
                entry_of(index, slot)->last_use = index->clock;
            }
            kvdev_order_restore(&index->order, slot);
        }
    }
    return found;
}

int kvdev_index_commit(struct kvdev_index *index, const uint8_t *keys, struct kvdev_grant *grants,
                       const void *sums, const uint8_t *outcome, uint32_t count, uint8_t *done)
{
    uint64_t written = 0;
    for (uint32_t i = 0; i < count; i++) {
        written += outcome[i] == KVDEV_OUTCOME_WRITTEN;
    }
    if (!pending_has_room(index, 2 * written)) { /* grants can be given back whatever is due */
        return -ENOBUFS;
    }
    index->clock += !index->has_ages;
    for (uint32_t i = count; i-- > 0;) { /* last to first, as in lookup */
        done[i] = 0;
        if (!grant_is_in(index, &grants[i], SLOT_RESERVED)) {
            continue;
        }
        if (outcome[i] == KVDEV_OUTCOME_WRITTEN) {
            store_entry(index, keys + (size_t)i * 32, &grants[i], kvdev_sum_at(index->algorithm, sums, i));
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
        uint32_t slot = find_key(index, key);
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

/* Take pages out of the order for as long as an eviction lasts, then put them back as used just now. */
static void keep(struct kvdev_index *index, const uint8_t *keys, uint32_t count, int is_kept)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = find_key(index, keys + (size_t)i * 32);
        if (slot == NONE || (index->flags[slot] & FLAG_PINNED)
            || ((index->flags[slot] & FLAG_KEPT) != 0) == (is_kept != 0)) {
            continue;
        }
        index->flags[slot] ^= FLAG_KEPT;
        if (is_kept) {
            kvdev_order_remove(&index->order, slot);
        } else {
            kvdev_order_restore(&index->order, slot);
        }
    }
}

int kvdev_index_evict(struct kvdev_index *index, uint32_t count, const uint8_t *kept_keys, uint32_t kept_count,
                      uint32_t *evicted)
{
    if (!pending_has_room(index, count)) {
        return -ENOBUFS;
    }
    keep(index, kept_keys, kept_count, 1);
    for (*evicted = 0; *evicted < count; (*evicted)++) {
        uint32_t slot = kvdev_order_next(&index->order);
        if (slot == NONE) {
            break;
        }
        kvdev_order_gone(&index->order, kvdev_hash_mark(&index->hash, entry_of(index, slot)->key).print);
        retire(index, slot);
        index->evicted_count++;
    }
    keep(index, kept_keys, kept_count, 0);
    return 0;
}

/* A live slot that is found no more, in an index that reserves nothing: it goes on no list. */
static void forget(struct kvdev_index *index, uint32_t slot)
{
    if (state_of(index, slot) != SLOT_LIVE) {
        return;
    }
    kvdev_hash_delete(&index->hash, kvdev_hash_mark(&index->hash, entry_of(index, slot)->key), slot);
    kvdev_order_remove(&index->order, slot);
    if (index->has_ages) {
        kvdev_order_remove(&index->ages, slot);
    }
    set_state(index, slot, SLOT_FREE);
}

void kvdev_index_set_clock(struct kvdev_index *index, uint32_t clock)
{
    if (index->has_ages) {
        index->clock = clock;
    }
}

uint32_t kvdev_index_expire(struct kvdev_index *index, uint32_t clock, uint32_t max, int is_owner,
                            uint32_t *oldest)
{
    uint32_t expired = 0;
    *oldest = UINT32_MAX;
    if (!index->has_ages) {
        return 0;
    }
    for (;;) {
        uint32_t slot = kvdev_order_next(&index->ages);
        if (slot == NONE) {
            return expired;
        }
        *oldest = entry_of(index, slot)->last_use;
        if (*oldest >= clock || expired == max || (is_owner && !pending_has_room(index, 1))) {
            return expired;
        }
        if (is_owner) {
            retire(index, slot);
        } else {
            forget(index, slot);
        }
        index->expired_count++;
        expired++;
        *oldest = UINT32_MAX;
    }
}

void kvdev_index_limit_slots(struct kvdev_index *index, uint32_t slot_limit)
{
    uint32_t count = index->state_count[SLOT_FREE];
    index->slot_limit = slot_limit;
    for (uint32_t i = 0; i < count; i++) {
        free_push(index, free_pop(index));
    }
}

static void move_entry(struct kvdev_index *index, uint32_t slot, const struct kvdev_grant *to)
{
    struct kvdev_entry *old = entry_of(index, slot);
    struct kvdev_entry *entry = entry_of(index, to->slot_index);
    uint8_t kept = index->flags[slot] & FLAG_PINNED;
    set_state(index, to->slot_index, SLOT_LIVE);
    due(index, to->slot_index);
    *entry = *old;
    entry->slot_index = to->slot_index;
    entry->generation = to->generation;
    entry->checksum = kvdev_entry_checksum(index->algorithm, index->uuid, old->key, to->generation, old->length,
                                           kvdev_entry_sum(index->algorithm, index->uuid, old->key, old->generation,
                                                           old->length, old->checksum));
    kvdev_hash_replace(&index->hash, kvdev_hash_mark(&index->hash, old->key), slot, to->slot_index);
    if (!kept) {
        kvdev_order_move(&index->order, slot, to->slot_index);
    }
    if (index->has_ages) {
        kvdev_order_move(&index->ages, slot, to->slot_index);
    }
    index->flags[to->slot_index] |= kept;
    index->flags[slot] &= (uint8_t)~FLAG_PINNED;
    leave(index, slot);
}

int kvdev_index_move(struct kvdev_index *index, const struct kvdev_grant *from, const struct kvdev_grant *to,
                     uint32_t count, uint8_t *done)
{
    if (!pending_has_room(index, 2 * (uint64_t)count)) {
        return -ENOBUFS;
    }
    for (uint32_t i = 0; i < count; i++) {
        done[i] = 0;
        if (!grant_is_in(index, &to[i], SLOT_RESERVED)) {
            continue;
        }
        if (grant_is_current(index, &from[i])) {
            move_entry(index, from[i].slot_index, &to[i]);
            done[i] = 1;
        } else {
            free_push(index, to[i].slot_index);
        }
    }
    return 0;
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

int kvdev_index_follow(struct kvdev_index *index, const struct kvdev_entry *records, uint32_t count,
                       uint64_t first_sequence)
{
    for (uint32_t i = 0; i < count; i++) {
        if (records[i].slot_index >= index->slot_count || records[i].state > 1
            || (records[i].state == 1 && records[i].algorithm != index->algorithm)) {
            return -EINVAL;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        struct kvdev_media_header head;
        memcpy(&head, index->image.blocks + (size_t)block_of(index, slot) * index->image.block_bytes, sizeof(head));
        if (first_sequence + i <= head.sequence) {
            continue;
        }
        forget(index, slot);
        *entry_of(index, slot) = records[i];
        if (records[i].state == 0) {
            continue;
        }
        struct kvdev_mark mark = kvdev_hash_mark(&index->hash, records[i].key);
        uint32_t rival = kvdev_hash_find(&index->hash, &index->image, records[i].key, mark);
        if (rival != NONE && entry_of(index, rival)->generation > records[i].generation) {
            entry_of(index, slot)->state = 0; /* its free record is on its way */
            continue;
        }
        if (rival != NONE) {
            forget(index, rival);
        }
        set_state(index, slot, SLOT_LIVE);
        kvdev_hash_insert(&index->hash, mark, slot);
        kvdev_order_load(&index->order, slot);
        if (index->has_ages) {
            kvdev_order_load(&index->ages, slot);
        }
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
        uint8_t *block = index->image.blocks + (size_t)blocks[i] * index->image.block_bytes;
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

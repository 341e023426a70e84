#include "index_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NONE KVDEV_SLOT_NONE
#define LISTS KVDEV_ORDER_LISTS

/* An entry's `use`: the low byte counts uses, the high byte is the policy's. */
#define COUNT_MASK 0xffu
#define LFU_COUNT_MAX (LISTS - 1)
#define LFU_USES_PER_PAGE 8u /* all counts are lowered after so many uses for each page of the quota */
#define S3_COUNT_MAX 3u
#define S3_KEEP_COUNT 1u     /* uses that take a page from the small list to the main one */
#define S3_SMALL_SHARE 10u   /* the small list is one part in ten */
#define S3_IN_MAIN 0x100u
#define S3_SMALL 0u
#define S3_MAIN 1u
#define STAMPS 64u

static int is_lfu(const struct kvdev_order *order)
{
    return order->policy == KVDEV_POLICY_LFU;
}

static int is_s3(const struct kvdev_order *order)
{
    return order->policy == KVDEV_POLICY_S3FIFO;
}

int kvdev_order_init(struct kvdev_order *order, const struct kvdev_image *image, uint32_t slot_count,
                     uint32_t capacity, uint32_t policy)
{
    order->image = image;
    order->slot_count = slot_count;
    order->capacity = capacity;
    order->policy = policy;
    order->links = kvdev_index_alloc(((size_t)slot_count + LISTS) * sizeof(*order->links));
    if (order->links == NULL) {
        return -ENOMEM;
    }
    if (is_s3(order)) {
        order->ghosts = kvdev_index_alloc((size_t)slot_count * sizeof(*order->ghosts));
        if (order->ghosts == NULL) {
            return -ENOMEM;
        }
    }
    kvdev_order_clear(order);
    return 0;
}

void kvdev_order_deinit(struct kvdev_order *order)
{
    free(order->links);
    free(order->ghosts);
}

void kvdev_order_clear(struct kvdev_order *order)
{
    for (uint32_t i = 0; i < LISTS; i++) {
        uint32_t ring = order->slot_count + i;
        order->links[ring] = (struct kvdev_link){ .prev = ring, .next = ring };
    }
    if (order->ghosts != NULL) {
        memset(order->ghosts, 0, (size_t)order->slot_count * sizeof(*order->ghosts));
    }
    order->small_count = order->main_count = order->gone_count = order->used_count = 0;
    order->stamp = STAMPS; /* so that a ghost of zeroes is an old one */
    order->base = 0;
}

uint64_t kvdev_order_bytes(const struct kvdev_order *order)
{
    return ((uint64_t)order->slot_count + LISTS) * sizeof(*order->links)
           + (order->ghosts != NULL ? (uint64_t)order->slot_count * sizeof(*order->ghosts) : 0);
}

/* --- rings ----------------------------------------------------------------------------------- */

static void ring_push(struct kvdev_order *order, uint32_t list, uint32_t slot)
{
    struct kvdev_link *links = order->links;
    uint32_t ring = order->slot_count + list;
    uint32_t first = links[ring].next;
    links[slot] = (struct kvdev_link){ .prev = ring, .next = first };
    links[first].prev = slot;
    links[ring].next = slot;
}

static void ring_unlink(struct kvdev_order *order, uint32_t slot)
{
    struct kvdev_link link = order->links[slot];
    order->links[link.prev].next = link.next;
    order->links[link.next].prev = link.prev;
}

static uint32_t ring_oldest(const struct kvdev_order *order, uint32_t list)
{
    uint32_t ring = order->slot_count + list;
    uint32_t slot = order->links[ring].prev;
    return slot == ring ? NONE : slot;
}

/* All of `from` becomes the newer part of `to`. */
static void ring_join(struct kvdev_order *order, uint32_t from, uint32_t to)
{
    struct kvdev_link *links = order->links;
    uint32_t source = order->slot_count + from;
    uint32_t target = order->slot_count + to;
    struct kvdev_link moved = links[source];
    if (moved.next == source) {
        return;
    }
    uint32_t first = links[target].next;
    links[moved.prev].next = first;
    links[first].prev = moved.prev;
    links[moved.next].prev = target;
    links[target].next = moved.next;
    links[source] = (struct kvdev_link){ .prev = source, .next = source };
}

static uint16_t *use_of(const struct kvdev_order *order, uint32_t slot)
{
    return &kvdev_image_entry(order->image, slot)->use;
}

/* --- least frequently used, counts lowered with time ----------------------------------------- */

/* A page's count is what it was at its last use, less one for each time that all were lowered since. The
 * list of count c is base + c, so lowering all is joining two lists; a count that went round the 256 values
 * of the base is taken for a higher one at most, which costs nothing but the page's rank. */
static uint32_t lfu_count(const struct kvdev_order *order, uint16_t use)
{
    uint32_t count = use & COUNT_MASK;
    uint32_t lowered = (uint8_t)(order->base - (use >> 8));
    return count > lowered ? count - lowered : 0;
}

static uint32_t lfu_list(const struct kvdev_order *order, uint32_t count)
{
    return (order->base + count) % LISTS;
}

static void lfu_place(struct kvdev_order *order, uint32_t slot, uint32_t count)
{
    count = count < LFU_COUNT_MAX ? count : LFU_COUNT_MAX;
    *use_of(order, slot) = (uint16_t)(count | (uint32_t)order->base << 8);
    ring_push(order, lfu_list(order, count), slot);
}

static void lfu_age(struct kvdev_order *order)
{
    if (++order->used_count / LFU_USES_PER_PAGE < order->capacity) {
        return;
    }
    order->used_count = 0;
    /* What had count 1 stays in its list, which is now that of count 0; the old one joins it, as older. */
    uint32_t lowest = lfu_list(order, 0);
    uint32_t next = lfu_list(order, 1);
    ring_join(order, next, lowest);
    ring_join(order, lowest, next);
    order->base++;
}

/* --- S3-FIFO --------------------------------------------------------------------------------- */

/* New pages queue in a small list; those used there, and those that come back soon after they went, get to
 * the main list, where a used page goes round again. Uses only count, nothing moves. */
static void s3_place(struct kvdev_order *order, uint32_t slot, uint32_t use, int is_main)
{
    *use_of(order, slot) = (uint16_t)((use & COUNT_MASK) | (is_main ? S3_IN_MAIN : 0));
    ring_push(order, is_main ? S3_MAIN : S3_SMALL, slot);
    if (is_main) {
        order->main_count++;
    } else {
        order->small_count++;
    }
}

static uint32_t *s3_ghost(const struct kvdev_order *order, uint64_t print)
{
    return &order->ghosts[(uint32_t)((print >> 32) * order->slot_count >> 32)];
}

static int s3_went_lately(const struct kvdev_order *order, uint64_t print)
{
    uint32_t ghost = *s3_ghost(order, print);
    uint16_t age = (uint16_t)(order->stamp - (uint16_t)ghost);
    return ghost >> 16 == (uint16_t)print && age < STAMPS;
}

static void s3_remember(struct kvdev_order *order, uint64_t print)
{
    *s3_ghost(order, print) = (uint32_t)(uint16_t)print << 16 | order->stamp;
    if (++order->gone_count >= order->capacity / STAMPS + 1) {
        order->gone_count = 0;
        order->stamp++;
    }
}

static uint32_t s3_next(struct kvdev_order *order)
{
    /* Ends: each step takes a page off the small list, or a use off one of the main list. */
    for (;;) {
        int is_small_due = order->small_count > order->capacity / S3_SMALL_SHARE || order->main_count == 0;
        uint32_t slot = ring_oldest(order, is_small_due ? S3_SMALL : S3_MAIN);
        if (slot == NONE) {
            return NONE;
        }
        uint32_t count = *use_of(order, slot) & COUNT_MASK;
        if (is_small_due && count < S3_KEEP_COUNT) {
            return slot;
        }
        if (!is_small_due && count == 0) {
            return slot;
        }
        kvdev_order_remove(order, slot);
        s3_place(order, slot, is_small_due ? 0 : count - 1, 1);
    }
}

/* --- what the index asks for ----------------------------------------------------------------- */

void kvdev_order_add(struct kvdev_order *order, uint32_t slot, uint64_t print, uint16_t use)
{
    if (is_lfu(order)) {
        lfu_place(order, slot, lfu_count(order, use));
        lfu_age(order);
    } else if (is_s3(order)) {
        s3_place(order, slot, use, (use & S3_IN_MAIN) != 0 || s3_went_lately(order, print));
    } else {
        *use_of(order, slot) = 0;
        ring_push(order, 0, slot);
    }
}

void kvdev_order_restore(struct kvdev_order *order, uint32_t slot)
{
    if (is_lfu(order)) {
        lfu_place(order, slot, lfu_count(order, *use_of(order, slot)));
    } else if (is_s3(order)) {
        uint16_t use = *use_of(order, slot);
        s3_place(order, slot, use, (use & S3_IN_MAIN) != 0);
    } else {
        ring_push(order, 0, slot);
    }
}

void kvdev_order_load(struct kvdev_order *order, uint32_t slot)
{
    if (is_lfu(order)) {
        /* How often counts were lowered is not on media: they stand as at the last use. */
        lfu_place(order, slot, *use_of(order, slot) & COUNT_MASK);
    } else {
        kvdev_order_restore(order, slot);
    }
}

void kvdev_order_touch(struct kvdev_order *order, uint32_t slot)
{
    if (is_s3(order)) {
        uint16_t *use = use_of(order, slot);
        *use = (uint16_t)(*use + ((*use & COUNT_MASK) < S3_COUNT_MAX));
        return;
    }
    ring_unlink(order, slot);
    if (is_lfu(order)) {
        lfu_place(order, slot, lfu_count(order, *use_of(order, slot)) + 1);
        lfu_age(order);
    } else {
        ring_push(order, 0, slot);
    }
}

void kvdev_order_remove(struct kvdev_order *order, uint32_t slot)
{
    ring_unlink(order, slot);
    if (is_s3(order)) {
        if (*use_of(order, slot) & S3_IN_MAIN) {
            order->main_count--;
        } else {
            order->small_count--;
        }
    }
}

void kvdev_order_move(struct kvdev_order *order, uint32_t slot, uint32_t new_slot)
{
    struct kvdev_link link = order->links[slot];
    order->links[new_slot] = link;
    order->links[link.prev].next = new_slot;
    order->links[link.next].prev = new_slot;
}

uint32_t kvdev_order_next(struct kvdev_order *order)
{
    if (is_s3(order)) {
        return s3_next(order);
    }
    uint32_t list_count = is_lfu(order) ? LISTS : 1;
    for (uint32_t count = 0; count < list_count; count++) {
        uint32_t slot = ring_oldest(order, is_lfu(order) ? lfu_list(order, count) : 0);
        if (slot != NONE) {
            return slot;
        }
    }
    return NONE;
}

void kvdev_order_gone(struct kvdev_order *order, uint64_t print)
{
    if (is_s3(order)) {
        s3_remember(order, print);
    }
}

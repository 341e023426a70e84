/* The read side of a page table that other processes map: key to entry without asking its owner.
 *
 * Two pieces of shared memory. The table image is the owner's, as on media; its entries are the truth. The hints say
 * in which slots to look for a key; one writer inserts them, they are never taken out: a hint whose slot has another
 * key by now is found out by comparing, and its place is used again. A key may be missed (its places are full, or its
 * entry is being written); what is found was the entry of that key, whole, at some moment of the call.
 * The writer is one thread of one process; any number read. Nothing read is trusted to be in range. */
#ifndef KVDEV_POOL_VIEW_H
#define KVDEV_POOL_VIEW_H

#include <stdint.h>

#include "index.h"

/* cdef begin */
struct kvdev_view {
    const uint8_t *table;        /* blocks of the table image */
    uint32_t *hints;             /* slot + 1, 0 for an empty place; a power of two of them */
    uint64_t seed;
    uint32_t hint_count;
    uint32_t block_bytes;
    uint32_t slot_count;
    uint32_t reserved;
};

/* Places for a table of so many slots: a power of two. */
uint32_t kvdev_view_hint_count(uint32_t slot_count);
/* Say in which slots keys are stored now. */
void kvdev_view_insert(const struct kvdev_view *view, const uint8_t *keys, const struct kvdev_grant *grants,
                       uint32_t count);
/* Insert every live entry of the image. */
void kvdev_view_fill(const struct kvdev_view *view);
/* Grants of the keys that are stored, KVDEV_SLOT_NONE for the others; returns how many are. With `is_prefix` it stops
 * at the first that is not. */
uint32_t kvdev_view_lookup(const struct kvdev_view *view, const uint8_t *keys, uint32_t count, int is_prefix,
                           struct kvdev_grant *grants);
/* cdef end */

_Static_assert(sizeof(struct kvdev_view) == 40, "a view is 40 bytes");

#endif

/* What is done to all of a batch at once: keys compared with one another, bytes copied and checked. */
#ifndef KVDEV_BATCH_H
#define KVDEV_BATCH_H

#include <stdint.h>

/* cdef begin */
/* Position of the first key that repeats an earlier one, or count. `scratch`: room for 4 * count words. */
uint32_t kvdev_keys_find_duplicate(const uint8_t *keys, uint32_t count, uint32_t *scratch);
/* Bytes between scattered places: copies `size_bytes` for each pair of addresses. */
void kvdev_copy_many(const uint64_t *to, const uint64_t *from, uint32_t size_bytes, uint32_t count);
void kvdev_crc32c_many(const uint64_t *from, uint64_t size_bytes, uint32_t count, uint32_t *crc32c);
void kvdev_nh64_many(const uint64_t *from, uint64_t size_bytes, uint32_t count, uint64_t *nh64);
/* cdef end */

#endif

#include "batch.h"

#include <string.h>

#include "crc32c.h"
#include "nh64.h"

uint32_t kvdev_keys_find_duplicate(const uint8_t *keys, uint32_t count, uint32_t *scratch)
{
    uint32_t room = 1;
    while (room < count * 2u && room < 1u << 31) {
        room <<= 1;
    }
    memset(scratch, 0, (size_t)room * sizeof(*scratch));
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        uint32_t place = kvdev_crc32c(0, key, 32) & (room - 1);
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

void kvdev_nh64_many(const uint64_t *from, uint64_t size_bytes, uint32_t count, uint64_t *nh64)
{
    for (uint32_t i = 0; i < count; i++) {
        nh64[i] = kvdev_nh64((const void *)(uintptr_t)from[i], size_bytes);
    }
}

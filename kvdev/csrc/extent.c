#include "extent.h"

#include <errno.h>

int64_t kvdev_extents_split(const struct kvdev_extent_map *map, uint8_t opcode, uint8_t flags, const uint64_t *slba,
                            const uint64_t *block_count, const uint64_t *address, uint32_t count,
                            uint64_t crc_bytes, struct kvdev_io_group *groups, struct kvdev_io *ios,
                            uint64_t max, int64_t *member_blocks)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = slba[i];
        uint64_t end = at + block_count[i];
        uint64_t first = used;
        if (block_count[i] == 0 || end < at) {
            return -EINVAL;
        }
        while (at < end) {
            uint64_t unit_end = (at / map->unit_blocks + 1) * map->unit_blocks;
            uint64_t blocks = (unit_end < end ? unit_end : end) - at;
            uint64_t strip = at / map->strip_blocks;
            uint64_t row = strip / map->member_count;
            uint64_t member = strip % map->member_count;
            if (used == max) {
                return -ENOBUFS;
            }
            ios[used] = (struct kvdev_io){
                .tag = used,
                .buf_addr = address[i] + (at - slba[i]) * map->block_bytes,
                .slba = row * map->strip_blocks + (at - strip * map->strip_blocks),
                .group_addr = (uint64_t)(uintptr_t)&groups[i],
                .lba_count = (uint32_t)blocks,
                .byte_count = (uint32_t)(blocks * map->block_bytes),
                .device_index = map->handles[member],
                .opcode = opcode,
                .flags = flags,
            };
            member_blocks[member] += (int64_t)blocks;
            used++;
            at += blocks;
        }
        groups[i] = (struct kvdev_io_group){
            .buf_addr = crc_bytes != 0 ? address[i] : 0,
            .byte_count = crc_bytes,
            .remaining = (uint32_t)(used - first),
            .flags = crc_bytes != 0 ? KVDEV_GROUP_CRC32C : 0,
        };
    }
    return (int64_t)used;
}

int kvdev_grants_locate(const struct kvdev_grant *grants, uint32_t count, uint32_t slot_count,
                        uint64_t data_slba, uint64_t slot_blocks, uint64_t *slba)
{
    for (uint32_t i = 0; i < count; i++) {
        if (grants[i].slot_index >= slot_count) {
            return -EINVAL;
        }
        slba[i] = data_slba + grants[i].slot_index * slot_blocks;
    }
    return 0;
}

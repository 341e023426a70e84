/* Extents of a RAID0 volume as commands of its members: cut at units, placed, grouped, in one call.
 *
 * Strip s lies on member s mod n at row s div n. A unit divides a strip and fits one command. With one
 * member and strips as large as anything the mapping is the identity.
 * The Python twin is kvdev/block/stripe.py, which tests compare with this. */
#ifndef KVDEV_EXTENT_H
#define KVDEV_EXTENT_H

#include <stddef.h>
#include <stdint.h>

#include "index.h"
#include "io.h"

/* cdef begin */
struct kvdev_extent_map {
    uint64_t unit_blocks;
    uint64_t strip_blocks;
    uint32_t block_bytes;
    uint32_t member_count;
    const uint32_t *handles;  /* device index of each member */
};

/* Commands for `count` extents, one group each. `crc_bytes` not 0: a group's CRC32C covers so many bytes
 * at its address. Tags count from 0. Adds the blocks of each member to `member_blocks`. Returns the number
 * of commands, or -ENOBUFS when they are more than `max`; -EINVAL for an extent of no blocks. */
int64_t kvdev_extents_split(const struct kvdev_extent_map *map, uint8_t opcode, uint8_t flags, const uint64_t *slba,
                            const uint64_t *block_count, const uint64_t *address, uint32_t count,
                            uint64_t crc_bytes, struct kvdev_io_group *groups, struct kvdev_io *ios,
                            uint64_t max, int64_t *member_blocks);

/* First block of each grant's slot; -EINVAL for a slot that is not below `slot_count`. */
int kvdev_grants_locate(const struct kvdev_grant *grants, uint32_t count, uint32_t slot_count,
                        uint64_t data_slba, uint64_t slot_blocks, uint64_t *slba);
/* cdef end */

#endif

#include "page_table.h"

#include <errno.h>
#include <string.h>

#include "crc32c.h"
#include "nh64.h"

#define HEADER_BYTES 64u
#define TABLE_MAGIC 0x4c4254565645444bull /* "KDEVVTBL" as bytes */
#define RECORD_MAGIC 0x434552565645444bull /* "KDEVVREC" as bytes */
#define FORMAT_VERSION 1u
#define RECORD_VERSION_MAX 3u

static uint32_t media_crc(const uint8_t *block, uint32_t size)
{
    static const uint8_t zero[4];
    uint32_t crc = kvdev_crc32c(0, block, offsetof(struct kvdev_media_header, crc32c));
    crc = kvdev_crc32c(crc, zero, sizeof(zero));
    return kvdev_crc32c(crc, block + 20, size - 20);
}

void kvdev_media_seal(uint8_t *block)
{
    struct kvdev_media_header head;
    memcpy(&head, block, sizeof(head));
    head.crc32c = media_crc(block, head.size_bytes);
    memcpy(block, &head, sizeof(head));
}

void kvdev_media_seal_many(uint8_t *blocks, uint32_t block_bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        kvdev_media_seal(blocks + (size_t)i * block_bytes);
    }
}

static uint32_t version_max(uint64_t magic)
{
    return magic == RECORD_MAGIC ? RECORD_VERSION_MAX : FORMAT_VERSION;
}

int kvdev_media_check(const uint8_t *block, size_t limit, uint64_t magic, const uint8_t *uuid)
{
    struct kvdev_media_header head;
    if (limit < sizeof(head)) {
        return -EMSGSIZE;
    }
    memcpy(&head, block, sizeof(head));
    if (head.magic != magic) {
        return -EBADMSG;
    }
    if (head.size_bytes < sizeof(head) || head.size_bytes > limit) {
        return -EMSGSIZE;
    }
    if (head.crc32c != media_crc(block, head.size_bytes)) {
        return -EILSEQ;
    }
    if (head.version < FORMAT_VERSION || head.version > version_max(magic)) {
        return -EPROTO;
    }
    if (uuid != NULL && memcmp(uuid, head.uuid, sizeof(head.uuid)) != 0) {
        return -ESTALE;
    }
    return 0;
}

uint32_t kvdev_table_entries_per_block(uint32_t block_bytes)
{
    return (block_bytes - HEADER_BYTES) / (uint32_t)sizeof(struct kvdev_entry);
}

static uint32_t entries_in_block(uint32_t per_block, uint32_t slot_count, uint32_t block)
{
    uint64_t first = (uint64_t)block * per_block;
    uint64_t left = slot_count - first;
    return left < per_block ? (uint32_t)left : per_block;
}

void kvdev_table_format(uint8_t *table, uint32_t block_bytes, uint32_t first_block, uint32_t block_count,
                        uint32_t slot_count, const uint8_t *uuid)
{
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    for (uint32_t i = 0; i < block_count; i++) {
        uint8_t *block = table + (size_t)i * block_bytes;
        uint32_t index = first_block + i;
        uint32_t count = entries_in_block(per_block, slot_count, index);
        struct kvdev_media_header head = {
            .magic = TABLE_MAGIC,
            .version = FORMAT_VERSION,
            .count = (uint16_t)count,
            .size_bytes = block_bytes,
            .index = index,
        };
        memset(block, 0, block_bytes);
        memcpy(head.uuid, uuid, sizeof(head.uuid));
        memcpy(block, &head, sizeof(head));
        for (uint32_t k = 0; k < count; k++) {
            uint32_t slot = index * per_block + k;
            memcpy(block + HEADER_BYTES + (size_t)k * sizeof(struct kvdev_entry)
                       + offsetof(struct kvdev_entry, slot_index),
                   &slot, sizeof(slot));
        }
        kvdev_media_seal(block);
    }
}

/* Whether a table block is intact and says what its place demands. */
static int table_block_ok(const uint8_t *block, uint32_t block_bytes, uint32_t index, uint32_t slot_count,
                          const uint8_t *uuid)
{
    struct kvdev_media_header head;
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    if (kvdev_media_check(block, block_bytes, TABLE_MAGIC, uuid) != 0) {
        return 0;
    }
    memcpy(&head, block, sizeof(head));
    if (head.size_bytes != block_bytes || head.index != index
        || head.count != entries_in_block(per_block, slot_count, index)) {
        return 0;
    }
    const struct kvdev_entry *entries = (const struct kvdev_entry *)(const void *)(block + HEADER_BYTES);
    for (uint32_t k = 0; k < head.count; k++) {
        if (entries[k].slot_index != index * per_block + k || entries[k].state > 1) {
            return 0;
        }
    }
    return 1;
}

uint32_t kvdev_table_check(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint32_t *bad, uint32_t bad_max)
{
    uint32_t bad_count = 0;
    for (uint32_t i = 0; i < block_count; i++) {
        uint8_t *block = table + (size_t)i * block_bytes;
        if (table_block_ok(block, block_bytes, i, slot_count, uuid)) {
            continue;
        }
        if (bad_count < bad_max) {
            bad[bad_count] = i;
        }
        bad_count++;
        kvdev_table_format(block, block_bytes, i, 1, slot_count, uuid);
    }
    return bad_count;
}

uint32_t kvdev_table_merge(uint8_t *table, uint32_t block_bytes, uint32_t block_count, uint32_t slot_count,
                           const uint8_t *uuid, uint8_t *moved, uint32_t moved_count)
{
    uint32_t merged = 0;
    for (uint32_t i = 0; i < moved_count; i++) {
        const uint8_t *block = moved + (size_t)i * block_bytes;
        struct kvdev_media_header head;
        struct kvdev_media_header old;
        memcpy(&head, block, sizeof(head));
        if (head.index >= block_count || !table_block_ok(block, block_bytes, head.index, slot_count, uuid)) {
            continue;
        }
        uint8_t *place = table + (size_t)head.index * block_bytes;
        memcpy(&old, place, sizeof(old));
        if (!table_block_ok(place, block_bytes, head.index, slot_count, uuid) || head.sequence > old.sequence) {
            memcpy(place, block, block_bytes);
            merged++;
        }
    }
    return merged;
}

static struct kvdev_entry *entry_at(uint8_t *table, uint32_t block_bytes, uint32_t per_block, uint32_t slot)
{
    return (struct kvdev_entry *)(void *)(table + (size_t)(slot / per_block) * block_bytes + HEADER_BYTES
                                          + (size_t)(slot % per_block) * sizeof(struct kvdev_entry));
}

int kvdev_table_apply(uint8_t *table, uint32_t block_bytes, uint32_t slot_count, uint8_t *block_dirty,
                      const struct kvdev_entry *records, uint32_t count, uint64_t first_sequence)
{
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    for (uint32_t i = 0; i < count; i++) {
        if (records[i].slot_index >= slot_count || records[i].state > 1) {
            return -EINVAL;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = records[i].slot_index;
        uint64_t included;
        memcpy(&included,
               table + (size_t)(slot / per_block) * block_bytes
                   + offsetof(struct kvdev_media_header, sequence),
               sizeof(included));
        if (first_sequence + i > included) {
            *entry_at(table, block_bytes, per_block, slot) = records[i];
            block_dirty[slot / per_block] = 1;
        }
    }
    return 0;
}

/* What stands for the page's place, key and write in its checksum. */
static void build_identity(uint8_t *identity, const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                           uint32_t length, uint32_t last)
{
    memcpy(identity, uuid, 16);
    memcpy(identity + 16, key, 32);
    memcpy(identity + 48, &generation, 8);
    memcpy(identity + 56, &length, 4);
    memcpy(identity + 60, &last, 4);
}

uint64_t kvdev_entry_checksum(uint32_t algorithm, const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                              uint32_t length, uint64_t sum)
{
    uint8_t identity[64];
    if (algorithm == KVDEV_CHECKSUM_NH64) {
        build_identity(identity, uuid, key, generation, length, algorithm);
        return kvdev_nh64(identity, sizeof(identity)) ^ sum;
    }
    build_identity(identity, uuid, key, generation, length, (uint32_t)sum);
    return (uint64_t)kvdev_crc32c(0, identity, sizeof(identity)) << 32 | (uint32_t)sum;
}

uint64_t kvdev_entry_sum(uint32_t algorithm, const uint8_t *uuid, const uint8_t *key, uint64_t generation,
                         uint32_t length, uint64_t checksum)
{
    if (algorithm == KVDEV_CHECKSUM_NH64) { /* its own inverse */
        return kvdev_entry_checksum(algorithm, uuid, key, generation, length, checksum);
    }
    return (uint32_t)checksum;
}

uint64_t kvdev_sum_at(uint32_t algorithm, const void *sums, uint32_t index)
{
    return algorithm == KVDEV_CHECKSUM_NH64 ? ((const uint64_t *)sums)[index] : ((const uint32_t *)sums)[index];
}

uint32_t kvdev_grants_verify(uint32_t algorithm, const uint8_t *uuid, const uint8_t *keys,
                             const struct kvdev_grant *grants, const void *sums, uint32_t length, uint32_t count,
                             uint8_t *valid)
{
    uint32_t valid_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t expected = kvdev_entry_checksum(algorithm, uuid, keys + (size_t)i * 32, grants[i].generation,
                                                 grants[i].length, kvdev_sum_at(algorithm, sums, i));
        valid[i] = expected == grants[i].checksum && grants[i].length == length;
        valid_count += valid[i];
    }
    return valid_count;
}

void kvdev_grants_sums(uint32_t algorithm, const uint8_t *uuid, const uint8_t *keys, const struct kvdev_grant *grants,
                       uint32_t count, void *sums)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t sum = kvdev_entry_sum(algorithm, uuid, keys + (size_t)i * 32, grants[i].generation,
                                       grants[i].length, grants[i].checksum);
        if (algorithm == KVDEV_CHECKSUM_NH64) {
            ((uint64_t *)sums)[i] = sum;
        } else {
            ((uint32_t *)sums)[i] = (uint32_t)sum;
        }
    }
}

uint32_t kvdev_table_find_algorithm(const uint8_t *table, uint32_t block_bytes, uint32_t slot_count,
                                    uint32_t algorithm)
{
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        const uint8_t *entry = table + (size_t)(slot / per_block) * block_bytes + HEADER_BYTES
                               + (size_t)(slot % per_block) * sizeof(struct kvdev_entry);
        if (entry[offsetof(struct kvdev_entry, state)] == 1
            && entry[offsetof(struct kvdev_entry, algorithm)] != algorithm) {
            return slot;
        }
    }
    return slot_count;
}

#include "probe_int.h"

#include <stddef.h>
#include <string.h>

#include "crc32c.h"

#define HEADER_MAGIC 0x31725070u

/* At the start of each interval of a verified write; the payload behind it follows from the seed. */
struct probe_header {
    uint32_t magic;
    uint32_t length;        /* of the interval, header included */
    uint64_t offset;        /* on the device */
    uint64_t seed;
    uint64_t generation;
    uint32_t payload_crc;
    uint32_t header_crc;    /* of the bytes before it */
};

_Static_assert(sizeof(struct probe_header) == 40, "the header of an interval is 40 bytes");

/* Eight bytes a step; the tail is the start of one more. */
static uint64_t fill_word(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

void probe_fill_random(uint8_t *buf, uint64_t length, uint64_t seed)
{
    uint64_t state = seed;
    while (length) {
        uint64_t word = fill_word(&state);
        size_t take = length < sizeof word ? (size_t)length : sizeof word;
        memcpy(buf, &word, take);
        buf += take;
        length -= take;
    }
}

void probe_fill_pattern(const struct kvdev_probe_params *params, uint8_t *buf, uint64_t length)
{
    for (uint64_t at = 0; at < length; at += params->pattern_size) {
        uint64_t left = length - at;
        memcpy(buf + at, params->pattern, left < params->pattern_size ? (size_t)left : params->pattern_size);
    }
}

static void interval_fill(const struct kvdev_probe_params *params, uint8_t *buf, uint64_t offset, uint64_t length,
                          uint64_t seed)
{
    if (params->verify == KVDEV_PROBE_VERIFY_PATTERN) {
        probe_fill_pattern(params, buf, length);
        return;
    }
    struct probe_header header = {
        .magic = HEADER_MAGIC,
        .length = (uint32_t)length,
        .offset = offset,
        .seed = seed,
        .generation = params->generation,
    };
    uint8_t *payload = buf + sizeof header;
    uint64_t payload_length = length - sizeof header;
    if (params->pattern_size)
        probe_fill_pattern(params, payload, payload_length);
    else
        probe_fill_random(payload, payload_length, seed);
    header.payload_crc = kvdev_crc32c(0, payload, (size_t)payload_length);
    header.header_crc = kvdev_crc32c(0, &header, offsetof(struct probe_header, header_crc));
    memcpy(buf, &header, sizeof header);
}

void probe_fill_verified(const struct kvdev_probe_params *params, uint8_t *buf, uint64_t offset, uint64_t length,
                         uint64_t seed)
{
    for (uint64_t at = 0; at < length; at += params->verify_interval)
        interval_fill(params, buf + at, offset + at, params->verify_interval, seed + at);
}

/* The first byte that is not as the pattern has it; length if all are. */
static uint64_t pattern_difference(const struct kvdev_probe_params *params, const uint8_t *buf, uint64_t length)
{
    for (uint64_t at = 0; at < length; at += params->pattern_size) {
        uint64_t left = length - at;
        size_t take = left < params->pattern_size ? (size_t)left : params->pattern_size;
        if (memcmp(buf + at, params->pattern, take) == 0)
            continue;
        for (size_t i = 0; i < take; i++)
            if (buf[at + i] != params->pattern[i])
                return at + i;
    }
    return length;
}

static uint64_t random_difference(const uint8_t *buf, uint64_t length, uint64_t seed)
{
    uint64_t state = seed;
    for (uint64_t at = 0; at < length; at += 8) {
        uint64_t word = fill_word(&state);
        uint8_t bytes[8];
        memcpy(bytes, &word, sizeof bytes);
        for (uint64_t i = 0; i < 8 && at + i < length; i++)
            if (buf[at + i] != bytes[i])
                return at + i;
    }
    return length;
}

/* KVDEV_PROBE_BAD_* of one interval; *where is the byte in it. */
static uint32_t interval_check(const struct kvdev_probe_params *params, const uint8_t *buf, uint64_t offset,
                               uint64_t length, int is_own, uint64_t *where)
{
    *where = 0;
    if (params->verify == KVDEV_PROBE_VERIFY_PATTERN) {
        *where = pattern_difference(params, buf, length);
        return *where < length ? KVDEV_PROBE_BAD_PAYLOAD : KVDEV_PROBE_BAD_NONE;
    }
    struct probe_header header;
    memcpy(&header, buf, sizeof header);
    uint32_t crc = kvdev_crc32c(0, &header, offsetof(struct probe_header, header_crc));
    if (header.magic != HEADER_MAGIC || header.header_crc != crc)
        return KVDEV_PROBE_BAD_HEADER;
    if (header.offset != offset || header.length != length)
        return KVDEV_PROBE_BAD_PLACE;
    if (is_own && header.generation != params->generation)
        return KVDEV_PROBE_BAD_STALE;
    const uint8_t *payload = buf + sizeof header;
    uint64_t payload_length = length - sizeof header;
    if (kvdev_crc32c(0, payload, (size_t)payload_length) == header.payload_crc)
        return KVDEV_PROBE_BAD_NONE;
    uint64_t at = params->pattern_size ? pattern_difference(params, payload, payload_length)
                                       : random_difference(payload, payload_length, header.seed);
    /* Bytes as they should be under a checksum that is not: written so, with another pattern. */
    *where = sizeof header + (at < payload_length ? at : 0);
    return KVDEV_PROBE_BAD_PAYLOAD;
}

void probe_check(const struct kvdev_probe_params *params, const uint8_t *buf, uint64_t offset, uint64_t length,
                 int is_own, struct probe_bad *ret)
{
    memset(ret, 0, sizeof *ret);
    for (uint64_t at = 0; at + params->verify_interval <= length; at += params->verify_interval) {
        uint64_t where;
        uint32_t reason = interval_check(params, buf + at, offset + at, params->verify_interval, is_own, &where);
        if (!reason)
            continue;
        if (!ret->count++) {
            ret->reason = reason;
            ret->interval = offset + at;
            ret->offset = offset + at + where;
        }
        if (params->is_verify_fatal)
            return;
    }
}

#include "probe_int.h"

#include <string.h>

#define BUCKETS_PER_GROUP (1u << KVDEV_PROBE_GROUP_BITS)

/* Values below 128 have a bucket each; above, a power of two is 64 buckets, so that a bucket is at most 1/64 of its
 * value wide. */
uint32_t kvdev_probe_bucket_of(uint64_t value)
{
    if (value < 2 * BUCKETS_PER_GROUP)
        return (uint32_t)value;
    uint32_t shift = 63u - (uint32_t)__builtin_clzll(value) - KVDEV_PROBE_GROUP_BITS;
    uint32_t bucket = ((shift + 1) << KVDEV_PROBE_GROUP_BITS) + (uint32_t)((value >> shift) & (BUCKETS_PER_GROUP - 1));
    return bucket < KVDEV_PROBE_BUCKET_COUNT ? bucket : KVDEV_PROBE_BUCKET_COUNT - 1;
}

uint64_t kvdev_probe_bucket_value(uint32_t bucket)
{
    if (bucket < 2 * BUCKETS_PER_GROUP)
        return bucket;
    uint32_t shift = (bucket >> KVDEV_PROBE_GROUP_BITS) - 1;
    uint64_t low = (uint64_t)(BUCKETS_PER_GROUP + bucket % BUCKETS_PER_GROUP) << shift;
    return low + ((uint64_t)1 << shift) / 2;
}

void probe_stat_add(struct kvdev_probe_stat *stat, uint64_t value)
{
    if (!stat->count || value < stat->min)
        stat->min = value;
    if (value > stat->max)
        stat->max = value;
    stat->count++;
    double delta = (double)value - stat->mean;
    stat->mean += delta / (double)stat->count;
    stat->square += delta * ((double)value - stat->mean);
}

void kvdev_probe_stat_merge(struct kvdev_probe_stat *dst, const struct kvdev_probe_stat *src)
{
    if (!src->count)
        return;
    if (!dst->count) {
        *dst = *src;
        return;
    }
    double a = (double)dst->count, b = (double)src->count;
    double delta = src->mean - dst->mean;
    dst->mean = (dst->mean * a + src->mean * b) / (a + b);
    dst->square += src->square + delta * delta * a * b / (a + b);
    dst->count += src->count;
    if (src->min < dst->min)
        dst->min = src->min;
    if (src->max > dst->max)
        dst->max = src->max;
}

void kvdev_probe_lat_add(struct kvdev_probe_lat *lat, uint64_t value)
{
    probe_stat_add(&lat->stat, value);
    lat->buckets[kvdev_probe_bucket_of(value)]++;
}

void kvdev_probe_lat_merge(struct kvdev_probe_lat *dst, const struct kvdev_probe_lat *src)
{
    kvdev_probe_stat_merge(&dst->stat, &src->stat);
    for (uint32_t i = 0; i < KVDEV_PROBE_BUCKET_COUNT; i++)
        dst->buckets[i] += src->buckets[i];
}

static uint32_t spread_index(uint64_t value)
{
    static const uint16_t from[] = { 2, 4, 10, 20, 50, 100, 250, 500, 750 };
    uint32_t index = 0;
    while (index < 9 && value >= from[index])
        index++;
    return index;
}

void probe_spread_add(struct kvdev_probe_result *result, uint64_t clat_ns)
{
    if (clat_ns < 1000) {
        result->clat_ns[spread_index(clat_ns)]++;
    } else if (clat_ns < 1000000) {
        result->clat_us[spread_index(clat_ns / 1000)]++;
    } else {
        uint64_t ms = clat_ns / 1000000;
        result->clat_ms[ms >= 2000 ? 11 : ms >= 1000 ? 10 : spread_index(ms)]++;
    }
}

/* 0, up to 4, 8, 16, 32, 64, over. */
uint32_t probe_batch_index(uint32_t count)
{
    if (!count)
        return 0;
    uint32_t index = 1;
    for (uint32_t limit = 4; count > limit && index < 6; limit *= 2)
        index++;
    return index;
}

/* 1, 2 to 3, 4 to 7, ... 64 and over. */
uint32_t probe_depth_index(uint32_t depth)
{
    uint32_t index = depth ? 31u - (uint32_t)__builtin_clz(depth) : 0;
    return index < 6 ? index : 6;
}

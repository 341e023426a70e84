#include "bdev_int.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define NS_PER_S ((uint64_t)1000000000)
#define RATE_BURST_NS ((uint64_t)1000000)  /* what was left unused may be used up so much later */
#define NOMEM_WAIT_NS ((uint64_t)1000000)
#define P99_EVERY 100                      /* one operation in so many */
#define INJECT_OPS 4

struct filter {
    _Atomic uint64_t read_ns_avg;
    _Atomic uint64_t read_ns_p99;
    _Atomic uint64_t write_ns_avg;
    _Atomic uint64_t write_ns_p99;
    _Atomic uint32_t sequence;
    _Atomic uint32_t running;              /* operations on the base now */
    _Atomic uint64_t resume_count;
    _Atomic uint32_t armed;                /* whether an injection has a count */
    pthread_mutex_t lock;                  /* the injections */
    struct kvdev_bdev_injection injections[INJECT_OPS];
};

struct histogram {
    _Atomic int32_t op;                    /* counted operation, -1 all, -2 none */
    _Atomic uint64_t counts[KVDEV_BDEV_HISTOGRAM_BUCKETS];
};

void stack_free(struct kvdev_bdev *bdev)
{
    if (bdev->filter)
        pthread_mutex_destroy(&bdev->filter->lock);
    free(bdev->filter);
    free(bdev->pieces);
    free(atomic_load(&bdev->histogram));
}

/* A device over one base with its properties. */
static struct kvdev_bdev *over_new(uint8_t kind, struct kvdev_bdev *base, uint64_t block_count)
{
    struct kvdev_bdev *bdev = bdev_new(kind, base->block_size, block_count);
    if (!bdev)
        return NULL;
    bdev->members = calloc(1, sizeof(struct kvdev_bdev *));
    if (!bdev->members) {
        free(bdev);
        return NULL;
    }
    bdev->members[0] = base;
    bdev->member_count = 1;
    bdev->may_block = base->may_block;
    bdev->has_volatile_cache = base->has_volatile_cache;
    bdev->is_readonly = base->is_readonly;
    kvdev_bdev_set_held(bdev, kvdev_bdev_is_held(base));
    return bdev;
}

/* ---- linear ---- */

int kvdev_bdev_create_linear(struct kvdev_bdev *base, const struct kvdev_bdev_extent *extents, uint32_t count,
                             uint32_t flags, struct kvdev_bdev **ret)
{
    if (count == 0)
        return -EINVAL;
    uint64_t size = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvdev_bdev_extent *extent = &extents[i];
        if (extent->length == 0 || ((extent->offset | extent->length) & (base->block_size - 1)) != 0 ||
            extent->offset > base->size_bytes || extent->length > base->size_bytes - extent->offset ||
            extent->length > (uint64_t)INT64_MAX - size)
            return -EINVAL;
        size += extent->length;
    }
    struct kvdev_bdev *bdev = over_new(KVDEV_BDEV_LINEAR, base, size / base->block_size);
    if (!bdev)
        return -ENOMEM;
    bdev->pieces = calloc(count, sizeof(*bdev->pieces));
    if (!bdev->pieces) {
        kvdev_bdev_destroy(bdev);
        return -ENOMEM;
    }
    uint64_t start = 0;
    for (uint32_t i = 0; i < count; i++) {
        bdev->pieces[i] = (struct linear_piece){start, extents[i].length, extents[i].offset};
        start += extents[i].length;
    }
    bdev->piece_count = count;
    if (flags & KVDEV_BDEV_READONLY)
        bdev->is_readonly = 1;
    *ret = bdev;
    return 0;
}

const struct linear_piece *linear_piece_at(const struct kvdev_bdev *bdev, uint64_t offset)
{
    uint32_t low = 0, high = bdev->piece_count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (bdev->pieces[middle].start <= offset)
            low = middle;
        else
            high = middle - 1;
    }
    return &bdev->pieces[low];
}

int linear_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, uint8_t *buf)
{
    struct kvdev_bdev *base = bdev->members[0];
    if (op == KVDEV_BDEV_OP_FLUSH)
        return kvdev_bdev_execute(base, op, flags, 0, base->size_bytes, NULL);
    while (length > 0) {
        const struct linear_piece *at = linear_piece_at(bdev, offset);
        uint64_t skip = offset - at->start;
        uint64_t piece = length < at->length - skip ? length : at->length - skip;
        int err = kvdev_bdev_execute(base, op, flags, at->offset + skip, piece, buf);
        if (err)
            return err;
        if (buf)
            buf += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

/* ---- filter ---- */

int kvdev_bdev_create_filter(struct kvdev_bdev *base, struct kvdev_bdev **ret)
{
    struct kvdev_bdev *bdev = over_new(KVDEV_BDEV_FILTER, base, base->block_count);
    if (!bdev)
        return -ENOMEM;
    bdev->filter = calloc(1, sizeof(*bdev->filter));
    if (!bdev->filter) {
        kvdev_bdev_destroy(bdev);
        return -ENOMEM;
    }
    pthread_mutex_init(&bdev->filter->lock, NULL);
    bdev->has_volatile_cache = 1; /* so that hosts flush: a drill may want a flush to fail */
    kvdev_bdev_set_held(bdev, 1);
    *ret = bdev;
    return 0;
}

int kvdev_bdev_set_delay(struct kvdev_bdev *bdev, const struct kvdev_bdev_delay *delay)
{
    struct filter *filter = bdev->filter;
    if (!filter)
        return -EINVAL;
    atomic_store(&filter->read_ns_avg, delay->read_ns_avg);
    atomic_store(&filter->read_ns_p99, delay->read_ns_p99);
    atomic_store(&filter->write_ns_avg, delay->write_ns_avg);
    atomic_store(&filter->write_ns_p99, delay->write_ns_p99);
    return 0;
}

static int inject_index(int op)
{
    switch (op) {
    case KVDEV_BDEV_OP_READ:
        return 0;
    case KVDEV_BDEV_OP_WRITE:
        return 1;
    case KVDEV_BDEV_OP_FLUSH:
        return 2;
    case KVDEV_BDEV_OP_DEALLOCATE:
        return 3;
    default:
        return -1;
    }
}

int kvdev_bdev_inject(struct kvdev_bdev *bdev, int op, const struct kvdev_bdev_injection *injection)
{
    struct filter *filter = bdev->filter;
    int index = inject_index(op);
    if (!filter || index < 0 || injection->type > KVDEV_BDEV_INJECT_NVME)
        return -EINVAL;
    pthread_mutex_lock(&filter->lock);
    filter->injections[index] = *injection;
    uint32_t armed = 0;
    for (int i = 0; i < INJECT_OPS; i++)
        armed |= filter->injections[i].count > 0;
    atomic_store(&filter->armed, armed);
    pthread_mutex_unlock(&filter->lock);
    return 0;
}

int kvdev_bdev_resume(struct kvdev_bdev *bdev)
{
    if (!bdev->filter)
        return -EINVAL;
    atomic_fetch_add(&bdev->filter->resume_count, 1);
    return 0;
}

int kvdev_bdev_is_resumed(const struct kvdev_bdev_hold *hold)
{
    return !hold->pending || atomic_load(&hold->pending->filter->resume_count) != hold->resume_count;
}

/* Use up one injection for the operation; 0 when there is none. Those that hold are taken at admission, the
 * others when the operation runs. */
static int injection_take(struct filter *filter, int op, int is_admission, struct kvdev_bdev_injection *ret)
{
    int index = inject_index(op);
    if (index < 0 || !atomic_load(&filter->armed))
        return 0;
    int taken = 0;
    pthread_mutex_lock(&filter->lock);
    struct kvdev_bdev_injection *injection = &filter->injections[index];
    int holds = injection->type == KVDEV_BDEV_INJECT_PENDING || injection->type == KVDEV_BDEV_INJECT_NOMEM;
    if (injection->count > 0 && holds == is_admission && atomic_load(&filter->running) >= injection->queue_depth) {
        *ret = *injection;
        injection->count--;
        taken = 1;
    }
    pthread_mutex_unlock(&filter->lock);
    return taken;
}

static void corrupt(const struct kvdev_bdev_injection *injection, uint8_t *buf, uint64_t length)
{
    if (buf && injection->corrupt_offset < length)
        buf[injection->corrupt_offset] ^= injection->corrupt_value;
}

int filter_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, uint8_t *buf)
{
    struct filter *filter = bdev->filter;
    struct kvdev_bdev_injection injection;
    int taken = injection_take(filter, op, 0, &injection);
    if (taken && injection.type == KVDEV_BDEV_INJECT_FAILURE)
        return -EIO;
    if (taken && injection.type == KVDEV_BDEV_INJECT_NVME)
        return -(KVDEV_BDEV_NVME_ERROR | injection.sct << 8 | injection.sc);
    if (taken && op == KVDEV_BDEV_OP_WRITE)
        corrupt(&injection, buf, length);
    atomic_fetch_add(&filter->running, 1);
    int err = kvdev_bdev_execute(bdev->members[0], op, flags, offset, length, buf);
    atomic_fetch_sub(&filter->running, 1);
    /* A write's buffer is the caller's: it gets back what it gave. */
    if (taken && (op == KVDEV_BDEV_OP_WRITE || (op == KVDEV_BDEV_OP_READ && !err)))
        corrupt(&injection, buf, length);
    return err;
}

/* ---- limits ---- */

void kvdev_bdev_set_held(struct kvdev_bdev *bdev, int is_held)
{
    atomic_store(&bdev->is_held, (uint32_t)(is_held || bdev->filter || atomic_load(&bdev->has_limits)));
}

int kvdev_bdev_is_held(const struct kvdev_bdev *bdev)
{
    return (int)atomic_load_explicit(&bdev->is_held, memory_order_relaxed);
}

void kvdev_bdev_set_limits(struct kvdev_bdev *bdev, const struct kvdev_bdev_limits *limits)
{
    const uint64_t values[RATE_COUNT] = {limits->rw_ios, limits->rw_bytes, limits->read_bytes, limits->write_bytes};
    uint32_t has_limits = 0;
    for (int i = 0; i < RATE_COUNT; i++) {
        atomic_store(&bdev->rates[i].per_second, values[i]);
        has_limits |= values[i] > 0;
    }
    atomic_store(&bdev->has_limits, has_limits);
}

/* Reserve units of a rate; the time from which on they may be used. */
static uint64_t rate_take(struct rate *rate, uint64_t units, uint64_t now_ns)
{
    uint64_t per_second = atomic_load(&rate->per_second);
    if (per_second == 0)
        return now_ns;
    uint64_t cost_ns = (uint64_t)(((unsigned __int128)units * NS_PER_S + per_second - 1) / per_second);
    uint64_t earliest = now_ns > RATE_BURST_NS ? now_ns - RATE_BURST_NS : 0;
    uint64_t free_ns = atomic_load(&rate->free_ns);
    uint64_t start_ns;
    do {
        start_ns = free_ns > earliest ? free_ns : earliest;
    } while (!atomic_compare_exchange_weak(&rate->free_ns, &free_ns, start_ns + cost_ns));
    return start_ns;
}

static uint64_t limits_take(struct kvdev_bdev *bdev, int op, uint64_t length, uint64_t now_ns)
{
    int is_read = op == KVDEV_BDEV_OP_READ;
    if ((!is_read && op != KVDEV_BDEV_OP_WRITE) || !atomic_load(&bdev->has_limits))
        return now_ns;
    const uint64_t due[3] = {
        rate_take(&bdev->rates[RATE_RW_IOS], 1, now_ns),
        rate_take(&bdev->rates[RATE_RW_BYTES], length, now_ns),
        rate_take(&bdev->rates[is_read ? RATE_READ_BYTES : RATE_WRITE_BYTES], length, now_ns),
    };
    uint64_t latest = now_ns;
    for (int i = 0; i < 3; i++)
        latest = due[i] > latest ? due[i] : latest;
    return latest;
}

static uint64_t delay_of(struct filter *filter, int op)
{
    int is_p99 = atomic_fetch_add(&filter->sequence, 1) % P99_EVERY == P99_EVERY - 1;
    if (op == KVDEV_BDEV_OP_READ)
        return atomic_load(is_p99 ? &filter->read_ns_p99 : &filter->read_ns_avg);
    if (op == KVDEV_BDEV_OP_WRITE)
        return atomic_load(is_p99 ? &filter->write_ns_p99 : &filter->write_ns_avg);
    return 0;
}

static void admit(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t now_ns,
                  struct kvdev_bdev_hold *hold)
{
    if (!kvdev_bdev_is_held(bdev))
        return;
    uint64_t due = limits_take(bdev, op, length, now_ns);
    if (bdev->filter) {
        struct kvdev_bdev_injection injection;
        due += delay_of(bdev->filter, op);
        int taken = injection_take(bdev->filter, op, 1, &injection);
        if (taken && injection.type == KVDEV_BDEV_INJECT_NOMEM)
            due += NOMEM_WAIT_NS;
        if (taken && injection.type == KVDEV_BDEV_INJECT_PENDING) {
            hold->resume_count = atomic_load(&bdev->filter->resume_count);
            hold->pending = bdev;
        }
    }
    if (due > hold->due_ns)
        hold->due_ns = due;
    if (op == KVDEV_BDEV_OP_FLUSH || op == KVDEV_BDEV_OP_DEALLOCATE) {
        for (uint32_t i = 0; i < bdev->member_count; i++)
            admit(bdev->members[i], op, 0, 0, now_ns, hold);
        return;
    }
    if (bdev->kind == KVDEV_BDEV_FILTER)
        admit(bdev->members[0], op, offset, length, now_ns, hold);
    while (length > 0 && (bdev->kind == KVDEV_BDEV_RAID0 || bdev->kind == KVDEV_BDEV_LINEAR)) {
        struct kvdev_bdev *below = bdev->members[0];
        uint64_t below_offset, left;
        if (bdev->kind == KVDEV_BDEV_RAID0) {
            below = raid0_member(bdev, offset, &below_offset);
            left = bdev->strip_size - (offset & (bdev->strip_size - 1));
        } else {
            const struct linear_piece *at = linear_piece_at(bdev, offset);
            below_offset = at->offset + (offset - at->start);
            left = at->length - (offset - at->start);
        }
        uint64_t piece = length < left ? length : left;
        admit(below, op, below_offset, piece, now_ns, hold);
        offset += piece;
        length -= piece;
    }
}

int kvdev_bdev_admit(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t now_ns,
                     struct kvdev_bdev_hold *ret)
{
    *ret = (struct kvdev_bdev_hold){now_ns, NULL, 0};
    admit(bdev, op, offset, length, now_ns, ret);
    return ret->due_ns > now_ns || ret->pending;
}

/* ---- histogram ---- */

static uint32_t bucket_of(uint64_t ns)
{
    if (ns < ((uint64_t)1 << KVDEV_BDEV_HISTOGRAM_SHIFT))
        return (uint32_t)ns;
    uint32_t range = 64 - (uint32_t)__builtin_clzll(ns) - KVDEV_BDEV_HISTOGRAM_SHIFT;
    uint32_t index = (uint32_t)(ns >> (range - 1)) & ((1u << KVDEV_BDEV_HISTOGRAM_SHIFT) - 1);
    return (range << KVDEV_BDEV_HISTOGRAM_SHIFT) + index;
}

_Static_assert(KVDEV_BDEV_HISTOGRAM_BUCKETS == (64 - KVDEV_BDEV_HISTOGRAM_SHIFT + 1) << KVDEV_BDEV_HISTOGRAM_SHIFT,
               "a range of buckets for each power of two that a latency can have");

void histogram_add(struct kvdev_bdev *bdev, int op, uint64_t ns)
{
    struct histogram *histogram = atomic_load_explicit(&bdev->histogram, memory_order_acquire);
    if (!histogram)
        return;
    int counted = atomic_load_explicit(&histogram->op, memory_order_relaxed);
    if (counted == -1 || counted == op)
        atomic_fetch_add_explicit(&histogram->counts[bucket_of(ns)], 1, memory_order_relaxed);
}

int kvdev_bdev_histogram_start(struct kvdev_bdev *bdev, int op)
{
    struct histogram *histogram = atomic_load(&bdev->histogram);
    if (!histogram) {
        histogram = calloc(1, sizeof(*histogram));
        if (!histogram)
            return -ENOMEM;
        atomic_store(&histogram->op, -2);
        /* It stays until the device goes: whoever counts just now may still hold it. */
        atomic_store_explicit(&bdev->histogram, histogram, memory_order_release);
    }
    atomic_store(&histogram->op, -2);
    for (uint32_t i = 0; i < KVDEV_BDEV_HISTOGRAM_BUCKETS; i++)
        atomic_store_explicit(&histogram->counts[i], 0, memory_order_relaxed);
    atomic_store(&histogram->op, op);
    return 0;
}

void kvdev_bdev_histogram_stop(struct kvdev_bdev *bdev)
{
    struct histogram *histogram = atomic_load(&bdev->histogram);
    if (histogram)
        atomic_store(&histogram->op, -2);
}

int kvdev_bdev_histogram_read(const struct kvdev_bdev *bdev, uint64_t *counts)
{
    struct histogram *histogram = atomic_load(&bdev->histogram);
    if (!histogram || atomic_load(&histogram->op) == -2)
        return -EFAULT;
    for (uint32_t i = 0; i < KVDEV_BDEV_HISTOGRAM_BUCKETS; i++)
        counts[i] = atomic_load_explicit(&histogram->counts[i], memory_order_relaxed);
    return 0;
}

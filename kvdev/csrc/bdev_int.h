/* Inside of the block devices: what their source files share. */
#ifndef KVDEV_BDEV_INT_H
#define KVDEV_BDEV_INT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "bdev.h"

#define RATE_RW_IOS 0
#define RATE_RW_BYTES 1
#define RATE_READ_BYTES 2
#define RATE_WRITE_BYTES 3
#define RATE_COUNT 4

struct filter;
struct histogram;

struct counters {
    _Atomic uint64_t bytes;
    _Atomic uint64_t count;
    _Atomic uint64_t ns;
    _Atomic uint64_t ns_max;
    _Atomic uint64_t ns_min;
};

struct linear_piece {
    uint64_t start;                       /* in the linear device */
    uint64_t length;
    uint64_t offset;                      /* in the base */
};

struct rate {                             /* a limit as the time at which the next operation may start */
    _Atomic uint64_t per_second;          /* 0: none */
    _Atomic uint64_t free_ns;
};

/* Written and not yet on the medium; dirty has a bit per block. */
struct volatile_cache {
    pthread_mutex_t lock;
    uint8_t *base;
    uint64_t *dirty;
    uint64_t word_count;
    uint64_t random;
};

struct kvdev_bdev {
    uint64_t size_bytes;
    uint64_t block_count;
    uint32_t block_size;
    uint8_t kind;
    uint8_t backing;
    uint8_t is_readonly;
    uint8_t may_block;
    uint8_t has_volatile_cache;
    uint8_t *base;                        /* memory */
    uint64_t map_bytes;
    int fd;                               /* file, buffered */
    int fd_direct;                        /* file, O_DIRECT, or -1 */
    struct volatile_cache *cache;         /* file, or NULL */
    uint32_t strip_size;                  /* raid0 */
    uint32_t strip_shift;
    uint32_t member_count;
    struct kvdev_bdev **members;          /* raid0: all; linear and filter: the base */
    struct linear_piece *pieces;          /* linear */
    uint32_t piece_count;
    _Atomic uint32_t is_held;
    _Atomic uint32_t has_limits;
    struct rate rates[RATE_COUNT];
    struct filter *filter;                /* filter */
    _Atomic(struct histogram *) histogram;
    struct counters read;
    struct counters write;
    struct counters unmap;
    _Atomic uint64_t flush_count;
    _Atomic uint64_t error_count;
};


struct kvdev_bdev *bdev_new(uint8_t kind, uint32_t block_size, uint64_t block_count);
struct kvdev_bdev *raid0_member(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t *member_offset);
uint64_t bdev_now_ns(void);

/* bdev_stack.c */
const struct linear_piece *linear_piece_at(const struct kvdev_bdev *bdev, uint64_t offset);
int linear_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, uint8_t *buf);
int filter_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, uint8_t *buf);
void stack_free(struct kvdev_bdev *bdev);
void histogram_add(struct kvdev_bdev *bdev, int op, uint64_t ns);

#endif

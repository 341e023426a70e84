#include "bdev_int.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <linux/fs.h>

#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define PAGE_BYTES ((uint64_t)4096)
#define DIRECT_ALIGN ((uint64_t)4096)     /* of buffer, offset and length for the O_DIRECT descriptor */
#define SCRATCH_BYTES ((uint64_t)16384)   /* a piece of a file compare or of a zero fill */
#define VERIFY_BYTES ((uint64_t)65536)    /* of one read that verifies; at least a block */
#define MEMSET_MAX ((uint64_t)1 << 20)    /* a longer zero fill of memory gives whole pages back instead */

static int cache_flush(struct kvdev_bdev *bdev);

static int geometry_check(uint32_t block_size, uint64_t block_count)
{
    if (block_size < 512 || (block_size & (block_size - 1)) != 0 || block_size > 65536)
        return -EINVAL;
    if (block_count == 0 || block_count > (uint64_t)INT64_MAX / block_size)
        return -EINVAL;
    return 0;
}

struct kvdev_bdev *bdev_new(uint8_t kind, uint32_t block_size, uint64_t block_count)
{
    struct kvdev_bdev *bdev = calloc(1, sizeof(*bdev));
    if (!bdev)
        return NULL;
    bdev->kind = kind;
    bdev->block_size = block_size;
    bdev->block_count = block_count;
    bdev->size_bytes = block_count * block_size;
    bdev->fd = -1;
    bdev->fd_direct = -1;
    return bdev;
}

int kvdev_bdev_create_memory(uint32_t block_size, uint64_t block_count, uint32_t flags, struct kvdev_bdev **ret)
{
    int err = geometry_check(block_size, block_count);
    if (err)
        return err;
    struct kvdev_bdev *bdev = bdev_new(KVDEV_BDEV_MEMORY, block_size, block_count);
    if (!bdev)
        return -ENOMEM;
    bdev->map_bytes = (bdev->size_bytes + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1);
    int prot = PROT_READ | PROT_WRITE;
    int map = MAP_PRIVATE | MAP_ANONYMOUS;
    void *base = mmap(NULL, bdev->map_bytes, prot, map | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
    if (base != MAP_FAILED) {
        bdev->backing = KVDEV_BDEV_BACKING_HUGETLB;
    } else {
        /* One huge page more, so that the device can start on a huge page boundary. */
        uint64_t asked = bdev->map_bytes + HUGE_PAGE_BYTES;
        uint8_t *raw = mmap(NULL, asked, prot, map, -1, 0);
        if (raw == MAP_FAILED) {
            free(bdev);
            return -ENOMEM;
        }
        uint64_t skip = (HUGE_PAGE_BYTES - ((uintptr_t)raw & (HUGE_PAGE_BYTES - 1))) & (HUGE_PAGE_BYTES - 1);
        if (skip)
            munmap(raw, skip);
        if (HUGE_PAGE_BYTES - skip)
            munmap(raw + skip + bdev->map_bytes, HUGE_PAGE_BYTES - skip);
        base = raw + skip;
        madvise(base, bdev->map_bytes, MADV_HUGEPAGE);
        bdev->backing = KVDEV_BDEV_BACKING_THP;
    }
    bdev->base = base;
    if (flags & KVDEV_BDEV_POPULATE) {
#ifdef MADV_POPULATE_WRITE
        if (madvise(base, bdev->map_bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
            kvdev_bdev_destroy(bdev);
            return -ENOMEM;
        }
#endif
    }
    *ret = bdev;
    return 0;
}

int kvdev_bdev_create_null(uint32_t block_size, uint64_t block_count, struct kvdev_bdev **ret)
{
    int err = geometry_check(block_size, block_count);
    if (err)
        return err;
    struct kvdev_bdev *bdev = bdev_new(KVDEV_BDEV_NULL, block_size, block_count);
    if (!bdev)
        return -ENOMEM;
    *ret = bdev;
    return 0;
}

static int file_size(int fd, uint64_t *ret)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    if (S_ISREG(st.st_mode)) {
        *ret = (uint64_t)st.st_size;
        return 0;
    }
    if (S_ISBLK(st.st_mode)) {
        uint64_t bytes;
        if (ioctl(fd, BLKGETSIZE64, &bytes) != 0)
            return -errno;
        *ret = bytes;
        return 0;
    }
    return -ENOTBLK;
}

/* Whether the direct descriptor really takes direct reads: some file systems accept the flag and then not the I/O. */
static int direct_works(int fd)
{
    void *probe = NULL;
    if (posix_memalign(&probe, DIRECT_ALIGN, DIRECT_ALIGN) != 0)
        return 0;
    ssize_t got = pread(fd, probe, DIRECT_ALIGN, 0);
    free(probe);
    return got >= 0;
}

int kvdev_bdev_create_file(const char *path, uint32_t block_size, uint64_t block_count, uint32_t flags,
                           struct kvdev_bdev **ret)
{
    int mode = (flags & KVDEV_BDEV_READONLY) ? O_RDONLY : O_RDWR;
    int fd = open(path, mode | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    uint64_t size = 0;
    int err = file_size(fd, &size);
    if (!err && block_count == 0 && block_size != 0)
        block_count = size / block_size;
    if (!err)
        err = geometry_check(block_size, block_count);
    if (!err && block_count > size / block_size)
        err = -ENOSPC;
    struct kvdev_bdev *bdev = err ? NULL : bdev_new(KVDEV_BDEV_FILE, block_size, block_count);
    if (!bdev) {
        close(fd);
        return err ? err : -ENOMEM;
    }
    bdev->fd = fd;
    bdev->is_readonly = (flags & KVDEV_BDEV_READONLY) != 0;
    bdev->may_block = 1;
    bdev->has_volatile_cache = 1;
    bdev->backing = KVDEV_BDEV_BACKING_BUFFERED;
    if (!(flags & KVDEV_BDEV_BUFFERED)) {
        bdev->fd_direct = open(path, mode | O_CLOEXEC | O_DIRECT);
        if (bdev->fd_direct >= 0 && !direct_works(bdev->fd_direct)) {
            close(bdev->fd_direct);
            bdev->fd_direct = -1;
        }
        if (bdev->fd_direct >= 0)
            bdev->backing = KVDEV_BDEV_BACKING_DIRECT;
    }
    *ret = bdev;
    return 0;
}

int kvdev_bdev_create_raid0(struct kvdev_bdev *const *members, uint32_t count, uint32_t strip_size,
                            struct kvdev_bdev **ret)
{
    if (count == 0 || count > KVDEV_BDEV_MEMBERS_MAX)
        return -EINVAL;
    uint32_t block_size = members[0]->block_size;
    if (strip_size < block_size || (strip_size & (strip_size - 1)) != 0)
        return -EINVAL;
    uint64_t smallest = UINT64_MAX;
    uint8_t may_block = 0, is_readonly = 0, has_volatile_cache = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (members[i]->block_size != block_size)
            return -EINVAL;
        if (members[i]->size_bytes < smallest)
            smallest = members[i]->size_bytes;
        may_block |= members[i]->may_block;
        has_volatile_cache |= members[i]->has_volatile_cache;
        is_readonly |= members[i]->is_readonly;
    }
    uint64_t rows = smallest / strip_size;
    if (rows == 0 || rows > (uint64_t)INT64_MAX / strip_size / count)
        return -EINVAL;
    struct kvdev_bdev *bdev = bdev_new(KVDEV_BDEV_RAID0, block_size, rows * count * (strip_size / block_size));
    if (!bdev)
        return -ENOMEM;
    bdev->members = calloc(count, sizeof(*bdev->members));
    if (!bdev->members) {
        free(bdev);
        return -ENOMEM;
    }
    memcpy(bdev->members, members, count * sizeof(*bdev->members));
    bdev->member_count = count;
    bdev->strip_size = strip_size;
    bdev->strip_shift = (uint32_t)__builtin_ctz(strip_size);
    bdev->may_block = may_block;
    bdev->has_volatile_cache = has_volatile_cache;
    bdev->is_readonly = is_readonly;
    for (uint32_t i = 0; i < count; i++) {
        if (kvdev_bdev_is_held(members[i]))
            kvdev_bdev_set_held(bdev, 1);
    }
    *ret = bdev;
    return 0;
}

int kvdev_bdev_volatile_set(struct kvdev_bdev *bdev, uint64_t seed)
{
    if (bdev->kind != KVDEV_BDEV_FILE || bdev->cache)
        return -EINVAL;
    if (bdev->is_readonly)
        return 0;
    struct volatile_cache *cache = calloc(1, sizeof(*cache));
    if (!cache)
        return -ENOMEM;
    cache->word_count = (bdev->block_count + 63) / 64;
    cache->random = seed * 2 + 1; /* any odd number will do, 0 would stay 0 */
    cache->dirty = calloc(cache->word_count, sizeof(*cache->dirty));
    cache->base = mmap(NULL, bdev->size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    if (!cache->dirty || cache->base == MAP_FAILED || pthread_mutex_init(&cache->lock, NULL) != 0) {
        if (cache->base != MAP_FAILED)
            munmap(cache->base, bdev->size_bytes);
        free(cache->dirty);
        free(cache);
        return -ENOMEM;
    }
    bdev->cache = cache;
    bdev->has_volatile_cache = 1;
    return 0;
}

static void cache_destroy(struct kvdev_bdev *bdev)
{
    struct volatile_cache *cache = bdev->cache;
    if (!cache)
        return;
    /* An orderly end, unlike a kill, loses nothing. */
    cache_flush(bdev);
    munmap(cache->base, bdev->size_bytes);
    pthread_mutex_destroy(&cache->lock);
    free(cache->dirty);
    free(cache);
}

void kvdev_bdev_destroy(struct kvdev_bdev *bdev)
{
    if (!bdev)
        return;
    cache_destroy(bdev);
    if (bdev->base)
        munmap(bdev->base, bdev->map_bytes);
    if (bdev->fd >= 0)
        close(bdev->fd);
    if (bdev->fd_direct >= 0)
        close(bdev->fd_direct);
    free(bdev->members);
    stack_free(bdev);
    free(bdev);
}

void kvdev_bdev_info_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_info *ret)
{
    memset(ret, 0, sizeof(*ret));
    ret->block_count = bdev->block_count;
    ret->block_size = bdev->block_size;
    ret->strip_size = bdev->strip_size;
    ret->member_count = bdev->member_count;
    ret->kind = bdev->kind;
    ret->backing = bdev->backing;
    ret->is_readonly = bdev->is_readonly;
    ret->has_volatile_cache = bdev->has_volatile_cache;
    ret->may_block = bdev->may_block;
}

int kvdev_bdev_may_block(const struct kvdev_bdev *bdev)
{
    return bdev->may_block;
}

/* ---- counters ---- */

static void counters_add(struct counters *c, uint64_t bytes, uint64_t ns)
{
    atomic_fetch_add_explicit(&c->bytes, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->ns, ns, memory_order_relaxed);
    uint64_t seen = atomic_load_explicit(&c->ns_max, memory_order_relaxed);
    while (ns > seen &&
           !atomic_compare_exchange_weak_explicit(&c->ns_max, &seen, ns, memory_order_relaxed, memory_order_relaxed))
        ;
    seen = atomic_load_explicit(&c->ns_min, memory_order_relaxed);
    while ((seen == 0 || ns < seen) &&
           !atomic_compare_exchange_weak_explicit(&c->ns_min, &seen, ns, memory_order_relaxed, memory_order_relaxed))
        ;
}

static void account_one(struct kvdev_bdev *bdev, int op, uint64_t length, uint64_t ns, int error)
{
    if (error) {
        atomic_fetch_add_explicit(&bdev->error_count, 1, memory_order_relaxed);
        return;
    }
    histogram_add(bdev, op, ns);
    switch (op) {
    case KVDEV_BDEV_OP_READ:
    case KVDEV_BDEV_OP_COMPARE:
    case KVDEV_BDEV_OP_VERIFY:
        counters_add(&bdev->read, length, ns);
        break;
    case KVDEV_BDEV_OP_WRITE:
    case KVDEV_BDEV_OP_WRITE_ZEROES:
        counters_add(&bdev->write, length, ns);
        break;
    case KVDEV_BDEV_OP_DEALLOCATE:
        counters_add(&bdev->unmap, length, ns);
        break;
    default:
        atomic_fetch_add_explicit(&bdev->flush_count, 1, memory_order_relaxed);
        break;
    }
}

struct kvdev_bdev *raid0_member(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t *member_offset)
{
    uint64_t strip = offset >> bdev->strip_shift;
    uint64_t row = strip / bdev->member_count;
    *member_offset = (row << bdev->strip_shift) + (offset & (bdev->strip_size - 1));
    return bdev->members[strip % bdev->member_count];
}

/* The device below that has the byte at offset; for raid0 and linear. */
static struct kvdev_bdev *step_down(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t *below)
{
    if (bdev->kind == KVDEV_BDEV_RAID0)
        return raid0_member(bdev, offset, below);
    const struct linear_piece *piece = linear_piece_at(bdev, offset);
    *below = piece->offset + (offset - piece->start);
    return bdev->members[0];
}

void kvdev_bdev_account(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t ns, int error)
{
    account_one(bdev, op, length, ns, error);
    while (bdev->kind == KVDEV_BDEV_RAID0 || bdev->kind == KVDEV_BDEV_LINEAR) {
        bdev = step_down(bdev, offset, &offset);
        account_one(bdev, op, length, ns, error);
    }
}

static void counters_read(const struct counters *c, uint64_t *bytes, uint64_t *count, uint64_t *ns, uint64_t *ns_max,
                          uint64_t *ns_min)
{
    *bytes = atomic_load_explicit(&c->bytes, memory_order_relaxed);
    *count = atomic_load_explicit(&c->count, memory_order_relaxed);
    *ns = atomic_load_explicit(&c->ns, memory_order_relaxed);
    *ns_max = atomic_load_explicit(&c->ns_max, memory_order_relaxed);
    *ns_min = atomic_load_explicit(&c->ns_min, memory_order_relaxed);
}

void kvdev_bdev_stat_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_stat *ret)
{
    counters_read(&bdev->read, &ret->read_bytes, &ret->read_count, &ret->read_ns, &ret->read_ns_max, &ret->read_ns_min);
    counters_read(&bdev->write, &ret->write_bytes, &ret->write_count, &ret->write_ns, &ret->write_ns_max,
                  &ret->write_ns_min);
    counters_read(&bdev->unmap, &ret->unmap_bytes, &ret->unmap_count, &ret->unmap_ns, &ret->unmap_ns_max,
                  &ret->unmap_ns_min);
    ret->flush_count = atomic_load_explicit(&bdev->flush_count, memory_order_relaxed);
    ret->error_count = atomic_load_explicit(&bdev->error_count, memory_order_relaxed);
}

static void counters_reset(struct counters *c)
{
    atomic_store_explicit(&c->bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&c->count, 0, memory_order_relaxed);
    atomic_store_explicit(&c->ns, 0, memory_order_relaxed);
    atomic_store_explicit(&c->ns_max, 0, memory_order_relaxed);
    atomic_store_explicit(&c->ns_min, 0, memory_order_relaxed);
}

void kvdev_bdev_stat_reset(struct kvdev_bdev *bdev)
{
    counters_reset(&bdev->read);
    counters_reset(&bdev->write);
    counters_reset(&bdev->unmap);
    atomic_store_explicit(&bdev->flush_count, 0, memory_order_relaxed);
    atomic_store_explicit(&bdev->error_count, 0, memory_order_relaxed);
}

/* ---- operations ---- */

uint64_t bdev_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void memory_zero(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length)
{
    uint8_t *at = bdev->base + offset;
    uint64_t page = bdev->backing == KVDEV_BDEV_BACKING_HUGETLB ? HUGE_PAGE_BYTES : PAGE_BYTES;
    uint64_t head = (page - ((uintptr_t)at & (page - 1))) & (page - 1);
    if (length > MEMSET_MAX && length > head + page) {
        /* Whole pages go back to the kernel, which gives zeroed ones on the next touch: a poller must not
         * spend milliseconds on a fill. */
        uint64_t middle = (length - head) & ~(page - 1);
        if (madvise(at + head, middle, MADV_DONTNEED) == 0) {
            memset(at, 0, head);
            memset(at + head + middle, 0, length - head - middle);
            return;
        }
    }
    memset(at, 0, length);
}

static int memory_execute(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, void *buf)
{
    switch (op) {
    case KVDEV_BDEV_OP_READ:
        memcpy(buf, bdev->base + offset, length);
        return 0;
    case KVDEV_BDEV_OP_WRITE:
        memcpy(bdev->base + offset, buf, length);
        return 0;
    case KVDEV_BDEV_OP_COMPARE:
        return memcmp(bdev->base + offset, buf, length) == 0 ? 0 : -EILSEQ;
    case KVDEV_BDEV_OP_WRITE_ZEROES:
    case KVDEV_BDEV_OP_DEALLOCATE:
        memory_zero(bdev, offset, length);
        return 0;
    default:
        return 0;
    }
}

static int null_execute(int op, uint64_t length, void *buf)
{
    if (op == KVDEV_BDEV_OP_READ)
        memset(buf, 0, length);
    if (op == KVDEV_BDEV_OP_COMPARE) {
        const uint8_t *bytes = buf;
        for (uint64_t i = 0; i < length; i++) {
            if (bytes[i])
                return -EILSEQ;
        }
    }
    return 0;
}

static int file_fd(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t length, const void *buf)
{
    if (bdev->fd_direct < 0 || ((offset | length | (uintptr_t)buf) & (DIRECT_ALIGN - 1)) != 0)
        return bdev->fd;
    return bdev->fd_direct;
}

static int file_read(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length, uint8_t *buf)
{
    int fd = file_fd(bdev, offset, length, buf);
    while (length > 0) {
        ssize_t got = pread(fd, buf, length, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EINVAL && fd != bdev->fd) {
            fd = bdev->fd; /* this file system wants a larger alignment than the one tried */
            continue;
        }
        if (got < 0)
            return -errno;
        if (got == 0)
            return -EIO; /* the file was cut under us */
        buf += got;
        offset += (uint64_t)got;
        length -= (uint64_t)got;
        if (((offset | (uintptr_t)buf) & (DIRECT_ALIGN - 1)) != 0)
            fd = bdev->fd;
    }
    return 0;
}

static int file_write(struct kvdev_bdev *bdev, uint32_t flags, uint64_t offset, uint64_t length, const uint8_t *buf)
{
    int fd = file_fd(bdev, offset, length, buf);
    while (length > 0) {
        ssize_t put = pwrite(fd, buf, length, (off_t)offset);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0 && errno == EINVAL && fd != bdev->fd) {
            fd = bdev->fd;
            continue;
        }
        if (put < 0)
            return -errno;
        if (put == 0)
            return -EIO;
        buf += put;
        offset += (uint64_t)put;
        length -= (uint64_t)put;
        if (((offset | (uintptr_t)buf) & (DIRECT_ALIGN - 1)) != 0)
            fd = bdev->fd;
    }
    if ((flags & KVDEV_BDEV_FUA) && fdatasync(bdev->fd) != 0)
        return -errno;
    return 0;
}

static int file_compare(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length, const uint8_t *buf)
{
    _Alignas(4096) uint8_t scratch[SCRATCH_BYTES];
    while (length > 0) {
        uint64_t piece = length < SCRATCH_BYTES ? length : SCRATCH_BYTES;
        int err = file_read(bdev, offset, piece, scratch);
        if (err)
            return err;
        if (memcmp(scratch, buf, piece) != 0)
            return -EILSEQ;
        buf += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

/* `read` is file_read or, over a volatile cache, cache_read. */
static int read_all(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length,
                    int (*read)(struct kvdev_bdev *, uint64_t, uint64_t, uint8_t *))
{
    _Alignas(4096) uint8_t scratch[VERIFY_BYTES];
    for (uint64_t at = 0; at < length; at += VERIFY_BYTES) {
        int err = read(bdev, offset + at, length - at < VERIFY_BYTES ? length - at : VERIFY_BYTES, scratch);
        if (err)
            return err;
    }
    return 0;
}

static int file_zero(struct kvdev_bdev *bdev, uint32_t flags, uint64_t offset, uint64_t length)
{
    if (fallocate(bdev->fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) != 0) {
        if (errno != EOPNOTSUPP && errno != ENOSYS)
            return -errno;
        _Alignas(4096) uint8_t zeroes[SCRATCH_BYTES];
        memset(zeroes, 0, sizeof(zeroes));
        while (length > 0) {
            uint64_t piece = length < SCRATCH_BYTES ? length : SCRATCH_BYTES;
            int err = file_write(bdev, 0, offset, piece, zeroes);
            if (err)
                return err;
            offset += piece;
            length -= piece;
        }
    }
    if ((flags & KVDEV_BDEV_FUA) && fdatasync(bdev->fd) != 0)
        return -errno;
    return 0;
}

/* ---- the volatile cache of a file ---- */

static int is_dirty(const struct volatile_cache *cache, uint64_t block)
{
    return (int)(cache->dirty[block / 64] >> (block % 64) & 1);
}

/* xorshift64*: about one in four. */
static int lets_through(struct volatile_cache *cache)
{
    uint64_t x = cache->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    cache->random = x;
    return (x * 0x2545f4914f6cdd1du) >> 62 == 0;
}

static int cache_read(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length, uint8_t *buf)
{
    struct volatile_cache *cache = bdev->cache;
    pthread_mutex_lock(&cache->lock);
    int err = file_read(bdev, offset, length, buf);
    for (uint64_t at = 0; !err && at < length; at += bdev->block_size)
        if (is_dirty(cache, (offset + at) / bdev->block_size))
            memcpy(buf + at, cache->base + offset + at, bdev->block_size);
    pthread_mutex_unlock(&cache->lock);
    return err;
}

/* buf NULL writes zeroes. */
static int cache_write(struct kvdev_bdev *bdev, uint32_t flags, uint64_t offset, uint64_t length, const uint8_t *buf)
{
    struct volatile_cache *cache = bdev->cache;
    int err = 0;
    pthread_mutex_lock(&cache->lock);
    for (uint64_t at = 0; !err && at < length; at += bdev->block_size) {
        uint64_t block = (offset + at) / bdev->block_size;
        uint8_t *place = cache->base + offset + at;
        if (buf)
            memcpy(place, buf + at, bdev->block_size);
        else
            memset(place, 0, bdev->block_size);
        cache->dirty[block / 64] |= (uint64_t)1 << (block % 64);
        if (!(flags & KVDEV_BDEV_FUA) && !lets_through(cache))
            continue;
        err = file_write(bdev, 0, offset + at, bdev->block_size, place);
        if (!err && flags & KVDEV_BDEV_FUA)
            cache->dirty[block / 64] &= ~((uint64_t)1 << (block % 64));
    }
    if (!err && flags & KVDEV_BDEV_FUA && fdatasync(bdev->fd) != 0)
        err = -errno;
    pthread_mutex_unlock(&cache->lock);
    return err;
}

static int cache_flush(struct kvdev_bdev *bdev)
{
    struct volatile_cache *cache = bdev->cache;
    int err = 0;
    pthread_mutex_lock(&cache->lock);
    for (uint64_t word = 0; !err && word < cache->word_count; word++) {
        for (uint64_t block = word * 64; !err && cache->dirty[word] >> (block % 64); block++) {
            if (is_dirty(cache, block)) {
                uint64_t offset = block * bdev->block_size;
                err = file_write(bdev, 0, offset, bdev->block_size, cache->base + offset);
            }
            if (block % 64 == 63)
                break;
        }
    }
    if (!err && fdatasync(bdev->fd) != 0)
        err = -errno;
    if (!err)
        memset(cache->dirty, 0, cache->word_count * sizeof(*cache->dirty));
    pthread_mutex_unlock(&cache->lock);
    return err;
}

static int cache_compare(struct kvdev_bdev *bdev, uint64_t offset, uint64_t length, const uint8_t *buf)
{
    _Alignas(4096) uint8_t scratch[SCRATCH_BYTES];
    uint64_t step = bdev->block_size < SCRATCH_BYTES ? bdev->block_size : SCRATCH_BYTES;
    if (bdev->block_size > SCRATCH_BYTES)
        return -EINVAL; /* no file has such blocks */
    for (uint64_t at = 0; at < length; at += step) {
        int err = cache_read(bdev, offset + at, step, scratch);
        if (err)
            return err;
        if (memcmp(scratch, buf + at, step) != 0)
            return -EILSEQ;
    }
    return 0;
}

static int cache_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, void *buf)
{
    switch (op) {
    case KVDEV_BDEV_OP_READ:
        return cache_read(bdev, offset, length, buf);
    case KVDEV_BDEV_OP_WRITE:
        return cache_write(bdev, flags, offset, length, buf);
    case KVDEV_BDEV_OP_COMPARE:
        return cache_compare(bdev, offset, length, buf);
    case KVDEV_BDEV_OP_WRITE_ZEROES:
    case KVDEV_BDEV_OP_DEALLOCATE:
        return cache_write(bdev, flags, offset, length, NULL);
    case KVDEV_BDEV_OP_VERIFY:
        return read_all(bdev, offset, length, cache_read);
    default:
        return cache_flush(bdev);
    }
}

static int file_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, void *buf)
{
    switch (op) {
    case KVDEV_BDEV_OP_READ:
        return file_read(bdev, offset, length, buf);
    case KVDEV_BDEV_OP_WRITE:
        return file_write(bdev, flags, offset, length, buf);
    case KVDEV_BDEV_OP_COMPARE:
        return file_compare(bdev, offset, length, buf);
    case KVDEV_BDEV_OP_WRITE_ZEROES:
        return file_zero(bdev, flags, offset, length);
    case KVDEV_BDEV_OP_VERIFY:
        return read_all(bdev, offset, length, file_read);
    case KVDEV_BDEV_OP_DEALLOCATE:
        /* Advisory: a file system that cannot punch holes keeps the blocks. */
        if (fallocate(bdev->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) != 0 &&
            errno != EOPNOTSUPP && errno != ENOSYS)
            return -errno;
        return 0;
    default:
        return fdatasync(bdev->fd) == 0 ? 0 : -errno;
    }
}

static int raid0_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length,
                         uint8_t *buf)
{
    if (op == KVDEV_BDEV_OP_FLUSH) {
        int first = 0;
        for (uint32_t i = 0; i < bdev->member_count; i++) {
            struct kvdev_bdev *member = bdev->members[i];
            int err = kvdev_bdev_execute(member, op, flags, 0, member->size_bytes, NULL);
            if (err && !first)
                first = err;
        }
        return first;
    }
    while (length > 0) {
        uint64_t member_offset;
        struct kvdev_bdev *member = raid0_member(bdev, offset, &member_offset);
        uint64_t piece = bdev->strip_size - (offset & (bdev->strip_size - 1));
        if (piece > length)
            piece = length;
        int err = kvdev_bdev_execute(member, op, flags, member_offset, piece, buf);
        if (err)
            return err;
        if (buf)
            buf += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

int kvdev_bdev_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length, void *buf)
{
    return kvdev_bdev_execute_from(bdev, op, flags, offset, length, buf, bdev_now_ns());
}

int kvdev_bdev_execute_from(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length,
                            void *buf, uint64_t start_ns)
{
    if (offset > bdev->size_bytes || length > bdev->size_bytes - offset ||
        ((offset | length) & (bdev->block_size - 1)) != 0)
        return -EINVAL;
    if (bdev->is_readonly && kvdev_bdev_changes(op))
        return -EROFS;
    int err;
    switch (bdev->kind) {
    case KVDEV_BDEV_MEMORY:
        err = memory_execute(bdev, op, offset, length, buf);
        break;
    case KVDEV_BDEV_FILE:
        err = bdev->cache ? cache_execute(bdev, op, flags, offset, length, buf)
                          : file_execute(bdev, op, flags, offset, length, buf);
        break;
    case KVDEV_BDEV_NULL:
        err = null_execute(op, length, buf);
        break;
    case KVDEV_BDEV_LINEAR:
        err = linear_execute(bdev, op, flags, offset, length, buf);
        break;
    case KVDEV_BDEV_FILTER:
        err = filter_execute(bdev, op, flags, offset, length, buf);
        break;
    default:
        err = raid0_execute(bdev, op, flags, offset, length, buf);
        break;
    }
    account_one(bdev, op, length, bdev_now_ns() - start_ns, err == -EILSEQ ? 0 : err);
    return err;
}

void *kvdev_bdev_direct(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t length)
{
    if (length == 0 || offset > bdev->size_bytes || length > bdev->size_bytes - offset)
        return NULL;
    if (kvdev_bdev_is_held(bdev))
        return NULL;
    while (bdev->kind == KVDEV_BDEV_RAID0 || bdev->kind == KVDEV_BDEV_LINEAR) {
        if (bdev->kind == KVDEV_BDEV_LINEAR) {
            const struct linear_piece *piece = linear_piece_at(bdev, offset);
            if (offset - piece->start + length > piece->length)
                return NULL;
        } else if ((offset & (bdev->strip_size - 1)) + length > bdev->strip_size) {
            if (bdev->member_count > 1)
                return NULL;
        }
        bdev = step_down(bdev, offset, &offset);
    }
    return bdev->kind == KVDEV_BDEV_MEMORY ? bdev->base + offset : NULL;
}

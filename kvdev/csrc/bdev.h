/* Block devices of the embedded target: memory, file, null; raid0, linear and filter over other ones.
 *
 * Synchronous: kvdev_bdev_execute returns when the operation is done. What may wait for a disk says so
 * (kvdev_bdev_may_block) and is run by a worker thread of the target; the rest runs on the poller.
 * A device is immutable after its creation but for its counters, limits and injections, so any number of
 * threads may use it.
 * Errors are -errno: -EILSEQ is a miscompare, -EINVAL a range outside the device. */
#ifndef KVDEV_BDEV_H
#define KVDEV_BDEV_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
#define KVDEV_BDEV_MEMORY 0
#define KVDEV_BDEV_FILE 1
#define KVDEV_BDEV_NULL 2
#define KVDEV_BDEV_RAID0 3
#define KVDEV_BDEV_LINEAR 4
#define KVDEV_BDEV_FILTER 5

#define KVDEV_BDEV_OP_READ 0
#define KVDEV_BDEV_OP_WRITE 1
#define KVDEV_BDEV_OP_FLUSH 2
#define KVDEV_BDEV_OP_WRITE_ZEROES 3
#define KVDEV_BDEV_OP_DEALLOCATE 4
#define KVDEV_BDEV_OP_COMPARE 5
#define KVDEV_BDEV_OP_VERIFY 6       /* a read whose data nobody wants: it says whether it can be read */

#define KVDEV_BDEV_FUA 0x01          /* a write is durable when it returns */

#define KVDEV_BDEV_READONLY 0x01     /* file: open for reading only */
#define KVDEV_BDEV_BUFFERED 0x02     /* file: never O_DIRECT */
#define KVDEV_BDEV_POPULATE 0x04     /* memory: touch all of it now */

#define KVDEV_BDEV_BACKING_NONE 0
#define KVDEV_BDEV_BACKING_HUGETLB 1 /* 2 MiB pages of the hugetlb pool */
#define KVDEV_BDEV_BACKING_THP 2     /* transparent huge pages asked for */
#define KVDEV_BDEV_BACKING_DIRECT 3  /* file opened with O_DIRECT */
#define KVDEV_BDEV_BACKING_BUFFERED 4

#define KVDEV_BDEV_MEMBERS_MAX 256   /* of one raid0; SPDK's limit is 255 */

struct kvdev_bdev_stat {             /* counters since creation or the last reset */
    uint64_t read_bytes;
    uint64_t read_count;
    uint64_t read_ns;
    uint64_t read_ns_max;
    uint64_t read_ns_min;            /* 0 before the first */
    uint64_t write_bytes;
    uint64_t write_count;
    uint64_t write_ns;
    uint64_t write_ns_max;
    uint64_t write_ns_min;
    uint64_t unmap_bytes;
    uint64_t unmap_count;
    uint64_t unmap_ns;
    uint64_t unmap_ns_max;
    uint64_t unmap_ns_min;
    uint64_t flush_count;
    uint64_t error_count;
};

struct kvdev_bdev_info {
    uint64_t block_count;
    uint32_t block_size;
    uint32_t strip_size;             /* raid0, bytes; else 0 */
    uint32_t member_count;           /* raid0; else 0 */
    uint8_t kind;
    uint8_t backing;
    uint8_t is_readonly;
    uint8_t has_volatile_cache;      /* a flush does something */
    uint8_t may_block;
    uint8_t reserved[3];
};

struct kvdev_bdev_extent {           /* of a linear device: bytes of its base */
    uint64_t offset;
    uint64_t length;
};

struct kvdev_bdev_limits {           /* per second; 0: none */
    uint64_t rw_ios;
    uint64_t rw_bytes;
    uint64_t read_bytes;
    uint64_t write_bytes;
};

struct kvdev_bdev_delay {            /* of a filter; one operation in a hundred takes the p99 */
    uint64_t read_ns_avg;
    uint64_t read_ns_p99;
    uint64_t write_ns_avg;
    uint64_t write_ns_p99;
};

#define KVDEV_BDEV_INJECT_FAILURE 0      /* -EIO */
#define KVDEV_BDEV_INJECT_PENDING 1      /* held until kvdev_bdev_resume */
#define KVDEV_BDEV_INJECT_CORRUPT 2      /* one byte of the data is changed */
#define KVDEV_BDEV_INJECT_NOMEM 3        /* tried again a moment later */
#define KVDEV_BDEV_INJECT_NVME 4         /* fails with sct and sc */

#define KVDEV_BDEV_NVME_ERROR 0x10000    /* an error of -(this | sct << 8 | sc) */

struct kvdev_bdev_injection {
    uint64_t queue_depth;            /* only while so many operations run on the filter */
    uint64_t corrupt_offset;         /* in the operation's data */
    uint32_t count;                  /* of operations; 0 takes the injection away */
    uint8_t type;
    uint8_t corrupt_value;           /* XORed */
    uint8_t sct;
    uint8_t sc;
};

#define KVDEV_BDEV_HISTOGRAM_SHIFT 7     /* 128 buckets for each power of two */
#define KVDEV_BDEV_HISTOGRAM_BUCKETS 7424

struct kvdev_bdev;

/* Zeroed memory of its own: 2 MiB huge pages when the pool has them, else transparent huge pages. */
int kvdev_bdev_create_memory(uint32_t block_size, uint64_t block_count, uint32_t flags, struct kvdev_bdev **ret);
/* Reads give zeroes, writes go nowhere. */
int kvdev_bdev_create_null(uint32_t block_size, uint64_t block_count, struct kvdev_bdev **ret);
/* An existing regular file or block device; block_count 0 takes what fits in its size. */
int kvdev_bdev_create_file(const char *path, uint32_t block_size, uint64_t block_count, uint32_t flags,
                           struct kvdev_bdev **ret);
/* Puts a volatile cache over a file device, before anything uses it: what is written stays in memory until a flush, a
 * write with FUA or the destroy, and is lost if the process is killed before, but for single blocks that a generator
 * with this seed lets through at once. Memory for the cache is taken as it fills. */
int kvdev_bdev_volatile_set(struct kvdev_bdev *bdev, uint64_t seed);
/* Strip s is on member s mod n at row s div n; every member gives floor(smallest / strip) strips. The
 * members must have one block size, outlive this device, and are not shared with another raid0. */
int kvdev_bdev_create_raid0(struct kvdev_bdev *const *members, uint32_t count, uint32_t strip_size,
                            struct kvdev_bdev **ret);
/* The pieces one after the other: whole blocks of base, which outlives this device. Pieces may be shared. */
int kvdev_bdev_create_linear(struct kvdev_bdev *base, const struct kvdev_bdev_extent *extents, uint32_t count,
                             uint32_t flags, struct kvdev_bdev **ret);
/* The same device seen through delays and injected errors. */
int kvdev_bdev_create_filter(struct kvdev_bdev *base, struct kvdev_bdev **ret);
void kvdev_bdev_destroy(struct kvdev_bdev *bdev);
void kvdev_bdev_info_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_info *ret);
void kvdev_bdev_stat_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_stat *ret);
void kvdev_bdev_stat_reset(struct kvdev_bdev *bdev);
/* One operation on [offset, offset + length), bytes, whole blocks; buf for read, write, compare. */
int kvdev_bdev_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length,
                       void *buf);
/* Where [offset, offset + length) lies in memory, or NULL if it is not one piece of a memory device. */
void *kvdev_bdev_direct(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t length);

/* Operations beyond the limits start later. The caller marks the devices above with kvdev_bdev_set_held. */
void kvdev_bdev_set_limits(struct kvdev_bdev *bdev, const struct kvdev_bdev_limits *limits);
/* Whether this device or one below it may hold operations back; a filter always may. */
void kvdev_bdev_set_held(struct kvdev_bdev *bdev, int is_held);
int kvdev_bdev_is_held(const struct kvdev_bdev *bdev);
/* -EINVAL: no filter. */
int kvdev_bdev_set_delay(struct kvdev_bdev *bdev, const struct kvdev_bdev_delay *delay);
/* For KVDEV_BDEV_OP_READ, _WRITE, _FLUSH and _DEALLOCATE. */
int kvdev_bdev_inject(struct kvdev_bdev *bdev, int op, const struct kvdev_bdev_injection *injection);
/* Let what a filter holds as pending go on; the target's workers are woken by kvdev_target_release. */
int kvdev_bdev_resume(struct kvdev_bdev *bdev);
/* Count latencies from now on, of one operation or of all (op -1); starts at zero. */
int kvdev_bdev_histogram_start(struct kvdev_bdev *bdev, int op);
void kvdev_bdev_histogram_stop(struct kvdev_bdev *bdev);
/* KVDEV_BDEV_HISTOGRAM_BUCKETS counts, nanoseconds: 128 of one each, then 128 for each power of two. */
int kvdev_bdev_histogram_read(const struct kvdev_bdev *bdev, uint64_t *counts);
/* cdef end */

/* Whether an operation on it may wait for a medium: info's may_block alone, for every command. */
int kvdev_bdev_may_block(const struct kvdev_bdev *bdev);

/* Whether an operation changes what is stored. */
static inline int kvdev_bdev_changes(int op)
{
    return op == KVDEV_BDEV_OP_WRITE || op == KVDEV_BDEV_OP_WRITE_ZEROES || op == KVDEV_BDEV_OP_DEALLOCATE;
}

/* How long an operation is to be held. */
struct kvdev_bdev_hold {
    uint64_t due_ns;                 /* not before */
    struct kvdev_bdev *pending;      /* and not before its resume count differs */
    uint64_t resume_count;
};

/* Take what the operation needs of limits and injections on its whole way down; 0 when it may start at once. */
int kvdev_bdev_admit(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t now_ns,
                     struct kvdev_bdev_hold *ret);
int kvdev_bdev_is_resumed(const struct kvdev_bdev_hold *hold);
/* As kvdev_bdev_execute for an operation that was admitted at start_ns: its latency counts from then. */
int kvdev_bdev_execute_from(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length,
                            void *buf, uint64_t start_ns);

/* Count one operation that did not go through kvdev_bdev_execute (a direct one) on the device and on the
 * member it went to. */
void kvdev_bdev_account(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t ns, int error);

#endif

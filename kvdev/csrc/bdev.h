/* Block devices of the embedded target: memory, file, null, and raid0 over other ones.
 *
 * Synchronous: kvdev_bdev_execute returns when the operation is done. What may wait for a disk says so
 * (kvdev_bdev_may_block) and is run by a worker thread of the target; the rest runs on the poller.
 * A device is immutable after its creation but for its counters, so any number of threads may use it.
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

#define KVDEV_BDEV_OP_READ 0
#define KVDEV_BDEV_OP_WRITE 1
#define KVDEV_BDEV_OP_FLUSH 2
#define KVDEV_BDEV_OP_WRITE_ZEROES 3
#define KVDEV_BDEV_OP_DEALLOCATE 4
#define KVDEV_BDEV_OP_COMPARE 5

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

struct kvdev_bdev;

/* Zeroed memory of its own: 2 MiB huge pages when the pool has them, else transparent huge pages. */
int kvdev_bdev_create_memory(uint32_t block_size, uint64_t block_count, uint32_t flags, struct kvdev_bdev **ret);
/* Reads give zeroes, writes go nowhere. */
int kvdev_bdev_create_null(uint32_t block_size, uint64_t block_count, struct kvdev_bdev **ret);
/* An existing regular file or block device; block_count 0 takes what fits in its size. */
int kvdev_bdev_create_file(const char *path, uint32_t block_size, uint64_t block_count, uint32_t flags,
                           struct kvdev_bdev **ret);
/* Strip s is on member s mod n at row s div n; every member gives floor(smallest / strip) strips. The
 * members must have one block size, outlive this device, and are not shared with another raid0. */
int kvdev_bdev_create_raid0(struct kvdev_bdev *const *members, uint32_t count, uint32_t strip_size,
                            struct kvdev_bdev **ret);
void kvdev_bdev_destroy(struct kvdev_bdev *bdev);
void kvdev_bdev_info_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_info *ret);
void kvdev_bdev_stat_read(const struct kvdev_bdev *bdev, struct kvdev_bdev_stat *ret);
void kvdev_bdev_stat_reset(struct kvdev_bdev *bdev);
/* One operation on [offset, offset + length), bytes, whole blocks; buf for read, write, compare. */
int kvdev_bdev_execute(struct kvdev_bdev *bdev, int op, uint32_t flags, uint64_t offset, uint64_t length,
                       void *buf);
/* Where [offset, offset + length) lies in memory, or NULL if it is not one piece of a memory device. */
void *kvdev_bdev_direct(const struct kvdev_bdev *bdev, uint64_t offset, uint64_t length);
/* cdef end */

/* Count one operation that did not go through kvdev_bdev_execute (a direct one) on the device and on the
 * member it went to. */
void kvdev_bdev_account(struct kvdev_bdev *bdev, int op, uint64_t offset, uint64_t length, uint64_t ns, int error);

#endif

/* The arrays that cross between Python and the core: commands, completions, groups.
 *
 * They are NumPy structured arrays on the Python side (kvdev/native/io.py holds the same layout and
 * a test compares the two); the core reads and writes them in place with the GIL released. */
#ifndef KVDEV_IO_H
#define KVDEV_IO_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
struct kvdev_io {              /* one command on one device */
    uint64_t tag;              /* given back in the completion */
    uint64_t buf_addr;         /* payload, at its final address; 0 for commands without payload */
    uint64_t slba;             /* first logical block */
    uint64_t group_addr;       /* address of a struct kvdev_io_group, or 0 */
    uint32_t lba_count;        /* logical blocks, a count (not 0's based) */
    uint32_t byte_count;       /* payload bytes: lba_count times the block size for read and write */
    uint32_t device_index;     /* handle in the queue's device table */
    uint8_t opcode;            /* NVM command set opcode */
    uint8_t flags;             /* KVDEV_IO_FUA, KVDEV_IO_DEALLOCATE, KVDEV_IO_MAY_COPY */
    uint8_t priority;          /* 0 is served first */
    uint8_t reserved[17];
};

struct kvdev_io_done {         /* one completion */
    uint64_t tag;
    uint64_t submit_ns;        /* CLOCK_MONOTONIC when submit took it */
    uint64_t send_ns;          /* when its capsule was handed to the socket */
    uint64_t complete_ns;
    int32_t error;             /* 0, or -errno; -EIO with an NVMe status, -ENOTCONN connection lost without effect,
                                  -KVDEV_EUNCERTAIN, ... */
    uint16_t status;           /* NVMe status field: SC in bits 7:0, SCT in 10:8, CRD 12:11, M 13, DNR 14 */
    uint16_t qpair_index;
    uint32_t device_index;
    uint32_t result;           /* completion DW0 */
    uint64_t reserved;
};

struct kvdev_io_group {        /* commands that complete together: the pieces of one page */
    uint64_t buf_addr;         /* span whose CRC32C is computed as pieces complete, which together are the span */
    uint64_t byte_count;
    uint64_t submit_ns;        /* of its first command */
    uint64_t complete_ns;      /* of its last */
    uint32_t remaining;        /* commands outstanding; set by the submitter, counted down by the core */
    uint32_t flags;            /* KVDEV_GROUP_CRC32C */
    uint32_t crc32c;           /* out, when none remains; 0 at first, and of a group with an error */
    int32_t error;             /* out: of the first command that failed, 0 if none */
    uint16_t status;           /* out: NVMe status of that command */
    uint16_t reserved[7];
};

/* Error of a write that was sent and whose fate nobody knows (it may take effect, now or until its controller is
 * fenced), and of a flush that cannot vouch for writes completed before. No errno of the kernel has this number. */
#define KVDEV_EUNCERTAIN 1001

#define KVDEV_IO_FUA 0x01
#define KVDEV_IO_DEALLOCATE 0x02
#define KVDEV_IO_MAY_COPY 0x04 /* payload outside memory that the device shares may be copied on the way: metadata */
#define KVDEV_GROUP_CRC32C 0x01

size_t kvdev_io_size(void);
size_t kvdev_io_done_size(void);
size_t kvdev_io_group_size(void);
/* cdef end */

_Static_assert(sizeof(struct kvdev_io) == 64, "a command is 64 bytes");
_Static_assert(sizeof(struct kvdev_io_done) == 56, "a completion is 56 bytes");
_Static_assert(sizeof(struct kvdev_io_group) == 64, "a group is 64 bytes");
_Static_assert(offsetof(struct kvdev_io, opcode) == 44, "opcode follows the handle");

#endif

/* Files and block devices of this machine as devices of a queue: through io_uring, or threads that call pread.
 *
 * An engine is the ring, or the threads, of one queue; its devices share it, so that one system call submits what a
 * turn of the queue started on all of them. Memory is allocated by create; payload is moved straight between the file
 * and the caller's memory, save where direct I/O needs an aligned address that the payload does not have, and for
 * compare: then it goes through a bounce buffer.
 * Giving up: nobody can take memory back from the kernel. What is in flight is cancelled where the kernel can do that
 * and waited for; what is still not back after a while goes on as an orphan if its payload lies in a region
 * (kvdev_file_spans_read), so that its owner can withhold it, and is waited for without limit if not.
 * Threads: engine and devices belong to the one thread that is inside the queue. After a fork the child may only
 * destroy them. Times are CLOCK_MONOTONIC nanoseconds. */
#ifndef KVDEV_FILE_H
#define KVDEV_FILE_H

#include "io.h"
#include "queue.h"

/* cdef begin */
#define KVDEV_FILE_ENGINE_IO_URING 1
#define KVDEV_FILE_ENGINE_THREADS 2
#define KVDEV_FILE_REQUESTS_MAX 4096   /* of one engine */
#define KVDEV_FILE_THREADS_MAX 64
#define KVDEV_FILE_REGIONS_MAX 64
#define KVDEV_FILE_TRANSFER_MAX 1048576
#define KVDEV_FILE_RANGES_MAX 256      /* deallocate ranges of one command */

struct kvdev_file_engine_options {
    uint32_t kind;                /* KVDEV_FILE_ENGINE_* */
    uint32_t request_count;       /* in flight at once, 1 to KVDEV_FILE_REQUESTS_MAX */
    uint32_t thread_count;        /* of the threads engine */
    uint32_t wants_iopoll;        /* io_uring: a second ring whose completions are asked for, not interrupted for */
    uint64_t give_up_wait_ns;     /* how long a device given up is waited for; 0 means 5 s */
};

struct kvdev_file_engine_info {
    uint64_t calls;               /* io_uring_enter, or hand-overs to the threads */
    uint64_t operations;          /* given to kernel or threads; a resumed transfer counts again */
    uint64_t fixed_operations;    /* on registered memory */
    uint32_t kind;
    uint32_t in_flight_count;     /* orphans among them */
    uint32_t orphan_count;
    uint32_t region_count;
    uint32_t registered_count;    /* regions known to the kernel */
    uint8_t has_fixed_files;
    uint8_t has_fixed_buffers;    /* the kernel has a table for them */
    uint8_t has_iopoll;
    uint8_t reserved;
};

struct kvdev_file_params {
    uint64_t block_count;
    int32_t fd;                   /* duplicated; closed when the last operation on it has ended */
    uint32_t block_size_bytes;
    uint32_t max_transfer_bytes;  /* at most KVDEV_FILE_TRANSFER_MAX */
    uint32_t depth;               /* operations in flight */
    uint32_t memory_alignment;    /* of a payload's address; 1 when the page cache is used */
    uint8_t has_volatile_cache;   /* without: a flush completes at once */
    uint8_t is_block_device;
    uint8_t is_polled;            /* reads and writes go through the second ring */
    uint8_t reserved;
};

struct kvdev_file_info {
    uint64_t commands;
    uint64_t resumed;             /* transfers that went on after a short one */
    uint64_t retried;             /* operations done again after EINTR or EAGAIN */
    uint64_t bounced_commands;
    uint64_t zeroed_by_writing;   /* write zeroes commands that fell back to writing zeroes */
    uint64_t ignored_deallocations;  /* advice that this file or device does not take */
    uint32_t in_flight_count;
    uint32_t orphan_count;        /* given up, still with the kernel: no command is taken before they are back */
    uint32_t is_polled;           /* still: it ends when the kernel says that this device cannot be */
    uint32_t reserved;
};

struct kvdev_file_span {          /* payload memory that the kernel may still touch */
    uint64_t addr;
    uint64_t size_bytes;
};

struct kvdev_file_engine;
struct kvdev_file;

/* -ENOSYS, -EPERM, -ENOMEM...: this engine cannot be had here. -EINVAL: the options are wrong. */
int kvdev_file_engine_create(const struct kvdev_file_engine_options *options, struct kvdev_file_engine **ret);
/* Frees it, at the latest when its devices are gone and their operations have ended. NULL is allowed. */
void kvdev_file_engine_destroy(struct kvdev_file_engine *engine);
/* Memory where payload lies often: registered with the kernel where it lets us. 0, the positive errno that the kernel
 * refused it with (payload there is pinned anew by each operation), or -errno: it is not a region. It must stay mapped
 * as long as it is a region: the kernel keeps the pages it was shown, whatever is mapped there later. */
int kvdev_file_engine_region_add(struct kvdev_file_engine *engine, uint64_t addr, uint64_t size_bytes);
/* The region that starts there is one no longer; what is in flight on it goes on. -EINVAL: there is none. */
int kvdev_file_engine_region_remove(struct kvdev_file_engine *engine, uint64_t addr);
/* Collects orphans that have ended; returns how many are left. Not while another thread is inside the queue. */
uint32_t kvdev_file_engine_reap(struct kvdev_file_engine *engine);
void kvdev_file_engine_info_read(const struct kvdev_file_engine *engine, struct kvdev_file_engine_info *ret);

/* What direct I/O asks of addresses and offsets, from statx; -EOPNOTSUPP when this kernel does not say. */
int kvdev_file_dio_align(int32_t fd, uint32_t *memory_alignment, uint32_t *offset_alignment);

int kvdev_file_create(struct kvdev_file_engine *engine, const struct kvdev_file_params *params,
                      struct kvdev_file **ret);
/* Frees it, at the latest when its queue lets go and its last operation has ended. NULL is allowed. */
void kvdev_file_destroy(struct kvdev_file *file);
int kvdev_file_attach(struct kvdev_file *file, struct kvdev_queue *queue, uint32_t *ret);
void kvdev_file_block_count_set(struct kvdev_file *file, uint64_t block_count);
void kvdev_file_info_read(const struct kvdev_file *file, struct kvdev_file_info *ret);
/* Payload of its orphans; at most max of them, returns how many. */
size_t kvdev_file_spans_read(const struct kvdev_file *file, struct kvdev_file_span *spans, size_t max);
/* The owner has seen the orphans there are. */
void kvdev_file_attention_clear(struct kvdev_file *file);
/* cdef end */

#endif

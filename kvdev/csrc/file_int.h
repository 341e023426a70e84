/* Inside of the file engine: what its source files share.
 *
 * file.c decides what is done next for a command; a back end (io_uring, threads) carries out one operation at a time
 * for each request and reports its result with engine_completed. */
#ifndef KVDEV_FILE_INT_H
#define KVDEV_FILE_INT_H

#include <poll.h>
#include <stdint.h>
#include <sys/types.h>

#include "file.h"
#include "queue_device.h"

#define FILE_SLOT_NONE 0xffffffffu
#define FILE_BUFFER_NONE 0xffffu
#define FILE_PIECE_BYTES (1ull << 30)  /* the largest that Linux registers; regions are registered in such pieces */

enum file_op_kind { FILE_OP_READ, FILE_OP_WRITE, FILE_OP_FSYNC, FILE_OP_FALLOCATE };

struct file_op {                  /* one system call */
    uint64_t addr;
    uint64_t offset;
    uint64_t length;
    int32_t mode;                 /* of fallocate */
    uint16_t buffer_index;        /* registered memory, or FILE_BUFFER_NONE */
    uint8_t kind;
    uint8_t is_durable;           /* a write that ends on the medium */
    uint8_t is_polled;            /* on the ring whose completions are asked for */
};

struct file_request {
    struct kvdev_file *file;
    struct file_op op;
    uint64_t cookie;
    uint64_t send_ns;
    uint64_t deadline_ns;
    uint64_t payload_addr;
    uint64_t memory_addr;         /* payload or bounce buffer */
    uint64_t offset;              /* in the file */
    uint64_t size_bytes;
    uint64_t done_bytes;
    uint32_t next;                /* free list, or a back end's */
    int32_t result;               /* the threads' */
    uint16_t range_index;
    uint16_t range_count;
    uint8_t opcode;
    uint8_t step;
    uint8_t bounce_index;         /* + 1; 0: none */
    uint8_t wants_flush;
    uint8_t may_deallocate;
    uint8_t retry_count;
    uint8_t is_in_flight;
    uint8_t is_orphan;
};

struct file_region {
    uint64_t addr;
    uint64_t size_bytes;
    uint32_t buffer_first;        /* index of its first registered piece */
    uint32_t is_registered;
};

struct file_backend {
    /* There is always room: a request has one operation at a time. */
    void (*submit)(struct kvdev_file_engine *engine, struct file_request *request);
    /* Lets kernel or threads see what was submitted; 1 if there was anything. */
    int (*flush)(struct kvdev_file_engine *engine);
    /* Calls engine_completed for each result there is; how many. */
    uint32_t (*reap)(struct kvdev_file_engine *engine);
    /* Asks for the early end of this device's operations. */
    void (*cancel)(struct kvdev_file_engine *engine, const struct kvdev_file *file);
    /* As the queue driver's wait. */
    int (*wait)(struct kvdev_file_engine *engine, struct pollfd *fd);
    void (*file_add)(struct kvdev_file_engine *engine, struct kvdev_file *file);
    void (*file_remove)(struct kvdev_file_engine *engine, struct kvdev_file *file);
    /* 0 and is_registered, or the positive errno of a refusal. */
    int (*region_add)(struct kvdev_file_engine *engine, struct file_region *region);
    void (*region_remove)(struct kvdev_file_engine *engine, const struct file_region *region);
    void (*destroy)(struct kvdev_file_engine *engine, int is_child);
};

struct kvdev_file_engine {
    struct kvdev_file_engine_options options;
    struct kvdev_file_engine_info info;
    const struct file_backend *backend;
    void *state;                  /* the back end's */
    struct file_request *requests;
    uint32_t free_head;
    uint32_t region_count;
    struct file_region regions[KVDEV_FILE_REGIONS_MAX];
    uint8_t *bounce;
    uint8_t *zeroes;
    uint32_t bounce_used;         /* one bit per buffer */
    uint32_t holder_count;
    pid_t pid;
};

struct kvdev_file {
    struct kvdev_file_params params;
    struct kvdev_file_info info;
    struct kvdev_file_engine *engine;
    kvdev_queue_done_fn *done;
    void *owner;
    uint64_t deadline_min_ns;
    uint32_t holder_count;
    uint32_t slot;                /* registered file, or FILE_SLOT_NONE */
    int32_t give_up_error;        /* not 0 while it is given up */
    uint64_t give_up_ns;          /* commands due by then are late; 0: none */
    uint8_t zero_method;
    uint8_t ignores_deallocate;
    uint8_t wants_attention;
};

int file_ring_create(struct kvdev_file_engine *engine);
int file_threads_create(struct kvdev_file_engine *engine);

/* A back end's report: bytes, or -errno. */
void file_engine_completed(struct kvdev_file_engine *engine, struct file_request *request, int64_t result,
                           uint64_t now_ns);
uint64_t file_now_ns(void);

#endif

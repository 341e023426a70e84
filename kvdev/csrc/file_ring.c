/* The io_uring back end of the file engine, on the system calls alone.
 *
 * One ring takes everything; a second one, with IORING_SETUP_IOPOLL, the reads and writes of devices that are polled.
 * A request has one operation in a submission queue at most, and half of the queue is as large as the pool of requests:
 * there is always room, the other half being for cancellations.
 * Spec: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register(2). */
#include <errno.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "file_int.h"

#define CANCEL_DATA UINT64_MAX         /* user_data of cancellations: nobody waits for their result */
#define BUFFERS_MAX 1024u              /* registered pieces of 1 GiB */
#define REAP_SHARE 8u                  /* of what is in flight, taken by one turn: see ring_reap */
#define FILES_MAX KVDEV_QUEUE_DEVICES_MAX

/* Newer than the oldest headers that this builds with. */
#define SETUP_COOP_TASKRUN (1u << 8)   /* Linux 5.19 */
#define SETUP_TASKRUN_FLAG (1u << 9)
#define SQ_CQ_OVERFLOW (1u << 1)       /* 5.8 */
#define SQ_TASKRUN (1u << 2)
#define REGISTER_BUFFERS2 15u          /* 5.13; sparse 5.19 */
#define REGISTER_BUFFERS_UPDATE 16u
#define RSRC_REGISTER_SPARSE (1u << 0)

struct rsrc_register {
    uint32_t nr;
    uint32_t flags;
    uint64_t resv2;
    uint64_t data;
    uint64_t tags;
};

struct rsrc_update {
    uint32_t offset;
    uint32_t resv;
    uint64_t data;
    uint64_t tags;
    uint32_t nr;
    uint32_t resv2;
};

_Static_assert(sizeof(struct io_uring_sqe) == 64, "a submission entry is 64 bytes");
_Static_assert(sizeof(struct rsrc_register) == 32, "the kernel checks this size");
_Static_assert(sizeof(struct rsrc_update) == 32, "the kernel checks this size");

struct ring {
    uint32_t *sq_head;
    uint32_t *sq_tail;
    uint32_t *sq_flags;
    uint32_t *cq_head;
    uint32_t *cq_tail;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *map;
    size_t map_bytes;
    size_t sqes_bytes;
    uint32_t sq_mask;
    uint32_t sq_entries;
    uint32_t cq_mask;
    uint32_t tail;                /* ours, ahead of the published one until enter */
    uint32_t in_flight_count;
    int fd;
    int is_iopoll;
};

struct rings {
    struct ring rings[2];
    uint32_t count;
    uint8_t buffer_used[BUFFERS_MAX];
    uint8_t file_used[FILES_MAX];
};

/* ---- system calls ---- */

static int ring_setup(uint32_t entries, struct io_uring_params *params)
{
    long fd = syscall(SYS_io_uring_setup, entries, params);
    return fd < 0 ? -errno : (int)fd;
}

static int ring_register(int fd, uint32_t opcode, const void *arg, uint32_t nr)
{
    return syscall(SYS_io_uring_register, fd, opcode, arg, nr) < 0 ? -errno : 0;
}

static int ring_enter(struct kvdev_file_engine *e, const struct ring *ring, uint32_t submit_count, uint32_t flags)
{
    e->info.calls++;
    long done = syscall(SYS_io_uring_enter, ring->fd, submit_count, 0u, flags, NULL, (size_t)0);
    return done < 0 ? -errno : (int)done;
}

/* ---- life ---- */

static void ring_close(struct ring *ring, int is_child)
{
    /* A fork does not have these mappings, and may have something else where they were. */
    if (ring->map && !is_child)
        munmap(ring->map, ring->map_bytes);
    if (ring->sqes && !is_child)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
}

static int map_ring(struct ring *ring, off_t offset, size_t size, void **ret)
{
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, offset);
    if (at == MAP_FAILED)
        return -errno;
    *ret = at;
    /* A child that used the ring of its parent would take its completions. */
    return madvise(at, size, MADV_DONTFORK) ? -errno : 0;
}

static int ring_map(struct ring *ring, const struct io_uring_params *p)
{
    size_t sq_bytes = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t cq_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->map_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    void *sqes = NULL;
    int error = map_ring(ring, IORING_OFF_SQ_RING, ring->map_bytes, &ring->map);
    if (!error)
        error = map_ring(ring, IORING_OFF_SQES, ring->sqes_bytes, &sqes);
    ring->sqes = sqes;
    if (error)
        return error;
    uint8_t *base = ring->map;
    ring->sq_head = (uint32_t *)(void *)(base + p->sq_off.head);
    ring->sq_tail = (uint32_t *)(void *)(base + p->sq_off.tail);
    ring->sq_flags = (uint32_t *)(void *)(base + p->sq_off.flags);
    ring->sq_mask = *(uint32_t *)(void *)(base + p->sq_off.ring_mask);
    ring->sq_entries = p->sq_entries;
    ring->cq_head = (uint32_t *)(void *)(base + p->cq_off.head);
    ring->cq_tail = (uint32_t *)(void *)(base + p->cq_off.tail);
    ring->cq_mask = *(uint32_t *)(void *)(base + p->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(void *)(base + p->cq_off.cqes);
    uint32_t *array = (uint32_t *)(void *)(base + p->sq_off.array);
    for (uint32_t i = 0; i < p->sq_entries; i++)
        array[i] = i;
    return 0;
}

static int ring_open(struct ring *ring, uint32_t entries, int is_iopoll)
{
    struct io_uring_params p;
    /* Without interrupting a thread that looks for completions anyway, where the kernel knows that. */
    uint32_t flags[2] = { SETUP_COOP_TASKRUN | SETUP_TASKRUN_FLAG, 0 };
    ring->fd = -EINVAL;
    ring->is_iopoll = is_iopoll;
    for (uint32_t i = 0; i < 2 && ring->fd == -EINVAL; i++) {
        p = (struct io_uring_params){ .flags = IORING_SETUP_CQSIZE | flags[i], .cq_entries = 2 * entries };
        if (is_iopoll)
            p.flags |= IORING_SETUP_IOPOLL;
        ring->fd = ring_setup(entries, &p);
    }
    if (ring->fd < 0)
        return ring->fd;
    uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
    return (p.features & needed) == needed ? ring_map(ring, &p) : -ENOSYS;
}

static void rings_destroy(struct kvdev_file_engine *e, int is_child)
{
    struct rings *s = e->state;
    for (uint32_t i = 0; i < s->count; i++)
        ring_close(&s->rings[i], is_child);
    free(s);
}

/* ---- what is registered ---- */

/* Tables that start empty; what the kernel lacks is done without. */
static void tables_register(struct kvdev_file_engine *e, struct rings *s)
{
    int32_t fds[FILES_MAX];
    memset(fds, 0xff, sizeof fds);
    struct rsrc_register buffers = { .nr = BUFFERS_MAX, .flags = RSRC_REGISTER_SPARSE };
    e->info.has_fixed_files = 1;
    e->info.has_fixed_buffers = 1;
    for (uint32_t i = 0; i < s->count; i++) {
        if (ring_register(s->rings[i].fd, IORING_REGISTER_FILES, fds, FILES_MAX))
            e->info.has_fixed_files = 0;
        if (ring_register(s->rings[i].fd, REGISTER_BUFFERS2, &buffers, sizeof buffers))
            e->info.has_fixed_buffers = 0;
    }
}

static int file_slot_set(struct rings *s, uint32_t slot, int32_t fd)
{
    int error = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        struct io_uring_files_update update = { .offset = slot, .fds = (uint64_t)(uintptr_t)&fd };
        long got = syscall(SYS_io_uring_register, s->rings[i].fd, IORING_REGISTER_FILES_UPDATE, &update, 1);
        if (got < 0)
            error = -errno;
    }
    return error;
}

static void rings_file_add(struct kvdev_file_engine *e, struct kvdev_file *f)
{
    struct rings *s = e->state;
    if (!e->info.has_fixed_files)
        return;
    for (uint32_t slot = 0; slot < FILES_MAX; slot++) {
        if (s->file_used[slot])
            continue;
        if (file_slot_set(s, slot, f->params.fd) == 0) {
            s->file_used[slot] = 1;
            f->slot = slot;
        }
        return;
    }
}

static void rings_file_remove(struct kvdev_file_engine *e, struct kvdev_file *f)
{
    struct rings *s = e->state;
    if (f->slot == FILE_SLOT_NONE)
        return;
    if (file_slot_set(s, f->slot, -1) == 0)
        s->file_used[f->slot] = 0;
    f->slot = FILE_SLOT_NONE;
}

static int buffer_set(struct rings *s, uint32_t index, uint64_t addr, uint64_t size)
{
    struct iovec piece = { (void *)(uintptr_t)addr, (size_t)size };
    struct rsrc_update update = { .offset = index, .data = (uint64_t)(uintptr_t)&piece, .nr = 1 };
    for (uint32_t i = 0; i < s->count; i++)
        if (syscall(SYS_io_uring_register, s->rings[i].fd, REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0)
            return errno;
    return 0;
}

static uint32_t piece_count(const struct file_region *region)
{
    uint64_t count = (region->size_bytes + FILE_PIECE_BYTES - 1) / FILE_PIECE_BYTES;
    return count > BUFFERS_MAX ? BUFFERS_MAX + 1 : (uint32_t)count;
}

/* Index of the first of so many free table entries in a row; BUFFERS_MAX if there are none. */
static uint32_t buffers_find(const struct rings *s, uint32_t count)
{
    uint32_t run = 0;
    for (uint32_t i = 0; i < BUFFERS_MAX; i++) {
        run = s->buffer_used[i] ? 0 : run + 1;
        if (run == count)
            return i + 1 - count;
    }
    return BUFFERS_MAX;
}

static void buffers_clear(struct rings *s, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++) {
        buffer_set(s, i, 0, 0);
        s->buffer_used[i] = 0;
    }
}

static int rings_region_add(struct kvdev_file_engine *e, struct file_region *region)
{
    struct rings *s = e->state;
    if (!e->info.has_fixed_buffers)
        return EOPNOTSUPP;
    uint32_t count = piece_count(region);
    uint32_t first = buffers_find(s, count);
    if (first == BUFFERS_MAX)
        return ENOSPC;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = i * FILE_PIECE_BYTES;
        uint64_t left = region->size_bytes - start;
        int error = buffer_set(s, first + i, region->addr + start, left < FILE_PIECE_BYTES ? left : FILE_PIECE_BYTES);
        s->buffer_used[first + i] = 1;
        if (error) {
            buffers_clear(s, first, i + 1);
            return error;
        }
    }
    region->buffer_first = first;
    region->is_registered = 1;
    return 0;
}

static void rings_region_remove(struct kvdev_file_engine *e, const struct file_region *region)
{
    buffers_clear(e->state, region->buffer_first, piece_count(region));
}

/* ---- submission ---- */

static uint32_t unsent_count(const struct ring *ring)
{
    return ring->tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
}

/* Entries that the kernel will never take: each ends with the error. */
static void ring_fail(struct kvdev_file_engine *e, struct ring *ring, int error)
{
    uint32_t head = __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
    uint32_t end = ring->tail;
    ring->tail = head;
    __atomic_store_n(ring->sq_tail, head, __ATOMIC_RELEASE);
    uint64_t now = file_now_ns();
    for (; head != end; head++) {
        uint64_t data = ring->sqes[head & ring->sq_mask].user_data;
        if (data == CANCEL_DATA)
            continue;
        ring->in_flight_count--;
        file_engine_completed(e, &e->requests[data], error, now);
    }
}

static int ring_flush(struct kvdev_file_engine *e, struct ring *ring)
{
    uint32_t before = unsent_count(ring);
    if (!before)
        return 0;
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
    for (;;) {
        int got = ring_enter(e, ring, unsent_count(ring), 0);
        if (got == -EINTR || (got > 0 && unsent_count(ring)))
            continue;
        if (got < 0 && got != -EAGAIN && got != -EBUSY)
            ring_fail(e, ring, got);
        /* Short of memory, or completions are to be taken first: the rest goes with the next turn. */
        return unsent_count(ring) < before;
    }
}

static int rings_flush(struct kvdev_file_engine *e)
{
    struct rings *s = e->state;
    int has_moved = 0;
    for (uint32_t i = 0; i < s->count; i++)
        has_moved |= ring_flush(e, &s->rings[i]);
    return has_moved;
}

static struct io_uring_sqe *sqe_take(struct ring *ring)
{
    struct io_uring_sqe *sqe = &ring->sqes[ring->tail++ & ring->sq_mask];
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

static uint8_t sqe_opcode(const struct file_op *op)
{
    int is_fixed = op->buffer_index != FILE_BUFFER_NONE;
    switch (op->kind) {
    case FILE_OP_READ:
        return is_fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
    case FILE_OP_WRITE:
        return is_fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE;
    case FILE_OP_FSYNC:
        return IORING_OP_FSYNC;
    default:
        return IORING_OP_FALLOCATE;
    }
}

static void rings_submit(struct kvdev_file_engine *e, struct file_request *r)
{
    struct rings *s = e->state;
    const struct file_op *op = &r->op;
    struct ring *ring = &s->rings[op->is_polled];
    struct io_uring_sqe *sqe = sqe_take(ring);
    ring->in_flight_count++;
    sqe->opcode = sqe_opcode(op);
    sqe->user_data = (uint64_t)(r - e->requests);
    sqe->fd = r->file->slot == FILE_SLOT_NONE ? r->file->params.fd : (int32_t)r->file->slot;
    sqe->flags = r->file->slot == FILE_SLOT_NONE ? (uint8_t)0 : (uint8_t)IOSQE_FIXED_FILE;
    sqe->off = op->offset;
    if (op->kind == FILE_OP_FSYNC) {
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        return;
    }
    if (op->kind == FILE_OP_FALLOCATE) {
        sqe->addr = op->length;
        sqe->len = (uint32_t)op->mode;
        return;
    }
    sqe->addr = op->addr;
    sqe->len = (uint32_t)op->length;
    sqe->rw_flags = op->is_durable ? RWF_DSYNC : 0;
    if (op->buffer_index != FILE_BUFFER_NONE)
        sqe->buf_index = op->buffer_index;
}

/* ---- completions ---- */

static uint32_t ring_reap(struct kvdev_file_engine *e, struct ring *ring)
{
    uint32_t head = *ring->cq_head;
    uint32_t tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    if (head == tail) {
        uint32_t flags = __atomic_load_n(ring->sq_flags, __ATOMIC_RELAXED);
        int must_ask = ring->is_iopoll ? ring->in_flight_count != 0 : (flags & (SQ_TASKRUN | SQ_CQ_OVERFLOW)) != 0;
        if (!must_ask)
            return 0;
        ring_enter(e, ring, 0, IORING_ENTER_GETEVENTS);
        tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    }
    /* Not all at once: what is refilled together completes together, and the device runs dry in between. */
    uint32_t limit = ring->in_flight_count / REAP_SHARE ? ring->in_flight_count / REAP_SHARE : 1;
    uint32_t count = tail - head < limit ? tail - head : limit;
    uint64_t now = count ? file_now_ns() : 0;
    tail = head + count;
    while (head != tail) {
        const struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
        uint64_t data = cqe->user_data;
        int32_t result = cqe->res;
        head++;
        __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
        if (data == CANCEL_DATA)
            continue;
        ring->in_flight_count--;
        file_engine_completed(e, &e->requests[data], result, now);
    }
    return count;
}

static uint32_t rings_reap(struct kvdev_file_engine *e)
{
    struct rings *s = e->state;
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->count; i++)
        count += ring_reap(e, &s->rings[i]);
    return count;
}

static void rings_cancel(struct kvdev_file_engine *e, const struct kvdev_file *f)
{
    struct rings *s = e->state;
    rings_flush(e);
    for (uint32_t i = 0; i < e->options.request_count; i++) {
        const struct file_request *r = &e->requests[i];
        if (!r->is_in_flight || r->file != f || r->is_orphan)
            continue;
        struct ring *ring = &s->rings[r->op.is_polled];
        if (unsent_count(ring) >= ring->sq_entries / 2 && !ring_flush(e, ring))
            return; /* the kernel takes nothing: then it is waited for */
        struct io_uring_sqe *sqe = sqe_take(ring);
        sqe->opcode = IORING_OP_ASYNC_CANCEL;
        sqe->fd = -1;
        sqe->addr = i;
        sqe->user_data = CANCEL_DATA;
    }
}

static int rings_wait(struct kvdev_file_engine *e, struct pollfd *fd)
{
    struct rings *s = e->state;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct ring *ring = &s->rings[i];
        if (*ring->cq_head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) || unsent_count(ring))
            return -EAGAIN;
        if (ring->is_iopoll && ring->in_flight_count)
            return -EAGAIN; /* nobody tells of these completions: they must be asked for */
    }
    *fd = (struct pollfd){ .fd = s->rings[0].fd, .events = POLLIN };
    return 1;
}

static const struct file_backend backend = {
    .submit = rings_submit,
    .flush = rings_flush,
    .reap = rings_reap,
    .cancel = rings_cancel,
    .wait = rings_wait,
    .file_add = rings_file_add,
    .file_remove = rings_file_remove,
    .region_add = rings_region_add,
    .region_remove = rings_region_remove,
    .destroy = rings_destroy,
};

int file_ring_create(struct kvdev_file_engine *e)
{
    struct rings *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->rings[0].fd = s->rings[1].fd = -1;
    e->state = s;
    e->backend = &backend;
    s->count = 1;
    int error = ring_open(&s->rings[0], 2 * e->options.request_count, 0);
    if (error)
        return error;
    if (e->options.wants_iopoll) {
        s->count = 2;
        error = ring_open(&s->rings[1], 2 * e->options.request_count, 1);
        if (error)
            return error;
        e->info.has_iopoll = 1;
    }
    tables_register(e, s);
    return 0;
}

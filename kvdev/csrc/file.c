#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "file_int.h"

#define NS_PER_S 1000000000ull
#define BLOCKS_MAX 65536u              /* as in an NVMe command, so that devices are alike to those above */
#define RANGE_BYTES 16u                /* an NVMe dataset management range */
#define BOUNCE_COUNT 8u
#define RETRIES_MAX 16u                /* of one operation that the kernel wants again */
#define GIVE_UP_WAIT_NS 5000000000ull
#define GIVE_UP_LOOK_NS 100000000ull
#define REQUEST_NONE 0xffffffffu
#define DIO_MASK 0x2000u               /* STATX_DIOALIGN, Linux 6.1; older headers lack it */
#define DIO_MEM_OFFSET 152u
#define STATX_SIZE 256u

#define OPC_FLUSH 0x00
#define OPC_WRITE 0x01
#define OPC_READ 0x02
#define OPC_COMPARE 0x05
#define OPC_WRITE_ZEROES 0x08
#define OPC_DSM 0x09
#define STATUS_COMPARE_FAILURE 0x285u

/* What write zeroes has not been refused yet, best first. */
enum zero_method { ZERO_PUNCH, ZERO_RANGE, ZERO_WRITE };

enum step { STEP_TRANSFER, STEP_COMPARE, STEP_FLUSH, STEP_PUNCH, STEP_ZERO_RANGE, STEP_ZERO_WRITE, STEP_DEALLOCATE };

uint64_t file_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

/* ---- the engine's life ---- */

static uint8_t *map_zeroed(size_t size)
{
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static void engine_free(struct kvdev_file_engine *e)
{
    if (e->backend)
        e->backend->destroy(e, getpid() != e->pid);
    if (e->bounce)
        munmap(e->bounce, (size_t)BOUNCE_COUNT * KVDEV_FILE_TRANSFER_MAX);
    if (e->zeroes)
        munmap(e->zeroes, KVDEV_FILE_TRANSFER_MAX);
    free(e->requests);
    free(e);
}

static void engine_drop(struct kvdev_file_engine *e)
{
    if (--e->holder_count == 0)
        engine_free(e);
}

static int engine_init(struct kvdev_file_engine *e)
{
    e->requests = calloc(e->options.request_count, sizeof *e->requests);
    /* Pages of it are there once they are used. */
    e->bounce = map_zeroed((size_t)BOUNCE_COUNT * KVDEV_FILE_TRANSFER_MAX);
    e->zeroes = map_zeroed(KVDEV_FILE_TRANSFER_MAX);
    if (!e->requests || !e->bounce || !e->zeroes)
        return -ENOMEM;
    e->free_head = REQUEST_NONE;
    for (uint32_t i = e->options.request_count; i-- > 0;) {
        e->requests[i].next = e->free_head;
        e->free_head = i;
    }
    return e->options.kind == KVDEV_FILE_ENGINE_IO_URING ? file_ring_create(e) : file_threads_create(e);
}

int kvdev_file_engine_create(const struct kvdev_file_engine_options *options, struct kvdev_file_engine **ret)
{
    *ret = NULL;
    int is_ring = options->kind == KVDEV_FILE_ENGINE_IO_URING;
    if (!is_ring && options->kind != KVDEV_FILE_ENGINE_THREADS)
        return -EINVAL;
    if (!options->request_count || options->request_count > KVDEV_FILE_REQUESTS_MAX)
        return -EINVAL;
    if (!is_ring && (!options->thread_count || options->thread_count > KVDEV_FILE_THREADS_MAX))
        return -EINVAL;
    struct kvdev_file_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->options = *options;
    if (!e->options.give_up_wait_ns)
        e->options.give_up_wait_ns = GIVE_UP_WAIT_NS;
    e->pid = getpid();
    e->holder_count = 1;
    e->info.kind = options->kind;
    int error = engine_init(e);
    if (error) {
        engine_free(e);
        return error;
    }
    *ret = e;
    return 0;
}

void kvdev_file_engine_destroy(struct kvdev_file_engine *e)
{
    if (e)
        engine_drop(e);
}

int kvdev_file_engine_region_add(struct kvdev_file_engine *e, uint64_t addr, uint64_t size_bytes)
{
    if (!addr || !size_bytes || addr > UINT64_MAX - size_bytes)
        return -EINVAL;
    if (e->region_count == KVDEV_FILE_REGIONS_MAX)
        return -ENOSPC;
    struct file_region *region = &e->regions[e->region_count];
    *region = (struct file_region){ .addr = addr, .size_bytes = size_bytes };
    int refusal = e->backend->region_add(e, region);
    e->region_count++;
    e->info.region_count = e->region_count;
    e->info.registered_count += region->is_registered;
    return refusal;
}

int kvdev_file_engine_region_remove(struct kvdev_file_engine *e, uint64_t addr)
{
    for (uint32_t i = 0; i < e->region_count; i++) {
        if (e->regions[i].addr != addr)
            continue;
        e->info.registered_count -= e->regions[i].is_registered;
        if (e->regions[i].is_registered)
            e->backend->region_remove(e, &e->regions[i]);
        e->regions[i] = e->regions[--e->region_count];
        e->info.region_count = e->region_count;
        return 0;
    }
    return -EINVAL;
}

uint32_t kvdev_file_engine_reap(struct kvdev_file_engine *e)
{
    if (getpid() == e->pid && e->info.orphan_count) {
        /* A device that the last orphan held goes with it, and must not take the engine along. */
        e->holder_count++;
        e->backend->reap(e);
        uint32_t left = e->info.orphan_count;
        engine_drop(e);
        return left;
    }
    return e->info.orphan_count;
}

void kvdev_file_engine_info_read(const struct kvdev_file_engine *e, struct kvdev_file_engine_info *ret)
{
    *ret = e->info;
}

int kvdev_file_dio_align(int32_t fd, uint32_t *memory_alignment, uint32_t *offset_alignment)
{
    uint8_t raw[STATX_SIZE] = { 0 };
    uint32_t mask;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, DIO_MASK, raw) < 0)
        return -errno;
    memcpy(&mask, raw, sizeof mask);
    memcpy(memory_alignment, raw + DIO_MEM_OFFSET, sizeof *memory_alignment);
    memcpy(offset_alignment, raw + DIO_MEM_OFFSET + 4, sizeof *offset_alignment);
    return mask & DIO_MASK ? 0 : -EOPNOTSUPP;
}

/* ---- requests ---- */

static struct file_request *request_take(struct kvdev_file_engine *e)
{
    uint32_t index = e->free_head;
    if (index == REQUEST_NONE)
        return NULL;
    struct file_request *r = &e->requests[index];
    e->free_head = r->next;
    *r = (struct file_request){ .next = REQUEST_NONE };
    return r;
}

static void request_give(struct kvdev_file_engine *e, struct file_request *r)
{
    if (r->bounce_index)
        e->bounce_used &= ~(1u << (r->bounce_index - 1));
    r->is_in_flight = 0;
    r->next = e->free_head;
    e->free_head = (uint32_t)(r - e->requests);
}

static int bounce_take(struct kvdev_file_engine *e, struct file_request *r)
{
    for (uint32_t i = 0; i < BOUNCE_COUNT; i++) {
        if (e->bounce_used & 1u << i)
            continue;
        e->bounce_used |= 1u << i;
        r->bounce_index = (uint8_t)(i + 1);
        r->memory_addr = (uint64_t)(uintptr_t)(e->bounce + (size_t)i * KVDEV_FILE_TRANSFER_MAX);
        return 0;
    }
    return -EAGAIN;
}

static const struct file_region *region_of(const struct kvdev_file_engine *e, uint64_t addr, uint64_t size)
{
    for (uint32_t i = 0; i < e->region_count; i++) {
        const struct file_region *region = &e->regions[i];
        if (addr >= region->addr && size <= region->size_bytes && addr - region->addr <= region->size_bytes - size)
            return region;
    }
    return NULL;
}

/* The registered piece that holds all of this payload. */
static uint16_t buffer_index_of(const struct kvdev_file_engine *e, uint64_t addr, uint64_t size)
{
    const struct file_region *region = region_of(e, addr, size);
    if (!region || !region->is_registered)
        return FILE_BUFFER_NONE;
    uint64_t first = (addr - region->addr) / FILE_PIECE_BYTES;
    uint64_t last = (addr - region->addr + size - 1) / FILE_PIECE_BYTES;
    return first == last ? (uint16_t)(region->buffer_first + first) : (uint16_t)FILE_BUFFER_NONE;
}

static void file_drop(struct kvdev_file *f)
{
    if (--f->holder_count)
        return;
    struct kvdev_file_engine *e = f->engine;
    if (getpid() == e->pid)
        e->backend->file_remove(e, f);
    close(f->params.fd);
    free(f);
    engine_drop(e);
}

/* The end of a command: its memory is the caller's again. */
static void finish(struct kvdev_file_engine *e, struct file_request *r, int error, uint16_t status, uint64_t now)
{
    struct kvdev_file *f = r->file;
    uint64_t cookie = r->cookie;
    uint64_t send_ns = r->send_ns;
    int is_orphan = r->is_orphan;
    if (!error && r->bounce_index && r->opcode == OPC_READ)
        /* The payload's address is not one that direct I/O takes. */
        memcpy((void *)(uintptr_t)r->payload_addr, (const void *)(uintptr_t)r->memory_addr, r->size_bytes);
    request_give(e, r);
    e->info.in_flight_count--;
    if (is_orphan) {
        f->info.orphan_count--;
        e->info.orphan_count--;
        file_drop(f);
        return;
    }
    f->info.in_flight_count--;
    f->done(f->owner, cookie, error, status, send_ns, now);
}

static uint64_t load_le(const uint8_t *p, uint32_t bytes)
{
    uint64_t value = 0;
    for (uint32_t i = bytes; i-- > 0;)
        value = value << 8 | p[i];
    return value;
}

/* The range of a deallocate command whose turn it is, in bytes. */
static void range_read(const struct file_request *r, uint64_t *offset, uint64_t *length)
{
    *offset = r->offset;
    *length = r->size_bytes;
    if (!r->payload_addr)
        return;
    const uint8_t *range = (const uint8_t *)(uintptr_t)r->payload_addr + (size_t)RANGE_BYTES * r->range_index;
    uint64_t block = r->file->params.block_size_bytes;
    *length = load_le(range + 4, 4) * block;
    *offset = load_le(range + 8, 8) * block;
}

static void op_transfer(struct file_request *r, uint8_t kind, uint64_t addr, uint64_t length)
{
    r->op = (struct file_op){ .kind = kind, .addr = addr, .offset = r->offset + r->done_bytes, .length = length,
                              .buffer_index = FILE_BUFFER_NONE };
}

static void op_allocate(struct file_request *r, int32_t mode, uint64_t offset, uint64_t length)
{
    r->op = (struct file_op){ .kind = FILE_OP_FALLOCATE, .mode = mode | FALLOC_FL_KEEP_SIZE, .offset = offset,
                              .length = length, .buffer_index = FILE_BUFFER_NONE };
}

/* Gives the back end what the command needs next. */
static void issue(struct kvdev_file_engine *e, struct file_request *r)
{
    uint64_t left = r->size_bytes - r->done_bytes;
    switch (r->step) {
    case STEP_TRANSFER:
    case STEP_COMPARE:
        op_transfer(r, r->opcode == OPC_WRITE ? FILE_OP_WRITE : FILE_OP_READ, r->memory_addr + r->done_bytes, left);
        r->op.is_durable = r->opcode == OPC_WRITE && r->wants_flush;
        if (!r->bounce_index) {
            r->op.buffer_index = buffer_index_of(e, r->payload_addr, r->size_bytes);
        }
        break;
    case STEP_FLUSH:
        r->op = (struct file_op){ .kind = FILE_OP_FSYNC, .buffer_index = FILE_BUFFER_NONE };
        break;
    case STEP_PUNCH:
        op_allocate(r, FALLOC_FL_PUNCH_HOLE, r->offset, r->size_bytes);
        break;
    case STEP_ZERO_RANGE:
        op_allocate(r, FALLOC_FL_ZERO_RANGE, r->offset, r->size_bytes);
        break;
    case STEP_ZERO_WRITE:
        op_transfer(r, FILE_OP_WRITE, (uint64_t)(uintptr_t)e->zeroes,
                    left < KVDEV_FILE_TRANSFER_MAX ? left : KVDEV_FILE_TRANSFER_MAX);
        break;
    default: {
        uint64_t offset;
        uint64_t length;
        range_read(r, &offset, &length);
        op_allocate(r, FALLOC_FL_PUNCH_HOLE, offset, length);
        break;
    }
    }
    r->op.is_polled = r->file->params.is_polled && (r->op.kind == FILE_OP_READ || r->op.kind == FILE_OP_WRITE);
    e->info.operations++;
    e->info.fixed_operations += r->op.buffer_index != FILE_BUFFER_NONE;
    e->backend->submit(e, r);
}

static void issue_step(struct kvdev_file_engine *e, struct file_request *r, enum step step)
{
    r->step = (uint8_t)step;
    r->retry_count = 0;
    issue(e, r);
}

/* Zeroes are there: as durable as the command asked for. */
static void zeroed(struct kvdev_file_engine *e, struct file_request *r, uint64_t now)
{
    if (r->wants_flush)
        issue_step(e, r, STEP_FLUSH);
    else
        finish(e, r, 0, 0, now);
}

static int is_unsupported(int64_t result)
{
    return result == -EOPNOTSUPP || result == -ENOSYS || result == -ENODEV;
}

static void zero_start(struct kvdev_file_engine *e, struct file_request *r)
{
    uint8_t method = r->file->zero_method;
    if (r->may_deallocate && method == ZERO_PUNCH && !r->file->ignores_deallocate) {
        issue_step(e, r, STEP_PUNCH);
    } else if (method <= ZERO_RANGE) {
        issue_step(e, r, STEP_ZERO_RANGE);
    } else {
        r->file->info.zeroed_by_writing++;
        issue_step(e, r, STEP_ZERO_WRITE);
    }
}

static void transferred(struct kvdev_file_engine *e, struct file_request *r, int64_t result, uint64_t now)
{
    uint64_t size = r->size_bytes;
    if (result == 0) {
        finish(e, r, -EIO, 0, now); /* the file or device was cut under us */
        return;
    }
    r->done_bytes += (uint64_t)result;
    if (r->done_bytes < size) {
        r->file->info.resumed += r->step != STEP_ZERO_WRITE;
        issue(e, r);
        return;
    }
    if (r->step == STEP_ZERO_WRITE) {
        zeroed(e, r, now);
        return;
    }
    int is_other = r->step == STEP_COMPARE &&
                   memcmp((const void *)(uintptr_t)r->memory_addr, (const void *)(uintptr_t)r->payload_addr, size) != 0;
    finish(e, r, is_other ? -EIO : 0, is_other ? STATUS_COMPARE_FAILURE : 0, now);
}

static void deallocated(struct kvdev_file_engine *e, struct file_request *r, int64_t result, uint64_t now)
{
    if (is_unsupported(result)) {
        /* Advice: a file system or device that cannot do it keeps the blocks. */
        r->file->ignores_deallocate = 1;
        r->file->info.ignored_deallocations++;
        finish(e, r, 0, 0, now);
        return;
    }
    if (result < 0) {
        finish(e, r, (int)result, 0, now);
        return;
    }
    if (++r->range_index < r->range_count)
        issue(e, r);
    else
        finish(e, r, 0, 0, now);
}

void file_engine_completed(struct kvdev_file_engine *e, struct file_request *r, int64_t result, uint64_t now)
{
    struct kvdev_file *f = r->file;
    if (r->is_orphan) {
        finish(e, r, -ECANCELED, 0, now);
        return;
    }
    if (f->give_up_error) {
        finish(e, r, r->deadline_ns <= f->give_up_ns ? -ETIMEDOUT : f->give_up_error, 0, now);
        return;
    }
    if ((result == -EINTR || result == -EAGAIN) && r->retry_count < RETRIES_MAX) {
        r->retry_count++;
        f->info.retried++;
        issue(e, r);
        return;
    }
    if (result == -EOPNOTSUPP && r->op.is_polled) {
        f->params.is_polled = 0; /* the queue under it cannot be polled after all */
        issue(e, r);
        return;
    }
    switch (r->step) {
    case STEP_PUNCH:
    case STEP_ZERO_RANGE:
        if (is_unsupported(result)) {
            f->zero_method = r->step == STEP_PUNCH ? ZERO_RANGE : ZERO_WRITE;
            zero_start(e, r);
            return;
        }
        break;
    case STEP_DEALLOCATE:
        deallocated(e, r, result, now);
        return;
    default:
        break;
    }
    if (result < 0)
        finish(e, r, (int)result, 0, now);
    else if (r->step == STEP_FLUSH)
        finish(e, r, 0, 0, now);
    else if (r->step == STEP_PUNCH || r->step == STEP_ZERO_RANGE)
        zeroed(e, r, now);
    else
        transferred(e, r, result, now);
}

/* ---- giving up ---- */

static uint32_t loose_count(const struct kvdev_file_engine *e, const struct kvdev_file *f)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < e->options.request_count; i++) {
        const struct file_request *r = &e->requests[i];
        if (r->is_in_flight && r->file == f && !r->is_orphan && r->payload_addr && !r->bounce_index)
            count += region_of(e, r->payload_addr, r->opcode == OPC_DSM ? 1 : r->size_bytes) == NULL;
    }
    return count;
}

static void orphan_rest(struct kvdev_file_engine *e, struct kvdev_file *f, uint64_t now)
{
    for (uint32_t i = 0; i < e->options.request_count; i++) {
        struct file_request *r = &e->requests[i];
        if (!r->is_in_flight || r->file != f || r->is_orphan)
            continue;
        r->is_orphan = 1;
        f->holder_count++;
        f->info.in_flight_count--;
        f->info.orphan_count++;
        e->info.orphan_count++;
        f->wants_attention = 1;
        f->done(f->owner, r->cookie, r->deadline_ns <= f->give_up_ns ? -ETIMEDOUT : f->give_up_error, 0, r->send_ns,
                now);
    }
}

static void give_up(struct kvdev_file *f, int error, uint64_t give_up_ns)
{
    struct kvdev_file_engine *e = f->engine;
    uint64_t limit = file_now_ns() + e->options.give_up_wait_ns;
    f->give_up_error = error;
    f->give_up_ns = give_up_ns;
    e->backend->cancel(e, f);
    while (f->info.in_flight_count) {
        struct pollfd fd;
        e->backend->flush(e);
        if (e->backend->reap(e))
            continue;
        uint64_t now = file_now_ns();
        if (now >= limit && !loose_count(e, f))
            break;
        /* Past the limit only memory that nobody can withhold keeps us here, as it keeps a pread. */
        uint64_t pause = now < limit && limit - now < GIVE_UP_LOOK_NS ? limit - now : GIVE_UP_LOOK_NS;
        struct timespec ts = { .tv_nsec = (long)pause };
        if (e->backend->wait(e, &fd) > 0)
            ppoll(&fd, 1, &ts, NULL);
    }
    orphan_rest(e, f, file_now_ns());
    f->give_up_error = 0;
}

/* ---- commands ---- */

static int is_payload_opcode(uint8_t opcode)
{
    return opcode == OPC_WRITE || opcode == OPC_READ || opcode == OPC_COMPARE;
}

static uint32_t ranges_refusal(const struct kvdev_file *f, const struct kvdev_io *io)
{
    if (!io->buf_addr)
        return KVDEV_REFUSED_BUFFER;
    if (io->byte_count % RANGE_BYTES)
        return KVDEV_REFUSED_LENGTH;
    if (io->byte_count / RANGE_BYTES > KVDEV_FILE_RANGES_MAX)
        return KVDEV_REFUSED_RANGES;
    const uint8_t *range = (const uint8_t *)(uintptr_t)io->buf_addr;
    for (uint32_t i = 0; i < io->byte_count / RANGE_BYTES; i++, range += RANGE_BYTES) {
        uint64_t count = load_le(range + 4, 4);
        uint64_t slba = load_le(range + 8, 8);
        if (!count)
            return KVDEV_REFUSED_COUNT;
        if (slba > f->params.block_count || count > f->params.block_count - slba)
            return KVDEV_REFUSED_RANGE;
    }
    return KVDEV_REFUSED_NONE;
}

static uint32_t file_check(const void *object, const struct kvdev_io *io)
{
    const struct kvdev_file *f = object;
    uint8_t opcode = io->opcode;
    if (!is_payload_opcode(opcode) && opcode != OPC_FLUSH && opcode != OPC_WRITE_ZEROES && opcode != OPC_DSM)
        return KVDEV_REFUSED_OPCODE;
    if (opcode == OPC_FLUSH)
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if (opcode == OPC_DSM && io->byte_count)
        return ranges_refusal(f, io);
    if (!io->lba_count || (opcode != OPC_DSM && io->lba_count > BLOCKS_MAX))
        return KVDEV_REFUSED_COUNT;
    if (io->slba > f->params.block_count || io->lba_count > f->params.block_count - io->slba)
        return KVDEV_REFUSED_RANGE;
    if (!is_payload_opcode(opcode))
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if ((uint64_t)io->lba_count * f->params.block_size_bytes != io->byte_count)
        return KVDEV_REFUSED_LENGTH;
    if (io->byte_count > f->params.max_transfer_bytes)
        return KVDEV_REFUSED_TRANSFER;
    return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
}

static void first_step(struct kvdev_file_engine *e, struct file_request *r)
{
    switch (r->opcode) {
    case OPC_FLUSH:
        issue_step(e, r, STEP_FLUSH);
        break;
    case OPC_WRITE_ZEROES:
        zero_start(e, r);
        break;
    case OPC_DSM:
        issue_step(e, r, STEP_DEALLOCATE);
        break;
    case OPC_COMPARE:
        issue_step(e, r, STEP_COMPARE);
        break;
    default:
        issue_step(e, r, STEP_TRANSFER);
        break;
    }
}

static void request_fill(struct kvdev_file *f, struct file_request *r, const struct kvdev_io *io)
{
    uint64_t block = f->params.block_size_bytes;
    r->file = f;
    r->opcode = io->opcode;
    r->payload_addr = io->byte_count ? io->buf_addr : 0;
    r->memory_addr = r->payload_addr;
    r->offset = io->slba * block;
    r->size_bytes = io->opcode == OPC_FLUSH ? 0 : io->lba_count * block;
    r->range_count = io->opcode == OPC_DSM && io->byte_count ? (uint16_t)(io->byte_count / RANGE_BYTES) : 1;
    r->may_deallocate = (io->flags & KVDEV_IO_DEALLOCATE) != 0;
    r->wants_flush = io->flags & KVDEV_IO_FUA && f->params.has_volatile_cache &&
                     (io->opcode == OPC_WRITE || io->opcode == OPC_WRITE_ZEROES);
}

static int file_start(void *object, const struct kvdev_io *io, uint64_t cookie, uint64_t deadline_ns, uint64_t now)
{
    struct kvdev_file *f = object;
    struct kvdev_file_engine *e = f->engine;
    if (f->info.orphan_count && (kvdev_file_engine_reap(e), f->info.orphan_count))
        return -ENOTCONN; /* a write given up may still land: nothing may be written beside it */
    if ((io->opcode == OPC_FLUSH && !f->params.has_volatile_cache) ||
        (io->opcode == OPC_DSM && f->ignores_deallocate)) {
        f->info.ignored_deallocations += io->opcode == OPC_DSM;
        f->done(f->owner, cookie, 0, 0, now, now);
        return 0;
    }
    if (f->info.in_flight_count >= f->params.depth)
        return -EAGAIN;
    struct file_request *r = request_take(e);
    if (!r)
        return -EAGAIN;
    request_fill(f, r, io);
    int is_unaligned = is_payload_opcode(io->opcode) && io->buf_addr % f->params.memory_alignment != 0;
    if ((is_unaligned || io->opcode == OPC_COMPARE) && bounce_take(e, r)) {
        request_give(e, r);
        return -EAGAIN;
    }
    if (r->bounce_index) {
        f->info.bounced_commands++;
        if (io->opcode == OPC_WRITE)
            /* The payload's address is not one that direct I/O takes. */
            memcpy((void *)(uintptr_t)r->memory_addr, (const void *)(uintptr_t)io->buf_addr, io->byte_count);
    }
    r->cookie = cookie;
    r->send_ns = now;
    r->deadline_ns = deadline_ns;
    r->is_in_flight = 1;
    if (deadline_ns < f->deadline_min_ns)
        f->deadline_min_ns = deadline_ns;
    f->info.in_flight_count++;
    f->info.commands++;
    e->info.in_flight_count++;
    first_step(e, r);
    return 0;
}

static int file_send(void *object)
{
    struct kvdev_file_engine *e = ((struct kvdev_file *)object)->engine;
    return e->backend->flush(e);
}

static int file_receive(void *object, uint64_t now)
{
    struct kvdev_file_engine *e = ((struct kvdev_file *)object)->engine;
    (void)now;
    return e->backend->reap(e) != 0;
}

static uint64_t file_deadlines(void *object, uint64_t now)
{
    struct kvdev_file *f = object;
    const struct kvdev_file_engine *e = f->engine;
    if (!f->info.in_flight_count)
        f->deadline_min_ns = UINT64_MAX;
    if (now < f->deadline_min_ns)
        return f->deadline_min_ns;
    while (f->engine->backend->reap(f->engine))
        ; /* what has ended is not late */
    uint64_t soonest = UINT64_MAX;
    for (uint32_t i = 0; i < e->options.request_count; i++) {
        const struct file_request *r = &e->requests[i];
        if (r->is_in_flight && r->file == f && !r->is_orphan && r->deadline_ns < soonest)
            soonest = r->deadline_ns;
    }
    f->deadline_min_ns = soonest;
    if (now < soonest)
        return soonest;
    give_up(f, -ENOTCONN, now);
    f->deadline_min_ns = UINT64_MAX;
    return UINT64_MAX;
}

static int file_wait(void *object, struct pollfd *fds)
{
    struct kvdev_file_engine *e = ((struct kvdev_file *)object)->engine;
    return e->backend->wait(e, fds);
}

static void file_give_up(void *object, int error)
{
    give_up(object, error, 0);
}

static uint32_t file_outstanding(const void *object)
{
    return ((const struct kvdev_file *)object)->info.in_flight_count;
}

static int file_is_alive(const void *object)
{
    return ((const struct kvdev_file *)object)->info.orphan_count == 0;
}

static int file_wants_attention(const void *object)
{
    return ((const struct kvdev_file *)object)->wants_attention;
}

static int file_attach(void *object, kvdev_queue_done_fn *done, void *owner)
{
    struct kvdev_file *f = object;
    if (f->done)
        return -EBUSY;
    f->done = done;
    f->owner = owner;
    f->holder_count++;
    return 0;
}

static void file_detach(void *object)
{
    struct kvdev_file *f = object;
    if (f->info.in_flight_count && getpid() == f->engine->pid)
        give_up(f, -ENOTCONN, 0);
    f->done = NULL;
    f->owner = NULL;
    file_drop(f);
}

static const struct kvdev_queue_driver driver = {
    .attach = file_attach,
    .detach = file_detach,
    .check = file_check,
    .start = file_start,
    .send = file_send,
    .receive = file_receive,
    .deadlines = file_deadlines,
    .wait = file_wait,
    .give_up = file_give_up,
    .outstanding = file_outstanding,
    .is_alive = file_is_alive,
    .wants_attention = file_wants_attention,
};

/* ---- the device's life ---- */

static int params_are_valid(const struct kvdev_file_params *p)
{
    if (p->block_size_bytes < 512 || p->block_size_bytes > 65536 || p->block_size_bytes & (p->block_size_bytes - 1))
        return 0;
    if (!p->max_transfer_bytes || p->max_transfer_bytes > KVDEV_FILE_TRANSFER_MAX ||
        p->max_transfer_bytes % p->block_size_bytes)
        return 0;
    if (!p->memory_alignment || p->memory_alignment & (p->memory_alignment - 1))
        return 0;
    return p->depth && p->depth <= KVDEV_FILE_REQUESTS_MAX && p->block_count &&
           p->block_count <= (uint64_t)INT64_MAX / p->block_size_bytes;
}

int kvdev_file_create(struct kvdev_file_engine *e, const struct kvdev_file_params *params, struct kvdev_file **ret)
{
    *ret = NULL;
    if (!params_are_valid(params) || (params->is_polled && !e->info.has_iopoll))
        return -EINVAL;
    struct kvdev_file *f = calloc(1, sizeof *f);
    if (!f)
        return -ENOMEM;
    f->params = *params;
    f->params.fd = fcntl(params->fd, F_DUPFD_CLOEXEC, 0);
    if (f->params.fd < 0) {
        int error = -errno;
        free(f);
        return error;
    }
    f->engine = e;
    f->slot = FILE_SLOT_NONE;
    f->deadline_min_ns = UINT64_MAX;
    f->holder_count = 1;
    e->backend->file_add(e, f);
    e->holder_count++;
    *ret = f;
    return 0;
}

void kvdev_file_destroy(struct kvdev_file *f)
{
    if (f)
        file_drop(f);
}

int kvdev_file_attach(struct kvdev_file *f, struct kvdev_queue *queue, uint32_t *ret)
{
    return kvdev_queue_device_add(queue, &driver, f, ret);
}

void kvdev_file_block_count_set(struct kvdev_file *f, uint64_t block_count)
{
    f->params.block_count = block_count;
}

void kvdev_file_info_read(const struct kvdev_file *f, struct kvdev_file_info *ret)
{
    *ret = f->info;
    ret->is_polled = f->params.is_polled;
}

size_t kvdev_file_spans_read(const struct kvdev_file *f, struct kvdev_file_span *spans, size_t max)
{
    const struct kvdev_file_engine *e = f->engine;
    size_t count = 0;
    for (uint32_t i = 0; i < e->options.request_count && count < max; i++) {
        const struct file_request *r = &e->requests[i];
        if (r->is_in_flight && r->file == f && r->is_orphan && is_payload_opcode(r->opcode) && !r->bounce_index)
            spans[count++] = (struct kvdev_file_span){ r->payload_addr, r->size_bytes };
    }
    return count;
}

void kvdev_file_attention_clear(struct kvdev_file *f)
{
    f->wants_attention = 0;
}

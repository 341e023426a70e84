#include "vhost.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "queue_device.h"

#define SECTOR_BYTES 512u
#define PAGE_BYTES 4096u
#define LINE_BYTES 64u
#define BLOCKS_MAX 65536u              /* as in an NVMe command, so that devices are alike to those above */
#define DESCS_BESIDES_PAYLOAD 2u       /* the header and the status byte */
#define RANGE_BYTES 16u            /* an NVMe dataset management range, and a virtio one */
#define LOOK_NS 5000000ull             /* how often the socket is looked at while commands are in flight */
#define REAP_SHARE 4u                  /* of what is in flight, taken by one turn: see reap */
#define SLOT_NONE 0xffffu
#define NOTHING_WRITTEN 0xffu          /* in the status byte before the back end writes it */

/* Split virtqueues, Virtio 1.2 section 2.7. */
#define DESC_NEXT 1u
#define DESC_WRITE 2u
#define DESC_INDIRECT 4u
#define AVAIL_NO_INTERRUPT 1u
#define USED_NO_NOTIFY 1u

struct virtq_desc {
    uint64_t addr;
    uint32_t len;
    uint16_t flags;
    uint16_t next;
};

struct virtq_used_elem {
    uint32_t id;
    uint32_t len;
};

_Static_assert(sizeof(struct virtq_desc) == 16, "a descriptor is 16 bytes");
_Static_assert(sizeof(struct virtq_used_elem) == 8, "a used element is 8 bytes");

/* Block device requests, Virtio 1.2 section 5.2.6. */
#define BLK_IN 0u
#define BLK_OUT 1u
#define BLK_FLUSH 4u
#define BLK_DISCARD 11u
#define BLK_WRITE_ZEROES 13u
#define BLK_UNMAP 1u
#define BLK_OK 0u
#define BLK_IOERR 1u
#define BLK_UNSUPP 2u

struct blk_header {
    uint32_t type;
    uint32_t reserved;
    uint64_t sector;
};

struct blk_range {
    uint64_t sector;
    uint32_t sector_count;
    uint32_t flags;
};

_Static_assert(sizeof(struct blk_header) == 16, "a block request header is 16 bytes");
_Static_assert(sizeof(struct blk_range) == RANGE_BYTES, "a discard range is 16 bytes");

#define OPC_FLUSH 0x00
#define OPC_WRITE 0x01
#define OPC_READ 0x02
#define OPC_COMPARE 0x05
#define OPC_WRITE_ZEROES 0x08
#define OPC_DSM 0x09

/* The NVMe statuses that stand for a virtio status, so that one device is like another to those above. */
#define STATUS_INVALID_OPCODE 0x001u
#define STATUS_INTERNAL_ERROR 0x006u
#define STATUS_READ_ONLY 0x182u
#define STATUS_WRITE_FAULT 0x280u
#define STATUS_READ_ERROR 0x281u

/* What the back end and we share of one command: the header line, then the indirect table, then ranges. */
struct slot_line {
    struct blk_header header;
    uint8_t status;
    uint8_t reserved[47];
};

_Static_assert(sizeof(struct slot_line) == LINE_BYTES, "header and status share one cache line");

/* Our own record of a command; the back end cannot reach it. */
struct request {
    uint64_t cookie;
    uint64_t send_ns;
    uint64_t deadline_ns;
    uint64_t buf_addr;       /* the caller's payload */
    uint64_t slba;
    uint32_t byte_count;
    uint32_t written_max;    /* bytes that the back end may write */
    uint16_t next_free;
    uint8_t opcode;
    uint8_t is_in_flight;
    uint8_t wants_flush;     /* a write with FUA: its flush is still to come */
    uint8_t bounce_first;
    uint8_t bounce_count;    /* pieces; 0: the payload is shared */
    uint8_t reserved;
};

struct ring {
    struct virtq_desc *desc;
    uint16_t *avail;         /* flags, idx, ring[size], used_event */
    uint16_t *used;          /* flags, idx, then the elements, then avail_event */
    struct virtq_used_elem *used_ring;
    uint8_t *slots;
    struct request *requests;
    uint16_t avail_idx;      /* ours, ahead of the published one until send */
    uint16_t published_idx;
    uint16_t last_used;
    uint16_t free_head;
    uint16_t in_flight_count;
    uint32_t in_flight_bytes;
    int kick_fd;
};

struct layout {
    uint64_t avail_offset;
    uint64_t used_offset;
    uint64_t slots_offset;
    uint64_t ring_bytes;     /* all of one virtqueue */
    uint64_t bounce_offset;
    uint64_t total_bytes;
    uint32_t slot_bytes;
    uint32_t table_offset;   /* in a slot */
    uint32_t ranges_offset;
    uint32_t descs_per_command;
    uint16_t slot_count;
};

struct region {
    uint64_t addr;
    uint64_t size_bytes;
};

struct kvdev_vhost {
    struct kvdev_vhost_params params;
    struct layout layout;
    struct kvdev_vhost_info info;
    struct kvdev_vhost_fault fault;
    struct ring rings[KVDEV_VHOST_QUEUES_MAX];
    struct region regions[KVDEV_VHOST_REGIONS_MAX];
    uint32_t region_count;
    struct kvdev_vhost_span *spans;
    uint64_t bounce_used;    /* one bit per piece */
    uint64_t deadline_min_ns;
    uint64_t look_ns;        /* when the socket is due to be looked at */
    kvdev_queue_done_fn *done;
    void *owner;
    int socket_fd;
    int channel_fd;
    int call_fd;
    uint32_t holder_count;
    uint32_t next_ring;
    uint8_t is_held_on_loss;
    uint8_t is_armed;        /* the back end was asked to notify */
    uint8_t wants_attention;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* ---- shared fields: little-endian, the other side may change them at any time ---- */

static uint16_t shared_load16(const uint16_t *p, int order)
{
    return le16toh(order == __ATOMIC_ACQUIRE ? __atomic_load_n(p, __ATOMIC_ACQUIRE)
                                             : __atomic_load_n(p, __ATOMIC_RELAXED));
}

static uint32_t shared_load32(const uint32_t *p)
{
    return le32toh(__atomic_load_n(p, __ATOMIC_RELAXED));
}

static void shared_store16(uint16_t *p, uint16_t value)
{
    __atomic_store_n(p, htole16(value), __ATOMIC_RELAXED);
}

/* ---- layout ---- */

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static int params_are_valid(const struct kvdev_vhost_params *p)
{
    if (!p->queue_count || p->queue_count > KVDEV_VHOST_QUEUES_MAX)
        return 0;
    if (p->queue_size < 2 || p->queue_size > KVDEV_VHOST_QUEUE_SIZE_MAX || p->queue_size & (p->queue_size - 1))
        return 0;
    if (!p->segment_count || p->segment_count > KVDEV_VHOST_SEGMENTS_MAX)
        return 0;
    if (!p->has_indirect && p->queue_size < p->segment_count + DESCS_BESIDES_PAYLOAD)
        return 0;
    if (p->block_size_bytes < SECTOR_BYTES || p->block_size_bytes > 65536 ||
        p->block_size_bytes & (p->block_size_bytes - 1))
        return 0;
    if (!p->max_transfer_bytes || p->max_transfer_bytes % p->block_size_bytes)
        return 0;
    if (p->segment_size_bytes && (uint64_t)p->segment_size_bytes * p->segment_count < p->max_transfer_bytes)
        return 0;
    if (p->block_count > UINT64_MAX / p->block_size_bytes)
        return 0;
    if (p->bounce_size_bytes % (KVDEV_VHOST_BOUNCE_PIECES * PAGE_BYTES))
        return 0;
    return p->discard_ranges_max <= KVDEV_VHOST_RANGES_MAX;
}

static void layout_make(const struct kvdev_vhost_params *p, struct layout *l)
{
    uint64_t size = p->queue_size;
    l->descs_per_command = p->segment_count + DESCS_BESIDES_PAYLOAD;
    l->slot_count = (uint16_t)(p->has_indirect ? size : size / l->descs_per_command);
    l->table_offset = LINE_BYTES;
    l->ranges_offset = l->table_offset;
    if (p->has_indirect)
        l->ranges_offset += (uint32_t)round_up(sizeof(struct virtq_desc) * l->descs_per_command, LINE_BYTES);
    l->slot_bytes = (uint32_t)(l->ranges_offset +
                               round_up(RANGE_BYTES * (p->discard_ranges_max ? p->discard_ranges_max : 1), LINE_BYTES));
    l->avail_offset = sizeof(struct virtq_desc) * size;
    l->used_offset = round_up(l->avail_offset + 2 * (3 + size), PAGE_BYTES);
    l->slots_offset = round_up(l->used_offset + 2 * 3 + sizeof(struct virtq_used_elem) * size, PAGE_BYTES);
    l->ring_bytes = round_up(l->slots_offset + (uint64_t)l->slot_bytes * l->slot_count, PAGE_BYTES);
    l->bounce_offset = l->ring_bytes * p->queue_count;
    l->total_bytes = l->bounce_offset + p->bounce_size_bytes;
}

uint64_t kvdev_vhost_control_size(const struct kvdev_vhost_params *params)
{
    struct layout layout;
    if (!params_are_valid(params))
        return 0;
    layout_make(params, &layout);
    return layout.total_bytes;
}

static struct slot_line *slot_at(const struct kvdev_vhost *v, const struct ring *ring, uint32_t slot)
{
    return (struct slot_line *)(void *)(ring->slots + (size_t)v->layout.slot_bytes * slot);
}

static uint16_t *used_event_at(const struct kvdev_vhost *v, const struct ring *ring)
{
    return ring->avail + 2 + v->params.queue_size;
}

static const uint16_t *avail_event_at(const struct kvdev_vhost *v, const struct ring *ring)
{
    return (const uint16_t *)(const void *)(ring->used_ring + v->params.queue_size);
}

/* ---- life ---- */

static void ring_init(struct kvdev_vhost *v, struct ring *ring, uint8_t *base, struct request *requests)
{
    const struct layout *l = &v->layout;
    ring->desc = (struct virtq_desc *)(void *)base;
    ring->avail = (uint16_t *)(void *)(base + l->avail_offset);
    ring->used = (uint16_t *)(void *)(base + l->used_offset);
    ring->used_ring = (struct virtq_used_elem *)(void *)(base + l->used_offset + 4);
    ring->slots = base + l->slots_offset;
    ring->requests = requests;
    ring->kick_fd = -1;
    ring->free_head = SLOT_NONE;
    for (uint16_t slot = l->slot_count; slot-- > 0;) {
        ring->requests[slot].next_free = ring->free_head;
        ring->free_head = slot;
    }
}

int kvdev_vhost_create(const struct kvdev_vhost_params *params, struct kvdev_vhost **ret)
{
    *ret = NULL;
    uint64_t need = kvdev_vhost_control_size(params);
    if (!need || params->control_size_bytes < need || !params->control_addr || params->control_addr % PAGE_BYTES)
        return -EINVAL;
    struct kvdev_vhost *v = calloc(1, sizeof *v);
    if (!v)
        return -ENOMEM;
    v->params = *params;
    layout_make(params, &v->layout);
    size_t slots = (size_t)v->layout.slot_count * params->queue_count;
    struct request *requests = calloc(slots, sizeof *requests);
    v->spans = calloc(slots, sizeof *v->spans);
    if (!requests || !v->spans) {
        free(requests);
        free(v->spans);
        free(v);
        return -ENOMEM;
    }
    uint8_t *base = (uint8_t *)(uintptr_t)params->control_addr;
    for (uint32_t i = 0; i < params->queue_count; i++)
        ring_init(v, &v->rings[i], base + v->layout.ring_bytes * i, requests + (size_t)v->layout.slot_count * i);
    v->socket_fd = v->channel_fd = v->call_fd = -1;
    v->holder_count = 1;
    v->deadline_min_ns = UINT64_MAX;
    *ret = v;
    return 0;
}

static void drop(struct kvdev_vhost *v)
{
    if (--v->holder_count)
        return;
    free(v->rings[0].requests);
    free(v->spans);
    free(v);
}

void kvdev_vhost_destroy(struct kvdev_vhost *v)
{
    if (v)
        drop(v);
}

int kvdev_vhost_region_add(struct kvdev_vhost *v, uint64_t addr, uint64_t size_bytes)
{
    if (!addr || !size_bytes || addr > UINT64_MAX - size_bytes)
        return -EINVAL;
    if (v->region_count == KVDEV_VHOST_REGIONS_MAX)
        return -ENOSPC;
    v->regions[v->region_count++] = (struct region){ addr, size_bytes };
    return 0;
}

int kvdev_vhost_ring_read(struct kvdev_vhost *v, uint32_t queue_index, struct kvdev_vhost_ring *ret)
{
    if (queue_index >= v->params.queue_count)
        return -EINVAL;
    const struct ring *ring = &v->rings[queue_index];
    *ret = (struct kvdev_vhost_ring){
        .desc_addr = (uint64_t)(uintptr_t)ring->desc,
        .avail_addr = (uint64_t)(uintptr_t)ring->avail,
        .used_addr = (uint64_t)(uintptr_t)ring->used,
        .base = ring->last_used,
        .queue_size = v->params.queue_size,
        .slot_count = v->layout.slot_count,
        .in_flight_count = ring->in_flight_count,
    };
    return 0;
}

/* ---- death ---- */

static void request_free(struct kvdev_vhost *v, struct ring *ring, uint16_t slot)
{
    struct request *r = &ring->requests[slot];
    for (uint32_t i = 0; i < r->bounce_count; i++)
        v->bounce_used &= ~(1ull << (r->bounce_first + i));
    r->bounce_count = 0;
    r->is_in_flight = 0;
    r->next_free = ring->free_head;
    ring->free_head = slot;
    ring->in_flight_count--;
    ring->in_flight_bytes -= r->byte_count;
    v->info.in_flight_count--;
}

/* The device is dead: the back end may go on using the spans, but nothing here looks at the rings again. */
static void kill_with(struct kvdev_vhost *v, uint32_t kind, int error)
{
    if (v->info.state == KVDEV_VHOST_DEAD)
        return;
    v->info.state = KVDEV_VHOST_DEAD;
    v->fault.kind = kind;
    v->fault.error = error;
    v->wants_attention = 1;
    if (v->socket_fd >= 0)
        shutdown(v->socket_fd, SHUT_RDWR);
    uint64_t now = now_ns();
    for (uint32_t i = 0; i < v->params.queue_count; i++) {
        struct ring *ring = &v->rings[i];
        for (uint16_t slot = 0; slot < v->layout.slot_count; slot++) {
            struct request *r = &ring->requests[slot];
            if (!r->is_in_flight)
                continue;
            if (r->byte_count && !r->bounce_count)
                v->spans[v->info.span_count++] = (struct kvdev_vhost_span){ r->buf_addr, r->byte_count };
            int is_late = kind == KVDEV_VHOST_FAULT_TIMEOUT && now >= r->deadline_ns;
            request_free(v, ring, slot);
            if (v->done)
                v->done(v->owner, r->cookie, is_late ? -ETIMEDOUT : error, 0, r->send_ns, now);
        }
    }
}

__attribute__((format(printf, 6, 7))) static void ring_fault(struct kvdev_vhost *v, const struct ring *ring,
                                                             const char *field, uint64_t expected, uint64_t actual,
                                                             const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(v->fault.text, sizeof v->fault.text, format, args);
    va_end(args);
    snprintf(v->fault.field, sizeof v->fault.field, "%s", field);
    v->fault.queue_index = (uint32_t)(ring - v->rings);
    v->fault.expected = expected;
    v->fault.actual = actual;
    kill_with(v, KVDEV_VHOST_FAULT_RING, -ENOTCONN);
}

static void kill_saying(struct kvdev_vhost *v, uint32_t kind, int error, const char *text)
{
    if (v->info.state == KVDEV_VHOST_DEAD)
        return;
    snprintf(v->fault.text, sizeof v->fault.text, "%s", text);
    v->fault.queue_index = UINT32_MAX;
    kill_with(v, kind, error);
}

void kvdev_vhost_kill(struct kvdev_vhost *v, int error, const char *text)
{
    kill_saying(v, KVDEV_VHOST_FAULT_LOCAL, error, text);
}

static void reap_rest(struct kvdev_vhost *v);

static void lost(struct kvdev_vhost *v)
{
    if (v->info.state != KVDEV_VHOST_READY)
        return;
    if (v->is_held_on_loss) {
        v->info.state = KVDEV_VHOST_HELD;
        v->wants_attention = 1;
        snprintf(v->fault.text, sizeof v->fault.text, "the back end closed the connection");
        return;
    }
    kill_saying(v, KVDEV_VHOST_FAULT_CLOSED, -ENOTCONN, "the back end closed the connection");
}

/* Whether the connection still stands, and whether the back end's own channel has something. */
static void look(struct kvdev_vhost *v, uint64_t now)
{
    struct pollfd fds[2] = { { .fd = v->socket_fd, .events = POLLIN }, { .fd = v->channel_fd, .events = POLLIN } };
    v->look_ns = now + LOOK_NS;
    if (poll(fds, 2, 0) <= 0)
        return;
    if (fds[1].revents && !v->info.has_backend_message) {
        v->info.has_backend_message = 1;
        v->wants_attention = 1;
    }
    if (!fds[0].revents)
        return;
    uint8_t byte;
    ssize_t got = recv(v->socket_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
        reap_rest(v); /* what it had answered before it went is not uncertain */
        lost(v);
    }
    else if (got > 0)
        kill_saying(v, KVDEV_VHOST_FAULT_MESSAGE, -ENOTCONN, "the back end sent a message that nobody asked for");
}

/* ---- start ---- */

static void suppress(struct kvdev_vhost *v, struct ring *ring)
{
    if (v->params.has_event_idx)
        /* As far away as an index can be: moved on with every completion, so never reached. */
        shared_store16(used_event_at(v, ring), (uint16_t)(ring->last_used + 0x8000u));
    else
        shared_store16(&ring->avail[0], AVAIL_NO_INTERRUPT);
}

int kvdev_vhost_start(struct kvdev_vhost *v, int socket_fd, int channel_fd, const int *kick_fds, int call_fd,
                      uint32_t is_held_on_loss)
{
    if (v->info.state != KVDEV_VHOST_IDLE && v->info.state != KVDEV_VHOST_HELD)
        return -EINVAL;
    int is_resumed = v->info.state == KVDEV_VHOST_HELD;
    v->socket_fd = socket_fd;
    v->channel_fd = channel_fd;
    v->call_fd = call_fd;
    v->is_held_on_loss = is_held_on_loss != 0;
    v->is_armed = 0;
    v->look_ns = 0;
    v->info.has_backend_message = 0;
    v->info.state = KVDEV_VHOST_READY;
    memset(v->fault.text, 0, sizeof v->fault.text);
    for (uint32_t i = 0; i < v->params.queue_count; i++) {
        struct ring *ring = &v->rings[i];
        ring->kick_fd = kick_fds[i];
        suppress(v, ring);
        if (!is_resumed)
            continue;
        /* Whatever the old back end was told of, the new one is told again. */
        uint64_t one = 1;
        if (write(ring->kick_fd, &one, sizeof one) == (ssize_t)sizeof one)
            v->info.kicks++;
    }
    return 0;
}

/* ---- commands ---- */

static int is_payload_opcode(uint8_t opcode)
{
    return opcode == OPC_WRITE || opcode == OPC_READ || opcode == OPC_COMPARE;
}

/* Whether the payload lies in one region as a whole. */
static int is_shared(const struct kvdev_vhost *v, uint64_t addr, uint32_t size)
{
    for (uint32_t i = 0; i < v->region_count; i++) {
        const struct region *region = &v->regions[i];
        if (addr >= region->addr && size <= region->size_bytes && addr - region->addr <= region->size_bytes - size)
            return 1;
    }
    return 0;
}

static uint32_t payload_refusal(const struct kvdev_vhost *v, const struct kvdev_io *io)
{
    const struct kvdev_vhost_params *p = &v->params;
    if ((uint64_t)io->lba_count * p->block_size_bytes != io->byte_count)
        return KVDEV_REFUSED_LENGTH;
    if (io->byte_count > p->max_transfer_bytes)
        return KVDEV_REFUSED_TRANSFER;
    if (!io->buf_addr)
        return KVDEV_REFUSED_BUFFER;
    if (is_shared(v, io->buf_addr, io->byte_count))
        return KVDEV_REFUSED_NONE;
    return io->flags & KVDEV_IO_MAY_COPY && io->byte_count <= p->bounce_size_bytes ? KVDEV_REFUSED_NONE
                                                                                  : KVDEV_REFUSED_UNSHARED;
}

static uint64_t load_le(const uint8_t *p, uint32_t bytes)
{
    uint64_t value = 0;
    for (uint32_t i = bytes; i-- > 0;)
        value = value << 8 | p[i];
    return value;
}

/* Ranges as in an NVMe command: attributes, block count, first block. */
static uint32_t ranges_refusal(const struct kvdev_vhost *v, const struct kvdev_io *io)
{
    const struct kvdev_vhost_params *p = &v->params;
    uint64_t sectors_per_block = p->block_size_bytes / SECTOR_BYTES;
    if (!io->buf_addr)
        return KVDEV_REFUSED_BUFFER;
    if (io->byte_count % RANGE_BYTES)
        return KVDEV_REFUSED_LENGTH;
    if (p->has_discard && io->byte_count / RANGE_BYTES > p->discard_ranges_max)
        return KVDEV_REFUSED_RANGES;
    const uint8_t *range = (const uint8_t *)(uintptr_t)io->buf_addr;
    for (uint32_t i = 0; p->has_discard && i < io->byte_count / RANGE_BYTES; i++, range += RANGE_BYTES) {
        uint64_t count = load_le(range + 4, 4);
        uint64_t slba = load_le(range + 8, 8);
        if (!count || count * sectors_per_block > p->discard_sectors_max)
            return KVDEV_REFUSED_COUNT;
        if (slba > p->block_count || count > p->block_count - slba)
            return KVDEV_REFUSED_RANGE;
    }
    return KVDEV_REFUSED_NONE;
}

static uint32_t vhost_check(const void *object, const struct kvdev_io *io)
{
    const struct kvdev_vhost *v = object;
    const struct kvdev_vhost_params *p = &v->params;
    uint64_t sectors_per_block = p->block_size_bytes / SECTOR_BYTES;
    uint8_t opcode = io->opcode;
    if (!is_payload_opcode(opcode) && opcode != OPC_FLUSH && opcode != OPC_WRITE_ZEROES && opcode != OPC_DSM)
        return KVDEV_REFUSED_OPCODE;
    if (opcode == OPC_FLUSH)
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if (opcode == OPC_DSM && io->byte_count)
        return ranges_refusal(v, io);
    if (!io->lba_count || (opcode != OPC_DSM && io->lba_count > BLOCKS_MAX))
        return KVDEV_REFUSED_COUNT;
    if (io->slba > p->block_count || io->lba_count > p->block_count - io->slba)
        return KVDEV_REFUSED_RANGE;
    if (is_payload_opcode(opcode))
        return payload_refusal(v, io);
    if (io->byte_count)
        return KVDEV_REFUSED_LENGTH;
    uint64_t sectors = io->lba_count * sectors_per_block;
    if (opcode == OPC_DSM ? p->has_discard && sectors > p->discard_sectors_max
                          : p->has_write_zeroes && sectors > p->write_zeroes_sectors_max)
        return KVDEV_REFUSED_COUNT;
    return KVDEV_REFUSED_NONE;
}

/* What is answered without asking the back end: 0, or 1 with the verdict in error and status. */
static int answer_at_once(const struct kvdev_vhost *v, const struct kvdev_io *io, int *error, uint16_t *status)
{
    const struct kvdev_vhost_params *p = &v->params;
    *error = 0;
    *status = 0;
    if (io->opcode == OPC_FLUSH)
        return !p->has_flush;
    if (io->opcode == OPC_READ)
        return 0;
    int is_unknown = io->opcode == OPC_COMPARE || (io->opcode == OPC_DSM && !p->has_discard) ||
                     (io->opcode == OPC_WRITE_ZEROES && !p->has_write_zeroes);
    if (is_unknown)
        *status = STATUS_INVALID_OPCODE;
    else if (p->is_read_only)
        *status = STATUS_READ_ONLY;
    else
        return 0;
    *error = -EIO;
    return 1;
}

/* A run of free bounce pieces for so many bytes; 0, or -EAGAIN. */
static int bounce_take(struct kvdev_vhost *v, struct request *r)
{
    uint32_t piece = v->params.bounce_size_bytes / KVDEV_VHOST_BOUNCE_PIECES;
    uint32_t count = (r->byte_count + piece - 1) / piece;
    uint64_t mask = count >= 64 ? UINT64_MAX : (1ull << count) - 1;
    for (uint32_t first = 0; first + count <= KVDEV_VHOST_BOUNCE_PIECES; first++) {
        if (v->bounce_used & mask << first)
            continue;
        v->bounce_used |= mask << first;
        r->bounce_first = (uint8_t)first;
        r->bounce_count = (uint8_t)count;
        return 0;
    }
    return -EAGAIN;
}

static uint8_t *bounce_at(const struct kvdev_vhost *v, const struct request *r)
{
    uint32_t piece = v->params.bounce_size_bytes / KVDEV_VHOST_BOUNCE_PIECES;
    return (uint8_t *)(uintptr_t)v->params.control_addr + v->layout.bounce_offset + (uint64_t)piece * r->bounce_first;
}

/* The virtqueue with the fewest bytes in flight that has room for so many more; NULL if none has. */
static struct ring *ring_choose(struct kvdev_vhost *v, uint32_t bytes)
{
    struct ring *best = NULL;
    for (uint32_t i = 0; i < v->params.queue_count; i++) {
        struct ring *ring = &v->rings[(v->next_ring + i) % v->params.queue_count];
        if (ring->free_head == SLOT_NONE)
            continue;
        if (ring->in_flight_bytes && (uint64_t)ring->in_flight_bytes + bytes > v->params.window_size_bytes)
            continue;
        if (!best || ring->in_flight_bytes < best->in_flight_bytes)
            best = ring;
    }
    return best;
}

static void desc_set(struct virtq_desc *desc, uint64_t addr, uint32_t len, uint32_t flags, uint32_t next)
{
    desc->addr = htole64(addr);
    desc->len = htole32(len);
    desc->flags = htole16((uint16_t)flags);
    desc->next = htole16((uint16_t)next);
}

/* Writes the chain for a slot and makes it the next avail entry; send publishes it. */
static void chain_build(struct kvdev_vhost *v, struct ring *ring, uint16_t slot, uint64_t addr, uint32_t len,
                        uint32_t payload_flags)
{
    struct slot_line *line = slot_at(v, ring, slot);
    uint8_t *base = (uint8_t *)line;
    uint32_t head = v->params.has_indirect ? slot : slot * v->layout.descs_per_command;
    struct virtq_desc *table = v->params.has_indirect
                                   ? (struct virtq_desc *)(void *)(base + v->layout.table_offset)
                                   : &ring->desc[head];
    uint32_t first = v->params.has_indirect ? 0 : head; /* what next counts from */
    uint32_t limit = v->params.segment_size_bytes ? v->params.segment_size_bytes : UINT32_MAX;
    uint32_t n = 0;
    desc_set(&table[n], (uint64_t)(uintptr_t)&line->header, sizeof line->header, DESC_NEXT, first + n + 1);
    n++;
    while (len) {
        uint32_t piece = len < limit ? len : limit;
        desc_set(&table[n], addr, piece, DESC_NEXT | payload_flags, first + n + 1);
        n++;
        addr += piece;
        len -= piece;
    }
    line->status = NOTHING_WRITTEN;
    desc_set(&table[n], (uint64_t)(uintptr_t)&line->status, 1, DESC_WRITE, 0);
    n++;
    if (v->params.has_indirect)
        desc_set(&ring->desc[head], (uint64_t)(uintptr_t)table, n * (uint32_t)sizeof *table, DESC_INDIRECT, 0);
    shared_store16(&ring->avail[2 + (ring->avail_idx & (v->params.queue_size - 1))], (uint16_t)head);
    ring->avail_idx++;
}

static void header_set(struct slot_line *line, uint32_t type, uint64_t sector)
{
    line->header = (struct blk_header){ .type = htole32(type), .sector = htole64(sector) };
}

static void range_set(struct blk_range *range, uint64_t sector, uint64_t sector_count, uint32_t flags)
{
    *range = (struct blk_range){ htole64(sector), htole32((uint32_t)sector_count), htole32(flags) };
}

/* Discard and write zeroes carry their ranges as payload. */
static uint32_t ranges_build(struct kvdev_vhost *v, const struct kvdev_io *io, struct blk_range *ranges)
{
    uint64_t per_block = v->params.block_size_bytes / SECTOR_BYTES;
    if (io->opcode == OPC_WRITE_ZEROES || !io->byte_count) {
        uint32_t unmap = io->opcode == OPC_WRITE_ZEROES && io->flags & KVDEV_IO_DEALLOCATE && v->params.may_unmap_zeroes;
        range_set(ranges, io->slba * per_block, io->lba_count * per_block, unmap ? BLK_UNMAP : 0);
        return RANGE_BYTES;
    }
    const uint8_t *from = (const uint8_t *)(uintptr_t)io->buf_addr;
    uint32_t count = io->byte_count / RANGE_BYTES;
    for (uint32_t i = 0; i < count; i++, from += RANGE_BYTES)
        range_set(&ranges[i], load_le(from + 8, 8) * per_block, load_le(from + 4, 4) * per_block, 0);
    return count * RANGE_BYTES;
}

static void request_build(struct kvdev_vhost *v, struct ring *ring, uint16_t slot, const struct kvdev_io *io)
{
    struct request *r = &ring->requests[slot];
    struct slot_line *line = slot_at(v, ring, slot);
    uint64_t sector = io->slba * (v->params.block_size_bytes / SECTOR_BYTES);
    uint64_t addr = r->buf_addr;
    r->written_max = 1;
    switch (io->opcode) {
    case OPC_FLUSH:
        header_set(line, BLK_FLUSH, 0);
        chain_build(v, ring, slot, 0, 0, 0);
        return;
    case OPC_WRITE_ZEROES:
    case OPC_DSM: {
        struct blk_range *ranges = (struct blk_range *)(void *)((uint8_t *)line + v->layout.ranges_offset);
        uint32_t len = ranges_build(v, io, ranges);
        header_set(line, io->opcode == OPC_DSM ? BLK_DISCARD : BLK_WRITE_ZEROES, 0);
        chain_build(v, ring, slot, (uint64_t)(uintptr_t)ranges, len, 0);
        return;
    }
    default:
        break;
    }
    if (r->bounce_count) {
        addr = (uint64_t)(uintptr_t)bounce_at(v, r);
        if (io->opcode == OPC_WRITE)
            /* The back end cannot reach this payload, and its owner allowed the copy: metadata. */
            memcpy(bounce_at(v, r), (const void *)(uintptr_t)r->buf_addr, r->byte_count);
    }
    if (io->opcode == OPC_READ)
        r->written_max += r->byte_count;
    header_set(line, io->opcode == OPC_READ ? BLK_IN : BLK_OUT, sector);
    chain_build(v, ring, slot, addr, r->byte_count, io->opcode == OPC_READ ? DESC_WRITE : 0);
}

static int vhost_start(void *object, const struct kvdev_io *io, uint64_t cookie, uint64_t deadline_ns, uint64_t now)
{
    struct kvdev_vhost *v = object;
    int error = 0;
    uint16_t status = 0;
    if (!v->info.in_flight_count && v->info.state == KVDEV_VHOST_READY && now >= v->look_ns)
        /* It may have gone while nobody looked; a command given to the dead would have an unknown fate. */
        look(v, now);
    if (v->info.state == KVDEV_VHOST_HELD)
        return -EAGAIN;
    if (v->info.state != KVDEV_VHOST_READY)
        return -ENOTCONN;
    if (answer_at_once(v, io, &error, &status)) {
        v->done(v->owner, cookie, error, status, now, now);
        return 0;
    }
    uint32_t bytes = is_payload_opcode(io->opcode) ? io->byte_count : 0;
    struct ring *ring = ring_choose(v, bytes);
    if (!ring)
        return -EAGAIN;
    uint16_t slot = ring->free_head;
    struct request *r = &ring->requests[slot];
    r->buf_addr = bytes ? io->buf_addr : 0;
    r->byte_count = bytes;
    if (bytes && !is_shared(v, io->buf_addr, bytes)) {
        if (bounce_take(v, r))
            return -EAGAIN;
        v->info.bounced_commands++;
        v->info.bounced_bytes += bytes;
    }
    ring->free_head = r->next_free;
    r->cookie = cookie;
    r->send_ns = now;
    r->deadline_ns = deadline_ns;
    r->slba = io->slba;
    r->opcode = io->opcode;
    r->is_in_flight = 1;
    r->wants_flush = io->flags & KVDEV_IO_FUA && v->params.has_flush &&
                     (io->opcode == OPC_WRITE || io->opcode == OPC_WRITE_ZEROES);
    if (deadline_ns < v->deadline_min_ns)
        v->deadline_min_ns = deadline_ns;
    ring->in_flight_count++;
    ring->in_flight_bytes += bytes;
    v->next_ring = (uint32_t)(ring - v->rings + 1) % v->params.queue_count;
    v->info.in_flight_count++;
    v->info.commands++;
    v->info.unaligned_commands += bytes && !r->bounce_count && io->buf_addr % SECTOR_BYTES;
    request_build(v, ring, slot, io);
    return 0;
}

static int vhost_send(void *object)
{
    struct kvdev_vhost *v = object;
    int has_moved = 0;
    if (v->info.state != KVDEV_VHOST_READY)
        return 0;
    for (uint32_t i = 0; i < v->params.queue_count; i++) {
        struct ring *ring = &v->rings[i];
        uint16_t before = ring->published_idx;
        uint16_t after = ring->avail_idx;
        if (before == after)
            continue;
        has_moved = 1;
        __atomic_store_n(&ring->avail[1], htole16(after), __ATOMIC_RELEASE);
        ring->published_idx = after;
        /* The index must be visible before we look whether the back end still sleeps (2.7.13.4.1). */
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        int must_kick;
        if (v->params.has_event_idx) {
            uint16_t event = shared_load16(avail_event_at(v, ring), __ATOMIC_RELAXED);
            must_kick = (uint16_t)(after - event - 1) < (uint16_t)(after - before);
        } else {
            must_kick = !(shared_load16(&ring->used[0], __ATOMIC_RELAXED) & USED_NO_NOTIFY);
        }
        uint64_t one = 1;
        if (must_kick && write(ring->kick_fd, &one, sizeof one) == (ssize_t)sizeof one)
            v->info.kicks++;
    }
    return has_moved;
}

/* ---- completions ---- */

static uint16_t status_of_failure(const struct request *r, uint8_t blk_status)
{
    if (blk_status == BLK_UNSUPP)
        return STATUS_INVALID_OPCODE;
    if (r->opcode == OPC_READ)
        return STATUS_READ_ERROR;
    return r->opcode == OPC_WRITE || r->opcode == OPC_WRITE_ZEROES ? STATUS_WRITE_FAULT : STATUS_INTERNAL_ERROR;
}

/* One used element that passed as an answer to the command in this slot; 0, or -1 when it lies. */
static int complete(struct kvdev_vhost *v, struct ring *ring, uint16_t slot, uint32_t len, uint64_t now)
{
    struct request *r = &ring->requests[slot];
    struct slot_line *line = slot_at(v, ring, slot);
    uint8_t status = __atomic_load_n(&line->status, __ATOMIC_RELAXED);
    if (status > BLK_UNSUPP) {
        ring_fault(v, ring, "status", BLK_UNSUPP, status, "virtqueue %u: status: expected 0, 1 or 2, got %u%s",
                   (unsigned)(ring - v->rings), status, status == NOTHING_WRITTEN ? " (not written)" : "");
        return -1;
    }
    if (len > r->written_max) {
        ring_fault(v, ring, "used.len", r->written_max, len, "virtqueue %u: used.len: expected at most %u, got %u",
                   (unsigned)(ring - v->rings), r->written_max, len);
        return -1;
    }
    if (status == BLK_OK && r->opcode == OPC_READ && len < r->byte_count) {
        ring_fault(v, ring, "used.len", r->byte_count, len,
                   "virtqueue %u: used.len: expected at least the %u bytes of a successful read, got %u",
                   (unsigned)(ring - v->rings), r->byte_count, len);
        return -1;
    }
    if (status == BLK_OK && r->wants_flush) {
        r->wants_flush = 0;
        header_set(line, BLK_FLUSH, 0);
        chain_build(v, ring, slot, 0, 0, 0);
        return 0;
    }
    if (status == BLK_OK && r->bounce_count && r->opcode == OPC_READ)
        memcpy((void *)(uintptr_t)r->buf_addr, bounce_at(v, r), r->byte_count); /* as in request_build */
    uint16_t nvme_status = status == BLK_OK ? 0 : status_of_failure(r, status);
    uint64_t cookie = r->cookie;
    uint64_t send_ns = r->send_ns;
    request_free(v, ring, slot);
    v->done(v->owner, cookie, status == BLK_OK ? 0 : -EIO, nvme_status, send_ns, now);
    return 0;
}

/* Bounded by the commands in flight, whatever the index says. */
static int reap(struct kvdev_vhost *v, struct ring *ring)
{
    uint16_t idx = shared_load16(&ring->used[1], __ATOMIC_ACQUIRE);
    uint16_t count = (uint16_t)(idx - ring->last_used);
    if (!count)
        return 0;
    uint16_t sent = (uint16_t)(ring->in_flight_count - (uint16_t)(ring->avail_idx - ring->published_idx));
    if (count > sent) {
        ring_fault(v, ring, "used.idx", (uint16_t)(ring->last_used + sent), idx,
                   "virtqueue %u: used.idx: expected %u to %u, got %u", (unsigned)(ring - v->rings), ring->last_used,
                   (uint16_t)(ring->last_used + sent), idx);
        return 1;
    }
    /* Not all at once: what is refilled together completes together, and the device runs dry in between. */
    uint16_t limit = sent / REAP_SHARE ? (uint16_t)(sent / REAP_SHARE) : 1;
    if (count > limit)
        count = limit;
    uint64_t now = now_ns();
    uint32_t stride = v->params.has_indirect ? 1 : v->layout.descs_per_command;
    for (; count; count--) {
        const struct virtq_used_elem *elem = &ring->used_ring[ring->last_used & (v->params.queue_size - 1)];
        uint32_t id = shared_load32(&elem->id);
        uint32_t len = shared_load32(&elem->len);
        uint32_t slot = id / stride;
        if (id % stride || slot >= v->layout.slot_count || !ring->requests[slot].is_in_flight) {
            ring_fault(v, ring, "used.id", (uint64_t)v->layout.slot_count * stride - 1, id,
                       "virtqueue %u: used.id: expected the head of a command in flight (up to %u), got %u",
                       (unsigned)(ring - v->rings), v->layout.slot_count * stride - 1, id);
            return 1;
        }
        ring->last_used++;
        if (complete(v, ring, (uint16_t)slot, len, now))
            return 1;
    }
    suppress(v, ring);
    return 1;
}

/* All that was answered, before the device is given up. */
static void reap_rest(struct kvdev_vhost *v)
{
    for (uint32_t i = 0; i < v->params.queue_count; i++)
        while (v->info.state == KVDEV_VHOST_READY && v->rings[i].in_flight_count && reap(v, &v->rings[i]))
            ;
}

static void disarm(struct kvdev_vhost *v)
{
    uint64_t count;
    v->is_armed = 0;
    for (uint32_t i = 0; i < v->params.queue_count; i++)
        suppress(v, &v->rings[i]);
    ssize_t got = read(v->call_fd, &count, sizeof count);
    (void)got; /* nothing there: something else woke the queue */
}

static int vhost_receive(void *object, uint64_t now)
{
    struct kvdev_vhost *v = object;
    int has_moved = 0;
    if (v->info.state != KVDEV_VHOST_READY)
        return 0;
    if (v->is_armed)
        disarm(v);
    for (uint32_t i = 0; i < v->params.queue_count && v->info.state == KVDEV_VHOST_READY; i++)
        if (v->rings[i].in_flight_count)
            has_moved |= reap(v, &v->rings[i]);
    if (v->info.state == KVDEV_VHOST_READY && now >= v->look_ns)
        look(v, now);
    if (v->info.state != KVDEV_VHOST_READY)
        return 1;
    return has_moved;
}

static uint64_t vhost_deadlines(void *object, uint64_t now)
{
    struct kvdev_vhost *v = object;
    if (!v->info.in_flight_count)
        v->deadline_min_ns = UINT64_MAX;
    if (now < v->deadline_min_ns)
        return v->deadline_min_ns;
    reap_rest(v);
    uint64_t soonest = UINT64_MAX;
    for (uint32_t i = 0; i < v->params.queue_count; i++)
        for (uint32_t slot = 0; slot < v->layout.slot_count; slot++) {
            const struct request *r = &v->rings[i].requests[slot];
            if (r->is_in_flight && r->deadline_ns < soonest)
                soonest = r->deadline_ns;
        }
    v->deadline_min_ns = soonest;
    if (now >= soonest)
        kill_saying(v, KVDEV_VHOST_FAULT_TIMEOUT, -ENOTCONN, "a command did not end within its time limit");
    return v->info.state == KVDEV_VHOST_DEAD ? UINT64_MAX : soonest;
}

static int vhost_wait(void *object, struct pollfd *fds)
{
    struct kvdev_vhost *v = object;
    if (v->info.state != KVDEV_VHOST_READY)
        return 0;
    v->is_armed = 1;
    for (uint32_t i = 0; i < v->params.queue_count; i++) {
        struct ring *ring = &v->rings[i];
        if (v->params.has_event_idx)
            shared_store16(used_event_at(v, ring), ring->last_used);
        else
            shared_store16(&ring->avail[0], 0);
    }
    /* The wish must be visible before we look for the last time (2.7.7.2). */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < v->params.queue_count; i++)
        if (v->rings[i].in_flight_count &&
            shared_load16(&v->rings[i].used[1], __ATOMIC_RELAXED) != v->rings[i].last_used)
            return -EAGAIN;
    v->info.wakes++;
    v->look_ns = 0;
    fds[0] = (struct pollfd){ .fd = v->call_fd, .events = POLLIN };
    fds[1] = (struct pollfd){ .fd = v->socket_fd, .events = POLLIN };
    int has_channel = v->channel_fd >= 0 && !v->info.has_backend_message;
    if (has_channel)
        fds[2] = (struct pollfd){ .fd = v->channel_fd, .events = POLLIN };
    return has_channel ? 3 : 2;
}

static void vhost_give_up(void *object, int error)
{
    kill_saying(object, KVDEV_VHOST_FAULT_LOCAL, error, "given up");
}

static uint32_t vhost_outstanding(const void *object)
{
    return ((const struct kvdev_vhost *)object)->info.in_flight_count;
}

static int vhost_is_alive(const void *object)
{
    uint32_t state = ((const struct kvdev_vhost *)object)->info.state;
    return state == KVDEV_VHOST_READY || state == KVDEV_VHOST_HELD;
}

static int vhost_wants_attention(const void *object)
{
    return ((const struct kvdev_vhost *)object)->wants_attention;
}

static int vhost_attach(void *object, kvdev_queue_done_fn *done, void *owner)
{
    struct kvdev_vhost *v = object;
    if (v->done)
        return -EBUSY;
    v->done = done;
    v->owner = owner;
    v->holder_count++;
    v->info.is_attached = 1;
    return 0;
}

static void vhost_detach(void *object)
{
    struct kvdev_vhost *v = object;
    if (v->info.in_flight_count)
        kill_saying(v, KVDEV_VHOST_FAULT_LOCAL, -ENOTCONN, "given up");
    v->done = NULL;
    v->owner = NULL;
    v->info.is_attached = 0;
    drop(v);
}

static const struct kvdev_queue_driver driver = {
    .attach = vhost_attach,
    .detach = vhost_detach,
    .check = vhost_check,
    .start = vhost_start,
    .send = vhost_send,
    .receive = vhost_receive,
    .deadlines = vhost_deadlines,
    .wait = vhost_wait,
    .give_up = vhost_give_up,
    .outstanding = vhost_outstanding,
    .is_alive = vhost_is_alive,
    .wants_attention = vhost_wants_attention,
};

int kvdev_vhost_attach(struct kvdev_vhost *v, struct kvdev_queue *queue, uint32_t *ret)
{
    return kvdev_queue_device_add(queue, &driver, v, ret);
}

int kvdev_vhost_succeed(struct kvdev_vhost *v, struct kvdev_queue *queue, uint32_t device_index)
{
    return kvdev_queue_device_replace(queue, device_index, v);
}

/* ---- reading state ---- */

void kvdev_vhost_capacity_set(struct kvdev_vhost *v, uint64_t block_count)
{
    v->params.block_count = block_count;
}

void kvdev_vhost_info_read(const struct kvdev_vhost *v, struct kvdev_vhost_info *ret)
{
    *ret = v->info;
}

void kvdev_vhost_fault_read(const struct kvdev_vhost *v, struct kvdev_vhost_fault *ret)
{
    *ret = v->fault;
}

size_t kvdev_vhost_spans_read(const struct kvdev_vhost *v, struct kvdev_vhost_span *spans, size_t max)
{
    size_t count = v->info.span_count < max ? v->info.span_count : max;
    memcpy(spans, v->spans, count * sizeof *spans);
    return count;
}

void kvdev_vhost_attention_clear(struct kvdev_vhost *v)
{
    v->wants_attention = 0;
    v->info.has_backend_message = 0;
}

#include "probe_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define RANGE_BYTES 16u               /* of a deallocate command's payload */

/* Making a probe, generating its I/Os, handing them to the queue or to memory, taking them back. */

size_t kvdev_probe_params_size(void)
{
    return sizeof(struct kvdev_probe_params);
}

size_t kvdev_probe_result_size(void)
{
    return sizeof(struct kvdev_probe_result);
}

/* ---- making ---- */

static int params_check(const struct kvdev_probe_params *p)
{
    uint32_t block = p->block_size_bytes;
    if (!block || !p->member_count || p->member_count > KVDEV_PROBE_MEMBERS_MAX || !p->depth ||
        p->depth > KVDEV_PROBE_DEPTH_MAX || !(p->has[0] || p->has[1] || p->has[2]))
        return -EINVAL;
    if (p->member_count > 1 && (!p->strip_size_bytes || p->strip_size_bytes % block))
        return -EINVAL;
    if (p->pattern_size > KVDEV_PROBE_PATTERN_MAX || p->start % block || !p->batch_submit || !p->loops ||
        (p->verify && (!p->verify_interval || (p->verify == KVDEV_PROBE_VERIFY_PATTERN && !p->pattern_size))))
        return -EINVAL;
    for (int way = 0; way < 3; way++) {
        const struct kvdev_probe_blocks *b = &p->blocks[way];
        if (!p->has[way])
            continue;
        if (!b->low || b->low > b->high || b->low % block || b->align % block || !b->align || p->size < b->low ||
            b->high > UINT32_MAX || b->high > p->buffer_stride || b->split_count > KVDEV_PROBE_SPLITS_MAX)
            return -EINVAL;
        for (uint32_t i = 0; i < b->split_count; i++)
            if (b->split_size[i] % block || b->split_size[i] > b->high || b->split_size[i] < b->low)
                return -EINVAL;
    }
    if (p->log_capacity && p->log_capacity < 2 * p->depth + 16)
        return -EINVAL;
    return 0;
}

/* The most commands that an I/O becomes, wherever it starts; a flush is one for each member. */
static uint64_t pieces_of(const struct kvdev_probe_params *p, const struct kvdev_probe_member *members)
{
    uint64_t high = 0, limit = p->member_count > 1 ? p->strip_size_bytes : UINT64_MAX;
    for (int way = 0; way < 3; way++)
        if (p->has[way] && p->blocks[way].high > high)
            high = p->blocks[way].high;
    for (uint32_t i = 0; i < p->member_count; i++)
        if (members[i].max_transfer_bytes < limit)
            limit = members[i].max_transfer_bytes;
    uint64_t pieces = (high + limit - 1) / limit + 1;
    /* A transfer limit that does not divide a strip cuts each strip anew. */
    if (p->member_count > 1 && p->strip_size_bytes % limit)
        pieces = (high / p->strip_size_bytes + 2) * ((p->strip_size_bytes + limit - 1) / limit);
    return pieces > p->member_count ? pieces : p->member_count;
}

static int arrays_create(struct kvdev_probe *probe)
{
    uint32_t depth = probe->params.depth, pieces = probe->piece_max;
    probe->slots = calloc(depth, sizeof *probe->slots);
    probe->free_slots = calloc(depth, sizeof *probe->free_slots);
    probe->batch_slots = calloc(depth, sizeof *probe->batch_slots);
    probe->ready = calloc(depth, sizeof *probe->ready);
    probe->ios = calloc((size_t)depth * pieces, sizeof *probe->ios);
    probe->dones = calloc((size_t)depth * pieces, sizeof *probe->dones);
    if (probe->params.log_capacity)
        probe->log = calloc(probe->params.log_capacity, sizeof *probe->log);
    if (!probe->slots || !probe->free_slots || !probe->batch_slots || !probe->ready || !probe->ios || !probe->dones ||
        (probe->params.log_capacity && !probe->log))
        return -ENOMEM;
    for (uint32_t i = 0; i < depth; i++) {
        probe->slots[i].buffer = (uint8_t *)(uintptr_t)(probe->params.buffer_addr + i * probe->params.buffer_stride);
        probe->free_slots[probe->free_count++] = depth - 1 - i;
    }
    return probe_sequence_init(&probe->sequence, &probe->params);
}

/* Payload of writes that are not verified is written once: touching it for each write would be measured with it. */
static void buffers_fill(struct kvdev_probe *probe)
{
    struct kvdev_probe_params *p = &probe->params;
    if (!p->has[KVDEV_PROBE_WRITE] || p->verify)
        return;
    for (uint32_t i = 0; i < p->depth; i++) {
        if (p->is_pattern_filled && p->pattern_size)
            probe_fill_pattern(p, probe->slots[i].buffer, p->buffer_stride);
        else if (!p->is_pattern_filled)
            probe_fill_random(probe->slots[i].buffer, p->buffer_stride, p->seed + i);
    }
}

int kvdev_probe_create(const struct kvdev_probe_params *params, const struct kvdev_probe_member *members,
                       struct kvdev_queue *queue, struct kvdev_probe **ret)
{
    int error = params_check(params);
    if (error)
        return error;
    uint64_t pieces = pieces_of(params, members);
    if (pieces > KVDEV_PROBE_PIECES_MAX)
        return -E2BIG;
    struct kvdev_probe *probe = calloc(1, sizeof *probe);
    if (!probe)
        return -ENOMEM;
    probe->params = *params;
    probe->queue = queue;
    probe->piece_max = (uint32_t)pieces;
    probe->members = calloc(params->member_count, sizeof *probe->members);
    error = probe->members ? arrays_create(probe) : -ENOMEM;
    if (error) {
        kvdev_probe_destroy(probe);
        return error;
    }
    memcpy(probe->members, members, params->member_count * sizeof *members);
    for (uint32_t i = 0; i < params->member_count; i++) {
        if (!members[i].memory_addr && !queue) {
            kvdev_probe_destroy(probe);
            return -EINVAL;
        }
    }
    probe->depth_limit = params->latency_target_ns ? 1 : params->depth;
    probe->target_high = params->depth + 1;
    probe->verify_ios = UINT64_MAX;
    probe_random_seed(&probe->rate_random, params->seed ^ 0x72617465u);
    buffers_fill(probe);
    *ret = probe;
    return 0;
}

void kvdev_probe_destroy(struct kvdev_probe *probe)
{
    if (!probe)
        return;
    probe_sequence_deinit(&probe->sequence);
    free(probe->members);
    free(probe->slots);
    free(probe->free_slots);
    free(probe->batch_slots);
    free(probe->ready);
    free(probe->ios);
    free(probe->dones);
    free(probe->log);
    free(probe);
}

void kvdev_probe_start_set(struct kvdev_probe *probe, uint64_t start_ns)
{
    probe->params.start_ns = start_ns;
}

void kvdev_probe_stop(struct kvdev_probe *probe)
{
    atomic_store(&probe->stop, 1);
}

const struct kvdev_probe_result *kvdev_probe_result_read(const struct kvdev_probe *probe)
{
    return &probe->result;
}

size_t kvdev_probe_log_take(struct kvdev_probe *probe, struct kvdev_probe_log_entry *entries, size_t max)
{
    size_t count = 0;
    while (count < max && probe->log_count) {
        entries[count++] = probe->log[probe->log_head];
        probe->log_head = (probe->log_head + 1) % probe->params.log_capacity;
        probe->log_count--;
    }
    return count;
}

/* ---- generating ---- */

int probe_put_off_take(struct kvdev_probe *probe, uint32_t way, struct probe_io *io)
{
    if (!probe->is_put_off[way])
        return 0;
    probe->is_put_off[way] = 0;
    *io = probe->put_off[way];
    return 1;
}

static int has_reached_end(const struct kvdev_probe *probe)
{
    const struct kvdev_probe_params *p = &probe->params;
    const struct probe_progress *at = &probe->progress;
    return at->is_over || (p->number_ios && at->ios >= p->number_ios) || at->ios >= probe->verify_ios ||
           (p->io_size && at->bytes >= p->io_size * p->loops);
}

int probe_generate_way(struct kvdev_probe *probe, uint32_t way, struct probe_io *io)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct probe_progress *at = &probe->progress;
    if (has_reached_end(probe))
        return 0;
    if (!probe_sequence_next(&probe->sequence, way, io)) {
        at->loops++;
        /* Passed once: again when time or io_size ask for more than the region, or for the next loop. */
        if (p->io_size && p->io_size <= p->size && at->loops >= p->loops) {
            at->is_over = 1;
            return 0;
        }
        probe_sequence_loop(&probe->sequence);
        if (!probe_sequence_next(&probe->sequence, way, io)) {
            at->is_over = 1;
            return 0;
        }
    }
    at->bytes += io->length;
    at->ios++;
    return 1;
}

int probe_generate(struct kvdev_probe *probe, struct probe_io *io)
{
    const struct kvdev_probe_params *p = &probe->params;
    if (has_reached_end(probe))
        return probe_put_off_take(probe, KVDEV_PROBE_READ, io) || probe_put_off_take(probe, KVDEV_PROBE_WRITE, io);
    uint32_t way = probe_sequence_way(&probe->sequence);
    if (p->has[KVDEV_PROBE_TRIM] && p->has[KVDEV_PROBE_WRITE])
        way = probe->progress.ios % 2 ? KVDEV_PROBE_WRITE : KVDEV_PROBE_TRIM;
    if (probe_put_off_take(probe, way, io) || probe_generate_way(probe, way, io))
        return 1;
    return probe_put_off_take(probe, KVDEV_PROBE_READ, io) || probe_put_off_take(probe, KVDEV_PROBE_WRITE, io);
}

size_t kvdev_probe_preview(struct kvdev_probe *probe, size_t count, uint64_t *offsets, uint64_t *lengths,
                           uint8_t *ways)
{
    struct probe_io io;
    size_t found = 0;
    while (found < count && probe_generate(probe, &io)) {
        offsets[found] = io.offset;
        lengths[found] = io.length;
        ways[found++] = (uint8_t)io.way;
    }
    return found;
}

/* ---- issuing ---- */

static uint8_t opcode_of(const struct probe_slot *slot)
{
    if (slot->kind == KIND_SYNC)
        return 0x00; /* flush */
    if (slot->kind == KIND_VERIFY || slot->way == KVDEV_PROBE_READ)
        return 0x02;
    return slot->way == KVDEV_PROBE_WRITE ? 0x01 : 0x09;
}

static void memory_move(const struct kvdev_probe_member *member, const struct probe_slot *slot, uint64_t at, uint8_t *buffer,
                        uint64_t length)
{
    uint8_t *place = (uint8_t *)(uintptr_t)(member->memory_addr + at);
    switch (opcode_of(slot)) {
    case 0x02:
        memcpy(buffer, place, (size_t)length);
        break;
    case 0x01:
        memcpy(place, buffer, (size_t)length);
        break;
    default: /* memory has no cache to flush, and deallocation is advice */
        break;
    }
}

static void piece_put(struct kvdev_probe *probe, uint32_t slot_index, uint32_t member_index, uint64_t at,
                      uint8_t *buffer, uint64_t length)
{
    struct probe_slot *slot = &probe->slots[slot_index];
    const struct kvdev_probe_member *member = &probe->members[member_index];
    if (member->memory_addr) {
        memory_move(member, slot, at, buffer, length);
        return;
    }
    uint32_t block = probe->params.block_size_bytes;
    uint32_t piece = slot->remaining++;
    struct kvdev_io *io = &probe->ios[probe->io_count++];
    *io = (struct kvdev_io){
        .tag = slot_index,
        .device_index = member->device_index,
        .opcode = opcode_of(slot),
    };
    if (slot->kind == KIND_SYNC)
        return;
    if (io->opcode == 0x09) {
        uint32_t attributes = 0, block_count = (uint32_t)(length / block);
        uint64_t slba = at / block;
        uint8_t *range = slot->buffer + (size_t)piece * RANGE_BYTES;
        memcpy(range, &attributes, 4);
        memcpy(range + 4, &block_count, 4);
        memcpy(range + 8, &slba, 8);
        io->buf_addr = (uint64_t)(uintptr_t)range;
        io->byte_count = RANGE_BYTES;
        io->flags = KVDEV_IO_DEALLOCATE;
        return;
    }
    io->slba = at / block;
    io->lba_count = (uint32_t)(length / block);
    io->byte_count = (uint32_t)length;
    io->buf_addr = (uint64_t)(uintptr_t)buffer;
}

/* Cuts an I/O at strips and at what a device takes at once. */
static void pieces_put(struct kvdev_probe *probe, uint32_t slot_index)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct probe_slot *slot = &probe->slots[slot_index];
    if (slot->kind == KIND_SYNC) {
        for (uint32_t i = 0; i < p->member_count; i++)
            piece_put(probe, slot_index, i, 0, NULL, 0);
        return;
    }
    uint64_t at = slot->offset, end = slot->offset + slot->length;
    while (at < end) {
        uint64_t place = at, take = end - at;
        uint32_t member = 0;
        if (p->member_count > 1) {
            uint64_t strip = at / p->strip_size_bytes, within = at % p->strip_size_bytes;
            member = (uint32_t)(strip % p->member_count);
            place = strip / p->member_count * p->strip_size_bytes + within;
            if (take > p->strip_size_bytes - within)
                take = p->strip_size_bytes - within;
        }
        if (opcode_of(slot) != 0x09 && take > probe->members[member].max_transfer_bytes)
            take = probe->members[member].max_transfer_bytes;
        piece_put(probe, slot_index, member, place, slot->buffer + (at - slot->offset), take);
        at += take;
    }
}

void probe_prepare(struct kvdev_probe *probe, uint32_t kind, const struct probe_io *io)
{
    const struct kvdev_probe_params *p = &probe->params;
    uint32_t index = probe->free_slots[--probe->free_count];
    struct probe_slot *slot = &probe->slots[index];
    slot->start_ns = probe_now_ns();
    slot->kind = kind;
    slot->way = io ? io->way : KVDEV_PROBE_WRITE;
    slot->offset = io ? p->start + io->offset : 0;
    slot->length = io ? io->length : 0;
    slot->remaining = 0;
    slot->error = 0;
    slot->status = 0;
    if (kind == KIND_IO && slot->way == KVDEV_PROBE_WRITE && p->verify)
        probe_fill_verified(p, slot->buffer, slot->offset, slot->length, p->seed ^ (++probe->payload_seed << 20));
    probe->batch_slots[probe->batch_count++] = index;
}

/* Hands the batch over, and has the queue send it. */
int probe_batch_submit(struct kvdev_probe *probe)
{
    struct kvdev_probe_result *r = &probe->result;
    uint32_t count = probe->batch_count;
    if (!count)
        return 0;
    probe->io_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct probe_slot *slot = &probe->slots[probe->batch_slots[i]];
        pieces_put(probe, probe->batch_slots[i]);
        slot->is_inline = !slot->remaining;
    }
    if (probe->io_count) {
        int error = kvdev_queue_submit(probe->queue, probe->ios, probe->io_count);
        size_t none;
        if (error)
            return error;
        kvdev_queue_poll(probe->queue, probe->dones, 0, 0, 0, &none);
    }
    uint64_t now = probe_now_ns();
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = probe->batch_slots[i];
        struct probe_slot *slot = &probe->slots[index];
        slot->issue_ns = now;
        probe->in_flight++;
        if (slot->kind == KIND_IO || slot->kind == KIND_VERIFY)
            r->depth_map[probe_depth_index(probe->in_flight)]++;
        if (slot->is_inline)
            probe->ready[(probe->ready_head + probe->ready_count++) % probe->params.depth] = index;
    }
    r->submit_count++;
    r->submit_map[probe_batch_index(count)]++;
    r->in_flight = probe->in_flight;
    probe->batch_count = 0;
    return 0;
}

/* ---- completing ---- */

static int continues_after(const struct kvdev_probe_params *p, const struct probe_slot *slot)
{
    if (slot->kind == KIND_VERIFY || slot->way == KVDEV_PROBE_READ)
        return p->continues_on & KVDEV_PROBE_CONTINUE_READ;
    return p->continues_on & KVDEV_PROBE_CONTINUE_WRITE;
}

static void error_note(struct kvdev_probe *probe, const struct probe_slot *slot, int error)
{
    struct kvdev_probe_result *r = &probe->result;
    if (!r->error_count++) {
        r->first_error = error;
        r->first_status = slot->status;
        r->first_error_offset = slot->offset;
        r->first_way = (uint8_t)(slot->kind == KIND_SYNC ? 3 : slot->kind == KIND_VERIFY ? 0 : slot->way);
    }
}

void probe_end_with(struct kvdev_probe *probe, uint8_t reason)
{
    if (!probe->result.end_reason)
        probe->result.end_reason = reason;
    atomic_store(&probe->stop, 1);
}

static void payload_check(struct kvdev_probe *probe, const struct probe_slot *slot)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct kvdev_probe_result *r = &probe->result;
    int is_own = slot->kind == KIND_VERIFY && !p->is_verify_only;
    struct probe_bad bad;
    probe_check(p, slot->buffer, slot->offset, slot->length, is_own, &bad);
    r->verified_bytes += slot->length;
    if (!bad.count)
        return;
    if (!r->bad_count) {
        r->bad_offset = bad.offset;
        r->bad_interval = bad.interval;
        r->bad_reason = (uint8_t)bad.reason;
    }
    r->bad_count += bad.count;
    error_note(probe, slot, EILSEQ);
    if (p->is_verify_fatal)
        probe_end_with(probe, KVDEV_PROBE_END_ERROR);
}

static void log_put(struct kvdev_probe *probe, const struct probe_slot *slot, uint32_t way, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    if (!p->log_capacity)
        return;
    uint32_t at = (probe->log_head + probe->log_count++) % p->log_capacity;
    uint64_t began = probe->result.began_ns;
    probe->log[at] = (struct kvdev_probe_log_entry){
        .time_ns = now > began ? now - began : 0,
        .slat_ns = slot->issue_ns - slot->start_ns,
        .clat_ns = now - slot->issue_ns,
        .lat_ns = now - slot->start_ns,
        .offset = slot->offset,
        .byte_count = (uint32_t)slot->length,
        .way = way,
    };
}

static void account(struct kvdev_probe *probe, const struct probe_slot *slot, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct kvdev_probe_result *r = &probe->result;
    uint64_t slat = slot->issue_ns - slot->start_ns, clat = now - slot->issue_ns, lat = now - slot->start_ns;
    if (slot->kind == KIND_SYNC) {
        if (probe->phase == PHASE_RUN) /* the last one, of end_fsync, is none of the job's I/Os */
            kvdev_probe_lat_add(&r->sync, lat);
        return;
    }
    uint32_t way = slot->kind == KIND_VERIFY ? KVDEV_PROBE_READ : slot->way;
    r->bytes[way] += slot->length;
    r->ios[way]++;
    if (p->has_slat)
        kvdev_probe_lat_add(&r->slat[way], slat);
    if (p->has_clat) {
        kvdev_probe_lat_add(&r->clat[way], clat);
        probe_spread_add(r, clat);
    }
    if (p->has_lat)
        kvdev_probe_lat_add(&r->lat[way], lat);
    log_put(probe, slot, way, now);
    if (p->max_latency_ns[way] && lat > p->max_latency_ns[way]) {
        error_note(probe, slot, ETIMEDOUT);
        probe_end_with(probe, KVDEV_PROBE_END_LATENCY);
    }
    if (p->latency_target_ns) {
        probe->target_ios++;
        probe->target_late += lat > p->latency_target_ns;
    }
}

static void complete(struct kvdev_probe *probe, uint32_t index, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct probe_slot *slot = &probe->slots[index];
    probe->in_flight--;
    if (slot->error) {
        error_note(probe, slot, slot->error);
        if (!continues_after(p, slot))
            probe_end_with(probe, KVDEV_PROBE_END_ERROR);
    } else {
        account(probe, slot, now);
        int is_read = slot->kind == KIND_IO && slot->way == KVDEV_PROBE_READ && !p->has[KVDEV_PROBE_WRITE];
        if (p->verify && (slot->kind == KIND_VERIFY || is_read))
            payload_check(probe, slot);
        if (!p->is_thinktime_issue)
            probe->think_count += slot->kind == KIND_IO;
    }
    probe->free_slots[probe->free_count++] = index;
}

/* Takes completions until `want` I/Os are done or timeout_ns has passed; how many. */
uint32_t probe_reap(struct kvdev_probe *probe, uint32_t want, uint32_t most, uint64_t timeout_ns)
{
    struct kvdev_probe_result *r = &probe->result;
    uint32_t count = 0;
    while (probe->ready_count && count < most) {
        uint32_t index = probe->ready[probe->ready_head];
        probe->ready_head = (probe->ready_head + 1) % probe->params.depth;
        probe->ready_count--;
        complete(probe, index, probe_now_ns());
        count++;
    }
    uint64_t deadline = 0;
    while (probe->queue && count < most && probe->in_flight > probe->ready_count) {
        size_t got = 0;
        uint64_t left = timeout_ns;
        if (deadline) {
            uint64_t now = probe_now_ns();
            left = deadline > now ? deadline - now : 0;
        }
        kvdev_queue_poll(probe->queue, probe->dones, (size_t)(most - count), count < want ? 1 : 0,
                         count < want ? left : 0, &got);
        uint64_t now = probe_now_ns();
        for (size_t i = 0; i < got; i++) {
            struct probe_slot *slot = &probe->slots[probe->dones[i].tag];
            if (probe->dones[i].error && !slot->error) {
                slot->error = -probe->dones[i].error;
                slot->status = probe->dones[i].status;
            }
            if (--slot->remaining == 0) {
                complete(probe, (uint32_t)probe->dones[i].tag, now);
                count++;
            }
        }
        if (count >= want || (!got && !left) || kvdev_queue_attention(probe->queue))
            break;
        if (!deadline)
            deadline = now + timeout_ns;
        if (now >= deadline)
            break;
    }
    if (count) {
        r->complete_count++;
        r->complete_map[probe_batch_index(count)]++;
    }
    r->in_flight = probe->in_flight;
    return count;
}


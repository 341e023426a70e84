/* How a command goes to an NVMe/TCP namespace: what is refused, which queue pair takes it, its SQE. */
#include "queue_int.h"

#include <string.h>

#define BLOCKS_MAX 65536u                /* NLB is 16 bits, 0's based */
#define IDLE_CHECK_NS 5000000ull         /* an idle connection is looked at before it is trusted again */
#define DSM_RANGES_MAX 256u
#define DSM_RANGE_BYTES 16u
#define COPY_RANGE_BYTES 32u
#define COPY_RANGES_MAX 256u
#define CDW12_FUA (1u << 30)
#define CDW12_DEAC (1u << 25)
#define CDW11_DSM_DEALLOCATE (1u << 2)

static int is_payload_opcode(uint8_t opcode)
{
    return opcode == OPC_WRITE || opcode == OPC_READ || opcode == OPC_COMPARE;
}

static uint32_t namespace_check(const struct device *device, const struct kvdev_io *io)
{
    const struct kvdev_queue_namespace *ns = &device->ns;
    uint8_t opcode = io->opcode;
    if (!is_payload_opcode(opcode) && opcode != OPC_FLUSH && opcode != OPC_WRITE_ZEROES && opcode != OPC_DSM &&
        opcode != OPC_VERIFY && opcode != OPC_COPY)
        return KVDEV_REFUSED_OPCODE;
    if (opcode == OPC_FLUSH)
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if (opcode == OPC_DSM && io->byte_count) {
        if (io->byte_count % DSM_RANGE_BYTES || io->byte_count > DSM_RANGES_MAX * DSM_RANGE_BYTES)
            return KVDEV_REFUSED_LENGTH;
        return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
    }
    if (!io->lba_count || (opcode != OPC_DSM && io->lba_count > BLOCKS_MAX))
        return KVDEV_REFUSED_COUNT;
    if (io->slba > ns->block_count || io->lba_count > ns->block_count - io->slba)
        return KVDEV_REFUSED_RANGE;
    if (opcode == OPC_COPY) {
        if (!io->byte_count || io->byte_count % COPY_RANGE_BYTES || io->byte_count > COPY_RANGES_MAX * COPY_RANGE_BYTES)
            return KVDEV_REFUSED_LENGTH;
        return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
    }
    if (!is_payload_opcode(opcode))
        return io->byte_count ? KVDEV_REFUSED_LENGTH : KVDEV_REFUSED_NONE;
    if ((uint64_t)io->lba_count * ns->block_size_bytes != io->byte_count)
        return KVDEV_REFUSED_LENGTH;
    if (ns->max_transfer_bytes && io->byte_count > ns->max_transfer_bytes)
        return KVDEV_REFUSED_TRANSFER;
    return io->buf_addr ? KVDEV_REFUSED_NONE : KVDEV_REFUSED_BUFFER;
}

/* The ready queue pair with the fewest bytes in flight that takes so many more; NULL if none does. */
static struct path *path_choose(struct kvdev_queue *q, struct device *device, uint32_t bytes, uint32_t slots,
                                uint64_t now, int *is_any_ready)
{
    struct path *best = NULL;
    uint32_t best_bytes = UINT32_MAX;
    uint32_t count = device->active_count;
    uint32_t first = 0;
    *is_any_ready = 0;
    if (device->recovery.policy == KVDEV_PATHS_ROUND_ROBIN && count)
        first = device->turn % count;
    for (uint32_t i = 0; i < count && i < device->active_count; i++) {
        uint32_t at = first + i < count ? first + i : first + i - count;
        struct path *path = &q->paths[device->active[at]];
        if (!path->qp || !qpair_is_ready(path->qp))
            continue;
        if (!path->qp->outstanding && now > path->last_done_ns + IDLE_CHECK_NS) {
            /* It may have been closed while nobody looked; a command sent into that would have an unknown fate. */
            kvdev_qpair_receive(path->qp);
            path->last_done_ns = now;
            if (!qpair_is_ready(path->qp))
                continue;
        }
        *is_any_ready = 1;
        uint32_t in_flight = path->qp->in_flight_bytes;
        int fits = !in_flight || (in_flight <= q->options.window_size_bytes &&
                                  bytes <= q->options.window_size_bytes - in_flight);
        if (path->is_blocked || !fits || qpair_room(path->qp) < slots || in_flight >= best_bytes)
            continue;
        best = path;
        best_bytes = in_flight;
        if (device->recovery.policy == KVDEV_PATHS_ROUND_ROBIN) {
            device->turn = at + 1;
            break;
        }
    }
    return best;
}

/* A queue pair of one controller, whatever else is in flight on it. */
static struct path *path_of_controller(struct kvdev_queue *q, uint32_t controller)
{
    for (uint32_t i = 0; i < q->path_count; i++) {
        struct path *path = &q->paths[i];
        if (path->qp && path->controller == controller && qpair_room(path->qp))
            return path;
    }
    return NULL;
}

void queue_sqe_build(const struct device *device, const struct kvdev_io *io, uint8_t *wire)
{
    uint32_t nlb_0based = io->lba_count - 1;
    memset(wire, 0, KVDEV_SQE_BYTES);
    wire[0] = io->opcode;
    kvdev_store_le32(wire + 4, device->ns.nsid);
    if (io->opcode == OPC_FLUSH)
        return;
    if (io->opcode == OPC_DSM) {
        kvdev_store_le32(wire + 40, io->byte_count ? io->byte_count / DSM_RANGE_BYTES - 1 : 0);
        kvdev_store_le32(wire + 44, CDW11_DSM_DEALLOCATE);
        return;
    }
    if (io->opcode == OPC_COPY)
        nlb_0based = io->byte_count / COPY_RANGE_BYTES - 1;
    if ((io->flags & KVDEV_IO_FUA) && io->opcode != OPC_COMPARE && io->opcode != OPC_VERIFY)
        nlb_0based |= CDW12_FUA;
    if ((io->flags & KVDEV_IO_DEALLOCATE) && io->opcode == OPC_WRITE_ZEROES)
        nlb_0based |= CDW12_DEAC;
    kvdev_store_le64(wire + 40, io->slba);
    kvdev_store_le32(wire + 48, nlb_0based);
}

/* Both halves one after the other, with nothing between: the first is refused as any command, and the second with it. */
static int passthrough_start(struct kvdev_queue *q, struct path *path, uint32_t index, uint64_t deadline)
{
    const struct node *node = &q->nodes[index];
    struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
    pass->path_index = path->index;
    int error =
        kvdev_qpair_start(path->qp, pass->sqe, pass->data, pass->len, pass->direction, index, deadline);
    uint32_t mate = error ? NODE_NONE : mate_take(q, node);
    if (mate == NODE_NONE)
        return error;
    q->stats.pending_count--;
    q->stats.in_flight_count++;
    pass = &q->passthroughs[q->nodes[mate].passthrough - 1];
    pass->path_index = path->index;
    /* The queue pair had room for two. */
    return kvdev_qpair_start(path->qp, pass->sqe, pass->data, pass->len, pass->direction, mate, deadline);
}

static int namespace_start(struct kvdev_queue *q, struct device *device, uint32_t index, uint64_t now)
{
    struct node *node = &q->nodes[index];
    const struct kvdev_io *io = &node->io;
    int is_any_ready = 0;
    uint32_t bytes = node->passthrough ? q->passthroughs[node->passthrough - 1].len : io->byte_count;
    if (device->error)
        return device->error;
    struct path *path = path_choose(q, device, bytes, is_fused(q, node) ? 2 : 1, now, &is_any_ready);
    if (!path) {
        if (!is_any_ready && (!device->is_recovering || device->is_failed))
            return -ENOTCONN;
        for (uint32_t i = 0; i < device->active_count; i++)
            q->paths[device->active[i]].is_blocked = 1;
        return -EAGAIN;
    }
    if (io->opcode == OPC_FLUSH && !node->passthrough && device->recovery.has_volatile_cache) {
        uint32_t controller = queue_flush_controller(q, device);
        if (controller != CONTROLLER_NONE && controller != path->controller)
            path = path_of_controller(q, controller);
        if (!path)
            return -EAGAIN;
    }
    uint64_t deadline = node->deadline_ns ? node->deadline_ns : add_ns(now, q->options.command_timeout_ns);
    if (node->passthrough)
        return passthrough_start(q, path, index, deadline);
    uint8_t sqe[KVDEV_SQE_BYTES];
    queue_sqe_build(device, io, sqe);
    if (io->opcode == OPC_DSM && !io->byte_count) {
        uint8_t range[DSM_RANGE_BYTES] = { 0 };
        kvdev_store_le32(range + 4, io->lba_count);
        kvdev_store_le64(range + 8, io->slba);
        return kvdev_qpair_start_inline(path->qp, sqe, range, sizeof range, index, deadline);
    }
    uint32_t direction = !io->byte_count ? KVDEV_DIR_NONE : io->opcode == OPC_READ ? KVDEV_DIR_C2H : KVDEV_DIR_H2C;
    return kvdev_qpair_start(path->qp, sqe, io->byte_count ? (void *)(uintptr_t)io->buf_addr : NULL, io->byte_count,
                             direction, index, deadline);
}

static int namespace_is_alive(const struct kvdev_queue *q, const struct device *device)
{
    for (uint32_t i = 0; i < device->active_count; i++) {
        const struct kvdev_qpair *qp = q->paths[device->active[i]].qp;
        if (qp && qpair_is_ready(qp))
            return 1;
    }
    return 0;
}

const struct device_ops queue_namespace_ops = { namespace_check, namespace_start, namespace_is_alive };

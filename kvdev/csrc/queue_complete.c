/* A command has ended: what its caller, its group and the counters hear of it. */
#include "queue_int.h"

#include <string.h>

#include "crc32c.h"

#define CRC_WHOLE_MAX ((uint64_t)256 << 10) /* a span that stays in the second-level cache until its last piece */

/* One piece's part of its group's checksum: its own CRC, moved to where the piece stands; all of them add up to the CRC of
 * the span. So a long page is read while each piece is in the cache and the others are on their way: at its end it would
 * be out of reach, and the device idle for as long as that pass takes. */
static void crc_add(struct kvdev_io_group *group, const struct kvdev_io *io)
{
    uint64_t span_end = group->buf_addr + group->byte_count;
    uint64_t start = io->buf_addr > group->buf_addr ? io->buf_addr : group->buf_addr;
    uint64_t end = io->buf_addr + io->byte_count;
    if (end > span_end)
        end = span_end;
    if (start < end)
        group->crc32c ^= kvdev_crc32c_combine(kvdev_crc32c(0, (const void *)(uintptr_t)start, end - start), 0,
                                              span_end - end);
}

static void crc_note(struct kvdev_io_group *group, const struct kvdev_io *io)
{
    if (group->error)
        group->crc32c = 0;
    else if (group->byte_count > CRC_WHOLE_MAX)
        crc_add(group, io);
    else if (group->remaining == 1) /* now, while the page is still in the cache */
        group->crc32c = kvdev_crc32c(0, (const void *)(uintptr_t)group->buf_addr, group->byte_count);
}

static void group_count_down(const struct node *node)
{
    struct kvdev_io_group *group = (struct kvdev_io_group *)(uintptr_t)node->io.group_addr;
    if (node->error && !group->error) {
        group->error = node->error;
        group->status = node->status;
    }
    if (!group->remaining)
        return;
    if (group->flags & KVDEV_GROUP_CRC32C)
        crc_note(group, &node->io);
    if (group->remaining == 1)
        group->complete_ns = node->complete_ns;
    /* Last: whoever sees 0 finds the rest of the group written. */
    __atomic_store_n(&group->remaining, group->remaining - 1, __ATOMIC_RELEASE);
}

void queue_node_done(struct kvdev_queue *q, uint32_t index, int error, uint16_t status, uint32_t result)
{
    struct node *node = &q->nodes[index];
    node->error = error;
    node->status = status;
    node->result = result;
    if (error)
        q->stats.failed++;
    if (node->io.group_addr)
        group_count_down(node);
    if (node->passthrough) {
        struct passthrough *pass = &q->passthroughs[node->passthrough - 1];
        pass->in_use = 0;
        if (pass->half) {
            pass->half->is_done = 1;
            pass->half->error = error;
            pass->half->send_ns = node->send_ns;
            node_give(q, index);
            return;
        }
    }
    list_push(q, &q->done, index);
    q->stats.done_count++;
}

/* The error that is known for certain: a write lost once has an unknown fate until it succeeds. */
int queue_node_error(struct kvdev_queue *q, const struct node *node, int error)
{
    if (!node->is_uncertain)
        return error;
    q->stats.uncertain++;
    return -KVDEV_EUNCERTAIN;
}

/* A pending command that will not be sent (again). */
void queue_node_refuse(struct kvdev_queue *q, uint32_t index, int error, uint64_t now)
{
    struct node *node = &q->nodes[index];
    uint32_t mate = mate_take(q, node);
    if (mate != NODE_NONE)
        queue_node_refuse(q, mate, error, now);
    if (!node->is_uncertain)
        node->send_ns = 0;
    node->complete_ns = now;
    node->qpair_index = QPAIR_NONE;
    q->stats.pending_count--;
    queue_node_done(q, index, queue_node_error(q, node, error), 0, 0);
}

void queue_on_qpair_done(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns,
                          uint64_t at_ns)
{
    struct path *path = owner;
    struct kvdev_queue *q = path->queue;
    uint32_t index = (uint32_t)cookie;
    struct node *node = &q->nodes[index];
    uint16_t status = (uint16_t)(kvdev_load_le16(cqe + 14) >> 1);
    if (send_ns || !node->is_uncertain)
        node->send_ns = send_ns; /* of an uncertain one 0 would say that it never left this host */
    node->complete_ns = at_ns;
    node->qpair_index = (uint16_t)path->index;
    path->last_done_ns = at_ns;
    q->stats.in_flight_count--;
    if (node->passthrough && q->passthroughs[node->passthrough - 1].half)
        memcpy(q->passthroughs[node->passthrough - 1].half->cqe, cqe, KVDEV_CQE_BYTES);
    if (!error && (status & 0x7ff))
        error = -EIO;
    if (error) {
        error = queue_recover(q, path, index, error, status, send_ns, at_ns);
        if (!error)
            return;
    } else if (q->devices[node->io.device_index].recovery.has_volatile_cache &&
               !queue_cache_note(q, path, index, at_ns, &error)) {
        return;
    }
    queue_node_done(q, index, error, status, kvdev_load_le32(cqe));
}

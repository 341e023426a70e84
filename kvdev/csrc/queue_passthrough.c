/* Commands given as an SQE, and the two halves of a compare and write. */
#include "queue_int.h"

#include <string.h>

#define SQE_FUSE_FIRST 0x01u
#define SQE_FUSE_SECOND 0x02u

/* A node with a passthrough entry, on no list yet; NODE_NONE when there is no room. */
static uint32_t passthrough_take(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                                 void *data, uint32_t len, uint32_t direction, uint64_t deadline_ns)
{
    if (!q->free_count)
        return NODE_NONE;
    for (uint32_t i = 0; i < KVDEV_QUEUE_PASSTHROUGH_MAX; i++) {
        struct passthrough *pass = &q->passthroughs[i];
        if (pass->in_use)
            continue;
        *pass = (struct passthrough){
            .data = data, .len = len, .direction = direction, .mate = NODE_NONE, .in_use = 1
        };
        memcpy(pass->sqe, sqe, sizeof pass->sqe);
        uint32_t index = node_take(q);
        struct node *node = &q->nodes[index];
        memset(&node->io, 0, sizeof node->io);
        node->io.tag = tag;
        node->io.device_index = device_index;
        node->submit_ns = now_ns();
        node->deadline_ns = deadline_ns;
        node->passthrough = (uint8_t)(i + 1);
        node->is_uncertain = node->losses = node->retries = 0;
        node->generation = q->devices[device_index].generation;
        q->stats.submitted++;
        q->stats.pending_count++;
        return index;
    }
    return NODE_NONE;
}

static void passthrough_queue(struct kvdev_queue *q, uint32_t device_index, uint32_t index)
{
    list_push_front(q, &q->devices[device_index].pending[0], index);
    device_activate(q, device_index, 0);
}

static int passthrough_add(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe, void *data,
                           uint32_t len, uint32_t direction, struct passthrough **ret, uint64_t deadline_ns)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || q->devices[device_index].ops != &queue_namespace_ops || len & 3 ||
        direction > KVDEV_DIR_H2C || (direction == KVDEV_DIR_NONE) != (len == 0) || (len && !data)) {
        q->refused_reason = KVDEV_REFUSED_NONE;
        return -EINVAL;
    }
    uint32_t index = passthrough_take(q, device_index, tag, sqe, data, len, direction, deadline_ns);
    if (index == NODE_NONE)
        return -EAGAIN;
    *ret = &q->passthroughs[q->nodes[index].passthrough - 1];
    passthrough_queue(q, device_index, index);
    return 0;
}

int kvdev_queue_passthrough(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                            void *data, uint32_t len, uint32_t direction)
{
    struct passthrough *pass = NULL;
    if (queue_enter(q))
        return -EBUSY;
    int error = passthrough_add(q, device_index, tag, sqe, data, len, direction, &pass, 0);
    queue_leave(q);
    return error;
}

/* Takes an execute whose time is over while it is still pending off its list; 1 if it was there. */
static int passthrough_withdraw(struct kvdev_queue *q, uint32_t device_index, const struct passthrough *pass)
{
    struct list *list = &q->devices[device_index].pending[0];
    uint32_t before = NODE_NONE;
    for (uint32_t i = list->head; i != NODE_NONE; before = i, i = q->nodes[i].next) {
        const struct node *node = &q->nodes[i];
        if (!node->passthrough || &q->passthroughs[node->passthrough - 1] != pass)
            continue;
        if (before == NODE_NONE)
            list->head = node->next;
        else
            q->nodes[before].next = node->next;
        if (list->tail == i)
            list->tail = before;
        queue_node_refuse(q, i, -ETIMEDOUT, now_ns());
        return 1;
    }
    return 0;
}

int kvdev_queue_execute(struct kvdev_queue *q, uint32_t device_index, const uint8_t *sqe, void *data, uint32_t len,
                        uint32_t direction, uint64_t timeout_ns, uint8_t *cqe)
{
    int is_done = 0;
    int result = 0;
    struct passthrough *pass = NULL;
    if (queue_visit(q))
        return -EBUSY;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    int error = passthrough_add(q, device_index, 0, sqe, data, len, direction, &pass, deadline);
    if (!error) {
        pass->cqe = cqe;
        pass->is_done = &is_done;
        pass->error = &result;
        for (;;) {
            uint64_t now = now_ns();
            queue_work(q, 0, &is_done, now < deadline ? deadline - now : 0);
            if (is_done || passthrough_withdraw(q, device_index, pass))
                break;
        }
        /* -EIO is a verdict on the command, and that is in the CQE's status. */
        error = result == -EIO ? 0 : result;
    }
    queue_visit_end(q);
    return error;
}

/* ---- compare and write ---- */

/* One half: its node, on no list. */
static uint32_t half_take(struct kvdev_queue *q, uint32_t device_index, const struct kvdev_io *io, uint32_t fuse,
                          uint64_t deadline_ns)
{
    uint8_t sqe[KVDEV_SQE_BYTES];
    queue_sqe_build(&q->devices[device_index], io, sqe);
    sqe[1] |= (uint8_t)fuse;
    uint32_t index = passthrough_take(q, device_index, 0, sqe, (void *)(uintptr_t)io->buf_addr, io->byte_count,
                                      KVDEV_DIR_H2C, deadline_ns);
    if (index != NODE_NONE) {
        q->nodes[index].io.opcode = io->opcode;
        q->passthroughs[q->nodes[index].passthrough - 1].is_fused = 1;
    }
    return index;
}

static void half_give(struct kvdev_queue *q, uint32_t index)
{
    q->passthroughs[q->nodes[index].passthrough - 1].in_use = 0;
    q->stats.submitted--;
    q->stats.pending_count--;
    node_give(q, index);
}

static void half_watch(struct kvdev_queue *q, uint32_t index, struct kvdev_queue_half *half, int *is_done)
{
    struct passthrough *pass = &q->passthroughs[q->nodes[index].passthrough - 1];
    pass->cqe = half->cqe;
    pass->is_done = is_done;
    pass->error = &half->error;
    pass->send_ns = &half->send_ns;
}

int kvdev_queue_compare_and_write(struct kvdev_queue *q, const struct kvdev_io *compare, const struct kvdev_io *write,
                                  uint64_t timeout_ns, struct kvdev_queue_half *compare_ret,
                                  struct kvdev_queue_half *write_ret)
{
    uint32_t device_index = compare->device_index;
    int has_first = 0, has_second = 0;
    if (queue_visit(q))
        return -EBUSY;
    int error = -EINVAL;
    if (compare->opcode == OPC_COMPARE && write->opcode == OPC_WRITE && write->device_index == device_index &&
        !queue_io_refusal(q, compare) && !queue_io_refusal(q, write) && q->devices[device_index].ops == &queue_namespace_ops) {
        uint64_t deadline = add_ns(now_ns(), timeout_ns);
        uint32_t first = half_take(q, device_index, compare, SQE_FUSE_FIRST, deadline);
        uint32_t second =
            first == NODE_NONE ? NODE_NONE : half_take(q, device_index, write, SQE_FUSE_SECOND, deadline);
        error = second == NODE_NONE ? -EAGAIN : 0;
        if (error && first != NODE_NONE)
            half_give(q, first);
        if (!error) {
            struct passthrough *pass = &q->passthroughs[q->nodes[first].passthrough - 1];
            half_watch(q, first, compare_ret, &has_first);
            half_watch(q, second, write_ret, &has_second);
            pass->mate = second;
            passthrough_queue(q, device_index, first);
            while (!has_first || !has_second) {
                uint64_t now = now_ns();
                queue_work(q, 0, has_first ? &has_second : &has_first, now < deadline ? deadline - now : 0);
                if (!has_first)
                    passthrough_withdraw(q, device_index, pass);
            }
        }
    }
    queue_visit_end(q);
    return error;
}

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
                           uint32_t len, uint32_t direction, uint32_t *ret, uint64_t deadline_ns)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || q->devices[device_index].ops != &queue_namespace_ops || len & 3 ||
        direction > KVDEV_DIR_H2C || (direction == KVDEV_DIR_NONE) != (len == 0) || (len && !data)) {
        q->refused_reason = KVDEV_REFUSED_NONE;
        return -EINVAL;
    }
    uint32_t index = passthrough_take(q, device_index, tag, sqe, data, len, direction, deadline_ns);
    if (index == NODE_NONE)
        return -EAGAIN;
    *ret = index;
    passthrough_queue(q, device_index, index);
    return 0;
}

int kvdev_queue_passthrough(struct kvdev_queue *q, uint32_t device_index, uint64_t tag, const uint8_t *sqe,
                            void *data, uint32_t len, uint32_t direction)
{
    uint32_t index = NODE_NONE;
    if (queue_enter(q))
        return -EBUSY;
    int error = passthrough_add(q, device_index, tag, sqe, data, len, direction, &index, 0);
    queue_leave(q);
    return error;
}

/* Ends one that is still pending; 1 if it was. */
static int passthrough_withdraw(struct kvdev_queue *q, uint32_t device_index, const struct passthrough *pass, int error)
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
        queue_node_refuse(q, i, error, now_ns());
        return 1;
    }
    return 0;
}

/* ---- calls ---- */

static void call_watch(struct kvdev_queue *q, struct kvdev_queue_call *call, uint32_t node_index)
{
    uint32_t index = q->nodes[node_index].passthrough - 1u;
    uint32_t which = call->half_count++;
    q->passthroughs[index].half = &call->halves[which];
    call->passthrough_index[which] = index;
}

int kvdev_queue_call_start(struct kvdev_queue *q, uint32_t device_index, const uint8_t *sqe, void *data, uint32_t len,
                           uint32_t direction, uint64_t timeout_ns, struct kvdev_queue_call *call)
{
    uint32_t index = NODE_NONE;
    if (queue_visit(q))
        return -EBUSY;
    call->device_index = device_index;
    call->deadline_ns = add_ns(now_ns(), timeout_ns);
    int error = passthrough_add(q, device_index, 0, sqe, data, len, direction, &index, call->deadline_ns);
    if (!error)
        call_watch(q, call, index);
    queue_visit_end(q);
    return error;
}

static const struct kvdev_queue_half *call_undone(const struct kvdev_queue_call *call)
{
    for (uint32_t i = 0; i < call->half_count; i++)
        if (!call->halves[i].is_done)
            return &call->halves[i];
    return NULL;
}

int kvdev_queue_call_wait(struct kvdev_queue *q, struct kvdev_queue_call *call, uint64_t slice_ns)
{
    const struct kvdev_queue_half *undone;
    int error = 0;
    if (queue_visit(q))
        return -EBUSY;
    uint64_t slice_end = add_ns(now_ns(), slice_ns);
    uint64_t limit = slice_end < call->deadline_ns ? slice_end : call->deadline_ns;
    while (!error && (undone = call_undone(call))) {
        uint64_t now = now_ns();
        queue_work(q, 0, &undone->is_done, now < limit ? limit - now : 0);
        /* Over the deadline what is in flight takes its queue pair down, in the next turn at the latest. */
        if (now_ns() < call->deadline_ns)
            error = call_undone(call) && now_ns() >= slice_end ? -EAGAIN : 0;
        else if (!call->halves[0].is_done)
            passthrough_withdraw(q, call->device_index, &q->passthroughs[call->passthrough_index[0]], -ETIMEDOUT);
    }
    queue_visit_end(q);
    return error;
}

void kvdev_queue_call_cancel(struct kvdev_queue *q, struct kvdev_queue_call *call)
{
    queue_intrude(q);
    for (uint32_t i = 0; i < call->half_count; i++) {
        const struct passthrough *pass = &q->passthroughs[call->passthrough_index[i]];
        if (call->halves[i].is_done || passthrough_withdraw(q, call->device_index, pass, -ECANCELED))
            continue;
        struct path *path = &q->paths[pass->path_index];
        kvdev_qpair_kill(path->qp, KVDEV_FAULT_LOCAL, -ENOTCONN, "interrupted");
        queue_controller_check(q, path);
        /* What had not left this host yet is pending again. */
        if (!call->halves[i].is_done)
            passthrough_withdraw(q, call->device_index, pass, -ECANCELED);
    }
    queue_retire(q);
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

static int pair_add(struct kvdev_queue *q, const struct kvdev_io *compare, const struct kvdev_io *write,
                    struct kvdev_queue_call *call)
{
    uint32_t device_index = call->device_index;
    if (compare->opcode != OPC_COMPARE || write->opcode != OPC_WRITE || write->device_index != device_index ||
        queue_io_refusal(q, compare) || queue_io_refusal(q, write) ||
        q->devices[device_index].ops != &queue_namespace_ops)
        return -EINVAL;
    uint32_t first = half_take(q, device_index, compare, SQE_FUSE_FIRST, call->deadline_ns);
    if (first == NODE_NONE)
        return -EAGAIN;
    uint32_t second = half_take(q, device_index, write, SQE_FUSE_SECOND, call->deadline_ns);
    if (second == NODE_NONE) {
        half_give(q, first);
        return -EAGAIN;
    }
    call_watch(q, call, first);
    call_watch(q, call, second);
    q->passthroughs[q->nodes[first].passthrough - 1].mate = second;
    passthrough_queue(q, device_index, first);
    return 0;
}

int kvdev_queue_pair_start(struct kvdev_queue *q, const struct kvdev_io *compare, const struct kvdev_io *write,
                           uint64_t timeout_ns, struct kvdev_queue_call *call)
{
    if (queue_visit(q))
        return -EBUSY;
    call->device_index = compare->device_index;
    call->deadline_ns = add_ns(now_ns(), timeout_ns);
    int error = pair_add(q, compare, write, call);
    queue_visit_end(q);
    return error;
}

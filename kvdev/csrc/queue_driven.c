/* How a command goes to a device with a driver of its own (queue_device.h). */
#include "queue_int.h"

/* A checksum is a pass over the payload, in which no device gets anything to do. So it waits until those have been filled
 * again, and they are looked at between one and the next. */
static int wants_check(const struct node *node)
{
    const struct kvdev_io_group *group = (const struct kvdev_io_group *)(uintptr_t)node->io.group_addr;
    return group && group->flags & KVDEV_GROUP_CRC32C;
}

static void on_driver_done(void *owner, uint64_t cookie, int error, uint16_t status, uint64_t send_ns, uint64_t at_ns)
{
    struct kvdev_queue *q = owner;
    uint32_t index = (uint32_t)cookie;
    struct node *node = &q->nodes[index];
    node->send_ns = send_ns;
    node->complete_ns = at_ns;
    node->qpair_index = QPAIR_NONE;
    if (!error && wants_check(node)) {
        node->status = status;
        list_push(q, &q->unchecked, index);
        return;
    }
    q->stats.in_flight_count--;
    queue_node_done(q, index, error, status, 0);
}

int queue_driven_check(struct kvdev_queue *q, uint32_t max)
{
    int has_checked = 0;
    for (; max && q->unchecked.head != NODE_NONE; max--) {
        uint32_t index = list_pop(q, &q->unchecked);
        q->stats.in_flight_count--;
        queue_node_done(q, index, 0, q->nodes[index].status, 0);
        has_checked = 1;
    }
    return has_checked;
}

static uint32_t driven_check(const struct device *device, const struct kvdev_io *io)
{
    return device->driver->check(device->object, io);
}

static int driven_start(struct kvdev_queue *q, struct device *device, uint32_t index, uint64_t now)
{
    struct node *node = &q->nodes[index];
    if (device->is_blocked)
        return -EAGAIN;
    uint64_t deadline = node->deadline_ns ? node->deadline_ns : add_ns(now, q->options.command_timeout_ns);
    int error = device->driver->start(device->object, &node->io, index, deadline, now);
    if (error == -EAGAIN)
        device->is_blocked = 1;
    return error;
}

static int driven_is_alive(const struct kvdev_queue *q, const struct device *device)
{
    (void)q;
    return device->driver->is_alive(device->object);
}

const struct device_ops queue_driven_ops = { driven_check, driven_start, driven_is_alive };

int kvdev_queue_device_add(struct kvdev_queue *q, const struct kvdev_queue_driver *driver, void *object, uint32_t *ret)
{
    if (queue_visit(q))
        return -EBUSY;
    int error = driver->attach(object, on_driver_done, q);
    if (!error) {
        uint32_t index = queue_device_take(q, &queue_driven_ops);
        if (index < KVDEV_QUEUE_DEVICES_MAX) {
            q->devices[index].driver = driver;
            q->devices[index].object = object;
            q->driven[q->driven_count++] = (uint16_t)index;
            *ret = index;
        } else {
            driver->detach(object);
            error = -ENOSPC;
        }
    }
    queue_visit_end(q);
    return error;
}

static int driver_swap(struct kvdev_queue *q, struct device *device, void *object)
{
    int error = device->driver->attach(object, on_driver_done, q);
    if (error)
        return error;
    device->driver->detach(device->object);
    device->object = object;
    queue_driven_check(q, UINT32_MAX);
    return 0;
}

int kvdev_queue_device_replace(struct kvdev_queue *q, uint32_t device_index, void *object)
{
    if (device_index >= KVDEV_QUEUE_DEVICES_MAX || q->devices[device_index].ops != &queue_driven_ops)
        return -EINVAL;
    if (queue_visit(q))
        return -EBUSY;
    struct device *device = &q->devices[device_index];
    int error = driver_swap(q, device, object);
    queue_visit_end(q);
    return error;
}

void queue_driver_drop(struct kvdev_queue *q, uint32_t device_index)
{
    struct device *device = &q->devices[device_index];
    device->driver->detach(device->object);
    queue_driven_check(q, UINT32_MAX); /* its last commands among them */
    device->driver = NULL;
    device->object = NULL;
    for (uint32_t i = 0; i < q->driven_count; i++)
        if (q->driven[i] == device_index)
            q->driven[i] = q->driven[--q->driven_count];
}

#include "io.h"

size_t kvdev_io_size(void)
{
    return sizeof(struct kvdev_io);
}

size_t kvdev_io_done_size(void)
{
    return sizeof(struct kvdev_io_done);
}

size_t kvdev_io_group_size(void)
{
    return sizeof(struct kvdev_io_group);
}

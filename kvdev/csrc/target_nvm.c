/* Commands of the target that are more than one operation on a device: ranges, copies, fused pairs.
 *
 * A fused pair is atomic (Base 3.4.2): from the first pair in a piece of the namespace on, everything that changes data
 * there runs under the namespace's fused_lock. What began before, and does not take the lock, may still end after that
 * first pair; the namespace is used by pairs there from then on. Elsewhere nothing is locked. */
#include <errno.h>
#include <string.h>

#include "target_int.h"

#define DSM_RANGE_BYTES 16u

/* Those of the pieces under a range that fused pairs use. */
uint64_t nvm_fused_pieces(const struct request *request, uint64_t offset, uint64_t length)
{
    uint64_t map = atomic_load_explicit(&request->ns->fused_map, memory_order_acquire);
    if (!map || request->sqe.opc == OPC_DSM)
        return map;
    uint64_t first = offset >> TARGET_FUSED_SHIFT;
    uint64_t last = (offset + length - 1) >> TARGET_FUSED_SHIFT;
    uint64_t pieces = 0;
    for (uint64_t i = first; i <= last && i - first < 64; i++)
        pieces |= (uint64_t)1 << (i & 63);
    return map & pieces;
}

/* ---- Dataset Management (NVM Command Set 3.2.3) ---- */

uint16_t nvm_dsm_check(struct request *request)
{
    struct kvdev_bdev_info info;
    kvdev_bdev_info_read(request->bdev, &info);
    for (uint32_t at = 0; at < request->data_len; at += DSM_RANGE_BYTES) {
        uint64_t lba_count = kvdev_load_le32(request->data + at + 4);
        uint64_t slba = kvdev_load_le64(request->data + at + 8);
        request->length += lba_count * info.block_size;
        if (slba > info.block_count || lba_count > info.block_count - slba)
            return ST_LBA_RANGE;
    }
    return ST_SUCCESS;
}

void nvm_dsm_execute(struct request *request)
{
    uint32_t count = request->data_len / DSM_RANGE_BYTES;
    request->error = 0;
    for (uint32_t i = 0; i < count && !request->error; i++) {
        const uint8_t *range = request->data + (size_t)i * DSM_RANGE_BYTES;
        uint64_t length = (uint64_t)kvdev_load_le32(range + 4) * request->block_size;
        uint64_t offset = kvdev_load_le64(range + 8) * request->block_size;
        if (length)
            request->error =
                kvdev_bdev_execute(request->bdev, KVDEV_BDEV_OP_DEALLOCATE, 0, offset, length, NULL);
    }
}

/* ---- Copy (NVM Command Set 3.2.2) ---- */

static uint64_t copy_range_slba(const struct request *request, uint32_t index)
{
    return kvdev_load_le64(request->data + (size_t)index * TARGET_COPY_RANGE_BYTES + 8);
}

static uint64_t copy_range_count(const struct request *request, uint32_t index)
{
    return (uint64_t)kvdev_load_le16(request->data + (size_t)index * TARGET_COPY_RANGE_BYTES + 16) + 1;
}

uint16_t nvm_copy_prepare(struct request *request, const struct kvdev_bdev_info *info)
{
    const struct kvdev_sqe *sqe = &request->sqe;
    uint32_t count = (sqe->cdw12 & 0xff) + 1;
    uint64_t slba = (uint64_t)sqe->cdw10 | (uint64_t)sqe->cdw11 << 32;
    if (sqe->cdw12 >> 8 & 0xf)
        return ST_INVALID_FIELD; /* descriptor format 0 only */
    if (count > TARGET_COPY_RANGES_MAX)
        return ST_SIZE_LIMIT;
    if (slba >= info->block_count)
        return ST_LBA_RANGE;
    request->op = KVDEV_BDEV_OP_WRITE;
    request->direction = KVDEV_DIR_H2C;
    request->data_len = count * TARGET_COPY_RANGE_BYTES;
    request->offset = slba * info->block_size;
    if (sqe->cdw12 & CDW12_FUA)
        request->op_flags = KVDEV_BDEV_FUA;
    return ST_SUCCESS;
}

/* The ranges are there: hold them to the limits that Identify Namespace gives (MSSRL, MCL), which are what one command
 * may transfer, and to the namespace. */
uint16_t nvm_copy_check(struct request *request)
{
    struct kvdev_bdev_info info;
    kvdev_bdev_info_read(request->bdev, &info);
    uint64_t blocks_max = request->connection->transport.max_io_size / info.block_size;
    uint64_t total = 0;
    for (uint32_t i = 0; i < request->data_len / TARGET_COPY_RANGE_BYTES; i++) {
        uint64_t slba = copy_range_slba(request, i);
        uint64_t count = copy_range_count(request, i);
        total += count;
        if (count > blocks_max || total > blocks_max)
            return ST_SIZE_LIMIT;
        if (slba > info.block_count || count > info.block_count - slba)
            return ST_LBA_RANGE;
    }
    if (total > info.block_count - request->offset / info.block_size)
        return ST_LBA_RANGE;
    request->length = total * info.block_size;
    return ST_SUCCESS;
}

/* All is read before anything is written, so that ranges may overlap. */
void nvm_copy_execute(struct request *request)
{
    uint64_t done = 0;
    for (uint32_t i = 0; i < request->data_len / TARGET_COPY_RANGE_BYTES; i++) {
        uint64_t length = copy_range_count(request, i) * request->block_size;
        request->error = kvdev_bdev_execute(request->bdev, KVDEV_BDEV_OP_READ, 0,
                                            copy_range_slba(request, i) * request->block_size, length,
                                            request->buffer + done);
        if (request->error == -EIO)
            request->error = -(KVDEV_BDEV_NVME_ERROR | ST_READ_ERROR);
        if (request->error)
            return;
        done += length;
    }
    request->error = kvdev_bdev_execute(request->bdev, KVDEV_BDEV_OP_WRITE, request->op_flags, request->offset, done,
                                        request->buffer);
}

/* ---- fused pairs (Base 3.4.2): Compare and Write ---- */

/* This half, whose partner is not to be had, ends with a status once all of its data has come: the host may be in the
 * middle of sending it. */
static void fused_abort(struct request *request, uint16_t status)
{
    request->mate = NULL;
    request->fuse_status = status;
    if (request->state == REQUEST_FUSED)
        command_fail(request, status);
}

uint16_t fused_admit(struct request *request)
{
    struct connection *connection = request->connection;
    uint8_t before = connection->fused;
    request->fuse = request->sqe.flags & 3;
    connection->fused = FUSED_NONE;
    if (request->fuse == 2) {
        if (before == FUSED_NONE)
            return ST_ABORTED_MISSING_FUSED;
        if (before == FUSED_FAILED)
            return ST_ABORTED_FAILED_FUSED;
        request->mate = connection->fused_first;
        request->mate->mate = request;
        connection->fused_first = NULL;
        return ST_SUCCESS;
    }
    if (before == FUSED_OPEN) {
        struct request *first = connection->fused_first;
        connection->fused_first = NULL;
        fused_abort(first, ST_ABORTED_MISSING_FUSED);
    }
    if (request->fuse == 1) {
        connection->fused = FUSED_OPEN;
        connection->fused_first = request;
    }
    return ST_SUCCESS;
}

uint16_t fused_check(const struct request *request, const struct kvdev_bdev_info *info)
{
    if (request->sqe.opc != (request->fuse == 1 ? OPC_COMPARE : OPC_WRITE) || request->fuse == 3 ||
        info->block_size > KVDEV_TARGET_STAGE_BYTES)
        return ST_INVALID_FIELD; /* FUSES: Compare and Write only */
    if (request->length > info->block_size)
        return ST_ATOMIC_WRITE_UNIT; /* ACWU */
    return ST_SUCCESS;
}

void fused_fail(struct request *request, uint16_t status)
{
    struct connection *connection = request->connection;
    struct request *mate = request->mate;
    if (connection->fused_first == request) {
        connection->fused_first = NULL;
        connection->fused = FUSED_FAILED;
    }
    request->mate = NULL;
    command_fail(request, status);
    if (mate)
        fused_abort(mate, ST_ABORTED_FAILED_FUSED);
}

void fused_data_ready(struct request *request)
{
    if (request->fuse_status != ST_SUCCESS) {
        command_fail(request, request->fuse_status);
        return;
    }
    struct request *mate = request->mate;
    request->state = REQUEST_FUSED;
    if (!mate || mate->state != REQUEST_FUSED)
        return;
    struct request *second = request->fuse == 2 ? request : mate;
    struct request *first = second->mate;
    if (first->ns != second->ns || first->offset != second->offset || first->length != second->length) {
        command_fail(first, ST_INVALID_FIELD);
        command_fail(second, ST_INVALID_FIELD);
        return;
    }
    uint64_t piece = second->offset >> TARGET_FUSED_SHIFT;
    atomic_fetch_or(&second->ns->fused_map, (uint64_t)1 << (piece & 63));
    first->error = second->error = -ECANCELED;
    command_run(second);
}

void fused_execute(struct request *second)
{
    struct request *first = second->mate;
    pthread_mutex_lock(&second->ns->fused_lock);
    first->error =
        kvdev_bdev_execute(first->bdev, KVDEV_BDEV_OP_COMPARE, 0, first->offset, first->length, first->data);
    if (!first->error)
        second->error = kvdev_bdev_execute(second->bdev, KVDEV_BDEV_OP_WRITE, second->op_flags, second->offset,
                                           second->length, second->data);
    pthread_mutex_unlock(&second->ns->fused_lock);
}

void fused_finish(struct request *second)
{
    struct request *first = second->mate;
    first->status = command_status_of(first->error, KVDEV_BDEV_OP_COMPARE);
    second->status =
        first->error ? ST_ABORTED_FAILED_FUSED : command_status_of(second->error, KVDEV_BDEV_OP_WRITE);
    command_respond(first);
    command_respond(second);
}

/* The request is over: nothing points to it any more. */
void fused_forget(struct request *request)
{
    struct connection *connection = request->connection;
    if (request->mate)
        request->mate->mate = NULL;
    request->mate = NULL;
    if (connection->fused_first == request) {
        connection->fused_first = NULL;
        connection->fused = FUSED_NONE;
    }
}

/* The back end of the file engine where io_uring cannot be had: threads that make one blocking call per operation.
 *
 * The queue's thread collects what it submits and hands it over in one go; results come back in a list, with an eventfd
 * to wake the queue when it asked for that. An operation is a thread's from the moment it leaves the pending list. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "file_int.h"

#define NONE 0xffffffffu
#define STACK_BYTES (256u << 10)       /* a worker calls nothing deep */

struct chain {
    uint32_t head;
    uint32_t tail;
    uint32_t count;
};

struct pool {
    struct kvdev_file_engine *engine;
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    struct chain fresh;           /* the queue thread's own, until flush */
    struct chain pending;         /* under the lock, like all below */
    struct chain done;
    _Atomic uint32_t done_count;  /* lets the queue thread look without the lock */
    int event_fd;
    int is_armed;
    int is_stopping;
    uint32_t thread_count;
    pthread_t threads[KVDEV_FILE_THREADS_MAX];
};

static void chain_push(struct kvdev_file_engine *e, struct chain *chain, uint32_t index)
{
    e->requests[index].next = NONE;
    if (!chain->count)
        chain->head = index;
    else
        e->requests[chain->tail].next = index;
    chain->tail = index;
    chain->count++;
}

static uint32_t chain_pop(struct kvdev_file_engine *e, struct chain *chain)
{
    uint32_t index = chain->head;
    chain->head = e->requests[index].next;
    chain->count--;
    return index;
}

/* ---- the threads ---- */

static int64_t operate(int fd, const struct file_op *op)
{
    struct iovec piece = { (void *)(uintptr_t)op->addr, (size_t)op->length };
    int64_t got;
    switch (op->kind) {
    case FILE_OP_READ:
        got = pread(fd, piece.iov_base, piece.iov_len, (off_t)op->offset);
        break;
    case FILE_OP_WRITE:
        got = pwritev2(fd, &piece, 1, (off_t)op->offset, op->is_durable ? RWF_DSYNC : 0);
        break;
    case FILE_OP_FSYNC:
        got = fdatasync(fd);
        break;
    default:
        got = fallocate(fd, op->mode, (off_t)op->offset, (off_t)op->length);
        break;
    }
    return got < 0 ? -errno : got;
}

static void report(struct pool *pool, uint32_t index, int64_t result)
{
    pool->engine->requests[index].result = (int32_t)result;
    chain_push(pool->engine, &pool->done, index);
    atomic_store_explicit(&pool->done_count, pool->done.count, memory_order_release);
    uint64_t one = 1;
    if (!pool->is_armed)
        return;
    pool->is_armed = 0;
    ssize_t put = write(pool->event_fd, &one, sizeof one);
    (void)put; /* the counter is far from its limit */
}

static void *work(void *argument)
{
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->pending.count && !pool->is_stopping)
            pthread_cond_wait(&pool->has_work, &pool->lock);
        if (!pool->pending.count)
            break;
        uint32_t index = chain_pop(pool->engine, &pool->pending);
        const struct file_request *r = &pool->engine->requests[index];
        int fd = r->file->params.fd;
        pthread_mutex_unlock(&pool->lock);
        int64_t result = operate(fd, &r->op);
        pthread_mutex_lock(&pool->lock);
        report(pool, index, result);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int threads_start(struct pool *pool, uint32_t count)
{
    pthread_attr_t attributes;
    sigset_t all;
    sigset_t before;
    int error = pthread_attr_init(&attributes);
    if (error)
        return -error;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals are for the threads that Python knows. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 0; i < count && !error; i++) {
        error = pthread_create(&pool->threads[i], &attributes, work, pool);
        pool->thread_count += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return pool->thread_count ? 0 : -error; /* fewer than asked for still work */
}

/* ---- the back end ---- */

static void pool_submit(struct kvdev_file_engine *e, struct file_request *r)
{
    struct pool *pool = e->state;
    chain_push(e, &pool->fresh, (uint32_t)(r - e->requests));
}

static int pool_flush(struct kvdev_file_engine *e)
{
    struct pool *pool = e->state;
    if (!pool->fresh.count)
        return 0;
    e->info.calls++;
    pthread_mutex_lock(&pool->lock);
    if (!pool->pending.count)
        pool->pending.head = pool->fresh.head;
    else
        e->requests[pool->pending.tail].next = pool->fresh.head;
    pool->pending.tail = pool->fresh.tail;
    pool->pending.count += pool->fresh.count;
    if (pool->fresh.count == 1)
        pthread_cond_signal(&pool->has_work);
    else
        pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    pool->fresh.count = 0;
    return 1;
}

static uint32_t pool_reap(struct kvdev_file_engine *e)
{
    struct pool *pool = e->state;
    if (!atomic_load_explicit(&pool->done_count, memory_order_acquire))
        return 0;
    uint64_t wakes;
    pthread_mutex_lock(&pool->lock);
    struct chain done = pool->done;
    pool->done.count = 0;
    atomic_store_explicit(&pool->done_count, 0, memory_order_relaxed);
    pool->is_armed = 0;
    ssize_t got = read(pool->event_fd, &wakes, sizeof wakes);
    (void)got; /* nothing there: nobody was asleep */
    pthread_mutex_unlock(&pool->lock);
    uint32_t count = done.count;
    uint64_t now = file_now_ns();
    while (done.count) {
        struct file_request *r = &e->requests[chain_pop(e, &done)];
        file_engine_completed(e, r, r->result, now);
    }
    return count;
}

static void pool_cancel(struct kvdev_file_engine *e, const struct kvdev_file *f)
{
    struct pool *pool = e->state;
    pool_flush(e);
    pthread_mutex_lock(&pool->lock);
    for (uint32_t left = pool->pending.count; left; left--) {
        uint32_t index = chain_pop(e, &pool->pending);
        if (e->requests[index].file == f)
            report(pool, index, -ECANCELED);
        else
            chain_push(e, &pool->pending, index);
    }
    pthread_mutex_unlock(&pool->lock);
}

static int pool_wait(struct kvdev_file_engine *e, struct pollfd *fd)
{
    struct pool *pool = e->state;
    pthread_mutex_lock(&pool->lock);
    int is_done = pool->done.count != 0;
    pool->is_armed = !is_done;
    pthread_mutex_unlock(&pool->lock);
    *fd = (struct pollfd){ .fd = pool->event_fd, .events = POLLIN };
    return is_done ? -EAGAIN : 1;
}

static void pool_file_add(struct kvdev_file_engine *e, struct kvdev_file *f)
{
    (void)e;
    (void)f;
}

static void pool_file_remove(struct kvdev_file_engine *e, struct kvdev_file *f)
{
    (void)e;
    (void)f;
}

static int pool_region_add(struct kvdev_file_engine *e, struct file_region *region)
{
    (void)e;
    (void)region;
    return EOPNOTSUPP; /* a thread's call pins what it needs */
}

static void pool_region_remove(struct kvdev_file_engine *e, const struct file_region *region)
{
    (void)e;
    (void)region;
}

static void pool_destroy(struct kvdev_file_engine *e, int is_child)
{
    struct pool *pool = e->state;
    close(pool->event_fd);
    if (is_child)
        return; /* the threads are the parent's, and one of them may have held the lock: this memory stays */
    pthread_mutex_lock(&pool->lock);
    pool->is_stopping = 1;
    pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->has_work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static const struct file_backend backend = {
    .submit = pool_submit,
    .flush = pool_flush,
    .reap = pool_reap,
    .cancel = pool_cancel,
    .wait = pool_wait,
    .file_add = pool_file_add,
    .file_remove = pool_file_remove,
    .region_add = pool_region_add,
    .region_remove = pool_region_remove,
    .destroy = pool_destroy,
};

int file_threads_create(struct kvdev_file_engine *e)
{
    if (e->options.wants_iopoll)
        return -EOPNOTSUPP;
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->engine = e;
    pool->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->event_fd < 0) {
        int error = -errno;
        free(pool);
        return error;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_work, NULL);
    e->state = pool;
    e->backend = &backend;
    return threads_start(pool, e->options.thread_count);
}

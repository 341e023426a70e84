#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <sanitizer/asan_interface.h>

#define KVDEV_FUZZ_SEAM_OWNER
#include "fuzz.h"
#include "seam.h"

#define CLOCK_START_NS 1000000000000ull
#define BLOCKS_MAX 32
#define BLOCK_BYTES_MIN 8192u
#define LONG_BYTES 2048u
#define CUT_LONG_BYTES 700u
#define CLOCK_STEP_NS 50u /* each look at the clock: time never stands still */

struct wire wires[WIRE_COUNT];
uint64_t wire_now_ns = CLOCK_START_NS;
uint64_t wire_allocation_count;
int (*wire_epoll_turn)(struct epoll_event *events, int max);

/* ---- memory ----
 *
 * Every connection takes a few large blocks. Fresh pages for them would cost more than everything else, so freed ones are
 * kept here, poisoned; one still in use when an input ends is a leak. */

struct block {
    void *memory;
    size_t size;
    int in_use;
};

static struct block blocks[BLOCKS_MAX];

static int pending; /* index + 1 of the wire that connect or accept takes next */

void wires_reset(void)
{
    for (int i = 0; i < WIRE_COUNT; i++) {
        struct wire *wire = &wires[i];
        if (wire->is_open)
            fuzz_fail("descriptor of connection %d was never closed", i);
        wire->rx_len = wire->rx_at = wire->tx_len = wire->tx_at = 0;
        wire->end = 1;
    }
    wire_now_ns = CLOCK_START_NS;
    pending = 0;
    for (int i = 0; i < BLOCKS_MAX; i++) {
        if (blocks[i].in_use)
            fuzz_fail("%zu bytes were never freed", blocks[i].size);
    }
}

struct wire *wire_new(uint32_t index, uint64_t random)
{
    struct wire *wire = &wires[index];
    if (wire->is_open)
        fuzz_fail("connection %u is still open", index);
    wire->is_shut = wire->is_reset = wire->end = wire->send_error = wire->is_watched = 0;
    wire->rx_len = wire->rx_at = wire->tx_len = wire->tx_at = wire->cut_max = 0;
    wire->cut_is_random = 0;
    wire->room = WIRE_ROOM_UNLIMITED;
    wire->random = random;
    wire->put_bytes = wire->read_bytes = wire->mutated_taken = 0;
    wire->mark_count = 0;
    pending = (int)index + 1;
    return wire;
}

uint64_t wire_mutated_taken(struct wire *wire)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < wire->mark_count; i++) {
        if (wire->mutated_at[i] < wire->read_bytes)
            wire->mutated_taken++;
        else
            wire->mutated_at[kept++] = wire->mutated_at[i];
    }
    wire->mark_count = kept;
    return wire->mutated_taken;
}

void wire_put(struct wire *wire, const void *bytes, size_t len, int is_mutated)
{
    if (wire->mark_count == WIRE_MARKS_MAX)
        (void)wire_mutated_taken(wire);
    if (is_mutated && wire->mark_count < WIRE_MARKS_MAX)
        wire->mutated_at[wire->mark_count++] = wire->put_bytes;
    wire->put_bytes += len;
    if (wire->rx_at == wire->rx_len)
        wire->rx_at = wire->rx_len = 0;
    if (len > sizeof wire->rx - wire->rx_len)
        len = sizeof wire->rx - wire->rx_len;
    memcpy(wire->rx + wire->rx_len, bytes, len);
    wire->rx_len += len;
}

size_t wire_unread(const struct wire *wire)
{
    return wire->rx_len - wire->rx_at;
}

int wire_is_readable(const struct wire *wire)
{
    return wire->is_open && (wire_unread(wire) || wire->end);
}

static struct wire *wire_of(int fd)
{
    if (fd < WIRE_FD_FIRST || fd >= WIRE_FD_FIRST + WIRE_COUNT)
        return NULL;
    struct wire *wire = &wires[fd - WIRE_FD_FIRST];
    if (!wire->is_open)
        fuzz_fail("descriptor %d is used after it was closed", fd);
    return wire;
}

static int take_pending(void)
{
    if (!pending)
        return -1;
    int fd = WIRE_FD_FIRST + pending - 1;
    wires[pending - 1].is_open = 1;
    pending = 0;
    return fd;
}

int fz_socket(int domain, int type, int protocol)
{
    (void)domain;
    (void)type;
    (void)protocol;
    int fd = take_pending();
    if (fd < 0)
        errno = EMFILE;
    return fd;
}

int fz_connect(int fd, const struct sockaddr *address, socklen_t len)
{
    (void)address;
    (void)len;
    return wire_of(fd) ? 0 : -1;
}

int fz_accept4(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
    (void)fd;
    (void)address;
    (void)len;
    (void)flags;
    int got = take_pending();
    if (got < 0)
        errno = EAGAIN;
    return got;
}

int fz_setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
    (void)len;
    struct wire *wire = wire_of(fd);
    if (wire && level == SOL_SOCKET && name == SO_LINGER)
        wire->is_reset = ((const struct linger *)value)->l_onoff;
    return 0;
}

int fz_getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
    (void)fd;
    (void)level;
    (void)name;
    memset(value, 0, *len);
    return 0;
}

static int address_fill(int fd, uint16_t port, struct sockaddr *address, socklen_t *len)
{
    if (!wire_of(fd))
        return -1;
    struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port) };
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    memcpy(address, &in, *len < sizeof in ? *len : sizeof in);
    *len = sizeof in;
    return 0;
}

int fz_getsockname(int fd, struct sockaddr *address, socklen_t *len)
{
    return address_fill(fd, 40000, address, len);
}

int fz_getpeername(int fd, struct sockaddr *address, socklen_t *len)
{
    return address_fill(fd, 4420, address, len);
}

/* How much the next read may get. */
static size_t cut(struct wire *wire)
{
    size_t max = wire->cut_max;
    if (!max)
        return SIZE_MAX;
    if (max < CUT_LONG_BYTES && wire_unread(wire) > LONG_BYTES)
        max = CUT_LONG_BYTES; /* bulk data byte by byte would take all the time there is */
    return wire->cut_is_random ? 1 + fuzz_random(&wire->random) % max : max;
}

ssize_t fz_readv(int fd, const struct iovec *iov, int count)
{
    struct wire *wire = wire_of(fd);
    size_t left = wire_unread(wire), limit = cut(wire), got = 0;
    if (!left) {
        if (wire->end == 1)
            return 0;
        errno = wire->end ? wire->end : EAGAIN;
        return -1;
    }
    left = left < limit ? left : limit;
    for (int i = 0; i < count && left; i++) {
        size_t n = iov[i].iov_len < left ? iov[i].iov_len : left;
        memcpy(iov[i].iov_base, wire->rx + wire->rx_at, n);
        wire->rx_at += n;
        left -= n;
        got += n;
    }
    wire->read_bytes += got;
    return (ssize_t)got;
}

ssize_t fz_recv(int fd, void *buf, size_t len, int flags)
{
    struct iovec iov = { .iov_base = buf, .iov_len = len };
    (void)flags;
    return fz_readv(fd, &iov, 1);
}

ssize_t fz_recvmsg(int fd, struct msghdr *msg, int flags)
{
    (void)flags;
    return fz_readv(fd, msg->msg_iov, (int)msg->msg_iovlen);
}

ssize_t fz_sendmsg(int fd, const struct msghdr *msg, int flags)
{
    (void)flags;
    struct wire *wire = wire_of(fd);
    size_t sent = 0;
    if (wire->is_shut)
        fuzz_fail("bytes sent after shutdown");
    if (wire->send_error || wire->end > 1) {
        errno = wire->send_error ? wire->send_error : EPIPE;
        return -1;
    }
    for (size_t i = 0; i < msg->msg_iovlen; i++) {
        size_t n = msg->msg_iov[i].iov_len;
        if (n > wire->room)
            n = wire->room;
        if (n > sizeof wire->tx - wire->tx_len)
            fuzz_fail("more sent than any exchange needs");
        memcpy(wire->tx + wire->tx_len, msg->msg_iov[i].iov_base, n);
        wire->tx_len += n;
        if (wire->room != WIRE_ROOM_UNLIMITED)
            wire->room -= n;
        sent += n;
        if (n < msg->msg_iov[i].iov_len)
            break;
    }
    if (!sent) {
        errno = EAGAIN;
        return -1;
    }
    return (ssize_t)sent;
}

ssize_t fz_send(int fd, const void *buf, size_t len, int flags)
{
    struct iovec iov = { .iov_base = (void *)(uintptr_t)buf, .iov_len = len };
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
    return fz_sendmsg(fd, &msg, flags);
}

int fz_shutdown(int fd, int how)
{
    struct wire *wire = wire_of(fd);
    if (how != SHUT_RD)
        wire->is_shut = 1;
    return 0;
}

int fz_close(int fd)
{
    if (fd == WIRE_FD_LISTENER)
        return 0;
    struct wire *wire = wire_of(fd);
    if (!wire)
        return close(fd);
    wire->is_open = wire->is_watched = 0;
    return 0;
}

int fz_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    int ready = 0;
    (void)mask;
    for (nfds_t i = 0; i < count; i++) {
        fds[i].revents = 0;
        struct wire *wire = fds[i].fd < 0 ? NULL : wire_of(fds[i].fd);
        if (!wire)
            continue;
        if (fds[i].events & POLLIN && wire_is_readable(wire))
            fds[i].revents |= POLLIN;
        if (fds[i].events & POLLOUT && wire->room)
            fds[i].revents |= POLLOUT;
        ready += fds[i].revents != 0;
    }
    if (!ready && timeout)
        wire_now_ns += (uint64_t)timeout->tv_sec * 1000000000u + (uint64_t)timeout->tv_nsec;
    return ready;
}

int fz_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
    if (fd == WIRE_FD_LISTENER)
        return 0;
    struct wire *wire = fd >= WIRE_FD_FIRST ? wire_of(fd) : NULL;
    if (!wire)
        return epoll_ctl(epoll, op, fd, event);
    wire->is_watched = op != EPOLL_CTL_DEL;
    if (event)
        wire->watch = *event;
    return 0;
}

int fz_epoll_wait(int epoll, struct epoll_event *events, int max, int timeout_ms)
{
    (void)epoll;
    (void)timeout_ms;
    return wire_epoll_turn(events, max);
}

int fz_clock_gettime(clockid_t clock, struct timespec *ret)
{
    (void)clock;
    wire_now_ns += CLOCK_STEP_NS;
    ret->tv_sec = (time_t)(wire_now_ns / 1000000000u);
    ret->tv_nsec = (long)(wire_now_ns % 1000000000u);
    return 0;
}

/* Threads never start: the fuzzer does their work in turn. */
int fz_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg)
{
    (void)attr;
    (void)main;
    (void)arg;
    memset(thread, 0, sizeof *thread);
    return 0;
}

int fz_pthread_timedjoin_np(pthread_t thread, void **ret, const struct timespec *deadline)
{
    (void)thread;
    (void)ret;
    (void)deadline;
    return 0;
}

static struct block *block_find(const void *memory, size_t size)
{
    for (int i = 0; i < BLOCKS_MAX; i++) {
        struct block *block = &blocks[i];
        if (memory ? block->memory == memory : !block->in_use && (block->size == size || !block->memory))
            return block;
    }
    return NULL;
}

void *fz_malloc(size_t size)
{
    wire_allocation_count++;
    struct block *block = size < BLOCK_BYTES_MIN ? NULL : block_find(NULL, size);
    if (!block)
        return malloc(size);
    if (!block->memory)
        *block = (struct block){ .memory = malloc(size), .size = size };
    block->in_use = 1;
    ASAN_UNPOISON_MEMORY_REGION(block->memory, size);
    return block->memory;
}

void *fz_calloc(size_t count, size_t size)
{
    if (count * size < BLOCK_BYTES_MIN) {
        wire_allocation_count++;
        return calloc(count, size);
    }
    void *memory = fz_malloc(count * size);
    memset(memory, 0, count * size);
    return memory;
}

void fz_free(void *memory)
{
    struct block *block = memory ? block_find(memory, 0) : NULL;
    if (!block) {
        free(memory);
        return;
    }
    if (!block->in_use)
        fuzz_fail("memory is freed twice");
    block->in_use = 0;
    ASAN_POISON_MEMORY_REGION(memory, block->size);
}

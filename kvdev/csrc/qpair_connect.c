/* Making a connection: the socket, TLS, ICReq and ICResp; and one synchronous command. */
#include "qpair_int.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CANCEL_SLICE_NS (KVDEV_QPAIR_CANCEL_MS * 1000000ull)

int qpair_wait(const struct kvdev_qpair *qp, short events, uint64_t deadline_ns)
{
    for (;;) {
        uint64_t now = now_ns();
        uint64_t left = now >= deadline_ns ? 0 : deadline_ns - now;
        uint64_t slice = left < CANCEL_SLICE_NS ? left : CANCEL_SLICE_NS;
        struct pollfd pfd = { .fd = qp->fd, .events = events };
        struct timespec ts = { .tv_sec = 0, .tv_nsec = (long)slice };
        int n = ppoll(&pfd, 1, &ts, NULL);
        if (n > 0)
            return 1;
        if ((n < 0 && errno != EINTR) || !left || atomic_load(&qp->is_cancelled))
            return 0;
    }
}

static void address_text(const struct sockaddr_storage *ss, char *text, size_t size)
{
    char host[INET6_ADDRSTRLEN + IF_NAMESIZE + 2];
    char port[8];
    if (getnameinfo((const struct sockaddr *)ss, sizeof *ss, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(text, size, "?");
    else
        snprintf(text, size, ss->ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

static int socket_open(struct kvdev_qpair *qp, const struct addrinfo *info, uint64_t deadline)
{
    int one = 1;
    qp->fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
    if (qp->fd < 0)
        return -errno;
    setsockopt(qp->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (qp->params.rcvbuf_size_bytes) {
        int size = (int)qp->params.rcvbuf_size_bytes;
        setsockopt(qp->fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    }
    if (qp->params.sndbuf_size_bytes) {
        int size = (int)qp->params.sndbuf_size_bytes;
        setsockopt(qp->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    }
    if (connect(qp->fd, info->ai_addr, info->ai_addrlen) && errno != EINPROGRESS)
        return -errno;
    if (!qpair_wait(qp, POLLOUT, deadline))
        return atomic_load(&qp->is_cancelled) ? -ECANCELED : -ETIMEDOUT;
    int error = 0;
    socklen_t len = sizeof error;
    if (getsockopt(qp->fd, SOL_SOCKET, SO_ERROR, &error, &len))
        return -errno;
    if (error)
        return -error;
    struct sockaddr_storage local = { 0 };
    struct sockaddr_storage peer = { 0 };
    len = sizeof local;
    getsockname(qp->fd, (struct sockaddr *)&local, &len);
    len = sizeof peer;
    if (getpeername(qp->fd, (struct sockaddr *)&peer, &len))
        return -errno;
    address_text(&local, qp->counters.local_address, sizeof qp->counters.local_address);
    address_text(&peer, qp->counters.peer_address, sizeof qp->counters.peer_address);
    /* A dead local port out of the ephemeral range can be met by our own socket: nobody else is there. */
    if (!strcmp(qp->counters.local_address, qp->counters.peer_address))
        return -ECONNREFUSED;
    return 0;
}

static int digests_check(struct kvdev_qpair *qp)
{
    const char *field = NULL;
    if (qp->params.header_digest == KVDEV_DIGEST_REQUIRE && !qp->rx.link.hdgst)
        field = "header digest";
    else if (qp->params.data_digest == KVDEV_DIGEST_REQUIRE && !qp->rx.link.ddgst)
        field = "data digest";
    if (!field)
        return 0;
    struct kvdev_pdu_fault fault = { .fes = KVDEV_FES_UNSUPPORTED,
                                     .fei = 11,
                                     .field_offset = 11,
                                     .pdu_type = KVDEV_PDU_IC_RESP,
                                     .expected = (uint64_t)((qp->params.header_digest == KVDEV_DIGEST_REQUIRE) |
                                                            (qp->params.data_digest == KVDEV_DIGEST_REQUIRE) << 1),
                                     .actual = qp->rx.pdu.dgst };
    qpair_kill_fault(qp, &fault, KVDEV_FAULT_REFUSED, -ENOPROTOOPT, field);
    return -ENOPROTOOPT;
}

static int ic_exchange(struct kvdev_qpair *qp, uint64_t deadline)
{
    struct kvdev_pdu_link link = { .hdgst = qp->params.header_digest != KVDEV_DIGEST_OFF,
                                   .ddgst = qp->params.data_digest != KVDEV_DIGEST_OFF,
                                   .recv_pda = qp->params.hpda,
                                   .maxr2t = qp->params.maxr2t_0based };
    int error = kvdev_pdu_rx_init(&qp->rx, KVDEV_PDU_HOST, &link);
    if (error)
        return error;
    uint8_t request[KVDEV_PDU_BUILD_MAX];
    size_t len = kvdev_pdu_build_ic_req(request, &link);
    ssize_t sent = send(qp->fd, request, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent != (ssize_t)len) {
        /* A fresh socket takes 128 bytes at once or is broken. */
        kvdev_qpair_kill(qp, KVDEV_FAULT_SOCKET, sent < 0 ? -errno : -EPIPE, "ICReq");
        return qp->fault.error;
    }
    qp->counters.tx_bytes += len;
    while (!qp->is_ic_done && qp->state != KVDEV_QPAIR_DEAD) {
        if (!qpair_wait(qp, POLLIN, deadline)) {
            if (atomic_load(&qp->is_cancelled))
                kvdev_qpair_kill(qp, KVDEV_FAULT_LOCAL, -ECANCELED, "ICResp");
            else
                kvdev_qpair_kill(qp, KVDEV_FAULT_TIMEOUT, -ETIMEDOUT, "ICResp");
            break;
        }
        qpair_receive(qp);
    }
    if (qp->state == KVDEV_QPAIR_DEAD)
        return qp->fault.error;
    return digests_check(qp);
}

void kvdev_qpair_tls_set(struct kvdev_qpair *qp, struct kvdev_tls_context *context)
{
    qp->tls_context = context;
}

int kvdev_qpair_tls_read(struct kvdev_qpair *qp, struct kvdev_tls_info *ret)
{
    if (!qp->tls)
        return -ENOENT;
    kvdev_tls_link_read(qp->tls, ret);
    return 0;
}

int kvdev_qpair_connect(struct kvdev_qpair *qp, const char *address, uint16_t port, uint64_t timeout_ns)
{
    if (qp->state != KVDEV_QPAIR_IDLE || qp->fd >= 0)
        return -EINVAL;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV };
    struct addrinfo *info = NULL;
    if (getaddrinfo(address, service, &hints, &info) || !info)
        return -EINVAL;
    int error = socket_open(qp, info, deadline);
    freeaddrinfo(info);
    if (!error && qp->tls_context)
        error = kvdev_tls_start(qp->tls_context, qp->fd, &qp->fd, &qp->tls);
    if (error) {
        uint32_t kind = error == -ETIMEDOUT   ? KVDEV_FAULT_TIMEOUT
                        : error == -ECANCELED ? KVDEV_FAULT_LOCAL
                                              : KVDEV_FAULT_SOCKET;
        kvdev_qpair_kill(qp, kind, error, "connect");
        return error;
    }
    error = ic_exchange(qp, deadline);
    if (error)
        return error;
    qp->state = KVDEV_QPAIR_READY;
    return 0;
}


/* ---- one synchronous command ---- */

struct sync_result {
    int is_done;
    int error;
    uint8_t *cqe;
};

static void sync_done(void *owner, uint64_t cookie, int error, const uint8_t *cqe, uint64_t send_ns, uint64_t at_ns)
{
    struct sync_result *result = owner;
    (void)send_ns;
    (void)at_ns;
    if (cookie != (uintptr_t)result)
        return; /* a Keep Alive or event request of the owner before us */
    result->is_done = 1;
    result->error = error == -EIO ? 0 : error; /* -EIO: the verdict is in the CQE's status */
    memcpy(result->cqe, cqe, KVDEV_CQE_BYTES);
}

int kvdev_qpair_execute(struct kvdev_qpair *qp, const uint8_t *sqe, void *data, uint32_t len, uint32_t direction,
                        uint64_t timeout_ns, uint8_t *cqe)
{
    struct sync_result result = { .cqe = cqe };
    if (qp->done)
        return -EBUSY;
    uint64_t deadline = add_ns(now_ns(), timeout_ns);
    int error = kvdev_qpair_start(qp, sqe, data, len, direction, (uintptr_t)&result, deadline);
    if (error)
        return error;
    kvdev_qpair_owner_set(qp, sync_done, &result);
    while (!result.is_done) {
        uint64_t now = now_ns();
        kvdev_qpair_send(qp, now);
        kvdev_qpair_receive(qp);
        if (!result.is_done)
            kvdev_qpair_deadlines(qp, now);
        if (result.is_done)
            break;
        short events = 0;
        kvdev_qpair_wait_fd(qp, &events);
        if (!qpair_wait(qp, events, deadline) && atomic_load(&qp->is_cancelled))
            kvdev_qpair_kill(qp, KVDEV_FAULT_LOCAL, -ECANCELED, "given up");
    }
    kvdev_qpair_owner_set(qp, NULL, NULL);
    if (result.error == -ENOTCONN && qp->fault.error)
        return qp->fault.error;
    return result.error;
}

void kvdev_qpair_cancel(struct kvdev_qpair *qp)
{
    atomic_store(&qp->is_cancelled, 1);
}

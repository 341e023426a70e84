/* Poller threads of the target: sockets, the receive machine, the send list, connections' lives. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "target_int.h"

#define NS_PER_MS 1000000u
#define EPOLL_TAG_EVENT ((uint64_t)1)
#define EPOLL_TAG_LISTENER ((uint64_t)2) /* + 16 * slot; connections are told by their aligned address */
#define EPOLL_TAG_MASK ((uint64_t)15)

uint64_t target_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void stat_add(_Atomic uint64_t *stat, uint64_t n)
{
    /* One writer: no locked instruction needed. */
    atomic_store_explicit(stat, atomic_load_explicit(stat, memory_order_relaxed) + n, memory_order_relaxed);
}

/* ---- a connection's life ---- */

static void address_text(const struct sockaddr_storage *from, char *text, size_t size, uint16_t *port)
{
    text[0] = 0;
    *port = 0;
    if (from->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)from;
        inet_ntop(AF_INET, &in->sin_addr, text, (socklen_t)size);
        *port = ntohs(in->sin_port);
    } else if (from->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)from;
        inet_ntop(AF_INET6, &in6->sin6_addr, text, (socklen_t)size);
        *port = ntohs(in6->sin6_port);
    }
}

/* One mapping holds the connection, its requests and their stages; untouched stages cost nothing. */
static struct connection *connection_new(struct kvdev_target *target, const struct kvdev_target_transport *transport)
{
    uint16_t count = (uint16_t)(transport->queue_depth_max + 1);
    size_t page = 4096;
    size_t stages_at = (sizeof(struct connection) + count * sizeof(struct request) + 64 + page - 1) & ~(page - 1);
    size_t stage_bytes = KVDEV_TARGET_STAGE_BYTES;
    if (transport->in_capsule_data_size > stage_bytes)
        stage_bytes = (transport->in_capsule_data_size + page - 1) & ~(page - 1);
    size_t bytes = stages_at + (size_t)count * stage_bytes;
    uint8_t *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    struct connection *connection = (struct connection *)(void *)map;
    size_t requests_at = (sizeof(struct connection) + 63) & ~(size_t)63;
    connection->target = target;
    connection->map_bytes = bytes;
    connection->transport = *transport;
    connection->requests = (struct request *)(void *)(map + requests_at);
    connection->request_count = count;
    connection->request_limit = 1;
    connection->controller_number = -1;
    for (uint16_t i = 0; i < count; i++) {
        struct request *request = &connection->requests[i];
        request->connection = connection;
        request->index = i;
        request->stage = map + stages_at + (size_t)i * stage_bytes;
        list_push(&connection->free, request);
    }
    return connection;
}

void connection_mark_dirty(struct connection *connection)
{
    if (connection->is_dirty)
        return;
    connection->is_dirty = 1;
    connection->next_dirty = connection->poller->dirty;
    connection->poller->dirty = connection;
}

static void wait_list_drop(struct poller *poller, const struct connection *connection)
{
    struct request_list kept = { NULL, NULL };
    struct request *request;
    while ((request = list_pop(&poller->wait_buffer)) != NULL) {
        if (request->connection != connection)
            list_push(&kept, request);
        else
            command_release(request);
    }
    poller->wait_buffer = kept;
}

/* End the queue pair, though perhaps not the socket yet: requests that nobody holds are over, an Admin
 * connection takes its association with it, the control thread is told. */
static void connection_detach(struct connection *connection, int reason, const struct kvdev_pdu_fault *fault,
                              const struct request *keep)
{
    struct poller *poller = connection->poller;
    struct kvdev_target *target = connection->target;
    wait_list_drop(poller, connection);
    connection->rx_request = NULL;
    connection->tx = (struct request_list){ NULL, NULL };
    for (uint16_t i = 0; i < connection->request_count; i++) {
        struct request *request = &connection->requests[i];
        if (request != keep && request->state != REQUEST_EXECUTING && request->state != REQUEST_CONTROL)
            command_release(request);
    }
    struct target_controller *controller = connection->controller;
    if (controller) {
        if (connection->qid == 0)
            atomic_store(&controller->is_dead, 1);
        if (atomic_load(&controller->is_dead))
            target_scan_all(target);
        pthread_mutex_lock(&target->lock);
        atomic_fetch_sub(&controller->connection_count, 1);
        pthread_cond_broadcast(&target->changed);
        pthread_mutex_unlock(&target->lock);
        connection->controller = NULL; /* no command runs here any more */
        atomic_fetch_sub(connection->qid ? &poller->io_qpairs_now : &poller->admin_qpairs_now, 1);
    } else {
        atomic_fetch_sub(&poller->unbound_now, 1);
    }
    struct kvdev_target_event *event = &connection->closed_event;
    event->type = KVDEV_TARGET_EVENT_CLOSED;
    event->connection = connection->number;
    event->listener = connection->listener_id;
    event->controller = connection->controller_number;
    event->qid = connection->qid;
    event->reason = reason;
    event->arrival_ns = target_now_ns();
    if (connection->tls) {
        struct kvdev_tls_info info;
        kvdev_tls_link_read(connection->tls, &info);
        if (!info.tag) /* later, how a connection under TLS ends is no more than its end */
            memcpy(event->fault_text, info.error, sizeof event->fault_text);
    }
    if (fault) {
        event->fault_fes = fault->fes;
        kvdev_pdu_fault_text(fault, event->fault_text, sizeof(event->fault_text));
    }
    target_control_push_closed(target, connection);
}

static void deadline_clear(struct connection *connection)
{
    if (connection->deadline_ns) {
        connection->deadline_ns = 0;
        connection->poller->deadline_count--;
    }
}

static void deadline_set(struct connection *connection, uint32_t timeout_ms)
{
    if (!connection->deadline_ns)
        connection->poller->deadline_count++;
    connection->deadline_ns = target_now_ns() + (uint64_t)timeout_ms * NS_PER_MS;
}

static void socket_close(struct connection *connection)
{
    deadline_clear(connection);
    if (connection->fd >= 0) {
        /* A close alone keeps the set's entry while a child between fork and exec holds the descriptor. */
        epoll_ctl(connection->poller->epoll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
        close(connection->fd);
    }
    connection->fd = -1;
    connection->state = CONNECTION_CLOSED;
    atomic_store(&connection->is_closed, 1);
    if (connection->lent)
        kvdev_target_release(connection->target);
    atomic_store(&connection->poller->scan, 1); /* reap it this round */
}

/* The queue pair is over: no response goes out any more. */
void connection_close(struct connection *connection, int reason)
{
    if (connection->state == CONNECTION_CLOSED)
        return;
    if (connection->state == CONNECTION_LINGER) {
        struct request *request = list_pop(&connection->tx);
        socket_close(connection);
        if (request)
            command_release(request);
        return;
    }
    socket_close(connection);
    connection_detach(connection, reason, NULL, NULL);
}

/* Nothing more is taken in; what is to be sent goes out, then both sides close. */
void connection_end(struct connection *connection)
{
    connection->is_ending = 1;
    deadline_set(connection, connection->target->opts.linger_timeout_ms);
}

/* The peer broke the protocol: one C2HTermReq, after the PDU that is half sent if there is one, then close. */
void connection_fault(struct connection *connection, const struct kvdev_pdu_fault *fault)
{
    if (connection->state == CONNECTION_CLOSED || connection->state == CONNECTION_LINGER)
        return;
    struct kvdev_pdu_fault copy = *fault; /* it may lie in the machine that fail() writes to */
    kvdev_pdu_rx_fail(&connection->rx, &copy);
    stat_add(&connection->poller->fault_count, 1);
    uint8_t term[KVDEV_PDU_BUILD_MAX];
    size_t len = kvdev_pdu_build_term(term, &connection->rx, &copy);
    int is_half_sent_control = connection->control_sent > 0 && connection->control_sent < connection->control_len;
    if (len == 0 || is_half_sent_control) {
        /* Nothing is owed; or the ICResp itself did not fit into an empty socket, which nobody will read. */
        deadline_clear(connection);
        socket_close(connection);
        connection_detach(connection, -EPROTO, &copy, NULL);
        return;
    }
    struct request *head = connection->tx.first;
    int is_half_sent = head && (head->segment_index > 0 ||
                                head->segments[0].at != head->head); /* the first segment moves as it is sent */
    connection->state = CONNECTION_LINGER;
    deadline_clear(connection);
    connection_detach(connection, -EPROTO, &copy, is_half_sent ? head : NULL);
    if (is_half_sent)
        list_push(&connection->tx, head);
    memcpy(connection->control_out, term, len);
    connection->control_len = (uint32_t)len;
    connection->control_sent = 0;
    deadline_set(connection, connection->target->opts.linger_timeout_ms);
    connection_mark_dirty(connection);
}

/* Free closed connections that nobody holds any more. */
static void connections_reap(struct poller *poller)
{
    struct kvdev_target *target = poller->target;
    struct connection **link = &poller->connections;
    while (*link) {
        struct connection *connection = *link;
        if (connection->state != CONNECTION_CLOSED || connection->lent || connection->is_dirty) {
            link = &connection->next_of_poller;
            continue;
        }
        if (!atomic_load(&connection->was_closed_event_taken)) {
            link = &connection->next_of_poller;
            continue;
        }
        *link = connection->next_of_poller;
        pthread_mutex_lock(&target->lock);
        target->connections[connection->slot] = NULL;
        pthread_mutex_unlock(&target->lock);
        kvdev_tls_link_put(connection->tls);
        munmap(connection, connection->map_bytes);
    }
}

static int is_receiving_state(const struct connection *connection)
{
    return connection->state == CONNECTION_WAIT_IC || connection->state == CONNECTION_WAIT_CONNECT ||
           connection->state == CONNECTION_LIVE;
}

/* ---- sending ---- */

static void wants_out_set(struct connection *connection, int wants)
{
    if (connection->wants_out == wants || connection->fd < 0)
        return;
    struct epoll_event event = { .events = EPOLLIN | (wants ? EPOLLOUT : 0), .data.ptr = connection };
    epoll_ctl(connection->poller->epoll_fd, EPOLL_CTL_MOD, connection->fd, &event);
    connection->wants_out = (uint8_t)wants;
}

/* A memory device's block must not be sent half old and half new: what is left of the block that the socket
 * cut goes into the stash now, before any other command can change it. */
static void stash_block(struct connection *connection, struct request *request)
{
    struct segment *payload = &request->segments[1];
    size_t sent = (size_t)(payload->at - request->data);
    if (!request->is_direct || request->block_size > TARGET_STASH_BYTES || sent % request->block_size == 0)
        return;
    size_t rest = request->block_size - sent % request->block_size;
    memcpy(connection->stash, payload->at, rest);
    request->segments[0] = (struct segment){ connection->stash, rest };
    payload->at += rest;
    payload->len -= rest;
    request->segment_index = 0;
}

/* n bytes of the request at the head of the send list went out; returns how many were its own. */
static size_t request_sent(struct connection *connection, struct request *request, size_t n)
{
    size_t used = 0;
    while (request->segment_index < request->segment_count) {
        struct segment *segment = &request->segments[request->segment_index];
        size_t part = n - used < segment->len ? n - used : segment->len;
        segment->at += part;
        segment->len -= part;
        used += part;
        if (segment->len > 0) {
            if (request->segment_index == 1 && part > 0)
                stash_block(connection, request);
            return used;
        }
        request->segment_index++;
    }
    list_pop(&connection->tx);
    if (request->state == REQUEST_R2T_QUEUED && connection->state != CONNECTION_LINGER)
        command_r2t_sent(request);
    else
        command_release(request);
    return used;
}

static int iov_fill(const struct connection *connection, struct iovec *iov, int max)
{
    int count = 0;
    int is_term = connection->state == CONNECTION_LINGER; /* then the half-sent PDU goes first */
    if (!is_term && connection->control_sent < connection->control_len) {
        iov[count].iov_base = (void *)(uintptr_t)(connection->control_out + connection->control_sent);
        iov[count++].iov_len = connection->control_len - connection->control_sent;
    }
    for (const struct request *request = connection->tx.first; request && count + 3 <= max; request = request->next) {
        for (uint8_t i = request->segment_index; i < request->segment_count; i++) {
            if (request->segments[i].len == 0)
                continue;
            iov[count].iov_base = (void *)(uintptr_t)request->segments[i].at;
            iov[count++].iov_len = request->segments[i].len;
        }
    }
    if (is_term && count < max && connection->control_sent < connection->control_len) {
        iov[count].iov_base = (void *)(uintptr_t)(connection->control_out + connection->control_sent);
        iov[count++].iov_len = connection->control_len - connection->control_sent;
    }
    return count;
}

static void sent(struct connection *connection, size_t n)
{
    size_t control = connection->control_len - connection->control_sent;
    if (connection->state != CONNECTION_LINGER) {
        size_t part = n < control ? n : control;
        connection->control_sent += (uint32_t)part;
        n -= part;
    }
    while (n > 0 && connection->tx.first)
        n -= request_sent(connection, connection->tx.first, n);
    if (connection->state == CONNECTION_LINGER)
        connection->control_sent += (uint32_t)n;
}

static void connection_flush(struct connection *connection)
{
    struct iovec iov[TARGET_IOV_MAX];
    while (connection->fd >= 0) {
        int count = iov_fill(connection, iov, TARGET_IOV_MAX);
        if (count == 0) {
            wants_out_set(connection, 0);
            if (connection->is_ending && is_receiving_state(connection)) {
                connection->state = CONNECTION_LINGER;
                connection->control_len = 0;
                connection->control_sent = 0;
                connection_detach(connection, -EACCES, NULL, NULL);
            }
            if (connection->state == CONNECTION_LINGER && !connection->shut) {
                /* Half-close, then wait for the peer's end: an early close would reset the connection and
                 * could take the Term PDU with it. */
                connection->shut = 1;
                shutdown(connection->fd, SHUT_WR);
            }
            return;
        }
        size_t asked = 0;
        for (int i = 0; i < count; i++)
            asked += iov[i].iov_len;
        struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)count };
        ssize_t n = sendmsg(connection->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
            wants_out_set(connection, 1);
            return;
        }
        if (n < 0) {
            connection_close(connection, -errno);
            return;
        }
        stat_add(&connection->poller->tx_bytes, (uint64_t)n);
        sent(connection, (size_t)n);
        if ((size_t)n < asked) {
            wants_out_set(connection, 1);
            return;
        }
    }
}

/* ---- receiving ---- */

static void ic_request(struct connection *connection)
{
    connection->control_len = (uint32_t)kvdev_pdu_build_ic_resp(connection->control_out, &connection->rx.link);
    connection->control_sent = 0;
    connection->info.hdgst = connection->rx.link.hdgst;
    connection->info.ddgst = connection->rx.link.ddgst;
    connection->state = CONNECTION_WAIT_CONNECT;
    connection_mark_dirty(connection);
}

static void pdu_header(struct connection *connection)
{
    switch (connection->rx.pdu.type) {
    case KVDEV_PDU_IC_REQ:
        ic_request(connection);
        break;
    case KVDEV_PDU_CAPSULE_CMD:
        command_capsule(connection);
        break;
    case KVDEV_PDU_H2C_DATA:
        command_h2c_data(connection);
        break;
    default:
        /* H2CTermReq: the host gave up; it says why in fes and fei. */
        connection_close(connection, -ECONNABORTED);
        break;
    }
}

static int is_receiving(const struct connection *connection)
{
    return is_receiving_state(connection) && !connection->is_ending;
}

static void received(struct connection *connection, const uint8_t *buf, size_t len)
{
    while (len > 0 && is_receiving(connection)) {
        size_t consumed = 0;
        int event = kvdev_pdu_rx_step(&connection->rx, buf, len, &consumed);
        buf += consumed;
        len -= consumed;
        switch (event) {
        case KVDEV_PDU_HEADER:
            pdu_header(connection);
            break;
        case KVDEV_PDU_DATA_DONE:
            command_payload_done(connection);
            break;
        case KVDEV_PDU_FAULT:
            connection_fault(connection, &connection->rx.fault);
            return;
        default:
            break;
        }
    }
}

/* Throw away what a lingering peer still sends, up to the budget of one turn. */
static void linger_readable(struct connection *connection)
{
    for (int turn = 0; turn < TARGET_RX_BUDGET; turn++) {
        ssize_t n = recv(connection->fd, connection->rx_buf, TARGET_RX_BYTES, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return;
        if (n <= 0) {
            connection_close(connection, 0);
            return;
        }
    }
}

static void connection_readable(struct connection *connection)
{
    for (int turn = 0; turn < TARGET_RX_BUDGET && is_receiving(connection); turn++) {
        struct iovec iov[2];
        uint8_t *dst = NULL;
        size_t want = 0;
        kvdev_pdu_rx_payload_want(&connection->rx, &dst, &want);
        int count = 0;
        if (want > 0) {
            iov[count].iov_base = dst;
            iov[count++].iov_len = want;
        }
        /* While bulk data is on its way, only a header's worth is taken behind it, so that the next payload
         * too is received where it belongs. */
        size_t tail = connection->r2t_open ? TARGET_RX_TAIL_BYTES : TARGET_RX_BYTES;
        iov[count].iov_base = connection->rx_buf;
        iov[count++].iov_len = tail;
        struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)count };
        ssize_t n = recvmsg(connection->fd, &msg, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            connection_close(connection, n < 0 ? -errno : 0);
            return;
        }
        stat_add(&connection->poller->rx_bytes, (uint64_t)n);
        size_t got = (size_t)n;
        size_t landed = got < want ? got : want;
        if (landed > 0 && kvdev_pdu_rx_payload_landed(&connection->rx, landed) == KVDEV_PDU_DATA_DONE)
            command_payload_done(connection);
        if (got > landed)
            received(connection, connection->rx_buf, got - landed);
        if (got < want + tail)
            return; /* the socket is empty: epoll tells when there is more */
    }
}

/* ---- the loop ---- */

static void connection_adopt(struct poller *poller, struct connection *connection)
{
    connection->poller = poller;
    connection->info.poller = (uint8_t)poller->index;
    connection->next_of_poller = poller->connections;
    poller->connections = connection;
    atomic_fetch_add(&poller->unbound_now, 1);
    atomic_store(&poller->scan, 1); /* its listener may be gone already */
    deadline_set(connection, connection->target->opts.connect_timeout_ms);
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = connection };
    if (epoll_ctl(poller->epoll_fd, EPOLL_CTL_ADD, connection->fd, &event) != 0)
        connection_close(connection, -errno);
}

static struct connection *connection_accepted(struct kvdev_target *target, int fd, uint32_t listener_id)
{
    pthread_mutex_lock(&target->lock);
    struct kvdev_target_transport transport = target->transport;
    uint32_t slot = 0;
    while (slot < target->opts.connections_max && target->connections[slot])
        slot++;
    struct connection *connection = NULL;
    if (slot < target->opts.connections_max)
        connection = connection_new(target, &transport);
    if (connection) {
        connection->slot = slot;
        connection->number = ++target->connection_number_next;
        target->connections[slot] = connection;
    }
    pthread_mutex_unlock(&target->lock);
    if (!connection)
        return NULL;
    connection->fd = fd;
    connection->listener_id = listener_id;
    struct sockaddr_storage address;
    socklen_t len = sizeof(address);
    memset(&address, 0, sizeof(address));
    if (getpeername(fd, (struct sockaddr *)&address, &len) == 0)
        address_text(&address, connection->info.peer_address, sizeof(connection->info.peer_address),
                     &connection->info.peer_port);
    len = sizeof(address);
    if (getsockname(fd, (struct sockaddr *)&address, &len) == 0)
        address_text(&address, connection->info.local_address, sizeof(connection->info.local_address),
                     &connection->info.local_port);
    struct kvdev_pdu_link link = {
        .hdgst = transport.hdgst,
        .ddgst = transport.ddgst,
        .recv_pda = transport.cpda,
        .maxh2cdata = transport.maxh2cdata,
        .in_capsule_max = KVDEV_PDU_IN_CAPSULE_ADMIN,
    };
    kvdev_pdu_rx_init(&connection->rx, KVDEV_PDU_TARGET, &link);
    return connection;
}

/* It was never shown to a poller. */
static void connection_unslot(struct connection *connection)
{
    struct kvdev_target *target = connection->target;
    pthread_mutex_lock(&target->lock);
    target->connections[connection->slot] = NULL;
    pthread_mutex_unlock(&target->lock);
    munmap(connection, connection->map_bytes);
}

static void connection_hand_over(struct kvdev_target *target, struct poller *here, struct connection *connection)
{
    struct poller *poller = &target->pollers[target->poller_next++ % target->opts.poller_count];
    if (poller == here) {
        connection_adopt(poller, connection);
        return;
    }
    pthread_mutex_lock(&poller->inbox_lock);
    connection->next_event = poller->inbox_connections;
    poller->inbox_connections = connection;
    atomic_store(&poller->inbox_pending, 1);
    pthread_mutex_unlock(&poller->inbox_lock);
    target_poller_kick(poller);
}

static void listeners_accept(struct poller *poller, uint32_t slot)
{
    struct kvdev_target *target = poller->target;
    pthread_mutex_lock(&target->lock);
    struct listener listener = target->listeners[slot];
    pthread_mutex_unlock(&target->lock);
    if (listener.id == 0 || listener.is_closing)
        return;
    /* A burst longer than this waits for the next round: connections that work go first. */
    for (int turn = 0; turn < 16; turn++) {
        int fd = accept4(listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                /* Leave the epoll set until the next tick, or the ready socket would keep the loop spinning. */
                epoll_ctl(poller->epoll_fd, EPOLL_CTL_DEL, listener.fd, NULL);
                pthread_mutex_lock(&target->lock);
                target->listeners[slot].is_paused = 1;
                pthread_mutex_unlock(&target->lock);
                poller->deadline_count++;
            }
            return;
        }
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        struct connection *connection = connection_accepted(target, fd, listener.id);
        if (connection && listener.tls && kvdev_tls_start(listener.tls, fd, &connection->fd, &connection->tls)) {
            connection_unslot(connection);
            connection = NULL;
        }
        if (!connection) {
            stat_add(&poller->refused_count, 1);
            close(fd);
            continue;
        }
        connection_hand_over(target, poller, connection);
    }
}

static void listeners_tend(struct poller *poller)
{
    struct kvdev_target *target = poller->target;
    if (poller->index != 0)
        return;
    pthread_mutex_lock(&target->lock);
    for (uint32_t slot = 0; slot < target->opts.listeners_max; slot++) {
        struct listener *listener = &target->listeners[slot];
        if (listener->id && listener->is_closing) {
            if (listener->is_paused)
                poller->deadline_count--;
            close(listener->fd);
            memset(listener, 0, sizeof(*listener));
            pthread_cond_broadcast(&target->changed);
        } else if (listener->id && listener->is_paused) {
            struct epoll_event event = { .events = EPOLLIN, .data.u64 = EPOLL_TAG_LISTENER + 16 * (uint64_t)slot };
            if (epoll_ctl(poller->epoll_fd, EPOLL_CTL_ADD, listener->fd, &event) == 0) {
                listener->is_paused = 0;
                poller->deadline_count--;
            }
        }
    }
    pthread_mutex_unlock(&target->lock);
}

static int listener_is_open(struct kvdev_target *target, uint32_t id)
{
    for (uint32_t slot = 0; slot < target->opts.listeners_max; slot++) {
        if (target->listeners[slot].id == id && !target->listeners[slot].is_closing)
            return 1;
    }
    return 0;
}

static int has_evicted_namespace(const struct connection *connection)
{
    for (uint16_t i = 0; i < connection->request_count; i++) {
        const struct request *request = &connection->requests[i];
        if (request->state != REQUEST_FREE && request->ns && atomic_load(&request->ns->evict))
            return 1;
    }
    return 0;
}

/* Tell those who wait for commands to end that this poller has none; under target->lock. */
static void drains_look(struct poller *poller)
{
    struct kvdev_target *target = poller->target;
    for (struct drain *drain = target->drains; drain; drain = drain->next) {
        int is_idle = 1;
        for (struct connection *c = poller->connections; c; c = c->next_of_poller) {
            if (target_is_drained(drain, c))
                continue;
            is_idle = 0;
            if (drain->evict)
                atomic_store(&c->kill, 1);
        }
        if (is_idle)
            drain->idle_map |= (uint64_t)1 << poller->index;
    }
    if (target->drains)
        pthread_cond_broadcast(&target->changed);
}

/* End the connections whose listener, controller or namespace is gone, or that were asked to end. */
static void connections_scan(struct poller *poller)
{
    struct kvdev_target *target = poller->target;
    pthread_mutex_lock(&target->lock);
    drains_look(poller);
    pthread_mutex_unlock(&target->lock);
    for (struct connection *c = poller->connections; c; c = c->next_of_poller) {
        if (c->state == CONNECTION_CLOSED || c->state == CONNECTION_LINGER)
            continue;
        pthread_mutex_lock(&target->lock);
        int is_open = listener_is_open(target, c->listener_id);
        pthread_mutex_unlock(&target->lock);
        if (!is_open || atomic_load(&c->kill) || (c->controller && atomic_load(&c->controller->is_dead)) ||
            has_evicted_namespace(c))
            connection_close(c, -ESHUTDOWN);
    }
}

static void deadlines_check(struct poller *poller)
{
    for (struct connection *c = poller->connections; c; c = c->next_of_poller) {
        if (c->deadline_ns && poller->now_ns >= c->deadline_ns)
            connection_close(c, -ETIMEDOUT);
    }
}

static void inbox_take(struct poller *poller)
{
    uint64_t ignored;
    ssize_t got = read(poller->event_fd, &ignored, sizeof(ignored));
    (void)got; /* empty: somebody's kick was already taken */
    pthread_mutex_lock(&poller->inbox_lock);
    struct request_list inbox = poller->inbox;
    struct connection *connections = poller->inbox_connections;
    poller->inbox = (struct request_list){ NULL, NULL };
    poller->inbox_connections = NULL;
    atomic_store(&poller->inbox_pending, 0);
    pthread_mutex_unlock(&poller->inbox_lock);
    while (connections) {
        struct connection *connection = connections;
        connections = connection->next_event;
        connection->next_event = NULL;
        connection_adopt(poller, connection);
    }
    struct request *request;
    while ((request = list_pop(&inbox)) != NULL)
        command_returned(request);
}

static void dirty_flush(struct poller *poller)
{
    while (poller->dirty) {
        struct connection *connection = poller->dirty;
        poller->dirty = connection->next_dirty;
        connection->next_dirty = NULL;
        connection->is_dirty = 0;
        connection_flush(connection);
    }
}

static void buffers_grant(struct poller *poller)
{
    while (poller->buffer_count > 0 && poller->wait_buffer.first) {
        struct request *request = list_pop(&poller->wait_buffer);
        request->buffer = poller->buffers[--poller->buffer_count];
        command_buffer_granted(request);
    }
}

static void round_end(struct poller *poller)
{
    /* Sending frees buffers, buffers start commands, commands want sending. Each round of the inner loop
     * starts at least one waiting command, so it ends. */
    dirty_flush(poller);
    while (poller->buffer_count > 0 && poller->wait_buffer.first) {
        buffers_grant(poller);
        dirty_flush(poller);
    }
    if (atomic_exchange(&poller->scan, 0)) {
        listeners_tend(poller);
        connections_scan(poller);
        dirty_flush(poller);
        connections_reap(poller);
    }
}

static void event_handle(struct poller *poller, const struct epoll_event *event)
{
    uint64_t tag = event->data.u64 & EPOLL_TAG_MASK;
    if (tag == EPOLL_TAG_EVENT) {
        inbox_take(poller);
        return;
    }
    if (tag == EPOLL_TAG_LISTENER) {
        listeners_accept(poller, (uint32_t)(event->data.u64 / 16));
        return;
    }
    struct connection *connection = event->data.ptr;
    if (connection->state == CONNECTION_CLOSED)
        return; /* closed earlier in this round */
    if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        if (connection->state == CONNECTION_LINGER || connection->is_ending)
            linger_readable(connection);
        else
            connection_readable(connection);
    }
    if (event->events & EPOLLOUT)
        connection_mark_dirty(connection);
}

static void poller_stop(struct poller *poller)
{
    for (struct connection *c = poller->connections; c; c = c->next_of_poller)
        connection_close(c, -ESHUTDOWN);
    dirty_flush(poller);
}

void *target_poller_main(void *arg)
{
    struct poller *poller = arg;
    struct kvdev_target *target = poller->target;
    struct epoll_event events[TARGET_EPOLL_MAX];
    atomic_store(&poller->thread_id, (int32_t)syscall(SYS_gettid));
    atomic_store(&poller->buffers_free, poller->buffer_count);
    poller->now_ns = target_now_ns();
    while (!atomic_load(&target->stopping)) {
        int timeout = poller->deadline_count ? TARGET_TICK_MS : -1;
        int count = epoll_wait(poller->epoll_fd, events, TARGET_EPOLL_MAX, timeout);
        uint64_t woke = target_now_ns();
        stat_add(&poller->idle_ns, woke - poller->now_ns);
        poller->now_ns = woke;
        for (int i = 0; i < count; i++)
            event_handle(poller, &events[i]);
        if (poller->deadline_count) {
            deadlines_check(poller);
            listeners_tend(poller);
        }
        round_end(poller);
        atomic_store_explicit(&poller->buffers_free, poller->buffer_count, memory_order_relaxed);
        uint64_t done = target_now_ns();
        stat_add(&poller->busy_ns, done - poller->now_ns);
        poller->now_ns = done;
    }
    inbox_take(poller);
    poller_stop(poller);
    return NULL;
}

/* See tls.h. The connections of a pump are touched by its thread alone, from the inbox on. */
#include "tls.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define BUFFER_BYTES 65536
#define ROUNDS_MAX 8 /* of one connection before the others have a turn */
#define EVENTS_MAX 64
#define NAME_LIBSSL "libssl.so.3"

/* What is used of OpenSSL 3, declared here: its headers are not needed to build. */
#define TLS1_3 0x0304
#define CTRL_MODE 33
#define CTRL_SESSION_CACHE_MODE 44
#define CTRL_MIN_VERSION 123
#define CTRL_MAX_VERSION 124
#define MODE_PARTIAL_WRITE 1
#define MODE_MOVING_BUFFER 2
#define VERIFY_PEER 1
#define ERROR_SSL 1
#define ERROR_WANT_READ 2
#define ERROR_WANT_WRITE 3
#define ERROR_SYSCALL 5
#define ERROR_ZERO_RETURN 6

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_session_st SSL_SESSION;
typedef int (*use_session_fn)(SSL *, const void *md, const unsigned char **id, size_t *id_len, SSL_SESSION **);
typedef int (*find_session_fn)(SSL *, const unsigned char *id, size_t id_len, SSL_SESSION **);

#define FUNCTIONS(X)                                                             \
    X(SSL_CTX *, SSL_CTX_new, (const void *))                                    \
    X(const void *, TLS_client_method, (void))                                   \
    X(const void *, TLS_server_method, (void))                                   \
    X(void, SSL_CTX_free, (SSL_CTX *))                                           \
    X(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                        \
    X(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                  \
    X(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                         \
    X(void, SSL_CTX_set_verify, (SSL_CTX *, int, void *))                        \
    X(void, SSL_CTX_set_psk_use_session_callback, (SSL_CTX *, use_session_fn))   \
    X(void, SSL_CTX_set_psk_find_session_callback, (SSL_CTX *, find_session_fn)) \
    X(SSL *, SSL_new, (SSL_CTX *))                                               \
    X(void, SSL_free, (SSL *))                                                   \
    X(int, SSL_set_fd, (SSL *, int))                                             \
    X(void, SSL_set_connect_state, (SSL *))                                      \
    X(void, SSL_set_accept_state, (SSL *))                                       \
    X(int, SSL_do_handshake, (SSL *))                                            \
    X(int, SSL_session_reused, (const SSL *))                                    \
    X(int, SSL_read, (SSL *, void *, int))                                       \
    X(int, SSL_write, (SSL *, const void *, int))                                \
    X(int, SSL_shutdown, (SSL *))                                                \
    X(int, SSL_get_error, (const SSL *, int))                                    \
    X(SSL_SESSION *, SSL_SESSION_new, (void))                                    \
    X(void, SSL_SESSION_free, (SSL_SESSION *))                                   \
    X(int, SSL_SESSION_set1_master_key, (SSL_SESSION *, const unsigned char *, size_t)) \
    X(int, SSL_SESSION_set_cipher, (SSL_SESSION *, const void *))                \
    X(int, SSL_SESSION_set_protocol_version, (SSL_SESSION *, int))               \
    X(const void *, SSL_CIPHER_find, (SSL *, const unsigned char *))             \
    X(unsigned long, ERR_get_error, (void))                                      \
    X(void, ERR_clear_error, (void))                                             \
    X(const char *, ERR_reason_error_string, (unsigned long))

struct library {
    void *handle;
#define MEMBER(type, name, arguments) type(*name) arguments;
    FUNCTIONS(MEMBER)
#undef MEMBER
};

struct kvdev_tls_context {
    struct kvdev_tls_pump *pump;
    SSL_CTX *ctx;
    int is_listener;
    atomic_uint holders;
    pthread_mutex_t lock; /* over the keys */
    struct kvdev_tls_psk *psks;
    uint32_t psk_count;
};

struct kvdev_tls_link {
    struct kvdev_tls_link *next; /* in the inbox, then among the pump's connections */
    struct kvdev_tls_pump *pump;
    struct kvdev_tls_context *context;
    SSL *ssl;
    int tcp_fd;
    int pair_fd;
    uint32_t tcp_events, pair_events; /* epoll waits for */
    uint8_t is_open, is_runnable, is_peer_done, is_peer_told, is_ours_done, is_shut, wants_tcp_out;
    uint8_t is_broken;  /* what the connection sends cannot reach the peer any more */
    uint8_t is_tcp_out; /* the TCP socket has ended and left the epoll set */
    uint8_t *up; /* from the connection to the peer; also `down`, the other way */
    uint8_t *down;
    size_t up_at, up_len, down_at, down_len;
    uint32_t tag_found;
    atomic_uint holders;
    pthread_mutex_t lock; /* over info */
    struct kvdev_tls_info info;
};

struct kvdev_tls_pump {
    struct library lib;
    pthread_t thread;
    int epoll_fd;
    int event_fd;
    int is_started;
    atomic_int is_stopping;
    atomic_uint holders;  /* its owner and the contexts */
    pthread_mutex_t lock; /* over the inbox */
    int is_ended;         /* the inbox is not read any more */
    struct kvdev_tls_link *inbox;
    struct kvdev_tls_link *links;
};

/* ---- the library ---- */

static int library_open(struct library *lib)
{
    lib->handle = dlopen(NAME_LIBSSL, RTLD_NOW | RTLD_LOCAL);
    if (!lib->handle)
        return -ENOSYS;
    int is_whole = 1;
#define RESOLVE(type, name, arguments)                   \
    do {                                                 \
        void *found = dlsym(lib->handle, #name);         \
        memcpy(&lib->name, &found, sizeof found);        \
        is_whole = is_whole && found;                    \
    } while (0);
    FUNCTIONS(RESOLVE)
#undef RESOLVE
    if (is_whole)
        return 0;
    dlclose(lib->handle);
    return -ENOSYS;
}

/* ---- keys ---- */

static int suite_id(uint32_t suite, unsigned char *id)
{
    id[0] = 0x13;
    id[1] = (unsigned char)suite;
    return suite == 1 || suite == 2;
}

static int psk_is_valid(const struct kvdev_tls_psk *psk)
{
    unsigned char id[2];
    return suite_id(psk->suite, id) && psk->psk_len > 0 && psk->psk_len <= KVDEV_TLS_PSK_MAX && psk->tag &&
           psk->identity[0] && memchr(psk->identity, 0, sizeof psk->identity);
}

static SSL_SESSION *session_of(struct library *lib, SSL *ssl, const struct kvdev_tls_psk *psk)
{
    unsigned char id[2];
    suite_id(psk->suite, id);
    const void *cipher = lib->SSL_CIPHER_find(ssl, id);
    SSL_SESSION *session = lib->SSL_SESSION_new();
    if (session && cipher && lib->SSL_SESSION_set1_master_key(session, psk->psk, psk->psk_len) &&
        lib->SSL_SESSION_set_cipher(session, cipher) && lib->SSL_SESSION_set_protocol_version(session, TLS1_3))
        return session;
    lib->SSL_SESSION_free(session);
    return NULL;
}

/* Whose handshake this thread is in: OpenSSL's callbacks get nothing of ours. */
static _Thread_local struct kvdev_tls_link *link_in_hand;

static int host_session(SSL *ssl, const void *md, const unsigned char **id, size_t *id_len, SSL_SESSION **session)
{
    struct kvdev_tls_link *link = link_in_hand;
    (void)md; /* one suite is offered, so it can only be the key's */
    if (!link)
        return 0;
    const struct kvdev_tls_psk *psk = &link->context->psks[0];
    *session = session_of(&link->pump->lib, ssl, psk);
    *id = (const unsigned char *)psk->identity;
    *id_len = strlen(psk->identity);
    link->tag_found = psk->tag;
    return *session != NULL;
}

/* An identity that is not known is not an error here: the handshake fails for want of a key. */
static int listener_session(SSL *ssl, const unsigned char *id, size_t id_len, SSL_SESSION **session)
{
    struct kvdev_tls_link *link = link_in_hand;
    *session = NULL;
    if (!link || id_len == 0 || id_len >= KVDEV_TLS_IDENTITY_MAX)
        return 1;
    struct kvdev_tls_context *context = link->context;
    pthread_mutex_lock(&context->lock);
    for (uint32_t i = 0; i < context->psk_count; i++) {
        const struct kvdev_tls_psk *psk = &context->psks[i];
        if (strlen(psk->identity) == id_len && !memcmp(psk->identity, id, id_len)) {
            *session = session_of(&link->pump->lib, ssl, psk);
            link->tag_found = psk->tag;
            break;
        }
    }
    pthread_mutex_unlock(&context->lock);
    return 1;
}

/* ---- a connection's life ---- */

static void link_error(struct kvdev_tls_link *link, const char *what, const char *reason)
{
    pthread_mutex_lock(&link->lock);
    if (!link->info.error[0])
        snprintf(link->info.error, sizeof link->info.error, "%s: %s", what, reason);
    pthread_mutex_unlock(&link->lock);
}

static void link_state(struct kvdev_tls_link *link, uint32_t state)
{
    pthread_mutex_lock(&link->lock);
    link->info.state = state;
    if (state == KVDEV_TLS_OPEN)
        link->info.tag = link->tag_found;
    pthread_mutex_unlock(&link->lock);
}

void kvdev_tls_link_read(struct kvdev_tls_link *link, struct kvdev_tls_info *ret)
{
    pthread_mutex_lock(&link->lock);
    *ret = link->info;
    pthread_mutex_unlock(&link->lock);
}

void kvdev_tls_link_put(struct kvdev_tls_link *link)
{
    if (!link || atomic_fetch_sub(&link->holders, 1) != 1)
        return;
    pthread_mutex_destroy(&link->lock);
    free(link->up);
    free(link->down);
    free(link);
}

/* Ends both sides; with is_reset the peer learns that bytes are missing. */
static void link_close(struct kvdev_tls_link *link, int is_reset)
{
    if (link->tcp_fd < 0)
        return;
    if (is_reset) {
        struct linger hard = { .l_onoff = 1, .l_linger = 0 };
        setsockopt(link->tcp_fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }
    if (link->ssl)
        link->pump->lib.SSL_free(link->ssl);
    link->ssl = NULL;
    link_state(link, KVDEV_TLS_CLOSED); /* before the connection can see its end */
    /* A close alone keeps the set's entry while a child between fork and exec holds the descriptor: its events
     * would name a link that is gone. */
    epoll_ctl(link->pump->epoll_fd, EPOLL_CTL_DEL, link->tcp_fd, NULL);
    epoll_ctl(link->pump->epoll_fd, EPOLL_CTL_DEL, link->pair_fd, NULL);
    close(link->tcp_fd);
    close(link->pair_fd);
    link->tcp_fd = link->pair_fd = -1;
    kvdev_tls_context_destroy(link->context);
    link->context = NULL;
}

static void buffer_clear(void *at, size_t len)
{
    memset(at, 0, len);
    atomic_signal_fence(memory_order_seq_cst); /* it is not left out as a dead store */
}

int kvdev_tls_start(struct kvdev_tls_context *context, int fd, int *ret_fd, struct kvdev_tls_link **ret)
{
    struct kvdev_tls_pump *pump = context->pump;
    int pair[2] = { -1, -1 };
    struct kvdev_tls_link *link = calloc(1, sizeof *link);
    if (link) {
        link->up = malloc(BUFFER_BYTES);
        link->down = malloc(BUFFER_BYTES);
    }
    if (!link || !link->up || !link->down ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair)) {
        int err = link && link->up && link->down ? -errno : -ENOMEM;
        if (link) {
            free(link->up);
            free(link->down);
            free(link);
        }
        return err;
    }
    atomic_fetch_add(&context->holders, 1);
    pthread_mutex_init(&link->lock, NULL);
    atomic_init(&link->holders, 2); /* the pump's and the caller's */
    link->pump = pump;
    link->context = context;
    link->tcp_fd = fd;
    link->pair_fd = pair[0];
    pthread_mutex_lock(&pump->lock);
    int is_ended = pump->is_ended;
    if (!is_ended) {
        link->next = pump->inbox;
        pump->inbox = link;
    }
    pthread_mutex_unlock(&pump->lock);
    if (is_ended) {
        close(pair[0]);
        close(pair[1]);
        kvdev_tls_context_destroy(context);
        atomic_store(&link->holders, 1);
        kvdev_tls_link_put(link);
        return -ESHUTDOWN;
    }
    *ret_fd = pair[1];
    *ret = link;
    uint64_t one = 1;
    ssize_t ignored = write(pump->event_fd, &one, sizeof one);
    (void)ignored;
    return 0;
}

/* What OpenSSL says about its last call: 0 to wait (for `*events` of the TCP socket), else the connection is over. */
static int ssl_verdict(struct kvdev_tls_link *link, int result, const char *what, int *wants_out)
{
    struct library *lib = &link->pump->lib;
    int saved = errno;
    int error = lib->SSL_get_error(link->ssl, result);
    if (error == ERROR_WANT_READ)
        return 0;
    if (error == ERROR_WANT_WRITE) {
        *wants_out = 1;
        return 0;
    }
    if (error == ERROR_ZERO_RETURN)
        return -1;
    unsigned long code = lib->ERR_get_error();
    const char *reason = code ? lib->ERR_reason_error_string(code) : NULL;
    if (reason && (strstr(reason, "version") || strstr(reason, "http request"))) {
        pthread_mutex_lock(&link->lock);
        link->info.is_version_refused = 1;
        pthread_mutex_unlock(&link->lock);
    }
    if (error == ERROR_SYSCALL && !code && saved == 0)
        link_error(link, what, "the connection ended");
    else
        link_error(link, what, reason ? reason : strerror(saved));
    return -1;
}

static int handshake(struct kvdev_tls_link *link)
{
    struct library *lib = &link->pump->lib;
    lib->ERR_clear_error();
    errno = 0;
    link_in_hand = link;
    int result = lib->SSL_do_handshake(link->ssl);
    link_in_hand = NULL;
    int wants_out = 0;
    if (result != 1) {
        if (ssl_verdict(link, result, "TLS handshake", &wants_out)) {
            link_close(link, 0);
            return 0;
        }
        link->wants_tcp_out = (uint8_t)wants_out;
        return 0;
    }
    if (!lib->SSL_session_reused(link->ssl)) {
        /* A certificate instead of the key: nobody here has checked it. */
        link_error(link, "TLS handshake", "the other side did not use the key");
        link_close(link, 1);
        return 0;
    }
    link->is_open = 1;
    link_state(link, KVDEV_TLS_OPEN);
    return 1;
}

/* From the peer to the connection; returns whether something moved, -1 when the connection is over. */
static int pump_down(struct kvdev_tls_link *link)
{
    struct library *lib = &link->pump->lib;
    int moved = 0;
    if (link->down_at == link->down_len && !link->is_peer_done) {
        lib->ERR_clear_error();
        errno = 0;
        int n = lib->SSL_read(link->ssl, link->down, BUFFER_BYTES);
        int wants_out = 0;
        if (n > 0) {
            link->down_at = 0;
            link->down_len = (size_t)n;
            moved = 1;
        } else if (ssl_verdict(link, n, "TLS", &wants_out)) {
            link->is_peer_done = 1;
        }
        link->wants_tcp_out |= (uint8_t)wants_out;
    }
    if (link->down_at < link->down_len) {
        ssize_t n = send(link->pair_fd, link->down + link->down_at, link->down_len - link->down_at,
                         MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return -1;
        if (n > 0) {
            link->down_at += (size_t)n;
            moved = 1;
        }
    }
    if (link->is_peer_done && link->down_at == link->down_len && !link->is_peer_told) {
        link->is_peer_told = 1;
        shutdown(link->pair_fd, SHUT_WR);
        moved = 1;
    }
    return moved;
}

/* From the connection to the peer. */
static int pump_up(struct kvdev_tls_link *link)
{
    struct library *lib = &link->pump->lib;
    int moved = 0;
    if (link->up_at == link->up_len && !link->is_ours_done) {
        ssize_t n = recv(link->pair_fd, link->up, BUFFER_BYTES, MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return -1;
        if (n > 0) {
            link->up_at = 0;
            link->up_len = (size_t)n;
            moved = 1;
        } else if (n == 0) {
            link->is_ours_done = 1;
        }
    }
    if (link->up_at < link->up_len) {
        lib->ERR_clear_error();
        errno = 0;
        int n = lib->SSL_write(link->ssl, link->up + link->up_at, (int)(link->up_len - link->up_at));
        int wants_out = 0;
        if (n > 0) {
            link->up_at += (size_t)n;
            moved = 1;
        } else if (ssl_verdict(link, n, "TLS", &wants_out)) {
            /* What the peer sent before it went is still to be delivered. */
            link->is_broken = link->is_ours_done = link->is_shut = 1;
            link->up_at = link->up_len;
            moved = 1;
        }
        link->wants_tcp_out |= (uint8_t)wants_out;
    }
    if (link->is_ours_done && link->up_at == link->up_len && !link->is_shut) {
        link->is_shut = 1;
        lib->ERR_clear_error();
        lib->SSL_shutdown(link->ssl); /* close_notify, once; the peer's is not waited for here */
        shutdown(link->tcp_fd, SHUT_WR);
        moved = 1;
    }
    return moved;
}

static void epoll_set(struct kvdev_tls_link *link, int fd, uint32_t *now, uint32_t events, uint64_t side)
{
    if (*now == events)
        return;
    struct epoll_event event = { .events = events, .data.u64 = (uint64_t)(uintptr_t)link | side };
    epoll_ctl(link->pump->epoll_fd, EPOLL_CTL_MOD, fd, &event);
    *now = events;
}

static void link_wait(struct kvdev_tls_link *link)
{
    int is_down_full = link->down_at < link->down_len;
    int is_up_full = link->up_at < link->up_len;
    uint32_t tcp = 0;
    uint32_t pair = 0;
    if (!link->is_open || (!is_down_full && !link->is_peer_done))
        tcp |= EPOLLIN;
    if (link->wants_tcp_out)
        tcp |= EPOLLOUT;
    if (link->is_open && !is_up_full && !link->is_ours_done)
        pair |= EPOLLIN;
    if (is_down_full)
        pair |= EPOLLOUT;
    if (!link->is_tcp_out)
        epoll_set(link, link->tcp_fd, &link->tcp_events, tcp, 0);
    epoll_set(link, link->pair_fd, &link->pair_events, pair, 1);
}

static void link_turn(struct kvdev_tls_link *link)
{
    link->is_runnable = 0;
    link->wants_tcp_out = 0;
    if (!link->is_open && !handshake(link)) {
        if (link->tcp_fd >= 0)
            link_wait(link);
        return;
    }
    int moved = 1;
    for (int round = 0; round < ROUNDS_MAX && moved; round++) {
        link->wants_tcp_out = 0;
        int down = pump_down(link);
        int up = down < 0 ? -1 : pump_up(link);
        if (down < 0 || up < 0) {
            link_close(link, 1);
            return;
        }
        moved = down || up;
    }
    if (link->is_shut && link->is_peer_told) {
        link_close(link, link->is_broken);
        return;
    }
    link->is_runnable = moved != 0;
    link_wait(link);
}

/* ---- the pump ---- */

static void link_adopt(struct kvdev_tls_pump *pump, struct kvdev_tls_link *link)
{
    struct library *lib = &pump->lib;
    link->next = pump->links;
    pump->links = link;
    struct epoll_event event = { .events = 0, .data.u64 = (uint64_t)(uintptr_t)link };
    struct epoll_event pair = { .events = 0, .data.u64 = (uint64_t)(uintptr_t)link | 1 };
    link->ssl = lib->SSL_new(link->context->ctx);
    if (!link->ssl || !lib->SSL_set_fd(link->ssl, link->tcp_fd) ||
        epoll_ctl(pump->epoll_fd, EPOLL_CTL_ADD, link->tcp_fd, &event) ||
        epoll_ctl(pump->epoll_fd, EPOLL_CTL_ADD, link->pair_fd, &pair)) {
        link_error(link, "TLS", "out of memory");
        link_close(link, 1);
        return;
    }
    if (link->context->is_listener)
        lib->SSL_set_accept_state(link->ssl);
    else
        lib->SSL_set_connect_state(link->ssl);
    link_turn(link);
}

static void inbox_take(struct kvdev_tls_pump *pump)
{
    uint64_t ignored;
    ssize_t got = read(pump->event_fd, &ignored, sizeof ignored);
    (void)got;
    pthread_mutex_lock(&pump->lock);
    struct kvdev_tls_link *link = pump->inbox;
    pump->inbox = NULL;
    pthread_mutex_unlock(&pump->lock);
    while (link) {
        struct kvdev_tls_link *next = link->next;
        link_adopt(pump, link);
        link = next;
    }
}

static void event_handle(struct kvdev_tls_link *link, int is_pair, uint32_t events)
{
    if (link->tcp_fd < 0)
        return; /* closed earlier in this round */
    if (is_pair && (events & (EPOLLHUP | EPOLLERR)) && !(link->is_peer_told && link->is_shut)) {
        /* The connection is gone for good: nothing of it may still reach the peer. Where it ended its writing
         * in order, all of that was sent. */
        int is_sent = link->is_ours_done && link->up_at == link->up_len && link->is_shut && !link->is_broken;
        link_close(link, !is_sent);
        return;
    }
    if (!is_pair && (events & (EPOLLHUP | EPOLLERR)) && !link->is_tcp_out) {
        /* Reported for ever, and never blocks again: reads and writes find out without waiting. */
        link->is_tcp_out = 1;
        epoll_ctl(link->pump->epoll_fd, EPOLL_CTL_DEL, link->tcp_fd, NULL);
    }
    link_turn(link);
}

static void links_reap(struct kvdev_tls_pump *pump, int is_all)
{
    struct kvdev_tls_link **at = &pump->links;
    while (*at) {
        struct kvdev_tls_link *link = *at;
        if (is_all)
            link_close(link, 1);
        if (link->tcp_fd >= 0) {
            at = &link->next;
            continue;
        }
        *at = link->next;
        kvdev_tls_link_put(link);
    }
}

static int run_ready(struct kvdev_tls_pump *pump)
{
    int count = 0;
    for (struct kvdev_tls_link *link = pump->links; link; link = link->next) {
        if (link->tcp_fd >= 0 && link->is_runnable)
            link_turn(link);
        count += link->tcp_fd >= 0 && link->is_runnable;
    }
    return count;
}

static void *pump_main(void *arg)
{
    struct kvdev_tls_pump *pump = arg;
    struct epoll_event events[EVENTS_MAX];
    int ready = 0;
    while (!atomic_load(&pump->is_stopping)) {
        int count = epoll_wait(pump->epoll_fd, events, EVENTS_MAX, ready ? 0 : -1);
        for (int i = 0; i < count; i++) {
            uint64_t data = events[i].data.u64;
            if (data)
                event_handle((struct kvdev_tls_link *)(uintptr_t)(data & ~(uint64_t)1), (int)(data & 1),
                             events[i].events);
            else
                inbox_take(pump);
        }
        ready = run_ready(pump);
        links_reap(pump, 0);
    }
    pthread_mutex_lock(&pump->lock);
    pump->is_ended = 1;
    pthread_mutex_unlock(&pump->lock);
    inbox_take(pump);
    links_reap(pump, 1);
    return NULL;
}

static void pump_put(struct kvdev_tls_pump *pump);

int kvdev_tls_pump_create(struct kvdev_tls_pump **ret)
{
    struct kvdev_tls_pump *pump = calloc(1, sizeof *pump);
    if (!pump)
        return -ENOMEM;
    pump->epoll_fd = pump->event_fd = -1;
    atomic_init(&pump->holders, 1);
    pthread_mutex_init(&pump->lock, NULL);
    int err = library_open(&pump->lib);
    if (!err) {
        pump->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        pump->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN, .data.u64 = 0 };
        if (pump->epoll_fd < 0 || pump->event_fd < 0 ||
            epoll_ctl(pump->epoll_fd, EPOLL_CTL_ADD, pump->event_fd, &event))
            err = -errno;
    }
    if (!err) {
        /* OpenSSL writes to sockets without MSG_NOSIGNAL, and signals are not this thread's. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        err = -pthread_create(&pump->thread, NULL, pump_main, pump);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pump->is_started = !err;
    }
    if (err) {
        kvdev_tls_pump_destroy(pump);
        return err;
    }
    *ret = pump;
    return 0;
}

void kvdev_tls_pump_destroy(struct kvdev_tls_pump *pump)
{
    if (!pump)
        return;
    if (pump->is_started) {
        atomic_store(&pump->is_stopping, 1);
        uint64_t one = 1;
        ssize_t ignored = write(pump->event_fd, &one, sizeof one);
        (void)ignored;
        pthread_join(pump->thread, NULL);
    }
    pump_put(pump);
}

static void pump_put(struct kvdev_tls_pump *pump)
{
    if (atomic_fetch_sub(&pump->holders, 1) != 1)
        return;
    if (pump->epoll_fd >= 0)
        close(pump->epoll_fd);
    if (pump->event_fd >= 0)
        close(pump->event_fd);
    if (pump->lib.handle)
        dlclose(pump->lib.handle);
    pthread_mutex_destroy(&pump->lock);
    free(pump);
}

/* ---- contexts ---- */

static int context_new(struct kvdev_tls_pump *pump, int is_listener, struct kvdev_tls_context **ret)
{
    struct library *lib = &pump->lib;
    struct kvdev_tls_context *context = calloc(1, sizeof *context);
    if (!context)
        return -ENOMEM;
    pthread_mutex_init(&context->lock, NULL);
    atomic_init(&context->holders, 1);
    atomic_fetch_add(&pump->holders, 1);
    context->pump = pump;
    context->is_listener = is_listener;
    context->ctx = lib->SSL_CTX_new(is_listener ? lib->TLS_server_method() : lib->TLS_client_method());
    if (!context->ctx) {
        kvdev_tls_context_destroy(context);
        return -ENOMEM;
    }
    lib->SSL_CTX_ctrl(context->ctx, CTRL_MIN_VERSION, TLS1_3, NULL);
    lib->SSL_CTX_ctrl(context->ctx, CTRL_MAX_VERSION, TLS1_3, NULL);
    lib->SSL_CTX_ctrl(context->ctx, CTRL_MODE, MODE_PARTIAL_WRITE | MODE_MOVING_BUFFER, NULL);
    lib->SSL_CTX_ctrl(context->ctx, CTRL_SESSION_CACHE_MODE, 0, NULL);
    lib->SSL_CTX_set_num_tickets(context->ctx, 0);
    if (is_listener)
        lib->SSL_CTX_set_psk_find_session_callback(context->ctx, listener_session);
    else
        lib->SSL_CTX_set_verify(context->ctx, VERIFY_PEER, NULL); /* a certificate is never enough */
    *ret = context;
    return 0;
}

int kvdev_tls_host_create(struct kvdev_tls_pump *pump, const struct kvdev_tls_psk *psk, struct kvdev_tls_context **ret)
{
    if (!psk_is_valid(psk))
        return -EINVAL;
    struct kvdev_tls_context *context = NULL;
    int err = context_new(pump, 0, &context);
    if (err)
        return err;
    context->psks = malloc(sizeof *psk);
    if (!context->psks) {
        kvdev_tls_context_destroy(context);
        return -ENOMEM;
    }
    *context->psks = *psk;
    context->psk_count = 1;
    const char *suite = psk->suite == 1 ? "TLS_AES_128_GCM_SHA256" : "TLS_AES_256_GCM_SHA384";
    if (!pump->lib.SSL_CTX_set_ciphersuites(context->ctx, suite)) {
        kvdev_tls_context_destroy(context);
        return -EINVAL;
    }
    pump->lib.SSL_CTX_set_psk_use_session_callback(context->ctx, host_session);
    *ret = context;
    return 0;
}

int kvdev_tls_listener_create(struct kvdev_tls_pump *pump, struct kvdev_tls_context **ret)
{
    struct kvdev_tls_context *context = NULL;
    int err = context_new(pump, 1, &context);
    if (err)
        return err;
    if (!pump->lib.SSL_CTX_set_ciphersuites(context->ctx, "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256")) {
        kvdev_tls_context_destroy(context);
        return -EINVAL;
    }
    *ret = context;
    return 0;
}

int kvdev_tls_listener_set(struct kvdev_tls_context *context, const struct kvdev_tls_psk *psks, uint32_t count)
{
    struct kvdev_tls_psk *copy = NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (!psk_is_valid(&psks[i]))
            return -EINVAL;
    }
    if (count) {
        copy = malloc(count * sizeof *copy);
        if (!copy)
            return -ENOMEM;
        memcpy(copy, psks, count * sizeof *copy);
    }
    pthread_mutex_lock(&context->lock);
    struct kvdev_tls_psk *old = context->psks;
    uint32_t old_count = context->psk_count;
    context->psks = copy;
    context->psk_count = count;
    pthread_mutex_unlock(&context->lock);
    if (old)
        buffer_clear(old, old_count * sizeof *old);
    free(old);
    return 0;
}

void kvdev_tls_context_destroy(struct kvdev_tls_context *context)
{
    if (!context || atomic_fetch_sub(&context->holders, 1) != 1)
        return;
    if (context->ctx)
        context->pump->lib.SSL_CTX_free(context->ctx);
    if (context->psks)
        buffer_clear(context->psks, context->psk_count * sizeof *context->psks);
    free(context->psks);
    pump_put(context->pump);
    pthread_mutex_destroy(&context->lock);
    free(context);
}

/* TLS 1.3 with pre-shared keys, below an NVMe/TCP connection that does not know of it.
 *
 * A pump is a thread that holds the TCP sockets of connections under TLS. The connection itself gets one end of a
 * socket pair, in place of the TCP socket, and is the same code as without TLS: its bytes are copied once more,
 * and plain connections pay nothing. libssl is opened at run time. Only PSKs are accepted, never a certificate;
 * no session is resumed and no early data taken.
 *
 * When the connection closes its end, what was not sent yet is dropped and the TCP connection reset; when it
 * only ends its writing, the rest is sent first. Spec: TCP Transport 1.1, 3.6.1; RFC 8446. */
#ifndef KVDEV_TLS_H
#define KVDEV_TLS_H

#include <stdint.h>

/* cdef begin */
#define KVDEV_TLS_IDENTITY_MAX 576 /* two NQNs, a digest, the prefix */
#define KVDEV_TLS_PSK_MAX 64

#define KVDEV_TLS_HANDSHAKE 0
#define KVDEV_TLS_OPEN 1
#define KVDEV_TLS_CLOSED 2

struct kvdev_tls_psk {
    char identity[KVDEV_TLS_IDENTITY_MAX]; /* ends with a NUL */
    uint8_t psk[KVDEV_TLS_PSK_MAX];
    uint32_t psk_len;
    uint32_t suite;                        /* 1 TLS_AES_128_GCM_SHA256, 2 TLS_AES_256_GCM_SHA384 */
    uint32_t tag;                          /* the caller's name for it, not 0 */
};

struct kvdev_tls_info {
    uint32_t state;
    uint32_t tag;                          /* of the PSK that is in use; 0 before */
    uint32_t is_version_refused;           /* the other side does not speak TLS 1.3 */
    char error[120];                       /* why it is closed; empty for an end of file */
};

struct kvdev_tls_pump;
struct kvdev_tls_context;
struct kvdev_tls_link;

/* -ENOSYS: no libssl.so.3 with what is needed. */
int kvdev_tls_pump_create(struct kvdev_tls_pump **ret);
/* Ends the thread and its connections. Contexts and links may outlive it; nothing can be started any more. */
void kvdev_tls_pump_destroy(struct kvdev_tls_pump *pump);
int kvdev_tls_host_create(struct kvdev_tls_pump *pump, const struct kvdev_tls_psk *psk, struct kvdev_tls_context **ret);
int kvdev_tls_listener_create(struct kvdev_tls_pump *pump, struct kvdev_tls_context **ret);
/* The keys a listener accepts from now on. */
int kvdev_tls_listener_set(struct kvdev_tls_context *context, const struct kvdev_tls_psk *psks, uint32_t count);
void kvdev_tls_context_destroy(struct kvdev_tls_context *context);
void kvdev_tls_link_read(struct kvdev_tls_link *link, struct kvdev_tls_info *ret);
void kvdev_tls_link_put(struct kvdev_tls_link *link);
/* cdef end */

/* Takes a connected TCP socket over, unless it fails; *ret_fd is what stands in for it. The caller owns a reference
 * to the link. Any thread. */
int kvdev_tls_start(struct kvdev_tls_context *context, int fd, int *ret_fd, struct kvdev_tls_link **ret);

#endif

/* Where the fuzzer takes the place of the kernel: included before each source of the core.
 *
 * Sockets, readiness, threads and the clock become calls of wire.c, which knows virtual descriptors and passes every
 * other one on; allocations are counted. Nothing in the core knows of it. */
#ifndef KVDEV_FUZZ_SEAM_H
#define KVDEV_FUZZ_SEAM_H

#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

int fz_socket(int domain, int type, int protocol);
int fz_connect(int fd, const struct sockaddr *address, socklen_t len);
int fz_accept4(int fd, struct sockaddr *address, socklen_t *len, int flags);
int fz_setsockopt(int fd, int level, int name, const void *value, socklen_t len);
int fz_getsockopt(int fd, int level, int name, void *value, socklen_t *len);
int fz_getsockname(int fd, struct sockaddr *address, socklen_t *len);
int fz_getpeername(int fd, struct sockaddr *address, socklen_t *len);
ssize_t fz_readv(int fd, const struct iovec *iov, int count);
ssize_t fz_recv(int fd, void *buf, size_t len, int flags);
ssize_t fz_recvmsg(int fd, struct msghdr *msg, int flags);
ssize_t fz_send(int fd, const void *buf, size_t len, int flags);
ssize_t fz_sendmsg(int fd, const struct msghdr *msg, int flags);
int fz_shutdown(int fd, int how);
int fz_close(int fd);
int fz_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
int fz_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int fz_epoll_wait(int epoll, struct epoll_event *events, int max, int timeout_ms);
int fz_clock_gettime(clockid_t clock, struct timespec *ret);
int fz_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);
int fz_pthread_timedjoin_np(pthread_t thread, void **ret, const struct timespec *deadline);
void *fz_malloc(size_t size);
void *fz_calloc(size_t count, size_t size);
void fz_free(void *memory);

#ifndef KVDEV_FUZZ_SEAM_OWNER
#define socket fz_socket
#define connect fz_connect
#define accept4 fz_accept4
#define setsockopt fz_setsockopt
#define getsockopt fz_getsockopt
#define getsockname fz_getsockname
#define getpeername fz_getpeername
#define readv fz_readv
#define recv fz_recv
#define recvmsg fz_recvmsg
#define send fz_send
#define sendmsg fz_sendmsg
#define shutdown fz_shutdown
#define close fz_close
#define ppoll fz_ppoll
#define epoll_ctl fz_epoll_ctl
#define epoll_wait fz_epoll_wait
#define clock_gettime fz_clock_gettime
#define pthread_create fz_pthread_create
#define pthread_timedjoin_np fz_pthread_timedjoin_np
#define malloc fz_malloc
#define calloc fz_calloc
#define free fz_free
#endif

#endif

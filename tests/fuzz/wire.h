/* The network and the kernel of the fuzzer: sockets in memory, cut where the input says; a clock that only moves when
 * told or waited for. One thread. */
#ifndef KVDEV_FUZZ_WIRE_H
#define KVDEV_FUZZ_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

#define WIRE_COUNT 2
#define WIRE_RX_BYTES (512u << 10)
#define WIRE_TX_BYTES (1024u << 10)
#define WIRE_MARKS_MAX 64
#define WIRE_FD_FIRST (1 << 24)         /* descriptors from here on are ours */
#define WIRE_FD_LISTENER (WIRE_FD_FIRST + 1000)
#define WIRE_ROOM_UNLIMITED SIZE_MAX

struct wire {
    int is_open;               /* the side under test holds its descriptor */
    int is_shut;               /* it said that it sends no more */
    int is_reset;              /* it will reset the connection when it closes */
    uint8_t rx[WIRE_RX_BYTES]; /* what the peer has sent; read up to rx_at */
    size_t rx_len;
    size_t rx_at;
    size_t cut_max;            /* one read gets at most so much, a random part of it if cut_is_random; 0 everything */
    int cut_is_random;
    int end;                   /* behind the last byte: 0 nothing yet, 1 end of file, else the errno of a read */
    uint8_t tx[WIRE_TX_BYTES]; /* what the side under test has sent; looked at by the peer up to tx_at */
    size_t tx_len;
    size_t tx_at;
    size_t room;               /* bytes it may send before its socket is full */
    int send_error;            /* errno of its next send */
    uint64_t random;
    uint64_t put_bytes;        /* of all time */
    uint64_t read_bytes;
    uint64_t mutated_at[WIRE_MARKS_MAX]; /* where mutated PDUs begin, counted like put_bytes */
    uint64_t mutated_taken;
    uint32_t mark_count;
    int is_watched;            /* in the poller's set */
    struct epoll_event watch;
};

extern struct wire wires[WIRE_COUNT];
extern uint64_t wire_now_ns;
extern uint64_t wire_allocation_count;

/* All closed and empty, the clock at its start. */
void wires_reset(void);
/* A fresh wire on which nothing has happened; its descriptor is given out by the next connect or accept. */
struct wire *wire_new(uint32_t index, uint64_t random);
/* The peer sends. */
void wire_put(struct wire *wire, const void *bytes, size_t len, int is_mutated);
/* PDUs put as mutated of which the side under test has read something; what lay unread behind its end is not counted. */
uint64_t wire_mutated_taken(struct wire *wire);
size_t wire_unread(const struct wire *wire);
/* 1 if the side under test may read something: bytes, end or error. */
int wire_is_readable(const struct wire *wire);

/* Called in epoll_wait's place; returns the number of events. */
extern int (*wire_epoll_turn)(struct epoll_event *events, int max);

#endif

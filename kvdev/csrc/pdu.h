/* NVMe/TCP PDUs: one receive machine and one set of builders for host and target.
 *
 * Pure: bytes in, events and bytes out; no I/O, no allocation, no globals. Every rule is one row of
 * the table in pdu.c: check -> (FES, FEI). PLEN and the other lengths a peer sends never size anything.
 * Spec: NVM Express TCP Transport 1.0, section 3.
 *
 * A poller drives it so:
 *
 *     while (len > 0) {
 *         switch (kvdev_pdu_rx_step(rx, buf, len, &consumed)) {   // then buf += consumed, len -= consumed
 *         case KVDEV_PDU_NEED_MORE:  all of buf was used; receive more
 *         case KVDEV_PDU_HEADER:     rx->pdu is decoded, its rules hold; look up the command, check it with
 *                                    kvdev_pdu_cmd_* / kvdev_pdu_r2t_*; if rx->pdu.data_len is not 0:
 *                                    kvdev_pdu_rx_set_payload(rx, dst); if it is 0 the PDU is complete
 *         case KVDEV_PDU_DATA_DONE:  payload is at dst; rx->ddgst_ok says whether its digest matched
 *         case KVDEV_PDU_FAULT:      rx->fault; kvdev_pdu_build_term(out, rx, &rx->fault), send it, close
 *         }
 *     }
 *     // Straight to the final address: if kvdev_pdu_rx_payload_want(rx, &dst, &want) > 0,
 *     // readv({dst, want}, {ring, size}) and report the first part with kvdev_pdu_rx_payload_landed(rx, n).
 *
 * After DATA_DONE and after a HEADER without payload rx->pdu and rx->head stay valid until the next step.
 */
#ifndef KVDEV_PDU_H
#define KVDEV_PDU_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
#define KVDEV_PDU_IC_REQ 0x00
#define KVDEV_PDU_IC_RESP 0x01
#define KVDEV_PDU_H2C_TERM 0x02
#define KVDEV_PDU_C2H_TERM 0x03
#define KVDEV_PDU_CAPSULE_CMD 0x04
#define KVDEV_PDU_CAPSULE_RESP 0x05
#define KVDEV_PDU_H2C_DATA 0x06
#define KVDEV_PDU_C2H_DATA 0x07
#define KVDEV_PDU_R2T 0x09

#define KVDEV_PDU_FLAG_HDGST 0x01
#define KVDEV_PDU_FLAG_DDGST 0x02
#define KVDEV_PDU_FLAG_LAST 0x04        /* H2CData, C2HData */
#define KVDEV_PDU_FLAG_SUCCESS 0x08     /* C2HData */

#define KVDEV_PDU_HEAD_MAX 160          /* longest header kept: a Term PDU is at most 152 bytes */
#define KVDEV_PDU_BUILD_MAX 160         /* room a kvdev_pdu_build_* function may use */
#define KVDEV_PDU_DIGEST_BYTES 4
#define KVDEV_PDU_TERM_DATA_MAX 128
#define KVDEV_PDU_MAXH2CDATA_MIN 4096
#define KVDEV_PDU_IN_CAPSULE_ADMIN 8192 /* in-capsule data a Fabrics or Admin command may always carry */

enum kvdev_pdu_role { KVDEV_PDU_HOST = 0, KVDEV_PDU_TARGET = 1 };   /* what the receiver is */

enum kvdev_pdu_event {
    KVDEV_PDU_NEED_MORE = 0,
    KVDEV_PDU_HEADER = 1,
    KVDEV_PDU_DATA_DONE = 2,
    KVDEV_PDU_FAULT = 3,
};

enum kvdev_pdu_fes {                    /* fatal error status of H2CTermReq and C2HTermReq */
    KVDEV_FES_NONE = 0,                 /* no Term PDU is owed: close at once */
    KVDEV_FES_INVALID_HEADER = 1,       /* FEI = offset of the field */
    KVDEV_FES_SEQUENCE = 2,
    KVDEV_FES_HDGST = 3,                /* FEI = the digest received */
    KVDEV_FES_OUT_OF_RANGE = 4,
    KVDEV_FES_LIMIT = 5,                /* to a controller: R2T limit; to a host: data transfer limit */
    KVDEV_FES_UNSUPPORTED = 6,          /* FEI = offset of the parameter */
};

enum kvdev_pdu_direction { KVDEV_DIR_NONE = 0, KVDEV_DIR_C2H = 1, KVDEV_DIR_H2C = 2 };

/* One row each in pdu.c's table. */
enum kvdev_pdu_rule {
    KVDEV_RULE_NONE = 0,
    /* any PDU, from its common header */
    KVDEV_RULE_TYPE_UNKNOWN,            /* B1 */
    KVDEV_RULE_TYPE_DIRECTION,          /* B1 */
    KVDEV_RULE_IC_FIRST,                /* A7: a PDU before ICReq/ICResp */
    KVDEV_RULE_IC_TWICE,                /* A7 */
    KVDEV_RULE_HLEN,                    /* B2 */
    KVDEV_RULE_PLEN_SHORT,              /* B3: shorter than its own header */
    KVDEV_RULE_FLAG_HDGST,              /* B5 */
    KVDEV_RULE_HDGST,                   /* C2 */
    KVDEV_RULE_PLEN,                    /* B3: not the length its type and fields give */
    KVDEV_RULE_PDO_SHORT,               /* B4 */
    KVDEV_RULE_PDO_ALIGN,               /* B4, A5 */
    KVDEV_RULE_FLAG_DDGST,              /* B5, C5 */
    KVDEV_RULE_TERM_HLEN,               /* F2: ignored, closed at once */
    KVDEV_RULE_TERM_PLEN,               /* F2: ignored, closed at once */
    /* ICReq, ICResp */
    KVDEV_RULE_PFV,                     /* A2, A3 */
    KVDEV_RULE_PDA,                     /* A2, A5: HPDA or CPDA above 31 */
    KVDEV_RULE_DGST_UNREQUESTED,        /* A4 */
    KVDEV_RULE_MAXH2CDATA_MIN,          /* A6 */
    KVDEV_RULE_MAXH2CDATA_ALIGN,        /* A6 */
    /* H2CData, C2HData, CapsuleCmd with data */
    KVDEV_RULE_DATAL_ZERO,              /* D6 */
    KVDEV_RULE_DATAL_ALIGN,             /* D2 */
    KVDEV_RULE_DATAO_ALIGN,             /* D2 */
    KVDEV_RULE_SUCCESS_NOT_LAST,        /* D3 */
    KVDEV_RULE_DATAL_MAXH2CDATA,        /* E3 */
    KVDEV_RULE_IN_CAPSULE_MAX,          /* E2 */
    /* R2T */
    KVDEV_RULE_R2TL_ZERO,               /* E4 */
    KVDEV_RULE_R2TL_ALIGN,
    KVDEV_RULE_R2TO_ALIGN,
    /* against a command, kvdev_pdu_cmd_* */
    KVDEV_RULE_C2H_CCCID,               /* D1: no such command */
    KVDEV_RULE_C2H_DIRECTION,           /* D1: it moves no data to the host */
    KVDEV_RULE_C2H_AFTER_LAST,          /* D1 */
    KVDEV_RULE_C2H_RANGE,               /* D2 */
    KVDEV_RULE_C2H_DATAO,               /* D2 */
    KVDEV_RULE_RESP_CID,                /* P4: a completion for no command */
    KVDEV_RULE_R2T_CCCID,               /* E4 */
    KVDEV_RULE_R2T_DIRECTION,           /* E4 */
    KVDEV_RULE_R2T_RANGE,               /* E4 */
    KVDEV_RULE_R2T_R2TO,                /* E4 */
    KVDEV_RULE_R2T_LIMIT,               /* E4 */
    /* against an R2T the target sent, kvdev_pdu_r2t_* */
    KVDEV_RULE_H2C_TTAG,                /* E3, D10 */
    KVDEV_RULE_H2C_CCCID,               /* E3 */
    KVDEV_RULE_H2C_RANGE,               /* E3 */
    KVDEV_RULE_H2C_DATAO,               /* E3 */
    KVDEV_RULE_H2C_LAST_EARLY,          /* E3 */
    KVDEV_RULE_H2C_LAST_MISSING,        /* E3 */
    /* the owner's own verdicts */
    KVDEV_RULE_CAPSULE_OVERRUN,         /* S-16: more commands than the queue holds */
    KVDEV_RULE_COUNT,
};

/* What went wrong, enough for a Term PDU and for an error message. */
struct kvdev_pdu_fault {
    uint16_t rule;              /* enum kvdev_pdu_rule */
    uint16_t fes;               /* enum kvdev_pdu_fes */
    uint32_t fei;
    uint64_t expected;
    uint64_t actual;
    uint8_t pdu_type;
    uint8_t field_offset;       /* of the field in the PDU */
    uint8_t reserved[6];
};

/* What the two ends agreed. Before the IC exchange: what this side asks for or offers. */
struct kvdev_pdu_link {
    uint8_t hdgst;              /* header digests: asked for or offered, afterwards agreed */
    uint8_t ddgst;
    uint8_t recv_pda;           /* alignment we demand of the peer's data, 0's based dwords (host: HPDA) */
    uint8_t send_pda;           /* alignment the peer demands of ours, 0's based dwords (host: CPDA) */
    uint32_t maxh2cdata;        /* target: its own limit; host: from ICResp */
    uint32_t maxr2t;            /* outstanding R2Ts per command, 0's based; host: its own, target: from ICReq */
    uint32_t in_capsule_max;    /* target: most in-capsule data accepted now; may be changed at any time */
};

/* A header, decoded. Fields a type does not have are 0. */
struct kvdev_pdu {
    uint8_t type;
    uint8_t flags;
    uint8_t hlen;
    uint8_t pdo;
    uint32_t plen;
    uint32_t data_len;          /* payload bytes that follow the header; 0 for ICReq, ICResp and Term PDUs */
    uint16_t cccid;             /* H2CData, C2HData, R2T; CapsuleCmd, CapsuleResp: CID */
    uint16_t ttag;              /* H2CData, R2T */
    uint32_t datao;             /* H2CData, C2HData; R2T: R2TO */
    uint32_t datal;             /* H2CData, C2HData; R2T: R2TL */
    uint16_t pfv;               /* ICReq, ICResp */
    uint8_t pda;                /* ICReq: HPDA, ICResp: CPDA */
    uint8_t dgst;               /* ICReq, ICResp: bit 0 header, bit 1 data */
    uint32_t max;               /* ICReq: MAXR2T (0's based), ICResp: MAXH2CDATA */
    uint32_t fei;               /* Term */
    uint16_t fes;               /* Term */
    uint16_t term_data_len;     /* Term: bytes at rx->head + 24 */
};

/* Receive state of one connection. Public fields are read by the owner, state by the machine only. */
struct kvdev_pdu_rx {
    struct kvdev_pdu_link link;
    struct kvdev_pdu pdu;
    struct kvdev_pdu_fault fault;
    uint8_t head[160];          /* the header as received (KVDEV_PDU_HEAD_MAX); SQE or CQE at head + 8 */
    uint32_t head_len;          /* bytes of it received; digest not counted once the header is complete */
    uint32_t ddgst_actual;      /* after DATA_DONE with digests: the one received */
    uint32_t ddgst_expected;    /* and the one computed */
    uint8_t ddgst_ok;           /* after DATA_DONE: 1, or 0 if the data digest did not match */
    uint8_t role;
    uint8_t ic_done;
    uint8_t state;
    uint32_t head_want;
    uint32_t pad_left;
    uint32_t data_left;
    uint8_t tail[4];
    uint32_t tail_len;
    uint8_t *payload;           /* where the next payload byte goes, NULL = discarded */
    uint64_t pdu_count;         /* headers accepted */
    uint64_t reserved_count;    /* B6: accepted headers whose reserved bits were not 0 */
};

/* One command's data transfer, kept by the host beside the command. */
struct kvdev_pdu_cmd {
    uint32_t length;            /* bytes the command moves */
    uint32_t received;          /* C2H: bytes received = the next DATAO */
    uint32_t requested;         /* H2C: bytes sent in the capsule or asked for = the next R2TO */
    uint32_t r2t_count;         /* H2C: R2Ts whose data is not all sent yet; the owner counts it down */
    uint8_t direction;          /* enum kvdev_pdu_direction */
    uint8_t last_seen;
    uint8_t reserved[2];
};

/* One R2T, kept by the target from sending it until its data is complete. */
struct kvdev_pdu_r2t {
    uint32_t offset;
    uint32_t length;
    uint32_t received;
    uint16_t cccid;
    uint8_t active;             /* sent and not complete */
    uint8_t reserved;
};

/* Submission queue entry, in the processor's byte order; the wire's layout. */
struct kvdev_sqe {
    uint8_t opc;
    uint8_t flags;              /* PSDT in 7:6 (01b over Fabrics), FUSE in 1:0 */
    uint16_t cid;
    uint32_t nsid;              /* Fabrics commands: FCTYPE in bits 7:0 */
    uint32_t cdw2;
    uint32_t cdw3;
    uint64_t mptr;
    uint64_t sgl_addr;          /* SGL1: address, or offset for in-capsule data */
    uint32_t sgl_len;
    uint8_t sgl_reserved[3];
    uint8_t sgl_type;           /* KVDEV_SGL_* */
    uint32_t cdw10;
    uint32_t cdw11;
    uint32_t cdw12;
    uint32_t cdw13;
    uint32_t cdw14;
    uint32_t cdw15;
};

/* Completion queue entry, in the processor's byte order; the wire's layout. */
struct kvdev_cqe {
    uint32_t dw0;
    uint32_t dw1;
    uint16_t sqhd;
    uint16_t sqid;
    uint16_t cid;
    uint16_t status_p;          /* phase in bit 0, status field in 15:1 */
};

#define KVDEV_SQE_BYTES 64
#define KVDEV_CQE_BYTES 16
#define KVDEV_SQE_PSDT_SGL 0x40
#define KVDEV_SGL_IN_CAPSULE 0x01       /* Data Block, offset into the capsule's data */
#define KVDEV_SGL_TRANSPORT 0x5a        /* Transport SGL Data Block, transport specific */

/* ---- receiving ---- */

/* Start a connection. `link` holds what this side asks for or offers (send_pda and, for the host, maxh2cdata
 * are filled by the IC exchange). -EINVAL: recv_pda above 31; target: maxh2cdata under 4096 or no dword multiple.
 * The exchange itself settles rx->link when the ICReq/ICResp HEADER event is given: digests = asked and
 * offered. A target then answers kvdev_pdu_build_ic_resp(out, &rx->link). */
int kvdev_pdu_rx_init(struct kvdev_pdu_rx *rx, int role, const struct kvdev_pdu_link *link);
/* Start where the IC exchange is already done, with the agreed `link` as it is. */
int kvdev_pdu_rx_init_agreed(struct kvdev_pdu_rx *rx, int role, const struct kvdev_pdu_link *link);
/* Take bytes; returns an enum kvdev_pdu_event. At most one event a call; `consumed` bytes were used.
 * Payload not given a place with set_payload is discarded. After FAULT every call gives FAULT. */
int kvdev_pdu_rx_step(struct kvdev_pdu_rx *rx, const uint8_t *buf, size_t len, size_t *consumed);
/* After HEADER with data_len: where its payload goes, data_len bytes; NULL discards. The machine writes
 * there until DATA_DONE. */
void kvdev_pdu_rx_set_payload(struct kvdev_pdu_rx *rx, void *dst);
/* Bytes of payload still missing that may be received straight to *dst; 0 if the machine wants its bytes
 * through step (header, digest, discarded payload). */
size_t kvdev_pdu_rx_payload_want(const struct kvdev_pdu_rx *rx, uint8_t **dst, size_t *len);
/* n <= want bytes were put there. Returns NEED_MORE or DATA_DONE (then no step call is needed for it). */
int kvdev_pdu_rx_payload_landed(struct kvdev_pdu_rx *rx, size_t n);
/* Take `fault`, found by the owner in the PDU just given, as the machine's: from here on step gives FAULT. */
void kvdev_pdu_rx_fail(struct kvdev_pdu_rx *rx, const struct kvdev_pdu_fault *fault);

/* ---- rules against commands: 0 and the state advanced, or -EPROTO and *fault filled ---- */

/* Host, C2HData. `cmd` NULL: CCCID names no outstanding command of this queue. */
int kvdev_pdu_cmd_c2h(struct kvdev_pdu_cmd *cmd, const struct kvdev_pdu *pdu, struct kvdev_pdu_fault *fault);
/* Host, R2T; `maxr2t` 0's based as in the link. */
int kvdev_pdu_cmd_r2t(struct kvdev_pdu_cmd *cmd, const struct kvdev_pdu *pdu, uint32_t maxr2t,
                      struct kvdev_pdu_fault *fault);
/* Host, D5: 1 if a read that the controller calls successful has received every byte (always 1 if not C2H). */
int kvdev_pdu_cmd_is_complete(const struct kvdev_pdu_cmd *cmd);
/* Target, H2CData: TTAG 1..count to a table index; -1 if out of range. */
int32_t kvdev_pdu_ttag_index(uint16_t ttag, uint32_t count);
/* Target, H2CData. `r2t` NULL: the TTAG is out of range. When all is received r2t->active becomes 0. */
int kvdev_pdu_r2t_h2c(struct kvdev_pdu_r2t *r2t, const struct kvdev_pdu *pdu, struct kvdev_pdu_fault *fault);
/* Fill a fault from a rule's row, for the verdicts the owner reaches itself. Returns -EPROTO. */
int kvdev_pdu_fault_set(struct kvdev_pdu_fault *fault, int rule, uint8_t pdu_type, uint64_t expected,
                        uint64_t actual);
/* "C2HData hlen+0x2: expected 24, got 16" into text, always terminated; returns its length. */
size_t kvdev_pdu_fault_text(const struct kvdev_pdu_fault *fault, char *text, size_t size);
/* A row of the table: name of the field and of the rule; NULL for a number that is no rule. */
const char *kvdev_pdu_rule_field(int rule);
const char *kvdev_pdu_rule_name(int rule);
const char *kvdev_pdu_type_name(int type);

/* ---- building: the header with its digest and the padding up to the data; returns its length.
 * buf has KVDEV_PDU_BUILD_MAX bytes. Payload (data_len bytes) and, if link->ddgst, the 4 bytes of
 * kvdev_pdu_build_ddgst follow. ---- */

size_t kvdev_pdu_build_ic_req(uint8_t *buf, const struct kvdev_pdu_link *link);
size_t kvdev_pdu_build_ic_resp(uint8_t *buf, const struct kvdev_pdu_link *link);
size_t kvdev_pdu_build_capsule_cmd(uint8_t *buf, const struct kvdev_pdu_link *link, const uint8_t *sqe,
                                   uint32_t data_len);
size_t kvdev_pdu_build_capsule_resp(uint8_t *buf, const struct kvdev_pdu_link *link, const uint8_t *cqe);
size_t kvdev_pdu_build_h2c_data(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid, uint16_t ttag,
                                uint32_t datao, uint32_t datal, int is_last);
/* flags: KVDEV_PDU_FLAG_LAST, KVDEV_PDU_FLAG_SUCCESS */
size_t kvdev_pdu_build_c2h_data(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid,
                                uint32_t datao, uint32_t datal, uint8_t flags);
size_t kvdev_pdu_build_r2t(uint8_t *buf, const struct kvdev_pdu_link *link, uint16_t cccid, uint16_t ttag,
                           uint32_t r2to, uint32_t r2tl);
/* The Term PDU this receiver owes for `fault`: H2CTermReq from a host, C2HTermReq from a target, with the
 * offending header as data. 0 if none is owed (fes NONE). Never carries digests. */
size_t kvdev_pdu_build_term(uint8_t *buf, const struct kvdev_pdu_rx *rx, const struct kvdev_pdu_fault *fault);
/* Data digest as sent: little endian. */
void kvdev_pdu_build_ddgst(uint8_t *buf, uint32_t crc);

/* ---- queue entries ---- */

void kvdev_sqe_load(const uint8_t *wire, struct kvdev_sqe *ret);
void kvdev_sqe_store(const struct kvdev_sqe *sqe, uint8_t *wire);
void kvdev_cqe_load(const uint8_t *wire, struct kvdev_cqe *ret);
void kvdev_cqe_store(const struct kvdev_cqe *cqe, uint8_t *wire);
/* cdef end */

static inline uint16_t kvdev_load_le16(const uint8_t *p)
{
    return (uint16_t)(p[0] | (p[1] << 8));
}

static inline uint32_t kvdev_load_le32(const uint8_t *p)
{
    return (uint32_t)p[0] | ((uint32_t)p[1] << 8) | ((uint32_t)p[2] << 16) | ((uint32_t)p[3] << 24);
}

static inline uint64_t kvdev_load_le64(const uint8_t *p)
{
    return (uint64_t)kvdev_load_le32(p) | ((uint64_t)kvdev_load_le32(p + 4) << 32);
}

static inline void kvdev_store_le16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void kvdev_store_le32(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

static inline void kvdev_store_le64(uint8_t *p, uint64_t v)
{
    kvdev_store_le32(p, (uint32_t)v);
    kvdev_store_le32(p + 4, (uint32_t)(v >> 32));
}

/* Status field without the phase bit: SC in 7:0, SCT in 10:8, CRD 12:11, M 13, DNR 14 (as in kvdev_io_done). */
static inline uint16_t kvdev_cqe_status(const struct kvdev_cqe *cqe)
{
    return (uint16_t)(cqe->status_p >> 1);
}

_Static_assert(sizeof(struct kvdev_sqe) == 64, "a submission queue entry is 64 bytes");
_Static_assert(offsetof(struct kvdev_sqe, sgl_addr) == 24, "SGL1 is at bytes 24 to 39");
_Static_assert(offsetof(struct kvdev_sqe, sgl_type) == 39, "the SGL identifier is the descriptor's last byte");
_Static_assert(offsetof(struct kvdev_sqe, cdw10) == 40, "command dwords start at byte 40");
_Static_assert(sizeof(struct kvdev_cqe) == 16, "a completion queue entry is 16 bytes");
_Static_assert(offsetof(struct kvdev_cqe, status_p) == 14, "status is the entry's last word");
_Static_assert(KVDEV_PDU_HEAD_MAX >= 152, "a Term PDU fits whole");
_Static_assert(sizeof(((struct kvdev_pdu_rx *)0)->head) == KVDEV_PDU_HEAD_MAX, "head has its named size");

#endif

/* CRC32C (Castagnoli), as NVMe/TCP digests and page checksums use it.
 *
 * The value passed in and out is the finished CRC of the bytes so far: start with 0, pass the last
 * result to go on. One implementation per kind of processor, chosen per call by the features the
 * processor reports; all give the same value, and a test may name one. No state anywhere. */
#ifndef KVDEV_CRC32C_H
#define KVDEV_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
enum kvdev_crc32c_id {
    KVDEV_CRC32C_TABLE = 0,     /* portable: eight bytes a step from constant tables */
    KVDEV_CRC32C_SSE42 = 1,     /* x86 crc32 instruction, three streams */
    KVDEV_CRC32C_PCLMUL = 2,    /* x86 carry-less multiply, 4 x 128 bits a step */
    KVDEV_CRC32C_VPCLMUL = 3,   /* x86 carry-less multiply, 4 x 512 bits a step */
    KVDEV_CRC32C_ARM = 4,       /* Armv8 crc32c instruction, three streams */
    KVDEV_CRC32C_COUNT = 5,
};

uint32_t kvdev_crc32c(uint32_t crc, const void *buf, size_t len);
/* The CRC of A followed by B, from the CRCs of A and of B and the length of B. */
uint32_t kvdev_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);
/* 1 if this build and this processor have implementation `id`, else 0. */
int kvdev_crc32c_available(int id);
/* As kvdev_crc32c with the implementation named. 0, or -ENOTSUP, -EINVAL. */
int kvdev_crc32c_impl(int id, uint32_t crc, const void *buf, size_t len, uint32_t *ret);
/* The implementation kvdev_crc32c takes for long buffers here. */
int kvdev_crc32c_best(void);
/* cdef end */

#endif

#include "crc32c.h"

#include <errno.h>
#include <string.h>

#include "crc32c_table.h"

#if defined(__x86_64__)
#define KVDEV_X86 1
#include <immintrin.h>
#else
#define KVDEV_X86 0
#endif

#if defined(__aarch64__) && defined(__linux__)
#define KVDEV_ARM 1
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#else
#define KVDEV_ARM 0
#endif

#define POLYNOMIAL 0x82f63b78u

/* ---- arithmetic modulo P, reflected: bit 31 is x^0 ---- */

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (int bit = 0; bit < 32; bit++) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

uint32_t kvdev_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
    uint32_t shift = 1u << 31;
    unsigned power = 3; /* a byte is x^8 */

    for (; len_b; len_b >>= 1) {
        if (len_b & 1)
            shift = multiply(x_power[power], shift);
        power = power == 30 ? 0 : power + 1;
    }
    return multiply(shift, crc_a) ^ crc_b;
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof v);
    return v;
}

/* ---- the bodies: take and return the register, that is the complemented CRC ---- */

static uint32_t body_table(uint32_t reg, const uint8_t *p, size_t len)
{
    for (; len >= 8; len -= 8, p += 8) {
        uint32_t lo = reg ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);

        reg = tables[7][lo & 0xff] ^ tables[6][(lo >> 8) & 0xff] ^ tables[5][(lo >> 16) & 0xff] ^
              tables[4][lo >> 24] ^ tables[3][p[4]] ^ tables[2][p[5]] ^ tables[1][p[6]] ^ tables[0][p[7]];
    }
    for (; len; len--, p++)
        reg = tables[0][(reg ^ *p) & 0xff] ^ (reg >> 8);
    return reg;
}

#if KVDEV_X86 || KVDEV_ARM
/* Three independent streams hide the three cycles of the instruction; x^(8 n) joins them. */
#define STREAM_LONG 4096
#define STREAM_LONG_POWER 0x35d73a62u
#define STREAM_SHORT 512
#define STREAM_SHORT_POWER 0x74c360a4u
#endif

#if KVDEV_X86

__attribute__((target("sse4.2"))) static inline uint32_t serial_sse42(uint32_t reg, const uint8_t *p, size_t len)
{
    uint64_t wide = reg;

    for (; len >= 8; len -= 8, p += 8)
        wide = _mm_crc32_u64(wide, load_u64(p));
    reg = (uint32_t)wide;
    if (len & 4) {
        uint32_t v;

        memcpy(&v, p, sizeof v);
        reg = _mm_crc32_u32(reg, v);
        p += 4;
    }
    for (len &= 3; len; len--, p++)
        reg = _mm_crc32_u8(reg, *p);
    return reg;
}

__attribute__((target("sse4.2"))) static inline uint32_t streams_sse42(uint32_t reg, const uint8_t *p, size_t stream,
                                                                       uint32_t power)
{
    uint64_t a = reg, b = 0, c = 0;

    for (size_t i = 0; i < stream; i += 8) {
        a = _mm_crc32_u64(a, load_u64(p + i));
        b = _mm_crc32_u64(b, load_u64(p + stream + i));
        c = _mm_crc32_u64(c, load_u64(p + 2 * stream + i));
    }
    b ^= multiply((uint32_t)a, power);
    return (uint32_t)c ^ multiply((uint32_t)b, power);
}

__attribute__((target("sse4.2"))) static uint32_t body_sse42(uint32_t reg, const uint8_t *p, size_t len)
{
    for (; len >= 3 * STREAM_LONG; len -= 3 * STREAM_LONG, p += 3 * STREAM_LONG)
        reg = streams_sse42(reg, p, STREAM_LONG, STREAM_LONG_POWER);
    for (; len >= 3 * STREAM_SHORT; len -= 3 * STREAM_SHORT, p += 3 * STREAM_SHORT)
        reg = streams_sse42(reg, p, STREAM_SHORT, STREAM_SHORT_POWER);
    return serial_sse42(reg, p, len);
}

/* Folding: a 128-bit block moves D bits ahead as lo * (x^(D+32) mod P) + hi * (x^(D-32) mod P), both
 * constants reflected and shifted by one because a product of reflected numbers is one bit short.
 * The pairs are (lo, hi). */
#define FOLD_128_LO 0x00000000f20c0dfell
#define FOLD_128_HI 0x000000014cd00bd6ll
#define FOLD_256_LO 0x00000001384aa63all
#define FOLD_256_HI 0x00000000ba4fc28ell
#define FOLD_384_LO 0x000000001c291d04ll
#define FOLD_384_HI 0x00000001d82c63dall
#define FOLD_512_LO 0x00000000740eef02ll
#define FOLD_512_HI 0x000000009e4addf8ll
#define FOLD_2048_LO 0x00000000dcb17aa4ll
#define FOLD_2048_HI 0x00000000b9e02b86ll

__attribute__((target("sse4.2,pclmul"))) static inline __m128i fold_128(__m128i x, __m128i k, __m128i next)
{
    __m128i lo = _mm_clmulepi64_si128(x, k, 0x00);
    __m128i hi = _mm_clmulepi64_si128(x, k, 0x11);

    return _mm_xor_si128(_mm_xor_si128(lo, hi), next);
}

/* What is left of the message after folding is 16 bytes with a register of 0 before them. */
__attribute__((target("sse4.2,pclmul"))) static inline uint32_t finish_128(__m128i x)
{
    uint64_t reg = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x));

    return (uint32_t)_mm_crc32_u64(reg, (uint64_t)_mm_extract_epi64(x, 1));
}

#define PCLMUL_MIN 128

__attribute__((target("sse4.2,pclmul"))) static uint32_t body_pclmul(uint32_t reg, const uint8_t *p, size_t len)
{
    const __m128i k512 = _mm_set_epi64x(FOLD_512_HI, FOLD_512_LO);
    const __m128i k128 = _mm_set_epi64x(FOLD_128_HI, FOLD_128_LO);
    __m128i x0, x1, x2, x3;

    if (len < PCLMUL_MIN)
        return serial_sse42(reg, p, len);
    x0 = _mm_loadu_si128((const __m128i *)(const void *)p);
    x1 = _mm_loadu_si128((const __m128i *)(const void *)(p + 16));
    x2 = _mm_loadu_si128((const __m128i *)(const void *)(p + 32));
    x3 = _mm_loadu_si128((const __m128i *)(const void *)(p + 48));
    x0 = _mm_xor_si128(x0, _mm_cvtsi32_si128((int)reg));
    for (p += 64, len -= 64; len >= 64; p += 64, len -= 64) {
        x0 = fold_128(x0, k512, _mm_loadu_si128((const __m128i *)(const void *)p));
        x1 = fold_128(x1, k512, _mm_loadu_si128((const __m128i *)(const void *)(p + 16)));
        x2 = fold_128(x2, k512, _mm_loadu_si128((const __m128i *)(const void *)(p + 32)));
        x3 = fold_128(x3, k512, _mm_loadu_si128((const __m128i *)(const void *)(p + 48)));
    }
    x0 = fold_128(x0, k128, x1);
    x0 = fold_128(x0, k128, x2);
    x0 = fold_128(x0, k128, x3);
    for (; len >= 16; p += 16, len -= 16)
        x0 = fold_128(x0, k128, _mm_loadu_si128((const __m128i *)(const void *)p));
    return serial_sse42(finish_128(x0), p, len);
}

#define VPCLMUL_TARGET "sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq"
#define VPCLMUL_MIN 512

__attribute__((target(VPCLMUL_TARGET))) static inline __m512i fold_512(__m512i x, __m512i k, __m512i next)
{
    __m512i lo = _mm512_clmulepi64_epi128(x, k, 0x00);
    __m512i hi = _mm512_clmulepi64_epi128(x, k, 0x11);

    return _mm512_ternarylogic_epi64(lo, hi, next, 0x96); /* xor of the three */
}

__attribute__((target(VPCLMUL_TARGET))) static uint32_t body_vpclmul(uint32_t reg, const uint8_t *p, size_t len)
{
    const __m512i k2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_2048_HI, FOLD_2048_LO));
    const __m512i k512 = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_512_HI, FOLD_512_LO));
    const __m128i k128 = _mm_set_epi64x(FOLD_128_HI, FOLD_128_LO);
    __m512i x0, x1, x2, x3;
    __m128i last;

    if (len < VPCLMUL_MIN)
        return body_pclmul(reg, p, len);
    x0 = _mm512_loadu_si512(p);
    x1 = _mm512_loadu_si512(p + 64);
    x2 = _mm512_loadu_si512(p + 128);
    x3 = _mm512_loadu_si512(p + 192);
    x0 = _mm512_xor_si512(x0, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)reg)));
    for (p += 256, len -= 256; len >= 256; p += 256, len -= 256) {
        x0 = fold_512(x0, k2048, _mm512_loadu_si512(p));
        x1 = fold_512(x1, k2048, _mm512_loadu_si512(p + 64));
        x2 = fold_512(x2, k2048, _mm512_loadu_si512(p + 128));
        x3 = fold_512(x3, k2048, _mm512_loadu_si512(p + 192));
    }
    x0 = fold_512(x0, k512, x1);
    x0 = fold_512(x0, k512, x2);
    x0 = fold_512(x0, k512, x3);
    for (; len >= 64; p += 64, len -= 64)
        x0 = fold_512(x0, k512, _mm512_loadu_si512(p));
    /* The four lanes are 384, 256, 128 and 0 bits before the end. */
    last = _mm512_extracti32x4_epi32(x0, 3);
    last = fold_128(_mm512_castsi512_si128(x0), _mm_set_epi64x(FOLD_384_HI, FOLD_384_LO), last);
    last = fold_128(_mm512_extracti32x4_epi32(x0, 1), _mm_set_epi64x(FOLD_256_HI, FOLD_256_LO), last);
    last = fold_128(_mm512_extracti32x4_epi32(x0, 2), k128, last);
    for (; len >= 16; p += 16, len -= 16)
        last = fold_128(last, k128, _mm_loadu_si128((const __m128i *)(const void *)p));
    return serial_sse42(finish_128(last), p, len);
}

#endif /* KVDEV_X86 */

#if KVDEV_ARM

__attribute__((target("+crc"))) static uint32_t serial_arm(uint32_t reg, const uint8_t *p, size_t len)
{
    for (; len >= 8; len -= 8, p += 8)
        reg = __crc32cd(reg, load_u64(p));
    for (; len; len--, p++)
        reg = __crc32cb(reg, *p);
    return reg;
}

__attribute__((target("+crc"))) static uint32_t streams_arm(uint32_t reg, const uint8_t *p, size_t stream,
                                                            uint32_t power)
{
    uint32_t a = reg, b = 0, c = 0;

    for (size_t i = 0; i < stream; i += 8) {
        a = __crc32cd(a, load_u64(p + i));
        b = __crc32cd(b, load_u64(p + stream + i));
        c = __crc32cd(c, load_u64(p + 2 * stream + i));
    }
    b ^= multiply(a, power);
    return c ^ multiply(b, power);
}

__attribute__((target("+crc"))) static uint32_t body_arm(uint32_t reg, const uint8_t *p, size_t len)
{
    for (; len >= 3 * STREAM_LONG; len -= 3 * STREAM_LONG, p += 3 * STREAM_LONG)
        reg = streams_arm(reg, p, STREAM_LONG, STREAM_LONG_POWER);
    for (; len >= 3 * STREAM_SHORT; len -= 3 * STREAM_SHORT, p += 3 * STREAM_SHORT)
        reg = streams_arm(reg, p, STREAM_SHORT, STREAM_SHORT_POWER);
    return serial_arm(reg, p, len);
}

#endif /* KVDEV_ARM */

/* ---- choosing: the compiler's run-time library has read the features before main ---- */

#if KVDEV_X86
static inline int has_sse42(void)
{
    return __builtin_cpu_supports("sse4.2") != 0;
}

static inline int has_pclmul(void)
{
    return has_sse42() && __builtin_cpu_supports("pclmul");
}

static inline int has_vpclmul(void)
{
    return has_pclmul() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}
#endif

#if KVDEV_ARM
static inline int has_arm(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#endif

int kvdev_crc32c_available(int id)
{
    switch (id) {
    case KVDEV_CRC32C_TABLE:
        return 1;
#if KVDEV_X86
    case KVDEV_CRC32C_SSE42:
        return has_sse42();
    case KVDEV_CRC32C_PCLMUL:
        return has_pclmul();
    case KVDEV_CRC32C_VPCLMUL:
        return has_vpclmul();
#endif
#if KVDEV_ARM
    case KVDEV_CRC32C_ARM:
        return has_arm();
#endif
    default:
        return 0;
    }
}

int kvdev_crc32c_best(void)
{
#if KVDEV_X86
    if (has_vpclmul())
        return KVDEV_CRC32C_VPCLMUL;
    if (has_sse42())
        return KVDEV_CRC32C_SSE42;
#endif
#if KVDEV_ARM
    if (has_arm())
        return KVDEV_CRC32C_ARM;
#endif
    return KVDEV_CRC32C_TABLE;
}

int kvdev_crc32c_impl(int id, uint32_t crc, const void *buf, size_t len, uint32_t *ret)
{
    if (id < 0 || id >= KVDEV_CRC32C_COUNT || !ret || (!buf && len))
        return -EINVAL;
    if (!kvdev_crc32c_available(id))
        return -ENOTSUP;
    if (!len) {
        *ret = crc;
        return 0;
    }
    switch (id) {
#if KVDEV_X86
    case KVDEV_CRC32C_SSE42:
        *ret = ~body_sse42(~crc, buf, len);
        return 0;
    case KVDEV_CRC32C_PCLMUL:
        *ret = ~body_pclmul(~crc, buf, len);
        return 0;
    case KVDEV_CRC32C_VPCLMUL:
        *ret = ~body_vpclmul(~crc, buf, len);
        return 0;
#endif
#if KVDEV_ARM
    case KVDEV_CRC32C_ARM:
        *ret = ~body_arm(~crc, buf, len);
        return 0;
#endif
    default:
        *ret = ~body_table(~crc, buf, len);
        return 0;
    }
}

uint32_t kvdev_crc32c(uint32_t crc, const void *buf, size_t len)
{
    if (!len)
        return crc;
#if KVDEV_X86
    if (len < PCLMUL_MIN) { /* headers: the widest body would only set itself up */
        if (has_sse42())
            return ~serial_sse42(~crc, buf, len);
    } else if (has_vpclmul()) {
        return ~body_vpclmul(~crc, buf, len);
    } else if (len < 3 * STREAM_LONG && has_pclmul()) { /* three long streams beat 128-bit folding */
        return ~body_pclmul(~crc, buf, len);
    } else if (has_sse42()) {
        return ~body_sse42(~crc, buf, len);
    }
#endif
#if KVDEV_ARM
    if (has_arm())
        return ~body_arm(~crc, buf, len);
#endif
    return ~body_table(~crc, buf, len);
}

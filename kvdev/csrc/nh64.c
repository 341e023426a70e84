#include "nh64.h"

#include <errno.h>
#include <string.h>

#if defined(__x86_64__)
#define KVDEV_X86 1
#include <immintrin.h>
#else
#define KVDEV_X86 0
#endif

#define KEY_STEP 0x9e3779b97f4a7c15ull
#define WORD_BYTES 8u

static uint64_t term(uint64_t word, uint64_t key)
{
    uint64_t mixed = word ^ key;
    uint64_t low = mixed & 0xffffffffu;
    uint64_t high = mixed >> 32;
    return low * high + ((low + high) << 32);
}

static uint64_t finish(uint64_t total, size_t len)
{
    uint64_t value = total ^ (uint64_t)len * KEY_STEP;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

/* The words from `first` on, and what is left of one. */
static uint64_t rest(const uint8_t *p, size_t len, size_t first)
{
    uint64_t total = 0;
    uint64_t word;
    size_t words = len / WORD_BYTES;
    for (size_t i = first; i < words; i++) {
        memcpy(&word, p + i * WORD_BYTES, sizeof(word));
        total += term(word, (i + 1) * KEY_STEP);
    }
    if (len % WORD_BYTES != 0) {
        word = 0;
        memcpy(&word, p + words * WORD_BYTES, len % WORD_BYTES);
        total += term(word, (words + 1) * KEY_STEP);
    }
    return total;
}

#if KVDEV_X86

/* Four accumulators: a multiply takes five cycles, and one can start every cycle. */
#define LANES_256 4u
#define STREAMS 4u

__attribute__((target("avx2"))) static inline __m256i term_256(__m256i word, __m256i key)
{
    __m256i mixed = _mm256_xor_si256(word, key);
    __m256i high = _mm256_srli_epi64(mixed, 32);
    __m256i sum = _mm256_slli_epi64(_mm256_add_epi64(mixed, high), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, high), sum);
}

__attribute__((target("avx2"))) static uint64_t body_avx2(const uint8_t *p, size_t len, size_t *used)
{
    __m256i key = _mm256_setr_epi64x((long long)KEY_STEP, (long long)(2 * KEY_STEP), (long long)(3 * KEY_STEP),
                                     (long long)(4 * KEY_STEP));
    const __m256i step = _mm256_set1_epi64x((long long)(LANES_256 * KEY_STEP));
    __m256i totals[STREAMS] = { _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                                _mm256_setzero_si256() };
    uint64_t lanes[LANES_256];
    size_t words = 0;
    for (; (words + STREAMS * LANES_256) * WORD_BYTES <= len; words += STREAMS * LANES_256) {
        for (unsigned i = 0; i < STREAMS; i++) {
            const uint8_t *at = p + (words + i * LANES_256) * WORD_BYTES;
            __m256i word = _mm256_loadu_si256((const __m256i *)(const void *)at);
            totals[i] = _mm256_add_epi64(totals[i], term_256(word, key));
            key = _mm256_add_epi64(key, step);
        }
    }
    totals[0] = _mm256_add_epi64(_mm256_add_epi64(totals[0], totals[1]), _mm256_add_epi64(totals[2], totals[3]));
    _mm256_storeu_si256((__m256i *)(void *)lanes, totals[0]);
    *used = words;
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

#endif

int kvdev_nh64_available(int id)
{
    switch (id) {
    case KVDEV_NH64_PORTABLE:
        return 1;
#if KVDEV_X86
    case KVDEV_NH64_AVX2:
        return __builtin_cpu_supports("avx2") != 0;
#endif
    default:
        return 0;
    }
}

int kvdev_nh64_impl(int id, const void *buf, size_t len, uint64_t *ret)
{
    if (id < 0 || id >= KVDEV_NH64_COUNT || ret == NULL || (buf == NULL && len != 0)) {
        return -EINVAL;
    }
    if (!kvdev_nh64_available(id)) {
        return -ENOTSUP;
    }
    uint64_t total = 0;
    size_t used = 0;
#if KVDEV_X86
    if (id == KVDEV_NH64_AVX2) {
        total = body_avx2(buf, len, &used);
    }
#endif
    *ret = finish(total + rest(buf, len, used), len);
    return 0;
}

uint64_t kvdev_nh64(const void *buf, size_t len)
{
    uint64_t value = 0;
    int id = KVDEV_NH64_COUNT - 1;
    while (!kvdev_nh64_available(id)) {
        id--;
    }
    (void)kvdev_nh64_impl(id, buf, len, &value);
    return value;
}

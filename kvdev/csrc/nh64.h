/* NH-64, the page checksum that a GPU can compute; kernels/kvdev_kernels/nh64.py is its definition and twin.
 *
 * One implementation per kind of processor, chosen per call by the features the processor reports; all
 * give the same value, and a test may name one. No state anywhere. */
#ifndef KVDEV_NH64_H
#define KVDEV_NH64_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
enum kvdev_nh64_id {
    KVDEV_NH64_PORTABLE = 0,
    KVDEV_NH64_AVX2 = 1,
    KVDEV_NH64_COUNT = 2,
};

uint64_t kvdev_nh64(const void *buf, size_t len);
/* 1 if this build and this processor have implementation `id`, else 0. */
int kvdev_nh64_available(int id);
/* As kvdev_nh64 with the implementation named. 0, or -ENOTSUP, -EINVAL. */
int kvdev_nh64_impl(int id, const void *buf, size_t len, uint64_t *ret);
/* cdef end */

#endif

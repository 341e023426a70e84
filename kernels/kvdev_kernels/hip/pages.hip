// Page kernels for AMD and NVIDIA: gather the runs of KV pages out of an engine's paged tensors into staging pages, and
// scatter them back, with the page checksum NH-64 (kvdev_kernels/nh64.py defines it) on the way.
//
// A page is cut into units of 16, 4 or 1 bytes; a tile is THREADS x UNROLL units, and workgroups stride over all tiles of
// all pages. Each thread finds the tensor address of its unit by dividing its place in the page: unit -> run -> head ->
// token -> block -> plane. The divisors are known to the host, so that each division is a multiplication.
// Few workgroups suffice for a link (each keeps THREADS x UNROLL x 16 bytes = 16 KiB in flight) and leave the rest of the
// GPU to the engine.
//
// Every access is within what the host has checked (kvdev_kernels/gpu_shape.py); nothing is checked here.
// Built by hiprtc, NVRTC, clang (-nogpuinc -nogpulib) and, for tests, as C++ for the CPU (-DKVDEV_SHIM).

#if defined(KVDEV_SHIM)
#include "shim.h"
#else

typedef unsigned char kv_u8;
typedef unsigned int kv_u32;
typedef unsigned long long kv_u64;
typedef long long kv_i64;

#if defined(__HIP__) || defined(__HIPCC_RTC__)
// Compiler builtins and not the headers of HIP, which the offline build does not have.
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
typedef kv_u32 kv_vec16 __attribute__((ext_vector_type(4)));
// Addresses out of tables are generic pointers to the compiler, which then emits flat accesses; the cast says global.
#if defined(__HIP_DEVICE_COMPILE__) || defined(__AMDGCN__)
#define KV_GLOBAL(T) __attribute__((address_space(1))) T
#else
#define KV_GLOBAL(T) T
#endif
#define KV_KERNEL(threads) extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads)))
static __device__ inline kv_u32 kv_thread() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline kv_u32 kv_workgroup() { return __builtin_amdgcn_workgroup_id_x(); }
template <class T> static __device__ inline T kv_load(kv_u64 address) { return *(const KV_GLOBAL(T)*)address; }
template <class T> static __device__ inline T kv_load_once(kv_u64 address) {
  return __builtin_nontemporal_load((const KV_GLOBAL(T)*)address);
}
template <class T> static __device__ inline void kv_store_once(kv_u64 address, T value) {
  __builtin_nontemporal_store(value, (KV_GLOBAL(T)*)address);
}
template <class T> static __device__ inline void kv_store(kv_u64 address, T value) { *(KV_GLOBAL(T)*)address = value; }
static __device__ inline void kv_add(kv_u64 address, kv_u64 value) {
  __hip_atomic_fetch_add((KV_GLOBAL(kv_u64)*)address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
static __device__ inline kv_u32 kv_lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
static __device__ inline kv_u64 kv_wave_sum(kv_u64 value) {
  for (kv_u32 step = __builtin_amdgcn_wavefrontsize() / 2; step; step >>= 1) {
    const int from = (int)((kv_lane() ^ step) << 2);
    const kv_u32 low = (kv_u32)__builtin_amdgcn_ds_bpermute(from, (int)(kv_u32)value);
    const kv_u32 high = (kv_u32)__builtin_amdgcn_ds_bpermute(from, (int)(kv_u32)(value >> 32));
    value += (kv_u64)high << 32 | low;
  }
  return value;
}
static __device__ inline kv_u32 kv_word(kv_vec16 v, int i) { return v[i]; }
static __device__ inline kv_vec16 kv_zero16() { return (kv_vec16)(0u); }

#else  // CUDA: nvcc or NVRTC
typedef uint4 kv_vec16;
#define KV_KERNEL(threads) extern "C" __global__ __launch_bounds__(threads)
static __device__ inline kv_u32 kv_thread() { return threadIdx.x; }
static __device__ inline kv_u32 kv_workgroup() { return blockIdx.x; }
template <class T> static __device__ inline T kv_load(kv_u64 address) { return *(const T*)address; }
template <class T> static __device__ inline T kv_load_once(kv_u64 address) { return __ldcs((const T*)address); }
template <class T> static __device__ inline void kv_store_once(kv_u64 address, T value) { __stcs((T*)address, value); }
template <class T> static __device__ inline void kv_store(kv_u64 address, T value) { *(T*)address = value; }
static __device__ inline void kv_add(kv_u64 address, kv_u64 value) { atomicAdd((kv_u64*)address, value); }
static __device__ inline kv_u32 kv_lane() { return threadIdx.x & 31; }
static __device__ inline kv_u64 kv_wave_sum(kv_u64 value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
static __device__ inline kv_u32 kv_word(kv_vec16 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
static __device__ inline kv_vec16 kv_zero16() { return make_uint4(0, 0, 0, 0); }
#endif
#endif  // KVDEV_SHIM

#define KV_THREADS 256
#define KV_UNROLL 4

// quotient = (high(n x multiplier) + n) >> shift, exact for n below 2^31 (Granlund and Montgomery, PLDI 1994).
struct kv_divisor {
  kv_u32 value, multiplier, shift;
};

struct kv_plane {
  kv_u64 address, block_stride;
};

// Mirrored by kvdev_kernels.gpu_shape.SHAPE_DTYPE.
struct kv_shape {
  kv_u64 planes;       // device address of kv_plane[]
  kv_u64 block_table;  // of kv_i64[page][block in page]; a negative index is a hole: packed as zeros, not unpacked
  kv_u64 pages;        // of kv_u64[page]: device address of each staging page
  kv_u64 totals;       // of kv_u64[page]: NH-64 totals are added here
  kv_u64 done;         // of one kv_u64: tiles moved are added here, the host's proof that the kernel ran
  kv_u64 token_stride, head_stride;
  kv_u64 page_size;
  kv_divisor run_units, heads, tokens, blocks, page_tiles;
  kv_u32 unit_count, tile_count, workgroup_count, reserved;
};
static_assert(sizeof(struct kv_shape) == 144, "the launch parameters are 144 bytes, as gpu_shape.SHAPE_DTYPE says");

static __device__ inline kv_u32 kv_divide(kv_u32 n, kv_divisor d) {
  return ((kv_u32)((kv_u64)n * d.multiplier >> 32) + n) >> d.shift;
}

// The tensor address of unit `unit` of a page, or 0 for a hole.
static __device__ inline kv_u64 kv_unit_address(const kv_shape& s, kv_u32 page, kv_u32 unit, kv_u32 width) {
  const kv_u32 run = kv_divide(unit, s.run_units);
  const kv_u32 row = kv_divide(run, s.heads);
  const kv_u32 block_of_page = kv_divide(row, s.tokens);
  const kv_u32 plane = kv_divide(block_of_page, s.blocks);
  const kv_u32 place = block_of_page - plane * s.blocks.value;
  const kv_i64 block = kv_load<kv_i64>(s.block_table + 8 * ((kv_u64)page * s.blocks.value + place));
  if (block < 0) return 0;
  const kv_u64 entry = s.planes + sizeof(kv_plane) * (kv_u64)plane;
  return kv_load<kv_u64>(entry) + (kv_u64)block * kv_load<kv_u64>(entry + 8) +
         (kv_u64)(row - block_of_page * s.tokens.value) * s.token_stride +
         (kv_u64)(run - row * s.heads.value) * s.head_stride + (kv_u64)(unit - run * s.run_units.value) * width;
}

// One term of NH-64; `index` is the word's place in its page.
static __device__ inline kv_u64 kv_term(kv_u32 low, kv_u32 high, kv_u64 index) {
  const kv_u64 key = (index + 1) * 0x9E3779B97F4A7C15ull;
  low ^= (kv_u32)key;
  high ^= (kv_u32)(key >> 32);
  return (kv_u64)low * high + ((kv_u64)(low + high) << 32);
}
static __device__ inline kv_u64 kv_terms(kv_vec16 v, kv_u32 unit) {
  return kv_term(kv_word(v, 0), kv_word(v, 1), 2 * (kv_u64)unit) +
         kv_term(kv_word(v, 2), kv_word(v, 3), 2 * (kv_u64)unit + 1);
}
static __device__ inline void kv_report(const kv_shape& s, kv_u32 page, kv_u64 sum) {
  sum = kv_wave_sum(sum);
  if (kv_lane() == 0) kv_add(s.totals + 8 * (kv_u64)page, sum);
}

template <class T> struct kv_unit {
  static __device__ inline T zero() { return 0; }
  static __device__ inline kv_u64 terms(T, kv_u32) { return 0; }
};
template <> struct kv_unit<kv_vec16> {
  static __device__ inline kv_vec16 zero() { return kv_zero16(); }
  static __device__ inline kv_u64 terms(kv_vec16 v, kv_u32 unit) { return kv_terms(v, unit); }
};

template <class T, bool IS_PACK, bool HAS_SUM> static __device__ inline void kv_move(const kv_shape& s) {
  kv_u32 moved = 0;
  for (kv_u32 tile = kv_workgroup(); tile < s.tile_count; tile += s.workgroup_count) {
    const kv_u32 page = kv_divide(tile, s.page_tiles);
    const kv_u32 first = (tile - page * s.page_tiles.value) * (KV_THREADS * KV_UNROLL) + kv_thread();
    const kv_u64 staging = kv_load<kv_u64>(s.pages + 8 * (kv_u64)page);
    T value[KV_UNROLL];
    kv_u64 address[KV_UNROLL];
    kv_u64 sum = 0;
#pragma unroll
    for (int i = 0; i < KV_UNROLL; ++i) {
      const kv_u32 unit = first + i * KV_THREADS;
      address[i] = unit < s.unit_count ? kv_unit_address(s, page, unit, sizeof(T)) : 0;
    }
    // All loads of a thread before its first store: that is what keeps bytes in flight.
#pragma unroll
    for (int i = 0; i < KV_UNROLL; ++i) {
      const kv_u32 unit = first + i * KV_THREADS;
      value[i] = kv_unit<T>::zero();
      if (unit < s.unit_count) {
        if (!IS_PACK) value[i] = kv_load_once<T>(staging + (kv_u64)unit * sizeof(T));
        else if (address[i]) value[i] = kv_load_once<T>(address[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < KV_UNROLL; ++i) {
      const kv_u32 unit = first + i * KV_THREADS;
      if (unit >= s.unit_count) continue;
      if (IS_PACK) kv_store_once<T>(staging + (kv_u64)unit * sizeof(T), value[i]);
      else if (address[i]) kv_store_once<T>(address[i], value[i]);
      if (HAS_SUM) sum += kv_unit<T>::terms(value[i], unit);
    }
    if (HAS_SUM) kv_report(s, page, sum);
    ++moved;
  }
  if (kv_thread() == 0 && moved) kv_add(s.done, moved);
}

KV_KERNEL(KV_THREADS) void kvdev_pack16(kv_shape s) { kv_move<kv_vec16, true, false>(s); }
KV_KERNEL(KV_THREADS) void kvdev_pack16_sum(kv_shape s) { kv_move<kv_vec16, true, true>(s); }
KV_KERNEL(KV_THREADS) void kvdev_unpack16(kv_shape s) { kv_move<kv_vec16, false, false>(s); }
KV_KERNEL(KV_THREADS) void kvdev_unpack16_sum(kv_shape s) { kv_move<kv_vec16, false, true>(s); }
// Runs, strides or addresses that are no multiples of 16: a quarter or a sixteenth of the speed.
KV_KERNEL(KV_THREADS) void kvdev_pack4(kv_shape s) { kv_move<kv_u32, true, false>(s); }
KV_KERNEL(KV_THREADS) void kvdev_unpack4(kv_shape s) { kv_move<kv_u32, false, false>(s); }
KV_KERNEL(KV_THREADS) void kvdev_pack1(kv_shape s) { kv_move<kv_u8, true, false>(s); }
KV_KERNEL(KV_THREADS) void kvdev_unpack1(kv_shape s) { kv_move<kv_u8, false, false>(s); }

// NH-64 totals of staging pages, which start at multiples of 16; here unit_count is page_size / 16 rounded up.
KV_KERNEL(KV_THREADS) void kvdev_sum(kv_shape s) {
  kv_u32 moved = 0;
  const kv_u32 whole = (kv_u32)(s.page_size / 16);
  for (kv_u32 tile = kv_workgroup(); tile < s.tile_count; tile += s.workgroup_count) {
    const kv_u32 page = kv_divide(tile, s.page_tiles);
    const kv_u32 first = (tile - page * s.page_tiles.value) * (KV_THREADS * KV_UNROLL) + kv_thread();
    const kv_u64 staging = kv_load<kv_u64>(s.pages + 8 * (kv_u64)page);
    kv_u64 sum = 0;
    for (int i = 0; i < KV_UNROLL; ++i) {
      const kv_u32 unit = first + i * KV_THREADS;
      if (unit < whole) {
        sum += kv_terms(kv_load_once<kv_vec16>(staging + 16 * (kv_u64)unit), unit);
      } else if (unit < s.unit_count) {
        kv_u64 index = 2 * (kv_u64)unit, word = 0;
        kv_u32 bit = 0;
#pragma unroll 1
        for (kv_u64 at = 8 * index; at < s.page_size; ++at) {
          word |= (kv_u64)kv_load<kv_u8>(staging + at) << bit;
          bit += 8;
          if (bit == 64 || at + 1 == s.page_size) {
            sum += kv_term((kv_u32)word, (kv_u32)(word >> 32), index);
            ++index;
            word = bit = 0;
          }
        }
      }
    }
    kv_report(s, page, sum);
    ++moved;
  }
  if (kv_thread() == 0 && moved) kv_add(s.done, moved);
}

// Totals become checksums in place; where there are expected ones, differs[page] says whether they differ.
struct kv_check {
  kv_u64 totals, expected, differs;  // of kv_u64[page], kv_u64[page] or 0, kv_u32[page]
  kv_u64 page_size;
  kv_u32 page_count, workgroup_count;
};
static_assert(sizeof(struct kv_check) == 40, "the parameters are 40 bytes, as gpu_shape.CHECK_DTYPE says");
KV_KERNEL(KV_THREADS) void kvdev_check(kv_check c) {
  for (kv_u32 page = kv_workgroup() * KV_THREADS + kv_thread(); page < c.page_count;
       page += c.workgroup_count * KV_THREADS) {
    kv_u64 value = kv_load<kv_u64>(c.totals + 8 * (kv_u64)page) ^ c.page_size * 0x9E3779B97F4A7C15ull;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ value >> 27) * 0x94D049BB133111EBull;
    value ^= value >> 31;
    kv_store<kv_u64>(c.totals + 8 * (kv_u64)page, value);
    if (c.expected) {
      kv_store<kv_u32>(c.differs + 4 * (kv_u64)page, kv_load<kv_u64>(c.expected + 8 * (kv_u64)page) != value);
    }
  }
}

// The page kernels as C++ for the CPU: what a GPU brings, in plain C++. Tests loop over (workgroup, thread).
// It tests the source's logic under sanitizers; a wave is one thread here. Device addresses are translated by the
// function that the including program defines, so that a program may have device addresses that are not the host's.
#pragma once
#include <cstdint>
#include <cstring>

typedef uint8_t kv_u8;
typedef uint32_t kv_u32;
typedef uint64_t kv_u64;
typedef int64_t kv_i64;
struct alignas(16) kv_vec16 {
  kv_u32 w[4];
};
#define __device__
#define KV_KERNEL(threads) extern "C"

// Where the bytes of a device address are; never returns for an access that is not allowed.
void* kvdev_shim_translate(kv_u64 address, size_t size, bool is_store);

struct kvdev_shim_place {
  kv_u32 thread, workgroup;
};
inline thread_local kvdev_shim_place kvdev_shim_now;

static inline kv_u32 kv_thread() { return kvdev_shim_now.thread; }
static inline kv_u32 kv_workgroup() { return kvdev_shim_now.workgroup; }
static inline kv_u32 kv_lane() { return 0; }
static inline kv_u64 kv_wave_sum(kv_u64 value) { return value; }
template <class T> static inline T kv_load(kv_u64 address) {
  T value;
  std::memcpy(&value, kvdev_shim_translate(address, sizeof(T), false), sizeof(T));
  return value;
}
template <class T> static inline T kv_load_once(kv_u64 address) { return kv_load<T>(address); }
template <class T> static inline void kv_store(kv_u64 address, T value) {
  std::memcpy(kvdev_shim_translate(address, sizeof(T), true), &value, sizeof(T));
}
template <class T> static inline void kv_store_once(kv_u64 address, T value) { kv_store<T>(address, value); }
static inline void kv_add(kv_u64 address, kv_u64 value) {
  kv_u64 sum;
  void* place = kvdev_shim_translate(address, sizeof sum, true);
  std::memcpy(&sum, place, sizeof sum);
  sum += value;
  std::memcpy(place, &sum, sizeof sum);
}
static inline kv_u32 kv_word(kv_vec16 v, int i) { return v.w[i]; }
static inline kv_vec16 kv_zero16() { return kv_vec16{}; }

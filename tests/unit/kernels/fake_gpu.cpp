// A GPU driver for tests: the calls of libamdhip64, libhiprtc, libcuda and libnvrtc that kvdev binds, on the CPU.
// Device addresses are not host addresses; handles are checked; streams run later, a step at each query of an event, so
// that whoever reads a result too early reads the old bytes; kernels are the real source through the shim, and an access
// outside what is allocated or registered is a fault that stays, as a GPU's does. Faults can be ordered (fake_*).
#define KVDEV_SHIM
#include "pages.hip"

#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {
constexpr kv_u64 kOffset = kv_u64(1) << 46;
constexpr int kOk = 0, kInvalid = 1, kNoMemory = 2, kNotFound = 500, kNotReady = 600, kIllegal = 700, kHandle = 400;
constexpr int kRegistered = 712, kLaunch = 719, kNoBinary = 209;
struct Memory {
  kv_u64 device;
  char* host;
  size_t size;
  bool is_owned;
};
struct Event {
  bool is_recorded = true;
};
struct Stream {
  std::deque<std::pair<std::function<void()>, Event*>> work;  // an event is what the step waits for
  int priority = 0;
};
struct Program {
  std::string source, log, code;
};
struct Fault {
  int code;
};
std::recursive_mutex lock;
std::map<kv_u64, Memory> memory;
std::set<void*> streams, events, modules, programs, functions;
std::map<std::string, int> calls, ordered_code, ordered_after;
int sticky = 0, silent_launches = 0, has_dma_buf = 1;
const char* kNames[] = {"kvdev_pack16", "kvdev_pack16_sum", "kvdev_unpack16", "kvdev_unpack16_sum", "kvdev_pack4",
                        "kvdev_unpack4", "kvdev_pack1", "kvdev_unpack1", "kvdev_sum", "kvdev_check"};
void (*kMoves[])(kv_shape) = {kvdev_pack16, kvdev_pack16_sum, kvdev_unpack16, kvdev_unpack16_sum, kvdev_pack4,
                              kvdev_unpack4, kvdev_pack1, kvdev_unpack1, kvdev_sum};

int enter(const char* name) {
  ++calls[name];
  auto found = ordered_code.find(name);
  if (found != ordered_code.end() && ordered_after[name]-- <= 0) {
    const int code = found->second;
    ordered_code.erase(found);
    return code;
  }
  return sticky;
}
char* place(kv_u64 address, size_t size) {
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return nullptr;
  const Memory& found = (--after)->second;
  return address + size <= found.device + found.size ? found.host + (address - found.device) : nullptr;
}
// Copies take host addresses as well as device addresses, as both drivers do.
char* any_place(kv_u64 address, size_t size) {
  char* found = place(address, size);
  return found ? found : address < kOffset * 2 ? reinterpret_cast<char*>(address) : nullptr;
}
void step(Stream* stream) {
  if (stream->work.empty()) return;
  auto [run, wait] = stream->work.front();
  if (wait && !wait->is_recorded) return;
  stream->work.pop_front();
  if (sticky) return;
  try {
    if (run) run();
  } catch (const Fault& fault) {
    sticky = fault.code;
  }
}
void step_all() {
  for (void* stream : streams) step(static_cast<Stream*>(stream));
}
template <class P> void run_grid(void (*kernel)(P), P parameters, unsigned grid) {
  for (kvdev_shim_now.workgroup = 0; kvdev_shim_now.workgroup < grid; ++kvdev_shim_now.workgroup)
    for (kvdev_shim_now.thread = 0; kvdev_shim_now.thread < KV_THREADS; ++kvdev_shim_now.thread) kernel(parameters);
}
}  // namespace

void* kvdev_shim_translate(kv_u64 address, size_t size, bool) {
  char* found = address % size ? nullptr : place(address, size);
  if (!found) throw Fault{kIllegal};
  return found;
}

#define API extern "C" __attribute__((visibility("default")))
#define ENTER                                        \
  std::lock_guard<std::recursive_mutex> held(lock);  \
  if (int code = enter(__func__)) return code

API int fake_calls(const char* name) { return calls[name]; }
API void fake_order(const char* name, int code, int after) {
  ordered_code[name] = code;
  ordered_after[name] = after;
}
// The next launches report success and do nothing.
API void fake_silence(int count) { silent_launches = count; }
// What the attribute of dma-buf says; the export itself is never called here.
API void fake_dma_buf(int value) { has_dma_buf = value; }
API int fake_live(void) { return int(memory.size() + streams.size() + events.size() + modules.size()); }
API void fake_reset(void) {
  for (auto& [address, each] : memory)
    if (each.is_owned) std::free(each.host);
  memory.clear(), streams.clear(), events.clear(), modules.clear(), programs.clear(), functions.clear();
  calls.clear(), ordered_code.clear(), ordered_after.clear();
  sticky = silent_launches = 0, has_dma_buf = 1;
}

static int do_alloc(kv_u64* out, size_t size) {
  if (size > (size_t(1) << 32)) return kNoMemory;
  char* host = static_cast<char*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096));
  std::memset(host, 0xCD, size);
  const kv_u64 device = reinterpret_cast<kv_u64>(host) + kOffset;
  memory[device] = {device, host, size, true};
  *out = device;
  return kOk;
}
static int do_free(kv_u64 address) {
  auto found = memory.find(address);
  if (found == memory.end() || !found->second.is_owned) return kInvalid;
  std::free(found->second.host);
  memory.erase(found);
  return kOk;
}
static int do_register(void* host, size_t size) {
  const kv_u64 device = reinterpret_cast<kv_u64>(host) + 2 * kOffset;
  if (memory.count(device)) return kRegistered;
  memory[device] = {device, static_cast<char*>(host), size, false};
  return kOk;
}
static int do_unregister(void* host) { return memory.erase(reinterpret_cast<kv_u64>(host) + 2 * kOffset) ? kOk : 713; }
static int do_pointer(kv_u64* out, void* host) {
  *out = reinterpret_cast<kv_u64>(host) + 2 * kOffset;
  return place(*out, 1) ? kOk : kInvalid;
}
static int do_range(kv_u64* base, size_t* size, kv_u64 address) {
  auto after = memory.upper_bound(address);
  if (!place(address, 1)) return kInvalid;
  const Memory& found = (--after)->second;
  *base = found.device, *size = found.size;
  return kOk;
}
static int do_copy(kv_u64 to, kv_u64 from, size_t size, void* stream) {
  if (!streams.count(stream)) return kHandle;
  static_cast<Stream*>(stream)->work.push_back({[=] {
    char *target = any_place(to, size), *source = any_place(from, size);
    if (!target || !source) throw Fault{kIllegal};
    std::memcpy(target, source, size);
  }, nullptr});
  return kOk;
}
static int do_launch(void* function, unsigned grid, unsigned block, void* stream, void** params) {
  if (!functions.count(function) || !streams.count(stream)) return kHandle;
  if (block != KV_THREADS || !grid || !params) return kInvalid;
  const int index = int(reinterpret_cast<kv_u64>(function) & 15);
  if (silent_launches > 0) return --silent_launches, kOk;
  if (index < 9) {
    const kv_shape shape = *static_cast<kv_shape*>(params[0]);
    static_cast<Stream*>(stream)->work.push_back({[=] { run_grid(kMoves[index], shape, grid); }, nullptr});
  } else {
    const kv_check check = *static_cast<kv_check*>(params[0]);
    static_cast<Stream*>(stream)->work.push_back({[=] { run_grid(kvdev_check, check, grid); }, nullptr});
  }
  return kOk;
}
static int do_load(void** out, const void* image, const char* magic) {
  if (std::memcmp(image, magic, 8) != 0) return kNoBinary;
  *out = new int;
  modules.insert(*out);
  return kOk;
}
static int do_function(void** out, void* module, const char* name) {
  if (!modules.count(module)) return kHandle;
  for (int i = 0; i < 10; ++i)
    if (!std::strcmp(kNames[i], name)) {
      *out = reinterpret_cast<void*>(kv_u64(0xF00000) + i);
      functions.insert(*out);
      return kOk;
    }
  return kNotFound;
}
static int do_stream(void** out, int priority) {
  auto* made = new Stream;
  made->priority = priority;
  streams.insert(*out = made);
  return kOk;
}
static int do_event(void** out) { return events.insert(*out = new Event), kOk; }
static int do_record(void* event, void* stream) {
  if (!events.count(event) || !streams.count(stream)) return kHandle;
  auto* which = static_cast<Event*>(event);
  which->is_recorded = false;
  static_cast<Stream*>(stream)->work.push_back({[=] { which->is_recorded = true; }, nullptr});
  return kOk;
}
static int do_query(void* event) {
  if (!events.count(event)) return kHandle;
  step_all();
  if (sticky) return sticky;
  return static_cast<Event*>(event)->is_recorded ? kOk : kNotReady;
}
static int do_wait(void* stream, void* event) {
  if (!events.count(event) || !streams.count(stream)) return kHandle;
  static_cast<Stream*>(stream)->work.push_back({nullptr, static_cast<Event*>(event)});
  return kOk;
}
static int do_create(void** out, const char* source) {
  auto* program = new Program;
  program->source = source;
  programs.insert(*out = program);
  return kOk;
}
static int do_compile(void* program, int count, const char* const* options, const char* magic) {
  if (!programs.count(program)) return 3;
  auto* which = static_cast<Program*>(program);
  for (int i = 0; i < count; ++i)
    if (std::strstr(options[i], "gfx000")) {
      which->log = "error: unknown target gfx000";
      return 6;
    }
  if (which->source.find("kvdev_pack16") == std::string::npos) return 6;
  which->code = std::string(magic) + "code of the fake driver";
  return kOk;
}

// --- HIP
API int hipInit(unsigned) { ENTER; return kOk; }
API int hipGetDeviceCount(int* n) { ENTER; return *n = 2, kOk; }
API int hipSetDevice(int d) { ENTER; return d >= 0 && d < 2 ? kOk : 101; }
API int hipDriverGetVersion(int* v) { ENTER; return *v = 70226015, kOk; }
API int hipRuntimeGetVersion(int* v) { ENTER; return *v = 70226015, kOk; }
API const char* hipGetErrorName(int code) { return code == kIllegal ? "hipErrorIllegalAddress" : "hipErrorOther"; }
API int hipDeviceGetName(char* out, int size, int) { ENTER; std::strncpy(out, "Fake Instinct", size_t(size)); return kOk; }
API int hipGetDevicePropertiesR0600(char* properties, int) {
  ENTER;
  std::memcpy(properties, "Fake Instinct", 14);
  std::memcpy(properties + 1160, "gfx942:sramecc+:xnack-", 23);
  return kOk;
}
API int hipMalloc(kv_u64* out, size_t size) { ENTER; return do_alloc(out, size); }
API int hipFree(kv_u64 address) { ENTER; return do_free(address); }
API int hipHostRegister(void* host, size_t size, unsigned) { ENTER; return do_register(host, size); }
API int hipHostUnregister(void* host) { ENTER; return do_unregister(host); }
API int hipHostGetDevicePointer(kv_u64* out, void* host, unsigned) { ENTER; return do_pointer(out, host); }
API int hipMemGetAddressRange(kv_u64* base, size_t* size, kv_u64 address) { ENTER; return do_range(base, size, address); }
API int hipMemGetHandleForAddressRange(void*, void*, size_t, int, unsigned long long) { ENTER; return kInvalid; }
API int hipMemcpyAsync(kv_u64 to, kv_u64 from, size_t n, int, void* s) { ENTER; return do_copy(to, from, n, s); }
API int hipMemcpyBatchAsync(kv_u64* to, kv_u64* from, size_t* n, size_t count, void*, size_t*, size_t attributes,
                            size_t* bad, void* s) {
  ENTER;
  if (count > 8192) return sticky = kIllegal;
  if (attributes) return kInvalid;
  for (size_t i = 0; i < count; ++i)
    if (int code = do_copy(to[i], from[i], n[i], s)) return *bad = i, code;
  return kOk;
}
API int hipModuleLoadData(void** out, const void* image) { ENTER; return do_load(out, image, "FAKEHIP\n"); }
API int hipModuleUnload(void* module) { ENTER; return modules.erase(module) ? kOk : kHandle; }
API int hipModuleGetFunction(void** out, void* module, const char* name) { ENTER; return do_function(out, module, name); }
API int hipModuleLaunchKernel(void* f, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned,
                              void* s, void** params, void**) {
  ENTER;
  return do_launch(f, gx, bx, s, params);
}
API int hipDeviceGetStreamPriorityRange(int* least, int* greatest) { ENTER; return *least = 1, *greatest = -1, kOk; }
API int hipStreamCreateWithPriority(void** out, unsigned, int priority) { ENTER; return do_stream(out, priority); }
API int hipStreamDestroy(void* s) { ENTER; return streams.erase(s) ? kOk : kHandle; }
API int hipEventCreateWithFlags(void** out, unsigned) { ENTER; return do_event(out); }
API int hipEventDestroy(void* e) { ENTER; return events.erase(e) ? kOk : kHandle; }
API int hipEventRecord(void* e, void* s) { ENTER; return do_record(e, s); }
API int hipEventQuery(void* e) { ENTER; return do_query(e); }
API int hipStreamWaitEvent(void* s, void* e, unsigned) { ENTER; return do_wait(s, e); }
API int hiprtcVersion(int* major, int* minor) { return *major = 9, *minor = 0, kOk; }
API const char* hiprtcGetErrorString(int code) { return code == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR"; }
API int hiprtcCreateProgram(void** out, const char* source, const char*, int, void*, void*) { ENTER; return do_create(out, source); }
API int hiprtcCompileProgram(void* p, int n, const char* const* options) { ENTER; return do_compile(p, n, options, "FAKEHIP\n"); }
API int hiprtcGetProgramLogSize(void* p, size_t* n) { return *n = static_cast<Program*>(p)->log.size() + 1, kOk; }
API int hiprtcGetProgramLog(void* p, char* out) { return std::strcpy(out, static_cast<Program*>(p)->log.c_str()), kOk; }
API int hiprtcGetCodeSize(void* p, size_t* n) { return *n = static_cast<Program*>(p)->code.size(), kOk; }
API int hiprtcGetCode(void* p, char* out) { const auto& c = static_cast<Program*>(p)->code; return std::memcpy(out, c.data(), c.size()), kOk; }
API int hiprtcDestroyProgram(void** p) { ENTER; return programs.erase(*p) ? kOk : 3; }

// --- CUDA
API int cuInit(unsigned) { ENTER; return kOk; }
API int cuDeviceGetCount(int* n) { ENTER; return *n = 1, kOk; }
API int cuDeviceGet(int* out, int d) { ENTER; return *out = d, d == 0 ? kOk : 101; }
API int cuDeviceGetName(char* out, int size, int) { ENTER; std::strncpy(out, "Fake H200", size_t(size)); return kOk; }
API int cuDeviceGetAttribute(int* out, int attribute, int) { ENTER; return *out = attribute == 75 ? 9 : attribute == 124 ? has_dma_buf : 0, kOk; }
API int cuDevicePrimaryCtxRetain(void** out, int) { ENTER; return *out = &sticky, kOk; }
API int cuDevicePrimaryCtxRelease_v2(int) { ENTER; return kOk; }
API int cuCtxSetCurrent(void*) { ENTER; return kOk; }
API int cuDriverGetVersion(int* v) { ENTER; return *v = 13000, kOk; }
API int cuGetErrorName(int code, const char** out) { return *out = code == kIllegal ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER", kOk; }
API int cuMemAlloc_v2(kv_u64* out, size_t size) { ENTER; return do_alloc(out, size); }
API int cuMemFree_v2(kv_u64 address) { ENTER; return do_free(address); }
API int cuMemHostRegister_v2(void* host, size_t size, unsigned) { ENTER; return do_register(host, size); }
API int cuMemHostUnregister(void* host) { ENTER; return do_unregister(host); }
API int cuMemHostGetDevicePointer_v2(kv_u64* out, void* host, unsigned) { ENTER; return do_pointer(out, host); }
API int cuMemGetAddressRange_v2(kv_u64* base, size_t* size, kv_u64 address) { ENTER; return do_range(base, size, address); }
API int cuMemGetHandleForAddressRange(void*, kv_u64, size_t, int, unsigned long long) { ENTER; return kInvalid; }
API int cuMemcpyAsync(kv_u64 to, kv_u64 from, size_t n, void* s) { ENTER; return do_copy(to, from, n, s); }
static int batch_v1(kv_u64* to, kv_u64* from, size_t* n, size_t count, void*, size_t*, size_t, size_t* bad, void* s) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (int code = enter("cuMemcpyBatchAsync")) return code;
  for (size_t i = 0; i < count; ++i)
    if (int code = do_copy(to[i], from[i], n[i], s)) return *bad = i, code;
  return kOk;
}
// The entry by its bare name is the one of another ABI, as in CUDA 13: whoever calls it with nine arguments is wrong.
API int cuMemcpyBatchAsync(kv_u64*, kv_u64*, size_t*, size_t, void*, size_t*, size_t, void*) { return kInvalid; }
API int cuGetProcAddress_v2(const char* name, void** out, int version, kv_u64, int*) {
  ENTER;
  const bool is_known = !std::strcmp(name, "cuMemcpyBatchAsync") && version == 12080;
  return *out = is_known ? reinterpret_cast<void*>(batch_v1) : nullptr, is_known ? kOk : kNotFound;
}
API int cuModuleLoadData(void** out, const void* image) { ENTER; return do_load(out, image, "FAKECUD\n"); }
API int cuModuleUnload(void* module) { ENTER; return modules.erase(module) ? kOk : kHandle; }
API int cuModuleGetFunction(void** out, void* module, const char* name) { ENTER; return do_function(out, module, name); }
API int cuLaunchKernel(void* f, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned, void* s,
                       void** params, void**) {
  ENTER;
  return do_launch(f, gx, bx, s, params);
}
API int cuCtxGetStreamPriorityRange(int* least, int* greatest) { ENTER; return *least = 0, *greatest = -5, kOk; }
API int cuStreamCreateWithPriority(void** out, unsigned, int priority) { ENTER; return do_stream(out, priority); }
API int cuStreamDestroy_v2(void* s) { ENTER; return streams.erase(s) ? kOk : kHandle; }
API int cuEventCreate(void** out, unsigned) { ENTER; return do_event(out); }
API int cuEventDestroy_v2(void* e) { ENTER; return events.erase(e) ? kOk : kHandle; }
API int cuEventRecord(void* e, void* s) { ENTER; return do_record(e, s); }
API int cuEventQuery(void* e) { ENTER; return do_query(e); }
API int cuStreamWaitEvent(void* s, void* e, unsigned) { ENTER; return do_wait(s, e); }
API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, kOk; }
API const char* nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
API int nvrtcCreateProgram(void** out, const char* source, const char*, int, void*, void*) { ENTER; return do_create(out, source); }
API int nvrtcCompileProgram(void* p, int n, const char* const* options) { ENTER; return do_compile(p, n, options, "FAKECUD\n"); }
API int nvrtcGetProgramLogSize(void* p, size_t* n) { return hiprtcGetProgramLogSize(p, n); }
API int nvrtcGetProgramLog(void* p, char* out) { return hiprtcGetProgramLog(p, out); }
API int nvrtcGetCUBINSize(void* p, size_t* n) { return hiprtcGetCodeSize(p, n); }
API int nvrtcGetCUBIN(void* p, char* out) { return hiprtcGetCode(p, out); }
API int nvrtcDestroyProgram(void** p) { ENTER; return programs.erase(*p) ? kOk : 3; }

"""The calls of the GPU drivers and run-time compilers that are bound: C declarations and names, per vendor.

Both vendors' calls take the same arguments here, but for those that ``driver.py`` tells apart. Versioned symbols are
named as such (``_v2``, ``R0600``), never through a header's macro: a driver's ABI cannot change under a name.
Not here: calling (``kvdev_kernels.driver``).
"""

from __future__ import annotations

from dataclasses import dataclass

_COMMON = """
int {init}(unsigned flags);
int {device_count}(int *count);
int {driver_version}(int *version);
int {device_name}(char *name, int size, int device);
int {alloc}(uint64_t *address, size_t size);
int {free}(uint64_t address);
int {host_register}(void *host, size_t size, unsigned flags);
int {host_unregister}(void *host);
int {host_pointer}(uint64_t *address, void *host, unsigned flags);
int {address_range}(uint64_t *base, size_t *size, uint64_t address);
int {module_load}(void **module, const void *image);
int {module_unload}(void *module);
int {module_function}(void **function, void *module, const char *name);
int {launch}(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
             unsigned shared, void *stream, void **params, void **extra);
int {priority_range}(int *least, int *greatest);
int {stream_create}(void **stream, unsigned flags, int priority);
int {stream_destroy}(void *stream);
int {event_create}(void **event, unsigned flags);
int {event_destroy}(void *event);
int {event_record}(void *event, void *stream);
int {event_query}(void *event);
int {stream_wait}(void *stream, void *event, unsigned flags);
"""
_COMPILER = """
int {version}(int *major, int *minor);
const char *{error_string}(int code);
int {create}(void **program, const char *source, const char *name, int headers, void *texts, void *names);
int {compile}(void *program, int count, const char *const *options);
int {log_size}(void *program, size_t *size);
int {log}(void *program, char *text);
int {code_size}(void *program, size_t *size);
int {code}(void *program, char *code);
int {destroy}(void **program);
"""


@dataclass(frozen=True)
class Vendor:
    """One vendor's libraries; soname versions best first."""

    name: str
    backend: str
    libraries: tuple[str, ...]
    compiler_libraries: tuple[str, ...]
    calls: dict[str, str]
    compiler_calls: dict[str, str]
    declarations: str
    library_variable: str
    """Environment variables that name a library file take its place."""
    compiler_variable: str

    @property
    def cdef(self) -> str:
        return _COMMON.format(**self.calls) + self.declarations

    @property
    def compiler_cdef(self) -> str:
        return _COMPILER.format(**self.compiler_calls)


AMD = Vendor(
    name="AMD",
    backend="hip",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    compiler_libraries=("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"),
    calls={
        "init": "hipInit",
        "device_count": "hipGetDeviceCount",
        "driver_version": "hipRuntimeGetVersion",
        "device_name": "hipDeviceGetName",
        "alloc": "hipMalloc",
        "free": "hipFree",
        "host_register": "hipHostRegister",
        "host_unregister": "hipHostUnregister",
        "host_pointer": "hipHostGetDevicePointer",
        "address_range": "hipMemGetAddressRange",
        "module_load": "hipModuleLoadData",
        "module_unload": "hipModuleUnload",
        "module_function": "hipModuleGetFunction",
        "launch": "hipModuleLaunchKernel",
        "priority_range": "hipDeviceGetStreamPriorityRange",
        "stream_create": "hipStreamCreateWithPriority",
        "stream_destroy": "hipStreamDestroy",
        "event_create": "hipEventCreateWithFlags",
        "event_destroy": "hipEventDestroy",
        "event_record": "hipEventRecord",
        "event_query": "hipEventQuery",
        "stream_wait": "hipStreamWaitEvent",
    },
    compiler_calls={
        "version": "hiprtcVersion",
        "error_string": "hiprtcGetErrorString",
        "create": "hiprtcCreateProgram",
        "compile": "hiprtcCompileProgram",
        "log_size": "hiprtcGetProgramLogSize",
        "log": "hiprtcGetProgramLog",
        "code_size": "hiprtcGetCodeSize",
        "code": "hiprtcGetCode",
        "destroy": "hiprtcDestroyProgram",
    },
    declarations="""
int hipSetDevice(int device);
int hipGetDevicePropertiesR0600(char *properties, int device);
const char *hipGetErrorName(int code);
int hipMemGetHandleForAddressRange(void *handle, void *address, size_t size, int type, unsigned long long flags);
int hipMemcpyAsync(uint64_t to, uint64_t from, size_t size, int kind, void *stream);
int hipMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, void *attributes,
                        size_t *attribute_starts, size_t attribute_count, size_t *failed, void *stream);
""",
    library_variable="KVDEV_HIP_LIBRARY",
    compiler_variable="KVDEV_HIPRTC_LIBRARY",
)

NVIDIA = Vendor(
    name="NVIDIA",
    backend="cuda",
    libraries=("libcuda.so.1",),
    compiler_libraries=("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"),
    calls={
        "init": "cuInit",
        "device_count": "cuDeviceGetCount",
        "driver_version": "cuDriverGetVersion",
        "device_name": "cuDeviceGetName",
        "alloc": "cuMemAlloc_v2",
        "free": "cuMemFree_v2",
        "host_register": "cuMemHostRegister_v2",
        "host_unregister": "cuMemHostUnregister",
        "host_pointer": "cuMemHostGetDevicePointer_v2",
        "address_range": "cuMemGetAddressRange_v2",
        "module_load": "cuModuleLoadData",
        "module_unload": "cuModuleUnload",
        "module_function": "cuModuleGetFunction",
        "launch": "cuLaunchKernel",
        "priority_range": "cuCtxGetStreamPriorityRange",
        "stream_create": "cuStreamCreateWithPriority",
        "stream_destroy": "cuStreamDestroy_v2",
        "event_create": "cuEventCreate",
        "event_destroy": "cuEventDestroy_v2",
        "event_record": "cuEventRecord",
        "event_query": "cuEventQuery",
        "stream_wait": "cuStreamWaitEvent",
    },
    compiler_calls={
        "version": "nvrtcVersion",
        "error_string": "nvrtcGetErrorString",
        "create": "nvrtcCreateProgram",
        "compile": "nvrtcCompileProgram",
        "log_size": "nvrtcGetProgramLogSize",
        "log": "nvrtcGetProgramLog",
        "code_size": "nvrtcGetCUBINSize",
        "code": "nvrtcGetCUBIN",
        "destroy": "nvrtcDestroyProgram",
    },
    declarations="""
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuGetErrorName(int code, const char **name);
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t size, int type, unsigned long long flags);
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream);
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);
""",
    library_variable="KVDEV_CUDA_LIBRARY",
    compiler_variable="KVDEV_NVRTC_LIBRARY",
)

VENDORS = (AMD, NVIDIA)

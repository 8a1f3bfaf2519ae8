"""NVIDIA's driver as far as this runtime calls it: `libcuda.so.1` through ctypes, for CUDA 12.3 and newer.

Names, types and values are those of cuda.h (https://docs.nvidia.com/cuda/cuda-driver-api/). The header maps a function's
name to the symbol of its newest form; here the symbol is written down, in the form that every driver since 12.3 has.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

from aotc.errors import DeviceError

LIBRARY = "libcuda.so.1"

CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
CU_STREAM_NON_BLOCKING = 1
CU_EVENT_DEFAULT = 0
CU_EVENT_BLOCKING_SYNC = 1  # who waits sleeps
CU_EVENT_DISABLE_TIMING = 2
CU_MEMHOSTALLOC_PORTABLE = 1
CU_MEMHOSTALLOC_DEVICEMAP = 2
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1
CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
CU_TENSOR_MAP_INTERLEAVE_NONE = 0
CU_TENSOR_MAP_SWIZZLE_128B = 3
CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0

CU_TENSOR_MAP_BYTES = 128  # a CUtensorMap, which is opaque
CU_TENSOR_MAP_ALIGNMENT = 128  # of its address: 64 before CUDA 13


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("gridDimX", c_uint), ("gridDimY", c_uint), ("gridDimZ", c_uint),
        ("blockDimX", c_uint), ("blockDimY", c_uint), ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p),
    ]  # fmt: skip


class GraphEdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5)]


_HANDLE = c_void_p  # CUcontext, CUstream, CUevent, CUmodule, CUfunction, CUgraph, CUgraphNode, CUgraphExec
_ADDRESS = c_uint64  # CUdeviceptr
_DEVICE = _ENUM = c_int
_64, _32 = ctypes.POINTER(c_uint64), ctypes.POINTER(c_uint)
_NODES = ctypes.POINTER(c_void_p)

# By name: the symbol, what is given out through its first parameters, the parameters behind them.
FUNCTIONS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "cuInit": ("cuInit", (), (c_uint,)),
    "cuDriverGetVersion": ("cuDriverGetVersion", (c_int,), ()),
    "cuDeviceGetCount": ("cuDeviceGetCount", (c_int,), ()),
    "cuDeviceGet": ("cuDeviceGet", (_DEVICE,), (c_int,)),
    "cuDeviceGetName": ("cuDeviceGetName", (), (c_char_p, c_int, _DEVICE)),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", (c_int,), (_ENUM, _DEVICE)),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", (_HANDLE,), (_DEVICE,)),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", (), (_DEVICE,)),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", (), (_HANDLE,)),
    "cuCtxSynchronize": ("cuCtxSynchronize", (), ()),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", (), (_HANDLE,)),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", (_HANDLE,), ()),
    "cuStreamCreate": ("cuStreamCreate", (_HANDLE,), (c_uint,)),
    "cuStreamDestroy": ("cuStreamDestroy_v2", (), (_HANDLE,)),
    "cuStreamSynchronize": ("cuStreamSynchronize", (), (_HANDLE,)),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", (), (_HANDLE, _HANDLE, c_uint)),
    "cuEventCreate": ("cuEventCreate", (_HANDLE,), (c_uint,)),
    "cuEventDestroy": ("cuEventDestroy_v2", (), (_HANDLE,)),
    "cuEventRecord": ("cuEventRecord", (), (_HANDLE, _HANDLE)),
    "cuEventSynchronize": ("cuEventSynchronize", (), (_HANDLE,)),
    "cuEventElapsedTime": ("cuEventElapsedTime", (c_float,), (_HANDLE, _HANDLE)),  # _v2 came with 12.8
    "cuMemGetInfo": ("cuMemGetInfo_v2", (c_size_t, c_size_t), ()),
    "cuMemAlloc": ("cuMemAlloc_v2", (_ADDRESS,), (c_size_t,)),
    "cuMemFree": ("cuMemFree_v2", (), (_ADDRESS,)),
    "cuMemHostAlloc": ("cuMemHostAlloc", (c_void_p,), (c_size_t, c_uint)),
    "cuMemFreeHost": ("cuMemFreeHost", (), (c_void_p,)),
    "cuMemsetD8Async": ("cuMemsetD8Async", (), (_ADDRESS, c_ubyte, c_size_t, _HANDLE)),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", (), (_ADDRESS, c_void_p, c_size_t, _HANDLE)),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", (), (c_void_p, _ADDRESS, c_size_t, _HANDLE)),
    "cuModuleLoadData": ("cuModuleLoadData", (_HANDLE,), (c_char_p,)),
    "cuModuleUnload": ("cuModuleUnload", (), (_HANDLE,)),
    "cuModuleGetFunction": ("cuModuleGetFunction", (_HANDLE,), (_HANDLE, c_char_p)),
    "cuFuncSetAttribute": ("cuFuncSetAttribute", (), (_HANDLE, _ENUM, c_int)),
    "cuGraphCreate": ("cuGraphCreate", (_HANDLE,), (c_uint,)),
    "cuGraphDestroy": ("cuGraphDestroy", (), (_HANDLE,)),
    "cuGraphAddKernelNode": (
        "cuGraphAddKernelNode_v2", (_HANDLE,), (_HANDLE, _NODES, c_size_t, ctypes.POINTER(KernelNodeParams)),
    ),
    "cuGraphAddDependencies": (
        "cuGraphAddDependencies_v2", (), (_HANDLE, _NODES, _NODES, ctypes.POINTER(GraphEdgeData), c_size_t),
    ),
    "cuGraphInstantiate": ("cuGraphInstantiateWithFlags", (_HANDLE,), (_HANDLE, c_ulonglong)),
    "cuGraphUpload": ("cuGraphUpload", (), (_HANDLE, _HANDLE)),
    "cuGraphLaunch": ("cuGraphLaunch", (), (_HANDLE, _HANDLE)),
    "cuGraphExecDestroy": ("cuGraphExecDestroy", (), (_HANDLE,)),
    "cuTensorMapEncodeTiled": (
        "cuTensorMapEncodeTiled", (),
        (c_void_p, _ENUM, c_uint, c_void_p, _64, _64, _32, _32, _ENUM, _ENUM, _ENUM, _ENUM),
    ),
}  # fmt: skip

QUICK = frozenset(
    ("cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
     "cuGraphAddKernelNode", "cuTensorMapEncodeTiled")
)  # fmt: skip
"""What answers at once keeps Python's lock: beside a thread that computes, getting it back takes up to 5 ms, and beside
those that bring weights, a turn of one of them for every node of a graph."""

HINTS = {
    2: "other processes hold its memory: look at nvidia-smi",
    34: "libcuda.so.1 is a stub of the toolkit: install a driver, or take the stub off LD_LIBRARY_PATH",
    46: "another process holds it alone: look at nvidia-smi",
    100: "the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: "the code is for another GPU: compile the model again",
    802: "the machine's switches are not ready: start nvidia-fabricmanager",
    803: "the driver's library and its kernel module differ: restart the machine or install them again",
    804: "a forward-compatible libcuda.so.1 does not support this GPU: take it off LD_LIBRARY_PATH",
}
"""What to do about a CUresult."""


def failure(function: str, code: int, name: str) -> DeviceError:
    """What to raise where a function of the driver answers with an error, of this name in cuda.h."""
    hint = HINTS.get(code)
    return DeviceError(f"the GPU reports {name} in {function}{f': {hint}' if hint else ''}")


class Driver:
    """The functions of `FUNCTIONS` as methods, each bound when it is first used. They take what cuda.h says but for what
    is given out, and return that: a value, a tuple of several, 0 for none. Handles and addresses are integers.

    They raise DeviceError where the driver answers with an error, and where it lacks the function; making a Driver does
    where there is none. All but the QUICK ones run without Python's lock.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise DeviceError("there is no NVIDIA driver here (libcuda.so.1 does not load)") from None

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        symbol, results, arguments = FUNCTIONS[name]
        types = (*map(ctypes.POINTER, results), *arguments)
        prototype = (ctypes.PYFUNCTYPE if name in QUICK else ctypes.CFUNCTYPE)(c_int, *types)
        directions = ((2,),) * len(results) + ((1,),) * len(arguments)  # out, in
        try:
            function = prototype((symbol, self._library), directions) if results else prototype((symbol, self._library))
        except AttributeError:
            raise DeviceError(f"the NVIDIA driver is too old (it has no {symbol}): install a newer one") from None

        def check(code: Any, _: Any, given: Any) -> Any:
            if code:
                raise failure(name, code, self._error_name(code))
            return given  # ctypes then returns what is given out

        function.errcheck = check
        setattr(self, name, function)
        return function

    def _error_name(self, code: int) -> str:
        text = c_char_p()
        known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value is not None
        return text.value.decode() if known and text.value else f"error {code}"

"""A CUDA driver without a GPU: memory is the host's, graphs are recorded, kernels are what a test makes of them.

It is stricter than the real one: what is released twice or never made, a call in a thread without a context, and a copy
beyond its block fail the test.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CODES = {
    1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 34: "CUDA_ERROR_STUB_LIBRARY",
    100: "CUDA_ERROR_NO_DEVICE", 201: "CUDA_ERROR_INVALID_CONTEXT", 700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    719: "CUDA_ERROR_LAUNCH_FAILED", 803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
}  # fmt: skip
_ANYWHERE = ("cuInit", "cuDriverGet", "cuDeviceGet", "cuDevicePrimary", "cuCtx")  # calls that need no context
ALLOCATING = (
    "cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuGraphCreate", "cuGraphInstantiate", "cuEventCreate",
    "cuStreamCreate",
)  # fmt: skip
"""Calls that take memory of the GPU or of the driver."""


class Code(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return CODES[self]


class FakeDriver:
    """What `aotc.runtime.devices` calls.

    `failing` names functions that fail from now on, with their code; `faults` kernels whose launch breaks the context
    with a code, which then every call gives. `kernel(symbol, arguments)` is called for each launched kernel, in order;
    `arity` says how many arguments a kernel has. `trace` has copies and launches in order.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16=9, CU_TENSOR_MAP_DATA_TYPE_FLOAT16=6)
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
    cuuint64_t = cuuint32_t = int

    def __init__(self, capability: tuple[int, int] = (9, 0), gpus: int = 1, version: int = 13000, free: int = 1 << 34) -> None:
        self.capability, self.gpus, self.version, self.free = capability, gpus, version, free
        self.failing: dict[str, int] = {}
        self.faults: dict[str, int] = {}
        self.kernel: Callable[[str, list[int]], None] = lambda symbol, arguments: None
        self.arity: dict[str, int] = {}
        self.map_count: dict[str, int] = {}  # tensor maps of a kernel, behind its arguments
        self.sticky = 0
        self.opened: list[int] = []  # ordinals of devices
        self.blocks: dict[int, Any] = {}  # device memory by address
        self.host: dict[int, Any] = {}  # pinned memory
        self.live: Counter[str] = Counter()  # how many of each other kind of thing there are
        self.things: dict[int, str] = {}
        self.images: dict[int, bytes] = {}  # of modules
        self.graphs: dict[int, list[SimpleNamespace]] = {}  # by graph or executable
        self.edges: list[tuple[int, int]] = []  # (from_port, type)
        self.launched: list[int] = []
        self.uploaded: set[int] = set()
        self.trace: list[tuple[Any, ...]] = []
        self.functions: list[str] = []
        self.shared: list[int] = []
        self.calls: Counter[str] = Counter()
        self.contexts = 0  # retained
        self._current, self._lock = threading.local(), threading.RLock()
        self._numbers = itertools.count(1 << 20)

    @property
    def everything(self) -> dict[str, int]:
        """What was not given back."""
        counts = {"device": len(self.blocks), "host": len(self.host), "contexts": self.contexts, **self.live}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def allocations(self) -> int:
        """Calls so far that took memory."""
        return sum(self.calls[name] for name in ALLOCATING)

    @staticmethod
    def CUgraphEdgeData() -> SimpleNamespace:  # noqa: N802 - the driver's name
        return SimpleNamespace(from_port=0, type=0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            with self._lock:
                return self._call(name, arguments)

        return call

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls[name] += 1
        if name in self.failing:
            return (Code(self.failing[name]),)
        if self.sticky and not name.startswith(_ANYWHERE):
            return (Code(self.sticky),)
        if not name.startswith(_ANYWHERE) and not getattr(self._current, "stack", None):
            return (Code(201),)
        result = getattr(self, f"do_{name}", lambda *_: None)(*arguments)
        return (Code(0),) if result is None else (Code(0), *(result if isinstance(result, tuple) else (result,)))

    def _make(self, kind: str) -> int:
        number = next(self._numbers)
        self.live[kind] += 1
        self.things[number] = kind
        return number

    def _drop(self, kind: str, number: int) -> None:
        assert self.things.pop(number, None) == kind, f"{number} is no {kind}"
        self.live[kind] -= 1

    def do_cuDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def do_cuDriverGetVersion(self) -> int:  # noqa: N802
        return self.version

    def do_cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        assert 0 <= ordinal < self.gpus
        self.opened.append(ordinal)
        return 7

    def do_cuDeviceGetName(self, size: int, device: int) -> bytes:  # noqa: N802
        return b"Fake GPU\0\0"

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> int:  # noqa: N802
        return self.capability[attribute]

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> int:  # noqa: N802
        self.contexts += 1
        return 1

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> None:  # noqa: N802
        self.contexts -= 1
        assert self.contexts >= 0

    def do_cuCtxSetCurrent(self, context: int) -> None:  # noqa: N802
        self._current.stack = [context]

    def do_cuCtxPushCurrent(self, context: int) -> None:  # noqa: N802
        self._current.stack = [*getattr(self._current, "stack", []), context]

    def do_cuCtxPopCurrent(self) -> int:  # noqa: N802
        return self._current.stack.pop()

    def do_cuStreamCreate(self, flags: int) -> int:  # noqa: N802
        return self._make("stream")

    def do_cuStreamDestroy(self, stream: int) -> None:  # noqa: N802
        self._drop("stream", stream)

    def do_cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        assert self.things[stream] == "stream"

    def do_cuEventCreate(self, flags: int) -> int:  # noqa: N802
        return self._make("event")

    def do_cuEventDestroy(self, event: int) -> None:  # noqa: N802
        self._drop("event", event)

    def do_cuEventElapsedTime(self, begin: int, end: int) -> float:  # noqa: N802
        return 1.0

    def do_cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self.free, 1 << 40

    def do_cuMemAlloc(self, size: int) -> int:  # noqa: N802
        return self._allocate(self.blocks, size)

    def do_cuMemHostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        return self._allocate(self.host, size)

    @staticmethod
    def _allocate(where: dict[int, Any], size: int) -> int:
        assert size > 0, "the driver refuses 0 bytes"
        block = (ctypes.c_uint8 * size)()
        ctypes.memset(block, 0xA5, size)
        where[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def do_cuMemFree(self, address: int) -> None:  # noqa: N802
        del self.blocks[address]

    def do_cuMemFreeHost(self, address: int) -> None:  # noqa: N802
        del self.host[address]

    def do_cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        assert self._holds(self.blocks, address, size)
        ctypes.memset(address, value, size)

    def do_cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        assert self._holds(self.blocks, to, size) and self._holds(self.host, source, size)
        ctypes.memmove(to, source, size)
        self.trace.append(("up", to, size))

    def do_cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        assert self._holds(self.blocks, source, size)
        ctypes.memmove(to, source, size)
        self.trace.append(("down", source, size))

    @staticmethod
    def _holds(where: dict[int, Any], address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + len(block) for begin, block in [*where.items()])

    def do_cuModuleLoadData(self, data: bytes) -> int:  # noqa: N802
        assert data[:4] == b"\x7fELF"
        module = self._make("module")
        self.images[module] = data
        return module

    def do_cuModuleUnload(self, module: int) -> None:  # noqa: N802
        self._drop("module", module)

    def do_cuModuleGetFunction(self, module: int, name: bytes) -> str:  # noqa: N802
        assert name in self.images[module]
        self.functions.append(name.decode())
        return name.decode()

    def do_cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> None:  # noqa: N802
        self.shared.append(value)

    def do_cuGraphCreate(self, flags: int) -> int:  # noqa: N802
        graph = self._make("graph")
        self.graphs[graph] = []
        return graph

    def do_cuGraphDestroy(self, graph: int) -> None:  # noqa: N802
        self._drop("graph", graph)

    def do_cuGraphAddKernelNode(self, graph: int, before: None, count: int, params: SimpleNamespace) -> int:  # noqa: N802
        assert params.kernelParams and params.gridDimX * params.gridDimY * params.gridDimZ > 0
        count, maps = self.arity.get(params.func, 0), self.map_count.get(params.func, 0)
        places = (ctypes.c_uint64 * (count + maps)).from_address(params.kernelParams)
        params.arguments = [ctypes.c_uint64.from_address(place).value for place in places[:count]]
        params.maps = [list((ctypes.c_uint64 * 16).from_address(place)) for place in places[count:]]
        self.graphs[graph].append(params)
        return len(self.graphs[graph]) - 1

    def do_cuTensorMapEncodeTiled(  # noqa: N802
        self, kind: int, rank: int, address: int, sizes: list, strides: list, box: list, steps: list, *modes: int
    ) -> SimpleNamespace:
        """A map as 16 words: what the driver was told. The whole matrix must lie in memory."""
        (width, rows, blocks), (pitch, step) = sizes, strides
        assert rank == 3 and steps == [1] * 3 and modes == (0, 3, 3, 0) and address % 16 == pitch % 16 == step % 16 == 0
        assert width == box[0] and box[0] * 2 == step == 128 and box[1] <= 256 and pitch == step * blocks
        assert self._holds(self.blocks, address, pitch * rows)
        words = (ctypes.c_uint64 * 16)(kind, address, rows, width * blocks, *box)
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(words))

    def do_cuGraphAddDependencies(self, graph: int, before: list, after: list, edges: list, count: int) -> None:  # noqa: N802
        assert after[0] == before[0] + 1, "a chain"
        self.edges.append((edges[0].from_port, edges[0].type))

    def do_cuGraphInstantiate(self, graph: int, flags: int) -> int:  # noqa: N802
        executable = self._make("executable")
        self.graphs[executable] = self.graphs[graph]
        return executable

    def do_cuGraphUpload(self, executable: int, stream: int) -> None:  # noqa: N802
        assert self.things[executable] == "executable" and self.things[stream] == "stream"
        self.uploaded.add(executable)

    def do_cuGraphExecDestroy(self, executable: int) -> None:  # noqa: N802
        self._drop("executable", executable)

    def do_cuGraphLaunch(self, executable: int, stream: int) -> None:  # noqa: N802
        assert self.things[executable] == "executable" and self.things[stream] == "stream"
        self.launched.append(executable)
        self.trace.append(("launch", *(node.func for node in self.graphs[executable])))
        for node in self.graphs[executable]:
            self.kernel(node.func, node.arguments)
            self.sticky = self.sticky or self.faults.get(node.func, 0)

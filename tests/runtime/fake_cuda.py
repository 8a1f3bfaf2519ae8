"""A CUDA driver without a GPU: memory is the host's, graphs are recorded, kernels are what a test makes of them.

It takes the place of `aotc.runtime.devices.driver.Driver` and is stricter than the real one: what ctypes would not pass on,
what is released twice or never made, a call in a thread without a context, and a copy beyond its block fail the test.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aotc.runtime.devices import driver as api

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


class FakeDriver:
    """What `aotc.runtime.devices` calls.

    `failing` names functions that fail from now on, with their code; `faults` kernels whose launch breaks the context
    with a code, which then every call gives. `kernel(symbol, arguments)` is called for each launched kernel, in order;
    `arity` says how many arguments a kernel has. `trace` has copies and launches in order.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0), gpus: int = 1, version: int = 13000, free: int = 1 << 34) -> None:
        self.capability, self.gpus, self.version, self.free = capability, gpus, version, free
        self.multiprocessors = 132
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
        self.symbols: dict[int, str] = {}  # of kernels' handles
        self.nodes: list[SimpleNamespace] = []
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

    def __getattr__(self, name: str) -> Any:
        if name not in api.FUNCTIONS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            _, _, types = api.FUNCTIONS[name]
            for kind, argument in zip(types, arguments, strict=True):
                kind.from_param(argument)
            with self._lock:
                return self._call(name, arguments)

        return call

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls[name] += 1
        code = self.failing.get(name, 0)
        if not code and not name.startswith(_ANYWHERE):
            code = self.sticky or (0 if getattr(self._current, "stack", None) else 201)
        if code:
            raise api.failure(name, code, CODES[code])
        return getattr(self, f"do_{name}", lambda *_: 0)(*arguments)

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

    def do_cuDeviceGetName(self, name: Any, size: int, device: int) -> None:  # noqa: N802
        assert size == len(name)
        name.value = b"Fake GPU"

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> int:  # noqa: N802
        if attribute == api.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            return self.multiprocessors
        kinds = api.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, api.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        return dict(zip(kinds, self.capability, strict=True))[attribute]

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> int:  # noqa: N802
        self.contexts += 1
        return 1

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> None:  # noqa: N802
        self.contexts -= 1
        assert self.contexts >= 0

    def do_cuCtxSynchronize(self) -> None:  # noqa: N802
        self._current.stack[-1]

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

    def do_cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        assert self.things[event] == "event" and self.things[stream] == "stream"

    def do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        assert self.things[event] == "event" and self.things[stream] == "stream"

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

    def do_cuModuleGetFunction(self, module: int, name: bytes) -> int:  # noqa: N802
        assert name in self.images[module]
        self.functions.append(name.decode())
        handle = next(self._numbers)
        self.symbols[handle] = name.decode()
        return handle

    def do_cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        assert function in self.symbols and attribute == 8
        self.shared.append(value)

    def do_cuGraphCreate(self, flags: int) -> int:  # noqa: N802
        graph = self._make("graph")
        self.graphs[graph] = []
        return graph

    def do_cuGraphDestroy(self, graph: int) -> None:  # noqa: N802
        self._drop("graph", graph)

    def do_cuGraphAddKernelNode(self, graph: int, before: None, count: int, params: api.KernelNodeParams) -> int:  # noqa: N802
        """A node is what the structure says at this moment, with the kernel's symbol for its handle."""
        assert params.kernelParams and params.gridDimX * params.gridDimY * params.gridDimZ > 0
        assert (params.extra, params.kern, params.ctx) == (None, None, None)
        node = SimpleNamespace(**{name: getattr(params, name) for name, _ in params._fields_})
        node.func = self.symbols[params.func]
        count, maps = self.arity.get(node.func, 0), self.map_count.get(node.func, 0)
        places = (ctypes.c_uint64 * (count + maps)).from_address(params.kernelParams)
        assert not any(place % 64 for place in places[count:])
        node.arguments = [ctypes.c_uint64.from_address(place).value for place in places[:count]]
        node.maps = [list((ctypes.c_uint64 * 16).from_address(place)) for place in places[count:]]
        self.graphs[graph].append(node)
        self.nodes.append(node)
        return len(self.nodes)

    def do_cuTensorMapEncodeTiled(  # noqa: N802
        self, place: int, kind: int, rank: int, address: int, sizes: Any, strides: Any, box: Any, steps: Any, *modes: int
    ) -> None:
        """A map as 16 words: what the driver was told. The whole matrix must lie in memory."""
        (width, rows, blocks), (pitch, step) = sizes, strides
        assert rank == 3 and [*steps] == [1] * 3 and modes == (0, 3, 3, 0) and address % 16 == pitch % 16 == step % 16 == 0
        assert width == box[0] and box[0] * 2 == step == 128 and box[1] <= 256 and pitch == step * blocks
        assert self._holds(self.blocks, address, pitch * rows) and place % 64 == 0
        (ctypes.c_uint64 * 16).from_address(place)[:7] = (kind, address, rows, width * blocks, *box)

    def do_cuGraphAddDependencies(self, graph: int, before: Any, after: Any, edges: Any, count: int) -> None:  # noqa: N802
        chain = [self.nodes[number - 1] for number in (*before[:count], after[count - 1])]
        assert [*before[1:count]] == [*after[: count - 1]] and all(a is b for a, b in zip(chain, self.graphs[graph], strict=True))
        assert not any(e.to_port or any(e.reserved) for e in edges)
        self.edges += [(e.from_port, e.type) for e in edges]

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

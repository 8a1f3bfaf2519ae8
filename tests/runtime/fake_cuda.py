"""A CUDA driver without a GPU: memory is the host's, graphs are recorded, kernels do not run."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any


class Code(int):
    """A CUresult."""

    name = "CUDA_ERROR_FAKE"


class FakeDriver:
    """What `aotc.runtime.devices.cuda` calls. `failing` names a function that fails from now on."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self, capability: tuple[int, int] = (9, 0), gpus: int = 1, version: int = 13000, free: int = 1 << 34) -> None:
        self.capability, self.gpus, self.version, self.free = capability, gpus, version, free
        self.failing = ""
        self.blocks: dict[int, Any] = {}
        self.graphs: list[list[SimpleNamespace]] = []
        self.edges: list[tuple[int, int]] = []  # (from_port, type)
        self.launched: list[int] = []
        self.functions: list[str] = []
        self.shared: list[int] = []

    @staticmethod
    def CUgraphEdgeData() -> SimpleNamespace:  # noqa: N802 - the driver's name
        return SimpleNamespace(from_port=0, type=0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == self.failing:
                return (Code(700),)
            result = getattr(self, f"do_{name}", lambda *_: None)(*arguments)
            return (Code(0),) if result is None else (Code(0), *(result if isinstance(result, tuple) else (result,)))

        return call

    def do_cuDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def do_cuDriverGetVersion(self) -> int:  # noqa: N802
        return self.version

    def do_cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        return 7

    def do_cuDeviceGetName(self, size: int, device: int) -> bytes:  # noqa: N802
        return b"Fake GPU\0\0"

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> int:  # noqa: N802
        return self.capability[attribute]

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> int:  # noqa: N802
        return 1

    def do_cuStreamCreate(self, flags: int) -> int:  # noqa: N802
        return 2

    def do_cuEventCreate(self, flags: int) -> int:  # noqa: N802
        return 3

    def do_cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self.free, 1 << 40

    def do_cuMemAlloc(self, size: int) -> int:  # noqa: N802
        block = (ctypes.c_uint8 * size)(*b"\xa5" * min(size, 64))
        address = ctypes.addressof(block)
        self.blocks[address] = block
        return address

    def do_cuMemHostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        return self.do_cuMemAlloc(size)

    def do_cuMemFreeHost(self, address: int) -> None:  # noqa: N802
        del self.blocks[address]

    def do_cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memset(address, value, size)

    def do_cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def do_cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def do_cuModuleLoadData(self, data: bytes) -> bytes:  # noqa: N802
        assert data[:4] == b"\x7fELF"
        return data

    def do_cuModuleGetFunction(self, module: bytes, name: bytes) -> str:  # noqa: N802
        assert name in module
        self.functions.append(name.decode())
        return name.decode()

    def do_cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> None:  # noqa: N802
        self.shared.append(value)

    def do_cuGraphCreate(self, flags: int) -> int:  # noqa: N802
        self.graphs.append([])
        return len(self.graphs) - 1

    def do_cuGraphAddKernelNode(self, graph: int, before: None, count: int, params: SimpleNamespace) -> int:  # noqa: N802
        assert params.kernelParams and params.gridDimX * params.gridDimY * params.gridDimZ > 0
        self.graphs[graph].append(params)
        return len(self.graphs[graph]) - 1

    def do_cuGraphAddDependencies(self, graph: int, before: list, after: list, edges: list, count: int) -> None:  # noqa: N802
        assert after[0] == before[0] + 1, "a chain"
        self.edges.append((edges[0].from_port, edges[0].type))

    def do_cuGraphInstantiate(self, graph: int, flags: int) -> int:  # noqa: N802
        return graph

    def do_cuGraphLaunch(self, graph: int, stream: int) -> None:  # noqa: N802
        self.launched.append(graph)

"""Programs on an NVIDIA GPU: kernels from cubins, graphs built node by node from a plan, branches between them.

A cubin is loaded as it lies in the artifact, and its kernels take pointers alone (see `aotc.codegen.cuda.launch`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.artifact.plan import Address, Call, If, Instruction, Plan
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, DeviceError
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.turns import turns_of

_STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking


class CudaKernels:
    """Kernels of one target of an artifact, each loaded when a program first names it. Thread-safe."""

    def __init__(self, device: CudaDevice, artifact: Artifact) -> None:
        self._device, self._artifact = device, artifact
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.seconds = 0.0  # that the driver took to load them

    def function(self, symbol: str, meta: Mapping[str, Any]) -> Any:
        """The kernel's handle. Its cubin's hash is checked first."""
        with self._lock:
            if symbol not in self._functions:
                self._functions[symbol] = self._load(symbol, meta)
            return self._functions[symbol]

    def _load(self, symbol: str, meta: Mapping[str, Any]) -> Any:
        device, code, begin = self._device, self._artifact.read(meta["cubin"]), time.perf_counter()
        try:
            module = device.call("cuModuleLoadData", code)
            device.hold("cuModuleUnload", module)
            function = device.call("cuModuleGetFunction", module, symbol.encode())
        except DeviceError as error:
            raise DeviceError(f"kernel {symbol} does not load: {error}; is the driver too old?") from None
        if meta["shared"] > _STATIC_SHARED:
            kind = device.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device.call("cuFuncSetAttribute", function, kind, meta["shared"])
        self.seconds += time.perf_counter() - begin
        return function


@dataclass(frozen=True)
class _Graph:
    executable: Any
    kernels: str  # for messages


@dataclass(frozen=True)
class _Branch:
    condition: int
    then: list[_Graph | _Branch]
    orelse: list[_Graph | _Branch]


class CudaProgram:
    """A plan as graphs on bound memory. Running it launches one graph, and one more around each branch; with
    AOTC_SYNC=1, a graph a kernel, each waited for."""

    def __init__(
        self, plan: Plan, device: CudaDevice, kernels: CudaKernels, bases: Mapping[str, int],
        weight: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`bases` has the address of each space but the weights', by its kind (arena, state, dims, counters) or by
        its name (inputs, outputs); `weight` gives the address of what lies at an offset of weights.bin."""
        self.plan, self._device, self._kernels, self._weight = plan, device, kernels, weight
        bases = {**bases, "weights": 0}
        self._bases = [bases[s.name if s.kind in ("input", "output") else s.kind] for s in plan.spaces]
        self._condition = device.pinned(1) if any(isinstance(i, If) for i in plan.body) else None
        self._steps = self._build(plan.body)
        self._turns = turns_of(device) if any(k.meta.get("together") for k in plan.kernels) else None

    @property
    def kernel_count(self) -> int:
        """Kernels of a run, both bodies of branches included."""
        return len(list(self.plan.calls()))

    def kernel_times(self, repeat: int = 20) -> list[tuple[str, float]]:
        """(kernel, milliseconds) of each call in order: the mean of all calls of its kernel, launched one after the other
        without the rest, so that each reads its own weights; `repeat` launches at least. For profiles: results are those
        of kernels that ran more than once, on whatever there was."""
        device = self._device
        own: dict[str, list[Call]] = {}
        for call in self.plan.calls():
            own.setdefault(self._symbol(call), []).append(call)
        begin, end = (device.call("cuEventCreate", 0) for _ in range(2))
        times = {}
        for symbol, calls in own.items():
            chain = calls * -(-repeat // len(calls))
            graph = _Graph(self._instantiate(chain), symbol)
            for _ in range(2):
                device.call("cuEventRecord", begin, device.stream)
                device.call("cuGraphLaunch", graph.executable, device.stream)
                device.call("cuEventRecord", end, device.stream)
                self._wait_for(graph)
            times[symbol] = device.call("cuEventElapsedTime", begin, end) / len(chain)
            device.call("cuGraphExecDestroy", graph.executable)
        for event in (begin, end):
            device.call("cuEventDestroy", event)
        return [(self._symbol(call), times[self._symbol(call)]) for call in self.plan.calls()]

    def launch(self) -> None:
        """Starts the program in the device's stream. Inputs and dims must be there before, in stream order."""
        if self._turns is None:
            self._run(self._steps)
        else:
            self._turns.run(self._device, lambda: self._run(self._steps))

    def _run(self, steps: list[_Graph | _Branch]) -> None:
        device = self._device
        for step in steps:
            if isinstance(step, _Graph):
                device.call("cuGraphLaunch", step.executable, device.stream)
                if device.synchronous:
                    self._wait_for(step)
                continue
            assert self._condition is not None
            device.download(self._condition, step.condition)
            device.synchronize()
            self._run(step.then if self._condition[0] else step.orelse)

    def _wait_for(self, graph: _Graph) -> None:
        try:
            self._device.synchronize()
        except DeviceError as error:
            raise DeviceError(f"kernel {graph.kernels}: {error}") from None

    def _build(self, body: tuple[Instruction, ...]) -> list[_Graph | _Branch]:
        steps: list[_Graph | _Branch] = []
        calls: list[Call] = []
        for item in (*body, None):
            if calls and (self._device.synchronous or not isinstance(item, Call)):
                graph = self._device.hold("cuGraphExecDestroy", self._instantiate(calls))
                self._device.call("cuGraphUpload", graph, self._device.stream)  # else the first launch takes memory
                steps.append(_Graph(graph, self._symbol(calls[-1])))
                calls = []
            if isinstance(item, Call):
                calls.append(item)
            elif item is not None:
                steps.append(_Branch(self._argument(item.condition), self._build(item.then), self._build(item.orelse)))
        return steps

    def _symbol(self, call: Call) -> str:
        return self.plan.kernels[call.kernel].symbol

    def _instantiate(self, calls: list[Call]) -> Any:
        """A chain of kernel nodes. Kernels that wait for the one before themselves get a programmatic edge."""
        device = self._device
        graph = device.call("cuGraphCreate", 0)
        try:
            before = None
            for call in calls:
                meta = self.plan.kernels[call.kernel].meta
                node = device.call("cuGraphAddKernelNode", graph, None, 0, self._node(call))
                if before is not None:
                    device.call("cuGraphAddDependencies", graph, [before], [node], [self._edge(meta)], 1)
                before = node
            return device.call("cuGraphInstantiate", graph, 0)
        finally:
            device.call("cuGraphDestroy", graph)

    def _edge(self, meta: Mapping[str, Any]) -> Any:
        edge = self._device.driver.CUgraphEdgeData()
        if meta.get("waits"):
            edge.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            edge.type = self._device.driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        return edge

    def _node(self, call: Call) -> Any:
        kernel = self.plan.kernels[call.kernel]
        meta = kernel.meta
        params = self._device.driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._kernels.function(kernel.symbol, meta)
        params.gridDimX, params.gridDimY, params.gridDimZ = meta["grid"]
        if meta.get("together"):  # they take what there is to do by turns, and a multiprocessor has room for one
            params.gridDimX = min(params.gridDimX, self._device.multiprocessors)
        params.blockDimX, params.blockDimY, params.blockDimZ = 32 * meta["num_warps"], 1, 1
        params.sharedMemBytes = meta["shared"]
        values = np.array([self._argument(a) for a in call.args], np.uint64)
        maps = [self._tensor_map(m, int(values[m["argument"]])) for m in meta.get("maps", ())]
        places = [values.ctypes.data + 8 * n for n in range(len(values))] + [int(m.getPtr()) for m in maps]
        # The driver copies the arguments while it adds the node: these need not outlive that call.
        self._arguments = values, maps, np.array(places, np.uint64)
        params.kernelParams = self._arguments[-1].ctypes.data
        return params

    def _tensor_map(self, meta: Mapping[str, Any], address: int) -> Any:
        """What `aotc.codegen.cuda.frame.TensorMap` says of an argument, as the driver encodes it."""
        driver = self._device.driver
        kind = driver.CUtensorMapDataType
        element = {"bf16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}
        wide, narrow = driver.cuuint64_t, driver.cuuint32_t
        rows, columns, pitch = meta["rows"], meta["columns"], 2 * meta["columns"]
        return self._device.call(
            "cuTensorMapEncodeTiled", element[meta["dtype"]], 3, address, [wide(64), wide(rows), wide(columns // 64)],
            [wide(pitch), wide(128)], [narrow(64), narrow(meta["box_rows"]), narrow(meta["box_blocks"])], [narrow(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip

    def _argument(self, argument: Any) -> int:
        if isinstance(argument, Address):
            if self.plan.spaces[argument.space].kind == "weights":
                return self._weight(argument.offset)
            return self._bases[argument.space] + argument.offset
        if hasattr(argument, "value"):
            return argument.value
        raise ArtifactError(f"the plan of {self.plan.program} passes a dim by value to a kernel of a GPU")

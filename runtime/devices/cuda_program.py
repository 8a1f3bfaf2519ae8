"""Programs on an NVIDIA GPU: kernels from cubins, graphs built node by node from a plan, branches between them.

A cubin is loaded as it lies in the artifact, and its kernels take pointers alone (see `aotc.codegen.cuda.launch`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aotc.artifact.plan import Address, Call, If, Instruction, Plan
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, DeviceError
from aotc.runtime.devices import driver as api
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_node import KernelNode, tiled
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
            device.call("cuFuncSetAttribute", function, api.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, meta["shared"])
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
        self._weights = [s.kind == "weights" for s in plan.spaces]
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
        begin, end = (device.call("cuEventCreate", api.CU_EVENT_DEFAULT) for _ in range(2))
        times = {}
        for symbol, calls in own.items():
            chain = calls * -(-repeat // len(calls))
            graph = _Graph(self._instantiate(chain), symbol)
            for _ in range(2):
                device.call("cuEventRecord", begin, device.stream)
                self._in_turn(lambda graph=graph: device.call("cuGraphLaunch", graph.executable, device.stream))
                device.call("cuEventRecord", end, device.stream)
                self._wait_for(graph)
            times[symbol] = device.call("cuEventElapsedTime", begin, end) / len(chain)
            device.call("cuGraphExecDestroy", graph.executable)
        for event in (begin, end):
            device.call("cuEventDestroy", event)
        return [(self._symbol(call), times[self._symbol(call)]) for call in self.plan.calls()]

    def launch(self) -> None:
        """Starts the program in the device's stream. Inputs and dims must be there before, in stream order."""
        self._in_turn(lambda: self._run(self._steps))

    def _in_turn(self, launch: Callable[[], None]) -> None:
        if self._turns is None:
            launch()
        else:
            self._turns.run(self._device, launch)

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
        device, metas = self._device, [self.plan.kernels[call.kernel].meta for call in calls]
        node = KernelNode(max(len(call.args) for call in calls), max(len(meta.get("maps", ())) for meta in metas))
        nodes = (ctypes.c_void_p * len(calls))()
        graph = device.call("cuGraphCreate", 0)
        try:
            for n, call in enumerate(calls):
                self._fill(node, call)
                nodes[n] = device.call("cuGraphAddKernelNode", graph, None, 0, node.params)
            if len(calls) > 1:
                followers = (ctypes.c_void_p * (len(calls) - 1))(*nodes[1:])
                edges = (api.GraphEdgeData * len(followers))()
                for edge, meta in zip(edges, metas[1:], strict=True):
                    if meta.get("waits"):
                        edge.from_port = api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
                        edge.type = api.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
                device.call("cuGraphAddDependencies", graph, nodes, followers, edges, len(followers))
            return device.call("cuGraphInstantiate", graph, 0)
        finally:
            device.call("cuGraphDestroy", graph)

    def _fill(self, node: KernelNode, call: Call) -> None:
        kernel = self.plan.kernels[call.kernel]
        meta = kernel.meta
        grid = meta["grid"]
        if meta.get("together"):  # blocks take what there is to do by turns, and a multiprocessor has room for one
            grid = (min(grid[0], self._device.multiprocessors), *grid[1:])
        node.kernel(self._kernels.function(kernel.symbol, meta), grid, 32 * meta["num_warps"], meta["shared"])
        addresses = [self._argument(a) for a in call.args]
        node.arguments(addresses)
        for n, each in enumerate(meta.get("maps", ())):
            tensor_map = node.tensor_map(len(addresses), n)
            self._device.call("cuTensorMapEncodeTiled", tensor_map, *tiled(each, addresses[each["argument"]]))

    def _argument(self, argument: Any) -> int:
        if isinstance(argument, Address):
            if self._weights[argument.space]:
                return self._weight(argument.offset)
            return self._bases[argument.space] + argument.offset
        if hasattr(argument, "value"):
            return argument.value
        raise ArtifactError(f"the plan of {self.plan.program} passes a dim by value to a kernel of a GPU")

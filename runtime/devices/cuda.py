"""NVIDIA GPUs through the driver's API: memory, kernels from cubins, and graphs built node by node from a plan.

Neither torch nor Triton is needed: a cubin is loaded as it lies in the artifact, and its kernels take pointers alone
(see `aotc.codegen.cuda.launch`). CUDA Driver API: https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.artifact.manifest import TargetEntry
from aotc.artifact.plan import Address, Call, If, Instruction, Plan
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, DeviceError

MIN_DRIVER = 12000  # as cuDriverGetVersion counts: 12.0
_STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking


class CudaDevice:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves. Its primary context is current in the thread that makes this.

    Raises DeviceError where there is no driver, no GPU, or a driver that is too old.
    """

    def __init__(self) -> None:
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise DeviceError("running on a GPU needs cuda-bindings: pip install 'aotc[cuda]'") from None
        self.driver: Any = driver
        try:
            code = driver.cuInit(0)[0]
        except RuntimeError:
            raise DeviceError("there is no NVIDIA driver here (libcuda.so.1 does not load)") from None
        if int(code) == 100 or (not int(code) and not self.call("cuDeviceGetCount")):
            raise DeviceError("the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
        self._check(code, "cuInit")
        version = self.call("cuDriverGetVersion")
        if version < MIN_DRIVER:
            here, least = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_DRIVER))
            raise DeviceError(f"the NVIDIA driver is for CUDA {here}: at least {least} is needed")
        self.device = self.call("cuDeviceGet", 0)
        self.name = self.call("cuDeviceGetName", 128, self.device).split(b"\0")[0].decode()
        kind = driver.CUdevice_attribute
        self.capability = tuple(
            self.call("cuDeviceGetAttribute", a, self.device)
            for a in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )  # fmt: skip
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.make_current()
        self.stream = self.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver; its result, or a tuple of several. Raises DeviceError where it fails."""
        code, *results = getattr(self.driver, name)(*arguments)
        if code:
            self._check(code, name)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, code: Any, name: str) -> None:
        if int(code):
            raise DeviceError(f"the GPU reports {code.name} in {name}")

    def make_current(self) -> None:
        """Makes this device's context the one of the calling thread."""
        self.call("cuCtxSetCurrent", self.context)

    def synchronize(self) -> None:
        """Waits for everything in the stream."""
        self.call("cuStreamSynchronize", self.stream)

    def target_of(self, artifact: Artifact) -> TargetEntry:
        """The artifact's target for this GPU: its own architecture, else an older one of the same major version.

        Raises ArtifactError listing what is inside.
        """
        major, minor = self.capability
        here = f"sm{major}{minor}"
        inside = {t.name: t for t in artifact.manifest.targets if t.device == "cuda"}
        fit = [n for n in inside if n == here or (major == 8 and n.startswith("sm8") and int(n[2:]) <= 80 + minor)]
        if not fit:
            names = ", ".join(t.name for t in artifact.manifest.targets)
            raise ArtifactError(
                f"{artifact.path} was compiled for {names}; this GPU is {here} ({self.name}): "
                f"compile the model again with --arch {here}"
            )
        return inside[max(fit)]

    def free_bytes(self) -> int:
        """Device memory that is free now."""
        return self.call("cuMemGetInfo")[0]

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory; its address."""
        address = int(self.call("cuMemAlloc", max(nbytes, 256)))
        self.call("cuMemsetD8Async", address, 0, max(nbytes, 256), self.stream)
        return address

    def pinned(self, nbytes: int) -> np.ndarray:
        """Zeroed memory of the host that the GPU reads and writes under the same address, as bytes."""
        address = int(self.call("cuMemHostAlloc", max(nbytes, 1), 3))  # PORTABLE | DEVICEMAP
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        array[:] = 0
        return array

    def upload(self, address: int, data: np.ndarray, stream: Any = None) -> None:
        """Copies contiguous host memory to the device, in stream order."""
        self.call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, stream or self.stream)

    def download(self, data: np.ndarray, address: int) -> None:
        """Copies device memory into contiguous host memory, in stream order."""
        self.call("cuMemcpyDtoHAsync", data.ctypes.data, address, data.nbytes, self.stream)


class CudaKernels:
    """Kernels of one target of an artifact, each loaded when a program first names it."""

    def __init__(self, device: CudaDevice, artifact: Artifact) -> None:
        self._device, self._artifact = device, artifact
        self._functions: dict[str, Any] = {}

    def function(self, symbol: str, meta: Mapping[str, Any]) -> Any:
        """The kernel's handle. Its cubin's hash is checked first."""
        if symbol not in self._functions:
            device = self._device
            try:
                module = device.call("cuModuleLoadData", self._artifact.read(meta["cubin"]))
                function = device.call("cuModuleGetFunction", module, symbol.encode())
            except DeviceError as error:
                raise DeviceError(f"kernel {symbol} does not load: {error}; is the driver too old?") from None
            if meta["shared"] > _STATIC_SHARED:
                kind = device.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                device.call("cuFuncSetAttribute", function, kind, meta["shared"])
            self._functions[symbol] = function
        return self._functions[symbol]


class CudaProgram:
    """A plan as graphs on bound memory. Running it launches one graph, and one more around each branch."""

    def __init__(self, plan: Plan, device: CudaDevice, kernels: CudaKernels, bases: Mapping[str, int]) -> None:
        """`bases` has the address of each space, by its kind (arena, weights, state, dims) or by its name."""
        self.plan, self._device, self._kernels = plan, device, kernels
        self._bases = [bases[s.name if s.kind in ("input", "output") else s.kind] for s in plan.spaces]
        self._condition = device.pinned(1) if any(isinstance(i, If) for i in plan.body) else None
        self._steps = self._build(plan.body)

    @property
    def kernel_count(self) -> int:
        """Kernels of a run, both bodies of branches included."""
        return len(list(self.plan.calls()))

    def kernel_times(self, repeat: int = 20) -> list[tuple[str, float]]:
        """(kernel, milliseconds) of each call in order, each launched alone and `repeat` times. For profiles:
        results are those of kernels that ran more than once."""
        device = self._device
        begin, end = (device.call("cuEventCreate", 0) for _ in range(2))
        times = []
        for call in self.plan.calls():
            graph = self._graph([call] * repeat)
            for _ in range(2):
                device.call("cuEventRecord", begin, device.stream)
                device.call("cuGraphLaunch", graph, device.stream)
                device.call("cuEventRecord", end, device.stream)
                device.synchronize()
            times.append((self.plan.kernels[call.kernel].symbol, device.call("cuEventElapsedTime", begin, end) / repeat))
            device.call("cuGraphExecDestroy", graph)
        return times

    def launch(self) -> None:
        """Starts the program in the device's stream. Inputs and dims must be there before, in stream order."""
        self._run(self._steps)

    def _run(self, steps: list[Any]) -> None:
        device = self._device
        for step in steps:
            if not isinstance(step, tuple):
                device.call("cuGraphLaunch", step, device.stream)
                continue
            condition, then, orelse = step
            assert self._condition is not None
            device.download(self._condition, condition)
            device.synchronize()
            self._run(then if self._condition[0] else orelse)

    def _build(self, body: tuple[Instruction, ...]) -> list[Any]:
        """Executable graphs, and (address of the condition, then, else) for branches."""
        steps, calls = [], []
        for item in (*body, None):
            if isinstance(item, Call):
                calls.append(item)
                continue
            if calls:
                steps.append(self._graph(calls))
                calls = []
            if item is not None:
                condition = self._bases[item.condition.space] + item.condition.offset
                steps.append((condition, self._build(item.then), self._build(item.orelse)))
        return steps

    def _graph(self, calls: list[Call]) -> Any:
        """A chain of kernel nodes. Kernels that wait for the one before themselves get a programmatic edge."""
        device = self._device
        graph = device.call("cuGraphCreate", 0)
        before = None
        for call in calls:
            meta = self.plan.kernels[call.kernel].meta
            node = device.call("cuGraphAddKernelNode", graph, None, 0, self._node(call))
            if before is not None:
                device.call("cuGraphAddDependencies", graph, [before], [node], [self._edge(meta)], 1)
            before = node
        executable = device.call("cuGraphInstantiate", graph, 0)
        device.call("cuGraphDestroy", graph)
        return executable

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
        params.blockDimX, params.blockDimY, params.blockDimZ = 32 * meta["num_warps"], 1, 1
        params.sharedMemBytes = meta["shared"]
        values = np.array([self._argument(a) for a in call.args], np.uint64)
        # The driver copies the arguments while it adds the node: these arrays need not outlive that call.
        self._values, self._places = values, values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        params.kernelParams = self._places.ctypes.data
        return params

    def _argument(self, argument: Any) -> int:
        if isinstance(argument, Address):
            return self._bases[argument.space] + argument.offset
        if hasattr(argument, "value"):
            return argument.value
        raise ArtifactError(f"the plan of {self.plan.program} passes a dim by value to a kernel of a GPU")

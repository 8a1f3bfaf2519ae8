"""A tensor model in this process: named numpy arrays in, named arrays out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aotc.artifact.manifest import TargetEntry
from aotc.artifact.plan import Plan, SizeExpr, Tensor, evaluate
from aotc.artifact.reader import Artifact
from aotc.errors import RequestError
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, allocate
from aotc.runtime.devices.opening import choose_device
from aotc.runtime.memory import CLOSED, Memory, weight_bytes

if TYPE_CHECKING:
    from aotc.runtime.devices.opening import Opening

DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64, "i32": np.int32,
    "i16": np.int16, "i8": np.int8, "u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8,
    "bool": np.bool_,
}  # fmt: skip
"""numpy types of elements; bf16 has none of numpy's own and travels as its bits."""


class TensorProgram(Protocol):
    """A tensor model's program on one device."""

    plan: Plan
    memory: Memory

    def run(self, given: dict[str, np.ndarray], dims: dict[str, int], results: dict[str, np.ndarray]) -> None:
        """Fills `results`. Arrays are contiguous and of the shapes that the dims give."""
        ...

    def close(self) -> None: ...


class CpuTensorProgram:
    """On the CPU: kernels read and write the caller's arrays where they lie."""

    def __init__(self, artifact: Artifact, target: TargetEntry) -> None:
        (entry,) = target.programs
        self.plan = artifact.plan(entry.plan)
        library = CpuLibrary(artifact.file(target.library), target.scratch_bytes)
        self._weights, self._arena = artifact.map_weights(target=target), allocate(target.arena_bytes)
        self._program = CpuProgram(self.plan, library)
        self._program.bind("arena", "arena", self._arena.ctypes.data)
        self._program.bind("weights", "weights", self._weights.ctypes.data)
        self.memory = Memory(weight_bytes(artifact.manifest, target), self._arena.nbytes, 0, library.scratch.nbytes, 0, 0)

    def run(self, given: dict[str, np.ndarray], dims: dict[str, int], results: dict[str, np.ndarray]) -> None:
        for name, array in given.items():
            self._program.bind("input", name, array.ctypes.data)
        for name, array in results.items():
            self._program.bind("output", name, array.ctypes.data)
        self._program.run(dims)

    def close(self) -> None:
        self._weights = self._arena = np.zeros(0, np.uint8)


class TensorModel:
    """A loaded model: call it with its inputs by name. Thread-safe; results are the caller's own arrays. A context
    manager that closes it.

    Rank, bounds, element type and shape of every input are checked at each call.
    """

    def __init__(self, artifact: Artifact, *, device: str = "auto", opening: Opening | None = None) -> None:
        self.artifact = artifact
        self._program: TensorProgram | None
        gpu = choose_device(artifact, device, opening)
        if gpu is None:
            self._program = CpuTensorProgram(artifact, artifact.cpu_target())
        else:
            from aotc.runtime.cuda_tensor import CudaTensorProgram

            self._program = CudaTensorProgram(artifact, gpu)
        self.plan: Plan = self._program.plan
        self.memory: Memory = self._program.memory
        """Exact bytes of what this model allocated."""
        self._lock = threading.Lock()
        self._bounds = {d.name: (d.lo, d.hi) for d in self.plan.dims}

    def __enter__(self) -> TensorModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory, after calls that run now. Calls raise RequestError afterwards."""
        with self._lock:
            if self._program is not None:
                self._program.close()
                self._program = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Names, element types and shapes that a call takes."""
        return self.plan.inputs

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Outputs by name. Raises RequestError naming the input that does not fit."""
        given, dims = self._checked(arrays)
        results = {}
        for output in self.plan.outputs:
            results[output.name] = np.empty([evaluate(s, dims) for s in output.shape], DTYPES[output.dtype])
        with self._lock:
            if self._program is None:
                raise RequestError(CLOSED)
            self._program.run(given, dims, results)
        return results

    def _checked(self, arrays: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        names = [t.name for t in self.plan.inputs]
        if set(arrays) != set(names):
            wrong = sorted(set(arrays) ^ set(names))
            raise RequestError(
                f"the inputs are {', '.join(names)}: {wrong[0]} is {'missing' if wrong[0] in names else 'unknown'}"
            )
        given, dims = {}, {}
        for tensor in self.plan.inputs:
            given[tensor.name] = self._fit(tensor, arrays[tensor.name], dims)
        for name, (low, high) in self._bounds.items():
            if not low <= dims.setdefault(name, low) <= high:
                raise RequestError(f"dim {name} is {dims[name]}: the model was compiled for {low} to {high}")
        for tensor in self.plan.inputs:
            expected = tuple(evaluate(s, dims) for s in tensor.shape)
            if given[tensor.name].shape != expected:
                raise RequestError(f"input {tensor.name} has shape {given[tensor.name].shape}, not {expected}")
        return given, dims

    def _fit(self, tensor: Tensor, value: Any, dims: dict[str, int]) -> np.ndarray:
        """The array, contiguous; learns the dims that its shape tells."""
        array = np.asarray(value)
        if array.dtype != DTYPES[tensor.dtype]:
            raise RequestError(f"input {tensor.name} is {array.dtype}, not {tensor.dtype}: convert it before the call")
        if array.ndim != len(tensor.shape):
            raise RequestError(f"input {tensor.name} has {array.ndim} axes, not {len(tensor.shape)}")
        for got, size in zip(array.shape, tensor.shape, strict=True):
            name = _lone_dim(size)
            if name is not None and dims.setdefault(name, got) != got:
                raise RequestError(f"input {tensor.name} has {name} = {got}, another input has {dims[name]}")
        return np.asarray(array, order="C")  # ascontiguousarray would make a vector of a scalar


def _lone_dim(size: SizeExpr) -> str | None:
    """The dim's name where a size is just that dim."""
    if isinstance(size, int) or len(size) != 1:
        return None
    coefficient, names = size[0]
    return names[0] if coefficient == 1 and len(names) == 1 else None

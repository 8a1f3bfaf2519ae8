"""A tensor model in this process: named numpy arrays in, named arrays out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from aotc.artifact.plan import Plan, SizeExpr, Tensor, evaluate
from aotc.artifact.reader import Artifact
from aotc.errors import RequestError
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, allocate
from aotc.runtime.executor import Memory

DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64, "i32": np.int32,
    "i16": np.int16, "i8": np.int8, "u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8,
    "bool": np.bool_,
}  # fmt: skip
"""numpy types of elements; bf16 has none of numpy's own and travels as its bits."""


class TensorModel:
    """A loaded model: call it with its inputs by name. Thread-safe; results are the caller's own arrays.

    Rank, bounds, element type and shape of every input are checked at each call.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        target = artifact.cpu_target()
        (entry,) = target.programs
        self.plan: Plan = artifact.plan(entry.plan)
        self._library = CpuLibrary(artifact.file(target.library), target.scratch_bytes)
        self._weights = artifact.map_weights()
        self._arena = allocate(target.arena_bytes)
        self._program = CpuProgram(self.plan, self._library)
        self._program.bind("arena", "arena", self._arena.ctypes.data)
        self._program.bind("weights", "weights", self._weights.ctypes.data)
        self._lock = threading.Lock()
        self._bounds = {d.name: (d.lo, d.hi) for d in self.plan.dims}

    @property
    def memory(self) -> Memory:
        """Exact bytes of what this model allocated."""
        return Memory(self._weights.nbytes, self._arena.nbytes, 0, self._library.scratch.nbytes, 0, 0)

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
            for name, array in given.items():
                self._program.bind("input", name, array.ctypes.data)
            for name, array in results.items():
                self._program.bind("output", name, array.ctypes.data)
            self._program.run(dims)
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
        return np.ascontiguousarray(array)


def _lone_dim(size: SizeExpr) -> str | None:
    """The dim's name where a size is just that dim."""
    if isinstance(size, int) or len(size) != 1:
        return None
    coefficient, names = size[0]
    return names[0] if coefficient == 1 and len(names) == 1 else None

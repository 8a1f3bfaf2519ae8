"""What a tensor model's inputs must be, checked once for each set of shapes, and what they make of the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from aotc.artifact.plan import Plan, SizeExpr, Tensor, evaluate
from aotc.errors import RequestError

DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64, "i32": np.int32,
    "i16": np.int16, "i8": np.int8, "u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8,
    "bool": np.bool_,
}  # fmt: skip
"""numpy types of elements; bf16 has none of numpy's own and travels as its bits."""

REMEMBERED = 4096  # sets of shapes that are remembered: more of them, and the memory begins anew


@dataclass(frozen=True)
class Shapes:
    """What shapes of inputs say: `dims` in the plan's order, and (shape, numpy type) of each output."""

    dims: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], np.dtype], ...]


class Signature:
    """The inputs of a plan. Thread-safe. What fitted once is looked up by shapes and types afterwards."""

    def __init__(self, plan: Plan) -> None:
        self.inputs, self.outputs, self._dims = plan.inputs, plan.outputs, plan.dims
        self.names = tuple(t.name for t in plan.inputs)
        self.output_names = tuple(t.name for t in plan.outputs)
        self._set = frozenset(self.names)
        self._known: dict[tuple[Any, ...], Shapes] = {}

    def fit(self, arrays: dict[str, Any]) -> tuple[list[np.ndarray], Shapes]:
        """The inputs in order, contiguous, and what they say. Raises RequestError naming the input that does not fit."""
        if arrays.keys() != self._set:
            self._refuse_names(arrays)
        given = []
        for name in self.names:
            array = arrays[name]
            if type(array) is not np.ndarray:
                array = np.asarray(array)
            flags = array.flags
            if not (flags.c_contiguous and flags.aligned):
                array = np.require(array, requirements=("C", "A"))
            given.append(array)
        return given, self.of(given)

    def of(self, given: list[np.ndarray]) -> Shapes:
        """What inputs in order say. Raises RequestError naming the one that does not fit."""
        key = tuple([(a.shape, a.dtype) for a in given])
        shapes = self._known.get(key)
        return shapes if shapes is not None else self._learn(key, given)

    def shapes(self, inputs: list[tuple[tuple[int, ...], str]]) -> Shapes:
        """What inputs of these shapes say; element types by a plan's names. Raises RequestError."""
        dims: dict[str, int] = {}
        for tensor, (shape, dtype) in zip(self.inputs, inputs, strict=True):
            _fit(tensor, shape, dtype, dims)
        self._bound(dims)
        for tensor, (shape, _) in zip(self.inputs, inputs, strict=True):
            expected = shape_of(tensor, dims)
            if shape != expected:
                raise RequestError(f"input {tensor.name} has shape {shape}, not {expected}")
        outputs = tuple((shape_of(t, dims), np.dtype(DTYPES[t.dtype])) for t in self.outputs)
        return Shapes(tuple(dims[d.name] for d in self._dims), outputs)

    def guess(self, arrays: dict[str, Any], missing: list[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs that are not all there, by the dims that the others tell; a dim that none tells has its lower
        bound. Raises RequestError where the others do not fit."""
        given = set(arrays)
        if given | set(missing) != self._set:
            self._refuse_names({**arrays, **dict.fromkeys(missing)})
        dims: dict[str, int] = {}
        for tensor in self.inputs:
            if tensor.name in given:
                array = np.asarray(arrays[tensor.name])
                _fit(tensor, array.shape, tensor.dtype if array.dtype == DTYPES[tensor.dtype] else str(array.dtype), dims)
        self._bound(dims)
        return {t.name: shape_of(t, dims) for t in self.inputs if t.name in missing}

    def _bound(self, dims: dict[str, int]) -> None:
        """Gives dims that nobody told their lower bound."""
        for d in self._dims:
            if not d.lo <= dims.setdefault(d.name, d.lo) <= d.hi:
                raise RequestError(f"dim {d.name} is {dims[d.name]}: the model was compiled for {d.lo} to {d.hi}")

    def _learn(self, key: tuple[Any, ...], given: list[np.ndarray]) -> Shapes:
        said = []
        for tensor, array in zip(self.inputs, given, strict=True):
            said.append((array.shape, tensor.dtype if array.dtype == DTYPES[tensor.dtype] else str(array.dtype)))
        shapes = self.shapes(said)
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[key] = shapes
        return shapes

    def _refuse_names(self, arrays: dict[str, Any]) -> NoReturn:
        wrong = sorted(set(arrays) ^ self._set)[0]
        state = "missing" if wrong in self._set else "unknown"
        raise RequestError(f"the inputs are {', '.join(self.names)}: {wrong} is {state}")


def shape_of(tensor: Tensor, dims: dict[str, int]) -> tuple[int, ...]:
    """A tensor's shape at known dims."""
    return tuple(evaluate(s, dims) for s in tensor.shape)


def lone_dim(size: SizeExpr) -> str | None:
    """The dim's name where a size is just that dim."""
    if isinstance(size, int) or len(size) != 1:
        return None
    coefficient, names = size[0]
    return names[0] if coefficient == 1 and len(names) == 1 else None


def _fit(tensor: Tensor, shape: tuple[int, ...], dtype: str, dims: dict[str, int]) -> None:
    """Checks type and rank; learns the dims that the shape tells."""
    if dtype != tensor.dtype:
        raise RequestError(f"input {tensor.name} is {dtype}, not {tensor.dtype}: convert it before the call")
    if len(shape) != len(tensor.shape):
        raise RequestError(f"input {tensor.name} has {len(shape)} axes, not {len(tensor.shape)}")
    for got, size in zip(shape, tensor.shape, strict=True):
        name = lone_dim(size)
        if name is not None and dims.setdefault(name, got) != got:
            raise RequestError(f"input {tensor.name} has {name} = {got}, another input has {dims[name]}")

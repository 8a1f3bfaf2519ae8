"""Emits IR nodes for operator rows, folding what is known: an op on known tensors gives a known tensor.

One Emitter builds one graph. A branch of an `if` has its own, whose outer values become inputs of the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotc.frontend.onnx.fold import fold, fold_sizes
from aotc.frontend.onnx.known import Known, Tensor, interval, is_known, known, larger, smaller
from aotc.ir.builder import Builder
from aotc.ir.dtypes import DType, from_numpy, i64
from aotc.ir.graph import TensorType, Value
from aotc.ir.ops import OPS
from aotc.ir.ops.contraction import ReduceAttrs
from aotc.ir.ops.elementwise import CompareAttrs, ConvertAttrs
from aotc.ir.ops.shape import (
    AxesAttrs,
    AxisAttrs,
    BroadcastAttrs,
    ConstantAttrs,
    IotaAttrs,
    PadAttrs,
    PermutationAttrs,
    ShapeAttrs,
    SliceAttrs,
)  # fmt: skip
from aotc.ir.sizes import Atom, Dim, Expr, FloorDiv, Size, symbol

Number = float | int | bool
_MOST_SPLAT = 4096  # elements that are looked at to find that they are all the same


@dataclass
class WeightTable:
    """Weights by key, typed when they are named and read when they are needed: `aotc.frontend.model.Weights`."""

    tensors: dict[str, Known] = field(default_factory=dict)

    def add(self, tensor: Known) -> str:
        """The key of a tensor: an initialiser's name, or a number."""
        key = base = tensor.key or f"constant.{len(self.tensors)}"
        n = 0
        while self.tensors.get(key, tensor) is not tensor:
            n += 1
            key = f"{base}.{n}"
        self.tensors[key] = tensor
        return key

    def type(self, key: str) -> TensorType:
        return self.tensors[key].type

    def read(self, key: str) -> np.ndarray:
        return np.ascontiguousarray(self.tensors[key].array).reshape(self.tensors[key].type.shape)  # type: ignore[arg-type]


class Emitter:
    """Builds one graph. Operands are Values of this graph, Knowns, or Python numbers."""

    def __init__(self, name: str, dims: Sequence[Dim], weights: WeightTable, outer: Emitter | None = None) -> None:
        self.dims, self.weights, self.outer = tuple(dims), weights, outer
        self.builder = Builder(name, () if outer else dims)
        self.captured: dict[Value, Value] = {}
        """Values of the outer graph that this one reads, and the inputs that stand for them."""
        self._values: dict[Known, Value] = {}
        self._atoms: dict[Atom, Tensor] = {}

    # Nodes

    def emit(self, op: str, *inputs: Tensor, attrs: Any = None) -> Tensor:
        """Adds a node with one output, or folds it. Raises TypeError where types do not fit."""
        (out,) = self.emit_many(op, *inputs, attrs=attrs)
        return out

    def emit_many(self, op: str, *inputs: Tensor, attrs: Any = None) -> tuple[Tensor, ...]:
        """Adds a node and gives its outputs."""
        attrs = OPS[op].attrs() if attrs is None else attrs
        if all(isinstance(x, Known) for x in inputs):
            tensors = [x for x in inputs if isinstance(x, Known)]
            folded = (fold if all(map(is_known, tensors)) else fold_sizes)(op, tensors, attrs, self.dims)
            if folded is not None:
                return folded
        return self.builder.emit_many(op, *map(self.value, inputs), attrs=attrs)

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor in this graph: known ones become constants, weights, or arithmetic on dims."""
        if isinstance(tensor, Value):
            return tensor
        if tensor not in self._values:
            self._values[tensor] = self._materialise(tensor)
        return self._values[tensor]

    def _materialise(self, tensor: Known) -> Value:
        if tensor.symbolic:
            return self._sizes(tensor)
        element = _only_element(tensor)
        if element is not None:
            attrs = ConstantAttrs(element, tensor.type.dtype, tensor.type.shape)
            return self.builder.emit("constant", attrs=attrs)
        if tensor.repeats is not None:
            base, axes = tensor.repeats
            return self.builder.emit(
                "broadcast_in_dim", self.value(base), attrs=BroadcastAttrs(tensor.type.shape, axes)
            )
        if self.outer is not None:
            return self.capture(self.outer.value(tensor))
        return self.builder.weight(self.weights.add(tensor), tensor.type)

    def capture(self, value: Value) -> Value:
        """The input of this graph that stands for a value of the outer one."""
        if value not in self.captured:
            self.captured[value] = self.builder.input(value.name, value.type)
        return self.captured[value]

    def _sizes(self, tensor: Known) -> Value:
        """Sizes as elements of a tensor: each is computed from the dims, which are counted."""
        scalars = [self.reshape(self._size(s), (1,)) for s in tensor.array.flat]
        line = self.concatenate(scalars, 0)
        return self.value(self.convert(self.reshape(line, tensor.type.shape), tensor.type.dtype))

    def _size(self, size: Size) -> Tensor:
        if isinstance(size, int):
            return self.scalar(size, i64)
        total: Tensor = self.scalar(0, i64)
        for atoms, coef in size.terms:
            term: Tensor = self.scalar(coef, i64)
            for atom in atoms:
                term = self.op("multiply", term, self._atom(atom))
            total = self.op("add", total, term)
        return total

    def _atom(self, atom: Atom) -> Tensor:
        if atom not in self._atoms:
            self._atoms[atom] = self._floor(atom) if isinstance(atom, FloorDiv) else self._dim(atom)
        return self._atoms[atom]

    def _dim(self, name: str) -> Tensor:
        return self.reduce("sum", self.scalar(1, i64, (symbol(name),)), (0,))

    def _floor(self, atom: FloorDiv) -> Tensor:
        top = self._size(atom.num)
        if interval(atom.num, self.dims)[0] < 0:  # the op cuts toward zero, a size rounds down
            rest = self.op("remainder", self.op("add", self.op("remainder", top, atom.den), atom.den), atom.den)
            top = self.op("subtract", top, rest)
        return self.op("divide", top, atom.den)

    # Conveniences

    def scalar(self, value: Number, dtype: DType, shape: tuple[Size, ...] = ()) -> Tensor:
        """A tensor of one repeated element."""
        value = float(value) if dtype.is_float else bool(value) if dtype.kind == "bool" else int(value)
        if any(isinstance(s, Expr) for s in shape):
            return self.builder.emit("constant", attrs=ConstantAttrs(value, dtype, shape))
        with np.errstate(all="ignore"):
            element = known(np.asarray(value).astype(dtype.np))
        array = np.broadcast_to(element.array, shape)  # type: ignore[arg-type]
        return element if not shape else Known(TensorType(dtype, shape), lambda: array, repeats=(element, ()))

    def constant(self, array: np.ndarray) -> Known:
        """A tensor of given elements."""
        return known(array, from_numpy(array.dtype))

    def op(self, name: str, *operands: Tensor | Number, attrs: Any = None) -> Tensor:
        """An elementwise op with numpy's broadcasting; numbers get the type of the tensor operands."""
        return self.emit(name, *self.operands(*operands), attrs=attrs)

    def operands(self, *operands: Tensor | Number) -> list[Tensor]:
        """The operands broadcast to one shape."""
        dtype = next(x.type.dtype for x in operands if isinstance(x, Value | Known))
        shape = broadcast_shape(*(x.type.shape for x in operands if isinstance(x, Value | Known)))
        return [
            self.broadcast(x, shape) if isinstance(x, Value | Known) else self.scalar(x, dtype, shape) for x in operands
        ]

    def compare(self, direction: str, x: Tensor, y: Tensor | Number) -> Tensor:
        return self.op("compare", x, y, attrs=CompareAttrs(direction))

    def select(self, condition: Tensor, yes: Tensor | Number, no: Tensor | Number) -> Tensor:
        """Elements of `yes` where the condition holds, with broadcasting; one of them is a tensor."""
        tensors = [x for x in (yes, no) if isinstance(x, Value | Known)]
        shape = broadcast_shape(condition.type.shape, *(x.type.shape for x in tensors))
        sides = [
            self.broadcast(x, shape) if isinstance(x, Value | Known) else self.scalar(x, tensors[0].type.dtype, shape)
            for x in (yes, no)
        ]
        return self.emit("select", self.broadcast(condition, shape), *sides)

    def convert(self, x: Tensor, dtype: DType) -> Tensor:
        return x if x.type.dtype == dtype else self.emit("convert", x, attrs=ConvertAttrs(dtype))

    def reshape(self, x: Tensor, shape: Sequence[Size]) -> Tensor:
        return x if x.type.shape == tuple(shape) else self.emit("reshape", x, attrs=ShapeAttrs(tuple(shape)))

    def transpose(self, x: Tensor, permutation: Sequence[int]) -> Tensor:
        if list(permutation) == list(range(x.type.rank)):
            return x
        return self.emit("transpose", x, attrs=PermutationAttrs(tuple(permutation)))

    def broadcast(self, x: Tensor, shape: tuple[Size, ...], axes: Sequence[int] | None = None) -> Tensor:
        """`x` repeated to `shape`; its axes go to `axes`, or align at the end as in numpy."""
        if x.type.shape == shape:
            return x
        axes = range(len(shape) - x.type.rank, len(shape)) if axes is None else axes
        return self.emit("broadcast_in_dim", x, attrs=BroadcastAttrs(shape, tuple(axes)))

    def reduce(self, kind: str, x: Tensor, axes: Sequence[int], keepdims: bool = False) -> Tensor:
        axes = tuple(sorted(axes))
        out = self.emit("reduce", x, attrs=ReduceAttrs(kind, axes)) if axes else x
        if not keepdims:
            return out
        return self.reshape(out, tuple(1 if i in axes else s for i, s in enumerate(x.type.shape)))

    def slice(self, x: Tensor, axis: int, start: Size, limit: Size, step: int = 1) -> Tensor:
        """Elements start, start + step, ... below limit of one axis."""
        if isinstance(start, int) and start == 0 and limit == x.type.shape[axis] and step == 1:
            return x
        low, high, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
        low[axis], high[axis], steps[axis] = start, limit, step  # type: ignore[call-overload]
        return self.emit("slice", x, attrs=SliceAttrs(tuple(low), tuple(high), tuple(steps)))

    def reverse(self, x: Tensor, *axes: int) -> Tensor:
        return self.emit("reverse", x, attrs=AxesAttrs(axes)) if axes else x

    def pad(self, x: Tensor, low: Sequence[int], high: Sequence[int], value: Number = 0) -> Tensor:
        if not any((*low, *high)):
            return x
        dtype = x.type.dtype
        value = float(value) if dtype.is_float else bool(value) if dtype.kind == "bool" else int(value)
        return self.emit("pad", x, attrs=PadAttrs(tuple(low), tuple(high), value))

    def concatenate(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return parts[0] if len(parts) == 1 else self.emit("concatenate", *parts, attrs=AxisAttrs(axis))

    def iota(self, dtype: DType, shape: tuple[Size, ...], axis: int = 0) -> Tensor:
        """Element value = index along `axis`."""
        return self.emit("iota", attrs=IotaAttrs(dtype, shape, axis))

    def take(self, x: Tensor, index: Tensor, axis: int, elements: bool = False) -> Tensor:
        """ONNX Gather, or GatherElements: negative indices count from the end, and none leaves the axis."""
        size = x.type.shape[axis]
        attrs = AxisAttrs(axis)
        return self.emit("gather_elements" if elements else "gather", x, self.inside(index, size), attrs=attrs)

    def inside(self, index: Tensor, size: Size) -> Tensor:
        """Indices into an axis of `size`: negative ones count from its end. Known ones that leave it are refused,
        others stop at its borders: a kernel never reads outside a tensor."""
        if size == 0 and 0 not in index.type.shape:
            raise TypeError("looks elements up in an axis that has none")
        if is_known(index) and isinstance(size, int):
            array = index.array.astype(np.int64)  # type: ignore[union-attr]
            if array.size and not -size <= array.min() <= array.max() < size:
                raise TypeError(f"an index is outside the axis of size {size}")
            return known(np.where(array < 0, array + size, array))
        index = self.convert(index, i64)
        length = known_scalar(size)
        wrapped = self.select(self.compare("LT", index, 0), self.op("add", index, length), index)
        return self.op("maximum", self.op("minimum", wrapped, self.op("subtract", length, 1)), 0)

    def least(self, a: Size, b: Size) -> Size | None:
        """The smaller size, where the bounds of the dims decide."""
        return smaller(a, b, self.dims)

    def most(self, a: Size, b: Size) -> Size | None:
        return larger(a, b, self.dims)

    def widened(self, compute: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
        """`compute(x, *rest)` in f32 where x has a 16-bit float type."""
        dtype = x.type.dtype
        if not dtype.is_float or dtype.itemsize != 2:
            return compute(x, *rest)
        wide = from_numpy(np.dtype(np.float32))
        rest = tuple(
            self.convert(r, wide) if isinstance(r, Value | Known) and r.type.dtype == dtype else r for r in rest
        )
        return self.convert(compute(self.convert(x, wide), *rest), dtype)


def known_scalar(size: Size) -> Known:
    """A size as a scalar tensor, i64 []."""
    array = np.empty((), object)
    array[()] = size
    return known(array, i64)


def broadcast_shape(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The shape that numpy broadcasts `shapes` to. Raises TypeError where two sizes are not surely equal."""
    rank = max(map(len, shapes))
    result: list[Size] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size == 1 or size == result[i]:
                continue
            if result[i] != 1:
                hint = "" if all(isinstance(s, int) for s in (size, result[i])) else ": make the dims in them static"
                raise TypeError(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast{hint}")
            result[i] = size
    return tuple(result)


def _only_element(tensor: Known) -> Number | None:
    """The element that all others equal, in scalars, small vectors and repeated scalars."""
    shape = tensor.type.shape
    if tensor.key and len(shape) > 1 and tensor.nbytes > tensor.type.dtype.itemsize:
        return None
    array = tensor.array
    if array.size == 0:
        return 0
    splat = array.size == 1 or not any(s for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if not splat and array.ndim <= 1 and array.size <= _MOST_SPLAT:
        splat = array.tobytes() == array[:1].tobytes() * array.size
    return _number(array[(0,) * array.ndim], tensor.type.dtype) if splat else None


def _number(element: Any, dtype: DType) -> Number:
    return float(element) if dtype.is_float else bool(element) if dtype.kind == "bool" else int(element)

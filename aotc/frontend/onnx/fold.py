"""Evaluates IR ops on known tensors while a model is imported: by the ops' references, or on sizes of dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aotc.frontend.onnx.known import Known, compare, divide_exactly, known, larger, smaller
from aotc.ir.dtypes import bool_
from aotc.ir.graph import Node, TensorType, Value
from aotc.ir.interpret import run_node
from aotc.ir.ops import OPS
from aotc.ir.ops.shape import BroadcastAttrs
from aotc.ir.sizes import Dim, Expr, Size

_SMALL = 1 << 20
_LARGE = 1 << 27
"""Bytes. Results up to _SMALL are folded; larger ones, up to _LARGE, where they are no larger than their inputs."""
_MOST_SIZES = 1 << 10
"""Bytes of a tensor of sizes: shapes are short, and each element is arithmetic of its own."""


def fold(op: str, inputs: Sequence[Known], attrs: Any, _: Sequence[Dim]) -> tuple[Known, ...] | None:
    """The op's results, or None where they are too large to keep or have dims in their shapes."""
    if op in ("if", "fusion", "convolution", "reduce_window"):  # windows: the work is out of all proportion to the sizes
        return None
    types = OPS[op].infer(tuple(x.type for x in inputs), attrs)
    if any(isinstance(s, Expr) for t in types for s in t.shape):
        return None
    if op == "broadcast_in_dim":
        return (_repeated(inputs[0], attrs, types[0]),)
    if not _is_small(types, _SMALL) and not _is_small(types, min(_LARGE, sum(x.nbytes for x in inputs))):
        return None
    node = Node(
        op, tuple(Value(str(i), x.type) for i, x in enumerate(inputs)), tuple(Value("o", t) for t in types), attrs
    )
    results = run_node(node, [x.array for x in inputs], {})
    return tuple(known(r, t.dtype) for r, t in zip(results, types, strict=True))


def _repeated(x: Known, attrs: BroadcastAttrs, type_: TensorType) -> Known:
    """Numpy repeats without memory, and what is stored stays the tensor that is repeated."""
    array = np.asarray(OPS["broadcast_in_dim"].reference([x.array], attrs, (type_,)))
    return Known(type_, lambda: array, repeats=(x, attrs.axes))


def _is_small(types: Sequence[TensorType], limit: int) -> bool:
    fixed = ([max(s, 1) for s in t.shape if isinstance(s, int)] for t in types)  # an axis of none has neighbours
    return all(math.prod(shape) * t.dtype.itemsize <= limit for shape, t in zip(fixed, types, strict=True))


def fold_sizes(op: str, inputs: Sequence[Known], attrs: Any, dims: Sequence[Dim]) -> tuple[Known, ...] | None:
    """The op on tensors of sizes, or None where it has no meaning on them or the dims' bounds do not decide it."""
    (type_, *others) = OPS[op].infer(tuple(x.type for x in inputs), attrs)
    if others or not _is_small((type_,), _MOST_SIZES):
        return None
    arrays = [x.array if x.symbolic else x.array.astype(object) for x in inputs]
    if op in _PLACING and not any(isinstance(s, Expr) for s in type_.shape):
        for i in _PLACES.get(op, ()):
            if inputs[i].symbolic:
                return None
            arrays[i] = inputs[i].array
        return (known(np.asarray(OPS[op].reference(arrays, attrs, (type_,))), type_.dtype),)
    if op == "convert":
        return (known(arrays[0], type_.dtype),) if type_.dtype.is_int else None
    if op == "compare":
        return _elementwise(lambda a, b: compare(attrs.direction, a, b, dims), arrays, type_)
    if op == "reduce":
        return _reduced(arrays[0], attrs, type_)
    if op in _ARITHMETIC and not type_.dtype.is_float:
        return _elementwise(lambda *a: _ARITHMETIC[op](*a, dims), arrays, type_)
    return None


def _elementwise(f: Callable[..., Any], arrays: Sequence[np.ndarray], type_: TensorType) -> tuple[Known, ...] | None:
    out = np.empty(arrays[0].shape, object)
    for place in np.ndindex(out.shape):
        out[place] = f(*(a[place] for a in arrays))
        if out[place] is None:
            return None
    return (known(out.astype(np.bool_) if type_.dtype == bool_ else out, type_.dtype),)


def _reduced(array: np.ndarray, attrs: Any, type_: TensorType) -> tuple[Known, ...] | None:
    if attrs.kind not in ("sum", "product"):
        return None
    function = np.add if attrs.kind == "sum" else np.multiply
    for axis in sorted(attrs.axes, reverse=True):
        array = function.reduce(array, axis=axis)
    return (known(np.asarray(array, object), type_.dtype),)


def _quotient(a: Size, b: Size, dims: Sequence[Dim]) -> Size | None:
    """Integer division; truncating and flooring agree, for sizes are not negative."""
    exact = divide_exactly(a, b)
    if exact is not None:
        return exact
    return a // b if isinstance(b, int) and b > 0 and compare("GE", a, 0, dims) else None


def _remainder(a: Size, b: Size, dims: Sequence[Dim]) -> Size | None:
    quotient = _quotient(a, b, dims)
    return None if quotient is None else a - quotient * b


_PLACING = {
    "reshape", "transpose", "broadcast_in_dim", "slice", "concatenate", "reverse", "gather", "gather_elements", "select",
}  # fmt: skip
_PLACES = {"gather": (1,), "gather_elements": (1,), "select": (0,)}
"""Inputs that say where elements come from."""
_ARITHMETIC: dict[str, Callable[..., Size | None]] = {
    "add": lambda a, b, _: a + b,
    "subtract": lambda a, b, _: a - b,
    "multiply": lambda a, b, _: a * b,
    "negate": lambda a, _: a * -1,
    "divide": _quotient,
    "remainder": _remainder,
    "maximum": larger,
    "minimum": smaller,
}

"""The ATen operators that the front end knows: one row an overload, each a few IR nodes.

Rows get the importer, then the operator's arguments with tensors as values and symbolic ints as sizes.
`importer.result` is torch's own result, for element types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from aotc.errors import UnsupportedError
from aotc.ir.builder import Builder
from aotc.ir.dtypes import DTYPES, DType, bool_
from aotc.ir.graph import Value
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import (
    ArgReduceAttrs,
    ConvAttrs,
    DotAttrs,
    PoolAttrs,
    ReduceAttrs,
    ScanAttrs,
    TopKAttrs,
)  # fmt: skip
from aotc.ir.ops.decoder import AttentionAttrs, KVAttrs
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
from aotc.ir.sizes import Size, product

_TORCH_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def dtype_of(dtype: torch.dtype) -> DType:
    """The DType of a torch dtype. Raises UnsupportedError."""
    if dtype not in _TORCH_DTYPES:
        raise UnsupportedError(f"the model uses {dtype}, which aotc has no element type for")
    return DTYPES[_TORCH_DTYPES[dtype]]


class Importer(Builder):
    """A builder that also does torch's conveniences: scalars, broadcasting, type promotion, negative axes."""

    result: Any = None
    size_of: Callable[[Any], Size] = staticmethod(lambda s: s)

    @property
    def dtype(self) -> DType:
        """Element type of torch's own result."""
        return dtype_of(self.result.dtype)

    def convert(self, x: Value, dtype: DType) -> Value:
        return x if x.type.dtype == dtype else self.emit("convert", x, attrs=ConvertAttrs(dtype))

    def broadcast(self, x: Value, shape: tuple[Size, ...]) -> Value:
        """Numpy's broadcasting: trailing axes align."""
        if x.type.shape == shape:
            return x
        axes = tuple(range(len(shape) - x.type.rank, len(shape)))
        return self.emit("broadcast_in_dim", x, attrs=BroadcastAttrs(shape, axes))

    def scalar(self, value: Any, dtype: DType, shape: tuple[Size, ...]) -> Value:
        if dtype.is_float:
            value = float(value)
        return self.emit("constant", attrs=ConstantAttrs(value, dtype, shape))

    def shape(self) -> tuple[Size, ...]:
        """Shape of torch's own result."""
        return tuple(self.size_of(s) for s in self.result.shape)

    def operands(self, args: tuple[Any, ...], dtype: DType) -> list[Value]:
        """Arguments, tensors or numbers, converted and broadcast to the result's shape."""
        shape = self.shape()
        return [
            self.broadcast(self.convert(a, dtype), shape) if isinstance(a, Value) else self.scalar(a, dtype, shape)
            for a in args
        ]

    def reshape(self, x: Value, shape: tuple[Size, ...]) -> Value:
        return x if x.type.shape == shape else self.emit("reshape", x, attrs=ShapeAttrs(shape))


def _axis(x: Value, axis: int) -> int:
    return axis % max(x.type.rank, 1)


def _axes(x: Value, axes: Any) -> tuple[int, ...]:
    if axes is None or axes == []:
        return tuple(range(x.type.rank))
    return tuple(sorted(_axis(x, a) for a in (axes if isinstance(axes, list | tuple) else [axes])))


def _elementwise(op: str) -> Callable[..., Value]:
    return lambda b, *args, **kwargs: b.emit(op, *b.operands(args, b.dtype))


def _compare(direction: str) -> Callable[..., Value]:
    def row(b: Importer, x: Value, y: Any) -> Value:
        wide = x.type.dtype
        if isinstance(y, Value) and y.type.dtype != wide:
            wide = dtype_of(torch.promote_types(_torch_dtype(wide), _torch_dtype(y.type.dtype)))
        elif isinstance(y, float) and not wide.is_float:
            wide = DTYPES["f32"]
        return b.emit("compare", *b.operands((x, y), wide), attrs=CompareAttrs(direction))

    return row


def _torch_dtype(dtype: DType) -> torch.dtype:
    return next(t for t, name in _TORCH_DTYPES.items() if name == dtype.name)


def _scaled(op: str) -> Callable[..., Value]:
    """add and sub have a factor on the second argument."""

    def row(b: Importer, x: Any, y: Any, *, alpha: float = 1) -> Value:
        left, right = b.operands((x, y), b.dtype)
        if alpha != 1:
            right = b.emit("multiply", right, b.scalar(alpha, b.dtype, right.type.shape))
        return b.emit(op, left, right)

    return row


def _rsub(b: Importer, x: Value, y: Any, alpha: float = 1) -> Value:
    return _scaled("subtract")(b, y, x, alpha=alpha)


def _pow(b: Importer, x: Any, exponent: Any) -> Value:
    """Squares, and roots of one half, have exact forms."""
    if isinstance(exponent, int | float) and exponent in (2, 0.5, -0.5, 1):
        (wide,) = b.operands((x,), b.dtype)
        if exponent == 2:
            return b.emit("multiply", wide, wide)
        return wide if exponent == 1 else b.emit("sqrt" if exponent == 0.5 else "rsqrt", wide)
    return b.emit("power", *b.operands((x, exponent), b.dtype))


def _reciprocal(b: Importer, x: Value) -> Value:
    one, value = b.operands((1, x), b.dtype)
    return b.emit("divide", one, value)


def _relu(b: Importer, x: Value) -> Value:
    return b.emit("maximum", x, b.scalar(0, x.type.dtype, x.type.shape))


def _silu(b: Importer, x: Value) -> Value:
    return b.emit("multiply", x, b.emit("logistic", x))


def _gelu(b: Importer, x: Value, *, approximate: str = "none") -> Value:
    def number(v: float) -> Value:
        return b.scalar(v, x.type.dtype, x.type.shape)

    if approximate == "tanh":
        cube = b.emit("multiply", b.emit("multiply", x, x), x)
        inner = b.emit("add", x, b.emit("multiply", cube, number(0.044715)))
        bend = b.emit("tanh", b.emit("multiply", inner, number(math.sqrt(2 / math.pi))))
    else:
        bend = b.emit("erf", b.emit("multiply", x, number(math.sqrt(0.5))))
    return b.emit("multiply", b.emit("multiply", x, number(0.5)), b.emit("add", bend, number(1.0)))


def _clamp(b: Importer, x: Value, low: Any = None, high: Any = None) -> Value:
    out = b.convert(x, b.dtype)
    for bound, op in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            out = b.emit(op, *b.operands((out, bound), b.dtype))
    return out


def _where(b: Importer, condition: Value, x: Any, y: Any) -> Value:
    (mask,) = b.operands((condition,), bool_)
    return b.emit("select", mask, *b.operands((x, y), b.dtype))


def _masked_fill(b: Importer, x: Value, mask: Value, value: Any) -> Value:
    return _where(b, mask, value, x)


def _to(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.convert(x, b.dtype)


def _view(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.reshape(x, b.shape())


def _same(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return x


def _permute(b: Importer, x: Value, axes: Any) -> Value:
    return b.emit("transpose", x, attrs=PermutationAttrs(tuple(_axis(x, a) for a in axes)))


def _transpose(b: Importer, x: Value, a: int = 0, c: int = 1) -> Value:
    order = list(range(x.type.rank))
    if len(order) > 1:
        order[_axis(x, a)], order[_axis(x, c)] = order[_axis(x, c)], order[_axis(x, a)]
    return _permute(b, x, order)


def _expand(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.broadcast(x, b.shape())


def _slice(b: Importer, x: Value, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    axis = _axis(x, axis)
    size = x.type.shape[axis]

    def place(bound: Any, default: Size) -> Size:
        if bound is None:
            return default
        if isinstance(bound, int) and bound < 0:
            return max(size + bound, 0) if isinstance(size, int) else size + bound
        if isinstance(bound, int) and isinstance(size, int):
            return min(bound, size)
        return size if isinstance(bound, int) and bound >= 2**31 else bound

    lo, hi = place(start, 0), place(end, size)
    if isinstance(lo, int) and isinstance(hi, int):
        hi = max(lo, hi)
    limit, first, steps = list(x.type.shape), [0] * x.type.rank, [1] * x.type.rank
    first[axis], limit[axis], steps[axis] = lo, hi, step  # type: ignore[call-overload]
    if first[axis] == 0 and limit[axis] == size and step == 1:
        return x
    return b.emit("slice", x, attrs=SliceAttrs(tuple(first), tuple(limit), tuple(steps)))


def _select(b: Importer, x: Value, axis: int, index: int) -> Value:
    axis = _axis(x, axis)
    size = x.type.shape[axis]
    place = index + size if index < 0 else index
    return b.reshape(_slice(b, x, axis, place, place + 1), b.shape())


def _split(b: Importer, x: Value, sizes: Any, axis: int = 0) -> list[Value]:
    total = x.type.shape[_axis(x, axis)]
    if not isinstance(sizes, list | tuple):
        assert isinstance(total, int), "split sizes of a dynamic axis"
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)]
    parts, start = [], 0
    for size in sizes:
        parts.append(_slice(b, x, axis, start, start + size))
        start += size
    return parts


def _chunk(b: Importer, x: Value, chunks: int, axis: int = 0) -> list[Value]:
    total = x.type.shape[_axis(x, axis)]
    assert isinstance(total, int), "chunks of a dynamic axis"
    return _split(b, x, -(-total // chunks), axis)


def _unbind(b: Importer, x: Value, axis: int = 0) -> list[Value]:
    axis = _axis(x, axis)
    shape = tuple(s for i, s in enumerate(x.type.shape) if i != axis)
    count = x.type.shape[axis]
    assert isinstance(count, int), "unbind of a dynamic axis"
    return [b.reshape(_slice(b, x, axis, i, i + 1), shape) for i in range(count)]


def _cat(b: Importer, tensors: list[Value], axis: int = 0) -> Value:
    parts = [b.convert(t, b.dtype) for t in tensors if t.type.shape != (0,)]
    return parts[0] if len(parts) == 1 else b.emit("concatenate", *parts, attrs=AxisAttrs(_axis(parts[0], axis)))


def _stack(b: Importer, tensors: list[Value], axis: int = 0) -> Value:
    axis = axis % (tensors[0].type.rank + 1)
    shape = (*tensors[0].type.shape[:axis], 1, *tensors[0].type.shape[axis:])
    parts = [b.reshape(b.convert(t, b.dtype), shape) for t in tensors]
    return parts[0] if len(parts) == 1 else b.emit("concatenate", *parts, attrs=AxisAttrs(axis))


def _constant_pad(b: Importer, x: Value, pads: list[int], value: float = 0) -> Value:
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pads) // 2):
        low[-1 - i], high[-1 - i] = pads[2 * i], pads[2 * i + 1]
    if min(low + high) < 0:
        raise UnsupportedError("constant_pad_nd with negative padding: slice the tensor instead")
    value = float(value) if x.type.dtype.is_float else int(value)
    return b.emit("pad", x, attrs=PadAttrs(tuple(low), tuple(high), value))


def _pad(b: Importer, x: Value, pads: list[int], mode: str = "constant", value: float | None = None) -> Value:
    if mode != "constant":
        raise UnsupportedError(f"pad with mode {mode}: only constant padding is supported")
    return _constant_pad(b, x, pads, value or 0)


def _reduce(kind: str) -> Callable[..., Value]:
    def row(b: Importer, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        out = b.emit("reduce", b.convert(x, b.dtype), attrs=ReduceAttrs(kind, _axes(x, axes)))
        return b.reshape(out, b.shape())

    return row


def _mean(b: Importer, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    count = product(tuple(x.type.shape[a] for a in _axes(x, axes)))
    if not isinstance(count, int):
        raise UnsupportedError("mean over a dynamic dim: sum it and divide by its length as a tensor")
    total = _reduce("sum")(b, x, axes, keepdim)
    return b.emit("divide", total, b.scalar(count, b.dtype, total.type.shape))


def _arg(kind: str) -> Callable[..., Value]:
    def row(b: Importer, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        flat = b.reshape(x, (x.type.size,)) if axis is None else x
        out = b.emit("arg_reduce", flat, attrs=ArgReduceAttrs(kind, _axis(flat, axis or 0)))
        return b.reshape(out, b.shape())

    return row


def _cumsum(b: Importer, x: Value, axis: int, **_: Any) -> Value:
    return b.emit("scan", b.convert(x, b.dtype), attrs=ScanAttrs("sum", _axis(x, axis)))


def _topk(b: Importer, x: Value, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not largest or _axis(x, axis) != x.type.rank - 1:
        raise UnsupportedError("topk of the smallest, or not along the last axis: negate or transpose first")
    return b.emit_many("top_k", x, attrs=TopKAttrs(k))


def _softmax(b: Importer, x: Value, axis: int, *_: Any) -> Value:
    return b.emit("softmax", b.convert(x, b.dtype), attrs=AxisAttrs(_axis(x, axis)))


def _layer_norm(b: Importer, x: Value, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any):
    if len(shape) != 1:
        raise UnsupportedError("layer_norm over several axes: flatten them first")
    weight = weight if weight is not None else b.scalar(1, x.type.dtype, tuple(shape))
    bias = bias if bias is not None else b.scalar(0, x.type.dtype, tuple(shape))
    return b.emit("layer_norm", x, weight, bias, attrs=NormAttrs(float(eps)))


def _batch_norm(
    b: Importer, x: Value, weight: Value, bias: Value, mean: Value, variance: Value, training: bool, _: Any,
    eps: float, *__: Any,
) -> Value:  # fmt: skip
    if training:
        raise UnsupportedError("batch_norm in training mode: call model.eval() before exporting")

    def along(v: Value) -> Value:
        return b.emit("broadcast_in_dim", v, attrs=BroadcastAttrs(x.type.shape, (1,)))

    spread = b.emit("rsqrt", b.emit("add", variance, b.scalar(eps, variance.type.dtype, variance.type.shape)))
    scaled = b.emit("multiply", b.emit("subtract", x, along(mean)), along(b.emit("multiply", spread, weight)))
    return b.emit("add", scaled, along(bias))


def _linear(b: Importer, x: Value, weight: Value, bias: Value | None = None) -> Value:
    out = b.emit("dot_general", x, weight, attrs=DotAttrs((x.type.rank - 1,), (1,)))
    return out if bias is None else b.emit("add", out, b.broadcast(bias, out.type.shape))


def _matmul(b: Importer, x: Value, y: Value) -> Value:
    if x.type.rank == y.type.rank > 2:
        batch = tuple(range(x.type.rank - 2))
        shape = tuple(b.shape())[:-2]
        x, y = (b.broadcast(v, (*shape, *v.type.shape[-2:])) for v in (x, y))
        return b.emit("dot_general", x, y, attrs=DotAttrs((x.type.rank - 1,), (y.type.rank - 2,), batch, batch))
    if y.type.rank <= 2:
        return b.emit("dot_general", x, y, attrs=DotAttrs((x.type.rank - 1,), (0,)))
    raise UnsupportedError(f"matmul of {x.type} and {y.type}: give both the same rank")


def _addmm(b: Importer, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise UnsupportedError("addmm with alpha or beta: scale the operands instead")
    out = _matmul(b, x, y)
    return b.emit("add", out, b.broadcast(bias, out.type.shape))


def _per_axis(value: Any, count: int) -> tuple[int, ...]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(values * count if len(values) == 1 else values)


def _conv(
    b: Importer, x: Value, w: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Value:  # fmt: skip
    n = w.type.rank - 2
    pads = _per_axis(padding, n)
    attrs = ConvAttrs(_per_axis(stride, n), pads, pads, _per_axis(dilation, n), groups)
    out = b.emit("convolution", x, w, attrs=attrs)
    if bias is None:
        return out
    return b.emit("add", out, b.emit("broadcast_in_dim", bias, attrs=BroadcastAttrs(out.type.shape, (1,))))


def _convolution(
    b: Importer, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    _: Any, groups: int,
) -> Value:  # fmt: skip
    if transposed:
        raise UnsupportedError("transposed convolution has no kernel yet: use interpolate followed by a convolution")
    return _conv(b, x, w, bias, stride, padding, dilation, groups)


def _max_pool(
    b: Importer, x: Value, window: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Value:
    n = x.type.rank - 2
    if ceil_mode:
        raise UnsupportedError("max_pool with ceil_mode: pad the input instead")
    window = _per_axis(window, n)
    pads = _per_axis(padding, n)
    stride = _per_axis(stride, n) if stride else window
    attrs = PoolAttrs(stride, pads, pads, _per_axis(dilation, n), "maximum", window)
    return b.emit("reduce_window", x, attrs=attrs)


def _avg_pool(
    b: Importer, x: Value, window: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    n = x.type.rank - 2
    window, pads = _per_axis(window, n), _per_axis(padding, n)
    if ceil_mode or (any(pads) and not count_include_pad):
        raise UnsupportedError("avg_pool with ceil_mode or count_include_pad=False: pad the input instead")
    attrs = PoolAttrs(_per_axis(stride, n) if stride else window, pads, pads, (1,) * n, "sum", window)
    total = b.emit("reduce_window", x, attrs=attrs)
    count = divisor or math.prod(window)
    return b.emit("divide", total, b.scalar(count, x.type.dtype, total.type.shape))


def _adaptive_avg_pool(b: Importer, x: Value, size: Any) -> Value:
    if tuple(size) != (1,) * len(size):
        raise UnsupportedError("adaptive_avg_pool to a size other than 1: use avg_pool")
    return _mean(b, x, list(range(x.type.rank - len(size), x.type.rank)), True)


def _embedding(b: Importer, weight: Value, index: Value, *_: Any, **__: Any) -> Value:
    return b.emit("gather", weight, index, attrs=AxisAttrs(0))


def _index_select(b: Importer, x: Value, axis: int, index: Value) -> Value:
    return b.emit("gather", x, index, attrs=AxisAttrs(_axis(x, axis)))


def _filled(value_at: int | float) -> Callable[..., Value]:
    return lambda b, *args, **kwargs: b.scalar(value_at, b.dtype, b.shape())


def _full_value(b: Importer, _: Any, value: Any, **__: Any) -> Value:
    return b.scalar(value, b.dtype, b.shape())


def _arange(b: Importer, *bounds: Any, **_: Any) -> Value:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    out = b.emit("iota", attrs=IotaAttrs(b.dtype, b.shape(), 0))
    for op, number in (("multiply", step), ("add", start)):
        if number != (1 if op == "multiply" else 0):
            out = b.emit(op, out, b.scalar(number, b.dtype, out.type.shape))
    return out


def _flip(b: Importer, x: Value, axes: Any) -> Value:
    return b.emit("reverse", x, attrs=AxesAttrs(_axes(x, axes)))


def _sdpa(
    b: Importer, q: Value, k: Value, v: Value, mask: Value | None = None, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """softmax(q k^T scale + mask) v, spelled out: q, k, v [..., length, d]."""
    if enable_gqa or dropout:
        raise UnsupportedError("scaled_dot_product_attention with enable_gqa or dropout: repeat heads, call eval()")
    batch = tuple(range(q.type.rank - 2))
    last = q.type.rank - 1
    factor = scale if scale is not None else float(q.type.shape[-1]) ** -0.5  # type: ignore[arg-type]
    scores = b.emit("dot_general", q, k, attrs=DotAttrs((last,), (last,), batch, batch))
    scores = b.emit("multiply", scores, b.scalar(factor, scores.type.dtype, scores.type.shape))
    if causal:
        shape = scores.type.shape
        row, column = (b.emit("iota", attrs=IotaAttrs(DTYPES["i64"], shape, axis)) for axis in (last - 1, last))
        seen = b.emit("compare", column, row, attrs=CompareAttrs("LE"))
        scores = b.emit("select", seen, scores, b.scalar(-math.inf, scores.type.dtype, shape))
    if mask is not None and mask.type.dtype == bool_:
        hidden = b.scalar(-math.inf, scores.type.dtype, scores.type.shape)
        scores = b.emit("select", b.broadcast(mask, scores.type.shape), scores, hidden)
    elif mask is not None:
        scores = b.emit("add", scores, b.broadcast(b.convert(mask, scores.type.dtype), scores.type.shape))
    weights = b.emit("softmax", scores, attrs=AxisAttrs(last))
    return b.emit("dot_general", weights, v, attrs=DotAttrs((last,), (last - 1,), batch, batch))


def _kv_append(b: Importer, *tensors: Value) -> Value:
    return b.emit("kv_append", *tensors, attrs=KVAttrs())


def _attention(b: Importer, *args: Any) -> Value:
    *tensors, scale, window = args
    return b.emit("attention", *tensors, attrs=AttentionAttrs(scale=scale, window=window or None))


def _last_rows(b: Importer, x: Value, query_start: Value) -> Value:
    return b.emit("last_rows", x, query_start)


_UNARY = {
    "neg": "negate", "abs": "abs", "sign": "sign", "exp": "exponential", "expm1": "exponential_minus_one",
    "log": "log", "log1p": "log_plus_one", "sqrt": "sqrt", "rsqrt": "rsqrt", "erf": "erf", "sigmoid": "logistic",
    "sin": "sine", "cos": "cosine", "tan": "tan", "tanh": "tanh", "asin": "asin", "acos": "acos", "atan": "atan",
    "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "floor": "floor",
    "ceil": "ceil", "round": "round_nearest_even", "trunc": "trunc", "bitwise_not": "not", "logical_not": "not",
}  # fmt: skip
_BINARY = {
    "mul": "multiply", "div": "divide", "maximum": "maximum", "minimum": "minimum", "atan2": "atan2",
    "fmod": "remainder", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
_COMPARE = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}

ATEN: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}.default": _elementwise(op) for name, op in _UNARY.items()},
    **{f"aten.{n}.{o}": _elementwise(op) for n, op in _BINARY.items() for o in ("Tensor", "Scalar", "default")},
    **{f"aten.logical_{n}.default": _elementwise(n) for n in ("and", "or", "xor")},
    **{f"aten.{n}.{o}": _compare(d) for n, d in _COMPARE.items() for o in ("Tensor", "Scalar")},
    **{f"aten.add.{o}": _scaled("add") for o in ("Tensor", "Scalar")},
    **{f"aten.sub.{o}": _scaled("subtract") for o in ("Tensor", "Scalar")},
    **{f"aten.rsub.{o}": _rsub for o in ("Tensor", "Scalar")},
    **{f"aten.pow.{o}": _pow for o in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    **{f"aten.clamp.{o}": _clamp for o in ("default", "Tensor")},
    **{f"aten.to.{o}": _to for o in ("dtype", "dtype_layout", "device")},
    **{f"aten.{n}": _view for n in (
        "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims",
        "squeeze.default", "flatten.using_ints", "unflatten.int",
    )},
    **{f"aten.{n}": _same for n in (
        "contiguous.default", "clone.default", "alias.default", "detach.default", "dropout.default",
        "lift_fresh_copy.default", "detach_.default",
    )},
    **{f"aten.{n}": _expand for n in ("expand.default", "broadcast_to.default", "expand_as.default")},
    **{f"aten.{n}": _reduce("sum") for n in ("sum.default", "sum.dim_IntList")},
    **{f"aten.{n}": _mean for n in ("mean.default", "mean.dim")},
    **{f"aten.{n}": _matmul for n in ("matmul.default", "mm.default", "bmm.default", "mv.default")},
    **{f"aten.conv{n}d.default": _conv for n in (1, 2, 3)},
    **{f"aten.{n}": _filled(0) for n in ("zeros.default", "zeros_like.default")},
    **{f"aten.{n}": _filled(1) for n in ("ones.default", "ones_like.default")},
    **{f"aten.{n}": _full_value for n in ("full.default", "full_like.default")},
    **{f"aten.arange.{o}": _arange for o in ("default", "start", "start_step")},
    "aten._to_copy.default": _to, "aten.reciprocal.default": _reciprocal, "aten.relu.default": _relu,
    "aten.silu.default": _silu, "aten.gelu.default": _gelu, "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill, "aten.permute.default": _permute, "aten.transpose.int": _transpose,
    "aten.t.default": _transpose, "aten.slice.Tensor": _slice, "aten.select.int": _select,
    "aten.split.Tensor": _split, "aten.split_with_sizes.default": _split, "aten.chunk.default": _chunk,
    "aten.unbind.int": _unbind, "aten.cat.default": _cat, "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _constant_pad, "aten.pad.default": _pad,
    "aten.amax.default": _reduce("maximum"), "aten.amin.default": _reduce("minimum"),
    "aten.prod.default": _reduce("product"), "aten.prod.dim_int": _reduce("product"),
    "aten.argmax.default": _arg("maximum"), "aten.argmin.default": _arg("minimum"),
    "aten.cumsum.default": _cumsum, "aten.topk.default": _topk, "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax, "aten.layer_norm.default": _layer_norm, "aten.batch_norm.default": _batch_norm,
    "aten.linear.default": _linear, "aten.addmm.default": _addmm, "aten.convolution.default": _convolution,
    "aten.max_pool2d.default": _max_pool, "aten.max_pool1d.default": _max_pool, "aten.avg_pool2d.default": _avg_pool,
    "aten.adaptive_avg_pool2d.default": _adaptive_avg_pool, "aten.adaptive_avg_pool1d.default": _adaptive_avg_pool,
    "aten.embedding.default": _embedding, "aten.index_select.default": _index_select, "aten.flip.default": _flip,
    "aten.gather.default": lambda b, x, axis, index: b.emit(
        "gather_elements", x, index, attrs=AxisAttrs(_axis(x, axis))
    ),
    "aten.scaled_dot_product_attention.default": _sdpa,
    "aotc.kv_append.default": _kv_append, "aotc.attention.default": _attention, "aotc.last_rows.default": _last_rows,
}  # fmt: skip

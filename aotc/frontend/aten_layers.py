"""ATen operators of layers: norms, products, convolutions, pooling and attention."""

from __future__ import annotations

import math
from typing import Any

from aotc.errors import UnsupportedError
from aotc.frontend.aten_importer import Importer, Row
from aotc.frontend.aten_reductions import mean
from aotc.ir.dtypes import DTYPES, bool_
from aotc.ir.graph import Value
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import (
    ConvAttrs,
    DotAttrs,
    PoolAttrs,
)  # fmt: skip
from aotc.ir.ops.decoder import AttentionAttrs, KVAttrs
from aotc.ir.ops.elementwise import CompareAttrs
from aotc.ir.ops.encoder import SelfAttentionAttrs
from aotc.ir.ops.shape import (
    AxesAttrs,
    AxisAttrs,
    BroadcastAttrs,
    IotaAttrs,
    PadAttrs,
    PermutationAttrs,
    SliceAttrs,
)  # fmt: skip
from aotc.ir.sizes import product


def _layer_norm(b: Importer, x: Value, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any):
    shape = tuple(shape)
    weight = weight if weight is not None else b.scalar(1, x.type.dtype, shape)
    bias = bias if bias is not None else b.scalar(0, x.type.dtype, shape)
    rows, flat = x.type.shape[: x.type.rank - len(shape)], (product(shape),)  # several axes are normalised as one
    line = b.emit(
        "layer_norm", b.reshape(x, (*rows, *flat)), b.reshape(weight, flat), b.reshape(bias, flat),
        attrs=NormAttrs(float(eps)),
    )  # fmt: skip
    return b.reshape(line, x.type.shape)


def _batch_norm(
    b: Importer, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, training: bool,
    _: Any, eps: float, *__: Any,
) -> Value:  # fmt: skip
    if training:
        raise UnsupportedError("batch_norm in training mode: call model.eval() before exporting")
    spread = b.emit("rsqrt", b.emit("add", variance, b.scalar(eps, variance.type.dtype, variance.type.shape)))
    factor = spread if weight is None else b.emit("multiply", spread, weight)
    scaled = b.emit("multiply", b.emit("subtract", x, _along(b, mean, x)), _along(b, factor, x))
    return scaled if bias is None else b.emit("add", scaled, _along(b, bias, x))


def _group_norm(
    b: Importer, x: Value, groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5,
    *_: Any,
) -> Value:  # fmt: skip
    batch, depth, *spatial = x.type.shape
    row = product((depth // groups, *spatial))
    one, zero = (b.scalar(v, x.type.dtype, (row,)) for v in (1, 0))
    line = b.emit("layer_norm", b.reshape(x, (batch, groups, row)), one, zero, attrs=NormAttrs(float(eps)))
    out = b.reshape(line, x.type.shape)
    out = out if weight is None else b.emit("multiply", out, _along(b, weight, x))
    return out if bias is None else b.emit("add", out, _along(b, bias, x))


def _native_batch_norm(
    b: Importer, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, _: float, eps: float
) -> list[Any]:
    """Its second and third results are for training."""
    return [_batch_norm(b, x, weight, bias, mean, variance, False, 0.0, eps), None, None]


def _linear(b: Importer, x: Value, weight: Value, bias: Value | None = None) -> Value:
    out = b.emit("dot_general", x, weight, attrs=DotAttrs((x.type.rank - 1,), (1,)))
    return out if bias is None else b.emit("add", out, b.broadcast(bias, out.type.shape))


def _matmul(b: Importer, x: Value, y: Value) -> Value:
    if y.type.rank <= 2:
        return b.emit("dot_general", x, y, attrs=DotAttrs((x.type.rank - 1,), (0,)))
    shape = tuple(b.shape())
    outer = shape[:-1] if x.type.rank == 1 else shape[:-2]  # a vector is a row, and its axis is dropped at the end
    x = b.reshape(x, (1, *x.type.shape)) if x.type.rank == 1 else x
    x, y = (b.broadcast(v, (*outer, *v.type.shape[-2:])) for v in (x, y))
    last, batch = len(outer) + 1, tuple(range(len(outer)))
    return b.reshape(b.emit("dot_general", x, y, attrs=DotAttrs((last,), (last - 1,), batch, batch)), shape)


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
    return b.emit("add", out, _along(b, bias, out))


def _along(b: Importer, v: Value, x: Value) -> Value:
    """One element a channel, over all of x."""
    return b.emit("broadcast_in_dim", v, attrs=BroadcastAttrs(x.type.shape, (1,)))


def _convolution(
    b: Importer, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    more: Any, groups: int,
) -> Value:  # fmt: skip
    if transposed:
        return _transposed(b, x, w, bias, stride, padding, dilation, more, groups)
    return _conv(b, x, w, bias, stride, padding, dilation, groups)


def _transposed(
    b: Importer, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, more: Any, groups: int
) -> Value:  # fmt: skip
    """A convolution of the input, its elements `stride` apart with zeros between, with the kernel turned around."""
    n = w.type.rank - 2
    channels, per_group, *kernel = w.type.ints
    steps, holes = _per_axis(stride, n), _per_axis(dilation, n)
    for axis, step in enumerate(steps, 2):
        x = _spread(b, x, axis, step)
    spans = [(k - 1) * d for k, d in zip(kernel, holes, strict=True)]
    low = tuple(s - p for s, p in zip(spans, _per_axis(padding, n), strict=True))
    high = tuple(lo + extra for lo, extra in zip(low, _per_axis(more, n), strict=True))
    if min(low + high) < 0:
        raise UnsupportedError("transposed convolution with more padding than its kernel reaches: slice its result")
    turned = b.emit("reverse", w, attrs=AxesAttrs(tuple(range(2, n + 2))))
    turned = b.reshape(turned, (groups, channels // groups, per_group, *kernel))
    turned = b.emit("transpose", turned, attrs=PermutationAttrs((0, 2, 1, *range(3, n + 3))))
    turned = b.reshape(turned, (groups * per_group, channels // groups, *kernel))
    out = b.emit("convolution", x, turned, attrs=ConvAttrs((1,) * n, low, high, holes, groups))
    return out if bias is None else b.emit("add", out, _along(b, bias, out))


def _spread(b: Importer, x: Value, axis: int, step: int) -> Value:
    """step - 1 zeros between neighbours of an axis."""
    if step == 1:
        return x
    shape, size = x.type.shape, x.type.shape[axis]
    tall = b.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    high = tuple((step - 1) * (i == axis + 1) for i in range(tall.type.rank))
    tall = b.emit("pad", tall, attrs=PadAttrs((0,) * len(high), high, 0.0))
    flat = b.reshape(tall, (*shape[:axis], size * step, *shape[axis + 1 :]))
    limit = tuple((s - 1) * step + 1 if i == axis else s for i, s in enumerate(shape))
    return b.emit("slice", flat, attrs=SliceAttrs((0,) * len(shape), limit, (1,) * len(shape)))


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
    size = tuple(size)
    if size == (1,) * len(size):
        return mean(b, x, list(range(x.type.rank - len(size), x.type.rank)), True)
    spatial = x.type.shape[x.type.rank - len(size) :]
    if any(not isinstance(have, int) or have % want for have, want in zip(spatial, size, strict=True)):
        raise UnsupportedError(
            f"adaptive_avg_pool of {list(spatial)} to {list(size)}: use avg_pool, or sizes that divide"
        )
    return _avg_pool(b, x, [have // want for have, want in zip(spatial, size, strict=True)])  # type: ignore[operator]


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


def _self_attention(b: Importer, qkv: Value, lengths: Value, scale: float) -> Value:
    return b.emit("self_attention", qkv, lengths, attrs=SelfAttentionAttrs(scale))


def _last_rows(b: Importer, x: Value, query_start: Value) -> Value:
    return b.emit("last_rows", x, query_start)


ROWS: dict[str, Row] = {
    **{f"aten.{n}": _matmul for n in ("matmul.default", "mm.default", "bmm.default", "mv.default")},
    **{f"aten.conv{n}d.default": _conv for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d.default": _max_pool for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _avg_pool for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _adaptive_avg_pool for n in (1, 2, 3)},
    "aten.layer_norm.default": _layer_norm, "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _native_batch_norm, "aten.group_norm.default": _group_norm,
    "aten.linear.default": _linear, "aten.addmm.default": _addmm, "aten.convolution.default": _convolution,
    "aten.scaled_dot_product_attention.default": _sdpa,
    "aotc.kv_append.default": _kv_append, "aotc.attention.default": _attention, "aotc.last_rows.default": _last_rows,
    "aotc.self_attention.default": _self_attention,
}  # fmt: skip

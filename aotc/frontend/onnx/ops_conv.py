"""Convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aotc.errors import SourceError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter
from aotc.frontend.onnx.known import Tensor, known
from aotc.frontend.onnx.ops_reduce import mean
from aotc.ir.dtypes import i64
from aotc.ir.ops.contraction import ArgReduceAttrs, ConvAttrs, PoolAttrs, lowest
from aotc.ir.sizes import Size, ceildiv, product

Row = Callable[..., Tensor | Sequence[Tensor]]
Ints = tuple[int, ...]


class Window(NamedTuple):
    """How windows slide over the spatial axes; `extra` elements at the end only make room for a last window."""

    kernel: Ints
    stride: Ints
    low: Ints
    high: Ints
    dilation: Ints
    extra: Ints


def window_of(n: Call, spatial: Sequence[Size], kernel: Sequence[Size]) -> Window:
    """The window that a node's attributes describe. Raises UnsupportedError for padding that depends on a dim."""
    count = len(spatial)
    if len(kernel) != count or not all(isinstance(k, int) for k in kernel):
        raise n.refusal(f"its kernel {list(kernel)} does not fit {count} spatial axes")
    sizes: Ints = tuple(kernel)  # type: ignore[assignment]
    stride = tuple(n.attr_ints("strides") or [1] * count)
    dilation = tuple(n.attr_ints("dilations") or [1] * count)
    if any(len(v) != count for v in (stride, dilation)) or min((*stride, *dilation, *sizes), default=1) < 1:
        raise SourceError(f"{n}: kernel {sizes}, strides {stride} and dilations {dilation} do not fit")
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilation, strict=True)]
    pads = n.attr_ints("pads") or [0] * 2 * count
    auto = n.attr_string("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        low, high = zip(*(_same(n, *v, auto) for v in zip(spatial, stride, spans, strict=True)), strict=True)
    elif auto == "VALID":
        low = high = (0,) * count
    else:
        low, high = tuple(pads[:count]), tuple(pads[count:])
    if len(low) != count or min((*low, *high), default=0) < 0:
        raise n.refusal(f"its padding {pads} does not fit, or is negative")
    extra = (0,) * count
    if n.attr_int("ceil_mode", 0):
        fields = zip(spatial, stride, spans, low, high, strict=True)
        extra = tuple(_ceiling(n, *f) for f in fields)
    return Window(sizes, stride, low, high, dilation, extra)


def _same(n: Call, size: Size, stride: int, span: int, auto: str) -> tuple[int, int]:
    """Padding that makes ceil(size / stride) windows."""
    total = (ceildiv(size, stride) - 1) * stride + span - size
    if not isinstance(total, int):
        raise n.refusal(f"{auto} with stride {stride} pads the dynamic dim {size} by its remainder: make it static")
    total = max(total, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if auto == "SAME_UPPER" else (large, small)


def _ceiling(n: Call, size: Size, stride: int, span: int, low: int, high: int) -> int:
    """Room at the end for a last window that starts inside the input or its front padding."""
    if isinstance(size, int):
        windows = -(-(size + low + high - span) // stride) + 1
        if (windows - 1) * stride >= size + low:
            windows -= 1
        return max((windows - 1) * stride + span - size - low - high, 0)
    if high + stride > span:
        raise n.refusal(f"ceil_mode over the dynamic dim {size} with these strides: make it static")
    return stride - 1


def _conv(b: Emitter, n: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = convolve(b, n, x, weight)
    return out if bias is None else b.op("add", out, channels(b, bias, out))


def convolve(b: Emitter, n: Call, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution that a node's attributes describe, without bias."""
    w = window_of(n, x.type.shape[2:], n.attr_ints("kernel_shape") or weight.type.shape[2:])
    attrs = ConvAttrs(w.stride, w.low, w.high, w.dilation, n.attr_int("group", 1))
    return b.emit("convolution", x, weight, attrs=attrs)


def channels(b: Emitter, vector: Tensor, like: Tensor) -> Tensor:
    """A vector along axis 1, of the shape of `like`."""
    return b.broadcast(vector, like.type.shape, (1,))


def _conv_transpose(b: Emitter, n: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution of the input, spread out by the stride, with the kernel turned around."""
    count, groups = x.type.rank - 2, n.attr_int("group", 1)
    kernel: Ints = tuple(weight.type.shape[2:])  # type: ignore[assignment]
    stride = tuple(n.attr_ints("strides") or [1] * count)
    dilation = tuple(n.attr_ints("dilations") or [1] * count)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    more = n.attr_ints("output_padding") or [0] * count
    cut = _transposed_pads(n, x.type.shape[2:], stride, spans, more)
    for axis in range(2, x.type.rank):
        x = _spread(b, x, axis, stride[axis - 2])
    low, high = ([span - 1 - c for span, c in zip(spans, side, strict=True)] for side in cut)
    high = [h + m for h, m in zip(high, more, strict=True)]
    for i in range(count):  # negative padding takes elements away
        axis = i + 2
        x = b.slice(x, axis, max(-low[i], 0), x.type.shape[axis] - max(-high[i], 0))
    pads = [tuple(max(v, 0) for v in side) for side in (low, high)]
    channels_in, per_group = weight.type.shape[:2]
    turned = b.reverse(weight, *range(2, x.type.rank))
    turned = b.reshape(turned, (groups, channels_in // groups, per_group, *kernel))
    turned = b.transpose(turned, (0, 2, 1, *range(3, 3 + count)))
    turned = b.reshape(turned, (per_group * groups, channels_in // groups, *kernel))
    out = b.emit("convolution", x, turned, attrs=ConvAttrs((1,) * count, pads[0], pads[1], dilation, groups))
    return out if bias is None else b.op("add", out, channels(b, bias, out))


def _transposed_pads(
    n: Call, spatial: Sequence[Size], stride: Ints, spans: Sequence[int], more: Sequence[int]
) -> tuple[list[int], list[int]]:
    """What the padding takes away at each end of the full output."""
    count = len(spatial)
    wanted = n.attr_ints("output_shape")
    auto = n.attr_string("auto_pad", "NOTSET")
    if wanted is None and auto not in ("SAME_UPPER", "SAME_LOWER"):
        pads = n.attr_ints("pads") if auto == "NOTSET" else None
        pads = pads or [0] * 2 * count
        return pads[:count], pads[count:]
    low, high = [], []
    for i, size in enumerate(spatial):
        full = (size - 1) * stride[i] + more[i] + spans[i]
        total = full - (wanted[i - count] if wanted else size * stride[i])
        if not isinstance(total, int):
            raise n.refusal(f"output_shape with the dynamic dim {size}: make it static")
        total = max(total, 0) if not wanted else total
        first = total // 2 if auto == "SAME_UPPER" else total - total // 2
        low.append(first)
        high.append(total - first)
    return low, high


def _spread(b: Emitter, x: Tensor, axis: int, stride: int) -> Tensor:
    """stride - 1 zeros between the elements of an axis."""
    if stride == 1:
        return x
    shape = x.type.shape
    tall = b.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    high = [stride - 1 if i == axis + 1 else 0 for i in range(tall.type.rank)]
    flat = b.reshape(b.pad(tall, [0] * len(high), high), (*shape[:axis], shape[axis] * stride, *shape[axis + 1 :]))
    return b.slice(flat, axis, 0, shape[axis] * stride - (stride - 1))


def pool(b: Emitter, x: Tensor, w: Window, kind: str) -> Tensor:
    """Sums or maxima of windows."""
    high = tuple(h + e for h, e in zip(w.high, w.extra, strict=True))
    attrs = PoolAttrs(stride=w.stride, low=w.low, high=high, dilation=w.dilation, kind=kind, window=w.kernel)
    return b.emit("reduce_window", x, attrs=attrs)


def _max_pool(b: Emitter, n: Call, x: Tensor) -> Sequence[Tensor]:
    w = window_of(n, x.type.shape[2:], n.attr_ints("kernel_shape") or ())
    if not n.wants(1):
        return [pool(b, x, w, "maximum")]
    return _max_pool_with_indices(b, n, x, w)


def _max_pool_with_indices(b: Emitter, n: Call, x: Tensor, w: Window) -> Sequence[Tensor]:
    """Every window's elements side by side, so that their places are known: then the maximum and its place."""
    batch, depth, *spatial = x.type.shape
    if not all(isinstance(s, int) for s in (batch, depth, *spatial)):
        raise n.refusal("gives indices, which need static sizes: fix the dims of its input")
    sizes: list[int] = spatial  # type: ignore[assignment]
    flat, outs = _window_places(n, sizes, w)
    places = np.where(flat < 0, 0, flat)
    inside = b.take(b.reshape(x, (batch, depth, product(tuple(spatial)))), known(places), 2)
    floor = lowest(x.type.dtype.np)
    inside = b.select(b.broadcast(known(flat >= 0), inside.type.shape), inside, floor)
    best = b.emit("arg_reduce", inside, attrs=ArgReduceAttrs("maximum", 3))
    column = b.reshape(best, (*best.type.shape, 1))
    if n.attr_int("storage_order", 0):
        places = np.ravel_multi_index(np.unravel_index(places, sizes), sizes, order="F")
    table = b.broadcast(known(places.astype(np.int64)), inside.type.shape)
    values, index = (b.take(t, column, 3, elements=True) for t in (inside, table))
    start = b.op("multiply", b.iota(i64, (batch * depth, 1)), math.prod(sizes))
    index = b.op("add", b.reshape(index, (batch * depth, product(tuple(outs)))), start)
    return [b.reshape(t, (batch, depth, *outs)) for t in (values, index)]


def _window_places(n: Call, sizes: Sequence[int], w: Window) -> tuple[np.ndarray, list[int]]:
    """Flat places of the elements of each window, i64 [windows, elements], -1 in the padding; and the output's sizes."""
    fields = list(zip(sizes, *w, strict=True))
    outs = [(size + lo + hi + e - (k - 1) * d - 1) // s + 1 for size, k, s, lo, hi, d, e in fields]
    n.counted(math.prod(outs) * math.prod(w.kernel))
    grid = []
    for count, (size, k, s, lo, _, d, _) in zip(outs, fields, strict=True):
        line = np.arange(count)[:, None] * s + np.arange(k) * d - lo
        grid.append(np.where((line < 0) | (line >= size), -1, line))
    rank = len(sizes)
    flat = np.zeros((1,) * 2 * rank, np.int64)
    outside = np.zeros_like(flat, bool)
    for i, line in enumerate(grid):
        shaped = line.reshape(
            [line.shape[0] if a == i else line.shape[1] if a == i + rank else 1 for a in range(2 * rank)]
        )
        flat = flat * sizes[i] + shaped
        outside = outside | (shaped < 0)
    return np.where(outside, -1, flat).reshape(int(np.prod(outs)), -1), outs


def _average_pool(b: Emitter, n: Call, x: Tensor) -> Tensor:
    w = window_of(n, x.type.shape[2:], n.attr_ints("kernel_shape") or ())
    total = b.widened(lambda v: pool(b, v, w, "sum"), x)
    if not any((*w.low, *w.high, *w.extra)):
        return b.op("divide", total, int(np.prod(w.kernel)))
    spatial = x.type.shape[2:]
    counted = w
    if n.attr_int("count_include_pad", 0):
        spatial = tuple(s + lo + hi for s, lo, hi in zip(spatial, w.low, w.high, strict=True))
        counted = w._replace(low=(0,) * len(spatial), high=(0,) * len(spatial))
    count = pool(b, b.scalar(1, x.type.dtype, (1, 1, *spatial)), counted, "sum")
    return b.op("divide", total, count)


def _lp_pool(b: Emitter, n: Call, x: Tensor) -> Tensor:
    w = window_of(n, x.type.shape[2:], n.attr_ints("kernel_shape") or ())
    p = n.attr_int("p", 2)
    return b.widened(lambda v: _root(b, pool(b, _power(b, v, p), w, "sum"), p), x)


def _power(b: Emitter, x: Tensor, p: int) -> Tensor:
    size = b.op("abs", x)
    return size if p == 1 else b.op("multiply", x, x) if p == 2 else b.op("power", size, p)


def _root(b: Emitter, x: Tensor, p: int) -> Tensor:
    return x if p == 1 else b.op("sqrt", x) if p == 2 else b.op("power", x, 1 / p)


def _spatial_axes(x: Tensor) -> Ints:
    return tuple(range(2, x.type.rank))


def _global_average_pool(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.widened(lambda v: mean(b, v, _spatial_axes(v)), x)


def _global_max_pool(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.reduce("maximum", x, _spatial_axes(x), True)


def _global_lp_pool(b: Emitter, n: Call, x: Tensor) -> Tensor:
    p = n.attr_int("p", 2)
    return b.widened(lambda v: _root(b, b.reduce("sum", _power(b, v, p), _spatial_axes(v), True), p), x)


OPS: dict[str, Row] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "GlobalLpPool": _global_lp_pool,
}

"""Operators that place elements: reshape, transpose, slice, pad, concat, tile, and tensors made from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from aotc.errors import SourceError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, broadcast_shape, known_scalar
from aotc.frontend.onnx.known import Tensor, compare, divide_exactly, interval, is_known, known, known_sizes
from aotc.frontend.onnx.tensors import dtype_of, inline_array
from aotc.ir.dtypes import bool_, from_numpy, i64
from aotc.ir.sizes import Size, ceildiv, product

Row = Callable[..., Tensor | Sequence[Tensor]]


def _constant(b: Emitter, n: Call) -> Tensor:
    tensor = n.attr_tensor("value")
    if tensor is not None:
        if tensor.data_location == TensorProto.EXTERNAL:
            raise n.refusal("its value lies in another file: make it an initialiser")
        return known(inline_array(tensor, str(n)))
    if n.has("value_float"):
        return b.constant(np.asarray(n.attr_float("value_float"), np.float32))
    if n.has("value_int"):
        return b.constant(np.asarray(n.attr_int("value_int"), np.int64))
    if n.has("value_floats"):
        return b.constant(np.asarray(n.attr_floats("value_floats"), np.float32))
    if n.has("value_ints"):
        return b.constant(np.asarray(n.attr_ints("value_ints"), np.int64))
    raise n.refusal("strings and sparse values are not supported: use a dense tensor of numbers")


def _constant_of_shape(b: Emitter, n: Call, shape: Tensor) -> Tensor:
    tensor = n.attr_tensor("value")
    value = np.zeros(1, np.float32) if tensor is None else inline_array(tensor, str(n))
    dtype = from_numpy(value.dtype)
    return b.scalar(
        value.reshape(()).item() if dtype.name != "bf16" else float(value.reshape(())), dtype, tuple(n.sizes(shape))
    )


def _shape(b: Emitter, n: Call, x: Tensor) -> Tensor:
    rank = x.type.rank
    start, end = (
        min(max(v + rank if v < 0 else v, 0), rank) for v in (n.attr_int("start", 0), n.attr_int("end", rank))
    )
    return known_sizes(x.type.shape[start:end])


def _size(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return known_scalar(x.type.size)


def _reshape(b: Emitter, n: Call, x: Tensor, shape: Tensor) -> Tensor:
    wanted = n.sizes(shape)
    keeps_zero = n.attr_int("allowzero", 0)
    result = [x.type.shape[i] if isinstance(s, int) and s == 0 and not keeps_zero else s for i, s in enumerate(wanted)]
    open_places = [i for i, s in enumerate(result) if isinstance(s, int) and s == -1]
    if len(open_places) > 1:
        raise SourceError(f"{n}: shape {wanted} has two open sizes")
    for i in open_places:
        rest = product(tuple(s for j, s in enumerate(result) if j != i))
        quotient = divide_exactly(x.type.size, rest)
        if quotient is None:
            raise n.refusal(f"{x.type} has no shape {wanted}: its size is no multiple of {rest} for every dim")
        result[i] = quotient
    return b.reshape(x, result)


def _flatten(b: Emitter, n: Call, x: Tensor) -> Tensor:
    rank = x.type.rank
    axis = n.attr_int("axis", 1)
    axis = axis if axis == rank else n.axis(axis, max(rank, 1))
    return b.reshape(x, flat_around(x, axis))


def flat_around(x: Tensor, axis: int) -> tuple[Size, Size]:
    """The shape of x as a matrix: axes before `axis`, and the rest."""
    return product(x.type.shape[:axis]), product(x.type.shape[axis:])


def _transpose(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.transpose(x, n.attr_ints("perm") or range(x.type.rank)[::-1])


def _parameter_axes(n: Call, axes: Tensor | None, since: int = 13) -> list[int] | None:
    """Axes: an attribute before opset `since`, an input from there on."""
    if n.opset < since:
        return n.attr_ints("axes")
    return None if axes is None else n.integers(axes)


def _squeeze(b: Emitter, n: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    given = _parameter_axes(n, axes)
    if given is None:
        for size in x.type.shape:
            if not isinstance(size, int) and interval(size, b.dims)[0] <= 1:
                raise n.refusal(f"without axes it may drop the dim {size}, which can be 1: name the axes")
        drop = tuple(i for i, s in enumerate(x.type.shape) if s == 1)
    else:
        drop = n.axes(given, x.type.rank)
    if any(x.type.shape[a] != 1 for a in drop):
        raise SourceError(f"{n}: cannot drop axes {list(drop)} of {x.type}")
    return b.reshape(x, tuple(s for i, s in enumerate(x.type.shape) if i not in drop))


def _unsqueeze(b: Emitter, n: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    given = _parameter_axes(n, axes) or []
    rank = x.type.rank + len(given)
    new = n.axes(given, rank)
    sizes = iter(x.type.shape)
    return b.reshape(x, tuple(1 if i in new else next(sizes) for i in range(rank)))


def _expand(b: Emitter, n: Call, x: Tensor, shape: Tensor) -> Tensor:
    return b.broadcast(x, broadcast_shape(x.type.shape, tuple(n.sizes(shape))))


def _tile(b: Emitter, n: Call, x: Tensor, repeats: Tensor) -> Tensor:
    counts = n.sizes(repeats)
    pairs = [(c, s) for c, s in zip(counts, x.type.shape, strict=True)]
    tall = b.broadcast(x, tuple(v for pair in pairs for v in pair), range(1, 2 * len(pairs), 2))
    return b.reshape(tall, tuple(c * s for c, s in pairs))


def _concat(b: Emitter, n: Call, *xs: Tensor) -> Tensor:
    return b.concatenate(xs, n.axis(n.attr_int("axis"), xs[0].type.rank))


def _split(b: Emitter, n: Call, x: Tensor, split: Tensor | None = None) -> list[Tensor]:
    axis = n.axis(n.attr_int("axis", 0), x.type.rank)
    total = x.type.shape[axis]
    sizes: list[Size]
    given = n.attr_ints("split") if n.opset < 13 else None if split is None else n.sizes(split)
    if given is not None:
        sizes = list(given)
    else:
        count = n.attr_int("num_outputs", n.outputs)
        each = divide_exactly(total, count)
        if each is None and not isinstance(total, int):
            raise n.refusal(f"cannot split the dim {total} into {count} equal parts: make it a multiple, or give sizes")
        if count != n.outputs:
            raise SourceError(f"{n}: {count} parts for {n.outputs} outputs")
        step = each if each is not None else ceildiv(total, count)
        sizes = [step] * (count - 1) + [total - step * (count - 1)]
    if sum(sizes[1:], sizes[0]) != total:
        raise n.misfit(f"parts {sizes} of an axis of size {total}", total, *sizes)
    parts, start = [], 0
    for size in sizes:
        parts.append(b.slice(x, axis, start, start + size))
        start = start + size
    return parts


def _slice(
    b: Emitter, n: Call, x: Tensor, starts: Tensor | None = None, ends: Tensor | None = None, axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if n.opset < 10:
        first: list[Size] = list(n.attr_ints("starts") or [])
        last: list[Size] = list(n.attr_ints("ends") or [])
        given, strides = n.attr_ints("axes"), None
    else:
        assert starts is not None and ends is not None
        first, last = n.sizes(starts), n.sizes(ends)
        given, strides = (None if p is None else n.integers(p) for p in (axes, steps))
    places = n.axes(range(len(first)) if given is None else given, x.type.rank)
    for axis, lo, hi, step in zip(places, first, last, strides or [1] * len(first), strict=True):
        x = slice_axis(b, n, x, axis, lo, hi, step)
    return x


def slice_axis(b: Emitter, n: Call, x: Tensor, axis: int, start: Size, end: Size, step: int) -> Tensor:
    """Numpy's `x[start:end:step]` of one axis, also with sizes of dims and negative steps."""
    size = x.type.shape[axis]
    if step < 0:  # x[start:end:-s] is reversed(x)[size-1-start : size-1-end : s]
        last = size - 1
        lo, hi = (_place(b, n, e, size, -1, last) for e in (start, end))
        return slice_axis(b, n, b.reverse(x, axis), axis, last - lo, last - hi, -step)
    if step == 0:
        raise SourceError(f"{n}: a slice with step 0")
    lo, hi = (_place(b, n, e, size, 0, size) for e in (start, end))
    if compare("GE", lo, hi, b.dims):
        lo = hi = 0
    return b.slice(x, axis, lo, hi, step)


def _place(b: Emitter, n: Call, place: Size, size: Size, low: Size, high: Size) -> Size:
    """A start or end: negative ones count from the axis's end, and all stop at its borders."""
    negative = compare("LT", place, 0, b.dims)
    if negative is None:
        raise n.refusal(f"the dims' bounds do not say whether the place {place} is negative")
    if negative:
        place = place + size
    lowered = b.most(place, low)
    limited = None if lowered is None else b.least(lowered, high)
    if limited is None:
        raise n.refusal(
            f"slices an axis of size {size} at {place}, and the dims' bounds do not say which is larger: narrow --dim"
        )
    return limited


def _pad(
    b: Emitter, n: Call, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
):
    rank = x.type.rank
    if n.opset < 11:
        amounts, fill = n.attr_ints("pads") or [], known(np.array(n.attr_float("value", 0.0), np.float32))
    else:
        assert pads is not None
        amounts, fill = n.integers(pads), value
    places = range(rank) if axes is None else n.axes(n.integers(axes), rank)
    low, high = [0] * rank, [0] * rank
    for i, axis in enumerate(places):
        low[axis], high[axis] = amounts[i], amounts[i + len(places)]
    mode = n.attr_string("mode", "constant")
    for axis in range(rank):  # negative padding takes elements away
        cut = [max(-v, 0) for v in (low[axis], high[axis])]
        if any(cut):
            x = b.slice(x, axis, cut[0], x.type.shape[axis] - cut[1])
    low, high = [max(v, 0) for v in low], [max(v, 0) for v in high]
    if mode == "constant":
        return _pad_constant(b, n, x, low, high, fill)
    for axis in range(rank):
        if low[axis] or high[axis]:
            x = _extend(b, n, x, axis, low[axis], high[axis], mode)
    return x


def _pad_constant(b: Emitter, n: Call, x: Tensor, low: list[int], high: list[int], fill: Tensor | None) -> Tensor:
    if fill is None:
        return b.pad(x, low, high)
    fill = b.convert(fill, x.type.dtype)
    if is_known(fill):
        return b.pad(x, low, high, n.array(fill).reshape(()).astype(object).item())
    inside = b.pad(b.scalar(True, bool_, x.type.shape), low, high)
    return b.select(inside, b.pad(x, low, high), b.reshape(fill, ()))


def _extend(b: Emitter, n: Call, x: Tensor, axis: int, low: int, high: int, mode: str) -> Tensor:
    """Padding that repeats elements of the axis."""
    size = x.type.shape[axis]
    if isinstance(size, int):
        modes = {"edge": "edge", "reflect": "reflect", "wrap": "wrap"}
        if mode not in modes:
            raise n.refusal(f"pads with mode {mode}: use constant, edge, reflect or wrap")
        n.counted(size + low + high)
        index = np.pad(np.arange(size), (low, high), mode=modes[mode])  # type: ignore[call-overload]
        return b.take(x, known(index.astype(np.int64)), axis)
    backwards = b.reverse(x, axis)
    if mode == "edge":
        first, last = b.slice(x, axis, 0, 1), b.slice(backwards, axis, 0, 1)
        wide = [tuple(count if i == axis else s for i, s in enumerate(x.type.shape)) for count in (low, high)]
        ends = [b.broadcast(first, wide[0]), b.broadcast(last, wide[1])]
    elif mode == "reflect" and compare("GT", size, max(low, high), b.dims):
        ends = [b.reverse(b.slice(x, axis, 1, 1 + low), axis), b.slice(backwards, axis, 1, 1 + high)]
    elif mode == "wrap" and compare("GE", size, max(low, high), b.dims):
        ends = [b.reverse(b.slice(backwards, axis, 0, low), axis), b.slice(x, axis, 0, high)]
    else:
        raise n.refusal(
            f"pads an axis of size {size} by {max(low, high)} with mode {mode}, and the axis can be shorter: raise the "
            f"lower bound of its dim"
        )
    parts = [p for p, count in zip((ends[0], x, ends[1]), (low, 1, high), strict=True) if count]
    return b.concatenate(parts, axis)


def _range(b: Emitter, n: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    dtype = start.type.dtype
    if all(is_known(x) for x in (start, limit, delta)):
        values = [n.array(x).reshape(()).astype(object).item() for x in (start, limit, delta)]
        count = n.counted(max(math.ceil((values[1] - values[0]) / values[2]), 0))
        array = values[0] + np.arange(count) * values[2]
        return known(np.asarray(array).astype(dtype.np))
    (lo,), (hi,), (step,) = n.sizes(start), n.sizes(limit), n.sizes(delta)
    if not isinstance(step, int) or step < 1:
        raise n.refusal(f"counts from {lo} to {hi} by {step}, and the step of a dynamic range is a positive number")
    if not compare("GE", hi, lo, b.dims):
        raise n.refusal(f"counts from {lo} to {hi}, which may be empty: narrow --dim")
    line = b.iota(i64, (ceildiv(hi - lo, step),))
    line = b.op("add", b.op("multiply", line, step), known_scalar(lo))
    return b.convert(line, dtype)


def _eye_like(b: Emitter, n: Call, x: Tensor) -> Tensor:
    dtype = dtype_of(n.attr_int("dtype"), str(n)) if n.has("dtype") else x.type.dtype
    rows, columns = (b.iota(i64, x.type.shape, axis) for axis in (0, 1))
    return b.convert(b.compare("EQ", b.op("subtract", columns, rows), n.attr_int("k", 0)), dtype)


def _trilu(b: Emitter, n: Call, x: Tensor, k: Tensor | None = None) -> Tensor:
    shape, rank = x.type.shape, x.type.rank
    matrix = shape[-2:]
    offset = b.reshape(k, ()) if k is not None else known_scalar(0)
    distance = b.op("subtract", b.iota(i64, matrix, 1), b.iota(i64, matrix, 0))
    kept = b.compare("GE" if n.attr_int("upper", 1) else "LE", distance, offset)
    return b.select(b.broadcast(kept, shape, (rank - 2, rank - 1)), x, 0)


def _depth_to_space(b: Emitter, n: Call, x: Tensor) -> Tensor:
    batch, depth, h, w = x.type.shape
    k = n.attr_int("blocksize")
    if n.attr_string("mode", "DCR") == "DCR":
        tall = b.transpose(b.reshape(x, (batch, k, k, depth // (k * k), h, w)), (0, 3, 4, 1, 5, 2))
    else:
        tall = b.transpose(b.reshape(x, (batch, depth // (k * k), k, k, h, w)), (0, 1, 4, 2, 5, 3))
    return b.reshape(tall, (batch, depth // (k * k), h * k, w * k))


def _space_to_depth(b: Emitter, n: Call, x: Tensor) -> Tensor:
    batch, depth, h, w = x.type.shape
    k = n.attr_int("blocksize")
    order = (0, 3, 5, 1, 2, 4) if n.attr_string("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    tall = b.transpose(b.reshape(x, (batch, depth, h // k, k, w // k, k)), order)
    return b.reshape(tall, (batch, depth * k * k, h // k, w // k))


def _center_crop_pad(b: Emitter, n: Call, x: Tensor, shape: Tensor) -> Tensor:
    rank = x.type.rank
    for axis, size in zip(n.axes(n.attr_ints("axes") or range(rank), rank), n.integers(shape), strict=True):
        have = x.type.shape[axis]
        if not isinstance(have, int):
            raise n.refusal(f"crops or pads the dynamic dim {have}: make it static")
        if have > size:
            start = (have - size) // 2
            x = b.slice(x, axis, start, start + size)
        elif have < size:
            low, high = [0] * rank, [0] * rank
            low[axis] = (size - have) // 2
            high[axis] = size - have - low[axis]
            x = b.pad(x, low, high)
    return x


OPS: dict[str, Row] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape,
    "Size": _size,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Range": _range,
    "EyeLike": _eye_like,
    "Trilu": _trilu,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "CenterCropPad": _center_crop_pad,
}

"""ATen operators that move elements: views, slices, joins, padding and look-ups."""

from __future__ import annotations

from typing import Any

from aotc.errors import UnsupportedError
from aotc.frontend.aten_importer import Importer, Row, axes_of, axis_of
from aotc.ir.dtypes import DTYPES, bool_
from aotc.ir.graph import Value
from aotc.ir.ops.contraction import ReduceAttrs
from aotc.ir.ops.elementwise import CompareAttrs
from aotc.ir.ops.shape import AxesAttrs, AxisAttrs, PadAttrs, PermutationAttrs, SliceAttrs
from aotc.ir.sizes import Size, product


def _view(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.reshape(x, b.shape())


def _same(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return x


def _permute(b: Importer, x: Value, axes: Any) -> Value:
    return b.emit("transpose", x, attrs=PermutationAttrs(tuple(axis_of(x, a) for a in axes)))


def _transpose(b: Importer, x: Value, a: int = 0, c: int = 1) -> Value:
    order = list(range(x.type.rank))
    if len(order) > 1:
        order[axis_of(x, a)], order[axis_of(x, c)] = order[axis_of(x, c)], order[axis_of(x, a)]
    return _permute(b, x, order)


def _expand(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.broadcast(x, b.shape())


def _slice(b: Importer, x: Value, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    axis = axis_of(x, axis)
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
    axis = axis_of(x, axis)
    size = x.type.shape[axis]
    place = index + size if index < 0 else index
    return b.reshape(_slice(b, x, axis, place, place + 1), b.shape())


def _split(b: Importer, x: Value, sizes: Any, axis: int = 0) -> list[Value]:
    total = x.type.shape[axis_of(x, axis)]
    if not isinstance(sizes, list | tuple):
        assert isinstance(total, int), "split sizes of a dynamic axis"
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)]
    parts, start = [], 0
    for size in sizes:
        parts.append(_slice(b, x, axis, start, start + size))
        start += size
    return parts


def _chunk(b: Importer, x: Value, chunks: int, axis: int = 0) -> list[Value]:
    total = x.type.shape[axis_of(x, axis)]
    assert isinstance(total, int), "chunks of a dynamic axis"
    return _split(b, x, -(-total // chunks), axis)


def _unbind(b: Importer, x: Value, axis: int = 0) -> list[Value]:
    axis = axis_of(x, axis)
    shape = tuple(s for i, s in enumerate(x.type.shape) if i != axis)
    count = x.type.shape[axis]
    assert isinstance(count, int), "unbind of a dynamic axis"
    return [b.reshape(_slice(b, x, axis, i, i + 1), shape) for i in range(count)]


def _cat(b: Importer, tensors: list[Value], axis: int = 0) -> Value:
    parts = [b.convert(t, b.dtype) for t in tensors if t.type.shape != (0,)]
    return parts[0] if len(parts) == 1 else b.emit("concatenate", *parts, attrs=AxisAttrs(axis_of(parts[0], axis)))


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


def _embedding(b: Importer, weight: Value, index: Value, *_: Any, **__: Any) -> Value:
    return b.emit("gather", weight, _inside(b, index, weight.type.shape[0]), attrs=AxisAttrs(0))


def _index_select(b: Importer, x: Value, axis: int, index: Value) -> Value:
    axis = axis_of(x, axis)
    return b.emit("gather", x, _inside(b, index, x.type.shape[axis]), attrs=AxisAttrs(axis))


def _gather(b: Importer, x: Value, axis: int, index: Value, **_: Any) -> Value:
    axis = axis_of(x, axis)
    for i, size in enumerate(index.type.shape):
        if i != axis and size != x.type.shape[i]:  # the index may cover a corner of x only
            x = _slice(b, x, i, 0, size)
    return b.emit("gather_elements", x, _inside(b, index, x.type.shape[axis]), attrs=AxisAttrs(axis))


def _inside(b: Importer, index: Value, size: Size) -> Value:
    """Places within an axis. torch raises for others; a kernel cannot, so they stop at the border."""
    if not b.clamps_indices:
        return index
    index, shape = b.convert(index, DTYPES["i64"]), index.type.shape
    last = b.emit("subtract", _length(b, size, shape), b.scalar(1, DTYPES["i64"], shape))
    return b.emit("maximum", b.emit("minimum", index, last), b.scalar(0, DTYPES["i64"], shape))


def _length(b: Importer, size: Size, shape: tuple[Size, ...]) -> Value:
    """A size as elements: a dim is counted."""
    if isinstance(size, int):
        return b.scalar(size, DTYPES["i64"], shape)
    ones = b.scalar(1, DTYPES["i64"], (size,))
    return b.broadcast(b.emit("reduce", ones, attrs=ReduceAttrs("sum", (0,))), shape)


def _index(b: Importer, x: Value, indices: list[Value | None]) -> Value:
    """x[i, :, j]: indices are broadcast, and stand where they stood if side by side, else in front."""
    taken = [i for i, index in enumerate(indices) if index is not None]
    if any(indices[i].type.dtype == bool_ for i in taken):  # type: ignore[union-attr]
        raise UnsupportedError("a mask takes as many elements as it holds, which shapes do not say: use torch.where")
    rest = [i for i in range(x.type.rank) if i not in taken]
    at = taken[0] if taken[-1] - taken[0] == len(taken) - 1 else 0
    shape, sizes = b.shape(), x.type.shape
    wide = shape[at : at + len(shape) - len(rest)]
    place = b.scalar(0, DTYPES["i64"], wide)
    for axis in taken:
        inside = b.broadcast(_inside(b, _from_front(b, indices[axis], sizes[axis]), sizes[axis]), wide)  # type: ignore[arg-type]
        place = b.emit("add", b.emit("multiply", place, _length(b, sizes[axis], wide)), inside)
    flat = (product(tuple(sizes[a] for a in taken)), *(sizes[a] for a in rest))
    found = b.emit("gather", b.reshape(_permute(b, x, [*taken, *rest]), flat), place, attrs=AxisAttrs(0))
    axes, front = list(range(len(shape))), len(wide)
    return _permute(b, found, [*axes[front : front + at], *axes[:front], *axes[front + at :]]) if at else found


def _from_front(b: Importer, index: Value, size: Size) -> Value:
    """Places from the front of an axis: negative ones count from its end."""
    index, shape = b.convert(index, DTYPES["i64"]), index.type.shape
    below = b.emit("compare", index, b.scalar(0, DTYPES["i64"], shape), attrs=CompareAttrs("LT"))
    return b.emit("select", below, b.emit("add", index, _length(b, size, shape)), index)


def _flip(b: Importer, x: Value, axes: Any) -> Value:
    return b.emit("reverse", x, attrs=AxesAttrs(axes_of(x, axes)))


ROWS: dict[str, Row] = {
    **{f"aten.{n}": _view for n in (
        "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims",
        "squeeze.default", "flatten.using_ints", "unflatten.int",
    )},
    **{f"aten.{n}": _same for n in (
        "contiguous.default", "clone.default", "alias.default", "detach.default", "dropout.default",
        "lift_fresh_copy.default", "detach_.default",
    )},
    **{f"aten.{n}": _expand for n in ("expand.default", "broadcast_to.default", "expand_as.default")},
    "aten.permute.default": _permute, "aten.transpose.int": _transpose, "aten.t.default": _transpose,
    "aten.slice.Tensor": _slice, "aten.select.int": _select, "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split, "aten.chunk.default": _chunk, "aten.unbind.int": _unbind,
    "aten.cat.default": _cat, "aten.stack.default": _stack, "aten.constant_pad_nd.default": _constant_pad,
    "aten.pad.default": _pad, "aten.embedding.default": _embedding, "aten.index_select.default": _index_select,
    "aten.gather.default": _gather, "aten.flip.default": _flip, "aten.index.Tensor": _index,
}  # fmt: skip

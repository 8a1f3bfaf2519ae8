"""Operators that read or write at computed places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.errors import SourceError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, known_scalar
from aotc.frontend.onnx.known import Tensor, is_known, known
from aotc.ir.dtypes import i64
from aotc.ir.ops.extra import ScatterAttrs
from aotc.ir.sizes import Size, product

Row = Callable[..., Tensor | Sequence[Tensor]]
_SCATTERS = {"none": "replace", "add": "sum", "mul": "product", "max": "maximum", "min": "minimum"}


def _gather(b: Emitter, n: Call, x: Tensor, index: Tensor) -> Tensor:
    axis = n.axis(n.attr_int("axis", 0), x.type.rank)
    if is_known(index) and index.type.rank == 0 and not is_known(x):  # one place: a slice
        (place,) = n.integers(index)
        size = x.type.shape[axis]
        if isinstance(size, int) and -size <= place < size:
            place %= size
            kept = tuple(s for i, s in enumerate(x.type.shape) if i != axis)
            return b.reshape(b.slice(x, axis, place, place + 1), kept)
    return b.take(x, index, axis)


def _gather_elements(b: Emitter, n: Call, x: Tensor, index: Tensor) -> Tensor:
    axis = n.axis(n.attr_int("axis", 0), x.type.rank)
    for i, (have, asked) in enumerate(zip(x.type.shape, index.type.shape, strict=True)):
        if i != axis and have != asked:  # the index may cover a corner of x only
            x = b.slice(x, i, 0, asked)
    return b.take(x, index, axis, elements=True)


def flat_index(b: Emitter, places: Sequence[Tensor], shape: Sequence[Size]) -> Tensor:
    """Row-major places in a tensor of `shape`, from one tensor of places an axis."""
    total = places[0]
    for place, size in zip(places[1:], shape[1:], strict=True):
        total = b.op("add", b.op("multiply", total, b.broadcast(known_scalar(size), total.type.shape)), place)
    return total


def _columns(b: Emitter, index: Tensor, shape: Sequence[Size]) -> list[Tensor]:
    """The places that the last axis of `index` holds, one tensor an axis of `shape`, inside it."""
    last = index.type.rank - 1
    parts = (b.slice(index, last, i, i + 1) for i in range(len(shape)))
    return [b.inside(b.reshape(p, index.type.shape[:-1]), s) for p, s in zip(parts, shape, strict=True)]


def _gather_nd(b: Emitter, n: Call, x: Tensor, index: Tensor) -> Tensor:
    batch, depth = n.attr_int("batch_dims", 0), index.type.shape[-1]
    if not isinstance(depth, int):
        raise n.refusal(f"indices of {depth} axes: make that dim static")
    indexed, rest = x.type.shape[: batch + depth], x.type.shape[batch + depth :]
    outer = index.type.shape[:-1]
    places = [b.iota(i64, outer, axis) for axis in range(batch)] + _columns(b, index, indexed[batch:])
    if not places:
        raise SourceError(f"{n}: indices of no axes")
    rows = b.reshape(x, (product(indexed), *rest))
    return b.take(rows, flat_index(b, places, indexed), 0)


def scatter(b: Emitter, x: Tensor, places: Sequence[Tensor], updates: Tensor, kind: str) -> Tensor:
    """`x` with updates at places of its leading axes: one tensor of places an axis, all of one shape."""
    depth = len(places)
    shape, rest = x.type.shape[:depth], x.type.shape[depth:]
    index = flat_index(b, places, shape)
    rows = b.reshape(x, (product(shape), *rest))
    index, updates = b.reshape(index, (index.type.size,)), b.reshape(updates, (index.type.size, *rest))
    return b.reshape(b.emit("scatter", rows, index, updates, attrs=ScatterAttrs(kind)), x.type.shape)


def _scatter_nd(b: Emitter, n: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    depth = index.type.shape[-1]
    if not isinstance(depth, int) or depth < 1:
        raise n.refusal(f"indices of {depth} axes: make it a positive number")
    kind = _SCATTERS[n.attr_string("reduction", "none")]
    return scatter(b, x, _columns(b, index, x.type.shape[:depth]), updates, kind)


def _scatter_elements(b: Emitter, n: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis = n.axis(n.attr_int("axis", 0), x.type.rank)
    shape = index.type.shape
    places = [b.inside(index, x.type.shape[axis]) if i == axis else b.iota(i64, shape, i) for i in range(x.type.rank)]
    return scatter(b, x, places, updates, _SCATTERS[n.attr_string("reduction", "none")])


def _tensor_scatter(b: Emitter, n: Call, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """Each element of the axis looks for its place in the update."""
    shape = past.type.shape
    axis = n.axis(n.attr_int("axis", -2), past.type.rank)
    line = b.iota(i64, shape, axis)
    if starts is not None:
        line = b.op("subtract", line, b.broadcast(b.convert(starts, i64), shape, (0,)))
    if n.attr_string("mode", "linear") == "circular":
        line = b.select(b.compare("LT", line, 0), b.op("add", line, known_scalar(shape[axis])), line)
    count = known_scalar(update.type.shape[axis])
    written = b.op("and", b.compare("GE", line, 0), b.compare("LT", line, count))
    return b.select(written, b.take(update, b.op("maximum", line, 0), axis, elements=True), past)


def _one_hot(b: Emitter, n: Call, index: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    (size,) = n.integers(depth)
    rank = index.type.rank + 1
    axis = n.axis(n.attr_int("axis", -1), rank)
    shape = (*index.type.shape[:axis], size, *index.type.shape[axis:])
    place = b.convert(index, i64)
    place = b.select(b.compare("LT", place, 0), b.op("add", place, size), place)
    place = b.broadcast(place, shape, [i for i in range(rank) if i != axis])
    off, on = (b.reshape(b.slice(values, 0, i, i + 1), ()) for i in range(2))
    return b.select(b.compare("EQ", b.iota(i64, shape, axis), place), on, off)


def _compress(b: Emitter, n: Call, x: Tensor, condition: Tensor) -> Tensor:
    places = np.flatnonzero(n.array(condition))
    if n.has("axis"):
        return b.take(x, known(places), n.axis(n.attr_int("axis"), x.type.rank))
    return b.take(b.reshape(x, (x.type.size,)), known(places), 0)


def _non_zero(b: Emitter, n: Call, x: Tensor) -> Tensor:
    if not is_known(x):
        raise n.refusal("counts elements at run time, so its shape is unknown: use Where or a mask instead")
    return known(np.array(np.nonzero(n.array(x)), np.int64))


def _reverse_sequence(b: Emitter, n: Call, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = (n.axis(n.attr_int(f"{name}_axis", d), x.type.rank) for name, d in (("time", 0), ("batch", 1)))
    line = b.iota(i64, x.type.shape, time)
    length = b.broadcast(b.convert(lengths, i64), x.type.shape, (batch,))
    mirrored = b.op("subtract", b.op("subtract", length, line), 1)
    return b.take(x, b.select(b.compare("LT", line, length), mirrored, line), time, elements=True)


def _max_unpool(b: Emitter, n: Call, x: Tensor, index: Tensor, output_shape: Tensor | None = None) -> Tensor:
    """Writes each maximum to its place in zeros."""
    kernel = n.attr_ints("kernel_shape") or []
    count = len(kernel)
    stride, pads = n.attr_ints("strides") or [1] * count, n.attr_ints("pads") or [0] * 2 * count
    fields = zip(x.type.shape[2:], kernel, stride, pads[:count], pads[count:], strict=True)
    shape = (*x.type.shape[:2], *((s - 1) * st + k - lo - hi for s, k, st, lo, hi in fields))
    zeros = b.scalar(0, x.type.dtype, (product(shape),))
    place = b.inside(b.reshape(index, (index.type.size,)), product(shape))
    out = b.reshape(scatter(b, zeros, [place], b.reshape(x, (x.type.size,)), "replace"), shape)
    if output_shape is None:
        return out
    more = [want - have for want, have in zip(n.sizes(output_shape), shape, strict=True)]
    if not all(isinstance(m, int) and m >= 0 for m in more):
        raise n.refusal(f"output_shape grows {list(shape)} by {more}: make it static and not smaller")
    return b.pad(out, [0] * len(more), more)  # type: ignore[arg-type]


OPS: dict[str, Row] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "OneHot": _one_hot,
    "Compress": _compress,
    "NonZero": _non_zero,
    "ReverseSequence": _reverse_sequence,
    "MaxUnpool": _max_unpool,
}

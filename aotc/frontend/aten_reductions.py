"""ATen operators that reduce, scan or order elements along axes."""

from __future__ import annotations

from typing import Any

from aotc.errors import UnsupportedError
from aotc.frontend.aten_importer import Importer, Row, axes_of, axis_of
from aotc.ir.dtypes import DTYPES, bool_
from aotc.ir.graph import Value
from aotc.ir.ops.contraction import ArgReduceAttrs, ReduceAttrs, ScanAttrs, SortAttrs, TopKAttrs
from aotc.ir.ops.shape import AxisAttrs
from aotc.ir.sizes import product


def _reduce(kind: str) -> Row:
    def row(b: Importer, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        out = b.emit("reduce", b.convert(x, b.dtype), attrs=ReduceAttrs(kind, axes_of(x, axes)))
        return b.reshape(out, b.shape())

    return row


def mean(b: Importer, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """The mean over axes, all where none is given."""
    count = product(tuple(x.type.shape[a] for a in axes_of(x, axes)))
    if not isinstance(count, int):
        raise UnsupportedError("mean over a dynamic dim: sum it and divide by its length as a tensor")
    total = _reduce("sum")(b, x, axes, keepdim)
    return b.emit("divide", total, b.scalar(count, b.dtype, total.type.shape))


def _extreme(kind: str) -> Row:
    """max and min: of all elements, or along an axis together with its place."""

    def row(b: Importer, x: Value, axis: int | None = None, keepdim: bool = False) -> Any:
        if axis is None:
            return b.emit("reduce", x, attrs=ReduceAttrs(kind, axes_of(x, None)))
        values, places = (r.shape for r in b.result)
        shape = tuple(b.size_of(s) for s in values)
        assert len(values) == len(places)
        if not x.type.rank:
            return [x, b.scalar(0, DTYPES["i64"], ())]
        axis = axis_of(x, axis)
        value = b.emit("reduce", x, attrs=ReduceAttrs(kind, (axis,)))
        place = b.emit("arg_reduce", x, attrs=ArgReduceAttrs(kind, axis))
        return [b.reshape(v, shape) for v in (value, place)]

    return row


def _logical(kind: str) -> Row:
    def row(b: Importer, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        out = b.emit("reduce", b.convert(x, bool_), attrs=ReduceAttrs(kind, axes_of(x, axes)))
        return b.reshape(b.convert(out, b.dtype), b.shape())

    return row


def _var_mean(
    b: Importer, x: Value, axes: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """The mean squared distance from the mean, over n - correction elements."""
    reduced = axes_of(x, axes)
    count = product(tuple(x.type.shape[a] for a in reduced))
    if not isinstance(count, int):
        raise UnsupportedError("variance over a dynamic dim: make it static")
    kept = tuple(1 if i in reduced else s for i, s in enumerate(x.type.shape))

    def mean(v: Value, n: float) -> Value:
        total = b.reshape(b.emit("reduce", v, attrs=ReduceAttrs("sum", reduced)), kept)
        return b.emit("divide", total, b.scalar(n, v.type.dtype, kept))

    middle = mean(x, count)
    distance = b.emit("subtract", x, b.broadcast(middle, x.type.shape))
    spread = mean(b.emit("multiply", distance, distance), max(count - (1 if correction is None else correction), 0))
    shape = kept if keepdim else tuple(s for i, s in enumerate(x.type.shape) if i not in reduced)
    return [b.reshape(v, shape) for v in (spread, middle)]


def _var(b: Importer, x: Value, axes: Any = None, **kwargs: Any) -> Value:
    return _var_mean(b, x, axes, **kwargs)[0]


def _arg(kind: str) -> Row:
    def row(b: Importer, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        flat = b.reshape(x, (x.type.size,)) if axis is None else x
        out = b.emit("arg_reduce", flat, attrs=ArgReduceAttrs(kind, axis_of(flat, axis or 0)))
        return b.reshape(out, b.shape())

    return row


def _cumulative(kind: str) -> Row:
    return lambda b, x, axis, **_: b.emit("scan", b.convert(x, b.dtype), attrs=ScanAttrs(kind, axis_of(x, axis)))


def _topk(b: Importer, x: Value, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not largest or axis_of(x, axis) != x.type.rank - 1:
        raise UnsupportedError("topk of the smallest, or not along the last axis: negate or transpose first")
    return b.emit_many("top_k", x, attrs=TopKAttrs(k))


def _sort(b: Importer, x: Value, axis: int = -1, descending: bool = False) -> Any:
    return b.emit_many("sort", x, attrs=SortAttrs(axis_of(x, axis), descending))


def _softmax(b: Importer, x: Value, axis: int, *_: Any) -> Value:
    return b.emit("softmax", b.convert(x, b.dtype), attrs=AxisAttrs(axis_of(x, axis)))


_EXTREMES = (("max", "maximum"), ("min", "minimum"))

ROWS: dict[str, Row] = {
    **{f"aten.{n}": _reduce("sum") for n in ("sum.default", "sum.dim_IntList")},
    **{f"aten.{n}": _reduce("product") for n in ("prod.default", "prod.dim_int")},
    **{f"aten.{n}": mean for n in ("mean.default", "mean.dim")},
    **{f"aten.a{n}.default": _reduce(kind) for n, kind in _EXTREMES},
    **{f"aten.arg{n}.default": _arg(kind) for n, kind in _EXTREMES},
    **{f"aten.{n}.{o}": _extreme(kind) for n, kind in _EXTREMES for o in ("default", "dim")},
    **{f"aten.{n}.{o}": _logical(k) for n, k in (("any", "or"), ("all", "and")) for o in ("default", "dim", "dims")},
    **{f"aten.{n}": _softmax for n in ("softmax.int", "_softmax.default")},
    "aten.var.correction": _var, "aten.var_mean.correction": _var_mean, "aten.cumsum.default": _cumulative("sum"),
    "aten.cumprod.default": _cumulative("product"), "aten.topk.default": _topk, "aten.sort.default": _sort,
}  # fmt: skip

"""Reductions, arg-reductions, top-k and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, known_scalar
from aotc.frontend.onnx.known import Tensor
from aotc.ir.dtypes import bool_
from aotc.ir.ops.contraction import ArgReduceAttrs, ScanAttrs, SortAttrs, TopKAttrs
from aotc.ir.sizes import product

Row = Callable[..., Tensor | Sequence[Tensor]]
Axes = tuple[int, ...]


def _axes(n: Call, x: Tensor, axes: Tensor | None, since: int) -> Axes:
    """The reduced axes: an attribute before opset `since`, an input from there on."""
    given = n.attr_ints("axes") if n.opset < since else None if axes is None else n.integers(axes)
    if given:
        return n.axes(given, x.type.rank)
    return () if n.attr_int("noop_with_empty_axes", 0) else tuple(range(x.type.rank))


def _reduction(formula: Callable[[Emitter, Tensor, Axes, bool], Tensor], since: int = 18) -> Row:
    def row(b: Emitter, n: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        reduced = _axes(n, x, axes, since)
        return b.widened(lambda v: formula(b, v, reduced, bool(n.attr_int("keepdims", 1))), x)

    return row


def _fold(kind: str) -> Callable[[Emitter, Tensor, Axes, bool], Tensor]:
    def formula(b: Emitter, x: Tensor, axes: Axes, keep: bool) -> Tensor:
        logical = {"maximum": "or", "minimum": "and"}.get(kind, kind) if x.type.dtype == bool_ else kind
        return b.reduce(logical, x, axes, keep)

    return formula


def mean(b: Emitter, x: Tensor, axes: Axes, keep: bool = True) -> Tensor:
    """The mean over axes; dynamic ones are counted at run time."""
    total = b.reduce("sum", x, axes, keep)
    count = product(tuple(x.type.shape[a] for a in axes))
    return b.op("divide", total, b.convert(known_scalar(count), x.type.dtype))


def _l1(b: Emitter, x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return b.reduce("sum", b.op("abs", x), axes, keep)


def _sum_square(b: Emitter, x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return b.reduce("sum", b.op("multiply", x, x), axes, keep)


def _l2(b: Emitter, x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return b.op("sqrt", _sum_square(b, x, axes, keep))


def _log_sum(b: Emitter, x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return b.op("log", b.reduce("sum", x, axes, keep))


def log_sum_exp(b: Emitter, x: Tensor, axes: Axes, keep: bool = True) -> Tensor:
    """log(sum(exp(x))), the maximum taken out; an infinite maximum stays in, where it would give NaN."""
    top = b.reduce("maximum", x, axes, True)
    top = b.select(b.compare("LT", b.op("abs", top), math.inf), top, 0)
    total = b.reduce("sum", b.op("exponential", b.op("subtract", x, top)), axes, True)
    out = b.op("add", b.op("log", total), top)
    return out if keep else b.reshape(out, tuple(s for i, s in enumerate(x.type.shape) if i not in axes))


def _arg(kind: str) -> Row:
    def row(b: Emitter, n: Call, x: Tensor) -> Tensor:
        axis = n.axis(n.attr_int("axis", 0), x.type.rank)
        out = b.emit("arg_reduce", x, attrs=ArgReduceAttrs(kind, axis, bool(n.attr_int("select_last_index", 0))))
        keep = n.attr_int("keepdims", 1)
        return b.reshape(out, tuple(1 if i == axis else s for i, s in enumerate(x.type.shape))) if keep else out

    return row


def _top_k(b: Emitter, n: Call, x: Tensor, k: Tensor | None = None) -> Sequence[Tensor]:
    count = n.attr_int("k") if k is None else n.integers(k)[0]
    rank = x.type.rank
    axis = n.axis(n.attr_int("axis", -1), rank)
    order = [i for i in range(rank) if i != axis] + [axis]
    back = [order.index(i) for i in range(rank)]
    last = b.transpose(x, order)
    if n.attr_int("largest", 1):
        results = b.emit_many("top_k", last, attrs=TopKAttrs(count))
    else:
        results = [b.slice(r, rank - 1, 0, count) for r in b.emit_many("sort", last, attrs=SortAttrs(rank - 1))]
    return [b.transpose(r, back) for r in results]


def _cumulative(kind: str, identity: int) -> Row:
    def row(b: Emitter, n: Call, x: Tensor, axis: Tensor) -> Tensor:
        place = n.axis(n.integers(axis)[0], x.type.rank)
        backwards = n.attr_int("reverse", 0)
        line = b.reverse(x, place) if backwards else x
        if n.attr_int("exclusive", 0):  # shifted by one, with the identity in front
            low = [int(i == place) for i in range(x.type.rank)]
            line = b.slice(b.pad(line, low, [0] * len(low), identity), place, 0, x.type.shape[place])
        out = b.emit("scan", line, attrs=ScanAttrs(kind, place))
        return b.reverse(out, place) if backwards else out

    return row


OPS: dict[str, Row] = {
    "ReduceSum": _reduction(_fold("sum"), since=13),
    "ReduceMean": _reduction(mean),
    "ReduceMax": _reduction(_fold("maximum")),
    "ReduceMin": _reduction(_fold("minimum")),
    "ReduceProd": _reduction(_fold("product")),
    "ReduceL1": _reduction(_l1),
    "ReduceL2": _reduction(_l2),
    "ReduceSumSquare": _reduction(_sum_square),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(log_sum_exp),
    "ArgMax": _arg("maximum"),
    "ArgMin": _arg("minimum"),
    "TopK": _top_k,
    "CumSum": _cumulative("sum", 0),
    "CumProd": _cumulative("product", 1),
}

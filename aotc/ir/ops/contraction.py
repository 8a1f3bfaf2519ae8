"""Ops that combine many elements into one: dot, convolution, reductions, windows, top-k, sort, scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.dtypes import i64
from aotc.ir.graph import Attrs, TensorType
from aotc.ir.ops.op import Op, require
from aotc.ir.sizes import Size, product


@dataclass(frozen=True)
class DotAttrs(Attrs):
    """StableHLO's dot_general: output axes are batch, left free, right free, in that order."""

    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReduceAttrs(Attrs):
    """`kind` is sum, product, maximum, minimum, and, or. Reduced axes vanish."""

    kind: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class ArgReduceAttrs(Attrs):
    """`kind` is maximum or minimum; the first index wins, or the last. Output i64 without the axis."""

    kind: str
    axis: int
    select_last: bool = False


@dataclass(frozen=True)
class WindowAttrs(Attrs):
    """Sliding windows over the trailing spatial axes of [N, C, spatial...]."""

    stride: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class ConvAttrs(WindowAttrs):
    """x [N, C, spatial], weight [O, C / groups, kernel]; cross-correlation, as ATen and ONNX."""

    groups: int = 1


@dataclass(frozen=True)
class PoolAttrs(WindowAttrs):
    """`kind` is sum or maximum; padding counts as 0 or as the lowest value."""

    kind: str = "maximum"
    window: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScanAttrs(Attrs):
    """Inclusive scan: `kind` is sum, product, maximum."""

    kind: str
    axis: int


@dataclass(frozen=True)
class TopKAttrs(Attrs):
    """The k largest along the last axis, descending; ties keep the lower index first."""

    k: int


@dataclass(frozen=True)
class SortAttrs(Attrs):
    """Stable sort along `axis`; outputs values and i64 indices."""

    axis: int
    descending: bool = False


def free_axes(rank: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    """The axes not listed in `taken`, in order."""
    return tuple(i for i in range(rank) if all(i not in t for t in taken))


def _dot(types: tuple[TensorType, ...], at: DotAttrs) -> tuple[TensorType, ...]:
    a, b = types
    require(a.dtype == b.dtype, f"dot_general: element types differ: {a}, {b}")
    pairs = list(zip(at.lhs_contracting + at.lhs_batch, at.rhs_contracting + at.rhs_batch, strict=True))
    require(all(a.shape[i] == b.shape[j] for i, j in pairs), f"dot_general: {a} and {b} do not fit {at}")
    shape = (
        *(a.shape[i] for i in at.lhs_batch),
        *(a.shape[i] for i in free_axes(a.rank, at.lhs_batch, at.lhs_contracting)),
        *(b.shape[i] for i in free_axes(b.rank, at.rhs_batch, at.rhs_contracting)),
    )
    return (TensorType(a.dtype, shape),)


def _dot_reference(arrays: Any, at: DotAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    a, b = arrays
    la = free_axes(a.ndim, at.lhs_batch, at.lhs_contracting)
    rb = free_axes(b.ndim, at.rhs_batch, at.rhs_contracting)
    batch = [a.shape[i] for i in at.lhs_batch]
    k = int(np.prod([a.shape[i] for i in at.lhs_contracting]))
    left = a.transpose(at.lhs_batch + la + at.lhs_contracting).reshape(*batch, -1, k)
    right = b.transpose(at.rhs_batch + at.rhs_contracting + rb).reshape(*batch, k, -1)
    if left.dtype.kind in "iu":  # integer products accumulate in 32 or 64 bits, then wrap
        left, right = left.astype(np.int64), right.astype(np.int64)
    return np.matmul(left, right).reshape(outs[0].ints)


def _dot_cost(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], at: DotAttrs) -> Size:
    return outs[0].size * product(tuple(ins[0].shape[i] for i in at.lhs_contracting)) * 2


def _windows(shape: tuple[Size, ...], kernel: tuple[Size, ...], at: WindowAttrs) -> tuple[Size, ...]:
    fields = zip(shape, kernel, at.stride, at.low, at.high, at.dilation, strict=True)
    out = tuple((s + lo + hi - ((k - 1) * d + 1)) // st + 1 for s, k, st, lo, hi, d in fields)
    require(all(not isinstance(o, int) or o > 0 for o in out), f"window {kernel} is larger than {shape}")
    return out


def _conv(types: tuple[TensorType, ...], at: ConvAttrs) -> tuple[TensorType, ...]:
    x, w = types
    require(x.dtype == w.dtype and x.rank == w.rank >= 3, f"convolution: {x} and {w} do not fit")
    require(x.shape[1] == w.shape[1] * at.groups, f"convolution: channels of {x}, {w}, groups {at.groups}")
    require(w.shape[0] % at.groups == 0, "convolution: output channels divide by groups")  # type: ignore[operator]
    return (TensorType(x.dtype, (x.shape[0], w.shape[0], *_windows(x.shape[2:], w.shape[2:], at))),)


def _patches(x: np.ndarray, kernel: tuple[int, ...], at: WindowAttrs, fill: Any) -> np.ndarray:
    """[N, C, out spatial..., kernel...] as a view of the padded input."""
    padded = np.pad(x, [(0, 0), (0, 0), *zip(at.low, at.high, strict=True)], constant_values=fill)
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, at.dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, x.ndim)))
    steps = tuple(slice(None, None, s) for s in at.stride) + tuple(slice(None, None, d) for d in at.dilation)
    return view[(slice(None), slice(None), *steps)]


def _conv_reference(arrays: Any, at: ConvAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    x, w = arrays
    n, g = x.ndim - 2, at.groups
    patches = _patches(x, w.shape[2:], at, 0)
    patches = patches.reshape(x.shape[0], g, x.shape[1] // g, *patches.shape[2:])
    weight = w.reshape(g, w.shape[0] // g, *w.shape[1:])
    spatial, kernel = "uvw"[:n], "xyz"[:n]
    out = np.einsum(f"ngc{spatial}{kernel},goc{kernel}->ngo{spatial}", patches, weight, optimize=True)
    return out.reshape(outs[0].ints)


def _conv_cost(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], _: Any) -> Size:
    return outs[0].size * product(ins[1].shape[1:]) * 2


def _reduce(types: tuple[TensorType, ...], at: ReduceAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    require(at.kind in REDUCTIONS, f"no reduction {at.kind}")
    require(all(0 <= a < x.rank for a in at.axes) and len(set(at.axes)) == len(at.axes), f"axes {at.axes} of {x}")
    return (TensorType(x.dtype, tuple(s for i, s in enumerate(x.shape) if i not in at.axes)),)


REDUCTIONS = {
    "sum": np.sum, "product": np.prod, "maximum": np.max, "minimum": np.min, "and": np.all, "or": np.any,
}  # fmt: skip


def _reduce_reference(arrays: Any, at: ReduceAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    (x,) = arrays
    if x.dtype.kind in "iu" and at.kind in ("sum", "product"):
        return REDUCTIONS[at.kind](x, axis=at.axes, dtype=x.dtype)
    if at.kind in ("maximum", "minimum") and 0 in (x.shape[a] for a in at.axes):
        return np.full(outs[0].ints, lowest(x.dtype) if at.kind == "maximum" else highest(x.dtype), x.dtype)
    return REDUCTIONS[at.kind](x, axis=at.axes)


def lowest(dtype: np.dtype) -> Any:
    """The identity of maximum."""
    return -np.inf if dtype.kind not in "iub" else (False if dtype.kind == "b" else np.iinfo(dtype).min)


def highest(dtype: np.dtype) -> Any:
    """The identity of minimum."""
    return np.inf if dtype.kind not in "iub" else (True if dtype.kind == "b" else np.iinfo(dtype).max)


def _arg_reduce_reference(arrays: Any, at: ArgReduceAttrs, _: Any) -> np.ndarray:
    (x,) = arrays
    find = np.argmax if at.kind == "maximum" else np.argmin
    if not at.select_last:
        return find(x, axis=at.axis)
    return x.shape[at.axis] - 1 - find(np.flip(x, at.axis), axis=at.axis)


def _pool(types: tuple[TensorType, ...], at: PoolAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    return (TensorType(x.dtype, (*x.shape[:2], *_windows(x.shape[2:], at.window, at))),)


def _pool_reference(arrays: Any, at: PoolAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    (x,) = arrays
    axes = tuple(range(-len(at.window), 0))
    fill = lowest(x.dtype) if at.kind == "maximum" else 0
    return REDUCTIONS[at.kind](_patches(x, at.window, at, fill), axis=axes)


def _scan_reference(arrays: Any, at: ScanAttrs, _: Any) -> np.ndarray:
    function = {"sum": np.cumsum, "product": np.cumprod, "maximum": np.maximum.accumulate}[at.kind]
    return function(arrays[0], axis=at.axis)


def _sort_types(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    return types[0], TensorType(i64, types[0].shape)


def _order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    flipped = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(flipped, axis)


def _sort_reference(arrays: Any, at: SortAttrs, _: Any) -> tuple[np.ndarray, np.ndarray]:
    order = _order(arrays[0], at.axis, at.descending)
    return np.take_along_axis(arrays[0], order, at.axis), order


def _top_k(types: tuple[TensorType, ...], at: TopKAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    last = x.shape[-1]
    require(at.k >= 0 and (not isinstance(last, int) or at.k <= last), f"top_k {at.k} of {x}")
    shape = (*x.shape[:-1], at.k)
    return TensorType(x.dtype, shape), TensorType(i64, shape)


def _top_k_reference(arrays: Any, at: TopKAttrs, _: Any) -> tuple[np.ndarray, np.ndarray]:
    order = _order(arrays[0], -1, True)[..., : at.k]
    return np.take_along_axis(arrays[0], order, -1), order


def _arg_type(types: tuple[TensorType, ...], at: ArgReduceAttrs) -> tuple[TensorType, ...]:
    return (TensorType(i64, tuple(s for i, s in enumerate(types[0].shape) if i != at.axis)),)


def _input_flops(ins: tuple[TensorType, ...], _: Any, __: Any) -> Size:
    return ins[0].size


OPS = (
    Op("dot_general", _dot, _dot_reference, DotAttrs, _dot_cost),
    Op("convolution", _conv, _conv_reference, ConvAttrs, _conv_cost),
    Op("reduce", _reduce, _reduce_reference, ReduceAttrs, _input_flops),
    Op("arg_reduce", _arg_type, _arg_reduce_reference, ArgReduceAttrs, _input_flops, exact=True),
    Op("reduce_window", _pool, _pool_reference, PoolAttrs, lambda _, o, at: o[0].size * product(at.window)),
    Op("scan", lambda t, _: (t[0],), _scan_reference, ScanAttrs),
    Op("sort", _sort_types, _sort_reference, SortAttrs, exact=True),
    Op("top_k", _top_k, _top_k_reference, TopKAttrs, exact=True),
)

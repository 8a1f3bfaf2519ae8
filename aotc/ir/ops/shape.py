"""Ops that only place elements: no arithmetic, exact in every element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.dtypes import DType
from aotc.ir.graph import Attrs, TensorType
from aotc.ir.ops.op import Op, no_flops, require
from aotc.ir.sizes import Size, ceildiv, product


@dataclass(frozen=True)
class ShapeAttrs(Attrs):
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class ConstantAttrs(Attrs):
    """A splat: every element is `value`."""

    value: float | int | bool
    dtype: DType
    shape: tuple[Size, ...] = ()


@dataclass(frozen=True)
class IotaAttrs(Attrs):
    """Element value = index along `axis`."""

    dtype: DType
    shape: tuple[Size, ...]
    axis: int = 0


@dataclass(frozen=True)
class PermutationAttrs(Attrs):
    permutation: tuple[int, ...]


@dataclass(frozen=True)
class BroadcastAttrs(Attrs):
    """Input axis i becomes output axis `axes[i]`; an input axis of size 1 is repeated."""

    shape: tuple[Size, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class SliceAttrs(Attrs):
    """Elements start, start + step, ... below limit, along each axis; steps are positive."""

    start: tuple[Size, ...]
    limit: tuple[Size, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class PadAttrs(Attrs):
    """`low` and `high` elements of `value` are added at each end (not negative)."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    value: float | int | bool = 0


@dataclass(frozen=True)
class PackingAttrs(Attrs):
    """The physical layout of the output; see `aotc.ir.packing`. None is dense, row-major."""

    packing: str | None


@dataclass(frozen=True)
class AxisAttrs(Attrs):
    axis: int


@dataclass(frozen=True)
class AxesAttrs(Attrs):
    axes: tuple[int, ...]


def _reshape(types: tuple[TensorType, ...], attrs: ShapeAttrs) -> tuple[TensorType, ...]:
    require(product(attrs.shape) == types[0].size, f"cannot reshape {types[0]} to {list(attrs.shape)}")
    return (TensorType(types[0].dtype, attrs.shape),)


def _transpose(types: tuple[TensorType, ...], attrs: PermutationAttrs) -> tuple[TensorType, ...]:
    require(sorted(attrs.permutation) == list(range(types[0].rank)), f"not a permutation: {attrs.permutation}")
    return (TensorType(types[0].dtype, tuple(types[0].shape[p] for p in attrs.permutation)),)


def _broadcast(types: tuple[TensorType, ...], attrs: BroadcastAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    require(len(attrs.axes) == x.rank and list(attrs.axes) == sorted(set(attrs.axes)), f"bad axes {attrs.axes}")
    for size, axis in zip(x.shape, attrs.axes, strict=True):
        require(size == 1 or size == attrs.shape[axis], f"cannot broadcast {x} to {list(attrs.shape)}")
    return (TensorType(x.dtype, attrs.shape),)


def _broadcast_reference(arrays: Any, attrs: BroadcastAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    (x,) = arrays
    aligned = [1] * len(outs[0].ints)
    for size, axis in zip(x.shape, attrs.axes, strict=True):
        aligned[axis] = size
    return np.broadcast_to(x.reshape(aligned), outs[0].ints)


def _slice(types: tuple[TensorType, ...], attrs: SliceAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    require(len(attrs.start) == len(attrs.limit) == len(attrs.step) == x.rank, "slice: one entry an axis")
    shape = tuple(ceildiv(hi - lo, st) for lo, hi, st in zip(attrs.start, attrs.limit, attrs.step, strict=True))
    for size, lo, hi, st in zip(x.shape, attrs.start, attrs.limit, attrs.step, strict=True):
        known = all(isinstance(v, int) for v in (size, lo, hi))
        require(st > 0 and (not known or 0 <= lo <= hi <= size), f"slice {attrs} is outside {x}")  # type: ignore[operator]
    return (TensorType(x.dtype, shape),)


def _slice_reference(arrays: Any, attrs: SliceAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    (x,) = arrays
    index = []
    for lo, step, count in zip(attrs.start, attrs.step, outs[0].ints, strict=True):
        index.append(slice(lo, lo + (count - 1) * step + 1 if count else lo, step))  # type: ignore[operator]
    return x[tuple(index)]


def _pad(types: tuple[TensorType, ...], attrs: PadAttrs) -> tuple[TensorType, ...]:
    (x,) = types
    require(len(attrs.low) == len(attrs.high) == x.rank, "pad: one entry an axis")
    require(min((*attrs.low, *attrs.high), default=0) >= 0, "pad: amounts are not negative")
    shape = tuple(s + lo + hi for s, lo, hi in zip(x.shape, attrs.low, attrs.high, strict=True))
    return (TensorType(x.dtype, shape),)


def _pad_reference(arrays: Any, attrs: PadAttrs, _: Any) -> np.ndarray:
    (x,) = arrays
    return np.pad(x, list(zip(attrs.low, attrs.high, strict=True)), constant_values=np.asarray(attrs.value, x.dtype))


def _concatenate(types: tuple[TensorType, ...], attrs: AxisAttrs) -> tuple[TensorType, ...]:
    first = types[0]
    require(0 <= attrs.axis < first.rank, f"axis {attrs.axis} of {first}")
    total: Size = 0
    for t in types:
        rest = [s for i, s in enumerate(t.shape) if i != attrs.axis]
        require(t.dtype == first.dtype, f"element types differ: {types}")
        require(rest == [s for i, s in enumerate(first.shape) if i != attrs.axis], f"shapes differ: {types}")
        total = total + t.shape[attrs.axis]
    return (TensorType(first.dtype, (*first.shape[: attrs.axis], total, *first.shape[attrs.axis + 1 :])),)


def _reverse_reference(arrays: Any, attrs: AxesAttrs, _: Any) -> np.ndarray:
    return np.flip(arrays[0], attrs.axes)


def _iota_reference(_: Any, attrs: IotaAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    shape = outs[0].ints
    line = np.arange(shape[attrs.axis]).reshape([-1 if i == attrs.axis else 1 for i in range(len(shape))])
    return np.broadcast_to(line, shape).astype(attrs.dtype.np)


OPS = (
    Op("reshape", _reshape, lambda a, _, o: np.reshape(a[0], o[0].ints), ShapeAttrs, no_flops, exact=True),
    Op(
        "transpose", _transpose, lambda a, at, _: np.transpose(a[0], at.permutation), PermutationAttrs,
        no_flops, exact=True,
    ),
    Op("broadcast_in_dim", _broadcast, _broadcast_reference, BroadcastAttrs, no_flops, exact=True),
    Op("slice", _slice, _slice_reference, SliceAttrs, no_flops, exact=True),
    Op("pad", _pad, _pad_reference, PadAttrs, no_flops, exact=True),
    Op(
        "concatenate", _concatenate, lambda a, at, _: np.concatenate(list(a), at.axis), AxisAttrs,
        no_flops, exact=True,
    ),
    Op("reverse", lambda t, _: (t[0],), _reverse_reference, AxesAttrs, no_flops, exact=True),
    Op(
        "constant", lambda _, at: (TensorType(at.dtype, at.shape),),
        lambda _, at, o: np.full(o[0].ints, at.value, at.dtype.np), ConstantAttrs, no_flops, exact=True,
    ),
    Op(
        "repack", lambda t, at: (TensorType(t[0].dtype, t[0].shape, at.packing),), lambda a, _, __: a[0], PackingAttrs,
        no_flops, exact=True,
    ),
    Op("iota", lambda _, at: (TensorType(at.dtype, at.shape),), _iota_reference, IotaAttrs, no_flops, exact=True),
)  # fmt: skip

"""Composites that kernels want whole. Each carries its decomposition into primitives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.ir.dtypes import DType, f32, register_type
from aotc.ir.graph import Attrs, TensorType, Value
from aotc.ir.ops.contraction import ReduceAttrs
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.op import Op, require
from aotc.ir.ops.shape import AxisAttrs, BroadcastAttrs, ConstantAttrs, ShapeAttrs, SliceAttrs

if TYPE_CHECKING:
    from aotc.ir.builder import Builder


@dataclass(frozen=True)
class NormAttrs(Attrs):
    """Normalises the last axis; `eps` is added to the variance. `dtype` is the output's (None: that of x)."""

    eps: float
    dtype: DType | None = None


def _norm_type(types: tuple[TensorType, ...], at: NormAttrs) -> tuple[TensorType, ...]:
    x, *parameters = types
    require(all(p.shape == x.shape[-1:] for p in parameters), f"norm parameters do not fit {x}")
    return (TensorType(at.dtype or x.dtype, x.shape),)


def _rms_norm(arrays: Any, at: NormAttrs, _: Any) -> np.ndarray:
    x, weight = arrays
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + at.eps) * weight


@dataclass(frozen=True)
class SquaresAttrs(Attrs):
    """Neighbours along the last axis whose squares are added up."""

    width: int


@dataclass(frozen=True)
class ScaleAttrs(Attrs):
    """How many squares the sums hold in all, and what is added to their mean."""

    eps: float
    size: int


def _squares_type(types: tuple[TensorType, ...], at: SquaresAttrs) -> tuple[TensorType, ...]:
    *lead, last = types[0].shape
    require(isinstance(last, int) and last % at.width == 0, f"sums of {at.width} squares do not fit {types[0]}")
    return (TensorType(f32, (*lead, last // at.width)),)  # type: ignore[operator]


def _sums_of_squares(arrays: Any, at: SquaresAttrs, _: Any) -> np.ndarray:
    (x,) = arrays
    return np.sum((x * x).reshape(*x.shape[:-1], -1, at.width), -1)


def _rms_scale(arrays: Any, at: ScaleAttrs, _: Any) -> np.ndarray:
    (sums,) = arrays
    return 1 / np.sqrt(np.sum(sums, -1) / at.size + at.eps)


def _layer_norm(arrays: Any, at: NormAttrs, _: Any) -> np.ndarray:
    x, weight, bias = arrays
    centred = x - np.mean(x, -1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + at.eps) * weight + bias


def _softmax(arrays: Any, at: AxisAttrs, _: Any) -> np.ndarray:
    (x,) = arrays
    e = np.exp(x - np.max(x, at.axis, keepdims=True))
    return e / np.sum(e, at.axis, keepdims=True)


def _rope_type(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    x, cos, sin = types
    require(x.rank == 3 and cos.shape == sin.shape == (x.shape[0], x.shape[2]), f"rope: {types}")
    return (TensorType(x.dtype, x.shape),)


def _rope(arrays: Any, _: Any, __: Any) -> np.ndarray:
    """x [tokens, heads, d], cos and sin [tokens, d]: x cos + rotate_half(x) sin (Hugging Face's halves)."""
    x, cos, sin = arrays
    half = x.shape[-1] // 2
    rotated = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None, :] + rotated * sin[:, None, :]


def _swiglu_type(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    require(len(types) == 2 and types[0] == types[1], f"swiglu: {types}")
    return (types[0],)


def _swiglu(arrays: Any, _: Any, __: Any) -> np.ndarray:
    gate, up = arrays
    return gate / (1 + np.exp(-gate)) * up


def _wide(b: Builder, x: Value) -> Value:
    return b.emit("convert", x, attrs=ConvertAttrs(register_type(x.type.dtype)))


def _normed(b: Builder, x: Value, like: Value, at: NormAttrs) -> Value:
    return b.emit("convert", x, attrs=ConvertAttrs(at.dtype or like.type.dtype))


def _narrow(b: Builder, x: Value, like: Value) -> Value:
    return b.emit("convert", x, attrs=ConvertAttrs(like.type.dtype))


def along(b: Builder, x: Value, like: Value, axes: tuple[int, ...]) -> Value:
    """`x` broadcast to the shape of `like`, its axes placed at `axes`."""
    return b.emit("broadcast_in_dim", x, attrs=BroadcastAttrs(like.type.shape, axes))


def splat(b: Builder, value: float, like: Value) -> Value:
    """A constant of the type of `like`."""
    return b.emit("constant", attrs=ConstantAttrs(value, like.type.dtype, like.type.shape))


def _row_reduce(b: Builder, kind: str, x: Value, axis: int) -> Value:
    kept = tuple(i for i in range(x.type.rank) if i != axis)
    return along(b, b.emit("reduce", x, attrs=ReduceAttrs(kind, (axis,))), x, kept)


def _row_mean(b: Builder, x: Value) -> Value:
    """The mean of the last axis, which must be a number, repeated along it."""
    last = x.type.rank - 1
    return b.emit("divide", _row_reduce(b, "sum", x, last), splat(b, float(x.type.shape[-1]), x))  # type: ignore[arg-type]


def _rms_norm_primitives(b: Builder, inputs: tuple[Value, ...], at: NormAttrs) -> Value:
    x = _wide(b, inputs[0])
    variance = _row_mean(b, b.emit("multiply", x, x))
    scale = b.emit("rsqrt", b.emit("add", variance, splat(b, at.eps, x)))
    weight = along(b, b.emit("convert", inputs[1], attrs=ConvertAttrs(x.type.dtype)), x, (x.type.rank - 1,))
    return _normed(b, b.emit("multiply", b.emit("multiply", x, scale), weight), inputs[0], at)


def _squares_primitives(b: Builder, inputs: tuple[Value, ...], at: SquaresAttrs) -> Value:
    x = b.emit("convert", inputs[0], attrs=ConvertAttrs(f32))
    *lead, last = x.type.shape
    split = b.emit("reshape", b.emit("multiply", x, x), attrs=ShapeAttrs((*lead, last // at.width, at.width)))  # type: ignore[operator]
    return b.emit("reduce", split, attrs=ReduceAttrs("sum", (x.type.rank,)))


def _scale_primitives(b: Builder, inputs: tuple[Value, ...], at: ScaleAttrs) -> Value:
    total = b.emit("reduce", inputs[0], attrs=ReduceAttrs("sum", (inputs[0].type.rank - 1,)))
    mean = b.emit("divide", total, splat(b, float(at.size), total))
    return b.emit("rsqrt", b.emit("add", mean, splat(b, at.eps, mean)))


def _layer_norm_primitives(b: Builder, inputs: tuple[Value, ...], at: NormAttrs) -> Value:
    x = _wide(b, inputs[0])
    centred = b.emit("subtract", x, _row_mean(b, x))
    variance = _row_mean(b, b.emit("multiply", centred, centred))
    scaled = b.emit("multiply", centred, b.emit("rsqrt", b.emit("add", variance, splat(b, at.eps, x))))
    wide = [b.emit("convert", p, attrs=ConvertAttrs(x.type.dtype)) for p in inputs[1:]]
    weight, bias = (along(b, p, x, (x.type.rank - 1,)) for p in wide)
    return _normed(b, b.emit("add", b.emit("multiply", scaled, weight), bias), inputs[0], at)


def _softmax_primitives(b: Builder, inputs: tuple[Value, ...], at: AxisAttrs) -> Value:
    x = _wide(b, inputs[0])
    e = b.emit("exponential", b.emit("subtract", x, _row_reduce(b, "maximum", x, at.axis)))
    return _narrow(b, b.emit("divide", e, _row_reduce(b, "sum", e, at.axis)), inputs[0])


def _rope_primitives(b: Builder, inputs: tuple[Value, ...], _: Any) -> Value:
    x = inputs[0]
    tokens, heads, d = x.type.shape
    half = d // 2
    low = b.emit("slice", x, attrs=SliceAttrs((0, 0, 0), (tokens, heads, half), (1, 1, 1)))
    high = b.emit("slice", x, attrs=SliceAttrs((0, 0, half), (tokens, heads, d), (1, 1, 1)))
    rotated = b.emit("concatenate", b.emit("negate", high), low, attrs=AxisAttrs(2))
    cos, sin = (along(b, _narrow(b, t, x), x, (0, 2)) for t in inputs[1:])
    return b.emit("add", b.emit("multiply", x, cos), b.emit("multiply", rotated, sin))


def _swiglu_primitives(b: Builder, inputs: tuple[Value, ...], _: Any) -> Value:
    gate, up = (_wide(b, v) for v in inputs)
    silu = b.emit("multiply", gate, b.emit("logistic", gate))
    return _narrow(b, b.emit("multiply", silu, up), inputs[0])


def _flops(per_element: int) -> Any:
    return lambda ins, _, __: ins[0].size * per_element


OPS = (
    Op("rms_norm", _norm_type, _rms_norm, NormAttrs, _flops(4), decompose=_rms_norm_primitives),
    Op("sums_of_squares", _squares_type, _sums_of_squares, SquaresAttrs, _flops(2), decompose=_squares_primitives),
    Op(
        "rms_scale", lambda t, _: (TensorType(f32, t[0].shape[:-1]),), _rms_scale, ScaleAttrs, _flops(1),
        decompose=_scale_primitives,
    ),
    Op("layer_norm", _norm_type, _layer_norm, NormAttrs, _flops(7), decompose=_layer_norm_primitives),
    Op("softmax", lambda t, _: (t[0],), _softmax, AxisAttrs, _flops(5), decompose=_softmax_primitives),
    Op("rope", _rope_type, _rope, Attrs, _flops(3), decompose=_rope_primitives),
    Op("swiglu", _swiglu_type, _swiglu, Attrs, _flops(5), decompose=_swiglu_primitives),
)

"""Attention of encoders: padded sequences whose tokens see all of their own sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.ir.dtypes import i32, register_type
from aotc.ir.graph import Attrs, TensorType, Value
from aotc.ir.ops.composite import along, splat
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.ops.elementwise import CompareAttrs, ConvertAttrs
from aotc.ir.ops.op import Op, require
from aotc.ir.ops.shape import AxisAttrs, IotaAttrs, PermutationAttrs, ShapeAttrs, SliceAttrs
from aotc.ir.sizes import Size

if TYPE_CHECKING:
    from aotc.ir.builder import Builder

HIDDEN = -1e30  # the score of a key that is not seen; finite, as all kernels compute with it


@dataclass(frozen=True)
class SelfAttentionAttrs(Attrs):
    """`scale` is the factor of the scores."""

    scale: float = 1.0


def _type(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    qkv, lengths = types
    require(qkv.rank == 5 and qkv.shape[2] == 3 and qkv.dtype.is_float, f"self_attention: {qkv} is no [b, t, 3, h, d]")
    require(lengths == TensorType(i32, qkv.shape[:1]), f"self_attention: {lengths} has not one i32 a sequence")
    batch, length, _three, heads, d = qkv.shape
    return (TensorType(qkv.dtype, (batch, length, heads, d)),)


def _reference(arrays: Any, at: SelfAttentionAttrs, _: Any) -> np.ndarray:
    """qkv [batch, length, 3, heads, d], lengths i32 [batch], taken as 1 .. length. Tokens past them give 0."""
    qkv, lengths = arrays
    out = np.zeros((*qkv.shape[:2], *qkv.shape[3:]), qkv.dtype)
    for row, own in enumerate(np.clip(lengths, 1, qkv.shape[1])):
        q, k, v = qkv[row, :own].transpose(1, 2, 0, 3)
        scores = np.einsum("hqd,hkd->hqk", q, k) * at.scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, :own] = np.einsum("hqk,hkd->qhd", weights / weights.sum(-1, keepdims=True), v)
    return out


def _primitives(b: Builder, inputs: tuple[Value, ...], at: SelfAttentionAttrs) -> Value:
    qkv, lengths = inputs
    batch, length, _, heads, d = qkv.type.shape

    def part(n: int) -> Value:
        """Queries, keys or values as [batch, heads, length, d], in the type to compute in."""
        bounds = SliceAttrs((0, 0, n, 0, 0), (batch, length, n + 1, heads, d), (1,) * 5)
        flat = b.emit("reshape", b.emit("slice", qkv, attrs=bounds), attrs=ShapeAttrs((batch, length, heads, d)))
        wide = b.emit("convert", flat, attrs=ConvertAttrs(register_type(qkv.type.dtype)))
        return b.emit("transpose", wide, attrs=PermutationAttrs((0, 2, 1, 3)))

    def own(like: Value, axis: int) -> Value:
        """Whether a place along an axis lies within its sequence."""
        place = b.emit("iota", attrs=IotaAttrs(i32, like.type.shape, axis))
        most = along(b, b.emit("maximum", lengths, splat(b, 1, lengths)), place, (0,))
        return b.emit("compare", place, most, attrs=CompareAttrs("LT"))

    q, k, v = (part(n) for n in range(3))
    scores = b.emit("dot_general", q, k, attrs=DotAttrs((3,), (3,), (0, 1), (0, 1)))
    scores = b.emit("multiply", scores, splat(b, at.scale, scores))
    scores = b.emit("select", own(scores, 3), scores, splat(b, HIDDEN, scores))
    weights = b.emit("softmax", scores, attrs=AxisAttrs(3))
    mixed = b.emit("dot_general", weights, v, attrs=DotAttrs((3,), (2,), (0, 1), (0, 1)))
    out = b.emit("transpose", mixed, attrs=PermutationAttrs((0, 2, 1, 3)))
    out = b.emit("select", own(out, 1), out, splat(b, 0, out))
    return b.emit("convert", out, attrs=ConvertAttrs(qkv.type.dtype))


def _cost(ins: tuple[TensorType, ...], _: Any, __: Any) -> Size:
    """Scores and their products with the values: two multiplications and two additions each."""
    batch, length, _three, heads, d = ins[0].shape
    return batch * length * length * heads * d * 4


OPS = (Op("self_attention", _type, _reference, SelfAttentionAttrs, _cost, decompose=_primitives),)

"""Quantised operators, from integer primitives: i32 accumulators, scales in f32, rounding half to even."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter
from aotc.frontend.onnx.known import Tensor
from aotc.frontend.onnx.ops_conv import channels, convolve
from aotc.frontend.onnx.ops_matmul import matmul
from aotc.frontend.onnx.tensors import dtype_of
from aotc.ir.dtypes import DTYPES, DType, f32, i32, u8

Row = Callable[..., Tensor | Sequence[Tensor]]


def _along(b: Emitter, n: Call, p: Tensor, x: Tensor) -> Tensor:
    """A scale or zero point over x: one for all, one a slice of the axis, or one a block of it."""
    if p.type.rank == 0 or (p.type.rank == 1 and p.type.shape == (1,) and not n.attr_int("block_size", 0)):
        return b.broadcast(b.reshape(p, ()), x.type.shape, ())
    axis = n.axis(n.attr_int("axis", 1), x.type.rank)
    if p.type.rank == 1:
        return b.broadcast(p, x.type.shape, (axis,))
    block = n.attr_int("block_size", 0)
    if block < 1:
        raise n.refusal(f"a scale of shape {list(p.type.shape)} needs a block_size")
    shape = p.type.shape
    tall = (*shape[: axis + 1], block, *shape[axis + 1 :])
    wide = b.broadcast(p, tall, [i for i in range(len(tall)) if i != axis + 1])
    flat = b.reshape(wide, (*shape[:axis], shape[axis] * block, *shape[axis + 1 :]))
    return b.slice(flat, axis, 0, x.type.shape[axis])


def quantise(b: Emitter, x: Tensor, zero: Tensor | None, dtype: DType) -> Tensor:
    """round(x) + zero point, saturated to `dtype`; x is scaled already, `zero` has its shape."""
    whole = b.op("round_nearest_even", x)
    if zero is not None:
        whole = b.op("add", whole, b.convert(zero, whole.type.dtype))
    return b.convert(whole, dtype)


def _quantize_linear(b: Emitter, n: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    chosen = n.attr_int("output_dtype", 0)
    dtype = zero.type.dtype if zero is not None else dtype_of(chosen, str(n)) if chosen else u8
    if not dtype.is_int:
        raise n.refusal(f"quantises to {dtype}: use an integer type")
    wide = b.convert(x, f32) if x.type.dtype != DTYPES["f64"] else x
    ratio = b.op("divide", wide, b.convert(_along(b, n, scale, x), wide.type.dtype))
    return quantise(b, ratio, None if zero is None else _along(b, n, zero, x), dtype)


def _dequantize_linear(b: Emitter, n: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    chosen = n.attr_int("output_dtype", 0)
    dtype = dtype_of(chosen, str(n)) if chosen else scale.type.dtype
    whole = b.convert(x, i32)
    if zero is not None:
        whole = b.op("subtract", whole, b.convert(_along(b, n, zero, x), i32))
    factor = b.convert(_along(b, n, scale, x), f32)
    return b.convert(b.op("multiply", b.convert(whole, f32), factor), dtype)


def _dynamic_quantize(b: Emitter, n: Call, x: Tensor) -> Sequence[Tensor]:
    """The range of x, widened to hold 0, over 255 steps."""
    axes = tuple(range(x.type.rank))
    low, high = b.op("minimum", b.reduce("minimum", x, axes), 0), b.op("maximum", b.reduce("maximum", x, axes), 0)
    scale = b.op("divide", b.op("subtract", high, low), 255)
    safe = b.select(b.compare("EQ", scale, 0), 1, scale)
    zero = b.convert(b.op("round_nearest_even", b.op("divide", b.op("negate", low), safe)), u8)
    steps = b.op("divide", x, b.broadcast(safe, x.type.shape, ()))
    return [quantise(b, steps, b.broadcast(zero, x.type.shape, ()), u8), scale, zero]


def _centred(b: Emitter, x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """x minus its zero point, in i32; a vector of zero points lies along `axis`."""
    wide = b.convert(x, i32)
    return wide if zero is None else b.op("subtract", wide, _spread(b, b.convert(zero, i32), x, axis))


def _spread(b: Emitter, p: Tensor, x: Tensor, axis: int) -> Tensor:
    if p.type.size == 1:
        return b.broadcast(b.reshape(p, ()), x.type.shape, ())
    return b.broadcast(p, x.type.shape, (axis,)) if p.type.rank == 1 else b.broadcast(p, x.type.shape)


def _matmul_integer(
    b: Emitter, n: Call, x: Tensor, y: Tensor, x_zero: Tensor | None = None, y_zero: Tensor | None = None
) -> Tensor:
    left = _centred(b, x, x_zero, max(x.type.rank - 2, 0))
    return matmul(b, left, _centred(b, y, y_zero, y.type.rank - 1))


def _conv_integer(
    b: Emitter, n: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolve(b, n, _centred(b, x, x_zero, 1), _centred(b, w, w_zero, 0))


def _requantise(b: Emitter, total: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """An i32 accumulator times a scale of its shape, in the type of the zero point."""
    scaled = b.op("multiply", b.convert(total, f32), scale)
    return quantise(b, scaled, b.broadcast(b.reshape(zero, ()), total.type.shape, ()), zero.type.dtype)


def _qlinear_matmul(
    b: Emitter, n: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor, y: Tensor, y_scale: Tensor, y_zero: Tensor,
    scale: Tensor, zero: Tensor,
) -> Tensor:  # fmt: skip
    total = _matmul_integer(b, n, x, y, x_zero, y_zero)
    rank = total.type.rank
    rows = _spread(b, b.convert(x_scale, f32), total, max(rank - 2, 0))
    columns = _spread(b, b.convert(y_scale, f32), total, rank - 1)
    factor = b.op("divide", b.op("multiply", rows, columns), b.reshape(b.convert(scale, f32), ()))
    return _requantise(b, total, factor, zero)


def _qlinear_conv(
    b: Emitter, n: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
    scale: Tensor, zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = _conv_integer(b, n, x, w, x_zero, w_zero)
    if bias is not None:
        total = b.op("add", total, channels(b, bias, total))
    factor = b.op("divide", b.op("multiply", x_scale, w_scale), scale)
    return _requantise(b, total, _spread(b, factor, total, 1), zero)


OPS: dict[str, Row] = {
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": _dequantize_linear,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
}

"""Normalisations and softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter
from aotc.frontend.onnx.known import Tensor
from aotc.frontend.onnx.ops_conv import channels
from aotc.frontend.onnx.ops_reduce import log_sum_exp, mean
from aotc.frontend.onnx.ops_shape import flat_around
from aotc.frontend.onnx.tensors import dtype_of
from aotc.ir.dtypes import i64
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import ArgReduceAttrs, PoolAttrs
from aotc.ir.ops.shape import AxisAttrs
from aotc.ir.sizes import product

Row = Callable[..., Tensor | Sequence[Tensor]]


def _softmax_like(along: Callable[[Emitter, Tensor, int], Tensor]) -> Row:
    """Along one axis since opset 13; before, over all axes from `axis` on, flattened."""

    def row(b: Emitter, n: Call, x: Tensor) -> Tensor:
        axis = n.axis(n.attr_int("axis", 1 if n.opset < 13 else -1), x.type.rank)
        if n.opset >= 13 or axis == x.type.rank - 1:
            return along(b, x, axis)
        return b.reshape(along(b, b.reshape(x, flat_around(x, axis)), 1), x.type.shape)

    return row


def softmax(b: Emitter, x: Tensor, axis: int) -> Tensor:
    """exp(x) over its sum along one axis."""
    return b.emit("softmax", x, attrs=AxisAttrs(axis))


def log_softmax(b: Emitter, x: Tensor, axis: int) -> Tensor:
    """The logarithm of softmax, without the loss of small values."""
    return b.widened(lambda v: b.op("subtract", v, log_sum_exp(b, v, (axis,))), x)


def _hardmax(b: Emitter, x: Tensor, axis: int) -> Tensor:
    best = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", axis))
    best = b.reshape(best, tuple(1 if i == axis else s for i, s in enumerate(x.type.shape)))
    return b.convert(b.compare("EQ", b.iota(i64, x.type.shape, axis), best), x.type.dtype)


def _batch_norm(b: Emitter, n: Call, x: Tensor, scale: Tensor, bias: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    """x * a + c with a = scale / sqrt(variance + epsilon): known parameters leave one product and one sum."""
    if n.attr_int("training_mode", 0) or n.wants(1) or not n.attr_int("spatial", 1):
        raise n.refusal("runs in training mode or without spatial: export the model for inference")

    def normed(v: Tensor, *parameters: Tensor) -> Tensor:
        gain, shift, centre, spread = (b.convert(p, v.type.dtype) for p in parameters)
        factor = b.op("multiply", gain, b.op("rsqrt", b.op("add", spread, n.attr_float("epsilon", 1e-5))))
        offset = b.op("subtract", shift, b.op("multiply", centre, factor))
        return b.op("add", b.op("multiply", v, channels(b, factor, v)), channels(b, offset, v))

    return b.widened(normed, x, scale, bias, means, variance)


def _standardise(b: Emitter, x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + epsilon), the mean, and the factor."""
    middle = mean(b, x, axes)
    centred = b.op("subtract", x, middle)
    variance = mean(b, b.op("multiply", centred, centred), axes)
    factor = b.op("rsqrt", b.op("add", variance, epsilon))
    return b.op("multiply", centred, factor), middle, factor


def _instance_norm(b: Emitter, n: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    def normed(v: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        out, _, _ = _standardise(b, v, tuple(range(2, v.type.rank)), n.attr_float("epsilon", 1e-5))
        return b.op("add", b.op("multiply", out, channels(b, gain, v)), channels(b, shift, v))

    return b.widened(normed, x, scale, bias)


def _group_norm(b: Emitter, n: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = n.attr_int("num_groups")
    batch, depth, *spatial = x.type.shape
    if not isinstance(depth, int) or depth % groups:
        raise n.misfit(f"{depth} channels in {groups} groups", depth)
    rows = (batch, groups, product((depth // groups, *spatial)))

    def normed(v: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        out, _, _ = _standardise(b, b.reshape(v, rows), (2,), n.attr_float("epsilon", 1e-5))
        if n.opset < 21:  # one scale and bias a group
            gain, shift = (b.broadcast(p, rows, (1,)) for p in (gain, shift))
            return b.reshape(b.op("add", b.op("multiply", out, gain), shift), v.type.shape)
        out = b.reshape(out, v.type.shape)
        return b.op("add", b.op("multiply", out, channels(b, gain, v)), channels(b, shift, v))

    return b.widened(normed, x, scale, bias)


def _layer_norm(b: Emitter, n: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Sequence[Tensor]:
    axis = n.axis(n.attr_int("axis", -1), x.type.rank)
    epsilon = n.attr_float("epsilon", 1e-5)
    whole = _whole_rows(x, axis, scale, bias)
    if whole is not None and not (n.wants(1) or n.wants(2)):
        flat = b.reshape(x, (*x.type.shape[:axis], whole))
        gain = b.reshape(scale, (whole,))
        shift = b.scalar(0, x.type.dtype, (whole,)) if bias is None else b.reshape(bias, (whole,))
        return [b.reshape(b.emit("layer_norm", flat, gain, shift, attrs=NormAttrs(epsilon)), x.type.shape)]
    wide = dtype_of(n.attr_int("stash_type", 1), str(n))
    out, middle, factor = _standardise(b, b.convert(x, wide), tuple(range(axis, x.type.rank)), epsilon)
    out = b.op("multiply", b.convert(out, x.type.dtype), scale)
    return [out if bias is None else b.op("add", out, bias), middle, factor]


def _rms_norm(b: Emitter, n: Call, x: Tensor, scale: Tensor) -> Tensor:
    axis = n.axis(n.attr_int("axis", -1), x.type.rank)
    epsilon = n.attr_float("epsilon", 1e-5)
    whole = _whole_rows(x, axis, scale, None)
    if whole is not None:
        flat = b.reshape(x, (*x.type.shape[:axis], whole))
        return b.reshape(b.emit("rms_norm", flat, b.reshape(scale, (whole,)), attrs=NormAttrs(epsilon)), x.type.shape)
    wide = b.convert(x, dtype_of(n.attr_int("stash_type", 1), str(n)))
    square = mean(b, b.op("multiply", wide, wide), tuple(range(axis, x.type.rank)))
    out = b.op("multiply", wide, b.op("rsqrt", b.op("add", square, epsilon)))
    return b.op("multiply", b.convert(out, scale.type.dtype), scale)


def _whole_rows(x: Tensor, axis: int, scale: Tensor, bias: Tensor | None) -> int | None:
    """The elements of a normalised row, where they are a number and the parameters have one each."""
    rows = x.type.shape[axis:]
    size = product(rows)
    fits = all(p is None or (p.type.shape == rows and p.type.dtype == x.type.dtype) for p in (scale, bias))
    return size if isinstance(size, int) and fits else None


def _mean_variance(b: Emitter, n: Call, x: Tensor) -> Tensor:
    """(x - mean) / (standard deviation + 1e-9), as the standard's function body has it."""
    axes = n.axes(n.attr_ints("axes") or [0, 2, 3], x.type.rank)
    square_of_mean = b.op("multiply", *[mean(b, x, axes)] * 2)
    deviation = b.op("sqrt", b.op("subtract", mean(b, b.op("multiply", x, x), axes), square_of_mean))
    return b.op("divide", b.op("subtract", x, mean(b, x, axes)), b.op("add", deviation, 1e-9))


def _lp_norm(b: Emitter, n: Call, x: Tensor) -> Tensor:
    """x over its norm; a zero vector stays zero."""
    axis = n.axis(n.attr_int("axis", -1), x.type.rank)
    size = b.op("abs", x) if n.attr_int("p", 2) == 1 else b.op("multiply", x, x)
    norm = b.reduce("sum", size, (axis,), True)
    norm = norm if n.attr_int("p", 2) == 1 else b.op("sqrt", norm)
    return b.op("divide", x, b.select(b.compare("EQ", norm, 0), 1, norm))


def _lrn(b: Emitter, n: Call, x: Tensor) -> Tensor:
    """Local response normalisation: windows over the channels."""
    batch, depth, *spatial = x.type.shape
    size = n.attr_int("size")
    low = (size - 1) // 2
    rows = b.reshape(b.op("multiply", x, x), (batch, 1, depth, product(tuple(spatial))))
    attrs = PoolAttrs((1, 1), (low, 0), (size - 1 - low, 0), (1, 1), "sum", (size, 1))
    total = b.reshape(b.emit("reduce_window", rows, attrs=attrs), x.type.shape)
    scaled = b.op("multiply", total, n.attr_float("alpha", 0.0001) / size)
    base = b.op("add", scaled, n.attr_float("bias", 1.0))
    return b.op("divide", x, b.op("power", base, n.attr_float("beta", 0.75)))


OPS: dict[str, Row] = {
    "Softmax": _softmax_like(softmax),
    "LogSoftmax": _softmax_like(log_softmax),
    "Hardmax": _softmax_like(_hardmax),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LpNormalization": _lp_norm,
    "LRN": _lrn,
}

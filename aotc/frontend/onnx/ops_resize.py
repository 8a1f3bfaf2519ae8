"""Resize and Upsample: one axis at a time, by a gather of neighbours and their weights.

Coordinates and weights are computed by IR ops in f64: for static sizes they fold into constants, for dynamic ones
they stay in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, known_scalar
from aotc.frontend.onnx.known import Tensor
from aotc.ir.dtypes import f32, f64, i64
from aotc.ir.ops.shape import AxisAttrs
from aotc.ir.sizes import Size

Row = Callable[..., Tensor]


class Stretch(NamedTuple):
    """How one axis is resized: output size, scale (f64 scalar or number), real-valued output length, crop."""

    axis: int
    size: Size
    scale: Tensor | float
    length: Tensor | float
    crop: tuple[float, float]


def _resize(
    b: Emitter, n: Call, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    if n.opset < 11:  # Resize 10 and Upsample have no region
        roi, scales = None, roi
    rank = x.type.rank
    axes = n.axes(n.attr_ints("axes") or range(rank), rank)
    crops = [0.0] * len(axes) + [1.0] * len(axes)
    if n.attr_string("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        if roi is None:
            raise n.refusal("tf_crop_and_resize needs a region")
        crops = [float(v) for v in n.array(roi).flat]
    crop = list(zip(crops[: len(axes)], crops[len(axes) :], strict=True))
    if sizes is not None and sizes.type.size != 0:
        stretches = _by_sizes(b, n, x, axes, n.sizes(sizes), crop)
    else:
        factors = n.attr_floats("scales") if scales is None else [float(v) for v in n.array(scales).flat]
        stretches = [_by_scale(b, x, a, f, c) for a, f, c in zip(axes, factors or [], crop, strict=True)]
    dtype = x.type.dtype
    for stretch in stretches:
        x = _stretch(b, n, x, stretch)
    if x.type.dtype != dtype:
        x = b.convert(x if dtype.is_float else b.op("round_nearest_even", x), dtype)
    return x


def _by_scale(b: Emitter, x: Tensor, axis: int, scale: float, crop: tuple[float, float]) -> Stretch:
    size = x.type.shape[axis]
    if isinstance(size, int):
        return Stretch(axis, math.floor(size * scale), scale, size * scale, crop)
    ratio = Fraction(scale).limit_denominator(1 << 12)
    length = b.op("multiply", _count(b, size), scale)
    return Stretch(axis, size * ratio.numerator // ratio.denominator, scale, length, crop)


def _by_sizes(b: Emitter, n: Call, x: Tensor, axes, sizes: list[Size], crops) -> list[Stretch]:
    policy = n.attr_string("keep_aspect_ratio_policy", "stretch")
    have = [x.type.shape[a] for a in axes]
    if policy == "stretch":
        ratios = [b.op("divide", _count(b, s), _count(b, h)) for s, h in zip(sizes, have, strict=True)]
        lengths = [_count(b, s) for s in sizes]
        return [Stretch(*fields) for fields in zip(axes, sizes, ratios, lengths, crops, strict=True)]
    if not all(isinstance(s, int) for s in (*have, *sizes)):
        raise n.refusal(f"{policy} of dynamic sizes: make the dims static")
    pick = min if policy == "not_larger" else max
    scale = pick(s / h for s, h in zip(sizes, have, strict=True))  # type: ignore[operator]
    return [
        Stretch(a, int(scale * h + 0.5), scale, scale * h, c)  # type: ignore[operator]
        for a, h, c in zip(axes, have, crops, strict=True)
    ]


def _count(b: Emitter, size: Size) -> Tensor:
    """A size as an f64 scalar."""
    return b.convert(known_scalar(size), f64)


def _stretch(b: Emitter, n: Call, x: Tensor, to: Stretch) -> Tensor:
    mode = n.attr_string("coordinate_transformation_mode", "half_pixel" if n.opset >= 11 else "asymmetric")
    size = x.type.shape[to.axis]
    if size == to.size and to.crop == (0, 1) and (not isinstance(to.scale, float) or to.scale == 1):
        return x
    source = _source(b, n, mode, size, to)
    interpolation = n.attr_string("mode", "nearest")
    if interpolation == "nearest":
        rounding = n.attr_string("nearest_mode", "round_prefer_floor" if n.opset >= 11 else "floor")
        index = _inside(b, _rounded(b, rounding, source), size)
        out = b.emit("gather", x, index, attrs=AxisAttrs(to.axis))
    else:
        out = _weighted(b, n, x, to, source, interpolation)
    if mode != "tf_crop_and_resize":
        return out
    last = b.op("subtract", _count(b, size), 1)
    outside = b.op("or", b.compare("LT", source, 0), b.compare("GT", source, last))
    outside = b.broadcast(outside, out.type.shape, (to.axis,))
    return b.select(outside, n.attr_float("extrapolation_value", 0.0), out)


def _source(b: Emitter, n: Call, mode: str, size: Size, to: Stretch) -> Tensor:
    """The place in the input of each output element, f64 [output size]."""
    line = b.iota(f64, (to.size,))
    if mode == "asymmetric":
        return b.op("divide", line, to.scale)
    if mode in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"):
        source = b.op("subtract", b.op("divide", b.op("add", line, 0.5), to.scale), 0.5)
        if mode == "pytorch_half_pixel" and to.size == 1:
            return b.scalar(0.0, f64, (1,))
        if mode == "half_pixel_symmetric":
            gap = b.op("subtract", 1.0, b.op("divide", _count(b, to.size), to.length))
            source = b.op("add", source, b.op("multiply", gap, b.op("divide", _count(b, size), 2.0)))
        return source
    last = b.op("subtract", _count(b, size), 1)
    start, end = to.crop if mode == "tf_crop_and_resize" else (0.0, 1.0)
    if mode not in ("align_corners", "tf_crop_and_resize"):
        raise n.refusal(f"coordinate_transformation_mode {mode} is not known")
    if to.size == 1:
        middle = 0.5 * (start + end) if mode == "tf_crop_and_resize" else 0.0
        return b.broadcast(b.op("multiply", last, middle), (1,), ())
    step = b.op("divide", b.op("multiply", last, end - start), _minus_one(b, to.length))
    return b.op("add", b.op("multiply", line, step), b.op("multiply", last, start))


def _minus_one(b: Emitter, length: Tensor | float) -> Tensor:
    return b.scalar(length - 1, f64) if isinstance(length, float | int) else b.op("subtract", length, 1)


def _rounded(b: Emitter, rounding: str, source: Tensor) -> Tensor:
    if rounding in ("floor", "ceil"):
        return b.op(rounding, source)
    if rounding == "round_prefer_floor":
        return b.op("ceil", b.op("subtract", source, 0.5))
    return b.op("floor", b.op("add", source, 0.5))


def _inside(b: Emitter, place: Tensor, size: Size) -> Tensor:
    """Places as indices, those outside moved to the border."""
    last = b.op("subtract", known_scalar(size), 1)
    return b.op("maximum", b.op("minimum", b.convert(place, i64), last), 0)


def _weighted(b: Emitter, n: Call, x: Tensor, to: Stretch, source: Tensor, interpolation: str) -> Tensor:
    """The sum of neighbours times the kernel at their distances."""
    reach, shrink = 2 if interpolation == "cubic" else 1, 1.0
    if n.attr_int("antialias", 0):
        scale = to.scale if isinstance(to.scale, float) else float(n.array(to.scale).reshape(()))  # type: ignore[arg-type]
        shrink = min(scale, 1.0)
    half = math.ceil(reach / shrink)
    size = x.type.shape[to.axis]
    grid = (to.size, 2 * half)
    first = b.op("subtract", b.op("floor", source), half - 1)
    place = b.op("add", b.broadcast(first, grid, (0,)), b.iota(f64, grid, 1))
    distance = b.op("abs", b.op("subtract", b.broadcast(source, grid, (0,)), place))
    distance = b.op("multiply", distance, shrink)
    weight = (
        _linear(b, distance) if interpolation == "linear" else _cubic(b, distance, n.attr_float("cubic_coeff_a", -0.75))
    )
    if n.attr_int("exclude_outside", 0):
        inside = b.op("and", b.compare("GE", place, 0), b.compare("LT", place, _count(b, size)))
        weight = b.select(inside, weight, 0)
    if n.attr_int("exclude_outside", 0) or shrink < 1:
        weight = b.op("divide", weight, b.reduce("sum", weight, (1,), True))
    wide = x if x.type.dtype.is_float and x.type.dtype.itemsize > 2 else b.convert(x, f32)
    parts = b.emit("gather", wide, _inside(b, place, size), attrs=AxisAttrs(to.axis))
    weight = b.convert(weight, wide.type.dtype)
    scaled = b.op("multiply", parts, b.broadcast(weight, parts.type.shape, (to.axis, to.axis + 1)))
    return b.reduce("sum", scaled, (to.axis + 1,))


def _linear(b: Emitter, distance: Tensor) -> Tensor:
    return b.op("maximum", b.op("subtract", 1.0, distance), 0)


def _cubic(b: Emitter, d: Tensor, a: float) -> Tensor:
    """Keys' kernel (1981): two cubics, for distances up to 1 and up to 2."""

    def polynomial(*coefficients: float) -> Tensor:
        total: Tensor = b.scalar(coefficients[0], f64, d.type.shape)
        for c in coefficients[1:]:
            total = b.op("add", b.op("multiply", total, d), c)
        return total

    near, far = polynomial(a + 2, -(a + 3), 0, 1), polynomial(a, -5 * a, 8 * a, -4 * a)
    return b.select(b.compare("LE", d, 1), near, b.select(b.compare("LT", d, 2), far, 0))


OPS: dict[str, Row] = {"Resize": _resize, "Upsample": _resize}

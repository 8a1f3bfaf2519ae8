"""ATen operators that compute each element on its own, and those that make tensors of numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from aotc.frontend.aten_importer import Importer, Row, dtype_of, torch_dtype
from aotc.ir.dtypes import DTYPES, bool_
from aotc.ir.graph import Value
from aotc.ir.ops.elementwise import CompareAttrs
from aotc.ir.ops.shape import IotaAttrs


def _elementwise(op: str) -> Row:
    return lambda b, *args, **kwargs: b.emit(op, *b.operands(args, b.dtype))


def _compare(direction: str) -> Row:
    def row(b: Importer, x: Value, y: Any) -> Value:
        wide = x.type.dtype
        if isinstance(y, Value) and y.type.dtype != wide:
            wide = dtype_of(torch.promote_types(torch_dtype(wide), torch_dtype(y.type.dtype)))
        elif isinstance(y, float) and not wide.is_float:
            wide = DTYPES["f32"]
        return b.emit("compare", *b.operands((x, y), wide), attrs=CompareAttrs(direction))

    return row


def _scaled(op: str) -> Row:
    """add and sub have a factor on the second argument."""

    def row(b: Importer, x: Any, y: Any, alpha: float = 1) -> Value:
        left, right = b.operands((x, y), b.dtype)
        if alpha != 1:
            right = b.emit("multiply", right, b.scalar(alpha, b.dtype, right.type.shape))
        return b.emit(op, left, right)

    return row


def _rsub(b: Importer, x: Value, y: Any, alpha: float = 1) -> Value:
    return _scaled("subtract")(b, y, x, alpha=alpha)


def _pow(b: Importer, x: Any, exponent: Any) -> Value:
    """Squares, and roots of one half, have exact forms."""
    if isinstance(exponent, int | float) and exponent in (2, 0.5, -0.5, 1):
        (wide,) = b.operands((x,), b.dtype)
        if exponent == 2:
            return b.emit("multiply", wide, wide)
        return wide if exponent == 1 else b.emit("sqrt" if exponent == 0.5 else "rsqrt", wide)
    return b.emit("power", *b.operands((x, exponent), b.dtype))


def _sign(b: Importer, x: Value) -> Value:
    """torch's sign of NaN is 0."""
    out = b.emit("sign", x)
    if not x.type.dtype.is_float:
        return out
    return b.emit("select", _is_nan(b, x), b.scalar(0, x.type.dtype, x.type.shape), out)


def _reciprocal(b: Importer, x: Value) -> Value:
    one, value = b.operands((1, x), b.dtype)
    return b.emit("divide", one, value)


def _remainder(b: Importer, x: Any, y: Any) -> Value:
    """Python's: its sign is the divisor's."""
    left, right = b.operands((x, y), b.dtype)
    rest, zero = b.emit("remainder", left, right), b.scalar(0, b.dtype, left.type.shape)
    below = [b.emit("compare", v, zero, attrs=CompareAttrs("LT")) for v in (rest, right)]
    wraps = b.emit("and", b.emit("xor", *below), b.emit("compare", rest, zero, attrs=CompareAttrs("NE")))
    return b.emit("select", wraps, b.emit("add", rest, right), rest)


def _divide(b: Importer, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    """Quotients cut toward zero (trunc) or down (floor): what is left after the remainder divides exactly."""
    left, right = b.operands((x, y), b.dtype)
    quotient = b.emit("divide", left, right)
    if rounding_mode is None or (rounding_mode == "trunc" and not b.dtype.is_float):  # that of integers is C's
        return quotient
    if rounding_mode == "trunc":
        return b.emit("trunc", quotient)
    exact = b.emit("divide", b.emit("subtract", left, _remainder(b, x, y)), right)
    if not b.dtype.is_float:
        return exact
    zero = b.emit("compare", right, b.scalar(0, b.dtype, right.type.shape), attrs=CompareAttrs("EQ"))
    return b.emit("select", zero, quotient, b.emit("round_nearest_even", exact))


def _logarithm(base: float) -> Row:
    def row(b: Importer, x: Value) -> Value:
        (wide,) = b.operands((x,), b.dtype)
        return b.emit("multiply", b.emit("log", wide), b.scalar(1 / math.log(base), b.dtype, wide.type.shape))

    return row


def _exp2(b: Importer, x: Value) -> Value:
    return b.emit("power", *b.operands((2, x), b.dtype))


def _is_nan(b: Importer, x: Value) -> Value:
    return b.emit("compare", x, x, attrs=CompareAttrs("NE"))


def _relu(b: Importer, x: Value) -> Value:
    return b.emit("maximum", x, b.scalar(0, x.type.dtype, x.type.shape))


def _silu(b: Importer, x: Value) -> Value:
    return b.emit("multiply", x, b.emit("logistic", x))


def _gelu(b: Importer, x: Value, *, approximate: str = "none") -> Value:
    def number(v: float) -> Value:
        return b.scalar(v, x.type.dtype, x.type.shape)

    if approximate == "tanh":
        cube = b.emit("multiply", b.emit("multiply", x, x), x)
        inner = b.emit("add", x, b.emit("multiply", cube, number(0.044715)))
        bend = b.emit("tanh", b.emit("multiply", inner, number(math.sqrt(2 / math.pi))))
    else:
        bend = b.emit("erf", b.emit("multiply", x, number(math.sqrt(0.5))))
    return b.emit("multiply", b.emit("multiply", x, number(0.5)), b.emit("add", bend, number(1.0)))


def _clamp(b: Importer, x: Value, low: Any = None, high: Any = None) -> Value:
    out = b.convert(x, b.dtype)
    for bound, op in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            out = b.emit(op, *b.operands((out, bound), b.dtype))
    return out


def _where(b: Importer, condition: Value, x: Any, y: Any) -> Value:
    (mask,) = b.operands((condition,), bool_)
    return b.emit("select", mask, *b.operands((x, y), b.dtype))


def _masked_fill(b: Importer, x: Value, mask: Value, value: Any) -> Value:
    return _where(b, mask, value, x)


def _to(b: Importer, x: Value, *_: Any, **__: Any) -> Value:
    return b.convert(x, b.dtype)


def _copy(b: Importer, x: Value, source: Value, *_: Any) -> Value:
    return b.broadcast(b.convert(source, b.dtype), b.shape())


def _filled(value_at: int | float) -> Row:
    return lambda b, *args, **kwargs: b.scalar(value_at, b.dtype, b.shape())


def _scalar_tensor(b: Importer, value: Any, **_: Any) -> Value:
    return b.scalar(value, b.dtype, b.shape())


def _full_value(b: Importer, _: Any, value: Any, **__: Any) -> Value:
    return b.scalar(value, b.dtype, b.shape())


def _arange(b: Importer, *bounds: Any, **_: Any) -> Value:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    out = b.emit("iota", attrs=IotaAttrs(b.dtype, b.shape(), 0))
    for op, number in (("multiply", step), ("add", start)):
        if number != (1 if op == "multiply" else 0):
            out = b.emit(op, out, b.scalar(number, b.dtype, out.type.shape))
    return out


_UNARY = {
    "neg": "negate", "abs": "abs", "exp": "exponential", "expm1": "exponential_minus_one",
    "log": "log", "log1p": "log_plus_one", "sqrt": "sqrt", "rsqrt": "rsqrt", "erf": "erf", "sigmoid": "logistic",
    "sin": "sine", "cos": "cosine", "tan": "tan", "tanh": "tanh", "asin": "asin", "acos": "acos", "atan": "atan",
    "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "floor": "floor",
    "ceil": "ceil", "round": "round_nearest_even", "trunc": "trunc", "bitwise_not": "not", "logical_not": "not",
}  # fmt: skip


_BINARY = {
    "mul": "multiply", "div": "divide", "fmod": "remainder", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip


_COMPARE = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}

ROWS: dict[str, Row] = {
    **{f"aten.{name}.default": _elementwise(op) for name, op in _UNARY.items()},
    **{f"aten.{n}.{o}": _elementwise(op) for n, op in _BINARY.items() for o in ("Tensor", "Scalar")},
    **{f"aten.{n}.default": _elementwise(n) for n in ("maximum", "minimum", "atan2")},
    **{f"aten.logical_{n}.default": _elementwise(n) for n in ("and", "or", "xor")},
    **{f"aten.{n}.{o}": _compare(d) for n, d in _COMPARE.items() for o in ("Tensor", "Scalar")},
    **{f"aten.add.{o}": _scaled("add") for o in ("Tensor", "Scalar")},
    **{f"aten.sub.{o}": _scaled("subtract") for o in ("Tensor", "Scalar")},
    **{f"aten.rsub.{o}": _rsub for o in ("Tensor", "Scalar")},
    **{f"aten.pow.{o}": _pow for o in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    **{f"aten.clamp.{o}": _clamp for o in ("default", "Tensor")},
    **{f"aten.to.{o}": _to for o in ("dtype", "dtype_layout", "device")},
    **{f"aten.{n}": _filled(0) for n in ("zeros.default", "zeros_like.default")},
    **{f"aten.{n}": _filled(1) for n in ("ones.default", "ones_like.default")},
    **{f"aten.{n}": _full_value for n in ("full.default", "full_like.default")},
    **{f"aten.arange.{o}": _arange for o in ("default", "start", "start_step")},
    **{f"aten.remainder.{o}": _remainder for o in ("Tensor", "Scalar")},
    **{f"aten.div.{o}": _divide for o in ("Tensor_mode", "Scalar_mode")},
    "aten.log2.default": _logarithm(2), "aten.log10.default": _logarithm(10), "aten.exp2.default": _exp2,
    "aten.isnan.default": _is_nan, "aten.scalar_tensor.default": _scalar_tensor,
    "aten._to_copy.default": _to, "aten.copy.default": _copy, "aten.reciprocal.default": _reciprocal, "aten.sign.default": _sign,
    "aten.relu.default": _relu, "aten.silu.default": _silu, "aten.gelu.default": _gelu, "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
}  # fmt: skip

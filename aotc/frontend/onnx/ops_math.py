"""Elementwise operators: arithmetic, comparisons, logic, casts and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter
from aotc.frontend.onnx.known import Tensor, is_known
from aotc.frontend.onnx.tensors import dtype_of
from aotc.ir.dtypes import DTYPES, bool_

Row = Callable[..., Tensor]


def _elementwise(op: str) -> Row:
    return lambda b, n, *xs: b.op(op, *xs)


def _variadic(op: str) -> Row:
    return lambda b, n, *xs: reduce(lambda x, y: b.op(op, x, y), xs)


def _mean(b: Emitter, n: Call, *xs: Tensor) -> Tensor:
    def mean(first: Tensor, *rest: Tensor) -> Tensor:
        return b.op("divide", reduce(lambda x, y: b.op("add", x, y), rest, first), len(xs))

    return b.widened(mean, *xs)


def _compare(direction: str) -> Row:
    return lambda b, n, x, y: b.compare(direction, x, y)


def _wide(formula: Callable[[Emitter, Tensor], Tensor]) -> Row:
    """A formula of x alone, computed in f32 for 16-bit floats."""
    return lambda b, n, x: b.widened(lambda v: formula(b, v), x)


def _pow(b: Emitter, n: Call, x: Tensor, y: Tensor) -> Tensor:
    dtype = x.type.dtype
    if is_known(y) and y.type.size == 1 and y.type.rank <= x.type.rank and dtype.is_float:
        exponent = float(n.array(y).reshape(()))
        if exponent in (1, 2, 3):
            return reduce(lambda a, c: b.op("multiply", a, c), [x] * int(exponent))
        if exponent in (0.5, -0.5):
            return b.op("sqrt" if exponent > 0 else "rsqrt", x)
    if not dtype.is_float and y.type.dtype.is_float:
        wide = DTYPES["f64"]
        return b.convert(b.op("power", b.convert(x, wide), b.convert(y, wide)), dtype)
    return b.op("power", x, b.convert(y, dtype))


def _mod(b: Emitter, n: Call, x: Tensor, y: Tensor) -> Tensor:
    """C's remainder with fmod, else Python's, whose sign is the divisor's."""
    rest = b.op("remainder", x, y)
    if n.attr_int("fmod", 0):
        return rest
    if x.type.dtype.is_float:
        raise n.refusal("Mod of floats needs fmod=1")
    if x.type.dtype.kind == "uint":
        return rest
    differs = b.op("xor", b.compare("LT", rest, 0), b.compare("LT", y, 0))
    wraps = b.op("and", b.compare("NE", rest, 0), differs)
    return b.select(wraps, b.op("add", rest, y), rest)


def _shift(b: Emitter, n: Call, x: Tensor, y: Tensor) -> Tensor:
    return b.op({"LEFT": "shift_left", "RIGHT": "shift_right"}[n.attr_string("direction")], x, y)


def _clip(b: Emitter, n: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [n.attr_float(name) if n.has(name) else None for name in ("min", "max")] if n.opset < 11 else [low, high]
    for bound, op in zip(bounds, ("maximum", "minimum"), strict=True):
        if bound is not None:
            x = b.op(op, x, bound)
    return x


def _is_inf(b: Emitter, n: Call, x: Tensor) -> Tensor:
    found = b.scalar(False, bool_, x.type.shape)
    for attribute, value in (("detect_positive", math.inf), ("detect_negative", -math.inf)):
        if n.attr_int(attribute, 1):
            found = b.op("or", found, b.compare("EQ", x, value))
    return found


def _where(b: Emitter, n: Call, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return b.select(condition, x, y)


def _cast(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.convert(x, dtype_of(n.attr_int("to"), str(n)))


def _cast_like(b: Emitter, n: Call, x: Tensor, like: Tensor) -> Tensor:
    return b.convert(x, like.type.dtype)


def _same(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return x


def _dropout(b: Emitter, n: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None):
    """Inference: nothing is dropped."""
    drops = ratio is None or not is_known(ratio) or float(n.array(ratio).reshape(())) != 0
    if training is not None and n.array(training).reshape(()) and drops:
        raise n.refusal("Dropout in training mode: export the model for inference")
    mask = bool_ if n.opset >= 10 else x.type.dtype
    return (x, b.scalar(True, mask, x.type.shape)) if n.wants(1) else x


def _relu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.op("maximum", x, 0)


def _negative_side(b: Emitter, x: Tensor, below: Tensor) -> Tensor:
    return b.select(b.compare("LT", x, 0), below, x)


def _leaky_relu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return _negative_side(b, x, b.op("multiply", x, n.attr_float("alpha", 0.01)))


def _prelu(b: Emitter, n: Call, x: Tensor, slope: Tensor) -> Tensor:
    return _negative_side(b, x, b.op("multiply", x, slope))


def _elu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    def elu(v: Tensor) -> Tensor:
        return _negative_side(b, v, b.op("multiply", b.op("exponential_minus_one", v), n.attr_float("alpha", 1.0)))

    return b.widened(elu, x)


def _selu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    alpha, gamma = n.attr_float("alpha", 1.67326319217681884765625), n.attr_float("gamma", 1.05070102214813232421875)

    def selu(v: Tensor) -> Tensor:
        below = b.op("multiply", b.op("exponential_minus_one", v), alpha)
        return b.op("multiply", _negative_side(b, v, below), gamma)

    return b.widened(selu, x)


def _celu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    alpha = n.attr_float("alpha", 1.0)

    def celu(v: Tensor) -> Tensor:
        below = b.op("multiply", b.op("exponential_minus_one", b.op("divide", v, alpha)), alpha)
        return b.op("add", b.op("maximum", v, 0), b.op("minimum", below, 0))

    return b.widened(celu, x)


def _thresholded_relu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return b.select(b.compare("GT", x, n.attr_float("alpha", 1.0)), x, 0)


def hard_sigmoid(b: Emitter, x: Tensor, alpha: float, beta: float) -> Tensor:
    """min(max(alpha x + beta, 0), 1)."""
    line = b.op("add", b.op("multiply", x, alpha), beta)
    return b.op("minimum", b.op("maximum", line, 0), 1)


def _hard_sigmoid(b: Emitter, n: Call, x: Tensor) -> Tensor:
    return hard_sigmoid(b, x, n.attr_float("alpha", 0.2), n.attr_float("beta", 0.5))


def _hard_swish(b: Emitter, x: Tensor) -> Tensor:
    return b.op("multiply", x, hard_sigmoid(b, x, 1 / 6, 0.5))


def softplus(b: Emitter, x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    tail = b.op("log_plus_one", b.op("exponential", b.op("negate", b.op("abs", x))))
    return b.op("add", b.op("maximum", x, 0), tail)


def softsign(b: Emitter, x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return b.op("divide", x, b.op("add", b.op("abs", x), 1))


def _mish(b: Emitter, x: Tensor) -> Tensor:
    return b.op("multiply", x, b.op("tanh", softplus(b, x)))


def _gelu(b: Emitter, n: Call, x: Tensor) -> Tensor:
    approximate = n.attr_string("approximate", "none")

    def gelu(v: Tensor) -> Tensor:
        if approximate == "tanh":
            cube = b.op("multiply", b.op("multiply", b.op("multiply", v, v), v), 0.044715)
            bend = b.op("tanh", b.op("multiply", b.op("add", v, cube), math.sqrt(2 / math.pi)))
        else:
            bend = b.op("erf", b.op("multiply", v, math.sqrt(0.5)))
        return b.op("multiply", b.op("multiply", v, 0.5), b.op("add", bend, 1))

    return b.widened(gelu, x)


def _swish(b: Emitter, n: Call, x: Tensor) -> Tensor:
    alpha = n.attr_float("alpha", 1.0)

    def swish(v: Tensor) -> Tensor:
        scaled = v if alpha == 1 else b.op("multiply", v, alpha)
        return b.op("multiply", v, b.op("logistic", scaled))

    return b.widened(swish, x)


def _swiglu(b: Emitter, n: Call, gate: Tensor, value: Tensor) -> Tensor:
    if n.attr_float("alpha", 1.0) == 1:
        return b.emit("swiglu", gate, value)
    return b.op("multiply", _swish(b, n, gate), value)


def _shrink(b: Emitter, n: Call, x: Tensor) -> Tensor:
    bias, edge = n.attr_float("bias", 0.0), n.attr_float("lambd", 0.5)
    if not x.type.dtype.is_float:  # integers are shrunk in floats and cut back
        wide = DTYPES["f64"]
        return b.convert(_shrink(b, n, b.convert(x, wide)), x.type.dtype)
    above = b.select(b.compare("GT", x, edge), b.op("subtract", x, bias), 0)
    return b.select(b.compare("LT", x, -edge), b.op("add", x, bias), above)


_UNARY = {
    "Abs": "abs", "Neg": "negate", "Sign": "sign", "Exp": "exponential", "Log": "log", "Sqrt": "sqrt",
    "Floor": "floor", "Ceil": "ceil", "Round": "round_nearest_even", "Erf": "erf", "Sigmoid": "logistic",
    "Tanh": "tanh", "Sin": "sine", "Cos": "cosine", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan",
    "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Not": "not",
    "BitwiseNot": "not",
}  # fmt: skip
_BINARY = {
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide", "And": "and", "Or": "or", "Xor": "xor",
    "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor",
}  # fmt: skip
_COMPARISONS = {"Equal": "EQ", "Less": "LT", "LessOrEqual": "LE", "Greater": "GT", "GreaterOrEqual": "GE"}

OPS: dict[str, Row] = {
    **{name: _elementwise(op) for name, op in (_UNARY | _BINARY).items()},
    **{name: _compare(direction) for name, direction in _COMPARISONS.items()},
    "Max": _variadic("maximum"),
    "Min": _variadic("minimum"),
    "Sum": _variadic("add"),
    "Mean": _mean,
    "Pow": _pow,
    "Mod": _mod,
    "BitShift": _shift,
    "Clip": _clip,
    "Reciprocal": lambda b, n, x: b.op("divide", 1, x),
    "IsNaN": lambda b, n, x: b.compare("NE", x, x),
    "IsInf": _is_inf,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Identity": _same,
    "Dropout": _dropout,  # type: ignore[dict-item]
    "Relu": _relu,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Elu": _elu,
    "Selu": _selu,
    "Celu": _celu,
    "ThresholdedRelu": _thresholded_relu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _wide(_hard_swish),
    "Softplus": _wide(softplus),
    "Softsign": _wide(softsign),
    "Mish": _wide(_mish),
    "Gelu": _gelu,
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Shrink": _shrink,
}

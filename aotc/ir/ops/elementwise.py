"""Ops that work element by element. Shapes are equal: broadcasting is explicit (`broadcast_in_dim`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.dtypes import DType, bool_
from aotc.ir.graph import Attrs, TensorType
from aotc.ir.ops.op import Op, require


@dataclass(frozen=True)
class ConvertAttrs(Attrs):
    dtype: DType


@dataclass(frozen=True)
class CompareAttrs(Attrs):
    """`direction` is one of EQ NE LT LE GT GE."""

    direction: str


def _same(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    first = types[0]
    require(all(t.dtype == first.dtype for t in types), f"element types differ: {types}")
    require(all(t.shape == first.shape for t in types), f"shapes differ: {types}")
    return (TensorType(first.dtype, first.shape),)


def _compare_type(types: tuple[TensorType, ...], attrs: CompareAttrs) -> tuple[TensorType, ...]:
    require(attrs.direction in COMPARISONS, f"no comparison {attrs.direction}")
    return (TensorType(bool_, _same(types, attrs)[0].shape),)


def _select_type(types: tuple[TensorType, ...], attrs: Any) -> tuple[TensorType, ...]:
    require(len(types) == 3 and types[0].dtype == bool_, "select takes (bool, on_true, on_false)")
    require(types[0].shape == types[1].shape, f"shapes differ: {types}")
    return _same(types[1:], attrs)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Floats divide; integers truncate toward zero (ONNX, C). Division by zero of integers gives 0."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = a // safe
    exact_or_same_sign = (a % safe == 0) | ((a < 0) == (safe < 0))
    return np.where(b == 0, np.zeros_like(a), np.where(exact_or_same_sign, quotient, quotient + 1))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C's `%` and `fmod`: the sign of the dividend."""
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, np.zeros_like(a), np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x


def _logistic(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _ints(f: Callable[..., np.ndarray], g: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """`f` for bools, `g` for integers."""
    return lambda *a: f(*a) if a[0].dtype == np.bool_ else g(*a)


COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}

_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negate": np.negative, "abs": np.abs, "sign": np.sign,
    "exponential": np.exp, "exponential_minus_one": np.expm1, "log": np.log, "log_plus_one": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "erf": _erf, "logistic": _logistic,
    "sine": np.sin, "cosine": np.cos, "tan": np.tan, "tanh": np.tanh, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "floor": np.floor, "ceil": np.ceil, "round_nearest_even": np.rint, "trunc": np.trunc,
    "not": _ints(np.logical_not, np.invert),
}  # fmt: skip

_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": _divide, "remainder": _remainder,
    "power": np.power, "maximum": np.maximum, "minimum": np.minimum, "atan2": np.arctan2,
    "and": _ints(np.logical_and, np.bitwise_and), "or": _ints(np.logical_or, np.bitwise_or),
    "xor": _ints(np.logical_xor, np.bitwise_xor), "shift_left": np.left_shift, "shift_right": np.right_shift,
}  # fmt: skip


def _row(name: str, function: Callable[..., np.ndarray], arity: int) -> Op:
    def infer(types: tuple[TensorType, ...], attrs: Any) -> tuple[TensorType, ...]:
        require(len(types) == arity, f"{name} takes {arity} inputs, not {len(types)}")
        return _same(types, attrs)

    return Op(name, infer, lambda a, _, __: function(*a), elementwise=True)


def _convert(arrays: Any, attrs: ConvertAttrs, outs: tuple[TensorType, ...]) -> np.ndarray:
    """Floats round to nearest even; float to integer truncates and saturates, NaN gives 0."""
    (x,) = arrays
    to = attrs.dtype
    if to.is_int and x.dtype.kind not in "iub":
        info = np.iinfo(to.np)
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        clipped = np.clip(np.trunc(wide), float(info.min), float(info.max))
        top = clipped >= float(info.max)
        return np.where(top, info.max, np.where(top, 0, clipped).astype(to.np)).astype(to.np)
    return x.astype(to.np)


OPS = (
    *(_row(name, f, 1) for name, f in _UNARY.items()),
    *(_row(name, f, 2) for name, f in _BINARY.items()),
    Op(
        "compare", _compare_type, lambda a, at, _: COMPARISONS[at.direction](a[0], a[1]), CompareAttrs,
        elementwise=True,
    ),
    Op("select", _select_type, lambda a, _, __: np.where(a[0], a[1], a[2]), exact=True, elementwise=True),
    Op(
        "convert", lambda t, at: (TensorType(at.dtype, t[0].shape),), _convert, ConvertAttrs,
        exact=True, elementwise=True,
    ),
)  # fmt: skip

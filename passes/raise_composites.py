"""Raises what models spell out in primitives to the composites that kernels want whole."""

from __future__ import annotations

from aotc.ir.graph import Graph, Value
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import ReduceAttrs
from aotc.passes.rewrite import Context, Match, Maybe, Op, Rule, Splat, Var, apply


def raise_composites(graph: Graph) -> Graph:
    """rms_norm, rope and swiglu from their primitives."""
    return apply(graph, RULES)


X, W = Var("x"), Var("w")


def _scaled_by_rsqrt(x: Maybe) -> Op:
    """x * rsqrt(mean(x * x) + eps), with the mean as sum / n, in f32."""
    mean = Op("divide", Maybe("reshape", Op("reduce", Op("multiply", x, x), bind="sum")), Splat("n"))
    return Op("multiply", x, Op("broadcast_in_dim", Op("rsqrt", Op("add", mean, Splat("eps"))), bind="spread"))


def _is_rms_norm(_: Context, m: Match) -> str | None:
    x, w = m["x"].type, m["w"].type
    if m["sum"].attrs != ReduceAttrs("sum", (x.rank - 1,)):
        return "the mean is not over the last axis"
    if m["n"] != x.shape[-1]:
        return "it does not divide by the length of the axis"
    if w.shape != x.shape[-1:]:
        return "the weight is no vector of the last axis"
    if m["along"].attrs.axes != (x.rank - 1,):
        return "the weight is not along the last axis"
    same = w.dtype == m["out"].type.dtype and x.dtype.itemsize >= w.dtype.itemsize
    return None if same and w.dtype.is_float and x.dtype.is_float else "element types differ"


def _rms_norm(ctx: Context, m: Match) -> Value:
    out, x = m["out"].type.dtype, m["x"].type.dtype
    return ctx.builder.emit("rms_norm", m["x"], m["w"], attrs=NormAttrs(float(m["eps"]), None if out == x else out))


def _is_rope(ctx: Context, m: Match) -> str | None:
    x = m["x"].type
    if x.rank != 3 or x.shape[2] % 2:  # type: ignore[operator]
        return "x is not [tokens, heads, even size]"
    half = x.shape[2] // 2
    low, high = m["low"].attrs, m["high"].attrs
    if low.start != (0, 0, 0) or low.limit[2] != half or high.start != (0, 0, half) or high.limit != x.shape:
        return "the halves are not the low and the high one"
    if m["cat"].attrs.axis != 2 or m["cos_along"].attrs.axes != (0, 2) or m["sin_along"].attrs.axes != (0, 2):
        return "cosines and sines are not [tokens, size]"
    return None if m["cos"].type.dtype == m["sin"].type.dtype == x.dtype else "element types differ"


def _rope(ctx: Context, m: Match) -> Value:
    return ctx.builder.emit("rope", m["x"], m["cos"], m["sin"])


def _swiglu_types(_: Context, m: Match) -> str | None:
    return None if m["gate"].type == m["up"].type else "gate and up have different types"


def _swiglu(ctx: Context, m: Match) -> Value:
    return ctx.builder.emit("swiglu", m["gate"], m["up"])


WIDE = Maybe("convert", X)
RULES = (
    # w * convert(convert(x) * rsqrt(mean(convert(x)^2) + eps)) -> rms_norm(x, w)
    Rule(
        "rms_norm",
        Op("multiply", Op("broadcast_in_dim", W, bind="along"), Maybe("convert", _scaled_by_rsqrt(WIDE))),
        _rms_norm, _is_rms_norm,
    ),
    # x * cos + concat(-x_high, x_low) * sin -> rope(x, cos, sin)
    Rule(
        "rope",
        Op(
            "add",
            Op("multiply", X, Op("broadcast_in_dim", Var("cos"), bind="cos_along")),
            Op(
                "multiply",
                Op("concatenate", Op("negate", Op("slice", X, bind="high")), Op("slice", X, bind="low"), bind="cat"),
                Op("broadcast_in_dim", Var("sin"), bind="sin_along"),
            ),
        ),
        _rope, _is_rope,
    ),
    # (gate * logistic(gate)) * up -> swiglu(gate, up)
    Rule(
        "swiglu", Op("multiply", Op("multiply", Var("gate"), Op("logistic", Var("gate"))), Var("up")),
        _swiglu, _swiglu_types,
    ),
)  # fmt: skip

"""Uses of each ATen operator that the front end has a row for, with the arguments that are easy to get wrong.

A use is the arguments of the operator, in the names of INPUTS; one that begins with `=` is a whole expression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

INF = math.inf
_generator = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator)


INPUTS: dict[str, torch.Tensor] = {
    "x": _normal(3, 4), "y": _normal(3, 4), "row": _normal(4), "column": _normal(3, 1), "t": _normal(2, 3, 4),
    "u": _normal(2, 3, 4), "scalar": torch.tensor(0.75), "unit": torch.rand(3, 4, generator=_generator) * 1.8 - 0.9,
    "positive": torch.rand(3, 4, generator=_generator) + 0.1, "above": torch.rand(3, 4, generator=_generator) + 1.1,
    "odd": torch.tensor([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.7, -3.7]),
    "special": torch.tensor([INF, -INF, math.nan, 0.0, 1.0]), "double": _normal(3, 4).double(),
    "half": _normal(3, 4).half(), "brain": _normal(3, 4).bfloat16(),
    "i": torch.tensor([[-7, -1, 0, 2], [3, 5, -2, 9], [1, -4, 6, 8]]), "j": torch.tensor([[2, 3, 5, -2]] * 3),
    "k": torch.tensor([[1, -2, 3, 4]] * 3, dtype=torch.int32), "byte": torch.tensor([[0, 1, 200, 255]] * 3, dtype=torch.uint8),
    "m": torch.tensor([[True, False, True, True], [False] * 4, [True] * 4]), "n": torch.tensor([[False, True, True, False]] * 3),
    "at": torch.tensor([2, 0, 0, 1]), "places": torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]]),
    "image": _normal(2, 4, 7, 6), "kernel": _normal(6, 4, 3, 2), "depthwise": _normal(8, 1, 3, 3), "bias": _normal(6),
    "signal": _normal(2, 4, 9), "taps": _normal(6, 2, 3), "volume": _normal(1, 2, 4, 5, 3), "cube": _normal(3, 2, 2, 3, 2),
    "channels": _normal(4), "spread": torch.rand(4, generator=_generator) + 0.5, "weight": _normal(5, 4), "five": _normal(5),
    "table": _normal(10, 4), "square": _normal(4, 5), "q": _normal(2, 3, 5, 4), "key": _normal(2, 3, 6, 4),
    "value": _normal(2, 3, 6, 8), "mask": torch.rand(2, 1, 5, 6, generator=_generator) > 0.3, "added": _normal(5, 6),
    "empty": torch.zeros(0),
}  # fmt: skip

_BINARY: dict[str, list[str]] = {
    "aten.mul.Tensor": ["x, row", "x, scalar", "i, x", "x, 3", "i, 2.5", "m, i", "half, brain", "column, row"],
    "aten.mul.Scalar": ["i, 0.5", "x, -2"],
    "aten.div.Tensor": ["x, positive", "i, j", "x, 0", "i, 2", "byte, 2"],
    "aten.div.Scalar": ["i, 4", "x, 0.1"],
    "aten.maximum.default": ["x, row", "i, k", "special, scalar", "m, n"],
    "aten.minimum.default": ["x, y", "special, scalar", "m, n"],
    "aten.atan2.default": ["x, y", "special, odd[:5]", "i, j"],
    "aten.fmod.Tensor": ["x, positive", "i, j"],
    "aten.fmod.Scalar": ["x, 0.7", "i, 3"],
    "aten.bitwise_and.Tensor": ["i, j", "m, n", "i, k"],
    "aten.bitwise_and.Scalar": ["i, 6", "m, True"],
    "aten.bitwise_or.Tensor": ["i, j", "m, n"],
    "aten.bitwise_or.Scalar": ["i, 6"],
    "aten.bitwise_xor.Tensor": ["i, j", "m, n"],
    "aten.bitwise_xor.Scalar": ["i, -1"],
    "aten.logical_and.default": ["m, n", "i, x"],
    "aten.logical_or.default": ["m, n", "odd, scalar"],
    "aten.logical_xor.default": ["m, n", "i, j"],
    "aten.add.Tensor": [
        "x, row", "x, y, alpha=0.5", "i, 1", "i, 0.5", "m, n", "i, k, alpha=3", "brain, row", "half, scalar", "m, 1",
        "x, double",
    ],
    "aten.add.Scalar": ["x, 2", "i, 3, 2"],
    "aten.sub.Tensor": ["x, column, alpha=2", "i, j"],
    "aten.sub.Scalar": ["x, 1.5", "x, 1, 3"],
    "aten.rsub.Scalar": ["x, 1", "i, 1, 2", "x, 1, 3"],
    "aten.rsub.Tensor": ["x, row", "x, row, alpha=2"],
    "aten.pow.Tensor_Scalar": [
        "x, 2", "positive, 0.5", "positive, -0.5", "x, 1", "x, 3", "x, -1", "x, 0", "i, 2", "i, 3", "k, 2.0",
        "special, 2", "positive, 1.7",
    ],
    "aten.pow.Tensor_Tensor": ["positive, y", "x, j"],
    "aten.pow.Scalar": ["2, x", "0.5, x", "2, at"],
    "aten.where.self": ["m, x, row", "m, i, x"],
    "aten.masked_fill.Scalar": ["x, m, -INF", "i, m, 9", "t, m, 0.5", "m, n, True"],
}  # fmt: skip

_ELEMENTWISE: dict[str, list[str]] = {
    **{f"aten.{n}.default": ["x", "special", "half", "i"] for n in (
        "exp", "expm1", "sigmoid", "erf", "sin", "cos", "tan", "tanh", "atan", "sinh", "cosh", "asinh",
    )},
    **{f"aten.{n}.default": ["x", "special", "i", "half"] for n in ("abs", "neg", "sign")},
    **{f"aten.{n}.default": ["positive", "special", "x", "byte"] for n in ("log", "log1p", "sqrt", "rsqrt")},
    **{f"aten.{n}.default": ["unit", "special"] for n in ("asin", "acos", "atanh")},
    "aten.acosh.default": ["above", "special"],
    **{f"aten.{n}.default": ["odd", "special", "i", "half"] for n in ("floor", "ceil", "round", "trunc")},
    "aten.bitwise_not.default": ["i", "m", "byte"],
    "aten.logical_not.default": ["m", "i", "odd"],
    "aten.reciprocal.default": ["x", "i", "special", "half"],
    "aten.relu.default": ["x", "i", "special"],
    "aten.silu.default": ["x", "half"],
    "aten.gelu.default": ["x", "x, approximate='tanh'", "brain"],
    "aten.clamp.default": ["x, -0.5, 0.5", "x, None, 0", "i, 0", "special, -1, 1", "i, 0.5", "x, 1, -1"],
    "aten.clamp.Tensor": ["x, row", "x, row, y", "x, None, y"],
}  # fmt: skip

_CONVERSIONS: dict[str, list[str]] = {
    "aten.to.dtype": [
        "odd, torch.int64", "odd, torch.bool", "x, torch.float16", "i, torch.uint8", "i, torch.float32",
        "m, torch.bfloat16", "x, torch.float32",
    ],
    "aten.to.dtype_layout": ["x, dtype=torch.float64, layout=torch.strided, device='cpu'"],
    "aten.to.device": ["x, 'cpu', torch.bfloat16"],
    "aten.copy.default": ["x, row", "i, x", "x, i"],
    "aten._to_copy.default": ["x", "odd, dtype=torch.int32"],
    "aten.zeros.default": [
        "= aten.add.Tensor(aten.zeros([3, 1]), x)", "= aten.zeros([2], dtype=torch.int64) + i[:2, :2]",
    ],
    "aten.ones.default": ["= aten.sub.Tensor(aten.ones([4]), x)"],
    "aten.zeros_like.default": ["x", "x, dtype=torch.int32"],
    "aten.ones_like.default": ["i", "m"],
    "aten.full.default": ["= aten.add.Tensor(aten.full([3, 4], 2.5), x)", "= aten.full([3, 4], -3) + i"],
    "aten.full_like.default": ["x, 7", "i, -2", "m, True"],
    "aten.arange.default": ["= aten.arange(4) + row"],
    "aten.arange.start": ["= aten.arange.start(-2, 2) * row"],
    "aten.arange.start_step": [
        "= aten.arange.start_step(9, 1, -2) * row", "= aten.arange.start_step(0, 1, 0.25) + row",
    ],
}  # fmt: skip

_SHAPES: dict[str, list[str]] = {
    "aten.view.default": ["t, [6, 4]", "t, [-1]", "t, [2, -1, 2]"],
    "aten.reshape.default": ["t.transpose(0, 2), [3, -1]", "scalar, [1, 1]"],
    "aten._unsafe_view.default": ["t, [4, 6]"],
    "aten.unsqueeze.default": ["x, 0", "x, -1", "scalar, 0"],
    "aten.squeeze.dim": ["column, -1", "column, 0"],
    "aten.squeeze.dims": ["column, [0, -1]"],
    "aten.squeeze.default": ["column", "x"],
    "aten.flatten.using_ints": ["t", "t, 1, -1", "scalar"],
    "aten.unflatten.int": ["t, -1, [2, -1]", "x, 1, [2, 2]"],
    **{f"aten.{n}.default": ["x", "i"] for n in (
        "contiguous", "clone", "alias", "detach", "lift_fresh_copy", "detach_",
    )},
    "aten.dropout.default": ["x, 0.5, False"],
    "aten.expand.default": ["column, [-1, 5]", "row, [2, 3, -1]", "scalar, [2, 2]"],
    "aten.broadcast_to.default": ["column, [2, 3, 4]"],
    "aten.expand_as.default": ["column, x"],
    "aten.permute.default": ["t, [2, 0, 1]", "t, [-1, 1, -3]"],
    "aten.transpose.int": ["t, 0, 2", "t, -1, -2", "scalar, 0, -1"],
    "aten.t.default": ["x", "row", "scalar"],
    "aten.slice.Tensor": [
        "x, 1, 1, 3", "x, -1, -3, -1", "x, 1, None, None, 2", "x, 1, 1, 2 ** 63 - 1, 3", "x, 0, -100, 100",
        "x, 0, 2, 1", "x, 0, 5, 9", "x", "x, 0, 0, -100",
    ],
    "aten.select.int": ["t, 0, 1", "t, -1, -2", "row, 0, -1"],
    "aten.split.Tensor": ["t, 3, -1", "x, 1", "x, 9"],
    "aten.split_with_sizes.default": ["x, [1, 3], -1", "x, [0, 1, 2]"],
    "aten.chunk.default": ["x, 2", "x, 3, -1", "x, 9"],
    "aten.unbind.int": ["t", "t, -1"],
    "aten.cat.default": ["[x, y]", "[x, y, x], -1", "[x, i], 1", "[empty, x, empty]", "[x], 1", "[m, k]"],
    "aten.stack.default": ["[x, y]", "[x, y], -1", "[x, i], 1", "[scalar, scalar]"],
    "aten.constant_pad_nd.default": ["x, [1, 2], -1.5", "t, [0, 1, 2, 0]", "i, [1, 0, 0, 1], 5", "m, [1, 1], True"],
    "aten.pad.default": ["x, [1, 2]", "x, [0, 0, 1, 1], 'constant', -INF"],
    "aten.flip.default": ["t, [0, -1]", "x, [1]"],
}  # fmt: skip

_REDUCTIONS: dict[str, list[str]] = {
    "aten.sum.default": ["t", "i", "m", "scalar", "half, dtype=torch.float32", "k"],
    "aten.sum.dim_IntList": [
        "t, [1]", "t, [-1, 0], True", "t, []", "t, None, True", "m, [0]", "scalar, [-1]",
        "x, [1], dtype=torch.float64", "special, [0]",
    ],
    "aten.mean.default": ["t", "half", "i, dtype=torch.float32"],
    "aten.mean.dim": ["t, [1, -1]", "t, [0], True", "t, None", "i, [1], dtype=torch.float64"],
    "aten.amax.default": ["t, [-1]", "t, [0, 1], True", "i", "special", "m, [1]"],
    "aten.amin.default": ["t, [1]", "i, [-1], True", "special", "m, [1]"],
    "aten.prod.default": ["x", "i", "m"],
    "aten.prod.dim_int": ["x, -1", "k, 0, True"],
    "aten.argmax.default": ["x", "x, -1", "t, 1, True", "i, 0", "t, None, True", "special, 0", "byte, 1"],
    "aten.argmin.default": ["x", "x, -1, True", "special"],
    "aten.cumsum.default": ["x, 0", "i, -1", "m, 1", "k, 1, dtype=torch.float32", "half, 1"],
    "aten.topk.default": ["t, 2", "i, 4, -1", "x, 1, 1, True, False"],
    "aten.softmax.int": ["x, -1", "t, 0", "half, 1", "half, 1, torch.float32", "special, 0"],
    "aten._softmax.default": ["t, 1, False"],
}  # fmt: skip

_LAYERS: dict[str, list[str]] = {
    "aten.layer_norm.default": [
        "t, [4], row, row", "t, [4]", "t, [4], row, None, 0.1", "half, [4]", "t, [3, 4], x, y", "t, [2, 3, 4]",
    ],
    "aten.batch_norm.default": [
        "image, channels, channels, channels, spread, False, 0.1, 1e-05, True",
        "image, None, None, channels, spread, False, 0.1, 0.001, True",
        "x, row, None, row, spread, False, 0.1, 1e-05, False",
    ],
    "aten.linear.default": ["t, weight, five", "row, weight"],
    "aten.matmul.default": [
        "t, square", "x, row", "row, square", "row, channels", "q, key.transpose(2, 3)", "t, row", "q, square",
        "column.t(), t", "row, t.transpose(1, 2)", "q, t[0].t().unsqueeze(0)",
    ],
    "aten.mm.default": ["x, square", "i, j.t()"],
    "aten.bmm.default": ["t, u.transpose(1, 2)"],
    "aten.mv.default": ["x, row"],
    "aten.addmm.default": ["five, x, square"],
    "aten.conv1d.default": ["signal, taps, bias, [2], [1], [1], 2"],
    "aten.conv2d.default": [
        "image, kernel, bias", "image, depthwise, None, [1, 2], [1], [2, 1], 4", "image, kernel, None, [2], [2, 1]",
    ],
    "aten.conv3d.default": ["volume, cube, None, [1, 2, 1], [0, 1, 1]"],
    "aten.convolution.default": [
        "image, kernel, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1",
        "signal, taps, None, [1], [0], [3], False, [0], 2",
        "image[:, :, :3, :2], kernel.transpose(0, 1), None, [2, 3], [1, 0], [1, 2], True, [1, 2], 1",
        "signal, depthwise[:4, 0, :1].expand(4, 3, 3), bias, [2], [0], [1], True, [0], 2",
    ],
    "aten.max_pool2d.default": ["image, [2, 2]", "image, [3], [2], [1], [1]", "image, [2, 3], [1, 2], 0, [2, 1]"],
    "aten.max_pool1d.default": ["signal, [3]", "signal, 2, 1, 1"],
    "aten.avg_pool2d.default": [
        "image, [2, 3]", "image, [3], [2], [1]", "image, [2], [], 0, False, False",
        "image, [2, 2], [1, 1], [0, 0], False, True, 3",
    ],
    "aten.adaptive_avg_pool2d.default": ["image, [1, 1]", "image, [7, 2]"],
    "aten.adaptive_avg_pool1d.default": ["signal, [1]"],
    "aten.embedding.default": ["table, places", "table, at, 0"],
    "aten.index_select.default": ["x, 0, at", "t, -2, at"],
    "aten.gather.default": ["x, 0, places", "x, -1, places"],
    "aten.scaled_dot_product_attention.default": [
        "q, key, value", "q, key, value, mask", "q, key, value, added, scale=0.3", "q, key, value, is_causal=True",
    ],
}  # fmt: skip

_LEAVES: dict[str, list[str]] = {
    **{f"aten.{n}.default": ["positive", "special", "half", "i"] for n in ("log2", "log10")},
    "aten.exp2.default": ["x", "special", "half", "i"],
    "aten.isnan.default": ["special", "i", "half"],
    "aten.scalar_tensor.default": [
        "= aten.where.self(x > 0, x, aten.scalar_tensor(-1.5))", "= i + aten.scalar_tensor(3, dtype=torch.int64)",
    ],
    "aten.remainder.Tensor": ["x, y", "i, j"],
    "aten.remainder.Scalar": ["x, -0.7", "i, 3", "i, -3", "i, 0.75"],
    "aten.div.Tensor_mode": [
        f"{pair}, rounding_mode={mode!r}"
        for mode in ("floor", "trunc", None) for pair in ("x, y", "i, j", "special, scalar")
    ],
    "aten.div.Scalar_mode": [
        "x, -0.3, rounding_mode='floor'", "i, 2, rounding_mode='floor'", "i, -2, rounding_mode='trunc'",
    ],
    "aten.index.Tensor": [
        "x, [at]", "t, [None, places]", "t, [None, None, at - 2]", "t, [at - 1, None, at]", "t, [None, places, at]",
        "t, [at[1:3], at[:2], at[:1]]",
    ],
    **{f"aten.{n}.default": ["t", "i", "special", "m", "scalar"] for n in ("max", "min")},
    **{f"aten.{n}.dim": ["t, -1", "i, 0, True", "special, 0", "scalar, 0"] for n in ("max", "min")},
    **{f"aten.{n}.default": ["m", "i", "odd", "byte"] for n in ("any", "all")},
    **{f"aten.{n}.dim": ["m, -1, True", "i, 0"] for n in ("any", "all")},
    **{f"aten.{n}.dims": ["t, [0, -1]", "m"] for n in ("any", "all")},
    "aten.var.correction": [
        "t, [1, -1]", "t, None, correction=0, keepdim=True", "t, [0], correction=1", "t, [0], correction=2",
    ],
    "aten.var_mean.correction": ["t, [-1], correction=0, keepdim=True"],
    "aten.cumprod.default": ["x, -1", "i, 0"],
    "aten.sort.default": ["t, 1", "i, -1, True"],
    "aten.group_norm.default": ["image, 2, channels, channels", "image, 4", "signal, 1, None, None, 0.1"],
    "aten._native_batch_norm_legit_no_training.default": [
        "= aten._native_batch_norm_legit_no_training(image, channels, None, channels, spread, 0.1, 0.001)[0]",
    ],
    "aten.max_pool3d.default": ["volume, [2, 2, 1], [1, 2, 1]"],
    "aten.avg_pool1d.default": ["signal, [3], [2], [1]"],
    "aten.avg_pool3d.default": ["volume, [2]"],
    "aten.adaptive_avg_pool3d.default": ["volume, [2, 1, 3]"],
}  # fmt: skip


_NUMBERS = ["x, 0", "i, 2", "i, 1.5", "special, INF", "m, True", "k, -1", "byte, 200"]
_PAIRS = ["x, row", "i, k", "i, x", "m, n", "special, scalar", "byte, i", "half, brain"]
_COMPARISONS = {
    f"aten.{n}.{o}": uses for n in ("eq", "ne", "lt", "le", "gt", "ge")
    for o, uses in (("Tensor", _PAIRS), ("Scalar", _NUMBERS))
}  # fmt: skip

CASES: dict[str, list[str]] = {
    **_ELEMENTWISE, **_BINARY, **_COMPARISONS, **_CONVERSIONS, **_SHAPES, **_REDUCTIONS, **_LAYERS, **_LEAVES,
}  # fmt: skip
"""Uses by overload."""


def inputs_of(uses: list[str]) -> list[str]:
    """The names of the inputs that uses take."""
    return [name for name in INPUTS if any(re.search(rf"(?<![\w.]){name}(?!\w)", use) for use in uses)]


def call_of(operator: str, use: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    """What a use computes, from the inputs by name."""
    _, name, overload = operator.split(".")
    text = use.removeprefix("= ") if use.startswith("=") else f"operator({use})"
    names = {"torch": torch, "aten": torch.ops.aten, "INF": INF}
    names["operator"] = getattr(getattr(torch.ops.aten, name), overload)
    return lambda given: eval(text, names, given)

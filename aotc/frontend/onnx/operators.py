"""The ONNX operators that aotc imports: one row each, by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.frontend.onnx import (
    ops_attention,
    ops_conv,
    ops_index,
    ops_math,
    ops_matmul,
    ops_norm,
    ops_quant,
    ops_recurrent,
    ops_reduce,
    ops_resize,
    ops_shape,
    ops_signal,
)  # fmt: skip
from aotc.frontend.onnx.known import Tensor

_FAMILIES = (
    ops_math, ops_shape, ops_index, ops_reduce, ops_matmul, ops_conv, ops_norm, ops_resize, ops_quant, ops_attention,
    ops_recurrent, ops_signal,
)  # fmt: skip

OPERATORS: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    name: row for module in _FAMILIES for name, row in module.OPS.items()
}

REFUSED: dict[str, str] = {
    "Loop": "loops are not supported: export the model with the loop unrolled",
    "Scan": "loops are not supported: export the model with the loop unrolled",
}
"""Why an operator cannot be compiled, and what to do instead."""

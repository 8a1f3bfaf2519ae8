"""Ops that read or write at computed places."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.ir.graph import TensorType
from aotc.ir.ops.op import Op, no_flops, require
from aotc.ir.ops.shape import AxisAttrs


def _gather(types: tuple[TensorType, ...], at: AxisAttrs) -> tuple[TensorType, ...]:
    x, index = types
    require(index.dtype.is_int and 0 <= at.axis < x.rank, f"gather of {x} at {index}, axis {at.axis}")
    return (TensorType(x.dtype, (*x.shape[: at.axis], *index.shape, *x.shape[at.axis + 1 :])),)


def _gather_elements(types: tuple[TensorType, ...], at: AxisAttrs) -> tuple[TensorType, ...]:
    x, index = types
    require(index.dtype.is_int and index.rank == x.rank, f"gather_elements of {x} at {index}")
    return (TensorType(x.dtype, index.shape),)


OPS = (
    # ONNX Gather, torch.index_select: indices are not negative and lie inside the axis.
    Op("gather", _gather, lambda a, at, _: np.take(a[0], a[1], at.axis), AxisAttrs, no_flops, exact=True),
    Op(
        "gather_elements", _gather_elements, lambda a, at, _: np.take_along_axis(a[0], a[1], at.axis), AxisAttrs,
        no_flops, exact=True,
    ),
)  # fmt: skip


def token_rows(query_start: Any) -> np.ndarray:
    """The row (sequence of the batch) of each flat token, from the rows' start offsets [rows + 1]."""
    return np.repeat(np.arange(len(query_start) - 1), np.diff(query_start))

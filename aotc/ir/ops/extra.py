"""Ops that write at computed places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.graph import Attrs, TensorType
from aotc.ir.ops.op import Op, require


@dataclass(frozen=True)
class ScatterAttrs(Attrs):
    """`kind` is replace, sum, product, maximum or minimum."""

    kind: str


_COMBINE: dict[str, Any] = {
    "sum": np.add, "product": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip


def _scatter(types: tuple[TensorType, ...], at: ScatterAttrs) -> tuple[TensorType, ...]:
    x, index, updates = types
    require(at.kind == "replace" or at.kind in _COMBINE, f"no scatter {at.kind}")
    require(index.dtype.is_int and index.rank == 1 and x.rank >= 1, f"scatter into {x} at {index}")
    require(
        updates.dtype == x.dtype and updates.shape == (*index.shape, *x.shape[1:]), f"scatter of {updates} into {x}"
    )
    return (TensorType(x.dtype, x.shape),)


def _scatter_reference(arrays: Sequence[np.ndarray], at: ScatterAttrs, _: Any) -> np.ndarray:
    x, index, updates = arrays
    out = x.copy()
    if at.kind == "replace":
        for i, row in zip(index, updates, strict=True):  # in order: numpy leaves the winner of repeats open
            out[i] = row
    else:
        _COMBINE[at.kind].at(out, index, updates)
    return out


OPS = (
    # x [n, ...], index int [m], updates [m, ...]: row index[j] of x takes, or is combined with, updates[j], j ascending.
    # Indices lie inside the axis.
    Op("scatter", _scatter, _scatter_reference, ScatterAttrs, lambda ins, _, __: ins[2].size),
)

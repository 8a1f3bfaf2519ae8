"""What an op is: one row with its attributes, type rule, reference and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.graph import Attrs, TensorType, Value
from aotc.ir.sizes import Size

Infer = Callable[[tuple[TensorType, ...], Any], tuple[TensorType, ...]]
Reference = Callable[[Sequence[np.ndarray], Any, tuple[TensorType, ...]], Sequence[np.ndarray] | np.ndarray]
Cost = Callable[[tuple[TensorType, ...], tuple[TensorType, ...], Any], Size]


def one_flop(_: tuple[TensorType, ...], outs: tuple[TensorType, ...], __: Any) -> Size:
    """One operation an output element."""
    return outs[0].size


def no_flops(_: tuple[TensorType, ...], __: tuple[TensorType, ...], ___: Any) -> Size:
    """Only moves data."""
    return 0


@dataclass(frozen=True)
class Op:
    """One operation.

    `infer` gives output types or raises TypeError. `reference` computes in the accumulator type of its inputs
    (see `aotc.ir.interpret`) and gets output types with all dims known; `exact` ops get arrays as they are.
    `linear` maps an output index to the input whose memory it keeps (an update of a state). `decompose` rebuilds a
    composite from primitives in a builder.
    """

    name: str
    infer: Infer
    reference: Reference
    attrs: type = Attrs
    cost: Cost = one_flop
    exact: bool = False
    elementwise: bool = False
    linear: tuple[tuple[int, int], ...] = ()
    decompose: Callable[[Any, tuple[Value, ...], Any], Value] | None = None


def require(condition: bool, message: str) -> None:
    """Raises TypeError with `message` unless `condition`."""
    if not condition:
        raise TypeError(message)

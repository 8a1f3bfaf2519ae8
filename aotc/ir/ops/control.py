"""Ops that hold graphs: fusions (one kernel each) and control flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aotc.ir.graph import Attrs, Graph, TensorType
from aotc.ir.ops.op import Op, require
from aotc.ir.sizes import Size


@dataclass(frozen=True)
class FusionAttrs(Attrs):
    """`body` runs as one kernel of the template family `kind`; inputs and outputs correspond by position."""

    kind: str
    body: Graph


@dataclass(frozen=True)
class IfAttrs(Attrs):
    """Both branches take all inputs after the condition, and give the same output types."""

    then: Graph
    orelse: Graph


def _fusion_types(types: tuple[TensorType, ...], at: FusionAttrs) -> tuple[TensorType, ...]:
    expected = tuple(v.type for v in at.body.inputs)
    require(types == expected, f"fusion takes {expected}, not {types}")
    return tuple(v.type for v in at.body.outputs)


def _if_types(types: tuple[TensorType, ...], at: IfAttrs) -> tuple[TensorType, ...]:
    require(types[0].dtype.name == "bool" and types[0].size == 1, f"if: the condition is {types[0]}")
    for branch in (at.then, at.orelse):
        expected = tuple(v.type for v in branch.inputs)
        require(types[1:] == expected, f"if: {branch.name} takes {expected}, not {types[1:]}")
    outs = tuple(v.type for v in at.then.outputs)
    require(outs == tuple(v.type for v in at.orelse.outputs), "if: the branches give different types")
    return outs


def _refuse(*_: Any) -> Any:
    raise AssertionError("the interpreter runs ops that hold graphs itself")


def _body_cost(_: Any, __: Any, at: FusionAttrs) -> Size:
    from aotc.ir.cost import flops

    return flops(at.body)


OPS = (
    Op("fusion", _fusion_types, _refuse, FusionAttrs, _body_cost, exact=True),
    Op("if", _if_types, _refuse, IfAttrs, lambda *_: 0, exact=True),
)

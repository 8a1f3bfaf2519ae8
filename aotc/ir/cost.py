"""Counts operations and bytes before anything runs: what a graph costs at least."""

from __future__ import annotations

from aotc.ir.graph import Graph, TensorType
from aotc.ir.ops import OPS
from aotc.ir.packing import physical_bytes
from aotc.ir.sizes import Size, evaluate


def nbytes(type_: TensorType, dims: dict[str, int] | None = None) -> Size:
    """Bytes of a tensor in its packing; dims are replaced where given."""
    type_ = type_.at(dims) if dims else type_
    if type_.packing is None:
        return type_.size * type_.dtype.itemsize
    return physical_bytes(type_.packing, tuple(int(evaluate(s, {})) for s in type_.shape), type_.dtype.itemsize)  # type: ignore[arg-type]


def flops(graph: Graph) -> Size:
    """Floating point operations of a graph, multiply and add counted as two."""
    total: Size = 0
    for node in graph.nodes:
        ins, outs = tuple(v.type for v in node.inputs), tuple(v.type for v in node.outputs)
        total = total + OPS[node.op].cost(ins, outs, node.attrs)
    return total

"""Takes a PyTorch module that `torch.export` traced: the program brings its weights and its dynamic shapes."""

from __future__ import annotations

from collections.abc import Collection

import sympy
import torch

from aotc.errors import UnsupportedError
from aotc.frontend.exported import import_exported, module_weights, with_rows
from aotc.frontend.model import ArrayWeights, Model
from aotc.ir.sizes import Dim, Size, symbol


def open_exported(program: torch.export.ExportedProgram, name: str = "module") -> Model:
    """The model of an exported program. Inputs keep their names; a dynamic axis is a dim named INPUT_AXIS.

    Raises UnsupportedError for a dynamic dim without an upper bound, and for operators that aotc does not know.
    """
    program = with_rows(program)
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise UnsupportedError(f"the module changes {changed[0]} when it runs: take it as an input, and return it")
    user = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
    dims: dict[sympy.Symbol, Dim] = {}
    inputs: dict[str, tuple[str, tuple[Size, ...]]] = {}
    for node in user:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"input {node.name} is no tensor: bind it before exporting")
        shape = (_size(program, node.name, axis, s, dims) for axis, s in enumerate(value.shape))
        inputs[node.name] = (str(value.dtype), tuple(shape))
    outputs = tuple(_output_names(signature.user_outputs))
    graph = import_exported(
        program, name=name, inputs=inputs, outputs=outputs, dims=tuple(dims.values()), clamps_indices=True
    )
    read = module_weights(program)
    return Model(name, "tensor", graph, ArrayWeights({w.key: read(w.key) for w in graph.weights}))


def _size(
    program: torch.export.ExportedProgram, name: str, axis: int, size: int | torch.SymInt, dims: dict[sympy.Symbol, Dim]
) -> Size:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if not isinstance(expr, sympy.Symbol):
        raise UnsupportedError(f"axis {axis} of input {name} is {expr}: export it as a dim of its own")
    if expr not in dims:
        bounds = program.range_constraints[expr]
        if not bounds.upper.is_Integer or int(bounds.upper) > 1 << 40:
            raise UnsupportedError(
                f"axis {axis} of input {name} has no upper bound: export with torch.export.Dim('{name}_{axis}', max=N)"
            )
        dims[expr] = Dim(f"{name}_{axis}", max(int(bounds.lower), 1), int(bounds.upper))
    return symbol(dims[expr].name)


def _output_names(names: Collection[object]) -> list[str]:
    """`output` for one result, `output_0`, `output_1`, ... for more: torch's names are those of its nodes."""
    return ["output"] if len(names) == 1 else [f"output_{n}" for n in range(len(names))]

"""Imports a `torch.export` program: ATen nodes become IR nodes, one row of `aten.ATEN` an overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch.fx.node import map_arg

from aotc.errors import UnsupportedError
from aotc.frontend.aten import ATEN, Importer, dtype_of
from aotc.ir.dtypes import DTYPES
from aotc.ir.graph import Graph, TensorType, Value
from aotc.ir.sizes import Dim, Expr, Size, symbol

IGNORED = {"aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default",
           "aten._assert_scalar.default", "aten.sym_constrain_range.default"}  # fmt: skip


def import_exported(
    program: torch.export.ExportedProgram,
    *,
    name: str,
    inputs: Mapping[str, tuple[str, tuple[Size, ...]]],
    outputs: tuple[str, ...],
    dims: tuple[Dim, ...],
    weight_key: Callable[[str], str] = lambda fqn: fqn,
    aliases: tuple[tuple[str, str], ...] = (),
) -> Graph:
    """The graph of an exported program.

    `inputs` names the placeholders of user inputs in order, each with our name and its shape in our dims; the
    sizes that torch invented are solved from them. `outputs` names the results in order.
    Raises UnsupportedError naming the first ATen operator that has no row.
    """
    builder = Importer(name, dims)
    signature = program.graph_signature
    parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                  **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    user = [n for n in placeholders if n.name not in parameters]
    symbols: dict[sympy.Symbol, Size] = {}
    for node, (_, shape) in zip(user, inputs.values(), strict=True):
        _solve_symbols(node, shape, symbols)
    env: dict[torch.fx.Node, Any] = {}
    for node, (our_name, (_, shape)) in zip(user, inputs.items(), strict=True):
        env[node] = builder.input(our_name, TensorType(dtype_of(node.meta["val"].dtype), shape))
    for node in placeholders:
        if node.name in parameters and node.users:
            type_ = TensorType(dtype_of(node.meta["val"].dtype), tuple(node.meta["val"].shape))
            env[node] = builder.weight(weight_key(parameters[node.name]), type_)
    builder.size_of = lambda s: size_of(s, symbols)
    results: Any = None
    for node in program.graph.nodes:
        if node.op == "output":
            results = node.args[0]
        elif node.op == "call_function":
            _import_call(builder, node, env)
    named = dict(zip(outputs, (env[r] for r in results), strict=True))
    return builder.finish(named, aliases)


def module_weights(program: torch.export.ExportedProgram) -> Callable[[str], np.ndarray]:
    """Reads the parameters, buffers and constants of an exported program by their fully qualified names."""
    tensors = {**program.constants, **program.state_dict}

    def read(key: str) -> np.ndarray:
        tensor = tensors[key].detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(DTYPES["bf16"].np)
        return tensor.numpy()

    return read


def _import_call(builder: Importer, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> None:
    target = str(node.target)
    if target in IGNORED:
        return
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        env[node] = builder.size_of(value)
        return
    if target == "<built-in function getitem>":
        env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    if target not in ATEN:
        raise UnsupportedError(
            f"the model calls {target} ({node.name}), which has no row in aotc/frontend/aten.py: rewrite the module "
            f"without it, or add a row"
        )
    args = map_arg(node.args, lambda n: env[n])
    kwargs = map_arg(node.kwargs, lambda n: env[n])
    builder.source = (_source_name(node),)
    builder.result = value
    env[node] = ATEN[target](builder, *args, **kwargs)
    _check_type(builder, node, env[node], value)


def _source_name(node: torch.fx.Node) -> str:
    """`model.layers.0.mlp/mul_3`: the module's path, then torch's node name."""
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return f"{path}/{node.name}" if path else node.name


def _check_type(builder: Importer, node: torch.fx.Node, got: Any, expected: Any) -> None:
    if not isinstance(got, Value) or not isinstance(expected, torch.Tensor):
        return
    shape = tuple(builder.size_of(s) for s in expected.shape)
    if got.type.shape != shape or got.type.dtype != dtype_of(expected.dtype):
        raise AssertionError(f"{node.format_node()} imported as {got.type}, torch says {expected.dtype}{list(shape)}")


def _solve_symbols(node: torch.fx.Node, shape: tuple[Size, ...], symbols: dict[sympy.Symbol, Size]) -> None:
    """Learns torch's symbols from an input whose shape we know."""
    for theirs, ours in zip(node.meta["val"].shape, shape, strict=True):
        if not isinstance(theirs, torch.SymInt):
            continue
        expr = theirs.node.expr
        if isinstance(expr, sympy.Symbol):
            symbols.setdefault(expr, ours)


def size_of(size: Any, symbols: Mapping[sympy.Symbol, Size]) -> Size:
    """A torch size in our dims. Raises UnsupportedError for an expression that sizes do not cover."""
    if isinstance(size, int | Expr):
        return size
    return _convert(size.node.expr, symbols)


def _convert(expr: Any, symbols: Mapping[sympy.Symbol, Size]) -> Size:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbols[expr] if expr in symbols else symbol(str(expr))
    if expr.is_Add or expr.is_Mul:
        total: Size = 0 if expr.is_Add else 1
        for arg in expr.args:
            part = _convert(arg, symbols)
            total = total + part if expr.is_Add else total * part
        return total
    if type(expr).__name__ in ("FloorDiv", "CleanDiv") and expr.args[1].is_Integer:
        return _convert(expr.args[0], symbols) // int(expr.args[1])
    if expr.is_Pow and expr.args[1].is_Integer and int(expr.args[1]) > 0:
        base = _convert(expr.args[0], symbols)
        total = 1
        for _ in range(int(expr.args[1])):
            total = total * base
        return total
    raise UnsupportedError(f"the model computes a size as {expr}, which aotc's size expressions do not cover")

"""Imports a `torch.export` program: ATen nodes become IR nodes, one row of `aten.ATEN` an overload."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch._decomp import decomposition_table
from torch.fx.node import map_arg

from aotc.errors import UnsupportedError
from aotc.frontend.aten import ATEN, Importer, dtype_of
from aotc.ir.dtypes import DTYPES
from aotc.ir.graph import Graph, TensorType, Value
from aotc.ir.sizes import Dim, Expr, Size, symbol

IGNORED = {"aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default",
           "aten._assert_scalar.default", "aten.sym_constrain_range.default",
           "aten._assert_async.default", "aten._assert_async.msg"}  # fmt: skip


_DEEPEST = 8  # definitions in terms of others


def import_exported(
    program: torch.export.ExportedProgram,
    *,
    name: str,
    inputs: Mapping[str, tuple[str, tuple[Size, ...]]],
    outputs: tuple[str, ...],
    dims: tuple[Dim, ...],
    weight_key: Callable[[str], str] = lambda fqn: fqn,
    aliases: tuple[tuple[str, str], ...] = (),
    clamps_indices: bool = False,
) -> Graph:
    """The graph of an exported program.

    `inputs` names the placeholders of user inputs in order, each with our name and its shape in our dims; the
    sizes that torch invented are solved from them. `outputs` names the results in order. `clamps_indices` keeps
    look-ups within their axis whatever the indices are.
    Raises UnsupportedError naming the first ATen operator that has no row.
    """
    builder = Importer(name, dims)
    builder.clamps_indices = clamps_indices
    signature = program.graph_signature
    parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                  **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    user = [n for n in placeholders if n.name in signature.user_inputs]  # Python numbers are built in by torch
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
    return builder.finish(dict(zip(outputs, (_result(n, r, env) for n, r in enumerate(results)), strict=True)), aliases)


def _result(number: int, result: Any, env: Mapping[torch.fx.Node, Any]) -> Value:
    value = env.get(result) if isinstance(result, torch.fx.Node) else result
    if not isinstance(value, Value):
        raise UnsupportedError(f"result {number} of the module is {value}, which is no tensor: return tensors alone")
    return value


def with_rows(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with the operators that have no row taken apart by torch's own definitions, as far as these go.

    Changes in place become values on the way. What has a row stays whole: it stands for a better kernel.
    """
    before: set[Any] = set()
    for depth in range(_DEEPEST):
        unknown = {n.target for n in program.graph.nodes if n.op == "call_function" and not _has_row(n)}
        if unknown == before:  # some are defined by themselves
            break
        before = unknown
        known = torch.export.default_decompositions()
        table: dict[Any, Callable[..., Any]] = {op: decomposition_table[op] for op in unknown & decomposition_table.keys()}
        table |= {op: known[op] for op in unknown if op in known}
        if not table and depth:
            break
        with warnings.catch_warnings(action="ignore"):  # of torch, on torch
            program = program.run_decompositions(table)
    return program


def _has_row(node: torch.fx.Node) -> bool:
    """True for what the importer takes as it is: operators in the table, and arithmetic on sizes."""
    overload = isinstance(node.target, torch._ops.OpOverload)
    number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | int)
    return not overload or number or str(node.target) in ATEN or str(node.target) in IGNORED


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
    if isinstance(value, torch.SymBool | bool):  # what torch asserts of its sizes
        env[node] = None
        return
    if target == "<built-in function getitem>":
        env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    where = f"{target} at {_source_name(node)}"
    if target not in ATEN:
        raise UnsupportedError(
            f"the model calls {where}, which has no row in aotc/frontend/aten.py: rewrite the module without it, or add "
            f"a row"
        )
    args = map_arg(node.args, lambda n: env[n])
    kwargs = map_arg(node.kwargs, lambda n: env[n])
    builder.source = (_source_name(node),)
    builder.result = value
    try:
        env[node] = ATEN[target](builder, *args, **kwargs)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(f"{where}: aotc does not compile it with these arguments ({reason})") from error
    _check_type(builder, where, env[node], value)


def _source_name(node: torch.fx.Node) -> str:
    """`model.layers.0.mlp/mul_3`: the module's path, then torch's node name."""
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return f"{path}/{node.name}" if path else node.name


def _check_type(builder: Importer, where: str, got: Any, expected: Any) -> None:
    """A row that gives another type than torch must not go on: arguments that it does not know of change the meaning."""
    if not isinstance(got, Value) or not isinstance(expected, torch.Tensor):
        return
    shape = tuple(builder.size_of(s) for s in expected.shape)
    if got.type.shape != shape or got.type.dtype != dtype_of(expected.dtype):
        raise UnsupportedError(f"{where}: aotc makes {got.type} of it, and torch {expected.dtype}{list(shape)}")


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

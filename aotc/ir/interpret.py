"""The oracle: runs a graph in numpy, op by op.

Arrays enter and leave in their own dtype. Between, an op computes in a wider type (f64 for f32, f32 for the
16-bit floats) and rounds once at its output, as a good kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aotc.ir.dtypes import accumulator
from aotc.ir.graph import Graph, Node, TensorType, Value
from aotc.ir.ops import OPS
from aotc.ir.sizes import Dim, Expr, evaluate

Observer = Callable[[Node, Sequence[np.ndarray]], None]


def interpret(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    weights: Callable[[str], np.ndarray] | None = None,
    observe: Observer | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Runs `graph`; returns outputs by name. `weights` gives the logical array of a source key.

    `dims` gives the dims of a body, which declares none of its own.

    Raises TypeError where inputs do not fit the signature.
    """
    dims = dict(dims) if dims is not None else bind_dims(graph, {k: np.shape(v) for k, v in inputs.items()})
    env: dict[Value, np.ndarray] = {}
    for value in graph.inputs:
        env[value] = _checked(value, np.asarray(inputs[value.name]), dims)
    for weight in graph.weights:
        if weights is None:
            raise TypeError(f"graph {graph.name} has weights, and no source for them was given")
        env[weight.value] = weights(weight.key)
    return dict(zip(graph.output_names, _run(graph, env, dims, observe), strict=True))


def bind_dims(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The value of each dim, from the shapes of the inputs. Raises TypeError on a conflict or a bound."""
    dims: dict[str, int] = {}
    for value in graph.inputs:
        if value.name not in shapes:
            raise TypeError(f"input {value.name} is missing")
        shape = shapes[value.name]
        if len(shape) != value.type.rank:
            raise TypeError(f"input {value.name} has rank {len(shape)}, not {value.type.rank}")
        for got, size in zip(shape, value.type.shape, strict=True):
            name = _only_symbol(size)
            if name is not None and dims.setdefault(name[0], got - name[1]) != got - name[1]:
                raise TypeError(f"input {value.name}: dim {name[0]} is {got - name[1]} here and {dims[name[0]]} before")
    for dim in graph.dims:
        _check_bounds(dim, dims)
    return dims


def _check_bounds(dim: Dim, dims: dict[str, int]) -> None:
    value = dims.setdefault(dim.name, dim.lo)
    if not dim.lo <= value <= dim.hi:
        raise TypeError(f"dim {dim.name} is {value}, outside {dim.lo}..{dim.hi}")


def _only_symbol(size: object) -> tuple[str, int] | None:
    """(name, offset) where a size is `name` or `name + offset`."""
    if not isinstance(size, Expr):
        return None
    (atoms, coef), *rest = size.terms
    if len(atoms) != 1 or coef != 1 or not isinstance(atoms[0], str) or any(a for a, _ in rest):
        return None
    return atoms[0], rest[0][1] if rest else 0


def _checked(value: Value, array: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
    type_ = value.type.at(dims)
    if array.dtype != type_.dtype.np or array.shape != type_.shape:
        raise TypeError(f"input {value.name} is {array.dtype}{list(array.shape)}, not {type_}")
    return array


def _run(
    graph: Graph, env: dict[Value, np.ndarray], dims: dict[str, int], observe: Observer | None
) -> list[np.ndarray]:
    remaining = {v: len(nodes) for v, nodes in graph.users().items()}
    kept = set(graph.outputs)
    for node in graph.nodes:
        results = run_node(node, [env[v] for v in node.inputs], dims)
        for value, array in zip(node.outputs, results, strict=True):
            env[value] = array
        if observe is not None:
            observe(node, results)
        for v in node.inputs:  # frees what nobody needs any more: models are large
            remaining[v] -= 1
            if not remaining[v] and v not in kept:
                env.pop(v, None)
    return [env[v] for v in graph.outputs]


def run_node(node: Node, arrays: Sequence[np.ndarray], dims: Mapping[str, int]) -> list[np.ndarray]:
    """Runs one node on arrays of its input types."""
    if node.op == "fusion":
        return _run_graph(node.attrs.body, arrays, dims)
    if node.op == "if":
        branch = node.attrs.then if bool(np.asarray(arrays[0]).reshape(())) else node.attrs.orelse
        return _run_graph(branch, arrays[1:], dims)
    row = OPS[node.op]
    types = tuple(v.type.at(dims) for v in node.outputs)
    if not row.exact:
        arrays = [_widen(a, v.type) for a, v in zip(arrays, node.inputs, strict=True)]
    with np.errstate(all="ignore"):
        results = row.reference(arrays, node.attrs, types)
    results = [results] if isinstance(results, np.ndarray | np.generic) else list(results)
    return [_rounded(r, t, node) for r, t in zip(results, types, strict=True)]


def _run_graph(graph: Graph, arrays: Sequence[np.ndarray], dims: Mapping[str, int]) -> list[np.ndarray]:
    return _run(graph, dict(zip(graph.inputs, arrays, strict=True)), dict(dims), None)


def _widen(array: np.ndarray, type_: TensorType) -> np.ndarray:
    return array.astype(accumulator(type_.dtype).np) if type_.dtype.is_float else array


def _rounded(result: np.ndarray, type_: TensorType, node: Node) -> np.ndarray:
    array = np.asarray(result)
    if array.shape != type_.shape:
        raise AssertionError(f"the reference of {node.op} gave {array.shape}, its type says {type_}")
    with np.errstate(all="ignore"):
        return array.astype(type_.dtype.np, copy=False)


def resolve(size: object, dims: Mapping[str, int]) -> int:
    """A size at known dims."""
    return int(evaluate(size, dims))  # type: ignore[arg-type]

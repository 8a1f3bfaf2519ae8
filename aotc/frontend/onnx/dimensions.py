"""Dynamic dims of a model's inputs, and the bounds that `--dim` gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import ValueInfoProto

from aotc.errors import RequestError, SourceError, UnsupportedError
from aotc.frontend.onnx.tensors import plain
from aotc.ir.sizes import Dim, Expr, Size, evaluate, names_in, parse, symbol

_MOST_RANK, _MOST_ELEMENTS = 32, 1 << 40


def read_dims(
    inputs: Sequence[ValueInfoProto], bounds: Mapping[str, tuple[int, int]], path: Path, batch: int = 0
) -> tuple[list[tuple[Size, ...]], tuple[Dim, ...]]:
    """The shape of each input, and the dims in them.

    A dim is named as in the file, or after its input and axis (`x_0`) where the file gives no name. Equal bounds
    make a number of it. Where one dim is left without them, `batch` is its upper bound, unless that is 0. Raises
    UnsupportedError with the flags to add where bounds are missing.
    """
    named = [_shape(v) for v in inputs]
    single = {s.terms[0][0][0] for shape in named for s in shape if isinstance(s, Expr) and _is_name(s)}
    shapes = [
        tuple(_bindable(s, single, v.name, i) for i, s in enumerate(shape))
        for v, shape in zip(inputs, named, strict=True)
    ]
    names = sorted({n for shape in shapes for s in shape for n in names_in(s)}, key=_order(shapes))
    missing = [n for n in names if n not in bounds]
    if batch and len(missing) == 1:
        bounds = {**bounds, missing[0]: (1, batch)}
    _check(names, bounds, path)
    fixed: dict[str, Size] = {n: bounds[n][0] if bounds[n][0] == bounds[n][1] else symbol(n) for n in names}
    dims = tuple(Dim(n, *bounds[n]) for n in names if not isinstance(fixed[n], int))
    return [tuple(evaluate(s, fixed) for s in shape) for shape in shapes], dims


def identifier(name: str) -> str:
    """A name made of letters, digits and underscores, as size expressions take them."""
    word = re.sub(r"[^A-Za-z0-9_]+", "_", name)
    return word if word and not word[0].isdigit() else f"_{word}"


def _shape(value: ValueInfoProto) -> list[Size]:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise UnsupportedError(f"input '{plain(value.name)}' is of the kind {(kind or 'unknown').removesuffix('_type')}, "
                               f"and aotc takes tensors only: pass each tensor as an input of its own")  # fmt: skip
    if not value.type.tensor_type.HasField("shape"):
        raise UnsupportedError(f"input '{plain(value.name)}' has no shape: give it one with onnx.tools.update_model_dims")
    dims = value.type.tensor_type.shape.dim
    if len(dims) > _MOST_RANK:
        raise SourceError(f"input '{plain(value.name)}' has {len(dims)} axes, at most {_MOST_RANK} are read")
    if math.prod(max(d.dim_value, 1) for d in dims) > _MOST_ELEMENTS:
        shape = [d.dim_param or d.dim_value for d in dims]
        raise SourceError(f"input '{plain(value.name)}' has the shape {plain(str(shape))}, which no memory holds")
    return [_size(d.WhichOneof("value"), d.dim_value, d.dim_param, f"{value.name}_{i}") for i, d in enumerate(dims)]


def _size(kind: str | None, number: int, name: str, default: str) -> Size:
    if kind == "dim_value" and number >= 0:
        return number
    if kind != "dim_param" or name.strip() in ("", "?"):
        return symbol(identifier(default))
    try:  # exporters write `past + 1`
        return parse(name)
    except ValueError:
        return symbol(identifier(name))


def _is_name(size: Expr) -> bool:
    (atoms, coef), *rest = size.terms
    return not rest and coef == 1 and len(atoms) == 1 and isinstance(atoms[0], str)


def _bindable(size: Size, single: set, name: str, axis: int) -> Size:
    """An expression can stay where every name in it is some axis on its own; else it becomes a dim itself."""
    if isinstance(size, int):
        return size if size >= 0 else symbol(identifier(f"{name}_{axis}"))
    return size if names_in(size) <= single else symbol(identifier(str(size)))


def _order(shapes: Sequence[tuple[Size, ...]]):
    first = {n: i for i, n in reversed(list(enumerate(n for sh in shapes for s in sh for n in sorted(names_in(s)))))}
    return lambda name: first[name]


def _check(names: Sequence[str], bounds: Mapping[str, tuple[int, int]], path: Path) -> None:
    missing = [n for n in names if n not in bounds]
    if missing:
        flags = " ".join(f"--dim {n}=1..{'8' if i == 0 else '512'}" for i, n in enumerate(missing))
        raise UnsupportedError(f"{path.name} has dynamic dims without bounds: add {flags}")
    unknown = [n for n in bounds if n not in names]
    if unknown:
        have = ", ".join(names) or "none"
        raise RequestError(f"{path.name} has no dynamic dim '{plain(unknown[0])}'; its dynamic dims: {have}")
    for name in names:
        lo, hi = bounds[name]
        if not 0 <= lo <= hi < 2**31:
            raise RequestError(f"--dim {name}={lo}..{hi}: bounds are 0 <= low <= high < 2**31")

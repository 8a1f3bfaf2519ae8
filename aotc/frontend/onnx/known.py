"""Tensors whose elements are known while a model is imported, and arithmetic on sizes.

Initialisers, folded results, and shapes: the elements of a shape tensor are sizes, `[batch, 768]`, so what models
compute from Shape (Gather, Concat, Mul, ...) stays known with dynamic dims, and Reshape can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.dtypes import DType, from_numpy, i64
from aotc.ir.graph import TensorType, Value
from aotc.ir.sizes import Atom, Dim, Expr, Size


@dataclass(frozen=True, eq=False, slots=True)
class Known:
    """A tensor with known elements. `key` names an initialiser; `symbolic` ones hold sizes in an object array;
    `repeats` is (tensor, axes) that this one broadcasts."""

    type: TensorType
    read: Callable[[], np.ndarray]
    key: str = ""
    symbolic: bool = False
    repeats: tuple[Known, tuple[int, ...]] | None = None

    @property
    def array(self) -> np.ndarray:
        """The elements: in the tensor's dtype, or `int | Expr` objects."""
        return self.read()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, repeated ones once."""
        if self.repeats is not None:
            return self.repeats[0].nbytes
        return int(np.prod(self.type.shape, dtype=np.int64)) * self.type.dtype.itemsize  # type: ignore[arg-type]


Tensor = Value | Known
"""What the operator rows take and give."""


def known(array: np.ndarray, dtype: DType | None = None) -> Known:
    """A Known of an array; one of objects becomes plain numbers where it holds no dim."""
    dtype = dtype or from_numpy(array.dtype)
    symbolic = array.dtype == object and any(isinstance(e, Expr) for e in array.flat)
    array = array if symbolic else np.asarray(array, dtype.np)
    return Known(TensorType(dtype, array.shape), lambda: array, symbolic=symbolic)


def known_sizes(sizes: Iterable[Size]) -> Known:
    """A vector of sizes, i64 [n]."""
    elements = list(sizes)
    array = np.empty(len(elements), object)
    array[:] = elements
    return known(array, i64)


def is_known(tensor: Any) -> bool:
    """True for elements that are numbers by now."""
    return isinstance(tensor, Known) and not tensor.symbolic


def interval(size: Size, dims: Sequence[Dim]) -> tuple[int, int]:
    """The least and the largest value that a size can have, or a range around them."""
    if isinstance(size, int):
        return size, size
    bounds = {d.name: (d.lo, d.hi) for d in dims}

    def of_atom(atom: Atom) -> tuple[int, int]:
        if isinstance(atom, str):
            return bounds[atom]
        lo, hi = interval(atom.num, dims)
        return lo // atom.den, hi // atom.den

    low = high = 0
    for atoms, coef in size.terms:
        ends = [coef]
        for atom in atoms:
            ends = [e * bound for e in (min(ends), max(ends)) for bound in of_atom(atom)]
        low, high = low + min(ends), high + max(ends)
    return low, high


def compare(direction: str, a: Size, b: Size, dims: Sequence[Dim]) -> bool | None:
    """`a < b` (LT) and so on where the dims' bounds decide it; None where they do not."""
    low, high = interval(a - b, dims)
    if direction in ("GT", "GE"):
        low, high, direction = -high, -low, {"GT": "LT", "GE": "LE"}[direction]
    if direction in ("LT", "LE"):
        limit = 0 if direction == "LE" else -1
        return True if high <= limit else False if low > limit else None
    equal = True if low == high == 0 else False if low > 0 or high < 0 else None
    return equal if direction == "EQ" or equal is None else not equal


def larger(a: Size, b: Size, dims: Sequence[Dim]) -> Size | None:
    """The maximum of two sizes, where the dims' bounds decide it."""
    at_least = compare("GE", a, b, dims)
    return a if at_least else b if compare("GE", b, a, dims) else None


def smaller(a: Size, b: Size, dims: Sequence[Dim]) -> Size | None:
    """The minimum of two sizes, where the dims' bounds decide it."""
    at_most = compare("LE", a, b, dims)
    return a if at_most else b if compare("LE", b, a, dims) else None


def divide_exactly(a: Size, b: Size) -> Size | None:
    """`a / b` where b divides a as a polynomial: batch*seq*768 / (seq*768) is batch. None elsewhere."""
    if isinstance(b, int):
        coefs = [a] if isinstance(a, int) else [c for _, c in a.terms]
        if b == 0 or any(c % b for c in coefs):
            return None
        return a // b if b > 0 else (a * -1) // -b
    quotient: Size = 0
    lead_b, coef_b = _leading(b)
    while not (isinstance(a, int) and a == 0):
        lead_a, coef_a = _leading(a)
        rest = list(lead_a)
        for atom in lead_b:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coef_a % coef_b:
            return None
        term: Size = Expr(((tuple(rest), coef_a // coef_b),)) if rest else coef_a // coef_b
        quotient, a = quotient + term, a - term * b
    return quotient


def _leading(size: Size) -> tuple[tuple[Atom, ...], int]:
    """The term that comes first in graded lexicographic order, which multiplication keeps."""
    if isinstance(size, int):
        return (), size
    names = sorted({str(a) for atoms, _ in size.terms for a in atoms})
    return max(size.terms, key=lambda t: (len(t[0]), [sum(str(a) == n for a in t[0]) for n in names]))

"""Size expressions: integer polynomials over named dims, with floor division. `tokens*9+1`, `(h+2)//2`.

A size that holds no dim is a plain int, always: every operation returns `int | Expr`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Size: TypeAlias = "int | Expr"


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension of a graph and its bounds, both inclusive."""

    name: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """An atom: `num // den` for a positive constant `den`."""

    num: Expr
    den: int

    def __str__(self) -> str:
        return f"({self.num})//{self.den}"


Atom = str | FloorDiv


@dataclass(frozen=True, slots=True)
class Expr:
    """A sum of monomials: ((atoms, coefficient), ...), sorted, no zero coefficient, at least one atom."""

    terms: tuple[tuple[tuple[Atom, ...], int], ...]

    def __add__(self, other: Size) -> Size:
        total = dict(self.terms)
        for atoms, coef in _terms(other):
            total[atoms] = total.get(atoms, 0) + coef
        return _make(total)

    def __mul__(self, other: Size) -> Size:
        total: dict[tuple[Atom, ...], int] = {}
        for a, ca in self.terms:
            for b, cb in _terms(other):
                atoms = tuple(sorted(a + b, key=str))
                total[atoms] = total.get(atoms, 0) + ca * cb
        return _make(total)

    def __floordiv__(self, den: int) -> Size:
        if all(coef % den == 0 for _, coef in self.terms):
            return _make({atoms: coef // den for atoms, coef in self.terms})
        return _make({(FloorDiv(self, den),): 1})

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + (-1 * other)

    def __rsub__(self, other: int) -> Size:
        return (self * -1) + other

    __radd__, __rmul__ = __add__, __mul__

    def __str__(self) -> str:
        def monomial(atoms: tuple[Atom, ...], coef: int) -> str:
            return "*".join([str(a) for a in atoms] + ([str(coef)] if coef != 1 or not atoms else []))

        return "+".join(monomial(*t) for t in self.terms)

    __repr__ = __str__


def symbol(name: str) -> Expr:
    """The size that a dim named `name` stands for."""
    return Expr((((name,), 1),))


def ceildiv(size: Size, den: int) -> Size:
    """`size / den`, rounded up."""
    return (size + (den - 1)) // den


def evaluate(size: Size, dims: Mapping[str, Size]) -> Size:
    """Substitutes dims (by ints or by other sizes). Raises KeyError for a dim without a value."""
    if isinstance(size, int):
        return size
    total: Size = 0
    for atoms, coef in size.terms:
        product: Size = coef
        for atom in atoms:
            value = evaluate(atom.num, dims) // atom.den if isinstance(atom, FloorDiv) else dims[atom]
            product = product * value
        total = total + product
    return total


def upper_bound(size: Size, dims: tuple[Dim, ...]) -> int:
    """The largest value within the dims' bounds; exact where each monomial has a positive coefficient."""
    hi = {d.name: d.hi for d in dims}
    lo = {d.name: d.lo for d in dims}
    if isinstance(size, int):
        return size
    return sum(int(evaluate(Expr(((a, c),)), hi if c > 0 else lo)) if a else c for a, c in size.terms)  # type: ignore[arg-type]


def names_in(size: Size) -> set[str]:
    """The dims that a size depends on."""
    if isinstance(size, int):
        return set()
    atoms = [a for term, _ in size.terms for a in term]
    return {a for a in atoms if isinstance(a, str)}.union(*(names_in(a.num) for a in atoms if not isinstance(a, str)))


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of a shape: its number of elements."""
    total: Size = 1
    for s in sizes:
        total = total * s
    return total


_TOKEN = re.compile(r"\s*(//|[-+*()]|\d+|[A-Za-z_][A-Za-z_0-9]*)")


def parse(text: str) -> Size:
    """Reads what `str` of a size prints. Raises ValueError."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise ValueError(f"not a size: {text!r}")
    pos = 0

    def peek() -> str:
        return tokens[pos] if pos < len(tokens) else ""

    def take() -> str:
        nonlocal pos
        pos += 1
        return tokens[pos - 1]

    def factor() -> Size:
        if peek() == "(":
            take()
            inner = total()
            take()
            return inner
        if peek() == "-":
            take()
            return -1 * factor()
        word = take()
        return int(word) if word.isdigit() else symbol(word)

    def term() -> Size:
        value = factor()
        while peek() in ("*", "//"):
            value = value * factor() if take() == "*" else value // int(factor())  # type: ignore[arg-type]
        return value

    def total() -> Size:
        value = term()
        while peek() in ("+", "-"):
            value = value + term() if take() == "+" else value - term()
        return value

    try:
        value = total()
    except IndexError:
        raise ValueError(f"not a size: {text!r}") from None
    if pos != len(tokens):
        raise ValueError(f"not a size: {text!r}")
    return value


def _terms(size: Size) -> tuple[tuple[tuple[Atom, ...], int], ...]:
    return size.terms if isinstance(size, Expr) else (((), size),)


def _make(total: dict[tuple[Atom, ...], int]) -> Size:
    terms = tuple(sorted(((a, c) for a, c in total.items() if c), key=lambda t: (-len(t[0]), str(t[0]))))
    if not terms:
        return 0
    return terms[0][1] if terms[0][0] == () else Expr(terms)

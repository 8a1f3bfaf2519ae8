"""Loop nests whose innermost loops are blocks: a name holds a scalar or a tensor over vector variables.

A vector variable is a `tl.arange`; its mask tells live lanes. All vectors of a kernel broadcast against each other, so
masks combine with `&`. A reduction whose place depends on no vector becomes one block and a `tl.sum`; elsewhere it
is a sequential loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from aotc.codegen.cuda.syntax import TritonSyntax
from aotc.codegen.loops import Index, LoopNest, accumulator_of
from aotc.errors import UnsupportedError
from aotc.ir.dtypes import DType, i32
from aotc.ir.graph import Graph, Value

BLOCK_LIMIT = 8192  # elements of a row that one block holds
CHUNK = 2048  # elements a step of rows that are longer


class BlockNest(LoopNest):
    """A nest of vector code. `upper` bounds each size of the body; `wide` asks for 64-bit indices."""

    syntax: TritonSyntax

    def __init__(
        self, body: Graph, syntax: TritonSyntax, pointers: dict[Value, str], upper: Mapping[str, int], wide: bool,
        strides: Mapping[Value, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(body, syntax, pointers, strides)
        self.upper, self.wide = dict(upper), wide
        self.masks: dict[str, str] = {}  # by vector variable; none where all lanes live
        self.lanes: dict[str, int] = {}  # by vector variable: how many
        self.vectors: dict[str, frozenset[str]] = {}  # by name: the vector variables that it depends on
        self.blocks: dict[str, str] = {}  # by range: the vector variable that covers it
        self.flat: tuple[Index, tuple[str, ...], str] | None = None  # an index of a shape, and its row-major place
        self.guard = ""  # a scalar condition of every load and store
        self.sequential = 0  # reductions that became loops of scalars

    def vector(self, name: str, lanes: int, mask: str = "") -> str:
        """Registers a vector variable that a line declares."""
        self.vectors[name], self.lanes[name] = frozenset({name}), lanes
        if mask:
            self.masks[name] = mask
        return name

    def axes(self, *expressions: str) -> frozenset[str]:
        """The vector variables that expressions depend on."""
        words = re.findall(r"[A-Za-z_]\w*", " ".join(expressions))
        return frozenset().union(*(self.vectors.get(w, frozenset()) for w in words))

    def mask(self, *expressions: str) -> str:
        """The condition that the lanes of an expression are live, empty where all are."""
        masks = [self.masks[a] for a in sorted(self.axes(*expressions)) if a in self.masks]
        return " & ".join(masks + [self.guard] * bool(self.guard))

    def block(self, size: str) -> str:
        """A vector variable over a whole range, declared once at the top: readers of the same range share it."""
        if size not in self.blocks:
            name, lanes = self.name("r"), power_of_two(self.bound(size))
            self.scopes[0].lines.append(f"{name} = tl.arange(0, {lanes})")
            self.scopes[0].variables |= {name}
            self.blocks[size] = self.vector(name, lanes, "" if str(lanes) == size else f"({name} < {size})")
        return self.blocks[size]

    def bound(self, size: str) -> int:
        return int(size) if size.isdigit() else self.upper[size]

    def let(self, expression: str) -> str:
        """Names an expression in the current scope."""
        if expression.isidentifier():
            return expression
        name = self.own(self.name())
        self.line(f"{name} = {expression}")
        self.vectors[name] = self.axes(expression)
        return name

    def declare_index(self, name: str, expression: str) -> str:
        self.vectors[name] = self.axes(expression)
        return f"{name} = tl.cast({expression}, tl.int64)" if self.wide else f"{name} = {expression}"

    def quotient(self, a: str, b: str) -> str:
        return f"({a}) // {b}"

    def clamp(self, place: str, size: str) -> str:
        return f"tl.minimum(tl.maximum({place}, 0), {size} - 1)"

    def inside(self, place: str, size: str) -> str:
        return f"({place} >= 0) & ({place} < {size})"

    def every(self, conditions: list[str]) -> str:
        return " & ".join(conditions) or "True"

    def index_value(self, index: str, dtype: DType) -> str:
        return f"tl.cast({index}, {self.syntax.register(dtype)})"

    def store(self, value: Value, index: Index) -> None:
        """Writes `value[index]`, computed here, to its memory."""
        offset = self._offset(value, index)
        name = self.emit(value, index)
        self.line(self.syntax.store(self.pointers[value], value.type.dtype, offset, name, self.mask(offset)))

    def _keep(self, depth: int, value: Value, index: Index, expression: str, declared: bool = False) -> str:
        axes = self.axes(expression)
        name = super()._keep(depth, value, index, expression, declared)
        self.vectors[name] = axes
        return name

    def _load(self, value: Value, index: Index) -> str:
        if value.type.packing is not None:
            return self.syntax.packed_offset(value.type.packing, index, self.shape(value))
        offset = self._offset(value, index)
        return self.syntax.load(self.pointers[value], value.type.dtype, offset, self.mask(offset))

    def _offset(self, value: Value, index: Index) -> str:
        if self.flat and self.flat[:2] == (index, self.shape(value)):
            return self.flat[2]
        return super()._offset(value, index)

    @contextmanager
    def guarded(self, condition: str) -> Iterator[None]:
        """Loads read nothing where the condition does not hold, and cost no time there."""
        guard, known = self.guard, [dict(s.known) for s in self.scopes]
        self.guard = f"{guard} & {condition}" if guard else condition
        yield
        self.guard = guard
        for scope, before in zip(self.scopes, known, strict=True):
            scope.known = before

    def fold(
        self, kind: str, dtype: DType, index: Index, ranges: list[str], element: Callable[[list[str]], str]
    ) -> str:
        wide = accumulator_of(dtype)

        def widened(variables: list[str]) -> str:
            value = element(variables)
            return (
                value
                if self.syntax.register(dtype) == self.syntax.register(wide)
                else f"({value}).to({self.syntax.register(wide)})"
            )

        if self.axes(*index):
            total = self._sequential(kind, wide, index, ranges, widened)
        else:
            total = self._blocked(kind, wide, ranges, widened)
        return self.let(self.syntax.convert(total, wide, dtype))

    def _sequential(
        self, kind: str, wide: DType, index: Index, ranges: list[str], element: Callable[[list[str]], str]
    ) -> str:
        """Loops of scalars around a block of results."""
        self.sequential += 1
        total, variables = self.name("acc"), [self.name("s") for _ in ranges]
        with self.scope(*variables) as inner:
            self.line(f"{total} = {self._combined(kind, wide, total, element(variables))}")
        self._accumulator(total, self.syntax.call(f"start_{kind}", wide, [], None), wide, index)
        self._loops(variables, [f"0, {n}" for n in ranges], inner.lines)
        return total

    def _accumulator(self, name: str, start: str, dtype: DType, index: Index) -> None:
        """Declares a name that a loop updates in the lanes of `index`."""
        axes = self.axes(*index)
        if len(axes) > 1:
            raise UnsupportedError("a reduction inside a tile has no CUDA template")
        self.line(f"{name} = tl.full({[self.lanes[a] for a in axes]}, {start}, {self.syntax.register(dtype)})")
        self.own(name)
        self.vectors[name] = axes

    def _loops(self, variables: list[str], bounds: list[str], lines: list[str]) -> None:
        for depth, (variable, bound) in enumerate(zip(variables, bounds, strict=True)):
            self.line("    " * depth + f"for {variable} in range({bound}):")
        self.scopes[-1].lines += ["    " * len(variables) + text for text in lines]

    def walk(self, size: str, body: Callable[[str], None], before: Callable[[str], None] = lambda _: None) -> None:
        """A loop over a long range, a block of CHUNK a step. `before` declares what the body updates."""
        start, r = self.name("s"), self.name("r")
        self.vector(r, CHUNK, f"({r} < {size})")
        with self.scope(start, r) as inner:
            self.line(f"{r} = {start} + tl.arange(0, {CHUNK})")
            body(r)
        before(r)
        self._loops([start], [f"0, {size}, {CHUNK}"], inner.lines)

    def _blocked(self, kind: str, wide: DType, ranges: list[str], element: Callable[[list[str]], str]) -> str:
        """One block over all ranges where they fit, else one that walks along them."""
        size, start = self._flattened(ranges), self.syntax.call(f"start_{kind}", wide, [], None)

        def live(r: str) -> str:
            return self._live(r, element(self._split(r, ranges)), start)

        if self.bound(size) <= BLOCK_LIMIT:
            return self._reduced_block(kind, wide, live(self.block(size)))
        total = self.name("acc")
        self.walk(
            size,
            lambda r: self.line(f"{total} = {self._combined(kind, wide, total, live(r))}"),
            lambda r: self._accumulator(total, start, wide, (r,)),
        )
        return self._reduced_block(kind, wide, total)

    def _flattened(self, ranges: list[str]) -> str:
        """The size of all ranges together."""
        if all(n.isdigit() for n in ranges):
            return str(math.prod(map(int, ranges)))
        size = " * ".join(ranges) if len(ranges) == 1 else f"({' * '.join(ranges)})"
        self.upper[size] = math.prod(map(self.bound, ranges))
        return size

    def _split(self, r: str, ranges: list[str]) -> list[str]:
        """The index in each range of a place in all of them."""
        places, rest = [], r
        for n in reversed(ranges[1:]):
            places.append(self.named(f"{rest} % {n}"))
            rest = self.named(f"{rest} // {n}")
        return [rest, *places[::-1]]

    def _live(self, r: str, value: str, start: str) -> str:
        """The value over all lanes of `r`, those outside of the range set to `start`."""
        mask = self.masks.get(r) or ("" if r in self.axes(value) else f"{r} >= 0")
        return self.let(f"tl.where({mask}, {value}, {start})" if mask else value)

    def _combined(self, kind: str, wide: DType, a: str, b: str) -> str:
        return self.syntax.call({"sum": "add", "product": "multiply"}.get(kind, kind), wide, [a, b], None)

    def _reduced_block(self, kind: str, wide: DType, value: str) -> str:
        """A block as one scalar; NaN anywhere gives NaN."""
        if kind == "sum":
            return self._scalar(f"tl.sum({value}, 0)")
        if kind == "product":
            return self._scalar(f"tl.reduce({value}, 0, multiply)")
        name = {"maximum": "max", "or": "max", "minimum": "min", "and": "min"}[kind]
        if kind in ("and", "or") or wide.name == "bool":
            return self._scalar(f"tl.{name}({value}.to(tl.int32), 0) != 0")
        best = self._scalar(f"tl.{name}({value}, 0)")
        if not wide.is_float:
            return best
        spoiled = self._scalar(f"tl.max(({value} != {value}).to(tl.int32), 0) != 0")
        return self._scalar(f'tl.where({spoiled}, float("nan"), {best})')

    def _scalar(self, expression: str) -> str:
        name = self.let(expression)
        self.vectors[name] = frozenset()
        return name

    def arg_fold(
        self, kind: str, last: bool, dtype: DType, index: Index, length: str, element: Callable[[str], str]
    ) -> str:
        best, where, unset = self.name("best"), self.name("where"), "-1" if last else str(2**31 - 1)
        order = {"maximum": ">", "minimum": "<"}[kind] + ("=" if last else "")
        wide = accumulator_of(dtype)

        def start(place: Index) -> None:
            self._accumulator(best, self.syntax.call(f"start_{kind}", wide, [], None), wide, place)
            self._accumulator(where, unset, i32, place)

        def step(r: str) -> None:
            value = self.let(f"({element(r)}).to({self.syntax.register(wide)})")
            better = f"({where} == {unset}) | ({value} {order} {best}) | (({value} != {value}) & ({best} == {best}))"
            mask = self.masks.get(r)
            better = self.let(f"({better}) & {mask}" if mask else better)
            self.line(f"{best} = tl.where({better}, {value}, {best})")
            self.line(f"{where} = tl.where({better}, {r}, {where})")

        if self.axes(*index):
            self.sequential += 1
            s = self.name("s")
            with self.scope(s) as inner:
                step(s)
            start(index)
            self._loops([s], [f"0, {length}"], inner.lines)
            return self.let(f"{where}.to(tl.int64)")
        self.walk(length, step, lambda r: start((r,)))
        spoiled = self._scalar(f"tl.max(({best} != {best}).to(tl.int32), 0) != 0")
        top = self._scalar(f"tl.{kind[:3]}({best}, 0)")
        chosen = self.let(f"tl.where({spoiled}, {best} != {best}, {best} == {top})")
        return self._scalar(f"tl.{'max' if last else 'min'}(tl.where({chosen}, {where}, {unset}), 0).to(tl.int64)")


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()

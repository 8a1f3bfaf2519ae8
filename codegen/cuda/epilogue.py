"""What becomes of the sums of a linear layer in CUDA C++: its elementwise work, as statements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aotc.codegen.cpp import STORAGE, lead_index, register
from aotc.codegen.cuda.hopper import SYNTAX
from aotc.codegen.loops import Index, LoopNest, add
from aotc.ir.graph import Graph, Value

if TYPE_CHECKING:
    from aotc.codegen.cuda.matmul import Layer


def has_form(layer: Layer) -> bool:
    """Whether the header has what the epilogue needs."""
    odd = {v.type.dtype.name for v in layer.body.values()} - {"f32", "f16", "bf16", "bool"}
    calls = {n.op for n in layer.body.nodes} & {"reduce", "arg_reduce", "rms_norm"}
    dots = sum(n.op == "dot_general" for n in layer.body.nodes)
    return not odd and not calls and dots == 1 and layer.norm is None


class _Nest(LoopNest):
    """What is read at row m and column c is in `loaded`, with the type and the expression that loads it."""

    def __init__(self, body: Graph, pointers: dict[Value, str], ahead: bool) -> None:
        super().__init__(body, SYNTAX, pointers)
        self.loads: list[tuple[str, str]] = []
        self._ahead = ahead

    def _load(self, value: Value, index: Index) -> str:
        expression = super()._load(value, index)
        if not self._ahead or index[-1:] != ("c",):
            return expression
        self.loads.append((register(value.type.dtype), expression))
        return f"loaded{len(self.loads) - 1}[half][j][i]"


class Epilogue:
    """What becomes of the sums `acc0` and `acc1` of row m and column c, as statements; types and pointers of outputs. With
    `ahead`, what is read at c is loaded before the sums are there: see `loads`."""

    def __init__(self, layer: Layer, ahead: bool = False) -> None:
        frame, dot = layer.frame, layer.dot
        nest = _Nest(layer.body, frame.pointers, ahead)
        lead = dot.inputs[0].type.shape[:-1]
        names = tuple(f"i{n}" for n in range(len(lead)))

        def sums(index: tuple[str, ...]) -> str:
            if index[-1] == "c":
                return "acc0"
            assert index[-1] == add(str(layer.width), "c"), index
            return "acc1"

        nest.given[dot.out] = sums
        if layer.scale is not None:
            nest.given[layer.scale.out] = lambda _: "rms"
        self.outputs: list[tuple[str, str]] = []
        with nest.scope(*names) as row, nest.scope("c") as inner:
            for n, out in enumerate(layer.body.outputs):
                value = SYNTAX.stored(out.type.dtype, nest.emit(out, (*names, "c")))
                nest.line(f"(i == 0 ? made{n}[j].first : made{n}[j].second) = {value};")
                self.outputs.append((STORAGE[out.type.dtype.name], frame.pointers[frame.body.outputs[n]]))
            if layer.squares is not None:
                value = nest.emit(layer.body.outputs[0], (*names, "c"))
                nest.line(f"sums[8 * j / {layer.squares.attrs.width}] += {value} * {value};")
        self.rows = lead_index("m", lead, names, SYNTAX)
        self.loads = nest.loads
        self.row_lines, self.lines = nest.scopes[0].lines + row.lines, inner.lines

"""Renders linear layers: `matvec` for one row; on Hopper `chain` for up to 64 and `wgmma` for more, else `skinny` and
`matmul`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aotc.codegen.cuda import chain, schedule, wgmma
from aotc.codegen.cuda.frame import SYNTAX, Frame, Grid, Source, lead, only, waits
from aotc.codegen.cuda.nest import power_of_two
from aotc.codegen.loops import Index, add, to_primitives
from aotc.ir.dtypes import f32
from aotc.ir.graph import Graph, Node
from aotc.ir.sizes import Size, ceildiv, product


def is_linear_for_tensor_cores(node: Node) -> bool:
    """Whether `matmul` computes a node: x [..., K] times a dense weight [N, K] in a float of up to 32 bits."""
    if node.op != "dot_general":
        return False
    at, (x, w) = node.attrs, node.inputs
    dense = w.type.rank == 2 and w.type.packing is None and all(isinstance(s, int) for s in w.type.shape)
    over_k = at.lhs_contracting == (x.type.rank - 1,) and at.rhs_contracting == (1,) and not at.lhs_batch
    return dense and over_k and x.type.rank > 1 and x.type.dtype.name in ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Scale:
    """rms_scale of rows of x: pointer to sums of squares, `groups` of them a row, over `size` squares."""

    sums: str
    groups: int
    size: int
    eps: str

    @property
    def lanes(self) -> int:
        return power_of_two(self.groups)


@dataclass(frozen=True)
class Squares:
    """sums_of_squares of what a layer makes: pointer to them, `groups` a row, `width` squares each."""

    sums: str
    groups: int
    width: int


@dataclass(frozen=True)
class Norm:
    """rms_norm of a matvec's input: pointer to its weight, or empty, and epsilon as Triton writes it."""

    weight: str
    eps: str


def matmul(frame: Frame) -> Source:
    layer = layer_of(frame.widest(), frame)  # so is the template's choice, and nothing here takes memory by the row
    setting, upper = frame.setting, layer.frame.upper(layer.rows)
    if upper == 1:
        return _matvec(layer, schedule.MATVEC.choose(setting, layer.shape))
    if chain.takes(layer, upper):
        return chain.phases(layer.frame, [layer])
    if wgmma.takes(layer, upper):
        return wgmma.wgmma(layer)
    if upper <= schedule.SKINNY_ROWS:
        tile = schedule.SKINNY.choose(setting, layer.shape)
        return _skinny(layer, tile, tile.splits)
    assert layer.scale is None and layer.squares is None, "norms are deferred for few rows alone"
    return _matmul(layer, schedule.MATMUL.choose(setting, layer.shape))


@dataclass(frozen=True)
class Layer:
    """A linear layer: its product, what may be normalised before it, and the size of its output."""

    frame: Frame
    body: Graph
    dot: Node
    norm: Node | None
    width: int
    parts: int  # 2: both halves of a gated layer
    rows: Size
    most: int  # rows that there is memory for
    scale: Node | None = None
    squares: Node | None = None

    @property
    def depth(self) -> int:
        return self.dot.inputs[1].type.ints[1]

    @property
    def shape(self) -> schedule.Linear:
        """What its schedule depends on."""
        rows, dtype = self.frame.upper(self.rows), self.dot.inputs[0].type.dtype
        squares = self.squares.attrs.width if self.squares is not None else 1
        return schedule.Linear(rows, self.width, self.depth, self.parts, dtype, self.norm is not None, squares)

    def hooks(self, tile: Any) -> dict[str, Any]:
        """What all templates take."""
        frame, (x, w) = self.frame, self.dot.inputs
        return {
            "n": self.width, "depth": self.depth, "parts": range(self.parts), "x": frame.pointers.get(x, ""),
            "w": frame.pointers[w], "m": SYNTAX.size(self.rows), "tile": tile, "even_n": self.width % tile.n == 0,
            "even_k": self.depth % tile.k == 0, "wide": frame.wide(x, w, self.dot.out), "scale": self._scale(),
            "squares": self._squares(),
        }  # fmt: skip

    def _squares(self) -> Squares | None:
        if self.squares is None:
            return None
        width = self.squares.attrs.width
        return Squares(self.frame.pointers[self.frame.body.outputs[-1]], self.width // width, width)

    def _scale(self) -> Scale | None:
        if self.scale is None:
            return None
        (sums,), at = self.scale.inputs, self.scale.attrs
        return Scale(self.frame.pointers[sums], self.frame.upper(sums.type.shape[-1]), at.size, SYNTAX.literal(at.eps, f32))


def layer_of(frame: Frame, own: Frame) -> Layer:
    """The layer that a frame computes, whose memory is that of its own program."""
    norm, scale, squares = (
        next((n for n in frame.body.nodes if n.op == op), None) for op in ("rms_norm", "rms_scale", "sums_of_squares")
    )
    body = to_primitives(_without(frame.body, norm, scale, squares))
    dot = only(body, "dot_general")
    x, w = dot.inputs
    out = body.outputs[0]
    columns = w.type.ints[0]
    parts = 2 if out.type.shape != dot.out.type.shape else 1  # a gated layer: both halves of a column at once
    rows = product(x.type.shape[:-1])
    return Layer(frame, body, dot, norm, columns // parts, parts, rows, own.upper(rows), scale, squares)


def _matvec(layer: Layer, tile: schedule.Tile) -> Source:
    frame, norm = layer.frame, layer.norm
    hooks: dict[str, Any] = layer.hooks(tile) | {"norm": None}
    if norm is not None:
        hooks["x"] = frame.pointers[norm.inputs[0]]
        hooks["norm"] = Norm(frame.pointers[norm.inputs[1]], SYNTAX.literal(norm.attrs.eps, f32))
    lines = _sums_lines(layer, "0", ("c", tile.n, "live"))
    grid: Grid = (ceildiv(layer.width, tile.n), 1, 1)
    return frame.source(
        "matvec", grid, tile.num_warps, tile.num_stages, lines=lines, steps=-(-layer.depth // tile.k), **hooks
    )


def _skinny(layer: Layer, tile: schedule.Tile, splits: int) -> Source:
    frame = layer.frame
    blocks = ceildiv(layer.width, tile.n)
    span = -(-layer.depth // (splits * tile.k)) * tile.k
    hooks = layer.hooks(tile) | {"even_k": layer.depth == splits * span}
    lines = _tile_lines(layer, tile)
    share = tile.m * tile.n * layer.parts * 4
    return frame.source(
        "skinny", (blocks, splits, 1), tile.num_warps, tile.num_stages, lines=lines, span=span, splits=splits,
        scratch_bytes=blocks * splits * share if splits > 1 else 0, counter_bytes=blocks * 4 if splits > 1 else 0,
        **hooks,
    )  # fmt: skip


def _matmul(layer: Layer, tile: schedule.Tile) -> Source:
    grid = (ceildiv(layer.rows, tile.m), ceildiv(layer.width, tile.n), 1)
    arch, x = layer.frame.setting.arch, layer.dot.inputs[0]
    maps = waits(arch) and x.type.dtype.itemsize == 2 and layer.depth % 8 == 0  # TMA: rows of whole 16 bytes
    return layer.frame.source(
        "matmul", grid, tile.num_warps, tile.num_stages, lines=_tile_lines(layer, tile), tensor_maps=maps,
        **layer.hooks(tile),
    )  # fmt: skip


def _tile_lines(layer: Layer, tile: schedule.Tile) -> list[str]:
    """The epilogue of a tile of sums over rows `m` and columns `c`."""
    return _sums_lines(layer, "m", ("m", tile.m, "live_m"), ("c", tile.n, "live_c"))


def _sums_lines(layer: Layer, row: str, *vectors: tuple[str, int, str]) -> list[str]:
    """What becomes of the sums `acc0` and `acc1`, which have these (name, lanes, mask) of vectors; where there is a
    scale, `rms` has the lanes of the first."""
    dot = layer.dot
    nest = layer.frame.nest(layer.body, layer.frame.wide(*dot.inputs, dot.out))
    names = [nest.vector(*vector) for vector in vectors]
    nest.scopes[0].variables |= set(names)
    nest.given[dot.out] = lambda index: f"acc{_part(index, layer.width)}"
    nest.vectors |= {f"acc{p}": nest.axes(*names) for p in range(layer.parts)}
    index = (*lead(nest, row, dot.inputs[0].type.shape[:-1]), "c")
    if layer.scale is not None:
        nest.given[layer.scale.out] = lambda _: "rms"
        nest.vectors["rms"] = nest.axes(names[0])
    for out in layer.body.outputs:
        nest.store(out, index)
    if layer.squares is not None:
        nest.line(f"made = {nest.emit(layer.body.outputs[0], index)}")
    return nest.scopes[0].lines


def _without(body: Graph, norm: Node | None, scale: Node | None, squares: Node | None) -> Graph:
    """The body without what the template makes: x normalised, scales of rows (inputs now), sums of squares (the last
    output)."""
    gone = [n for n in (norm, scale, squares) if n is not None]
    if not gone:
        return body
    last = squares.out if squares is not None else None
    outputs = [(name, v) for name, v in zip(body.output_names, body.outputs, strict=True) if v is not last]
    return replace(
        body, inputs=(*body.inputs, *(n.out for n in (norm, scale) if n is not None)),
        outputs=tuple(v for _, v in outputs), output_names=tuple(name for name, _ in outputs),
        nodes=tuple(n for n in body.nodes if n not in gone),
    )  # fmt: skip


def _part(index: Index, width: int) -> int:
    """Which half of a gated layer's output a column lies in."""
    if index[-1] == "c":
        return 0
    assert index[-1] == add(str(width), "c"), index
    return 1



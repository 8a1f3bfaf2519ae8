"""Renders linear layers in 16-bit floats as CUDA C++ for Hopper: tiles of 16 to 256 columns, so that those of a layer fill
the card evenly, weights on their way before x is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aotc.codegen.cpp import STORAGE, lead_index
from aotc.codegen.cuda.frame import Source, TensorMap, environment
from aotc.codegen.cuda.hopper import SYNTAX, source
from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.schedule import PROGRAMS, Linear
from aotc.codegen.cuda.tables import Family
from aotc.codegen.loops import LoopNest, add

if TYPE_CHECKING:
    from aotc.codegen.cuda.matmul import Layer

DEPTH = 64  # elements of a row of a box: 128 bytes, which are swizzled
WIDE, SHALLOW = 48, 4096  # columns of a tile that beats `skinny`, and the depth up to which fewer do
FULL_STAGE = 12 << 10  # bytes that are worth a barrier


@dataclass(frozen=True)
class Tile:
    """Tiles of m rows (64 or 128) and `n` columns of sums, steps of k, as many in flight as there are stages; warpgroups
    that multiply: two for 128 rows, else up to four that take steps in turns. Raises ValueError for what the template does
    not take."""

    m: int
    n: int
    k: int
    num_stages: int
    groups: int

    def __post_init__(self) -> None:
        allowed = {
            "m": (64, 128), "n": range(16, 257, 16), "k": (64, 128, 256), "num_stages": range(1, 65),
            "groups": (2,) if self.m == 128 else (1, 2, 3, 4),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} = {getattr(self, name)} is not supported")
        # Each group holds a stage until its next one is there. All steps of a stage are those of one group: a barrier tells
        # this phase from the one before, and a group that goes on to the next phase has seen that one end.
        if self.num_stages <= self.turns or self.num_stages % self.turns:
            raise ValueError(f"num_stages = {self.num_stages} must be a multiple of {self.turns}, and more")

    @property
    def turns(self) -> int:
        """Warpgroups that share rows."""
        return self.groups * 64 // self.m

    @property
    def warps(self) -> int:
        """Four of each group, four that copy and scale."""
        return 4 * self.groups + 4

    def x_rows(self, rows: int) -> int:
        """Rows of x that are copied, of up to `rows`: groups of 8, which are swizzled together."""
        return self.m if self.m == 128 else -(-min(rows, 64) // 8) * 8

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block: aligned stages, two barriers for each, scales of rows, sums of all groups but one;
        products of 64 rows read over the end of fewer."""
        more = 8 + 64 * 4 + (self.groups - 1) * 64 * self.n * 4 if self.m == 64 else 0
        more = max(more, (self.m - self.x_rows(rows)) * DEPTH * 2)
        return 1024 + self.num_stages * ((self.x_rows(rows) + self.n) * self.k * 2 + 16) + more


def takes(layer: Layer, rows: int) -> bool:
    """Whether this template computes a layer for up to `rows` rows: 16-bit floats, rows of whole blocks of 64. Up to 64 rows
    it takes layers that one wave of wide tiles covers, or of few steps: narrow ones wait for one product after the other."""
    x, arch = layer.dot.inputs[0].type, layer.frame.setting.arch
    even = layer.depth % DEPTH == 0 and layer.width % 2 == 0 and rows * layer.width < 1 << 31
    if rows == 1 or arch != "sm90" or not even or x.dtype.name not in ("bf16", "f16") or not _has_form(layer):
        return False
    tile = rule(arch, layer.shape)
    return rows > 64 or (tile.n >= WIDE or layer.depth <= SHALLOW) and tiles_of(layer.shape, tile) <= PROGRAMS


def _has_form(layer: Layer) -> bool:
    """Whether the header has what the epilogue needs."""
    odd = {v.type.dtype.name for v in layer.body.values()} - {"f32", "f16", "bf16", "bool"}
    calls = {n.op for n in layer.body.nodes} & {"reduce", "arg_reduce", "rms_norm"}
    dots = sum(n.op == "dot_general" for n in layer.body.nodes)
    return not odd and not calls and dots == 1 and layer.norm is None


def tiles_of(of: Linear, tile: Tile) -> int:
    """Tiles that a layer is cut into."""
    return -(-of.rows // tile.m) * -(-of.n * of.parts // tile.n)


def cost(of: Linear, tile: Tile) -> float:
    """Cycles, about. Of a step of 64: products at 2048 multiplications a cycle, but no less than what one takes alone; x
    and, for many rows, w from L2 at 64 bytes a cycle; w from memory at 20. Then what a wave takes to begin and end."""
    x, w = tile.x_rows(of.rows) * DEPTH * 2, tile.n * DEPTH * 2
    read = (x + w) / 64 if of.rows > 64 else x / 64 + w / 20
    step = max(tile.m * tile.n / 32, read, 240 / tile.turns)
    return -(-tiles_of(of, tile) // PROGRAMS) * (-(-of.depth // DEPTH) * step + 10 * tile.n) + 3000


def staged(arch: str, rows: int, n: int, parts: int = 1) -> Tile:
    """The tile for up to `rows` rows with as many stages as fit the shared memory."""
    m, k = 64 if rows <= 64 else 128, DEPTH
    tile = Tile(m, n, k, 8, 2 if m == 128 else 4 if n <= 32 else 2 if n <= 64 else 1)
    while parts == 1 and k < 256 and (tile.x_rows(rows) + n) * k * 2 < FULL_STAGE:
        k *= 2
    one, two = (replace(tile, k=k, num_stages=stages).shared_bytes(rows) for stages in (8, 16))
    stages = min(8 + (LIMITS[arch].shared_bytes - one) * 8 // (two - one), 64)
    return replace(tile, k=k, num_stages=stages // tile.turns * tile.turns)


def every(arch: str, of: Linear) -> list[Tile]:
    """All tiles of a layer, the cheapest first; those of equal cost by fewer columns."""
    most = min(-(-of.n * of.parts // 16) * 16, 256)
    widths = [n for n in range(16, most + 1, 16) if (n // of.parts) % of.squares == 0]
    return sorted((staged(arch, of.rows, n, of.parts) for n in widths), key=lambda t: (cost(of, t), t.n))


def rule(arch: str, of: Linear) -> Tile:
    return every(arch, of)[0]


def candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """All widths."""
    yield from every(arch, of)


def _wrong(of: Linear, tile: Tile) -> str:
    if (tile.m == 64) != (of.rows <= 64):
        return "m must be 64 for up to 64 rows, else 128"
    if tile.k > DEPTH and of.parts == 2:
        return "k must be 64 for a gated layer"
    return f"n must be a multiple of {of.squares}, whose squares are added up" if tile.n // of.parts % of.squares else ""


WGMMA = Family("wgmma", Tile, rule, candidates, _wrong)


def wgmma(layer: Layer) -> Source:
    """The source of a layer."""
    frame, (x, w) = layer.frame, layer.dot.inputs
    tile = WGMMA.choose(frame.setting, layer.shape)
    element, rows, epilogue = x.type.dtype.name, frame.upper(layer.rows), _Epilogue(layer)
    x_rows, blocks = tile.x_rows(rows), tile.k // DEPTH
    maps = (
        TensorMap(frame.arguments.index(x), element, layer.most, layer.depth, x_rows, blocks),
        TensorMap(frame.arguments.index(w), element, w.type.ints[0], layer.depth, tile.n // layer.parts, blocks),
    )
    product = environment().get_template("wgmma_product.cu.j2").render(element=element, n=tile.n)
    hooks: dict[str, Any] = layer.hooks(tile) | {"m": SYNTAX.size(layer.rows)}
    return source(
        frame, "wgmma", (min(tiles_of(layer.shape, tile), PROGRAMS), 1, 1),  # blocks stay, and leave early where rows are few
        tile.warps, tile.num_stages, tile.shared_bytes(rows), maps, more_head=f"\n{product}", **hooks, element=element,
        x_rows=x_rows, max_rows=rows, rows=epilogue.rows, row_lines=epilogue.row_lines, lines=epilogue.lines,
        outputs=epilogue.outputs,
    )  # fmt: skip


class _Epilogue:
    """What becomes of the sums `acc0` and `acc1` of row m and column c, as statements; types and pointers of outputs."""

    def __init__(self, layer: Layer) -> None:
        frame, dot = layer.frame, layer.dot
        nest = LoopNest(layer.body, SYNTAX, frame.pointers)
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
        self.row_lines, self.lines = nest.scopes[0].lines + row.lines, inner.lines

"""Renders linear layers of up to 64 rows in 16-bit floats as CUDA C++ for Hopper: one of them, or several that follow one
another as phases of one kernel, so that weights keep coming from one to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aotc.codegen.cuda.epilogue import Epilogue, has_form
from aotc.codegen.cuda.frame import Frame, Setting, Source, TensorMap, environment
from aotc.codegen.cuda.hopper import SYNTAX, source
from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.schedule import PROGRAMS, SKINNY_ROWS, Linear
from aotc.codegen.cuda.tables import Family
from aotc.ir.graph import Node, Value
from aotc.ir.program import Kernel
from aotc.ir.sizes import Size

if TYPE_CHECKING:
    from aotc.codegen.cuda.matmul import Layer

DEPTH = 64  # elements of a row of a box: 128 bytes, which are swizzled
BY_COLUMNS = 112  # of a tile whose halves take a warpgroup as long as its latency
STAGE_BYTES = 28 << 10  # where no wide tile says more
MOST_STAGES = 32
HELPERS = 4  # warps that copy and scale
GROUPS = 2  # warpgroups that multiply
OPEN_BYTES = 72 << 10  # of weights on their way to a multiprocessor: enough for the memory's latency
SPLITS = (1, 2)  # blocks of a cluster: two always fit, as multiprocessors come in pairs
CANDIDATES = 8  # that are measured: others cost too much to come near
MOST_AHEAD = 64  # columns of a warpgroup for which there are registers to load ahead what the epilogue reads


@dataclass(frozen=True)
class Width:
    """Columns of a tile, both parts of a gated layer together, and blocks that share its depth. Raises ValueError for what
    the template does not take."""

    n: int
    splits: int = 1

    def __post_init__(self) -> None:
        for name, taken in (("n", range(16, 257, 16)), ("splits", SPLITS)):
            if getattr(self, name) not in taken:
                raise ValueError(f"{name} = {getattr(self, name)} is not supported")


@dataclass(frozen=True)
class Tile:
    """Of a phase: columns, the depth of a stage, whether warpgroups share the columns or the depth of it, blocks that share
    the layer's; `own` columns of a warpgroup's product, of which it has `kept` in the end."""

    n: int
    k: int
    by_columns: bool
    splits: int = 1

    def stage_bytes(self, x_rows: int) -> int:
        return (x_rows + self.n) * self.k * 2

    @property
    def own(self) -> int:
        return self.n // GROUPS if self.by_columns else self.n

    @property
    def kept(self) -> int:
        return self.own // self.splits

    def share_bytes(self, x_rows: int) -> int:
        """Of the sums that warpgroups give one another: of the other block, and of those that keep none."""
        slots = GROUPS * (self.splits - 1) + (0 if self.by_columns else GROUPS - 1)
        return slots * -(-x_rows // 16) * 32 * self.kept // 2 * 4


@dataclass(frozen=True)
class Ring:
    """What the phases of a kernel share: rows of x that are copied (groups of 8, which are swizzled together), stages, shared
    memory."""

    x_rows: int
    stage_bytes: int
    stages: int
    shared_bytes: int
    tiles: tuple[Tile, ...]


def fits(layer: Layer, rows: int) -> bool:
    """Whether a layer can be a phase: up to 64 rows of 16-bit floats, of whole blocks of 64."""
    x, arch = layer.dot.inputs[0].type, layer.frame.setting.arch
    even = layer.depth % DEPTH == 0 and layer.width % 2 == 0
    return rows <= SKINNY_ROWS and arch == "sm90" and even and x.dtype.name in ("bf16", "f16") and has_form(layer)


def takes(layer: Layer, rows: int) -> bool:
    """Whether this template computes a layer that stands alone: one that one wave of tiles covers."""
    if rows == 1 or not fits(layer, rows):
        return False
    width = PHASE.rule("sm90", layer.shape)
    return tiles_of(layer.shape, width.n) * width.splits <= PROGRAMS


def tiles_of(of: Linear, n: int) -> int:
    """Tiles that a layer is cut into."""
    return -(-of.n * of.parts // n)


def _x_rows(rows: int) -> int:
    return -(-rows // 8) * 8


def _by_columns(of: Linear, n: int) -> bool:
    return of.parts == 2 or n >= BY_COLUMNS and n % (8 * GROUPS) == 0 and n // GROUPS % of.squares == 0


def _wrong(of: Linear, width: Width) -> str:
    """Why warpgroups can't share tiles of such a width, or nothing."""
    shares = of.parts * (GROUPS if _by_columns(of, width.n) else 1) * width.splits
    share = width.n // shares
    if width.splits > 1 and (of.parts > 1 or tiles_of(of, width.n) * width.splits > PROGRAMS):
        return f"splits must be 1 for a gated layer, and where there are more than {PROGRAMS} blocks"
    if share * shares != width.n or share % 8:
        return f"n must be a multiple of {8 * of.parts * GROUPS * width.splits}, which warpgroups share"
    return f"n must be a multiple of {of.squares}, whose squares are added up" if share % of.squares else ""


def _depth(of: Linear, width: Width, most: int) -> int:
    """Of a step: as deep as a stage of `most` bytes takes, no more than 512 and what there is."""
    if _by_columns(of, width.n):
        return DEPTH
    step = DEPTH * GROUPS
    stages = most // ((_x_rows(of.rows) + width.n) * 2 * step), 512 // step, -(-of.depth // (step * width.splits))
    return max(min(stages), 1) * step


def cost(of: Linear, width: Width) -> float:
    """Cycles, about. Of a depth of 64: products at 2048 multiplications a cycle, but no less than the latency of one a
    warpgroup; x and w from L2 at 44 bytes a cycle, w from memory at 20, at more where there are fewer blocks. Then what a
    wave takes to begin and end, and the blocks of a cluster to meet."""
    n, splits = width.n, width.splits
    blocks = tiles_of(of, n) * splits
    x, w = _x_rows(of.rows) * DEPTH * 2, n * DEPTH * 2
    latency = 220 if _by_columns(of, n) else 100 + 250 * DEPTH / _depth(of, width, STAGE_BYTES)
    part = max(2 * n, (x + w) / 44, w / 20 * min(blocks / PROGRAMS, 1), latency)
    waves, parts = -(-blocks // PROGRAMS), -(-of.depth // (DEPTH * splits))
    return waves * (parts * part + 10 * n / splits) + 3000 * splits


def every(arch: str, of: Linear) -> list[Width]:
    """All widths of a layer, the cheapest first; those of equal cost by fewer tiles."""
    most = min(-(-of.n * of.parts // 16) * 16, 256)
    widths = [Width(n, splits) for splits in SPLITS for n in range(16, 257, 16) if n <= most or n <= 32]
    return sorted((w for w in widths if not _wrong(of, w)), key=lambda w: (round(cost(of, w)), w.splits, -w.n))


def _rule(arch: str, of: Linear) -> Width:
    return every(arch, of)[0]


def _candidates(arch: str, of: Linear) -> Iterator[Width]:
    yield from every(arch, of)[:CANDIDATES]


PHASE = Family("phase", Width, _rule, _candidates, _wrong)


def ring(arch: str, shapes: Sequence[Linear], widths: Sequence[Width]) -> Ring:
    """The ring for phases of these widths: stages as large as those of the widest tile, as many of them as fit."""
    x_rows = _x_rows(shapes[0].rows)
    wide = [_by_columns(of, width.n) for of, width in zip(shapes, widths, strict=True)]
    widest = max((w.n for w, by in zip(widths, wide, strict=True) if by), default=0)
    most = Tile(widest, DEPTH, True).stage_bytes(x_rows) if widest else STAGE_BYTES
    tiles = [Tile(w.n, _depth(of, w, most), by, w.splits) for of, w, by in zip(shapes, widths, wide, strict=True)]
    stage = -(-max(t.stage_bytes(x_rows) for t in tiles) // 1024) * 1024
    shares = max(t.share_bytes(x_rows) for t in tiles)
    rest = max(16 * len(tiles) + 256 + shares, (64 - x_rows) * DEPTH * 2)  # products read 64 rows of x
    stages = min((LIMITS[arch].shared_bytes - 1024 - rest) // (stage + 24), MOST_STAGES)
    return Ring(x_rows, stage, stages, 1024 + stages * (stage + 24) + rest, tuple(tiles))


def chain(frame: Frame) -> Source:
    """The source of a kernel whose phases are the fusions of its body."""
    from aotc.codegen.cuda.matmul import layer_of

    widest, made, layers = frame.widest(), set[Value](), []
    for node in frame.body.nodes:
        layers.append(layer_of(PhaseFrame(widest, node, made), frame))
        made |= set(node.outputs)
    return phases(frame, layers)


def phase_kind(kernel: Kernel, setting: Setting) -> tuple[Size, str] | None:
    """What phases of one kernel have in common: rows and elements. None for a kernel that can be no phase."""
    from aotc.codegen.cuda.matmul import layer_of

    if kernel.family != "matmul":
        return None
    frame = Frame(kernel, setting)
    layer = layer_of(frame.widest(), frame)
    rows = layer.frame.upper(layer.rows)
    return (layer.rows, layer.dot.inputs[0].type.dtype.name) if rows > 1 and fits(layer, rows) else None


class PhaseFrame(Frame):
    """A fusion of a chain as a kernel of its own, whose memory has the chain's names. What phases before it made is read
    past L1."""

    def __init__(self, chain: Frame, node: Node, made: set[Value]) -> None:
        super().__init__(Kernel(chain.kernel.name, node.attrs.kind, node.attrs.body), chain.setting)
        inputs = dict(zip(self.body.inputs, node.inputs, strict=True))
        self._outer = inputs | dict(zip(self.body.outputs, node.outputs, strict=True))
        self._chain = chain
        self.pointers = {v: chain.pointers[o] for v, o in self._outer.items()}
        self.pointers |= {v: f"fresh({chain.pointers[o]})" for v, o in inputs.items() if o in made}

    def place(self, value: Value) -> int:
        return self._chain.place(self._outer[value])


def _widths(setting: Setting, shapes: Sequence[Linear]) -> list[Width]:
    """What is chosen for each; phases of one kernel do not share depths."""
    chosen = [PHASE.choose(setting, of) for of in shapes]
    if len(shapes) == 1:
        return chosen
    whole = [(w for w in (chosen[n], *every(setting.arch, of)) if w.splits == 1) for n, of in enumerate(shapes)]
    return [next(widths) for widths in whole]


def phases(frame: Frame, layers: Sequence[Layer]) -> Source:
    """The source of a kernel whose phases are these layers."""
    setting, rows = frame.setting, layers[0].frame.upper(layers[0].rows)
    element, shapes = layers[0].dot.inputs[0].type.dtype.name, [layer.shape for layer in layers]
    made = ring(setting.arch, shapes, _widths(setting, shapes))
    maps, hooks = list[TensorMap](), list[dict[str, Any]]()
    for layer, tile in zip(layers, made.tiles, strict=True):
        (x, w), blocks = layer.dot.inputs, tile.k // DEPTH
        share = tile.own // layer.parts
        maps.append(TensorMap(layer.frame.place(x), element, layer.most, layer.depth, made.x_rows, blocks))
        maps.append(TensorMap(layer.frame.place(w), element, w.type.ints[0], layer.depth, share, blocks))
        epilogue = Epilogue(layer, ahead=tile.kept // layer.parts <= MOST_AHEAD)
        hooks.append(layer.hooks(tile) | vars(epilogue) | {"by_columns": tile.by_columns})
    splits, template = made.tiles[0].splits, environment().get_template("wgmma_product.cu.j2")
    products = [template.render(element=element, n=n) for n in sorted({t.own for t in made.tiles})]
    blocks = min(max(tiles_of(of, t.n) * t.splits for of, t in zip(shapes, made.tiles, strict=True)), PROGRAMS)
    return source(
        frame, "chain", (blocks, 1, 1), 4 * GROUPS + HELPERS, made.stages, made.shared_bytes, tuple(maps),
        counter_bytes=4 * len(layers) if len(layers) > 1 else 0, more_head="".join(f"\n{p}" for p in products),
        together=len(layers) > 1, cluster=splits, splits=splits, m=SYNTAX.size(layers[0].rows), element=element,
        groups=GROUPS, stages=made.stages, stage_bytes=made.stage_bytes, x_rows=made.x_rows, max_rows=rows,
        phases=hooks, open_bytes=OPEN_BYTES,
    )  # fmt: skip

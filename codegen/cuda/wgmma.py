"""Renders linear layers of more than 64 rows in 16-bit floats as CUDA C++ for Hopper: tiles of 16 to 256 columns, so that
those of a layer fill the card evenly, weights on their way before x is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aotc.codegen.cuda.epilogue import Epilogue, has_form
from aotc.codegen.cuda.frame import Source, TensorMap, environment
from aotc.codegen.cuda.hopper import SYNTAX, source
from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.schedule import PROGRAMS, SKINNY_ROWS, Linear
from aotc.codegen.cuda.tables import Family

if TYPE_CHECKING:
    from aotc.codegen.cuda.matmul import Layer

ROWS, DEPTH = 128, 64  # of a tile; elements of a row of a box: 128 bytes, which are swizzled
WARPS = 12  # two warpgroups that multiply, and one thread of four warps that copies


@dataclass(frozen=True)
class Tile:
    """`n` columns of sums, stages of 64 elements in flight. Raises ValueError for what the template does not take."""

    n: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, values in (("n", range(16, 257, 16)), ("num_stages", range(2, 65))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} = {getattr(self, name)} is not supported")

    @property
    def k(self) -> int:
        """Depth of a stage."""
        return DEPTH

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: aligned stages, two barriers for each."""
        return 1024 + self.num_stages * ((ROWS + self.n) * DEPTH * 2 + 16)


def takes(layer: Layer, rows: int) -> bool:
    """Whether this template computes a layer for up to `rows` rows: 16-bit floats, rows of whole blocks of 64."""
    x, arch = layer.dot.inputs[0].type, layer.frame.setting.arch
    even = layer.depth % DEPTH == 0 and layer.width % 2 == 0 and rows * layer.width < 1 << 31
    return rows > SKINNY_ROWS and arch == "sm90" and even and x.dtype.name in ("bf16", "f16") and has_form(layer)


def tiles_of(of: Linear, n: int) -> int:
    """Tiles that a layer is cut into."""
    return -(-of.rows // ROWS) * -(-of.n * of.parts // n)


def cost(of: Linear, n: int) -> float:
    """Cycles, about. Of a step of 64: products at 2048 multiplications a cycle, x and w from L2 at 64 bytes a cycle. Then
    what a wave takes to begin and end."""
    step = max(ROWS * n / 32, (ROWS + n) * DEPTH * 2 / 64, 240)
    return -(-tiles_of(of, n) // PROGRAMS) * (-(-of.depth // DEPTH) * step + 10 * n) + 3000


def staged(arch: str, n: int) -> Tile:
    """The tile with as many stages as fit the shared memory."""
    two, three = (Tile(n, stages).shared_bytes for stages in (2, 3))
    return Tile(n, min(2 + (LIMITS[arch].shared_bytes - two) // (three - two), 64))


def every(arch: str, of: Linear) -> list[Tile]:
    """All tiles of a layer, the cheapest first; those of equal cost by fewer columns."""
    most = min(-(-of.n * of.parts // 16) * 16, 256)
    return [staged(arch, n) for n in sorted(range(16, most + 1, 16), key=lambda n: (cost(of, n), n))]


def rule(arch: str, of: Linear) -> Tile:
    return every(arch, of)[0]


def candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """All widths."""
    yield from every(arch, of)


WGMMA = Family("wgmma", Tile, rule, candidates)


def wgmma(layer: Layer) -> Source:
    """The source of a layer."""
    frame, (x, w) = layer.frame, layer.dot.inputs
    tile = WGMMA.choose(frame.setting, layer.shape)
    element = x.type.dtype.name
    hooks: dict[str, Any] = layer.hooks(tile) | {"m": SYNTAX.size(layer.rows)}
    maps = (
        TensorMap(frame.place(x), element, layer.most, layer.depth, ROWS, 1),
        TensorMap(frame.place(w), element, w.type.ints[0], layer.depth, tile.n // layer.parts, 1),
    )
    product = environment().get_template("wgmma_product.cu.j2").render(element=element, n=tile.n)
    return source(
        frame, "wgmma", (min(tiles_of(layer.shape, tile.n), PROGRAMS), 1, 1),  # blocks stay, and leave early where rows are few
        WARPS, tile.num_stages, tile.shared_bytes, maps, more_head=f"\n{product}", **hooks,
        element=element, layer=hooks | vars(Epilogue(layer)),
    )  # fmt: skip

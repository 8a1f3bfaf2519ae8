"""Renders linear layers of many rows in 16-bit floats as CUDA C++ for Hopper: any tile of 16 to 256 columns, so that the
tiles of a layer fill the card evenly, in clusters that share what they read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from itertools import product
from typing import TYPE_CHECKING

from aotc.codegen.cpp import STORAGE, CppSyntax, lead_index
from aotc.codegen.cuda.frame import Source, TensorMap, environment
from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.schedule import PROGRAMS, Linear
from aotc.codegen.cuda.syntax import POINTER, dim
from aotc.codegen.cuda.tables import Family
from aotc.codegen.loops import LoopNest, add
from aotc.ir.sizes import names_in

if TYPE_CHECKING:
    from aotc.codegen.cuda.matmul import Layer



class _Syntax(CppSyntax):
    """With dims named as in kernels in Triton: apart from whatever a template names."""

    def dim(self, name: str) -> str:
        return dim(name)


SYNTAX = _Syntax()
ROWS, DEPTH, WARPS = 128, 64, 12  # of a tile; of a step; of a block: four that copy, eight that multiply


@dataclass(frozen=True)
class Tile:
    """Tiles of 128 rows and `n` columns of sums, steps of 64 in flight, blocks of a cluster over rows and columns.
    Raises ValueError for what the template does not take."""

    n: int
    num_stages: int
    cluster_m: int = 1
    cluster_n: int = 1

    def __post_init__(self) -> None:
        if self.n % 16 or not 16 <= self.n <= 256:
            raise ValueError(f"n = {self.n} is no multiple of 16 up to 256")
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1 or field.name.startswith("cluster") and value > 2:
                raise ValueError(f"{field.name} = {value} is not supported")

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: aligned stages, two barriers for each."""
        return 1024 + self.num_stages * ((ROWS + self.n) * DEPTH * 2 + 16)


def takes(layer: Layer, rows: int) -> bool:
    """Whether this template computes a layer for up to `rows` rows: 16-bit floats, rows of whole 16 bytes."""
    x, body = layer.dot.inputs[0].type, layer.body
    plain = layer.norm is None and layer.scale is None and layer.squares is None and len(body.outputs) == 1
    even = layer.depth % 8 == 0 and layer.width % 2 == 0 and rows * layer.width < 1 << 31
    return layer.frame.setting.arch == "sm90" and plain and even and x.dtype.name in ("bf16", "f16") and _has_form(layer)


def _has_form(layer: Layer) -> bool:
    """Whether the header has what the epilogue needs."""
    wide = [v for v in layer.body.values() if v.type.dtype.name not in STORAGE or v.type.dtype.name == "f64"]
    folds = {n.op for n in layer.body.nodes} & {"reduce", "arg_reduce", "divide", "remainder", "sign"}
    return not wide and not folds and sum(n.op == "dot_general" for n in layer.body.nodes) == 1


def tiles_of(of: Linear, tile: Tile) -> int:
    """Tiles of whole clusters that a layer is cut into."""
    return -(-of.rows // (ROWS * tile.cluster_m)) * -(-of.n * of.parts // (tile.n * tile.cluster_n))


def cost(of: Linear, tile: Tile) -> float:
    """Cycles of a multiprocessor, about: products, or the tiles that come from L2 at 32 bytes a cycle; a wave's start
    and end."""
    waves = -(-tiles_of(of, tile) // (PROGRAMS // tile.cluster))
    read = (ROWS // tile.cluster_n + tile.n // tile.cluster_m) * DEPTH * 2
    step = max(4.0 * tile.n, read / 32, 300)
    return waves * (-(-of.depth // DEPTH) * step + 10 * tile.n) + 3000


def staged(arch: str, n: int, cluster_m: int, cluster_n: int) -> Tile:
    """The tile with as many stages as fit the shared memory, at most 8."""
    one, two = (Tile(n, stages).shared_bytes for stages in (1, 2))
    stages = (LIMITS[arch].shared_bytes - one) // (two - one) + 1
    return Tile(n, min(stages, 8), cluster_m, cluster_n)


def every(arch: str, of: Linear) -> list[Tile]:
    """All tiles of a layer, the cheapest first; those of equal cost by fewer columns."""
    most = min(-(-of.n * of.parts // 16) * 16, 256)
    clusters = [(m, n) for m, n in product((1, 2), (1, 2)) if of.rows > ROWS * (m - 1)]
    tiles = [staged(arch, n, *c) for n in range(32 if most >= 32 else 16, most + 1, 16) for c in clusters]
    return sorted(tiles, key=lambda t: (cost(of, t), t.n, t.cluster))


def rule(arch: str, of: Linear) -> Tile:
    return every(arch, of)[0]


def candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """The 24 that look cheapest."""
    yield from every(arch, of)[:24]


WGMMA = Family("wgmma", Tile, rule, candidates)


HEAD_END = "// end of the header\n"


@cache
def header(name: str = "hopper.cuh") -> str:
    """What the source of a kernel begins with; `hopper_host.h` has the same for a CPU."""
    return (resources.files("aotc.codegen.cuda") / "lib" / name).read_text()


def _head(element: str, n: int) -> str:
    product = environment().get_template("wgmma_product.cu.j2").render(element=element, n=n)
    return f"{header()}\n{product}{HEAD_END}"


def wgmma(layer: Layer) -> Source:
    """The source of a layer."""
    frame, (x, w) = layer.frame, layer.dot.inputs
    tile = WGMMA.choose(frame.setting, layer.shape)
    (out,), element = layer.body.outputs, x.type.dtype.name
    epilogue = _Epilogue(layer)
    dims = [(dim(n), at) for at, n in enumerate(frame.setting.dims) if n in epilogue.dims]
    arguments = [f"{STORAGE[v.type.dtype.name]}* p{i}" for i, v in enumerate(frame.arguments)]
    text = environment().get_template("wgmma.cu.j2").render(
        name="__kernel__", head=_head(element, tile.n), summary=frame.summary(), element=element, n=layer.width,
        depth=layer.depth, parts=range(layer.parts), tile=tile, m=SYNTAX.size(layer.rows), dims=dims,
        arguments=", ".join([*arguments, "int* dims", "void*, void*"]), rows=epilogue.rows, row_lines=epilogue.row_lines,
        lines=epilogue.lines, made=STORAGE[out.type.dtype.name], out=frame.pointers[frame.body.outputs[0]],
    )  # fmt: skip
    types = (*(POINTER[v.type.dtype.name] for v in frame.arguments), "*i32")
    maps = (
        TensorMap(frame.arguments.index(x), element, layer.most, layer.depth, ROWS // 2, DEPTH),
        TensorMap(frame.arguments.index(w), element, layer.width * layer.parts, layer.depth, tile.n // 2, DEPTH),
    )
    about = f"{text}{types}{maps}"  # maps too: a program with memory for fewer rows has a kernel of its own
    symbol = f"{frame.kernel.family}_{hashlib.sha256(about.encode()).hexdigest()[:12]}"
    clusters = min(tiles_of(layer.shape, tile), PROGRAMS // tile.cluster)  # they stay, and leave early where rows are few
    return Source(
        symbol, text.replace("__kernel__", symbol), types, (clusters * tile.cluster, 1, 1), WARPS, tile.num_stages,
        shared_bytes=tile.shared_bytes, language="cuda", maps=maps,
    )  # fmt: skip


class _Epilogue:
    """What becomes of the sums `acc0` and `acc1` of row m and column c, as statements; the dims that it names."""

    def __init__(self, layer: Layer) -> None:
        (out,), frame, dot = layer.body.outputs, layer.frame, layer.dot
        nest = LoopNest(layer.body, SYNTAX, frame.pointers)
        lead = dot.inputs[0].type.shape[:-1]
        names = tuple(f"i{n}" for n in range(len(lead)))

        def sums(index: tuple[str, ...]) -> str:
            if index[-1] == "c":
                return "acc0"
            assert index[-1] == add(str(layer.width), "c"), index
            return "acc1"

        nest.given[dot.out] = sums
        with nest.scope(*names) as row, nest.scope("c") as inner:
            value = SYNTAX.stored(out.type.dtype, nest.emit(out, (*names, "c")))
            nest.line(f"(i == 0 ? made[j].first : made[j].second) = {value};")
        self.rows = lead_index("m", lead, names, SYNTAX)
        self.row_lines, self.lines = nest.scopes[0].lines + row.lines, inner.lines
        sizes = [layer.rows, *(s for v in layer.body.values() for s in v.type.shape)]
        self.dims = {d for s in sizes for d in names_in(s)}

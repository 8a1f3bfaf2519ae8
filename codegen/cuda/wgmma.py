"""Renders linear layers in 16-bit floats as CUDA C++ for Hopper: tiles of 16 to 256 columns, so that those of a layer fill
the card evenly, weights on their way before x is there, clusters that share what they read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
DEPTH = 64  # elements of a row of a box: 128 bytes, which are swizzled
FULL_STAGE = 12 << 10  # bytes that are worth a barrier


@dataclass(frozen=True)
class Tile:
    """Tiles of m rows (64 or 128) and `n` columns of sums, steps of k, as many in flight as there are stages, blocks of a
    cluster over rows and columns. Raises ValueError for what the template does not take."""

    m: int
    n: int
    k: int
    num_stages: int
    cluster_m: int = 1
    cluster_n: int = 1

    def __post_init__(self) -> None:
        allowed = {
            "m": (64, 128), "n": range(16, 257, 16), "k": (64, 128, 256), "num_stages": range(1, 65),
            "cluster_m": (1, 2) if self.m == 128 else (1,), "cluster_n": (1, 2),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} = {getattr(self, name)} is not supported")

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def warps(self) -> int:
        """Four that copy, four for each 64 rows that multiply."""
        return 4 + self.m // 16

    def x_rows(self, rows: int) -> int:
        """Rows of x that are copied, of up to `rows`: groups of 8, which are swizzled together."""
        unit = 8 * self.cluster_n
        return self.m if self.m == 128 else -(-min(rows, 64) // unit) * unit

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block: aligned stages, two barriers for each, scales of rows; products of 64 rows read over
        the end of fewer."""
        box = (self.x_rows(rows) + self.n) * DEPTH * 2
        more = 8 + 64 * 4 + (64 - self.x_rows(rows)) * DEPTH * 2 if self.m == 64 else 0
        return 1024 + self.num_stages * (box * (self.k // DEPTH) + 16) + more


def takes(layer: Layer, rows: int) -> bool:
    """Whether this template computes a layer for up to `rows` rows: 16-bit floats, rows of whole blocks of 64."""
    x = layer.dot.inputs[0].type
    even = layer.depth % DEPTH == 0 and layer.width % 2 == 0 and rows * layer.width < 1 << 31
    return rows > 1 and layer.frame.setting.arch == "sm90" and even and x.dtype.name in ("bf16", "f16") and _has_form(layer)


def _has_form(layer: Layer) -> bool:
    """Whether the header has what the epilogue needs."""
    odd = {v.type.dtype.name for v in layer.body.values()} - {"f32", "f16", "bf16", "i32", "i64", "bool"}
    calls = {n.op for n in layer.body.nodes} & {"reduce", "arg_reduce", "remainder", "rms_norm"}
    dots = sum(n.op == "dot_general" for n in layer.body.nodes)
    return not odd and not calls and dots == 1 and layer.norm is None


def tiles_of(of: Linear, tile: Tile) -> int:
    """Tiles of whole clusters that a layer is cut into."""
    return -(-of.rows // (tile.m * tile.cluster_m)) * -(-of.n * of.parts // (tile.n * tile.cluster_n))


def clusters_at_once(tile: Tile) -> int:
    """Those that a card holds: a cluster lies within a group of 16 or 18 multiprocessors."""
    return PROGRAMS // tile.cluster if tile.cluster < 4 else PROGRAMS // 33 * 8


def cost(of: Linear, tile: Tile) -> float:
    """Cycles, about. Of a step of 64: products at 2048 multiplications a cycle; x, and w where others read it too, from L2
    at 32 bytes a cycle; w from memory at 20. Then what a wave takes to begin and end."""
    waves = -(-tiles_of(of, tile) // clusters_at_once(tile))
    x, w = tile.x_rows(of.rows) // tile.cluster_n * DEPTH * 2, tile.n // tile.cluster_m * DEPTH * 2
    read = (x + w) / 32 if of.rows > 64 else x / 32 + w / 20
    step = max(tile.m * tile.n / 32, read, 150 if tile.m == 64 else 300)
    return waves * (-(-of.depth // DEPTH) * step + 10 * tile.n) + 3000


def staged(arch: str, rows: int, n: int, parts: int = 1, cluster_m: int = 1, cluster_n: int = 1) -> Tile:
    """The tile for up to `rows` rows with as many stages as fit the shared memory."""
    m, k = 64 if rows <= 64 else 128, DEPTH
    tile = Tile(m, n, k, 1, cluster_m, cluster_n)
    while parts == tile.cluster == 1 and k < 256 and (tile.x_rows(rows) + n) * k * 2 < FULL_STAGE:
        k *= 2
    one, two = (replace(tile, k=k, num_stages=stages).shared_bytes(rows) for stages in (1, 2))
    return replace(tile, k=k, num_stages=min((LIMITS[arch].shared_bytes - one) // (two - one) + 1, 64))


def every(arch: str, of: Linear) -> list[Tile]:
    """All tiles of a layer, the cheapest first; those of equal cost by fewer columns."""
    most = min(-(-of.n * of.parts // 16) * 16, 256)
    clusters = [(m, n) for m, n in product((1, 2), (1, 2)) if of.rows > 128 * (m - 1)]
    widths = [n for n in range(16, most + 1, 16) if (n // of.parts) % of.squares == 0]
    tiles = [staged(arch, of.rows, n, of.parts, *c) for n in widths for c in clusters]
    return sorted(tiles, key=lambda t: (cost(of, t), t.n, t.cluster))


def rule(arch: str, of: Linear) -> Tile:
    return every(arch, of)[0]


def candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """The 24 that look cheapest."""
    yield from every(arch, of)[:24]


def _wrong(of: Linear, tile: Tile) -> str:
    if (tile.m == 64) != (of.rows <= 64):
        return "m must be 64 for up to 64 rows, else 128"
    if tile.k > DEPTH and (of.parts == 2 or tile.cluster > 1):
        return "k must be 64 where a tile comes in two pieces"
    return f"n must be a multiple of {of.squares}, whose squares are added up" if tile.n // of.parts % of.squares else ""


WGMMA = Family("wgmma", Tile, rule, candidates, _wrong)


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
    element, rows = x.type.dtype.name, frame.upper(layer.rows)
    epilogue, x_rows, shared = _Epilogue(layer), tile.x_rows(rows), tile.shared_bytes(rows)
    dims = [(dim(n), at) for at, n in enumerate(frame.setting.dims) if n in epilogue.dims]
    arguments = [f"{STORAGE[v.type.dtype.name]}* p{i}" for i, v in enumerate(frame.arguments)]
    text = environment().get_template("wgmma.cu.j2").render(
        layer.hooks(tile) | {"m": SYNTAX.size(layer.rows)}, name="__kernel__", head=_head(element, tile.n), x_rows=x_rows,
        summary=frame.summary(), element=element, dims=dims, arguments=", ".join([*arguments, "int* dims", "void*, void*"]),
        rows=epilogue.rows, row_lines=epilogue.row_lines, lines=epilogue.lines, outputs=epilogue.outputs,
    )  # fmt: skip
    types = (*(POINTER[v.type.dtype.name] for v in frame.arguments), "*i32")
    pieces = 2 if tile.cluster_m == 2 or layer.parts == 2 else 1
    maps = (
        TensorMap(frame.arguments.index(x), element, layer.most, layer.depth, x_rows // tile.cluster_n, tile.k // DEPTH),
        TensorMap(frame.arguments.index(w), element, layer.width * layer.parts, layer.depth, tile.n // pieces, tile.k // DEPTH),
    )
    symbol = f"{frame.kernel.family}_{hashlib.sha256(f'{text}{types}'.encode()).hexdigest()[:12]}"
    clusters = min(tiles_of(layer.shape, tile), clusters_at_once(tile))  # they stay, and leave early where rows are few
    return Source(
        symbol, text.replace("__kernel__", symbol), types, (clusters * tile.cluster, 1, 1), tile.warps, tile.num_stages,
        shared_bytes=shared, language="cuda", maps=maps,
    )  # fmt: skip


class _Epilogue:
    """What becomes of the sums `acc0` and `acc1` of row m and column c, as statements; types and pointers of outputs; the
    dims that it names."""

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
        sizes = [layer.rows, *(s for v in layer.body.values() for s in v.type.shape)]
        self.dims = {d for s in sizes for d in names_in(s)}

"""Runs passes: verifies after each, times it, and writes what it made where AOTC_DUMP asks for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from aotc import knobs
from aotc.ir.graph import Graph, Node
from aotc.ir.ops.control import IfAttrs
from aotc.ir.sizes import Dim
from aotc.ir.verify import verify

log = logging.getLogger("aotc.passes")


def run_passes(graph: Graph, passes: Iterable[Callable[[Graph], Graph]], stage: str) -> Graph:
    """The graph after all passes. Raises VerifyError naming the pass that broke a rule."""
    for number, function in enumerate(passes):
        begin = time.perf_counter()
        graph = everywhere(function, graph)
        spent = time.perf_counter() - begin
        try:
            verify(graph)
        except AssertionError as error:
            raise type(error)(f"after pass {function.__name__}: {error}") from None
        log.debug("%s/%s: %d nodes, %.0f ms", stage, function.__name__, len(graph.nodes), spent * 1e3)
        dump(f"{stage}_{number:02d}_{function.__name__}.ir", str(graph))
    return graph


def everywhere(function: Callable[[Graph], Graph], graph: Graph, outer: tuple[Dim, ...] = ()) -> Graph:
    """Applies a pass to the branches of conditionals, innermost first, then to the graph itself. A branch has the dims
    of the graphs around it (`outer`) only while a pass looks at their bounds."""
    dims = (*(d for d in outer if d not in graph.dims), *graph.dims)

    def inside(node: Node) -> Node:
        if node.op != "if":
            return node
        at = node.attrs
        return replace(node, attrs=IfAttrs(everywhere(function, at.then, dims), everywhere(function, at.orelse, dims)))

    made = function(replace(graph, nodes=tuple(map(inside, graph.nodes)), dims=dims))
    return replace(made, dims=graph.dims) if outer else made


def dump(name: str, text: str | bytes) -> None:
    """Writes a stage's text into the folder of AOTC_DUMP, if that is set."""
    folder = knobs.dump_dir()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

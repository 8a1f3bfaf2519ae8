"""The fake driver with kernels that compute: the source of a launched graph's kernels runs on the CPU, on the memory
that the graph's arguments name."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
from fake_cuda import FakeDriver

from aotc.artifact.reader import Artifact
from aotc.codegen.cuda.fake_device import Request, run_request
from aotc.codegen.cuda.frame import Source
from aotc.cuda_replay import CudaReplay


class InterpretedDriver(FakeDriver):
    """Of a GPU that runs an artifact. Addresses within memory, such as biases, are not followed."""

    def __init__(self, artifact: Artifact, **options: Any) -> None:
        super().__init__(**options)
        name = "sm{}{}".format(*self.capability)
        self.sources = CudaReplay(artifact, next(t for t in artifact.manifest.targets if t.name == name))._sources
        # Two arguments are Triton's own scratch, which its interpreter does not take.
        self.arity = {symbol: len(s.signature) + 2 for symbol, s in self.sources.items()}
        self.map_count = {symbol: len(s.maps) for symbol, s in self.sources.items()}

    def do_cuGraphLaunch(self, executable: int, stream: int) -> None:  # noqa: N802
        super().do_cuGraphLaunch(executable, stream)
        steps = []
        for node in self.graphs[executable]:
            places = [self._place(address) for address in node.arguments[:-2]]
            grid = (node.gridDimX, node.gridDimY, node.gridDimZ)
            signature = self.sources[node.func].signature
            steps.append(("call", node.func, grid, list(zip(signature, places, strict=True))))
        sources = {node.func: self._source(node) for node in self.graphs[executable]}
        blocks = {str(address): np.ctypeslib.as_array(block).copy() for address, block in self.blocks.items()}
        for address, data in run_request(Request(sources, blocks, steps)).items():
            ctypes.memmove(int(address), np.ascontiguousarray(data).ctypes.data, len(self.blocks[int(address)]))

    def _source(self, node: Any) -> Source:
        """A kernel's source, with the tensor maps that the node has."""
        source, maps = self.sources[node.func], []
        for m, (_, address, rows, columns, _, box_rows, box_blocks, *_) in zip(source.maps, node.maps, strict=True):
            assert (address, columns) == (node.arguments[m.argument], m.columns)
            assert (box_rows, box_blocks) == (m.box_rows, m.box_blocks)
            maps.append(replace(m, rows=rows))
        return replace(source, maps=tuple(maps))

    def _place(self, address: int) -> tuple[str, int]:
        for begin, block in self.blocks.items():
            if begin <= address < begin + len(block):
                return str(begin), address - begin
        raise AssertionError("an argument points outside of all memory")

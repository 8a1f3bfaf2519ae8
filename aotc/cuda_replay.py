"""Replays a CUDA plan of an artifact without a GPU: its kernels' Triton source runs under Triton's interpreter, on the
memory that the plan names. What is checked is what a device will do: arguments, offsets, grids, order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aotc.artifact.manifest import ProgramEntry, StateField, TargetEntry, strides_of
from aotc.artifact.plan import Address, If, Instruction, Plan, Tensor, evaluate
from aotc.artifact.reader import Artifact
from aotc.codegen.cuda.fake_device import POISON, Request, run_request
from aotc.codegen.cuda.frame import Source, TensorMap
from aotc.codegen.cuda.launch import dim_order, phases_of, render_program, widest_dims
from aotc.codegen.cuda.tables import Schedules, decode_table
from aotc.errors import ArtifactError
from aotc.ir.dtypes import DTYPES
from aotc.ir.program import Program
from aotc.ir.text import parse_graph
from aotc.passes import lower, merge_phases


@dataclass(frozen=True)
class Area:
    """Slots of the state or blocks of the KV cache: bytes between two of them, and what is in each."""

    stride: int
    fields: tuple[StateField, ...]

    def pack(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """All of them with the inputs' values, what no input fills poisoned."""
        count = len(inputs[self.fields[0].name])
        made = np.full((count, self.stride), POISON, np.uint8)
        for field in self.fields:
            part = np.ascontiguousarray(inputs[field.name]).reshape(count, -1).view(np.uint8)
            made[:, field.offset : field.offset + part.shape[1]] = part
        return made.reshape(-1)


class CudaReplay:
    """A target of an artifact, ready to replay its programs. Sources are rendered again from the artifact's graphs:
    a kernel's name is the hash of its source, so that they are the ones that the cubins were compiled from."""

    def __init__(self, artifact: Artifact, target: TargetEntry) -> None:
        manifest = artifact.manifest
        self._artifact, self._target, self._caches = artifact, target, {c.layout: c for c in manifest.kv_caches}
        self._strides = strides_of(manifest)
        self._programs: list[Program] = [
            lower(parse_graph(artifact.read(f"graphs/cuda/{p.name}.ir").decode())) for p in target.programs
        ]
        self._dims = dim_order(self._programs)
        self._sources: dict[str, Source] = {}
        table = f"schedules/{target.name}.json"
        tables = [decode_table(artifact.read(table), table)] if artifact.has(table) else []
        schedules = Schedules(target.name, tables)
        for program, entry in zip(self._programs, target.programs, strict=True):
            widest = widest_dims(program, self._programs) if manifest.model.batch_invariant else ()
            if any(k.family == "chain" for k in artifact.plan(entry.plan).kernels):
                program = merge_phases(program, phases_of(program, target.name, widest))
            rendered = render_program(program, target.name, self._dims, self._strides, schedules, widest)
            self._sources |= {s.symbol: s for s in rendered.values()}

    def run(self, name: str, inputs: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Outputs and updated states of a program. `inputs` holds every input and state by name."""
        entry = next(p for p in self._target.programs if p.name == name)
        plan = self._artifact.plan(entry.plan)
        areas = self._areas(entry)
        blocks = self._blocks(plan, areas, inputs, dims)
        sources = {k.symbol: self._source(k.symbol, k.meta.get("maps", ())) for k in plan.kernels}
        answer = run_request(Request(sources, blocks, self._steps(plan, plan.body)))
        return {t.name: self._read(answer, plan, areas, t, dims) for t in plan.outputs}

    def _source(self, symbol: str, maps: Iterable[Mapping[str, Any]] = ()) -> Source:
        """The source of a kernel, with the tensor maps of a plan: programs with memory for fewer rows share kernels."""
        if symbol not in self._sources:
            raise ArtifactError(f"kernel {symbol} was made by another version of aotc: compile the model again")
        return replace(self._sources[symbol], maps=tuple(TensorMap(**m) for m in maps))

    def _areas(self, entry: ProgramEntry) -> dict[str, Area]:
        """What the spaces `state` and `kv` of a program hold."""
        state, cache = self._artifact.manifest.state, self._caches.get(entry.kv_layout)
        areas = {"state": Area(state.slot_bytes, state.fields)} if state else {}
        return areas | ({"kv": Area(cache.block_bytes, cache.fields)} if cache else {})

    def _blocks(
        self, plan: Plan, areas: Mapping[str, Area], inputs: Mapping[str, np.ndarray], dims: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        blocks = {
            "arena": np.full(plan.arena_bytes, POISON, np.uint8), "weights": np.array(self._artifact.map_weights()),
            "dims": np.array([dims.get(d, 0) for d in self._dims], np.int32).view(np.uint8),
        }  # fmt: skip
        for tensor in plan.inputs:
            if plan.spaces[tensor.space].kind == "input":
                blocks[_block(plan, tensor.space)] = (
                    np.ascontiguousarray(inputs[tensor.name]).reshape(-1).view(np.uint8)
                )
        for tensor in plan.outputs:
            if plan.spaces[tensor.space].kind == "output":
                blocks[_block(plan, tensor.space)] = np.full(_nbytes(tensor, dims), POISON, np.uint8)
        blocks["counters"] = np.zeros(self._target.counter_bytes, np.uint8)
        for space, area in areas.items():
            blocks[space] = area.pack(inputs)
        return blocks

    def _steps(self, plan: Plan, body: tuple[Instruction, ...]) -> list:
        steps: list = []
        for step in body:
            if isinstance(step, If):
                condition = (_block(plan, step.condition.space), step.condition.offset)
                steps.append(("if", condition, self._steps(plan, step.then), self._steps(plan, step.orelse)))
                continue
            kernel = plan.kernels[step.kernel]
            source = self._source(kernel.symbol)
            # The two last arguments are Triton's own scratch pointers, which its interpreter does not take.
            addresses = [a for a in step.args[:-2] if isinstance(a, Address)]
            places = [(_block(plan, a.space), a.offset) for a in addresses]
            steps.append(
                ("call", kernel.symbol, tuple(kernel.meta["grid"]), list(zip(source.signature, places, strict=True)))
            )
        return steps

    def _read(
        self, blocks: Mapping[str, np.ndarray], plan: Plan, areas: Mapping[str, Area], tensor: Tensor, dims: Mapping[str, int]
    ) -> np.ndarray:
        shape = [evaluate(s, dims) for s in tensor.shape]
        kind = plan.spaces[tensor.space].kind
        if kind in areas:
            held = blocks[kind].reshape(shape[0], areas[kind].stride)
            data = np.ascontiguousarray(held[:, tensor.offset : tensor.offset + _nbytes(tensor, dims) // shape[0]])
        else:
            data = blocks[_block(plan, tensor.space)]
        return data.reshape(-1)[: _nbytes(tensor, dims)].view(DTYPES[tensor.dtype].np).reshape(shape)


def _block(plan: Plan, space: int) -> str:
    entry = plan.spaces[space]
    return f"{entry.kind}.{entry.name}" if entry.kind in ("input", "output") else entry.kind


def _nbytes(tensor: Tensor, dims: Mapping[str, int]) -> int:
    return int(np.prod([evaluate(s, dims) for s in tensor.shape])) * DTYPES[tensor.dtype].itemsize

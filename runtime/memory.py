"""How much memory a model takes, by what it is for. What is closed gave it back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aotc.artifact.manifest import ITEM_BYTES, Manifest, TargetEntry
from aotc.artifact.plan import Plan, evaluate
from aotc.runtime.kv_cache import CachePlan
from aotc.runtime.step_inputs import ALIGNMENT, layout

LOGPROBS = 21
TENSOR_ALIGNMENT = 256  # of each input and output of a tensor model in its block
CLOSED = "the model was closed: load it again"


@dataclass(frozen=True)
class Memory:
    """Exact bytes by what they are for; `total` is everything that this model allocates on its device.

    `pinned` is memory of the host beside it, which a GPU reads and writes. `kv_blocks` counts what the `kv_cache` is
    made of: pages, or sequences of a static one.
    """

    weights: int
    arena: int
    state: int
    scratch: int
    step: int
    outputs: int
    pinned: int = 0
    kv_cache: int = 0
    kv_blocks: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.state + self.scratch + self.step + self.outputs + self.kv_cache


def dims_bytes(target: TargetEntry) -> int:
    """Bytes of the values of dims, behind a step's inputs."""
    return -(-4 * max(len(target.dims), 1) // ALIGNMENT) * ALIGNMENT


def weight_bytes(manifest: Manifest, target: TargetEntry) -> int:
    """Bytes of the weights that a target uses."""
    return sum(nbytes for _, nbytes in manifest.weight_ranges(target))


def decoder_memory(manifest: Manifest, target: TargetEntry, cache: CachePlan, pinned: int = 0) -> Memory:
    """What a language model takes on a GPU, with a KV cache."""
    model = manifest.model
    assert manifest.state is not None
    step = layout(model.max_tokens, model.max_rows, dims_bytes(target) // 4, cache.max_pages)[1]
    outputs = model.max_rows * 4 * (model.vocab_size + 1 + 2 * LOGPROBS)
    return Memory(
        weight_bytes(manifest, target), target.arena_bytes, manifest.state.slot_bytes * cache.seqs,
        target.counter_bytes, step, outputs, pinned, cache.nbytes, cache.blocks,
    )  # fmt: skip


def tensor_memory(manifest: Manifest, target: TargetEntry, plan: Plan) -> Memory:
    """What a tensor model takes on a GPU. `plan` is that of its largest program, `step` are dims and inputs."""
    up, down = tensor_places(plan, "input", dims_bytes(target))[1], tensor_places(plan, "output", 0)[1]
    conditions = any(True for _ in plan.conditions()) * len(target.programs)  # a byte each, read between graphs
    return Memory(
        weight_bytes(manifest, target), target.arena_bytes, 0, target.counter_bytes, up, down,
        pinned=max(up, 1) + max(down, 1) + conditions,
    )  # fmt: skip


def tensor_places(plan: Plan, kind: str, begin: int) -> tuple[dict[str, int], int]:
    """(where each input or output begins, bytes of all) in a block whose first `begin` bytes are taken."""
    bounds = {d.name: d.hi for d in plan.dims}
    places, end = {}, begin
    for tensor in plan.inputs if kind == "input" else plan.outputs:
        if plan.spaces[tensor.space].kind == kind:
            places[tensor.name] = begin = -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
            end = begin + math.prod(evaluate(s, bounds) for s in tensor.shape) * ITEM_BYTES[tensor.dtype]
    return places, end

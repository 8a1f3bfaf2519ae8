"""How much memory a model takes, by what it is for. What is closed gave it back."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.artifact.manifest import Manifest, TargetEntry
from aotc.runtime.step_inputs import ALIGNMENT, layout

LOGPROBS = 21
CLOSED = "the model was closed: load it again"


@dataclass(frozen=True)
class Memory:
    """Exact bytes by what they are for; `total` is everything that this model allocates on its device.

    `pinned` is memory of the host beside it, which a GPU reads and writes.
    """

    weights: int
    arena: int
    state: int
    scratch: int
    step: int
    outputs: int
    pinned: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.state + self.scratch + self.step + self.outputs


def dims_bytes(target: TargetEntry) -> int:
    """Bytes of the values of dims, behind a step's inputs."""
    return -(-4 * max(len(target.dims), 1) // ALIGNMENT) * ALIGNMENT


def weight_bytes(manifest: Manifest, target: TargetEntry) -> int:
    """Bytes of the weights that a target uses."""
    return sum(nbytes for _, nbytes in manifest.weight_ranges(target))


def decoder_memory(manifest: Manifest, target: TargetEntry, slots: int, pinned: int = 0) -> Memory:
    """What a language model takes on a GPU, with `slots` sequences at once."""
    model = manifest.model
    assert manifest.state is not None
    step = layout(model.max_tokens, model.max_rows)[1] + dims_bytes(target)
    outputs = model.max_rows * 4 * (model.vocab_size + 1 + 2 * LOGPROBS)
    return Memory(
        weight_bytes(manifest, target), target.arena_bytes, manifest.state.slot_bytes * slots, target.counter_bytes,
        step, outputs, pinned,
    )  # fmt: skip

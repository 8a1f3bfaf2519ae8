"""Passes: Graph -> Graph and Program -> Program, one file a pass. The order stands here, and nowhere else."""

from __future__ import annotations

from aotc.passes.canonicalize import canonicalize
from aotc.passes.defer_norms import defer_norms
from aotc.passes.fuse import fuse
from aotc.passes.layout_kv import KVLayout, layout_kv
from aotc.passes.lower import lower
from aotc.passes.merge_dots import merge_dots
from aotc.passes.merge_phases import merge_phases
from aotc.passes.pack_weights import pack_weights
from aotc.passes.place_barriers import place_barriers
from aotc.passes.plan_memory import plan_memory
from aotc.passes.raise_composites import raise_composites
from aotc.passes.spell_out import spell_out
from aotc.passes.split_weights import cone, split_weights
from aotc.passes.turn_weights import turn_weights

MODEL_PASSES = (canonicalize, raise_composites, canonicalize, turn_weights, merge_dots, canonicalize)
"""Once a model: what holds for every target and every program."""

PROGRAM_PASSES = (plan_memory, place_barriers)
"""Program to program, after `canonicalize`, `defer_norms` and `fuse` (for the target's templates) and `lower` made one."""

PACKINGS = {
    "cpu": {"f32": "n16k1", "f16": "n16k1", "bf16": "n16k2"},
    "cuda": {},
}
"""Layouts of matmul weights by device and element type."""

__all__ = [
    "MODEL_PASSES", "PACKINGS", "PROGRAM_PASSES", "KVLayout", "canonicalize", "cone", "defer_norms", "fuse", "layout_kv", "lower",
    "merge_dots", "merge_phases", "pack_weights", "place_barriers", "plan_memory", "raise_composites", "spell_out",
    "split_weights", "turn_weights",
]  # fmt: skip

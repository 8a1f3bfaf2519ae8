"""What the kernel templates of a target compute beyond loop nests: fusion asks it, codegen answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.graph import Node


@dataclass(frozen=True)
class Templates:
    """`linear`: which linear layers `matmul` takes; others become loops. `norm_rows`: up to how many rows it normalises
    its input itself. `scaled_rows`: up to how many it scales its sums by the rms of rows of x, and adds up the squares
    of what it makes, so that a norm between two of them needs no kernel. `attention_decode`: whether there is one.
    `attention_query`: whether `attention` computes what makes its queries itself. `side_by_side`: whether loops that wait
    for nothing can be one kernel. `whole`: composites with a template of their own, which are not spelled out."""

    linear: Callable[[Node], bool]
    norm_rows: int = 0
    scaled_rows: int = 0
    attention_decode: bool = False
    attention_query: bool = False
    side_by_side: bool = False
    whole: frozenset[str] = frozenset()

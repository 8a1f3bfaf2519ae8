"""Which program of several runs: the smallest that takes what there is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from aotc.artifact.manifest import ProgramEntry


class Buckets:
    """Programs of one kind, the smallest first. One of bucket 0 is alone, and takes everything."""

    def __init__(self, entries: Iterable[ProgramEntry]) -> None:
        self.entries = tuple(sorted(entries, key=lambda e: e.bucket))
        self.sizes = tuple(e.bucket for e in self.entries)
        """Rows, or tokens, that each takes at most."""

    @property
    def preferred(self) -> tuple[int, ...]:
        """Rows that a program runs full with; none where one takes everything."""
        return self.sizes if len(self.sizes) > 1 else ()

    def smallest(self, size: int) -> int:
        """The number of the smallest program that takes so many rows or tokens; past the end where none does."""
        return bisect_left(self.sizes, size)

    def at(self, dims: Sequence[int]) -> int:
        """The number of a tensor model's program at the values of its dims: where there are several, its one dim counts
        rows."""
        return bisect_left(self.sizes, dims[0]) if len(self.sizes) > 1 else 0

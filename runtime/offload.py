"""What becomes of a sequence that loses its pages: computed again, or copied to host memory and back. No device code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_WEIGHT = 0.2  # of a new measurement in the mean


class PageCopier(Protocol):
    """The part of an executor that copies pages of the KV cache."""

    page_bytes: int

    def save_pages(self, ids: np.ndarray) -> np.ndarray:
        """Copies pages i32 [n] into host memory: u8 [n, page_bytes]."""
        ...

    def load_pages(self, saved: np.ndarray, ids: np.ndarray) -> None:
        """Copies them back, to pages i32 [n]."""
        ...


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Copies of a sequence's first pages, u8 [pages, page_bytes], which hold `computed` tokens."""

    data: np.ndarray
    computed: int


@dataclass(slots=True)
class Costs:
    """Seconds that a token takes to compute again, and a byte to copy one way. They follow what is measured, unless
    `fixed`."""

    token: float = 1e-3
    byte: float = 2e-10
    fixed: bool = False

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that took in prompts had so many tokens."""
        if not self.fixed and tokens:
            self.token += _WEIGHT * (seconds / tokens - self.token)

    def copied(self, nbytes: int, seconds: float) -> None:
        if not self.fixed and nbytes:
            self.byte += _WEIGHT * (seconds / nbytes - self.byte)


class Offload:
    """Copies of pages in at most `limit` bytes of host memory."""

    def __init__(self, copier: PageCopier, limit: int, costs: Costs, clock: Callable[[], float]) -> None:
        self._copier, self._limit, self._clock, self.costs = copier, limit, clock, costs
        self.used = 0  # bytes
        self.saves = 0

    def worth(self, tokens: int, pages: int) -> bool:
        """Whether copying so many pages there and back costs less than computing their tokens again, and fits."""
        nbytes = pages * self._copier.page_bytes
        return 0 < nbytes <= self._limit - self.used and 2 * nbytes * self.costs.byte < tokens * self.costs.token

    def save(self, ids: np.ndarray, computed: int) -> SavedPages:
        """Pages i32 [n], which hold `computed` tokens, as host memory."""
        begin = self._clock()
        data = self._copier.save_pages(ids)
        self.costs.copied(data.nbytes, self._clock() - begin)
        self.used += data.nbytes
        self.saves += 1
        return SavedPages(data, computed)

    def load(self, saved: SavedPages, first: int, ids: np.ndarray) -> None:
        """Copies saved pages from the `first` one on back to pages i32 [n]."""
        begin = self._clock()
        data = saved.data[first : first + len(ids)]
        self._copier.load_pages(data, ids)
        self.costs.copied(data.nbytes, self._clock() - begin)

    def drop(self, saved: SavedPages) -> None:
        """Gives the memory back."""
        self.used -= saved.data.nbytes

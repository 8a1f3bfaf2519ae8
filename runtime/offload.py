"""What becomes of a sequence that loses its pages: computed again, or copied to host memory and back. No device code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_WEIGHT = 0.2  # of a new measurement in the mean


class PageCopy(Protocol):
    """Pages on their way between a device and host memory."""

    def go_on(self) -> int:
        """Goes on as far as it can at once. How many pages are left whose copy does not stand yet in the order in which
        the device works: out of the last ones' pages, others may write at once; into any, nobody may read before all are."""
        ...

    def stop(self) -> None:
        """Ends it where it is: nothing is copied afterwards."""
        ...

    @property
    def took(self) -> tuple[int, float]:
        """Bytes that were copied, and how many seconds that took the device, as far as that is known."""
        ...


class PageCopier(Protocol):
    """The part of an executor that copies pages of the KV cache. Both return None where all is copied at once."""

    page_bytes: int

    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> PageCopy | None:
        """Copies pages i32 [n] into host memory u8 [n, page_bytes], the last ones first."""
        ...

    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> PageCopy | None:
        """Copies them back, to pages i32 [n]."""
        ...


@dataclass(slots=True)
class SavedPages:
    """Copies of a sequence's first pages, u8 [pages, page_bytes], which hold `computed` tokens. `copy` is on its way:
    out of pages that the sequence had, or into those that it has again."""

    data: np.ndarray
    computed: int
    copy: PageCopy | None = None


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
        """Begins to copy pages i32 [n], which hold `computed` tokens, into host memory."""
        begin = self._clock()
        data = np.empty((len(ids), self._copier.page_bytes), np.uint8)
        saved = SavedPages(data, computed, self._copier.save_pages(ids, data))
        self._note(saved, data.nbytes, begin)
        self.used += data.nbytes
        self.saves += 1
        return saved

    def load(self, saved: SavedPages, first: int, ids: np.ndarray) -> None:
        """Begins to copy saved pages from the `first` one on back to pages i32 [n]."""
        self._forget_copy(saved)
        begin = self._clock()
        data = saved.data[first : first + len(ids)]
        saved.copy = self._copier.load_pages(data, ids)
        self._note(saved, data.nbytes, begin)

    def left(self, saved: SavedPages) -> int:
        """Goes on with a copy; how many pages are left of it, see PageCopy."""
        return 0 if saved.copy is None else saved.copy.go_on()

    def stop(self, saved: SavedPages) -> None:
        """Copies nothing back any more: the sequence loses its pages again."""
        if saved.copy is not None:
            saved.copy.stop()
            self._forget_copy(saved)

    def drop(self, saved: SavedPages) -> None:
        """Gives the memory back."""
        self.stop(saved)
        self.used -= saved.data.nbytes

    def _note(self, saved: SavedPages, nbytes: int, begin: float) -> None:
        if saved.copy is None:
            self.costs.copied(nbytes, self._clock() - begin)

    def _forget_copy(self, saved: SavedPages) -> None:
        if saved.copy is not None:
            self.costs.copied(*saved.copy.took)
            saved.copy = None

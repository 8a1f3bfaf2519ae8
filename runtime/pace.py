"""When to launch the next step: late enough that who comes while one runs is in the next one, early enough that the
device never waits."""

from __future__ import annotations

MARGIN = 2e-4  # seconds that a sleep may last too long
SHARE = 0.1  # of a step's usual time, on top
MOST = 0.02  # seconds at once: whoever waits has other things to look after
_FORGET = 1.02  # what a step took at least counts for less with every one after it
_EASE = 0.95


class Pace:
    """What steps take at least, by kind, and what the host needs to launch one. No clock of its own; times in seconds."""

    def __init__(self) -> None:
        self._least: dict[tuple[bool, int], float] = {}
        self._host = 0.0

    def ran(self, rows: int, tokens: int, seconds: float) -> None:
        """A step took so long on the device."""
        kind = _kind(rows, tokens)
        self._least[kind] = min(seconds, self._least.get(kind, seconds) * _FORGET)

    def launched(self, seconds: float) -> None:
        """So long took choosing and launching a step. The host may be slow again: the longest times fade slowly."""
        self._host = max(seconds, self._host * _EASE)

    def slack(self, rows: int, tokens: int, elapsed: float) -> float:
        """How long the next launch can wait while a step runs that began `elapsed` ago; 0 where that is not known."""
        least = self._least.get(_kind(rows, tokens), 0.0)
        return min(max(least * (1 - SHARE) - MARGIN - self._host - elapsed, 0.0), MOST)


def _kind(rows: int, tokens: int) -> tuple[bool, int]:
    """Steps that take about as long: whether all rows decode, and tokens to the next power of two, as programs have."""
    return rows == tokens, max(tokens - 1, 0).bit_length()

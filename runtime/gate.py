"""Who may use a loaded model: one call at a time, none after `close`, none in a process forked from its own."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from aotc.errors import RequestError
from aotc.runtime.memory import CLOSED

FORKED = "the model was loaded before this process was forked off: load it again here, after the fork"

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """`with gate.lock: gate.check()` stands before every use. Calls read `lock` anew: a fork exchanges it."""

    __slots__ = ("__weakref__", "garbage", "lock", "reason")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reason: str | None = None  # why nothing runs any more
        self.garbage: deque[Callable[[], None]] = deque()  # gives back what dropped bindings held
        _gates.add(self)

    def check(self) -> None:
        """Raises RequestError where the model must not be used any more."""
        if self.reason is not None:
            raise RequestError(self.reason)

    def sweep(self) -> None:
        """Gives back what dropped bindings held; under the lock, of an open model."""
        while self.garbage:
            self.garbage.popleft()()

    def close(self) -> bool:
        """Shuts it, under the lock. False where it was shut before."""
        if self.reason is not None:
            return False
        self.reason = CLOSED
        return True


def _shut_in_child() -> None:
    for gate in list(_gates):
        gate.reason = gate.reason or FORKED
        gate.lock = threading.Lock()  # a thread that is not here may have held the old one


os.register_at_fork(after_in_child=_shut_in_child)

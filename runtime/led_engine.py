"""An engine and the calls that it answers: what is asked of it meanwhile, and which of its tokens are whose."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aotc.errors import AotcError, RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.sequence import SessionKey, TokenOutput
from aotc.runtime.text_stream import Call


class Wish(NamedTuple):
    """What somebody wants of the engine: a call to begin, one to end with an error, or a session to be forgotten."""

    call: Call | None
    error: BaseException | None = None
    session: SessionKey | None = None


class LedEngine:
    """What one thread at a time leads. `make` gives the engine, and another one after a step that failed; `settle` waits
    until the device has ended what that began.

    Others append to `inbox`, whose order counts, and see `calls`: those that are not over, by their requests' ids, of
    which no thread waits for the `unattended`.
    """

    def __init__(self, make: Callable[[], Engine], settle: Callable[[], None]) -> None:
        self._make, self._settle = make, settle
        self.engine = make()
        self.inbox: deque[Wish] = deque()
        self.calls: dict[str, Call] = {}
        self.unattended: set[Call] = set()

    def step(self) -> None:
        """One step of the engine, and its tokens to their calls."""
        try:
            slack = self.engine.slack
            if slack > 0:  # who comes in this time is in the next step
                time.sleep(slack)
            self.answer_inbox()
            for output in self.engine.step() if self.engine.has_work else ():
                call = self.calls.get(output.request_id)
                if call is not None:
                    self._deliver(call, output)
        except AotcError as error:
            self._fail_all(error)

    def _deliver(self, call: Call, output: TokenOutput) -> None:
        call.take(output)
        if call.finished:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self.engine.cancel(output.request_id)
            self._drop(call)
            self._notify(call)
        elif call.streamed:
            self._notify(call)

    def _notify(self, call: Call) -> None:
        if call.notify is not None:
            try:
                call.notify()
            except RuntimeError:  # its event loop is closed
                self.inbox.append(Wish(call, RequestError("the event loop was closed")))

    def _drop(self, call: Call) -> None:
        self.calls.pop(call.request.request_id, None)
        self.unattended.discard(call)

    def end(self, call: Call, error: BaseException) -> None:
        """Ends a call with an error."""
        call.fail(error)
        self._drop(call)
        self._notify(call)

    def _fail_all(self, error: BaseException) -> None:
        """After a step that failed: whatever was computed in it is lost. Who hears of it may ask again at once: what is in
        the inbox stays, and what is there of ended calls is passed over."""
        for call in list(self.calls.values()):
            self.end(call, copy.copy(error))  # an exception belongs to the thread that raises it
        self._renew()

    def restart(self) -> None:
        """After a step that was interrupted, nothing that the engine knows counts. Requests are computed again from
        their prompts: what is drawn depends on seed and position alone."""
        self._renew()
        waiting = {w.call for w in self.inbox if w.error is None}
        for call in list(self.calls.values()):
            if call.busy:
                self.end(call, RequestError("the answer was lost when a step was interrupted: ask again"))
            elif call not in waiting:
                call.replayed = 0
                self.inbox.appendleft(Wish(call))

    def _renew(self) -> None:
        with contextlib.suppress(AotcError):  # the next step will say so
            self._settle()
        self.engine = self._make()

    def answer_inbox(self) -> None:
        """Does what was asked so far."""
        while self.inbox:
            call, error, session = self.inbox.popleft()
            if session is not None:
                self.engine.forget(session)
            elif call is not None and self.calls.get(call.request.request_id) is call:
                if error is not None:
                    self.engine.cancel(call.request.request_id)
                    self.end(call, error)
                else:
                    self._begin(call)

    def _begin(self, call: Call) -> None:
        try:
            self.engine.submit(call.request)
        except Exception as error:
            if not isinstance(error, AotcError) and threading.current_thread() is threading.main_thread():
                raise  # it may be a signal handler's, and no fault of this call
            self.end(call, error)

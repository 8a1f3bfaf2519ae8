"""One engine for all threads of a process: calls from several of them are steps of one batch.

There is no engine thread between a lone caller and the device. A thread that waits for an answer steps the engine itself
while nobody else does: it leads, and what it computes for others it hands to them. Who has its answer hands the lead to
one that still waits. Only asyncio needs a thread, which leads for calls that no thread waits for; it starts with the first
of them and ends when there was none for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from aotc.errors import AotcError, RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.gate import FORKED
from aotc.runtime.memory import CLOSED
from aotc.runtime.sequence import SessionKey, TokenOutput
from aotc.runtime.text_stream import Call

LINGER = 5.0  # seconds that the thread of asyncio waits for more to do
_NOBODY = -1  # leads, for good
EXIT_GRACE = 2.0  # seconds that the end of the process waits for a step


class _Wish(NamedTuple):
    """What somebody wants of the engine: a call to begin, one to end with an error, or a session to be forgotten."""

    call: Call | None
    error: BaseException | None = None
    session: SessionKey | None = None


class _Waiter:
    """A thread that sleeps until its calls are ready, or until it is to lead."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready, self.leads, self.thread = ready, False, threading.get_ident()
        self._bell = threading.Lock()
        self._bell.acquire()

    def sleep(self) -> None:
        self._bell.acquire()

    def wake(self) -> None:
        if self._bell.locked():
            self._bell.release()


class SharedEngine:
    """A thread-safe engine. `make` gives the engine, and another one after a step that failed; `settle` waits until the
    device has ended what that began, `close` frees it.

    `_lock` guards who leads and who waits, for microseconds. The engine itself belongs to the leader. What others want
    of it lies in `_inbox`, whose order counts; it is appended to without the lock, by finalisers too.
    """

    def __init__(self, make: Callable[[], Engine], settle: Callable[[], None], close: Callable[[], None]) -> None:
        self._make, self._settle, self._close_device = make, settle, close
        self.engine = make()
        self.closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._leader: int | None = None  # its thread
        self._waiting: list[_Waiter] = []
        self._inbox: deque[_Wish] = deque()
        self._calls: dict[str, Call] = {}
        self._released = threading.Event()  # closed, and nobody leads any more
        self._close_here = False  # `close` was called by the leader itself, in the middle of a step
        self._unattended: set[Call] = set()  # no thread waits for these
        self._more = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def require_open(self) -> None:
        """Raises RequestError after `close`, and in a process that was forked from the one that loaded the model."""
        if self._pid != os.getpid():
            raise RequestError(FORKED)
        if self.closed:
            raise RequestError(CLOSED)

    def submit(self, call: Call, attended: bool = True) -> None:
        """Gives a call to the engine. An `attended` one is computed when a thread waits, others at once.

        What the engine refuses comes out as the call's error.
        """
        self.require_open()
        with self._lock:
            self.require_open()
            if not attended and self._thread is None:
                self._start_thread()
            if call.finished:
                return
            self._calls[call.request.request_id] = call
            self._inbox.append(_Wish(call))
            if not attended:
                self._unattended.add(call)
                self._more.notify()

    def cancel(self, call: Call, error: BaseException | None = None) -> None:
        """Ends a call with an error, if it is not over: its slot and cache are free after the step that runs, if one
        does. Never blocks."""
        error = RequestError("the request was cancelled") if error is None else error
        if call.request.request_id in self._calls:
            self._wish(_Wish(call, error))
        else:
            call.fail(error)

    def forget(self, session: SessionKey) -> None:
        """Frees what the cache holds of a session. Never blocks."""
        self._wish(_Wish(None, session=session))

    def _wish(self, wish: _Wish) -> None:
        """Fulfils a wish at once where nobody leads. Called by finalisers too, which may run in the middle of anything."""
        if self._pid != os.getpid():
            return
        self._inbox.append(wish)
        with self._unharmed():
            if self._take_lead():
                self._hand_over()

    def _take_lead(self) -> bool:
        """Makes this thread lead, if nobody does. Never blocks: who holds the lock looks at the inbox afterwards, or is
        about to lead."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._leader is not None:
                return False
            self._leader = threading.get_ident()
            return True
        finally:
            self._lock.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()` is true, which it has to be once the calls that it asks about are finished."""
        if self._pid != os.getpid():
            raise RequestError(FORKED)
        with self._unharmed():
            while not ready():
                if self._wait_for_lead(ready):
                    while not ready() and not self.closed:
                        self._step()
                    self._hand_over()

    def _wait_for_lead(self, ready: Callable[[], bool]) -> bool:
        """Sleeps, where another thread leads, until something has happened; whether this one leads now."""
        with self._lock:
            if self._leader is None:
                self._leader = threading.get_ident()
                return True
            if ready():  # the leader may have looked at `_waiting` just now
                return False
            waiter = _Waiter(ready)
            self._waiting.append(waiter)
        waiter.sleep()
        return waiter.leads

    def _hand_over(self) -> None:
        """Ends this thread's lead: does what is asked of the engine, and wakes one that has to wait on."""
        while True:
            self._answer_inbox()
            with self._lock:
                if self._inbox:
                    continue
                if self.closed:
                    self._leader = _NOBODY
                    self._released.set()
                    break
                self._ring()
                if self._waiting:
                    waiter = self._waiting[0]
                    waiter.leads, self._leader = True, waiter.thread
                    waiter.wake()
                    self._waiting.remove(waiter)
                    return
                self._leader = None
            if not self._inbox or not self._take_lead():  # something may have come while the lock was held
                return
        if self._close_here:
            self._close_device()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """Whatever a signal handler raises in here, anywhere: the engine goes on without this thread."""
        try:
            yield
        except BaseException:
            me = threading.get_ident()
            with self._lock:
                for waiter in list(self._waiting):
                    if waiter.leads and self._leader == me:  # it does not lead yet
                        waiter.leads = False
                    elif waiter.leads or waiter.thread == me:
                        self._waiting.remove(waiter)
                        waiter.wake()
            if self._leader == me:
                self._restart()
                self._hand_over()
            raise

    def _step(self) -> None:
        """One step of the engine, and its tokens to their calls."""
        try:
            if self.engine.slack > 0:  # who comes in this time is in the next step
                time.sleep(self.engine.slack)
            self._answer_inbox()
            for output in self.engine.step() if self.engine.has_work else ():
                call = self._calls.get(output.request_id)
                if call is not None:
                    self._deliver(call, output)
        except AotcError as error:
            self._fail_all(error)
        with self._lock:
            self._ring()

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
                self._inbox.append(_Wish(call, RequestError("the event loop was closed")))

    def _drop(self, call: Call) -> None:
        self._calls.pop(call.request.request_id, None)
        self._unattended.discard(call)

    def _end(self, call: Call, error: BaseException) -> None:
        call.fail(error)
        self._drop(call)
        self._notify(call)

    def _fail_all(self, error: BaseException) -> None:
        """After a step that failed: whatever was computed in it is lost."""
        for call in list(self._calls.values()):
            self._end(call, copy.copy(error))  # an exception belongs to the thread that raises it
        self._inbox.clear()
        self._renew()

    def _restart(self) -> None:
        """After a step that was interrupted, nothing that the engine knows counts. Requests are computed again from
        their prompts: what is drawn depends on seed and position alone."""
        self._renew()
        waiting = {w.call for w in self._inbox if w.error is None}
        for call in list(self._calls.values()):
            if call.busy:
                self._end(call, RequestError("the answer was lost when a step was interrupted: ask again"))
            elif call not in waiting:
                call.replayed = 0
                self._inbox.appendleft(_Wish(call))

    def _renew(self) -> None:
        with contextlib.suppress(AotcError):  # the next step will say so
            self._settle()
        self.engine = self._make()

    def _answer_inbox(self) -> None:
        while self._inbox:
            call, error, session = self._inbox.popleft()
            if session is not None:
                self.engine.forget(session)
            elif call is not None and call.request.request_id in self._calls:
                if error is not None:
                    self.engine.cancel(call.request.request_id)
                    self._end(call, error)
                else:
                    self._begin(call)

    def _begin(self, call: Call) -> None:
        try:
            self.engine.submit(call.request)
        except Exception as error:
            if not isinstance(error, AotcError) and threading.current_thread() is threading.main_thread():
                raise  # it may be a signal handler's, and no fault of this call
            self._end(call, error)

    def _ring(self) -> None:
        """Wakes who has something to read. Under the lock."""
        if self._waiting:
            for waiter in [w for w in self._waiting if w.ready()]:
                waiter.wake()
                self._waiting.remove(waiter)

    def close(self) -> None:
        """Ends every call with RequestError and frees the device after the step that runs. May be called more than once."""
        if self._pid != os.getpid():
            return
        with self._lock:
            first, self.closed = not self.closed, True
            for call in list(self._calls.values()):
                self._end(call, RequestError("the model was closed while it answered"))
            self._ring()
            self._more.notify_all()
            mine = self._leader is None
            if mine:
                self._leader = threading.get_ident()
            elif self._leader == threading.get_ident():  # from a signal handler
                self._close_here = first
                return
        if mine:
            self._hand_over()
        self._released.wait()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if first:
            self._close_device()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._lead_unattended, name="aotc-engine", daemon=True)
        thread.start()
        self._thread = thread

    def _lead_unattended(self) -> None:
        """Waits for calls that no thread waits for, as one for all of them."""
        at_exit = functools.partial(_stop, weakref.ref(self))
        atexit.register(at_exit)
        try:
            while True:
                with self._lock:
                    if not self._unattended and not self.closed:
                        self._more.wait(LINGER)
                    if self.closed or not self._unattended:
                        self._thread = None if not self.closed else self._thread
                        return
                try:
                    self.wait(lambda: not self._unattended or self.closed)
                except BaseException as error:
                    for call in list(self._unattended):
                        self._end(call, error)
        finally:
            atexit.unregister(at_exit)


def _stop(ref: weakref.ref[SharedEngine]) -> None:
    """The process ends: lets the step that runs come to its end, since nothing may run in a process that is taken down."""
    shared = ref()
    if shared is None or shared._pid != os.getpid():
        return
    thread = shared._thread
    shared.closed = True
    with shared._lock:
        shared._more.notify_all()
    if thread is not None:
        thread.join(EXIT_GRACE)


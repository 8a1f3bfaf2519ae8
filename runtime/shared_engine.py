"""One engine for all threads of a process: calls from several of them are steps of one batch.

There is no engine thread between a lone caller and the device. A thread that waits for an answer steps the engine itself
while nobody else does: it leads, and what it computes for others it hands to them. Who has its answer hands the lead to
one that still waits. Only asyncio needs a thread, which leads for calls that no thread waits for; it starts with the first
of them and ends when there was none for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from aotc.errors import RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.gate import FORKED
from aotc.runtime.led_engine import LedEngine, Wish
from aotc.runtime.memory import CLOSED
from aotc.runtime.sequence import SessionKey
from aotc.runtime.text_stream import Call

LINGER = 5.0  # seconds that the thread of asyncio waits for more to do
_NOBODY = -1  # leads, for good
EXIT_GRACE = 2.0  # seconds that the end of the process waits for a step


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
        self._led, self._close_device = LedEngine(make, settle), close
        self._inbox, self._calls, self._unattended = self._led.inbox, self._led.calls, self._led.unattended
        self.closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._leader: int | None = None  # its thread
        self._waiting: list[_Waiter] = []
        self._released = threading.Event()  # closed, and nobody leads any more
        self._close_here = False  # `close` was called by the leader itself, in the middle of a step
        self._more = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    @property
    def engine(self) -> Engine:
        """The one of now."""
        return self._led.engine

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
            self._inbox.append(Wish(call))
            if not attended:
                self._unattended.add(call)
                self._more.notify()

    def cancel(self, call: Call, error: BaseException | None = None) -> None:
        """Ends a call with an error, if it is not over: its slot and cache are free after the step that runs, if one
        does. Never blocks."""
        error = RequestError("the request was cancelled") if error is None else error
        if call.request.request_id in self._calls:
            self._wish(Wish(call, error))
        else:
            call.fail(error)

    def forget(self, session: SessionKey) -> None:
        """Frees what the cache holds of a session. Never blocks."""
        self._wish(Wish(None, session=session))

    def _wish(self, wish: Wish) -> None:
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
            self._led.answer_inbox()
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
                self._led.restart()
                self._hand_over()
            raise

    def _step(self) -> None:
        self._led.step()
        with self._lock:
            self._ring()

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
                self._led.end(call, RequestError("the model was closed while it answered"))
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
                        self._led.end(call, error)
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


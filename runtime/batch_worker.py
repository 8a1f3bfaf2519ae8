"""The dynamic batcher of a tensor model: requests of many callers, run together by one thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.artifact.plan import Plan, SizeExpr
from aotc.errors import AotcError, DeadlineExceeded, RequestError
from aotc.runtime.batcher import BatchOptions, BatchPolicy
from aotc.runtime.deadlines import deadline_after
from aotc.runtime.memory import CLOSED
from aotc.runtime.row_probe import require_independent_rows
from aotc.runtime.signature import lone_dim

Run = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Runs the model on inputs in the plan's order; new arrays, of its outputs in that order."""

_LINGER = 10.0  # seconds after which a thread without requests ends; the next request starts another
_clock = time.monotonic


@dataclass(eq=False)
class _Request:
    given: list[np.ndarray]
    rows: int
    future: Future[dict[str, np.ndarray]]


class Batcher:
    """Thread-safe. `close` fails what still waits. The thread starts with the first request."""

    def __init__(
        self, plan: Plan, run: Run, *, max_batch_size: int | None, max_wait_ms: float, min_batch_size: int,
        preferred_batch_sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        low, high = batch_bounds(plan)
        most = high if max_batch_size is None else min(max_batch_size, high)
        if most < low:
            raise RequestError(f"max_batch_size is {most}: the model was compiled for {low} rows or more")
        options = BatchOptions(most, max_wait_ms / 1000, min(min_batch_size, most), tuple(preferred_batch_sizes))
        self.options, self._low, self._run = options, low, run
        self._outputs = [t.name for t in plan.outputs]
        self._plan = plan
        self._policy: BatchPolicy[_Request] = BatchPolicy(options)
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed: str | None = None  # what requests are told
        self._proven = most == 1  # that rows do not depend on each other

    def submit(self, given: list[np.ndarray], deadline_ms: float | None) -> Future[dict[str, np.ndarray]]:
        """Queues inputs that were checked. Raises RequestError where they are too many rows, and for a deadline that is none."""
        now, rows = _clock(), given[0].shape[0]
        if rows > self.options.max_batch_size:
            raise RequestError(f"a request of {rows} rows is more than a batch of {self.options.max_batch_size}: split it")
        deadline = deadline_after(now, deadline_ms)
        request = _Request(given, rows, Future())
        key = tuple(a.shape[1:] for a in given)
        with self._changed:
            if self._closed is not None:
                raise RequestError(self._closed)
            self._policy.add(key, request, now, rows, deadline)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="aotc-batcher", daemon=True)
                self._thread.start()
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Waits for a batch that runs; what has not begun fails with RequestError."""
        self._end(CLOSED)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            waiting = self._policy.clear()
            self._changed.notify()
        for request in waiting:
            _fail(request, RequestError(reason))

    def _work(self) -> None:
        while True:
            expired, batch = self._next()
            for request in expired:
                _fail(request, DeadlineExceeded("the deadline passed before the model could run: allow more milliseconds"))
            if batch is None:
                if not expired:
                    return
                continue
            begin = _clock()
            requests = [r for r in batch.items if r.future.set_running_or_notify_cancel()]
            answers = self._compute(requests)
            with self._changed:
                self._policy.ran(batch.key, _clock() - begin)
            for request, answer in zip(requests, answers, strict=True):
                if isinstance(answer, Exception):
                    _fail(request, answer)
                else:
                    request.future.set_result(answer)
            del batch, expired, requests, answers  # nobody's arrays are kept while nothing comes

    def _next(self) -> tuple[list[_Request], Any]:
        """Waits for requests that are past their deadline or for a batch; neither: the thread ends."""
        with self._changed:
            while self._closed is None:
                now = _clock()
                expired, batch = self._policy.expire(now), self._policy.take(now)
                if expired or batch:
                    return expired, batch
                wake = self._policy.wake()
                if not self._changed.wait(_LINGER if wake is None else max(wake - now, 0)) and wake is None:
                    break
            self._thread = None
            return [], None

    def _compute(self, requests: list[_Request]) -> Sequence[dict[str, np.ndarray] | Exception]:
        """An answer for each: outputs by name, or why there are none."""
        if not requests:
            return []
        try:
            if not self._proven:
                self._prove(requests[0])
            return self._answers(requests)
        except Exception as error:
            if not self._proven and isinstance(error, RequestError):
                self._end(str(error))
            return [error] * len(requests)

    def _prove(self, request: _Request) -> None:
        shapes, dtypes = [a.shape[1:] for a in request.given], [t.dtype for t in self._plan.inputs]
        require_independent_rows(self._run, shapes, dtypes, self._low, self.options.max_batch_size)
        self._proven = True

    def _answers(self, requests: list[_Request]) -> list[dict[str, np.ndarray]]:
        """Outputs by name for each request, arrays of its own."""
        if len(requests) == 1:
            return [dict(zip(self._outputs, self._run(requests[0].given), strict=True))]
        together = [np.concatenate(parts) for parts in zip(*(r.given for r in requests), strict=True)]
        results, answers, at = self._run(together), [], 0
        for request in requests:
            rows = slice(at, at + request.rows)
            answers.append({n: a[rows].copy() for n, a in zip(self._outputs, results, strict=True)})
            at += request.rows
        return answers


def in_loop(future: Future[dict[str, np.ndarray]]) -> asyncio.Future[dict[str, np.ndarray]]:
    """The future for the running event loop. Cancelling it drops a request that has not begun."""
    return asyncio.wrap_future(future, loop=asyncio.get_running_loop())


def _fail(request: _Request, error: BaseException) -> None:
    future = request.future
    if not future.running() and not future.set_running_or_notify_cancel():
        return
    if isinstance(error, AotcError):  # an exception of its own: each raise adds to a traceback
        error = type(error)(*error.args)
    future.set_exception(error)


def batch_bounds(plan: Plan) -> tuple[int, int]:
    """The bounds of the dim that counts rows: it leads all inputs and outputs and is nowhere else. Raises RequestError
    for a model that has none."""
    advice = "submit needs one dynamic dim that leads every input and output: compile with a dynamic batch (--dim batch=1..8)"
    leading = [(t, lone_dim(t.shape[0]) if t.shape else None) for t in (*plan.inputs, *plan.outputs)]
    if not plan.inputs or not plan.outputs:
        raise RequestError(f"the model lacks inputs or outputs; {advice}")
    name = leading[0][1]
    for tensor, leads in leading:
        if leads is None or leads != name:
            raise RequestError(f"{tensor.name} does not begin with the batch; {advice}")
        if any(name in _names(size) for size in tensor.shape[1:]):
            raise RequestError(f"{tensor.name} has dim {name} twice; {advice}")
    dim = next(d for d in plan.dims if d.name == name)
    return dim.lo, dim.hi


def _names(size: SizeExpr) -> set[str]:
    return set() if isinstance(size, int) else {n for _, names in size for n in names}

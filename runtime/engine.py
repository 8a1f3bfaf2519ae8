"""The LLM engine: submit requests, step, cancel. Token ids in, token ids out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from aotc.errors import RequestError
from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.offload import Costs, Offload, PageCopy
from aotc.runtime.pace import Pace
from aotc.runtime.prefix_cache import PrefixCache
from aotc.runtime.queue_limits import QueueLimits
from aotc.runtime.scheduler import Scheduler
from aotc.runtime.sequence import NO_SLOT, Request, Row, Sequence, SessionKey, TokenOutput

_PAUSE = 1e-4  # seconds


class StepResult(Protocol):
    """What a step gives for each row: token i32 [rows], logprobs f32 and logprob_ids i32 [rows, 21]."""

    @property
    def token(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def logprob_ids(self) -> np.ndarray: ...


class Executor(Protocol):
    """Runs steps on a device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_pages: int  # of the KV cache, 0 where that is static
    page_size: int
    page_bytes: int
    offload_memory: int  # bytes of host memory for pages of sequences that lost theirs, where nobody says how many
    runs_ahead: bool  # whether a step can be launched before the one before it has ended

    def start(self, sequence: Sequence) -> None:
        """Prepares a slot: the tokens known so far become the history that penalties look at."""
        ...

    def launch(self, rows: list[Row]) -> Any:
        """Begins a step; what `wait` takes. Where a token is UNKNOWN, it is what the step before sampled."""
        ...

    def wait(self, step: Any) -> StepResult:
        """What a step gives, once it has ended. Valid until one more has been launched."""
        ...

    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> PageCopy | None:
        """Copies pages i32 [n] into host memory u8 [n, page_bytes], see PageCopier."""
        ...

    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> PageCopy | None:
        """Copies them back, to pages i32 [n]."""
        ...


class _Flight(NamedTuple):
    """A step that was launched; `begin` in seconds."""

    rows: list[Row]
    tokens: int
    step: Any
    begin: float


class Engine:
    """Continuous batching over an executor. Not thread-safe: one thread calls it.

    A step is three parts: `scheduler.schedule` says what is computed, `executor.launch` begins it, and `_land` makes
    outputs of what was computed. Where the device runs ahead, a step is launched before the one before it lands: while
    the device computes, the host looks at the tokens of the step before and chooses the next one. A sequence that turns
    out to have ended is computed once more for nothing.
    """

    def __init__(
        self,
        executor: Executor,
        eos_token_ids: tuple[int, ...],
        *,
        prefix_cache: bool = True,
        offload_memory: int | None = None,
        costs: Costs | None = None,
        max_num_queued_reqs: int | None = None,
        max_queue_ms: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix_cache` shares full pages among requests that begin alike; a static cache has none. `offload_memory`
        bounds the host memory for pages of preempted sequences, in bytes: 0 computes them again, None is what suits the
        device. `costs` decides between the two, None measures them. `max_num_queued_reqs` and `max_queue_ms` refuse
        requests where more, or longer, would wait. `clock` gives seconds."""
        self._executor, self._eos, self._clock = executor, eos_token_ids, clock
        self.costs = costs or Costs()
        self.prefixes = PrefixCache() if prefix_cache and executor.num_pages else None
        self._pool, self.offload = None, None
        if executor.num_pages:
            self._pool = PagePool(executor.num_pages, executor.page_size, self.prefixes)
            memory = executor.offload_memory if offload_memory is None else offload_memory
            self.offload = Offload(executor, memory, self.costs, clock)
        self.scheduler = Scheduler(
            executor.max_num_seqs, executor.max_num_batched_tokens, self._start, self._pool, self.offload
        )
        self._limits = QueueLimits(self.scheduler, max_num_queued_reqs, max_queue_ms, clock)
        self.computed_tokens = 0  # in all steps that have ended
        self._submitted = 0
        self._flight: _Flight | None = None
        self._landed = 0.0  # when the last step did
        self._pace = Pace()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError when it can never run: empty, too long, or ids out of range, or
        while one of its name is not done; and OverloadedError when too much waits before it.

        An answer whose length is not given is as long as the model and the pool of pages allow.
        """
        length, most = len(request.prompt_token_ids), self._executor.max_model_len
        if not length:
            raise RequestError("the prompt has no tokens")
        if length >= most:
            raise RequestError(f"the prompt has {length} tokens; the model was compiled for {most} with its answer")
        self._require_pages(request)
        vocab = self._executor.vocab_size
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= vocab:
            raise RequestError(f"the prompt holds a token id outside 0..{vocab - 1}")
        request.params.check_vocab(vocab)
        if self.scheduler.knows(request.request_id):
            raise RequestError(f"a request {request.request_id!r:.80} is not done: give this one a name of its own")
        self._limits.check(request)
        self.scheduler.add(self._sequence(request))

    def _require_pages(self, request: Request) -> None:
        if self._pool is None:
            return
        length, asked = len(request.prompt_token_ids), request.params.max_tokens
        needed = min(length + (asked or 1), self._executor.max_model_len) - 1  # the last token is not computed
        if needed > self._pool.tokens:
            raise RequestError(
                f"the request needs a KV cache of {needed} tokens, this one holds {self._pool.tokens}: "
                f"ask for less, or give more with --kv-cache-memory"
            )

    def _sequence(self, request: Request) -> Sequence:
        params = request.params
        most = self._executor.max_model_len
        if self._pool is not None:
            most = min(most, self._pool.tokens + 1)
        if params.max_tokens is not None:
            most = min(most, len(request.prompt_token_ids) + params.max_tokens)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self._eos))
        pages = BlockTable(self._pool.pages_for(self._executor.max_model_len)) if self._pool is not None else None
        self._submitted += 1
        return Sequence(
            request, NO_SLOT, list(request.prompt_token_ids), stop_ids=stops, max_len=most, pages=pages,
            number=self._submitted, since=self._clock(),
        )  # fmt: skip

    def cancel(self, request_id: str) -> bool:
        """Drops a request and frees its cache. False when it is not known (it may have finished)."""
        return self.scheduler.cancel(request_id)

    def forget(self, session: SessionKey) -> None:
        """Frees what is kept of a session."""
        self.scheduler.kept.drop(session)

    @property
    def slack(self) -> float:
        """Seconds for which nothing has to be done: a step runs, and the next one can be chosen later, with whoever comes
        until then."""
        flight = self._flight
        if flight is None or not self.has_work:
            return 0.0
        elapsed = self._clock() - max(flight.begin, self._landed)
        return self._pace.slack(len(flight.rows), flight.tokens, elapsed)

    def step(self) -> list[TokenOutput]:
        """Ends what is past its deadline and runs one step; returns the new token of each row that finished its prompt,
        and the end of each request that has come to one. Where the device runs ahead, the tokens are those of the step
        before."""
        begin = self._clock()
        outputs = [_ended(s, "deadline") for s in self.scheduler.expire(begin)]
        if self._flight is not None and not self.scheduler.can_go_ahead:
            outputs += self._land(self._flight)
        rows = self.scheduler.schedule()
        before, self._flight = self._flight, self._launch(rows) if rows else None
        if not rows and before is None and self.scheduler.copying:
            time.sleep(_PAUSE)  # who copies is another thread of this process
        if before is not None:
            self._pace.launched(self._clock() - begin)
            outputs += self._land(before)
        if self._flight is not None and not self._executor.runs_ahead:
            outputs += self._land(self._flight)
        return outputs

    def _launch(self, rows: list[Row]) -> _Flight:
        begin = self._clock()
        flight = _Flight(rows, sum(r.count for r in rows), self._executor.launch(rows), begin)
        for row in rows:
            row.sequence.launch(row)
        return flight

    def _land(self, flight: _Flight) -> list[TokenOutput]:
        """Waits for a step; what it says about those of its rows that have not ended meanwhile."""
        result, outputs = self._executor.wait(flight.step), []
        now = self._clock()
        self._measure(flight, now - max(flight.begin, self._landed))
        self._landed = now
        if self._flight is flight:
            self._flight = None
        for n, row in enumerate(flight.rows):
            if row.sequence.ended:
                continue
            token = int(result.token[n])
            if row.samples:
                row.sequence.tokens[row.start + row.count] = token
            self.scheduler.land(row)
            if row.samples:
                outputs.append(self._append(row, token, n, result))
        return outputs

    def _measure(self, flight: _Flight, seconds: float) -> None:
        """A step that is mostly prompts says what a token costs to compute again."""
        self.computed_tokens += flight.tokens
        self._pace.ran(len(flight.rows), flight.tokens, seconds)
        if flight.tokens > 2 * len(flight.rows):
            self.costs.computed(flight.tokens, seconds)

    def _start(self, sequence: Sequence) -> None:
        """Before a sequence runs: arrays of an earlier slot are that slot's."""
        params = sequence.request.params
        sequence.bias = params.bias_arrays() if params.logit_bias else None
        sequence.bans = params.banned_ids(self._eos)
        self._executor.start(sequence)
        self._limits.admitted(sequence)

    def _append(self, row: Row, token: int, n: int, result: StepResult) -> TokenOutput:
        sequence = row.sequence
        if token < 0:  # NaN logits or nothing left to choose: this request fails, its neighbours do not
            self.scheduler.end(sequence, faulty=True)
            return _ended(sequence, "error")
        sequence.outputs.append(token)
        reason, stop = None, None
        if token in sequence.stop_ids and len(sequence.outputs) > sequence.request.params.min_tokens:
            reason, stop = "stop", token
        elif row.start + row.count + 1 >= sequence.max_len:
            reason = "length"
        if reason:
            self.scheduler.end(sequence)
        logprobs = _logprobs(sequence, n, result)
        return TokenOutput(sequence.request.request_id, token, logprobs, reason, stop, sequence.cached_tokens or 0)


def _ended(sequence: Sequence, reason: str) -> TokenOutput:
    """The end of a request that gives no token."""
    return TokenOutput(sequence.request.request_id, -1, (), reason, None, sequence.cached_tokens or 0)


def _logprobs(sequence: Sequence, row: int, result: StepResult) -> tuple[tuple[int, float], ...]:
    asked = sequence.request.params.logprobs
    if asked is None:
        return ()
    ids, values = result.logprob_ids[row, : asked + 1].tolist(), result.logprobs[row, : asked + 1].tolist()
    return tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)

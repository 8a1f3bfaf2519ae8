"""The LLM engine: submit requests, step, cancel. Token ids in, token ids out."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aotc.errors import RequestError
from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.scheduler import Scheduler
from aotc.runtime.sequence import Request, Row, Sequence, TokenOutput


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

    def start(self, sequence: Sequence) -> None:
        """Prepares a slot: the tokens known so far become the history that penalties look at."""
        ...

    def step(self, rows: list[Row]) -> StepResult: ...


class Engine:
    """Continuous batching over an executor. Not thread-safe: one thread calls it."""

    def __init__(self, executor: Executor, eos_token_ids: tuple[int, ...]) -> None:
        self._executor, self._eos = executor, eos_token_ids
        self._pool = PagePool(executor.num_pages, executor.page_size) if executor.num_pages else None
        self.scheduler = Scheduler(executor.max_num_seqs, executor.max_num_batched_tokens, self._start, self._pool)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError when it can never run: empty, too long, or ids out of range.

        An answer whose length is not given is as long as the model and the pool of pages allow.
        """
        length, most = len(request.prompt_token_ids), self._executor.max_model_len
        if not length:
            raise RequestError("the prompt has no tokens")
        if length >= most:
            raise RequestError(f"the prompt has {length} tokens; the model was compiled for {most} with its answer")
        self._require_pages(request)
        vocab = self._executor.vocab_size
        if not all(0 <= t < vocab for t in request.prompt_token_ids):
            raise RequestError(f"the prompt holds a token id outside 0..{vocab - 1}")
        request.params.check_vocab(vocab)
        self.scheduler.add(request)

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

    def cancel(self, request_id: str) -> bool:
        """Drops a request and frees its cache. False when it is not known (it may have finished)."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[TokenOutput]:
        """Runs one step; returns the new token of each row that finished its prompt."""
        rows = self.scheduler.schedule()
        if not rows:
            return []
        result = self._executor.step(rows)
        outputs = []
        for n, row in enumerate(rows):
            row.sequence.computed += row.count
            if row.samples:
                outputs.append(self._take(row.sequence, n, result))
        return outputs

    def _start(self, request: Request, slot: int, outputs: list[int]) -> Sequence:
        params = request.params
        most = self._executor.max_model_len
        if self._pool is not None:
            most = min(most, self._pool.tokens + 1)
        if params.max_tokens is not None:
            most = min(most, len(request.prompt_token_ids) + params.max_tokens)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self._eos))
        tokens = [*request.prompt_token_ids, *outputs]
        sequence = Sequence(request, slot, tokens, stop_ids=stops, max_len=most, outputs=outputs)
        if self._pool is not None:
            sequence.pages = BlockTable(self._pool.pages_for(self._executor.max_model_len))
        if params.logit_bias:
            sequence.bias = params.bias_arrays()
        sequence.bans = params.banned_ids(self._eos)
        self._executor.start(sequence)
        return sequence

    def _take(self, sequence: Sequence, row: int, result: StepResult) -> TokenOutput:
        token = int(result.token[row])
        request_id = sequence.request.request_id
        if token < 0:  # NaN logits or nothing left to choose: this request fails, its neighbours do not
            self.scheduler.release(sequence)
            return TokenOutput(request_id, token, (), "error")
        sequence.tokens.append(token)
        sequence.outputs.append(token)
        reason, stop = None, None
        if token in sequence.stop_ids and len(sequence.outputs) > sequence.request.params.min_tokens:
            reason, stop = "stop", token
        elif len(sequence.tokens) >= sequence.max_len:
            reason = "length"
        if reason:
            self.scheduler.release(sequence)
        return TokenOutput(request_id, token, _logprobs(sequence, row, result), reason, stop)


def _logprobs(sequence: Sequence, row: int, result: StepResult) -> tuple[tuple[int, float], ...]:
    asked = sequence.request.params.logprobs
    if asked is None:
        return ()
    ids, values = result.logprob_ids[row], result.logprobs[row]
    return tuple((int(ids[i]), float(values[i])) for i in range(asked + 1) if ids[i] >= 0)

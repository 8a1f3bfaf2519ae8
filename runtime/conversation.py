"""A conversation whose keys and values stay in the cache between turns, and are computed while the user still speaks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aotc.errors import DeadlineExceeded, RequestError
from aotc.runtime.async_stream import AsyncStream
from aotc.runtime.prompts import Terms
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import SessionKey
from aotc.runtime.text_stream import Call, Chunk, Completion, Superseded

if TYPE_CHECKING:
    from aotc.runtime.llm import LLM

Part = str | list[int]
_CLOSED = "the session was closed: make another one"
_GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Conversation:
    """Made by `llm.session()`. A context manager that closes it.

    The conversation is a list of tokens. What is given is appended: `prefill` computes it ahead, `generate` and `stream`
    answer, and append the answer. Texts that follow each other without an answer between them are tokenized as one, so
    that it does not matter where they were cut; text after an answer begins without the tokenizer's special tokens. Only
    tokens that the cache does not hold are computed: `replace` with a text that parts from the conversation somewhere
    keeps what lies before.

    An answer that is cut short (by closing its stream, a deadline or a stop string) counts as far as the caller was given
    it. A call that raises RequestError leaves the conversation as it was.

    One turn at a time: a turn takes over from a `prefill` that still runs, which then returns. An idle session holds a
    slot, or pages, only while nothing else needs them; without, its next turn computes the conversation anew, so that
    there may be more sessions than slots.
    """

    def __init__(self, llm: LLM, key: SessionKey, priority: int) -> None:
        self._llm, self._key, self._priority, self._shared = llm, key, priority, llm._shared
        self._lock = threading.RLock()  # the end of a dropped stream may come in the middle of anything
        self._done: list[int] = []  # up to the last answer
        self._parts: list[Part] = []  # since then
        self._turn: Call | None = None
        self._prefill: Call | None = None
        self._closed = False

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._shared.forget(self._key)

    def close(self) -> None:
        """Frees what the session holds, after the step that runs. A turn that runs ends with RequestError."""
        self._closed = True
        for call in (self._turn, self._prefill):
            if call is not None:
                self._shared.cancel(call, RequestError(_CLOSED))
        self._shared.forget(self._key)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The conversation."""
        with self._lock:
            return tuple(self._ids(self._parts))

    @property
    def text(self) -> str:
        """The conversation as text, special tokens included."""
        return self._llm.tokenizer.decode(self.token_ids, skip_special_tokens=False)

    def replace(self, prompt: str | Sequence[int]) -> None:
        """Makes `prompt` the conversation. Nothing is computed before the next call."""
        with self._lock:
            self._require_idle()
            self._done, self._parts = [], _joined([], prompt)

    def prefill(self, text: str | Sequence[int] = "") -> None:
        """Appends `text` and computes its keys and values. Returns when that is done, or a turn has taken over."""
        opened = self._open_prefill(text)
        if opened is None:
            return
        call, end = opened
        try:
            self._shared.submit(call)
            self._shared.wait(lambda: call.finished)
        finally:
            end(call)
        if call.error is not None and not isinstance(call.error, Superseded):
            raise call.error

    async def aprefill(self, text: str | Sequence[int] = "") -> None:
        """`prefill` for asyncio. Cancelling the task stops it; the text stays."""
        opened = self._open_prefill(text)
        if opened is not None:
            call, end = opened
            with contextlib.suppress(Superseded):
                await AsyncStream(self._shared, lambda: call, end).whole()

    def generate(
        self, text: str | Sequence[int] = "", params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        **settings: Any,
    ) -> Completion:  # fmt: skip
        """Appends `text` and answers, as `LLM.generate` does."""
        call = self._open_turn(text, params, deadline_ms, settings)()
        try:
            self._shared.submit(call)
            self._shared.wait(lambda: call.finished)
            call.read_all()
        finally:
            self._end_turn(call)
        if call.error is not None:
            raise call.error
        return call.completion()

    def stream(
        self, text: str | Sequence[int] = "", params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        **settings: Any,
    ) -> Iterator[Chunk]:  # fmt: skip
        """Appends `text` and yields the answer, as `LLM.stream` does. Closing the iterator ends the turn."""
        return self._llm._stream(self._open_turn(text, params, deadline_ms, settings), self._end_turn)

    def astream(
        self, text: str | Sequence[int] = "", params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        **settings: Any,
    ) -> AsyncStream:  # fmt: skip
        """`stream` for asyncio, as `LLM.astream` is. Leaving the block ends the turn."""
        return AsyncStream(self._shared, self._open_turn(text, params, deadline_ms, settings), self._end_turn)

    async def agenerate(
        self, text: str | Sequence[int] = "", params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        **settings: Any,
    ) -> Completion:  # fmt: skip
        """`generate` for asyncio."""
        return await self.astream(text, params, deadline_ms=deadline_ms, **settings).whole()

    def _ids(self, parts: list[Part]) -> list[int]:
        ids = list(self._done)
        for part in parts:
            if isinstance(part, str):
                ids += self._llm.tokenizer.encode(part, add_special_tokens=not ids)
            else:
                ids += part
        return ids

    def _require_idle(self) -> None:
        if self._closed:
            raise RequestError(_CLOSED)
        if self._turn is not None:
            raise RequestError("the session is answering: end that stream first, or make another session")

    def _take_over(self) -> None:
        """A prefill that runs gives way; what it computed so far is kept."""
        if self._prefill is not None:
            self._shared.cancel(self._prefill, Superseded())
            self._prefill = None

    def _open_prefill(self, text: str | Sequence[int]) -> tuple[Call, Callable[[Call], None]] | None:
        """The call that computes ahead, and what is to be called at its end. None where there is nothing to compute."""
        self._shared.require_open()
        with self._lock:
            self._require_idle()
            before, parts = self._parts, _joined(self._parts, text)
            ids = self._ids(parts)
            if not ids:
                return None
            call = self._llm._call(ids, _GREEDY, Terms(None, self._priority, self._key))
            self._take_over()
            self._parts, self._prefill = parts, call

        def end(call: Call) -> None:
            refused = call.error is not None
            self._shared.cancel(call)
            with self._lock:
                if self._prefill is call:  # else another call goes on from here
                    self._prefill = None
                    self._parts = before if refused else parts

        return call, end

    def _open_turn(
        self, text: str | Sequence[int], params: SamplingParams | None, deadline_ms: float | None, settings: dict[str, Any]
    ) -> Callable[[], Call]:
        own = self._llm._params(params, settings)

        def open_turn() -> Call:
            self._shared.require_open()
            with self._lock:
                self._require_idle()
                parts = _joined(self._parts, text)
                call = self._llm._call(self._ids(parts), own, Terms(deadline_ms, self._priority, self._key))
                self._take_over()
                self._turn = call
                return call

        return open_turn

    def _end_turn(self, call: Call) -> None:
        """The conversation goes on after what the caller was given."""
        failed = call.error is not None and not isinstance(call.error, DeadlineExceeded)
        self._shared.cancel(call)
        with self._lock:
            if self._turn is not call:
                return
            self._turn = None
            if failed and not call.read_tokens:
                return
            ids, rest = call.given(self._llm.tokenizer if self._llm.artifact.has("tokenizer.json") else None)
            self._done = [*call.request.prompt_token_ids, *ids]
            self._parts = [rest] if rest else []


def _joined(parts: list[Part], more: str | Sequence[int]) -> list[Part]:
    """`parts` and what follows; texts become one."""
    if not isinstance(more, str):
        return [*parts, list(more)] if len(more) else list(parts)
    if parts and isinstance(parts[-1], str):
        return [*parts[:-1], parts[-1] + more]
    return [*parts, more] if more else list(parts)


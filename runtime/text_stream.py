"""From the tokens of a request to an answer: chunks of text while they come, and the whole at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from aotc.errors import DeadlineExceeded, RequestError
from aotc.runtime.detokenizer import Detokenizer, StopStrings
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, TokenOutput
from aotc.runtime.tokenizer import Tokenizer

NO_TOKEN = "the model gave no valid token (NaN logits, or every token was forbidden)"


class Superseded(RequestError):
    """A session computed ahead, and its turn has begun."""


class Chunk(NamedTuple):
    """A piece of an answer. `finish_reason` is set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Timings:
    """Seconds from submission: to the first token, to the end; and tokens a second after the first."""

    first_token: float
    total: float
    tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """An answer. `logprobs` has one entry a token where asked for: (token id, log probability) pairs."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_token_ids: tuple[int, ...] = ()


class NoText:
    """In place of a Detokenizer, of an artifact without a tokenizer: answers have token ids alone."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


@dataclass(eq=False)
class TextStream:
    """Turns the tokens of one request into text: whole characters only, stop strings cut off.

    A stop string counts when a token after the first `min_tokens` completes it, as with vLLM.
    """

    params: SamplingParams
    detokenizer: Detokenizer | NoText
    stops: StopStrings = field(init=False)
    stop_reason: int | str | None = None
    count: int = 0

    def __post_init__(self) -> None:
        self.stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> Chunk:
        """The text that this token makes final. A stop string ends the answer with reason stop."""
        if output.token_id < 0:  # an end without a token
            return Chunk(self.stops.flush(), (), output.finish_reason)
        self.count += 1
        may_stop = self.count > self.params.min_tokens
        ended_by_id = output.finish_reason == "stop"
        text = "" if ended_by_id else self.detokenizer.push(output.token_id)
        text, stop = self.stops.push(text, may_stop)
        if stop is not None:
            self.stop_reason = stop
            return Chunk(text, (output.token_id,), "stop")
        if output.finish_reason is None:
            return Chunk(text, (output.token_id,), None)
        rest, stop = self.stops.push(self.detokenizer.flush(), may_stop)
        self.stop_reason = output.stop_reason if stop is None else stop
        text += rest
        if stop is None:
            text += self.stops.flush()
        return Chunk(text, (output.token_id,), "stop" if stop else output.finish_reason)


@dataclass(eq=False)
class Call:
    """One request on its way through the engine, and what came of it so far.

    Whoever drives the engine writes it (`take`, `fail`); `chunks` are those that a stream has not read yet.
    """

    request: Request
    stream: TextStream
    notify: Callable[[], None] | None = None  # at the end, from whatever thread; never blocks
    streamed: bool = True  # and after each chunk
    begin: float = field(default_factory=time.perf_counter)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    chunks: deque[Chunk] = field(default_factory=deque)
    finish_reason: str | None = None
    error: BaseException | None = None
    first: float = 0.0
    last: float = 0.0
    read_text: str = ""  # what a stream gave to its reader
    read_tokens: list[int] = field(default_factory=list)
    replayed: int = 0  # tokens that were drawn again after an interrupted step
    busy: bool = False

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: the answer is whole, or there is an error."""
        return self.finish_reason is not None or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether a stream has something to read."""
        return bool(self.chunks) or self.finished

    def take(self, output: TokenOutput) -> None:
        """Adds a token. One that was drawn again has to be the one that it was."""
        if self.finished:
            return
        if self.replayed < len(self.tokens) and output.token_id >= 0:
            if output.token_id != self.tokens[self.replayed]:
                self.fail(RequestError("the answer was lost when a step was interrupted: ask again"))
            self.replayed += 1
            return
        self.busy = True  # until all of it is written
        chunk = self.stream.push(output)
        self.last = time.perf_counter() - self.begin
        self.first = self.first or self.last
        self.text += chunk.text
        self.tokens += chunk.token_ids
        self.replayed = len(self.tokens)
        if output.logprobs:
            self.logprobs.append(output.logprobs)
        if chunk.finish_reason == "error":
            self.error = RequestError(NO_TOKEN)
        elif chunk.finish_reason == "deadline":
            spent = f"the answer was not whole after {1000 * self.last:.0f} ms"
            self.error = DeadlineExceeded(f"{spent}: give it more time, or ask for fewer tokens", self.text, self.tokens)
        else:
            if chunk.text or chunk.token_ids or chunk.finish_reason:
                self.chunks.append(chunk)
            self.finish_reason = chunk.finish_reason
        self.busy = False

    def read(self) -> Chunk:
        """Takes the next chunk."""
        chunk = self.chunks.popleft()
        self.read_text += chunk.text
        self.read_tokens += chunk.token_ids
        return chunk

    def read_all(self) -> None:
        """Takes all chunks."""
        while self.chunks:
            self.read()

    def given(self, tokenizer: Tokenizer | None) -> tuple[list[int], str]:
        """What the reader was given: token ids, and text after them that is no whole token of the answer."""
        whole = self.finish_reason is not None and not self.chunks
        if tokenizer is None or (whole and not isinstance(self.stream.stop_reason, str)):
            return self.read_tokens, ""
        skip = self.stream.params.skip_special_tokens
        for count in range(len(self.read_tokens), 0, -1):
            text = tokenizer.decode(self.read_tokens[:count], skip)
            if self.read_text.startswith(text):
                return self.read_tokens[:count], self.read_text[len(text) :]
        return [], self.read_text

    def fail(self, error: BaseException) -> None:
        if not self.finished:
            self.error = error

    def completion(self) -> Completion:
        """The answer so far; where its time was over, with reason deadline."""
        rate = (len(self.tokens) - 1) / (self.last - self.first) if self.last > self.first else 0.0
        reason = "deadline" if isinstance(self.error, DeadlineExceeded) else str(self.finish_reason)
        return Completion(
            self.text, tuple(self.tokens), reason, Timings(self.first, self.last, rate), tuple(self.logprobs),
            self.request.prompt_token_ids,
        )  # fmt: skip

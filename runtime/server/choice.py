"""One choice of an answer while the engine makes it: its text, piece by piece, and how it ended."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aotc.errors import AotcError
from aotc.runtime.llm import TextStream
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.server.responses import status_of
from aotc.runtime.server.served import ServedModel


class NoToken(AotcError):
    """The model's logits left nothing to choose from: this request fails, the engine goes on."""

    status = 500


class TooLate(AotcError):
    """The request's time was over before its answer was done."""

    status = 504


class Piece(NamedTuple):
    """Text that has become final, and the logprobs of the tokens since the last piece."""

    text: str
    logprobs: list[dict[str, Any]]


@dataclass(eq=False)
class Choice:
    """One choice while it is made."""

    index: int
    prompt: list[int]
    params: SamplingParams
    number: int
    stream: TextStream
    text: str = ""
    tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    first_token: float | None = None  # seconds
    failed: bool = False  # by our fault

    async def run(self, model: ServedModel, seed: int, turn: tuple[int, str]) -> AsyncGenerator[Piece, None]:
        """Yields each piece of text that has become final. Leaving the iteration frees the engine's slot. Raises
        RequestError, EngineGone, NoToken and TooLate."""
        metrics = model.metrics
        begin = last = time.monotonic()
        reason = "abort"
        source = model.engine.generate(self.prompt, self.params, seed, self.number, *turn, model.request_timeout)
        try:
            async for output in source:
                now = time.monotonic()
                if output.token_id < 0:
                    pass
                elif self.tokens:
                    metrics.inter_token.observe(now - last)
                else:
                    self.first_token, self.cached_tokens = now - begin, output.cached_tokens
                    metrics.first_token.observe(now - begin)
                    metrics.prompt_tokens.inc(len(self.prompt))
                last = now
                piece = self._take(output)
                if output.finish_reason == "deadline":
                    raise TooLate("the answer was not done in time")
                if output.finish_reason == "error":
                    raise NoToken("the model gave no valid token (NaN logits, or every token was forbidden)")
                metrics.generation_tokens.inc()
                if piece.text or piece.logprobs or self.finish_reason:
                    yield piece
                if self.finish_reason:
                    reason = self.finish_reason
                    return
        except AotcError as error:
            reason = "error"
            self.failed = status_of(error) >= 500
            raise
        finally:
            await source.aclose()
            metrics.finished(reason, len(self.prompt), self.tokens, time.monotonic() - begin)

    def _take(self, output: TokenOutput) -> Piece:
        chunk = self.stream.push(output)
        logprobs = []
        if output.logprobs:
            sampled, *best = (self._logprob(*pair) for pair in output.logprobs)
            logprobs.append({**sampled, "top_logprobs": best})
        self.tokens += len(chunk.token_ids)
        self.text += chunk.text
        self.logprobs += logprobs
        self.finish_reason = chunk.finish_reason
        return Piece(chunk.text, logprobs)

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.stream.detokenizer.token_bytes(token_id)
        value = max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0  # JSON has no infinity
        return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}

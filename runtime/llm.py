"""A language model in this process: text in, text out, over the engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, RequestError
from aotc.runtime.detokenizer import Detokenizer, StopStrings
from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions, Memory, open_executor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, TokenOutput

if TYPE_CHECKING:
    from aotc.runtime.chat_template import ChatTemplate
    from aotc.runtime.devices.opening import Opening
    from aotc.runtime.tokenizer import Tokenizer


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


@dataclass(eq=False)
class TextStream:
    """Turns the tokens of one request into text: whole characters only, stop strings cut off.

    A stop string counts when a token after the first `min_tokens` completes it, as with vLLM.
    """

    params: SamplingParams
    detokenizer: Detokenizer
    stops: StopStrings = field(init=False)
    stop_reason: int | str | None = None
    count: int = 0

    def __post_init__(self) -> None:
        self.stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> Chunk:
        """The text that this token makes final. A stop string ends the answer with reason stop."""
        if output.finish_reason in ("error", "deadline"):  # no token
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
        self.stop_reason = output.stop_reason
        rest, stop = self.stops.push(self.detokenizer.flush(), may_stop)
        text += rest
        if stop is None:
            text += self.stops.flush()
        return Chunk(text, (output.token_id,), "stop" if stop else output.finish_reason)


class LLM:
    """A loaded language model. Made by `aotc.load`; one thread at a time. A context manager that closes it."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        max_num_seqs: int = 4,
        device: str = "auto",
        kv_layout: str | None = None,
        kv_cache_memory: int | str | None = None,
        opening: Opening | None = None,
    ) -> None:
        """`opening` is a GPU that is being opened (`begin_opening`): the tokenizer is read in the meantime."""
        self.artifact, self.model = artifact, artifact.manifest.model
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._number = 0
        begin = time.perf_counter()
        if opening is not None and artifact.has("tokenizer.json"):
            _ = self.tokenizer
        tokenizer = time.perf_counter() - begin
        self._executor = open_executor(
            artifact, max_num_seqs, device, opening, CacheOptions(kv_layout, kv_cache_memory)
        )
        self.startup = {"tokenizer": tokenizer, **self._executor.startup}
        """Seconds of what was done while the GPU was opened and the weights came up: parts overlap."""
        self.engine = Engine(self._executor, self.model.eos_token_ids)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory of the model, on either device. Calls raise RequestError afterwards."""
        self._executor.close()

    @property
    def memory(self) -> Memory:
        """Exact bytes of what this model allocated."""
        return self._executor.memory

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded on first use. Raises ArtifactError where the artifact has none."""
        if self._tokenizer is None:
            from aotc.runtime.tokenizer import Tokenizer

            if not self.artifact.has("tokenizer.json"):
                raise ArtifactError(f"{self.artifact.path} has no tokenizer: give token ids")
            self._tokenizer = Tokenizer(self.artifact.file("tokenizer.json"), self.generation_config)
        return self._tokenizer

    @property
    def generation_config(self) -> dict[str, Any]:
        """Hugging Face's generation defaults, as far as the checkpoint has them."""
        name = "generation_config.json"
        return json.loads(self.artifact.read(name)) if self.artifact.has(name) else {}

    def warm(self) -> None:
        """Makes ready what a first request needs, so that it waits for nothing."""
        self._executor.warm()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **settings: Any
    ) -> Completion:
        """The answer to a conversation: messages with `role` and `content`, as in OpenAI's API."""
        return self.generate(self.chat_tokens(messages), params, **settings)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. The template writes special tokens itself: none are added."""
        return self.tokenizer.encode(self.chat_prompt(messages), add_special_tokens=False)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's chat template makes of messages."""
        if self._template is None:
            from aotc.runtime.chat_template import ChatTemplate

            if not self.artifact.has("chat_template.jinja"):
                raise RequestError("the model has no chat template: give a plain prompt")
            source = self.artifact.read("chat_template.jinja").decode()
            config, tokens = self.generation_config, self.tokenizer
            self._template = ChatTemplate(
                source,
                bos_token=config.get("bos_token", tokens.bos_token),
                eos_token=config.get("eos_token", tokens.eos_token),
            )
        return self._template.render(messages)

    def generate(
        self, prompt: str | Sequence[int] | Sequence[str], params: SamplingParams | None = None, **settings: Any
    ) -> Any:
        """One Completion for a prompt (text or token ids), a list for a list of texts.

        `settings` are fields of SamplingParams. Raises RequestError.
        """
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return self._generate([prompt], params, settings)[0]  # type: ignore[list-item]
        return self._generate(list(prompt), params, settings)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **settings: Any
    ) -> Iterator[Chunk]:
        """Yields the answer piece by piece. Closing the iterator cancels the request."""
        request, text = self._submit(prompt, params or SamplingParams(**settings))
        try:
            finished = False
            while not finished:
                for output in self.engine.step():
                    if output.request_id == request.request_id:
                        chunk = text.push(output)
                        finished = chunk.finish_reason is not None
                        if chunk.text or chunk.token_ids or finished:
                            yield chunk
                        if finished:
                            break
        finally:
            self.engine.cancel(request.request_id)

    def _submit(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[Request, TextStream]:
        self._executor.require_open()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._number += 1
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little") >> 1
        request = Request(f"r{self._number}", tuple(ids), params, seed)
        stream = TextStream(params, Detokenizer(self.tokenizer, params.skip_special_tokens))
        self.engine.submit(request)
        return request, stream

    def _generate(
        self, prompts: list[Any], params: SamplingParams | None, settings: Mapping[str, Any]
    ) -> list[Completion]:
        begin = time.perf_counter()
        running: dict[str, _Running] = {}
        try:
            for prompt in prompts:
                request, text = self._submit(prompt, params or SamplingParams(**settings))
                running[request.request_id] = _Running(request, text)
            while not all(r.finish_reason for r in running.values()):
                for output in self.engine.step():
                    item = running.get(output.request_id)
                    if item is not None and item.finish_reason is None:
                        item.take(output, time.perf_counter() - begin)
                        if item.finish_reason:
                            self.engine.cancel(output.request_id)
        except BaseException:
            for name in running:
                self.engine.cancel(name)
            raise
        return [r.completion() for r in running.values()]


@dataclass(eq=False)
class _Running:
    request: Request
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: str | None = None
    first: float = 0.0
    last: float = 0.0

    def take(self, output: TokenOutput, now: float) -> None:
        chunk = self.stream.push(output)
        self.first = self.first or now
        self.last = now
        self.text += chunk.text
        self.tokens += chunk.token_ids
        if output.logprobs:
            self.logprobs.append(output.logprobs)
        self.finish_reason = chunk.finish_reason

    def completion(self) -> Completion:
        if self.finish_reason == "error":
            raise RequestError("the model gave no valid token (NaN logits, or every token was forbidden)")
        rate = (len(self.tokens) - 1) / (self.last - self.first) if self.last > self.first else 0.0
        return Completion(
            self.text, tuple(self.tokens), str(self.finish_reason), Timings(self.first, self.last, rate),
            tuple(self.logprobs), self.request.prompt_token_ids,
        )  # fmt: skip

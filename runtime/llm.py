"""A language model in this process: text in, text out, over an engine that all threads share."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, DeadlineExceeded, RequestError
from aotc.runtime.async_stream import AsyncStream
from aotc.runtime.deadlines import deadline_after
from aotc.runtime.detokenizer import Detokenizer
from aotc.runtime.engine import Engine, Executor
from aotc.runtime.executor import CacheOptions, Memory, open_executor
from aotc.runtime.prompts import Terms, prompts, sampling_params, token_ids
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, SessionKey, require_turn
from aotc.runtime.shared_engine import SharedEngine
from aotc.runtime.text_stream import Call, Chunk, Completion, NoText, TextStream, Timings

if TYPE_CHECKING:
    from aotc.runtime.chat_template import ChatTemplate
    from aotc.runtime.conversation import Conversation
    from aotc.runtime.devices.opening import Opening
    from aotc.runtime.tokenizer import Tokenizer

__all__ = ["LLM", "Chunk", "Completion", "TextStream", "Timings"]

Prompt = str | Sequence[int]


class LLM:
    """A loaded language model. Made by `aotc.load`. A context manager that closes it.

    Any thread may call it: what is asked at the same time is computed in the same steps. A lone caller steps the model
    in its own thread; calls of asyncio run in a daemon thread, which ends with `close`. The process that loaded a model
    is the only one that can use it.

    Everywhere, `params` and `settings` (the fields of SamplingParams, which replace those of `params`) say how tokens are
    chosen, and `deadline_ms` is how long the answer may take: one that is not whole by then ends, before the next step,
    with DeadlineExceeded, which has the text so far. A lower `priority` goes first; cached prefixes are shared among
    calls of one `cache_salt` alone.
    """

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
        self._numbers = itertools.count(1)
        parts, begin = {}, time.perf_counter()
        if opening is not None and artifact.has("tokenizer.json"):
            opening.wait_for_driver()  # a tokenizer is read under Python's lock, in 0.2 to 0.5 s
            waited = time.perf_counter()
            _ = self.tokenizer
            parts = {"wait": waited - begin, "tokenizer": time.perf_counter() - waited}
        self._executor = executor = open_executor(
            artifact, max_num_seqs, device, opening, CacheOptions(kv_layout, kv_cache_memory)
        )
        self.startup = {**parts, **executor.startup}
        """Seconds of what was done while the GPU was opened and the weights came up: parts overlap."""
        self._shared = SharedEngine(lambda: self._engine(executor), executor.settle, executor.close)

    _clock = staticmethod(time.monotonic)

    def _engine(self, executor: Executor) -> Engine:
        return Engine(executor, self.model.eos_token_ids, clock=self._clock)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory of the model, on either device, after the step that runs. Calls that run in other threads and
        tasks end with RequestError, as do later ones. In a forked process it does nothing."""
        self._shared.close()

    @property
    def engine(self) -> Engine:
        """What the calls of all threads share. It belongs to whoever steps it: look, and do not touch."""
        return self._shared.engine

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
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **settings: Any,
    ) -> Any:
        """One Completion for a prompt (text or token ids), a list of them for a list of prompts.

        With a list, `params` and `seed` may be lists too, of one for each prompt, and `deadline_ms` is for all of it.
        Raises RequestError, DeadlineExceeded, and DeviceError where the device fails.
        """
        given, alone = prompts(prompt)
        own = sampling_params(params, settings, len(given), alone)
        terms = Terms(deadline_ms, priority, SessionKey(cache_salt, ""))
        calls = [self._call(p, each, terms) for p, each in zip(given, own, strict=True)]
        batch = _Batch(calls)
        try:
            for call in calls:
                self._shared.submit(call)
            self._shared.wait(batch.settled)
            completions = _completions(calls)
        finally:
            for call in calls:
                self._shared.cancel(call)
        return completions[0] if alone else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        priority: int = 0, cache_salt: str = "", **settings: Any,
    ) -> Iterator[Chunk]:  # fmt: skip
        """Yields the answer piece by piece; raises as `generate` does. The request starts with the first piece; closing
        the iterator cancels it, and its slot and cache are free after the step that runs."""
        terms = Terms(deadline_ms, priority, SessionKey(cache_salt, ""))
        call = self._call(prompt, self._params(params, settings), terms)
        return self._stream(lambda: call)

    def _stream(self, open_call: Callable[[], Call], end: Callable[[Call], None] | None = None) -> Iterator[Chunk]:
        """Opens the call for the first piece; `end` is called after the last one, or when the iterator is closed."""
        call = open_call()
        try:
            self._shared.submit(call)
            while True:
                self._shared.wait(lambda: call.ready)
                if not call.chunks:
                    break
                yield call.read()
            if call.error is not None:
                raise call.error
        finally:
            (end or self._shared.cancel)(call)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        priority: int = 0, cache_salt: str = "", **settings: Any,
    ) -> AsyncStream:  # fmt: skip
        """`stream` for asyncio: `async with llm.astream(...) as stream: async for chunk in stream: ...`.

        The event loop never waits for the model. Leaving the block, or cancelling the task, cancels the request.
        """
        own = self._params(params, settings)
        terms = Terms(deadline_ms, priority, SessionKey(cache_salt, ""))
        return AsyncStream(self._shared, lambda: self._call(prompt, own, terms))

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deadline_ms: float | None = None,
        priority: int = 0, cache_salt: str = "", **settings: Any,
    ) -> Completion:  # fmt: skip
        """`generate` of one prompt for asyncio; for more, `asyncio.gather`. Cancelling the task cancels the request."""
        turn = {"deadline_ms": deadline_ms, "priority": priority, "cache_salt": cache_salt}
        return await self.astream(prompt, params, **turn, **settings).whole()

    def session(self, *, priority: int = 0, cache_salt: str = "") -> Conversation:
        """A conversation whose keys and values stay in the cache between turns; see Conversation. Close it, or leave its
        block, when it is over. All of its turns have the same `priority` and `cache_salt`."""
        from aotc.runtime.conversation import Conversation

        self._shared.require_open()
        require_turn(priority, cache_salt)
        return Conversation(self, SessionKey(cache_salt, f"s{next(self._numbers)}"), priority)

    def _params(self, params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
        return sampling_params(params, settings, 1, True)[0]

    def _call(self, prompt: Prompt, params: SamplingParams, terms: Terms) -> Call:
        self._shared.require_open()
        deadline = deadline_after(self._clock(), terms.deadline_ms)
        if params.n != 1:
            raise RequestError(f"n is {params.n}: for several answers, give the prompt several times with a seed each")
        begin = time.perf_counter()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        most = self.model.max_model_len
        if len(ids) >= most:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the model was compiled for {most} with its answer: "
                f"shorten it, or compile with a larger --max-model-len"
            )
        has_text = self.artifact.has("tokenizer.json")
        if params.stop and not has_text:
            raise RequestError("stop strings need a tokenizer, which the artifact has not: use stop_token_ids")
        text = Detokenizer(self.tokenizer, params.skip_special_tokens) if has_text else NoText()
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little") >> 1
        request = Request(
            f"r{next(self._numbers)}", tuple(ids), params, seed, priority=terms.priority, deadline=deadline,
            cache_salt=terms.session.salt, session=terms.session.name,
        )  # fmt: skip
        return Call(request, TextStream(params, text), begin=begin)


class _Batch:
    """Calls that are asked together: which of them run, and whether one has failed, after which none is waited for."""

    def __init__(self, calls: list[Call]) -> None:
        self._running, self._failed = set(calls), False
        for call in calls:
            call.streamed, call.notify = False, functools.partial(self._ended, call)

    def _ended(self, call: Call) -> None:
        self._running.discard(call)
        if call.error is not None and not isinstance(call.error, DeadlineExceeded):  # all have the same deadline
            self._failed = True

    def settled(self) -> bool:
        return self._failed or not self._running


def _completions(calls: list[Call]) -> list[Completion]:
    """The answers. Raises the first error, and DeadlineExceeded with all answers where some are not whole."""
    errors = [c.error for c in calls if c.error is not None]
    for error in errors:
        if not isinstance(error, DeadlineExceeded):
            raise error
    completions = [c.completion() for c in calls]
    if errors:
        late = errors[0]
        assert isinstance(late, DeadlineExceeded)
        late.completions = tuple(completions)
        raise late
    return completions

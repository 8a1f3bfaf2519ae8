"""OpenAI's requests and responses, as far as aotc serves them, with vLLM's extra sampling fields."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from aotc.errors import RequestError
from aotc.runtime.chat_template import ARGUMENTS
from aotc.runtime.sampling import MAX_LOGPROBS, SamplingParams

MAX_BODY = 8 << 20  # bytes
MAX_N = 16
MAX_PROMPTS = 64  # of one completion request
MAX_SALT = 256


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Common(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share; those from `functions` on are refused where they would change the answer.

    What is not listed is ignored (`user`, `metadata`): it changes nothing.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int | None = None
    cache_salt: str | None = None

    response_format: dict[str, Any] | None = None
    best_of: int | None = None
    echo: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(_Common, kw_only=True):
    """POST /v1/completions. The prompt is a text or token ids, or a list of texts or of lists of ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(_Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "best_of": (1,), "echo": (), "use_beam_search": (),
    "prompt_logprobs": (), "bad_words": (), "allowed_token_ids": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "suffix": (), "tools": (),
    "tool_choice": ("none", "auto"), "functions": (), "function_call": ("none", "auto"), "modalities": (["text"],),
    "audio": (), "chat_template": (), "continue_final_message": (),
}  # fmt: skip
"""Fields that are not supported, and their values, besides those that Python calls false, that ask for nothing."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class BadRequest(RequestError):
    """A request that is refused with its own status; `param` names the field."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


def decode(body: bytes, kind: type) -> Any:
    """The request in a body. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise BadRequest(f"the body is not a valid request: {error}") from None


def prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one text, one list of ids, or a list of texts or of lists. Raises BadRequest."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [p for p in prompt if isinstance(p, int)]
    if prompt and len(ids) == len(prompt):
        return [ids]
    if ids or not 1 <= len(prompt) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must be a text, token ids, or 1 to {MAX_PROMPTS} of either", param="prompt")
    return [p for p in prompt if not isinstance(p, int)]


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """What the request sets in the chat template besides messages. Raises BadRequest."""
    arguments = request.chat_template_kwargs or {}
    unknown = sorted(arguments.keys() - set(ARGUMENTS))
    if unknown:
        message = f"chat_template_kwargs may hold {', '.join(ARGUMENTS)}, not {unknown[0][:40]!r}"
        raise BadRequest(message, param="chat_template_kwargs")
    return {"add_generation_prompt": request.add_generation_prompt, **arguments}


def sampling_params(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, Any], max_tokens: int, vocab_size: int
) -> SamplingParams:
    """The settings of a request: its own, then the model's generation config, then OpenAI's. Raises BadRequest.

    `max_tokens` is the default of the chat endpoint: what the context has room for.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value and value not in neutral:
            raise BadRequest(f"{name} is not supported: leave it out", param=name)
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    fields |= {k: defaults[k] for k in _DEFAULTED if defaults.get(k) is not None}
    fields |= {k: getattr(request, k) for k in _COPIED if getattr(request, k) is not None}
    if fields.get("n", 1) > MAX_N:
        raise BadRequest(f"n must be at most {MAX_N}, got {fields['n']}", param="n")
    if -(2**63) <= fields.get("seed", 0) < 0:  # OpenAI's seeds have a sign
        fields["seed"] += 2**64
    try:
        fields["logit_bias"] = {int(k): v for k, v in (request.logit_bias or {}).items()}
    except ValueError:
        raise BadRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
    if isinstance(request, ChatRequest):
        limit, fields["logprobs"] = _chat_fields(request)
    else:
        limit, fields["logprobs"] = 16 if request.max_tokens is None else request.max_tokens, request.logprobs
    fields["max_tokens"] = max_tokens if limit is None else limit
    try:
        params = SamplingParams(**fields)
        params.check_vocab(vocab_size)
        return params
    except RequestError as error:
        raise BadRequest(str(error), param=_named(str(error))) from None


_DEFAULTED = ("temperature", "top_p", "top_k", "repetition_penalty")
_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "stop", "stop_token_ids", "n", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


def _chat_fields(request: ChatRequest) -> tuple[int | None, int | None]:
    """max_tokens and logprobs of SamplingParams under the names that the chat endpoint has for them."""
    asked, wanted = request.top_logprobs, bool(request.logprobs)
    if asked is not None and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
        raise BadRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {asked}", param="top_logprobs")
    if request.max_completion_tokens is not None:
        if request.max_completion_tokens < 1:
            raise BadRequest("max_completion_tokens must be at least 1", param="max_completion_tokens")
        return request.max_completion_tokens, asked or 0 if wanted else None
    return request.max_tokens, asked or 0 if wanted else None


def _named(message: str) -> str | None:
    """The field that an error of SamplingParams is about: its messages begin with what must be so."""
    subject = message.partition(" must ")[0].split()
    return next((word for word in subject if word in SamplingParams.__slots__), None)


def turn(request: CompletionRequest | ChatRequest) -> tuple[int, str]:
    """A request's priority (lower goes first) and the salt of the prefixes that it shares. Raises BadRequest."""
    priority, salt = request.priority or 0, request.cache_salt
    if not -(2**31) <= priority < 2**31:
        raise BadRequest("priority must be an integer of 32 bits", param="priority")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT:
        raise BadRequest(f"cache_salt must be a string of 1 to {MAX_SALT} characters", param="cache_salt")
    return priority, salt or ""


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def envelope(chat: bool, stream: bool, request_id: str, model: str) -> dict[str, Any]:
    """What every response and chunk begins with."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    prefix = "chatcmpl" if chat else "cmpl"
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}

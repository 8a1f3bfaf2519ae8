"""A conversation as the text that the model was trained on, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aotc.errors import RequestError

if TYPE_CHECKING:
    from aotc.runtime.template_sandbox import Budget, TemplateEnvironment

MAX_TEMPLATE = 1 << 16  # characters of source; the longest in use have a third of that
ARGUMENTS = ("add_generation_prompt", "tools", "documents", "enable_thinking")
"""What a request may set besides its messages. Anything else would reach into the template."""

_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_MAX_ROLE = 64


class ChatTemplate:
    """A chat template of a model.

    `source` is Jinja as transformers runs it (its `tojson`, `raise_exception`, `strftime_now`, `{% generation %}`).
    `bos_token` and `eos_token` are the texts that the template may name. A render writes at most `max_chars`
    characters and ends within `max_seconds`; how is told in template_sandbox.py. Jinja is imported and the template
    compiled on the first render, so a bad template fails there, with `RequestError`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_chars: int = 4_000_000,
        max_seconds: float = 1.0,
    ) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_chars = max_chars
        self._max_seconds = max_seconds

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any
    ) -> str:
        """The prompt: encode it with `add_special_tokens=False`.

        `messages`: each has a `role` and a `content`, which is text, a list of text parts (joined by line breaks,
        as templates expect text) or, with `tool_calls`, None. `arguments`: `ARGUMENTS`. Raises `RequestError` for
        messages and arguments that are not so, for what the template itself refuses, and where it does not end.
        """
        unknown = sorted(arguments.keys() - set(ARGUMENTS))
        if unknown:
            raise RequestError(f"chat template argument {unknown[0]!r} is unknown: use {', '.join(ARGUMENTS)}")
        for name, value in {"add_generation_prompt": add_generation_prompt, **arguments}.items():
            _check_argument(name, value)
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._tokens, **arguments}
        if variables.get("enable_thinking", True) is None:
            del variables["enable_thinking"]  # templates ask whether it is defined
        variables["add_generation_prompt"] = add_generation_prompt
        variables["messages"] = [_message(i, message) for i, message in enumerate(_messages(messages))]
        return self._render(variables)

    def _render(self, variables: dict[str, Any]) -> str:
        from aotc.runtime.template_sandbox import Budget

        try:
            environment, template = self._compiled
            budget = Budget(self._max_chars, self._max_seconds)
            for name, value in variables.items():
                _check_plain(name, value, budget)
            return environment.render(template, variables, budget)
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything: TypeError, RecursionError, MemoryError
            detail = " ".join(str(error).split())[:300]
            raise RequestError(f"chat template: {detail or type(error).__name__}") from None

    @cached_property
    def _compiled(self) -> tuple[TemplateEnvironment, Any]:
        from aotc.runtime.template_sandbox import TemplateEnvironment

        if len(self._source) > MAX_TEMPLATE:
            raise RequestError(f"chat template: has over {MAX_TEMPLATE} characters")
        environment = TemplateEnvironment()
        return environment, environment.compile_template(self._source)


def _check_argument(name: str, value: Any) -> None:
    if name in ("tools", "documents"):
        if value is not None and not (isinstance(value, list) and all(isinstance(v, dict) for v in value)):
            raise RequestError(f"{name} must be a list of objects, got {type(value).__name__}")
    elif not isinstance(value, bool) and not (name == "enable_thinking" and value is None):
        raise RequestError(f"{name} must be true or false, got {type(value).__name__}")


def _check_plain(name: str, value: Any, budget: Budget) -> None:
    try:
        budget.check_plain(value)
    except RequestError as error:
        raise RequestError(f"{name}: {str(error).removeprefix('chat template: ')}") from None


def _messages(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of one message or more")
    return messages


def _message(index: int, message: Any) -> dict[str, Any]:
    """A message as templates expect it. Keys without a value are left out: clients echo them."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}")
    unknown = [key for key, value in message.items() if key not in _MESSAGE_KEYS and value not in (None, [])]
    if unknown:
        raise RequestError(f"{where} has the unknown key {str(unknown[0])[:40]!r}")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= _MAX_ROLE:
        raise RequestError(f"{where}.role must be a string of 1 to {_MAX_ROLE} characters")
    result: dict[str, Any] = {"role": role, "content": _content(f"{where}.content", message)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise RequestError(f"{where}.{key} must be a string")
            result[key] = message[key]
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    return result


def _content(where: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise RequestError(f"{where} must be a string or a list of text parts")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: every part must be {{'type': 'text', 'text': ...}}")
    return "\n".join(part["text"] for part in parts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """OpenAI's API has the arguments as JSON text, templates as a mapping."""
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} must be a list")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}: every call must have a function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{where}: the arguments of {function['name'][:40]!r} must be a JSON object")
        parsed.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return parsed

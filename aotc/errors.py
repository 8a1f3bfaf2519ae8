"""Errors that a user can act on. Every message is one line that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class AotcError(Exception):
    """Base of all errors meant for users; the CLI prints it as one line and exits with `exit_code`."""

    exit_code = 2


class SourceError(AotcError):
    """A model source (GGUF, safetensors, ONNX, config) is missing, truncated or malformed."""


class UnsupportedError(AotcError):
    """The input is well formed, but holds something that aotc does not compile."""


class ArtifactError(AotcError):
    """An artifact cannot be written, or is refused on load: checksum, size, version or architecture."""


class RequestError(AotcError):
    """A call or request does not fit the model: wrong shape, dtype or range, or a prompt that is too long."""


class OverloadedError(RequestError):
    """Too much is waiting already: nothing is wrong with the request, which may come again in `retry_after` seconds."""

    status = 429  # of HTTP

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(AotcError):
    """A call was not done when its time was over. A tensor model did not begin it.

    Of a language model's answer, `text` and `token_ids` are what there was of it. Of a list of prompts, `completions` has
    all answers, those that were cut short with `finish_reason` deadline, and `text` and `token_ids` are the first of these.
    """

    def __init__(
        self, message: str, text: str = "", token_ids: Iterable[int] = (), completions: Iterable[Any] = ()
    ) -> None:
        super().__init__(message)
        self.text, self.token_ids, self.completions = text, tuple(token_ids), tuple(completions)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.text, self.token_ids, self.completions)


class DeviceError(AotcError):
    """The device is missing, unsuitable or failed."""


class DeviceLostError(DeviceError):
    """The device failed while it ran a model: what it computed is dropped, and only a new process can use it again."""

    exit_code = 70  # EX_SOFTWARE of sysexits.h; `aotc run` and the engine process of `aotc serve` end with it


class CompilerError(AotcError):
    """A kernel failed to build, or no compiler was found."""

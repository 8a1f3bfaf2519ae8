"""Errors that a user can act on. Every message is one line that says what is wrong and what to do."""


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


class DeviceError(AotcError):
    """The device is missing, unsuitable or failed."""


class DeviceLostError(DeviceError):
    """The device failed while it ran a model: what it computed is dropped, and only a new process can use it again."""

    exit_code = 70  # EX_SOFTWARE of sysexits.h; `aotc run` and the engine process of `aotc serve` end with it


class CompilerError(AotcError):
    """A kernel failed to build, or no compiler was found."""


class DeadlineExceeded(AotcError):
    """A request was dropped, not computed: its deadline passed while others ran."""

"""aotc compiles models ahead of time and runs the artifacts without torch.

`import aotc` itself imports nothing else; the names below are loaded on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotc.build import compile
    from aotc.errors import (
        AotcError,
        ArtifactError,
        CompilerError,
        DeadlineExceeded,
        DeviceError,
        DeviceLostError,
        OverloadedError,
        RequestError,
        SourceError,
        UnsupportedError,
    )
    from aotc.runtime.api import load

__version__ = "0.1.0"

__all__ = [
    "AotcError",
    "ArtifactError",
    "CompilerError",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceLostError",
    "OverloadedError",
    "RequestError",
    "SourceError",
    "UnsupportedError",
    "__version__",
    "compile",
    "load",
]
_HOMES = {"load": "aotc.runtime.api", "compile": "aotc.build"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aotc' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "aotc.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

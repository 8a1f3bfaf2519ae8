"""Every environment variable that aotc reads, typed, in one place. Read at each call."""

import os
from pathlib import Path

from aotc.errors import AotcError

LOG_LEVELS = ("debug", "info", "warning", "error")


def cache_dir() -> Path:
    """AOTC_CACHE: where built kernels and fetched models are kept; `~/.cache/aotc` by default."""
    value = os.environ.get("AOTC_CACHE")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "aotc"


def dump_dir() -> Path | None:
    """AOTC_DUMP: folder that receives `NN_pass.ir` and every later stage; unset means no dumps."""
    value = os.environ.get("AOTC_DUMP")
    return Path(value).expanduser() if value else None


def num_threads() -> int | None:
    """AOTC_NUM_THREADS: CPU threads to use; unset means what affinity and cgroup limits give.

    Raises AotcError when it is not a positive integer.
    """
    value = os.environ.get("AOTC_NUM_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise AotcError(f"AOTC_NUM_THREADS is {value!r}; set it to a positive integer or unset it")
    return int(value)


def cxx() -> str | None:
    """AOTC_CXX: the C++ compiler that builds CPU kernels, a name or path; unset means search for one."""
    return os.environ.get("AOTC_CXX") or None


def log_level() -> str | None:
    """AOTC_LOG: one of LOG_LEVELS; unset means that the caller's default holds.

    Raises AotcError for any other value.
    """
    value = os.environ.get("AOTC_LOG", "").lower()
    if not value:
        return None
    if value not in LOG_LEVELS:
        raise AotcError(f"AOTC_LOG is {value!r}; set it to one of {', '.join(LOG_LEVELS)}")
    return value


def api_key() -> str | None:
    """AOTC_API_KEY: the key that clients of `aotc serve` must send; unset means that none is asked for."""
    return os.environ.get("AOTC_API_KEY") or None


def sync() -> bool:
    """AOTC_SYNC: 1 makes a GPU run kernel by kernel, so that an error names the kernel; slow. Unset or 0: off.

    Raises AotcError for any other value.
    """
    return _switch("AOTC_SYNC")


def ptx() -> bool:
    """AOTC_PTX: 1 makes `aotc compile` store kernels for GPUs as PTX, which the driver translates at load: slow to load,
    and later GPUs take it too (see AOTC_TARGET), but for architectures from sm90 on. Unset or 0: off.

    Raises AotcError for any other value.
    """
    return _switch("AOTC_PTX")


def target() -> str | None:
    """AOTC_TARGET: the target of an artifact, such as sm80, that runs on whatever GPU there is; unset means the one that
    was compiled for it."""
    return os.environ.get("AOTC_TARGET") or None


def _switch(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise AotcError(f"{name} is {value!r}; set it to 0 or 1")
    return value == "1"

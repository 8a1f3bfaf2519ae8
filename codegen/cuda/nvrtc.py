"""Compiles CUDA C++ to cubins with NVRTC: no GPU, no toolkit, no headers.

NVRTC 12 on purpose: its cubins load on every driver since CUDA 12.0 that knows the architecture. API:
https://docs.nvidia.com/cuda/nvrtc/.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from aotc.errors import CompilerError

PACKAGE = "nvidia-cuda-nvrtc-cu12"


@cache
def version() -> str:
    """The version of NVRTC. Raises CompilerError where there is none."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise CompilerError("compiling for CUDA needs NVRTC: install aotc[compile]") from None


@cache
def _library() -> ctypes.CDLL:
    version()
    files = metadata.files(PACKAGE) or []
    path = next((f for f in files if Path(f).name.startswith("libnvrtc.so")), None)
    if path is None:
        raise CompilerError(f"{PACKAGE} has no library: install it again")
    return ctypes.CDLL(str(path.locate()))


def compile_cuda(symbol: str, text: str, arch: str, ptx: bool = False) -> bytes:
    """The cubin of a source for an architecture, `sm90` for example (from there on for that one alone: sm_90a), or its
    PTX with a zero at the end.

    Raises CompilerError with the first error. Threads may call this at once.
    """
    number, kind = int(arch[2:]), "compute" if ptx else "sm"
    program = ctypes.c_void_p()
    _check(_library().nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{symbol}.cu".encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={kind}_{number}{'a' * (number >= 90)}", "--std=c++17", "--prec-div=false"]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if _library().nvrtcCompileProgram(program, len(options), array):
            log = _read(program, "ProgramLog").decode().rstrip("\0")
            line = next((t for t in log.splitlines() if "error" in t), log[:300])
            raise CompilerError(f"NVRTC refuses kernel {symbol} for {arch}: {line}")
        return _read(program, "PTX" if ptx else "CUBIN")
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: Any, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, data))
    return data.raw


def _check(code: int) -> None:
    if code:
        raise CompilerError(f"NVRTC failed with error {code}")

"""Builds a target's kernels into one shared library with the machine's C++ compiler.

Objects are cached by content: the same source, flags and compiler give the same object.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from aotc import knobs
from aotc.errors import CompilerError

LIB = Path(__file__).parent / "lib"
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fopenmp-simd", "-fno-asynchronous-unwind-tables", "-fvisibility=default",
    "-Wno-ignored-attributes", "-ffile-prefix-map=/=", "-frandom-seed=aotc",
)  # fmt: skip
LINK = ("-shared", "-static-libgcc", "-static-libstdc++", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-s")
LEVELS = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16", "-mavx512vnni"),
    "x86-64-v4-amx": (
        "-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16",
    ),
}  # fmt: skip


@cache
def compiler() -> str:
    """The C++ compiler's path. Raises CompilerError naming the package to install."""
    named = knobs.cxx()
    for name in [named] if named else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            return path
    wanted = f"{named} (from AOTC_CXX)" if named else "no C++ compiler (g++ or clang++)"
    raise CompilerError(f"{wanted} was not found: install one, for example `apt-get install g++`")


def build_library(units: dict[str, str], level: str, progress: Callable[[str], None] = lambda _: None) -> bytes:
    """Compiles each unit (name -> C++ source) for a level and links them. Returns the library's bytes.

    Raises CompilerError with the compiler's first message.
    """
    with tempfile.TemporaryDirectory(prefix="aotc-") as folder:
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            jobs = [pool.submit(_compile, name, text, level, Path(folder)) for name, text in sorted(units.items())]
            objects = []
            for job, name in zip(jobs, sorted(units), strict=True):
                objects.append(job.result())
                progress(name)
        finally:
            pool.shutdown(cancel_futures=True)  # an error or an interrupt waits for what runs, not for the queue
        library = Path(folder) / "kernels.so"
        run_tool([compiler(), *LINK, "-o", str(library), *map(str, objects), "-lm", "-lpthread"], "linking")
        return library.read_bytes()


def _compile(name: str, text: str, level: str, folder: Path) -> Path:
    target = folder / f"{name}.o"
    key = _key(text, level)
    cached = knobs.cache_dir() / "objects" / f"{key}.o"
    if cached.is_file():
        shutil.copyfile(cached, target)
        return target
    source = folder / f"{name}.cpp"
    source.write_text(text)
    # Relative names, so that no path of this machine ends in the object.
    command = [compiler(), *FLAGS, *LEVELS[level], f"-I{LIB}", "-c", source.name, "-o", target.name]
    run_tool(command, name, folder)
    _publish(target, cached)
    return target


def _publish(made: Path, cached: Path) -> None:
    """A cache that cannot be written costs time, not correctness."""
    file = None
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            file.write(made.read_bytes())
        os.replace(file.name, cached)
    except OSError:
        if file is not None:
            Path(file.name).unlink(missing_ok=True)


def _key(text: str, level: str) -> str:
    digest = hashlib.sha256()
    for part in (text, *FLAGS, *LEVELS[level], _version(), _headers()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


@cache
def _version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout


@cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted(LIB.glob("*.h")))


def run_tool(command: Sequence[str], what: str, folder: Path | None = None) -> None:
    """Runs a compiler or linker. Raises CompilerError with its first error."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
        raise CompilerError(f"{Path(command[0]).name} failed on {what}: {first}")

"""Compiles sources in Triton and CUDA C++ to cubins. All of Triton stands behind this file, and no GPU is needed.

Triton runs in processes of its own, started as `python -m aotc.codegen.cuda.build`, with none of the caller's TRITON_
variables: the same source gives the same bytes. Cubins are cached by content.

Seen in Triton 3.6: a kernel's parameters are its arguments, then two pointers (global and profile scratch); from
sm90 on, code is for one architecture alone (`sm_90a`); ptxas accepts kernels that ask for more shared memory than
the device has, so `aotc.codegen.cuda.limits` is checked here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from aotc import knobs
from aotc.codegen.cuda import nvrtc
from aotc.codegen.cuda.cubin import kernel_usage
from aotc.codegen.cuda.frame import Source
from aotc.codegen.cuda.limits import check
from aotc.errors import CompilerError

OPTIONS = {"enable_fp_fusion": True, "num_ctas": 1}
_KERNELS_A_PROCESS = 4  # starting one takes as long as compiling a few kernels


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel and what a launch of it must know. Bytes; `registers` and `spill_bytes` of a thread. With
    AOTC_PTX, `data` is PTX for any GPU from the architecture on; the numbers are still those of its cubin."""

    name: str
    data: bytes
    shared: int
    num_warps: int
    num_ctas: int
    global_scratch_bytes: int
    profile_scratch_bytes: int
    registers: int
    spill_bytes: int


def compile_sources(
    sources: Iterable[Source], arch: str, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Cubin]:
    """Cubins by symbol, for one architecture of `aotc.codegen.cuda.limits`.

    Raises CompilerError where Triton refuses a source, or where a kernel does not fit the architecture.
    """
    unique = {s.symbol: s for s in sources}
    cubins: dict[str, Cubin] = {}
    missing: list[Source] = []
    for symbol, source in sorted(unique.items()):
        cached = _read(_path(source, arch))
        if cached is None:
            missing.append(source)
        else:
            cubins[symbol] = cached
            progress(symbol)
    for source, cubin in _compile(missing, arch):
        _publish(cubin, _path(source, arch))
        cubins[source.symbol] = cubin
        progress(source.symbol)
    for symbol, cubin in cubins.items():
        check(symbol, arch, cubin.shared, cubin.registers, cubin.spill_bytes, cubin.num_warps)
    return dict(sorted(cubins.items()))


def _compile(sources: list[Source], arch: str) -> Iterable[tuple[Source, Cubin]]:
    """Compiles in as many threads, or processes of Triton, as there are CPUs and as the number of kernels is worth."""
    cpp, sources = ([s for s in sources if s.language == name] for name in ("cuda", "triton"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from zip(cpp, pool.map(lambda s: _compile_cpp(s, arch), cpp), strict=True)
    if not sources:
        return
    count = min(len(os.sched_getaffinity(0)), -(-len(sources) // _KERNELS_A_PROCESS))
    idle: SimpleQueue[_Process] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="aotc-") as folder:
        processes = [_Process(Path(folder) / str(i)) for i in range(count)]
        for process in processes:
            idle.put(process)

        def job(source: Source) -> Cubin:
            process = idle.get()
            try:
                return process.compile(source, arch)
            finally:
                idle.put(process)

        try:
            with ThreadPoolExecutor(count) as pool:
                yield from zip(sources, pool.map(job, sources), strict=True)
        finally:
            for process in processes:
                process.close()


def _compile_cpp(source: Source, arch: str) -> Cubin:
    data = nvrtc.compile_cuda(source.symbol, source.text, arch)
    registers, spill_bytes = kernel_usage(data)
    if knobs.ptx():
        data = nvrtc.compile_cuda(source.symbol, source.text, arch, ptx=True)
    return Cubin(source.symbol, data, source.shared_bytes, source.num_warps, 1, 0, 0, registers, spill_bytes)


class _Process:
    """A Triton process: takes requests and gives answers, a line of JSON each."""

    def __init__(self, triton_cache: Path) -> None:
        _triton_version()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        # No line information: it would bring paths of this machine into the cubin.
        clean |= {"TRITON_CACHE_DIR": str(triton_cache), "TRITON_DISABLE_LINE_INFO": "1"}
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aotc.codegen.cuda.build"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean
        )

    def compile(self, source: Source, arch: str) -> Cubin:
        request = {
            "symbol": source.symbol, "text": source.text, "signature": source.signature, "num_warps": source.num_warps,
            "num_stages": source.num_stages, "capability": int(arch[2:]),
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise CompilerError(f"Triton crashed on kernel {source.symbol} for {arch}") from None
        if "error" in answer:
            raise CompilerError(f"Triton refuses kernel {source.symbol} for {arch}: {answer['error']}")
        data, ptx = base64.b64decode(answer.pop("cubin")), answer.pop("ptx").encode() + b"\0"
        registers, spill_bytes = kernel_usage(data)
        data = ptx if knobs.ptx() else data
        return Cubin(data=data, registers=registers, spill_bytes=spill_bytes, **answer)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise CompilerError("compiling for CUDA needs Triton: install aotc[compile]") from None


def _path(source: Source, arch: str) -> Path:
    digest = hashlib.sha256()
    version = _triton_version() if source.language == "triton" else nvrtc.version()
    about = (source.signature, source.num_warps, source.num_stages, arch, OPTIONS, version, knobs.ptx())
    for part in (source.text, *about):
        digest.update(repr(part).encode() + b"\0")
    return knobs.cache_dir() / "cubins" / digest.hexdigest()


def _read(path: Path) -> Cubin | None:
    """A cached cubin: a line of JSON, then the bytes. None where there is none, or a damaged one."""
    try:
        head, data = path.read_bytes().split(b"\n", 1)
        fields = json.loads(head)
        return Cubin(data=data, **fields) if fields.pop("sha256") == hashlib.sha256(data).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _publish(cubin: Cubin, path: Path) -> None:
    """A cache that cannot be written costs time, not correctness."""
    fields = {k: v for k, v in asdict(cubin).items() if k != "data"} | {
        "sha256": hashlib.sha256(cubin.data).hexdigest()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps(fields).encode() + b"\n" + cubin.data)
        os.replace(file.name, path)
    except OSError:
        pass


def _serve() -> None:
    """The other process: compiles each request of stdin. Triton prints to stdout: answers go to a copy of it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        try:
            answer = _compile_here(json.loads(line))
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            answer = {"error": text.splitlines()[-1]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _compile_here(request: dict[str, Any]) -> dict[str, Any]:
    import linecache

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Triton reads a function's source through linecache: a made-up file name keeps it out of the file system.
    symbol, text = request["symbol"], request["text"]
    file = f"<{symbol}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module: dict[str, Any] = {"__name__": "aotc_kernels"}
    exec(compile(text, file, "exec"), module)
    function = module[symbol]
    signature = dict(zip(function.arg_names, request["signature"], strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(request["signature"]) if kind.startswith("*")}
    options = OPTIONS | {"num_warps": request["num_warps"], "num_stages": request["num_stages"]}
    target = GPUTarget("cuda", request["capability"], 32)
    kernel = triton.compile(ASTSource(function, signature, {}, aligned), target=target, options=options)
    about = kernel.metadata
    return {
        "name": about.name, "shared": about.shared, "num_warps": about.num_warps, "num_ctas": about.num_ctas,
        "global_scratch_bytes": about.global_scratch_size, "profile_scratch_bytes": about.profile_scratch_size,
        "cubin": base64.b64encode(kernel.asm["cubin"]).decode(), "ptx": kernel.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    _serve()

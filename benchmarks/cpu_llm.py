"""A chat model on this CPU, side by side in one run: aotc, llama.cpp, transformers eager and torch.compile.

    python -m benchmarks.cpu_llm [--threads 2] [--json FILE]

Each peer runs in a process of its own, in turn, several rounds; medians are printed beside the machine's limits
(read bandwidth of all threads; bytes of weights a token). A peer that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fetch_model import fetch

PROMPT, DECODE = 512, 64
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    options = _arguments()
    if options.peer:
        print(json.dumps(PEERS[options.peer](options.file, options.threads)))
        return 0
    gguf = fetch()
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        _run([sys.executable, "-m", "aotc", "compile", str(gguf), "--arch", "cpu", "--max-model-len", "1024", "-o",
              str(artifact), "--quiet"])  # fmt: skip
        limits = cpu_limits(options.threads)
        files = {"aotc bf16": str(artifact), **llama_cpp_files(gguf, Path(folder))}
        files |= {"transformers bf16": str(gguf), "torch.compile bf16": str(gguf)}
        results: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for name, file in files.items():
                found = _peer(name.split()[0], file, options.threads)
                if found is not None:
                    results.setdefault(name, []).append(found)
    _report(results, limits, options)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args()


def _peer(name: str, file: str, threads: int) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.cpu_llm", "--peer", name, "--file", file, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment(threads))
    if done.returncode:
        print(f"{name}: left out ({(done.stderr.strip().splitlines() or ['no message'])[-1]})", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "AOTC_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def _ids() -> list[int]:
    return np.random.default_rng(0).integers(1000, 40000, PROMPT).tolist()


def run_aotc(artifact: str, threads: int) -> dict[str, Any]:
    from aotc.artifact.reader import open_artifact
    from aotc.runtime.executor import CpuExecutor
    from aotc.runtime.sampling import SamplingParams
    from aotc.runtime.sequence import Request, Row, Sequence

    executor, ids = CpuExecutor(open_artifact(artifact), 1), _ids()
    prefill, decode = [], []
    for _ in range(5):
        sequence = Sequence(Request("x", tuple(ids), SamplingParams(temperature=0)), 0, list(ids))
        executor.start(sequence)
        begin = time.perf_counter()
        executor.step([Row(sequence, 0, PROMPT, True)])
        prefill.append(time.perf_counter() - begin)
        for n in range(DECODE):
            sequence.tokens.append(1000 + n)
            begin = time.perf_counter()
            executor.step([Row(sequence, PROMPT + n, 1, True)])
            decode.append(time.perf_counter() - begin)
    return {"prefill_ms": median(prefill) * 1e3, "decode_ms": median(decode) * 1e3, "weights": executor.weights.nbytes}


def run_llama_cpp(gguf: str, threads: int) -> dict[str, Any]:
    from llama_cpp import Llama

    model = Llama(
        gguf, n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=PROMPT, n_ubatch=PROMPT, verbose=False
    )
    prefill, decode = [], []
    for _ in range(3):
        model.reset()
        begin = time.perf_counter()
        model.eval(_ids())
        prefill.append(time.perf_counter() - begin)
        for n in range(DECODE):
            begin = time.perf_counter()
            model.eval([1000 + n])
            decode.append(time.perf_counter() - begin)
    return {"prefill_ms": median(prefill) * 1e3, "decode_ms": median(decode) * 1e3, "weights": os.path.getsize(gguf)}


def _transformers(gguf: str, threads: int, compiled: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, StaticCache

    torch.set_num_threads(threads)
    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.bfloat16).eval()
    forward = torch.compile(model) if compiled else model
    prefill, decode = [], []
    with torch.inference_mode():
        for _ in range(3):
            cache = StaticCache(config=model.config, max_cache_len=1024) if compiled else None
            begin = time.perf_counter()
            out = forward(torch.tensor([_ids()]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            prefill.append(time.perf_counter() - begin)
            for n in range(DECODE):
                begin = time.perf_counter()
                out = forward(torch.tensor([[1000 + n]]), past_key_values=out.past_key_values, use_cache=True)
                decode.append(time.perf_counter() - begin)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"prefill_ms": median(prefill) * 1e3, "decode_ms": median(decode) * 1e3, "weights": size}


PEERS = {
    "aotc": run_aotc,
    "llama.cpp": run_llama_cpp,
    "transformers": lambda file, threads: _transformers(file, threads, False),
    "torch.compile": lambda file, threads: _transformers(file, threads, True),
}


def llama_cpp_files(gguf: Path, folder: Path) -> dict[str, str]:
    """The model in the forms that llama.cpp is fast with, made by llama.cpp from the one at hand (Q4_1)."""
    files = {"llama.cpp Q4_1": str(gguf)}
    try:
        import llama_cpp
    except ImportError:
        return files
    for name, kind in (("Q4_0", 2), ("Q8_0", 7), ("bf16", 32)):  # llama_ftype
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = kind, True, 2
        path = folder / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(path).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp does not make {name} of {gguf}")
        files[f"llama.cpp {name}"] = str(path)
    return files


def cpu_limits(threads: int) -> dict[str, float]:
    """What all threads together reach, in C: `read_gb_s`, `bf16_gflop_s` and `vnni_gop_s` of AVX-512."""
    source = Path(__file__).with_name("cpu_limits.c")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        _run(["cc", "-O3", "-march=native", str(source), "-o", str(program), "-lpthread"])
        return json.loads(subprocess.run([str(program), str(threads)], capture_output=True, check=True).stdout)


def _report(results: dict[str, list[dict[str, Any]]], limits: dict[str, float], options: argparse.Namespace) -> None:
    bandwidth = limits["read_gb_s"]
    print(
        f"{options.threads} threads read {bandwidth:.1f} GB/s and multiply {limits['bf16_gflop_s']:.0f} GFLOP/s in bf16 "
        f"and {limits['vnni_gop_s']:.0f} GOP/s in 8 bits (AVX-512)"
    )
    print(f"prompt of {PROMPT} tokens; medians of {options.rounds} rounds")
    print(f"{'':<20}{'prefill ms':>12}{'decode ms':>12}{'weights MB':>12}{'of the read limit':>20}")
    rows = []
    for name, runs in results.items():
        row = {k: median(r[k] for r in runs) for k in runs[0]}
        limit = row["weights"] / bandwidth / 1e6
        print(f"{name:<20}{row['prefill_ms']:>12.1f}{row['decode_ms']:>12.2f}{row['weights'] / 1e6:>12.0f}"
              f"{limit / row['decode_ms']:>19.0%}")  # fmt: skip
        rows.append({"peer": name, **limits, "threads": options.threads, **row})
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())

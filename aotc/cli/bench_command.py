"""Measure: `bench startup DIR` from process start to first token, in parts; `bench latency DIR` prefill and decode
steps; `bench serve URL|DIR` a server under load."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aotc.cli import bench_serve
from aotc.cli.options import add_device

DECODED = 64  # tokens after the prompt of a latency measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    def add(name: str, text: str, about: str | None) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=text, description=about, formatter_class=parser.formatter_class)

    for name, text in (
        ("startup", "from process start to the first token, in parts"),
        ("latency", "prefill and decode"),
    ):
        sub = add(name, text, f"Measure {text}; results are JSON lines.")
        sub.add_argument("artifact", metavar="DIR", help="an artifact of a language model")
        sub.add_argument("--json", metavar="FILE", dest="file", help="append the results to a file of JSON lines")
        sub.add_argument("--repeat", type=int, default=10, metavar="N", help="runs of each measurement")
        sub.add_argument("--prompt-len", type=int, default=512, metavar="N", help="tokens of the prefill")
        add_device(sub)
        sub.add_argument("--profile", action="store_true", help="latency: also print time by kernel of a decode step")
    bench_serve.add_arguments(add("serve", "load on a server: latency and throughput", bench_serve.__doc__))


def run(options: argparse.Namespace) -> int:
    if options.what == "serve":
        return bench_serve.run(options)
    if options.repeat < 1 or options.prompt_len < 1:
        from aotc.errors import RequestError

        raise RequestError("--repeat and --prompt-len are at least 1")
    results = startup(options) if options.what == "startup" else latency(options)
    for result in results:
        line = json.dumps(result)
        print(line)
        if options.file:
            with open(options.file, "a") as file:
                file.write(line + "\n")
    return 0


def startup(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts `--repeat` processes that load, answer one token, and report the time of each part in ms.

    Parts up to `first_token_ms` follow each other. `beside` has what overlaps on a GPU: the `driver` is initialised
    and makes its `context` while modules are imported and the `tokenizer` is read, after a `wait` for the driver to be at
    it; `graphs` are built, and `modules` of kernels loaded for them, while `weights` go up.
    """
    runs = []
    for _ in range(options.repeat):
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-c", _STARTUP, options.artifact, repr(begin), options.device], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        if done.returncode:
            from aotc.errors import DeviceError

            raise DeviceError(f"a run failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        runs.append(json.loads(done.stdout))

    def median(runs: list[dict[str, float]]) -> dict[str, float]:
        return {k: round(sorted(r[k] for r in runs)[len(runs) // 2], 2) for k in runs[0]}

    beside = median([r.pop("beside") for r in runs])
    parts = {**median(runs), **({"beside": beside} if beside else {})}
    return [{"bench": "startup", "artifact": Path(options.artifact).name, "runs": len(runs), **parts}]


_STARTUP = """
import json, sys, time
begin, marks = float(sys.argv[2]), {}
def mark(name):
    marks[name] = (time.time() - begin) * 1e3
mark("process_ms")
from aotc.runtime.devices.opening import begin_opening
opening = begin_opening(sys.argv[1], sys.argv[3])
from aotc.artifact.reader import open_artifact
from aotc.runtime.llm import LLM
mark("imports_ms")
artifact = open_artifact(sys.argv[1]); mark("open_ms")
llm = LLM(artifact, max_num_seqs=1, device=sys.argv[3], opening=opening); mark("load_ms")
prompt = llm.tokenizer.encode("What is gravity?"); mark("tokenizer_ms")
next(iter(llm.stream(prompt, max_tokens=1, temperature=0))); mark("first_token_ms")
parts, last = {}, 0.0
for name, at in marks.items():
    parts[name] = at - last; last = at
beside = {f"{k}_ms": v * 1e3 for k, v in llm.startup.items()} if opening else {}
print(json.dumps({"start_ms": last, **parts, "beside": beside}))
"""


def latency(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times steps of the executor: `prefill_ms` of one prompt, `decode_ms` a token after it, with p50 and p99."""
    import numpy as np

    from aotc.artifact.reader import open_artifact
    from aotc.errors import RequestError
    from aotc.runtime.executor import open_executor
    from aotc.runtime.sampling import SamplingParams
    from aotc.runtime.sequence import Request, Row, Sequence

    executor = open_executor(open_artifact(options.artifact), 1, options.device)
    length = min(options.prompt_len, executor.max_model_len - DECODED - 1)
    if length < 1:
        raise RequestError(f"latency decodes {DECODED} tokens: compile with --max-model-len {DECODED + 2} or more")
    vocab = executor.vocab_size  # no special tokens, which come first or last
    ids = np.random.default_rng(0).integers(min(1000, vocab // 2), min(40000, vocab), length).tolist()
    prefill, decode = [], []
    for _ in range(options.repeat):
        sequence = Sequence(Request("b", tuple(ids), SamplingParams(temperature=0)), 0, list(ids))
        executor.start(sequence)
        begin = time.perf_counter()
        for start in range(0, length, executor.max_num_batched_tokens):
            count = min(executor.max_num_batched_tokens, length - start)
            token = executor.step([Row(sequence, start, count, start + count == length)]).token[0]
        prefill.append(time.perf_counter() - begin)
        for n in range(DECODED):
            sequence.tokens.append(int(token))
            begin = time.perf_counter()
            token = executor.step([Row(sequence, length + n, 1, True)]).token[0]
            decode.append(time.perf_counter() - begin)

    def ms(values: list[float], q: float) -> float:
        return round(float(np.quantile(values, q)) * 1e3, 3)

    if options.profile:
        _profile(executor, ids)
    return [{
        "bench": "latency", "artifact": Path(options.artifact).name, "target": executor.target.name, "prompt": length,
        "prefill_ms": ms(prefill, 0.5), "decode_ms": ms(decode, 0.5), "p50": ms(decode, 0.5), "p99": ms(decode, 0.99),
        "ttft_ms": ms(prefill, 0.5), "memory_bytes": executor.memory.total,
    }]  # fmt: skip


def _profile(executor, ids: list[int]) -> None:
    """Time by kernel of a decode step and of the prefill, to standard error."""
    from aotc.runtime.sampling import SamplingParams
    from aotc.runtime.sequence import Request, Row, Sequence

    sequence = Sequence(Request("p", tuple(ids), SamplingParams(temperature=0)), 0, [*ids, 1])
    for kind, row, size in (
        ("decode", Row(sequence, len(ids), 1, True), 1),
        ("extend", Row(sequence, 0, len(ids), True), len(ids)),
    ):
        executor.step([row])
        times: dict[str, list[float]] = {}
        for name, spent in executor.program(kind, size).kernel_times():
            times.setdefault(name, []).append(spent)
        print(f"{kind}: {sum(map(sum, times.values())):.3f} ms", file=sys.stderr)
        for name, spent in sorted(times.items(), key=lambda t: -sum(t[1])):
            print(f"  {sum(spent) * 1e3:9.1f} us {len(spent):4d} x {name}", file=sys.stderr)

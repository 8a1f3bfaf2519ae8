"""Measures language models on the GPU at hand: right first, then times, beside the card's read limit.

    python -m benchmarks.gpu_llm --model 1b,8b --batch 1,8,32 --json results.jsonl

Shapes have random weights, made at compile time. The reference is transformers' model in fp32 on the same weights.
Times of programs are those of their graphs, between events; `step` is the executor's step with all that the host does for
it, `engine` the engine's, which schedules one step ahead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MODELS = {
    "tiny": LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 4099, "bos_token_id": 1, "eos_token_id": 2,
                     "tie_word_embeddings": True},
    "1b": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                   "tie_word_embeddings": False},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", help=f"comma separated: {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for checks")
    parser.add_argument("--batch", default="1", help="comma separated: sequences of a decode step")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence before it")
    parser.add_argument("--kv-layout", default="static,paged", help="comma separated: layouts of the KV cache")
    parser.add_argument("--arch", default="", help="architecture to compile for (the GPU's own)")
    parser.add_argument("--no-check", action="store_true", help="times only")
    parser.add_argument("--peer", action="store_true", help="torch.compile beside it at batch 1, in a process of its own")
    parser.add_argument("--profile", action="store_true", help="time of each kernel of the decode step")
    parser.add_argument("--keep", type=Path, help="folder to keep the artifacts in, each as NAME/artifact")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for the artifacts, so that they can answer texts")
    parser.add_argument("--json", help="append results to this file")
    options = parser.parse_args()
    limit = read_limit()
    emit(options, {"limit": "read_tb_s", "value": round(limit / 1e12, 3)})
    for name in options.model.split(","):
        measure(name, limit, options)


def emit(options: argparse.Namespace, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.write(text + "\n")


def measure(name: str, limit: float, options: argparse.Namespace) -> None:
    from aotc.artifact.reader import open_artifact
    from aotc.runtime.cuda_executor import CudaExecutor
    from aotc.runtime.devices.cuda import CudaDevice
    from aotc.runtime.executor import CacheOptions

    config = MODELS[name] | ({"num_hidden_layers": options.layers} if options.layers else {})
    batches = [int(b) for b in options.batch.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep / name if options.keep else Path(scratch)
        source, folder = place / "source", place / "artifact"
        source.mkdir(parents=True, exist_ok=True)
        (source / "config.json").write_text(json.dumps(config))
        if options.tokenizer:
            shutil.copy(options.tokenizer, source / "tokenizer.json")
        device = CudaDevice()
        arch = options.arch or "sm{}{}".format(*device.capability)
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "aotc", "compile", str(source), "--weights", "random:7", "--arch", arch, "--quiet",
             "--max-model-len", "4096", "--max-num-seqs", str(max(batches)), "--max-num-batched-tokens", "512",
             "-o", str(folder)], check=True,
        )  # fmt: skip
        compiled = time.perf_counter() - begin
        device.close()
        for layout in options.kv_layout.split(","):
            begin = time.perf_counter()
            executor = CudaExecutor(open_artifact(folder), max(batches), CudaDevice(), CacheOptions(layout))
            executor.finish_warming()
            loaded = time.perf_counter() - begin
            emit(options, {"model": name, "kv": layout, "arch": arch, "compile_s": round(compiled, 1),
                           "load_s": round(loaded, 3), "memory_gb": round(executor.memory.total / 1e9, 3)})  # fmt: skip
            if not options.no_check:
                check(name, source, executor, options)
            for batch in batches:
                decode(name, executor, batch, limit, options)
            prefill(name, executor, options)
            executor.close()
    if options.peer:
        command = [sys.executable, "-m", "benchmarks.torch_llama", name, "--context", str(options.context)]
        emit(options, json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))


def sequences(count: int, length: int, executor: Any) -> list[Any]:
    """Sequences with random prompts, greedy; in a paged cache each has pages for a few tokens more, scattered."""
    from aotc.runtime.kv_cache import BlockTable
    from aotc.runtime.sampling import SamplingParams
    from aotc.runtime.sequence import Request, Sequence

    draw = np.random.default_rng(1)
    found = []
    for slot in range(count):
        ids = draw.integers(0, executor.vocab_size, length).tolist()
        found.append(Sequence(Request(f"s{slot}", tuple(ids), SamplingParams(temperature=0)), slot, list(ids)))
    if executor.page_size:
        each = -(-(length + 100) // executor.page_size)
        pages = draw.permutation(executor.cache.blocks)
        for n, sequence in enumerate(found):
            sequence.pages = BlockTable(each)
            sequence.pages.ids[:], sequence.pages.count = pages[n * each : (n + 1) * each], each
    return found


def fill(executor: Any, sequence: Any, upto: int) -> None:
    """Runs a prompt's first tokens through extend programs."""
    from aotc.runtime.sequence import Row

    executor.start(sequence)
    for start in range(0, upto, executor.max_num_batched_tokens):
        count = min(executor.max_num_batched_tokens, upto - start)
        executor.step([Row(sequence, start, count, start + count == upto)])


def check(name: str, source: Path, executor: Any, options: argparse.Namespace) -> None:
    """Logits of a prompt and of decode steps after it against fp32, at ragged lengths, all sequences in one step; and
    those of transformers' model in bf16, which rounds as often."""
    import copy

    import torch

    from aotc.runtime.sequence import Row

    reference = torch_model(source)
    narrow = copy.deepcopy(reference).to(torch.bfloat16)
    narrow.model.rotary_emb = reference.model.rotary_emb  # its frequencies stay f32 wherever weights are narrow
    count = min(executor.max_num_seqs, 4)
    made = sequences(count, 700, executor)
    lengths = [600, 1, 37, 513][:count]
    worst = {}

    def against(kind: str, logits: np.ndarray, sequence: Any, length: int) -> None:
        with torch.inference_mode():
            ids = torch.tensor([sequence.tokens[:length]], device="cuda")
            expected = reference(ids).logits[0, -1].float().cpu().numpy()
            rounded = narrow(ids).logits[0, -1].float().cpu().numpy()
        for what, found in ((kind, logits), ("torch_bf16", rounded)):
            error = float(np.abs(found - expected).max() / np.abs(expected).max())
            worst[what] = max(worst.get(what, 0.0), error if np.isfinite(error) else 1e9)

    for sequence, length in zip(made, lengths, strict=True):
        fill(executor, sequence, length)
        against("extend", executor.logits(1)[0], sequence, length)
    for step in range(3):
        tokens = executor.step([Row(s, n + step, 1, True) for s, n in zip(made, lengths, strict=True)]).token[:count]
        logits = executor.logits(count)
        best = logits.argmax(-1)
        worst["wrong_argmax"] = worst.get("wrong_argmax", 0) + int(
            (logits[range(count), tokens] != logits[range(count), best]).sum()
        )
        for row, (sequence, length) in enumerate(zip(made, lengths, strict=True)):
            against("decode", logits[row], sequence, length + step + 1)
    executor.step([Row(made[0], lengths[0] + 3, 1, True)])  # alone: the program for one row
    against("decode_1", executor.logits(1)[0], made[0], lengths[0] + 4)
    if count > 2:  # a mixed step: one row decodes, one goes on with its prompt
        executor.step([Row(made[0], lengths[0] + 4, 1, True), Row(made[2], 40, 60, True)])
        logits = executor.logits(2)
        against("mixed", logits[0], made[0], lengths[0] + 5)
        against("mixed", logits[1], made[2], 100)
    emit(options, {"model": name, "kv": executor.cache.kind.layout, "check": "relative error of logits against fp32",
                   **{k: round(v, 5) for k, v in worst.items()}})  # fmt: skip
    torch.cuda.empty_cache()
    allowed = max(2e-2, worst.pop("torch_bf16"))
    if max(worst.values()) > allowed:
        print(f"{name}: WRONG LOGITS, further from fp32 than {allowed}", flush=True)


def torch_model(source: Path) -> Any:
    """transformers' model with the artifact's random weights, fp32, on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from aotc.frontend.checkpoint import open_checkpoint

    torch.backends.cuda.matmul.allow_tf32 = False
    weights = open_checkpoint(str(source), weights="random:7").weights
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    for key in weights.names():
        bits = torch.from_numpy(np.ascontiguousarray(weights.read(key)).view(np.int16)).view(torch.bfloat16)
        with torch.no_grad():
            parameters[key].copy_(bits.to("cuda"))
    return model.eval()


def decode(name: str, executor: Any, batch: int, limit: float, options: argparse.Namespace) -> None:
    """Time of the decode graph at `--context` tokens a sequence, and of whole steps."""
    from aotc.runtime.sequence import Row

    made = sequences(batch, options.context, executor)
    for sequence in made:
        fill(executor, sequence, options.context)
        sequence.tokens += [1] * 64
    rows = [Row(s, options.context, 1, True) for s in made]
    executor.step(rows)
    program = executor.program("decode", batch)
    times = graph_times(executor, program, 2000 if batch == 1 else 200)
    alone = program.kernel_times() if options.profile else []
    spent = []
    for step in range(50):
        rows = [Row(s, options.context + step, 1, True) for s in made]
        begin = time.perf_counter()
        executor.step(rows)
        spent.append((time.perf_counter() - begin) * 1e3)
    read = bytes_read(executor, batch, options.context)
    p50 = statistics.median(times)
    emit(options, {
        "model": name, "kv": executor.cache.kind.layout, "program": f"decode[{batch}]",
        "context": options.context, "ms": round(p50, 4),
        "p99_over_p50": round(float(np.quantile(times, 0.99)) / p50, 3),
        "p99.9_over_p50": round(float(np.quantile(times, 0.999)) / p50, 3), "step_ms": round(statistics.median(spent), 4),
        "engine_ms": round(engine_step(executor, batch, options.context), 4),
        "limit_ms": round(read / limit * 1e3, 4), "of_limit": round(read / limit * 1e3 / p50, 3),
        "kernels": program.kernel_count,
    })  # fmt: skip
    profile(alone)


def engine_step(executor: Any, batch: int, context: int) -> float:
    """Milliseconds of a step of the engine in which all sequences decode."""
    from aotc.runtime.engine import Engine
    from aotc.runtime.sampling import SamplingParams
    from aotc.runtime.sequence import Request

    engine, params = Engine(executor, (), prefix_cache=False), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    draw = np.random.default_rng(2)
    for n in range(batch):
        engine.submit(Request(f"r{n}", tuple(draw.integers(0, executor.vocab_size, context).tolist()), params))
    while engine.scheduler.waiting or any(len(s.outputs) < 8 for s in engine.scheduler.running):
        engine.step()
    spent = []
    while len(engine.scheduler.running) == batch and len(spent) < 50:
        begin = time.perf_counter()
        engine.step()
        spent.append((time.perf_counter() - begin) * 1e3)
    while engine.has_work:
        engine.step()
    return statistics.median(spent)


def bytes_read(executor: Any, batch: int, context: int) -> int:
    """What a decode step must read: all weights but the embedding's table, and keys and values."""
    manifest = executor.artifact.manifest
    weights = {w.name: w for w in manifest.weights}
    total = sum(w.nbytes for w in weights.values())
    table = weights.get("model.embed_tokens.weight")
    tied = "lm_head.weight" not in weights
    cache = sum(
        int(np.prod(f.shape)) * 2 * context // executor.max_model_len
        for cache in manifest.kv_caches if cache.layout == "static" for f in cache.fields
    )  # fmt: skip
    return total - (table.nbytes if table and not tied else 0) + batch * cache


def prefill(name: str, executor: Any, options: argparse.Namespace) -> None:
    """Time of the extend graph for one prompt of 512 tokens: with 30 ms between prompts, and one after the other, where a
    card that may draw no more power lowers its clock."""
    from aotc.runtime.sequence import Row

    (sequence,) = sequences(1, 512, executor)
    executor.start(sequence)
    executor.step([Row(sequence, 0, 512, True)])
    program = executor.program("extend", 512)
    apart, along = (statistics.median(graph_times(executor, program, count, pause)) for count, pause in ((20, 0.03), (80, 0)))
    emit(options, {"model": name, "kv": executor.cache.kind.layout, "program": "extend[512]", "ms": round(apart, 3),
                   "without_pause_ms": round(along, 3)})
    if options.profile:
        profile(program.kernel_times())


def graph_times(executor: Any, program: Any, count: int, pause: float = 0) -> list[float]:
    """Milliseconds of each of `count` launches, between events; seconds of pause before each."""
    from aotc.runtime.devices.driver import CU_EVENT_DEFAULT

    device = executor.device
    events = [device.call("cuEventCreate", CU_EVENT_DEFAULT) for _ in range(2)]
    times = []
    for n in range(count + 5):
        time.sleep(pause)
        device.call("cuEventRecord", events[0], device.stream)
        program.launch()
        device.call("cuEventRecord", events[1], device.stream)
        device.synchronize()
        if n >= 5:
            times.append(device.call("cuEventElapsedTime", *events))
    return times


def profile(alone: list[tuple[str, float]]) -> None:
    """Time of each kernel without the others, of all of its calls together and of one."""
    times: dict[str, list[float]] = {}
    for name, ms in alone:
        times.setdefault(name, []).append(ms)
    for name, spent in sorted(times.items(), key=lambda t: -sum(t[1])):
        print(f"  {sum(spent) * 1e3:9.1f} us {len(spent):4d} x {sum(spent) / len(spent) * 1e3:8.2f}  {name}")


@triton.jit
def _read(p, o, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(STEPS):
        at = (i * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        acc += tl.load(p + at, mask=at < n, other=0)
    tl.store(o + tl.program_id(0), tl.sum(acc, 0))


def read_limit() -> float:
    """Bytes a second that a kernel of plain loads reads from memory."""
    import torch
    from triton.testing import do_bench

    size = 4 << 30
    x = torch.randint(0, 127, (size // 4,), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, per, warps in ((8192, 4, 8), (4096, 8, 8), (16384, 2, 8)):
        grid = 132 * per
        out = torch.empty(grid, dtype=torch.int32, device="cuda")
        steps = triton.cdiv(size // 4, grid * block)
        ms = do_bench(lambda: _read[(grid,)](x, out, size // 4, block, steps, num_warps=warps), return_mode="median")  # noqa: B023
        best = max(best, size / ms * 1e3)
    torch.cuda.empty_cache()
    return best


if __name__ == "__main__":
    main()

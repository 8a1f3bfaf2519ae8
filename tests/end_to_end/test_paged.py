"""Static and paged caches say the same: one artifact with both, mixed requests, pools so small that sequences lose theirs."""

import numpy as np
import pytest

import aotc
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.errors import RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions, CpuExecutor, open_executor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request
from aotc.verifier import verify_artifact


@pytest.fixture(scope="module")
def artifact(both_layouts):
    return both_layouts


def requests(count, seed=0):
    """Prompts of 1 to 40 tokens, greedy and sampled, with penalties that look at the whole history."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        prompt = tuple(rng.integers(2, 200, rng.integers(1, 40)).tolist())
        params = SamplingParams(
            temperature=n % 2 * 0.9, max_tokens=int(rng.integers(1, 60)), ignore_eos=True, repetition_penalty=1.3,
            frequency_penalty=0.5, logit_bias={7: 2.0} if n % 3 else {}, logprobs=2, min_tokens=n % 2,
        )  # fmt: skip
        yield Request(f"r{n}", prompt, params, seed=n)


def answers(executor, asked):
    """Tokens of each request, and the engine that gave them."""
    engine, got = Engine(executor, (1,)), {}
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).append(output.token_id)
    return got, engine


@pytest.fixture(scope="module")
def expected(artifact):
    return answers(CpuExecutor(artifact, 4), requests(24))[0]


@pytest.mark.parametrize(("pages", "least"), [(None, 0), (12, 10), (7, 10)])
def test_tokens_are_those_of_a_static_cache(artifact, expected, pages, least):
    """With 28, 12 and 7 pages for four sequences of up to 7."""
    size = next(c.block_bytes for c in artifact.manifest.kv_caches if c.layout == "paged")
    executor = open_executor(artifact, 4, "cpu", cache=CacheOptions("paged", pages and pages * size))
    assert executor.num_pages == (pages or 28) and executor.memory.kv_cache == executor.num_pages * size
    executor._kv[:] = 0xFF  # NaN: what is not written never counts
    got, engine = answers(executor, requests(24))
    assert got == expected
    assert engine.scheduler.preemptions >= least and engine.scheduler.pool.free_pages == executor.num_pages
    assert engine.scheduler.free_slots == 4


def test_what_a_static_cache_has_not_written_never_counts(artifact, expected):
    executor = CpuExecutor(artifact, 4)
    executor._kv[:] = 0xFF
    assert answers(executor, requests(24))[0] == expected


def test_weights_are_there_once_and_every_kernel_matches_the_interpreter(artifact):
    (target,) = artifact.manifest.targets
    names = [p.name for p in target.programs]
    assert names == [f"{p}{n}" for p in ("", "paged_") for n in ("decode_1", "decode_2", "decode_4", "extend_48")]
    assert [p.kv_layout for p in target.programs] == ["static"] * 4 + ["paged"] * 4
    assert len({w.name for w in artifact.manifest.weights}) == len(artifact.manifest.weights)
    plans = {p.name: artifact.plan(p.plan) for p in target.programs}
    symbols = {name: {k.symbol for k in plan.kernels} for name, plan in plans.items()}
    for name in names[:4]:
        own = symbols[f"paged_{name}"] - symbols[name]
        assert {s.rpartition("_")[0] for s in own} == {"attention", "kv_append"}, "all else is shared"
    assert [r.fault for r in verify_artifact(artifact)] == [None] * 9


def test_memory_of_both_layouts_to_the_byte(artifact):
    static, paged = artifact.manifest.kv_caches
    layers, kv_heads, d = 2, 3, 32
    assert static.block_bytes == layers * 2 * kv_heads * 100 * d * 4 and static.block_tokens == 100
    assert paged.block_bytes == layers * 2 * kv_heads * 16 * d * 4 and paged.block_tokens == 16
    with aotc.load(artifact.path, max_num_seqs=3, device="cpu") as llm:
        assert (llm.memory.kv_blocks, llm.memory.kv_cache) == (3, 3 * static.block_bytes)
    with aotc.load(artifact.path, max_num_seqs=3, kv_cache_memory=2 * static.block_bytes, device="cpu") as llm:
        assert (llm.memory.kv_blocks, llm.memory.kv_cache) == (2, 2 * static.block_bytes)
    with aotc.load(artifact.path, kv_layout="paged", kv_cache_memory="1MiB", device="cpu") as llm:
        assert (llm.memory.kv_blocks, llm.memory.kv_cache) == (42, 42 * paged.block_bytes)
        parts = {k: v for k, v in vars(llm.memory).items() if k not in ("pinned", "kv_blocks")}
        assert llm.memory.total == sum(parts.values())
    with pytest.raises(RequestError, match=f"^a KV cache of 100 bytes holds no page: one takes {paged.block_bytes}$"):
        aotc.load(artifact.path, kv_layout="paged", kv_cache_memory=100, device="cpu")


@pytest.mark.parametrize("size", ["0", "8", "48", "65536"])
def test_a_page_size_that_no_kernel_takes_is_refused(artifact, tmp_path, size, capsys):
    source = str(artifact.path.parent)
    arguments = ["compile", source, "--weights", "random:7", "--arch", "cpu", "-o", str(tmp_path / "a"), "--quiet"]
    assert main([*arguments, "--kv-page-size", size]) == 2
    assert f"--kv-page-size {size} is no power of two from 16 to 32768" in capsys.readouterr().err


def test_one_layout_alone(artifact, tmp_path):
    source = str(artifact.path.parent)
    arguments = ["compile", source, "--weights", "random:7", "--arch", "cpu", "--dtype", "f32", "--max-num-seqs", "4"]
    arguments += ["--max-num-batched-tokens", "48", "--kv-page-size", "16", "--kv-layout", "paged", "--quiet"]
    assert main([*arguments, "-o", str(tmp_path / "a")]) == 0
    alone = open_artifact(tmp_path / "a")
    assert [c.layout for c in alone.manifest.kv_caches] == ["paged"]
    with pytest.raises(RequestError, match=r"KV layout static is not among those of the artifact \(paged\)"):
        CpuExecutor(alone, 1, CacheOptions("static"))
    assert CpuExecutor(alone, 1).num_pages == 7

"""The real chat model on the CPU says what transformers says."""

import json
import math

import numpy as np
import pytest
from greedy import hold_greedy, reference_logits

import aotc
from aotc.artifact.reader import open_artifact
from aotc.runtime.executor import CpuExecutor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence

pytestmark = pytest.mark.slow


def test_greedy_tokens_equal_those_of_transformers(artifacts, reference, prompts):
    """All at once: prefill and decode are mixed."""
    hold_greedy(aotc.load(artifacts("f32"), max_num_seqs=8), reference, prompts)


@pytest.mark.parametrize(("dtype", "limit"), [("f32", 1e-4), ("bf16", 2e-2)])
def test_logits(artifacts, reference, prompts, dtype, limit):
    executor = CpuExecutor(open_artifact(artifacts(dtype)), 1)
    for prompt in prompts[::4]:
        sequence = Sequence(Request("x", tuple(prompt), SamplingParams(temperature=0)), 0, list(prompt))
        executor.start(sequence)
        ours = executor.step([Row(sequence, 0, len(prompt), True)]).logits[0].copy()
        theirs = reference_logits(reference, prompt)[-1]
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < limit


def test_perplexity_in_bf16(artifacts, reference, prompts):
    """On a fixed text, within 1% of f32: one step a token."""
    ids = prompts[-1][:200]
    executor = CpuExecutor(open_artifact(artifacts("bf16")), 1)
    sequence = Sequence(Request("x", tuple(ids), SamplingParams(temperature=0)), 0, list(ids))
    executor.start(sequence)
    ours = 0.0
    for n in range(len(ids) - 1):
        logits = executor.step([Row(sequence, n, 1, True)]).logits[0].astype(np.float64)
        ours -= log_softmax(logits)[ids[n + 1]]
    theirs = -sum(
        log_softmax(row.astype(np.float64))[t]
        for row, t in zip(reference_logits(reference, ids), ids[1:], strict=False)
    )
    count = len(ids) - 1
    assert abs(math.exp(ours / count) / math.exp(theirs / count) - 1) < 0.01


def log_softmax(x):
    x = x - x.max()
    return x - math.log(np.exp(x).sum())


def test_tokens_do_not_depend_on_the_batch(artifacts, prompts):
    """Each prompt alone gives what it gives among others: seeds and positions decide, not neighbours."""
    llm = aotc.load(artifacts("f32"), max_num_seqs=8)
    settings = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    together = llm.generate(prompts[:6], **settings)
    alone = [llm.generate(p, **settings) for p in prompts[:6]]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_stop_strings_streaming_and_logprobs(artifacts):
    llm = aotc.load(artifacts("f32"))
    plain = llm.generate("The capital of France is", max_tokens=24, temperature=0, logprobs=2)
    assert "Paris" in plain.text
    assert len(plain.logprobs) == 24 and plain.logprobs[0][0][0] == plain.token_ids[0]
    assert all(pairs[0][1] <= 0 and len(pairs) == 3 for pairs in plain.logprobs)
    pieces = list(llm.stream("The capital of France is", max_tokens=24, temperature=0))
    assert "".join(p.text for p in pieces) == plain.text
    assert pieces[-1].finish_reason == "length"
    stop = plain.text[5:9]
    stopped = llm.generate("The capital of France is", max_tokens=24, temperature=0, stop=stop)
    assert stopped.text == plain.text[: plain.text.index(stop)] and stopped.finish_reason == "stop"


def test_memory_is_what_the_manifest_says(artifacts):
    llm = aotc.load(artifacts("bf16"), max_num_seqs=3)
    manifest = llm.artifact.manifest
    memory = llm.memory
    assert memory.state == 3 * manifest.state.slot_bytes
    assert memory.weights == manifest.weights_bytes
    assert memory.arena == llm.artifact.cpu_target().arena_bytes
    assert memory.kv_cache == 3 * next(c.block_bytes for c in manifest.kv_caches if c.layout == "static")
    assert memory.total == sum(v for k, v in vars(memory).items() if k != "kv_blocks")


def test_command_line(artifacts, capsys):
    from aotc.cli import main

    folder = str(artifacts("bf16"))
    assert main(["run", folder, "--prompt", "What is the capital of France?", "--max-tokens", "12"]) == 0
    assert "Paris" in capsys.readouterr().out
    assert main(["run", folder, "--prompt", "Hi", "--max-tokens", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 3
    assert main(["inspect", folder, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["targets"][0]["programs"][0]["arena_bytes"] >= facts["targets"][0]["programs"][0]["arena_lower_bound"]
    assert main(["run", folder, "--prompt", "x " * 2000]) == 2
    assert "compiled for 1024" in capsys.readouterr().err

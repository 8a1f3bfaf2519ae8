"""The real chat model on the GPU at hand says what transformers says: `make gpu`."""

import numpy as np
import pytest
from greedy import hold_greedy, reference_logits

import aotc
from aotc.cli import main
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def llm(smollm2_gguf, tmp_path_factory):
    """SmolLM2 in fp32, compiled for this GPU."""
    folder = tmp_path_factory.mktemp("gpu") / "f32"
    major, minor = CudaDevice().capability
    arguments = ["compile", str(smollm2_gguf), "--arch", f"sm{major}{minor}", "--dtype", "f32", "--max-model-len", "1024"]
    assert main([*arguments, "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "-o", str(folder), "--quiet"]) == 0
    return aotc.load(folder, max_num_seqs=8, device="cuda")


def test_greedy_tokens_equal_those_of_transformers(llm, reference, prompts):
    hold_greedy(llm, reference, prompts)


def test_logits(llm, reference, prompts):
    executor = llm._executor
    for prompt in prompts[::4]:
        sequence = Sequence(Request("x", tuple(prompt), SamplingParams(temperature=0)), 0, list(prompt))
        executor.start(sequence)
        executor.step([Row(sequence, 0, len(prompt), True)])
        expected = reference_logits(reference, prompt)[-1]
        assert np.abs(executor.logits(1)[0] - expected).max() < 1e-4 * np.abs(expected).max()


def test_an_answer_does_not_depend_on_its_neighbours(llm, prompts):
    together = llm.generate(prompts[:6], max_tokens=32, temperature=0, ignore_eos=True)
    for prompt, answer in zip(prompts[:6], together, strict=True):
        assert llm.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True).token_ids == answer.token_ids

"""On the GPU at hand (`make gpu`): the real chat model says what transformers says, and tiny random models what the CPU
says. The latter need neither transformers nor the real model."""

import contextlib
import json

import numpy as np
import pytest
from greedy import hold_greedy, reference_logits

import aotc
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.errors import DeviceError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions, CpuExecutor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LENGTH, SLACK = 4096, 64 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 200, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": LENGTH, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def arch():
    """The GPU's architecture; without one, everything here is skipped."""
    try:
        device = CudaDevice()
    except DeviceError as error:
        pytest.skip(str(error))
    name = "sm{}{}".format(*device.capability)
    device.close()
    return name


@pytest.fixture(scope="module")
def llm(arch, smollm2_gguf, tmp_path_factory):
    """SmolLM2 in fp32, compiled for this GPU."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpu") / "f32"
    arguments = ["compile", str(smollm2_gguf), "--arch", arch, "--dtype", "f32", "--max-model-len", "1024"]
    assert main([*arguments, "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "-o", str(folder), "--quiet"]) == 0
    with aotc.load(folder, max_num_seqs=8, device="cuda") as loaded:
        yield loaded


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


@pytest.fixture(scope="module")
def compiled(arch, tmp_path_factory):
    """compiled(dtype, most rows) -> a tiny Llama with random weights, for any CPU and this GPU, or another one."""
    made = {}

    def get(dtype, rows, arch=arch):
        if (dtype, rows, arch) not in made:
            folder = tmp_path_factory.mktemp("tiny")
            (folder / "config.json").write_text(json.dumps(CONFIG))
            arguments = ["compile", str(folder), "--weights", "random:1", "--arch", f"x86-64-v3,{arch}", "--dtype", dtype]
            arguments += ["--max-num-batched-tokens", "512", "--max-num-seqs", str(rows), "--quiet"]
            assert main([*arguments, "-o", str(folder / "artifact")]) == 0
            made[dtype, rows, arch] = open_artifact(folder / "artifact")
        return made[dtype, rows, arch]

    return get


@pytest.fixture
def open_gpu():
    """open_gpu(artifact) -> an executor with all its slots, closed with the test."""
    with contextlib.ExitStack() as stack:

        def get(artifact):
            executor = CudaExecutor(artifact, artifact.manifest.model.max_rows, CudaDevice())
            stack.callback(executor.close)
            return executor

        yield get


def sequence(length, slot, seed=0):
    """A random prompt in its slot, with one token more that it goes on with."""
    tokens = np.random.default_rng([seed, slot]).integers(2, CONFIG["vocab_size"], length + 1).tolist()
    return Sequence(Request(f"s{slot}", tuple(tokens[:-1]), SamplingParams(temperature=0)), slot, tokens)


def prefill(executor, sequences):
    """Runs all prompts, as many tokens a step as there is room for: several prompts a step, prompts over several."""
    waiting = [[s, 0] for s in sequences]
    for s in sequences:
        executor.start(s)
    while waiting:
        rows, room = [], executor.max_num_batched_tokens
        for item in waiting:
            count = min(room, item[0].prompt_len - item[1])
            if count:
                rows.append(Row(item[0], item[1], count, item[1] + count == item[0].prompt_len))
                item[1] += count
                room -= count
        executor.step(rows)
        waiting = [item for item in waiting if item[1] < item[0].prompt_len]


def decode(executor, sequences):
    """One token more for each sequence: tokens and logits."""
    out = executor.step([Row(s, s.prompt_len, 1, True) for s in sequences])
    count = len(sequences)
    logits = executor.logits(count) if isinstance(executor, CudaExecutor) else out.logits[:count]
    return out.token[:count].copy(), logits.copy()


@pytest.mark.parametrize(("dtype", "most", "limit"), [("f32", 32, 3e-5), ("bf16", 64, 3e-2)])
def test_ragged_contexts_and_batches_are_as_on_the_cpu(compiled, open_gpu, dtype, most, limit):
    """Contexts of 1 to 4095 tokens, batches of 1 to `most`."""
    edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 2049, LENGTH - 1]
    lengths = [*edges, *np.geomspace(1, 1000, most - len(edges)).astype(int).tolist()]
    order = np.random.default_rng(0).permutation(most)
    sequences = [sequence(lengths[n], slot) for slot, n in enumerate(order)]
    artifact = compiled(dtype, most)
    cpu, gpu = CpuExecutor(artifact, most), open_gpu(artifact)
    for executor in (cpu, gpu):
        prefill(executor, sequences)
    expected_tokens, expected = decode(cpu, sequences)
    best = np.sort(expected, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * limit * np.abs(expected).max()
    assert clear.sum() > most // 3
    for batch in (b for b in (1, 2, 3, 4, 7, 8, 9, 16, 31, 33, 64, most) if b <= most):
        for first in {0, most - batch}:
            part = slice(first, first + batch)
            tokens, logits = decode(gpu, sequences[part])
            error = np.abs(logits - expected[part]).max() / np.abs(expected).max()
            assert error < limit, f"batch {batch} from {first}: relative error {error:.1e}"
            np.testing.assert_array_equal(tokens[clear[part]], expected_tokens[part][clear[part]])
    cpu.close()


@pytest.mark.parametrize("older", ["sm80", "sm89"])
def test_code_of_older_architectures_computes_the_same(compiled, open_gpu, monkeypatch, older):
    """As PTX that the driver translates: what `--arch sm80` makes is run, and not only assembled."""
    monkeypatch.setenv("AOTC_PTX", "1")
    monkeypatch.setenv("AOTC_TARGET", older)
    artifact = compiled("bf16", 16, older)
    gpu, cpu = open_gpu(artifact), CpuExecutor(artifact, 16)
    sequences = [sequence(length, slot) for slot, length in enumerate([1, 5, 64, 65, 300, 511, 700, 1025])]
    for executor in (cpu, gpu):
        prefill(executor, sequences)
    _, expected = decode(cpu, sequences)
    for batch in (1, 3, 8):
        _, logits = decode(gpu, sequences[:batch])
        assert np.abs(logits - expected[:batch]).max() < 3e-2 * np.abs(expected).max()
    cpu.close()


def answers(executor, sequences, before_step=lambda: None):
    """Greedy tokens of all sequences at once, 16 each."""
    for s in sequences:
        del s.tokens[s.prompt_len :]
        executor.start(s)
    rows = [Row(s, 0, s.prompt_len, True) for s in sequences]
    for _ in range(16):
        before_step()
        for s, token in zip(sequences, executor.step(rows).token, strict=False):
            s.tokens.append(int(token))
        rows = [Row(s, len(s.tokens) - 1, 1, True) for s in sequences]
    return [s.tokens[s.prompt_len :] for s in sequences]


def test_nothing_is_read_from_the_arena_that_the_step_did_not_write(compiled, open_gpu):
    gpu = open_gpu(compiled("f32", 32))
    device = gpu.device

    def poison():
        device.call("cuMemsetD8Async", gpu._arena, 0xFF, gpu.memory.arena, device.stream)  # NaNs

    for count in (1, 5):
        sequences = [sequence(3 + 40 * slot, slot, seed=1) for slot in range(count)]
        clean = answers(gpu, sequences)
        assert len({tuple(a) for a in clean}) == count
        assert answers(gpu, sequences, poison) == clean


class InStep(CudaExecutor):
    """Ends each step before the next one begins."""

    runs_ahead = False


@pytest.mark.parametrize("layout", ["static", "paged"])
def test_an_engine_that_runs_ahead_gives_each_request_what_it_gets_alone(compiled, layout):
    """Requests that come, stop early and are cancelled while steps are under way; pages of the few there are go round."""
    artifact = compiled("f32", 32)
    rng = np.random.default_rng(4)
    asked = [
        Request(
            f"r{n}", tuple(rng.integers(2, 200, int(rng.integers(1, 300))).tolist()),
            SamplingParams(
                temperature=n % 2 * 0.8, max_tokens=int(rng.integers(1, 120)), ignore_eos=True, repetition_penalty=1.1,
                stop_token_ids=tuple(rng.integers(2, 200, 2).tolist()), logit_bias={9: 1.5} if n % 3 == 0 else {},
            ), seed=n,
        )
        for n in range(40)
    ]  # fmt: skip
    found = []
    for kind, slots in ((InStep, 1), (CudaExecutor, 8)):
        executor = kind(artifact, slots, CudaDevice(), CacheOptions(layout, None if layout == "static" else "1MiB"))
        engine, got, waiting = Engine(executor, ()), {}, list(asked)
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.5:
                engine.submit(waiting.pop(0))
            for output in engine.step():
                got.setdefault(output.request_id, []).append((output.token_id, output.finish_reason))
        found.append(got)
        executor.close()
    assert found[0] == found[1] and {o[-1][1] for o in found[0].values()} == {"stop", "length"}


def test_memory_stays_as_it_is_and_comes_back(compiled, open_gpu):
    artifact = compiled("f32", 32)
    watcher = CudaDevice()
    open_gpu(artifact).close()  # what the driver keeps for itself is there now
    free = watcher.call("cuMemGetInfo")[0]
    executor = open_gpu(artifact)
    executor.finish_warming()
    one = sequence(LENGTH - 1, 0)
    prefill(executor, [one])
    taken = free - watcher.call("cuMemGetInfo")[0]
    assert executor.memory.total <= taken + SLACK
    for n in range(10_000):
        executor.step([Row(one, n % (LENGTH - 1), 1, True)])
    assert abs(free - watcher.call("cuMemGetInfo")[0] - taken) <= SLACK
    executor.close()
    assert abs(free - watcher.call("cuMemGetInfo")[0]) <= SLACK
    watcher.close()


def test_a_tensor_model_is_as_on_the_cpu(arch, tmp_path):
    torch = pytest.importorskip("torch")

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.BatchNorm2d(8)
            self.inner, self.layer_norm, self.out = torch.nn.Linear(8, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 5)

        def forward(self, image, scale):
            x = torch.relu(self.norm(self.conv(image))).mean((2, 3))
            x = self.layer_norm(torch.nn.functional.gelu(self.inner(x))) * scale[:, None]
            return torch.softmax(self.out(x), -1), x[:, ::2].argmax(-1)

    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=6)
    example = (torch.randn(4, 3, 10, 10), torch.randn(4))
    program = torch.export.export(Policy().eval(), example, dynamic_shapes=({0: batch}, {0: batch}))
    aotc.compile(program, tmp_path / "policy", arch=f"x86-64-v3,{arch}", name="policy")
    rng = np.random.default_rng(0)
    with aotc.load(tmp_path / "policy", device="cpu") as cpu, aotc.load(tmp_path / "policy", device="cuda") as model:
        for n in (1, 6, 3):
            given = {"image": rng.standard_normal((n, 3, 10, 10)), "scale": rng.standard_normal(n)}
            given = {name: array.astype(np.float32) for name, array in given.items()}
            expected, got = cpu(**given), model(**given)
            np.testing.assert_allclose(got["output_0"], expected["output_0"], rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(got["output_1"], expected["output_1"])


def test_branches_of_a_tensor_model(arch, tmp_path):
    pytest.importorskip("onnx")
    from test_tensor_models import onnx_model

    onnx_model(tmp_path / "m.onnx")
    arguments = ["compile", str(tmp_path / "m.onnx"), "--arch", f"x86-64-v3,{arch}", "--dim", "batch=1..8", "--quiet"]
    assert main([*arguments, "-o", str(tmp_path / "artifact")]) == 0
    rng = np.random.default_rng(1)
    with aotc.load(tmp_path / "artifact", device="cpu") as cpu, aotc.load(tmp_path / "artifact", device="cuda") as model:
        for n in (1, 3, 8):
            for sign in (1, -1):
                x = (np.abs(rng.standard_normal((n, 3, 8, 8))) * sign).astype(np.float32)
                np.testing.assert_allclose(model(x=x)["y"], cpu(x=x)["y"], rtol=1e-4, atol=1e-5)

"""The command line from outside: a process where one matters, a call of `main` where that is enough."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from aotc.cli import main

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests/end_to_end/artifact_format_1"


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int | str | None
    out: str
    err: str

    def refuses(self, *parts: str, out: str = "") -> None:
        """Asserts exit code 2, what was printed before, and one line of error, which holds every part."""
        assert self.code == 2, self
        assert re.fullmatch(r"aotc: error: [^\n]+\n", self.err), self.err
        assert self.out == out
        for part in parts:
            assert part in self.err, self.err


class Process:
    """Runs Python with aotc in its path, in a process of its own."""

    def start(
        self, *arguments: object, program=("-m", "aotc"), stdout=subprocess.PIPE, preexec_fn=None, **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn,
        )  # fmt: skip

    def end(self, running: subprocess.Popen[str]) -> Answer:
        out, err = running.communicate(timeout=60)
        return Answer(running.returncode, out, err)

    def __call__(self, *arguments: object, **options) -> Answer:
        return self.end(self.start(*arguments, **options))


@pytest.fixture(scope="session")
def process() -> Process:
    """process(*arguments, **env): `python -m aotc` and its Answer."""
    return Process()


@pytest.fixture
def cli(capfd):
    """cli(*arguments): `main` in this process and its Answer."""

    def call(*arguments: object) -> Answer:
        capfd.readouterr()
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
        return Answer(code, *capfd.readouterr())

    return call


def write_onnx(path: Path, scale: float) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.full((64, 64), scale, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 64])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


@pytest.fixture(scope="session")
def onnx_files(tmp_path_factory) -> tuple[Path, Path]:
    """one.onnx and two.onnx: y = relu(x w), x f32 [2, 64], 16 KiB of weights that are 1 in one and 2 in the other."""
    folder = tmp_path_factory.mktemp("source")
    write_onnx(folder / "one.onnx", 1)
    write_onnx(folder / "two.onnx", 2)
    return folder / "one.onnx", folder / "two.onnx"


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 16, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WORDS = [f"w{n}" for n in range(64)]


@pytest.fixture(scope="session")
def made_checkpoint(tmp_path_factory) -> Path:
    """A Llama of one layer as a Hugging Face folder: random weights, words w0 to w63, sequences of up to 16 tokens."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(WORDS)}, "unk_token": "w2"}
    document = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    save_file(_weights(folder), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def made_artifact(made_checkpoint, tmp_path_factory) -> Path:
    """The checkpoint compiled for x86-64-v3, but for its kernels: their library is another model's, which takes no
    time to build. What stands in the way of a run is found before the first kernel is called."""
    folder = tmp_path_factory.mktemp("artifact") / "tiny"
    kernels = (KEPT / "kernels/x86-64-v3/kernels.so").read_bytes()
    arguments = ["compile", str(made_checkpoint), "--arch", "x86-64-v3", "--quiet", "-o", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotc.codegen.cpu.library.build_library", lambda *_: kernels)
        patch.setattr("aotc.codegen.cpu.library._scratch", lambda *_: 0)
        assert main([*arguments, "--max-num-seqs", "1", "--max-num-batched-tokens", "4"]) == 0
    return folder


def _weights(folder: Path) -> dict[str, np.ndarray]:
    from aotc.frontend.checkpoint import open_checkpoint

    weights = open_checkpoint(str(folder), weights="random:7").weights
    return {name: weights.read(name) for name in weights.names()}


@pytest.fixture(scope="session")
def made_gguf(made_checkpoint, tmp_path_factory) -> Path:
    """The same model as a GGUF file; its linear weights are Q8_0."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*WORDS[:60], "a", "b", "ab", "c"])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, array in _weights(made_checkpoint).items():
        inner = name.removeprefix("model.layers.0.").removesuffix(".weight")
        stored = names[name] if name in names else f"blk.0.{names[inner]}.weight"
        if array.ndim == 2 and inner != name:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

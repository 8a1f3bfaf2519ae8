"""Artifacts of the real model, compiled once a session, and transformers' own copy of it."""

import json

import pytest

from aotc.artifact.reader import open_artifact
from aotc.cli import main

PROMPT_TEXT = (
    "The history of the lighthouse begins long before the first towers of stone. Fires were kept on hills, and ships "
    "read them as well as they could. Later, keepers lived beside the lamp and counted the hours of the night by the "
    "turning of the lens. 3,141 ships passed in 1859; 27 did not. Every keeper wrote down wind, weather and oil. "
)


@pytest.fixture(scope="session")
def artifacts(smollm2_gguf, tmp_path_factory):
    """artifacts(dtype) -> folder of SmolLM2 compiled for this machine."""
    made = {}

    def get(dtype):
        if dtype not in made:
            folder = tmp_path_factory.mktemp("artifacts") / dtype
            arguments = ["compile", str(smollm2_gguf), "--arch", "cpu", "--dtype", dtype, "--max-model-len", "1024"]
            assert main([*arguments, "--max-num-seqs", "8", "-o", str(folder), "--quiet"]) == 0
            made[dtype] = folder
        return made[dtype]

    return get


@pytest.fixture(scope="session")
def reference(smollm2_gguf):
    """transformers' model on the same dequantised weights, in f32."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def prompts(smollm2_gguf):
    """20 prompts of 5 to 300 tokens."""
    from tokenizers import Tokenizer

    from aotc.frontend.checkpoint import open_checkpoint

    json = open_checkpoint(str(smollm2_gguf)).tokenizer_json
    ids = Tokenizer.from_str(json.decode()).encode(PROMPT_TEXT * 6).ids
    lengths = [5, 6, 7, 9, 12, 16, 17, 23, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200, 300]
    return [ids[3 * n : 3 * n + length] for n, length in enumerate(lengths)]


@pytest.fixture(scope="session")
def both_layouts(tmp_path_factory, tiny_config):
    """A tiny decoder with both KV layouts, in f32 for 4 rows, 48 tokens a step and pages of 16 tokens.

    Heads of 32 take the vector kernels; a window of 40 is longer than a page and shorter than a sequence.
    """
    folder = tmp_path_factory.mktemp("paged")
    config = {**tiny_config, "head_dim": 32, "max_position_embeddings": 100, "sliding_window": 40}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "cpu", "--dtype", "f32", "--max-num-seqs", "4"]
    arguments += ["--max-num-batched-tokens", "48", "--kv-page-size", "16", "-o", str(folder / "artifact"), "--quiet"]
    assert main(arguments) == 0
    return open_artifact(folder / "artifact")

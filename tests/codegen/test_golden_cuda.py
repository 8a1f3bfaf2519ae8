"""The source of one layer's kernels, as files: a change of a template shows in review as what it changes."""

import json
from pathlib import Path

import pytest

from aotc.codegen.cuda.hopper import HEAD_END
from aotc.codegen.cuda.launch import dim_order, render_program
from aotc.codegen.cuda.render import TEMPLATES
from aotc.compiler import make_program
from aotc.frontend.checkpoint import open_checkpoint
from aotc.frontend.decoder import trace_decoder
from aotc.passes import MODEL_PASSES, split_weights
from aotc.passes.runner import run_passes
from aotc.passes.specialise import decode, extend

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A Llama of one layer, 4 heads over 2, optimised for every target."""
    folder = tmp_path_factory.mktemp("golden")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = trace_decoder(open_checkpoint(str(folder), weights="random:1"), "bf16", 64)
    return split_weights(run_passes(model.graph, MODEL_PASSES, "model"))[1]


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("name", ["decode_1", "decode_16", "extend_128"])
def test_sources(graph, name, arch, update_golden):
    kind, _, size = name.partition("_")
    made = decode(graph, int(size)) if kind == "decode" else extend(graph, int(size), 4)
    program = make_program(made, TEMPLATES)
    sources = render_program(program, arch, dim_order([program]), {"state": 1 << 20, "static": 1 << 20})
    text, seen = "", set()
    for call in program.calls():
        source = sources[call.kernel]
        if source.symbol not in seen and not source.symbol.startswith("sample"):  # long, and the same in all of them
            seen.add(source.symbol)
            launch = f"grid {', '.join(map(str, source.grid))}; {source.num_warps} warps, {source.num_stages} stages"
            own = source.text.rpartition(HEAD_END)[2]  # without the header that all kernels in CUDA C++ begin with
            assert "\n\n\n\n" not in own
            text += f"# {launch}\n{own.strip()}\n\n\n"
    path = GOLDEN / f"{name}_{arch}.txt"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text(), "changed: run `make golden` and look at the difference"

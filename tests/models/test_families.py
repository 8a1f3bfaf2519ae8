"""Every family, in random small shapes, computes what transformers computes: a prompt, then a step of decoding."""

import json

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from aotc.frontend.checkpoint import FAMILIES
from aotc.frontend.decoder import trace_decoder
from aotc.frontend.huggingface import open_folder
from aotc.frontend.model import read_logical
from aotc.ir.interpret import interpret
from aotc.ir.verify import verify

pytestmark = pytest.mark.slow

CONTEXT, SLOTS = 64, 3
EXAMPLES = 40 if hypothesis.settings.get_current_profile_name() == "soak" else 5  # tracing takes seconds
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@st.composite
def ropes(draw):
    """rope_parameters as transformers 5 has them."""
    rope = {"rope_theta": draw(st.sampled_from([100.0, 10000.0, 500000.0]))}
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind == "llama3":  # wavelengths run from 6 to thousands, so all three bands have some
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}
    return {"rope_type": kind, **rope}


@st.composite
def settings_of(draw, family):
    """Arguments of a configuration class."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, flag = kv_heads * group, st.booleans()
    settings = {
        "vocab_size": draw(st.integers(5, 70)), "hidden_size": heads * draw(st.integers(5, 12)),
        "intermediate_size": draw(st.integers(7, 60)), "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16, 24, 32])), "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "rope_parameters": draw(ropes()), "tie_word_embeddings": draw(flag), "max_position_embeddings": CONTEXT,
        "eos_token_id": [3, 4], "bos_token_id": 1,
    }  # fmt: skip
    if family == "llama":
        settings |= {"attention_bias": draw(flag), "mlp_bias": draw(flag)}
    if family == "qwen3":
        settings |= {"attention_bias": draw(flag)}
    window = draw(st.none() | st.integers(1, 9))
    if family == "mistral":
        settings |= {"sliding_window": window}
    if family in ("qwen2", "qwen3") and window is not None:
        settings |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return settings


def random_model(family, settings, seed):
    """A model of transformers whose every parameter matters: biases and norms too."""
    config = getattr(transformers, f"{CLASSES[family]}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def write_old_names(folder):
    """Rewrites config.json as transformers 4 wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope, config["torch_dtype"] = config.pop("rope_parameters"), config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def step_inputs(rows, caches):
    """Inputs of the graph for rows of (slot, position of the first token, tokens)."""
    i32 = np.int32
    counts = [len(tokens) for _, _, tokens in rows]
    return {
        "tokens": np.array([t for _, _, tokens in rows for t in tokens], i32),
        "positions": np.array([at + n for _, at, tokens in rows for n in range(len(tokens))], i32),
        "rows": np.repeat(np.arange(len(rows)), counts).astype(i32),
        "query_start": np.cumsum([0, *counts]).astype(i32),
        "seq_lens": np.array([at + len(tokens) for _, at, tokens in rows], i32),
        "kv_index": np.array([slot for slot, _, _ in rows], i32),
        "sampler": np.zeros((len(rows), 128), np.uint8), **caches,
    }  # fmt: skip


def empty_caches(config):
    shape = (SLOTS, 2, config.num_key_value_heads, CONTEXT, config.head_dim)
    caches = {f"kv.{n}": np.full(shape, np.nan, np.float32) for n in range(config.num_hidden_layers)}
    return {**caches, "history": np.zeros((SLOTS, CONTEXT), np.int32)}


def assert_close(ours, theirs):
    assert np.isfinite(ours).all()
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_logits_equal_those_of_transformers(family, data, tmp_path_factory):
    settings = data.draw(settings_of(family), "settings")
    seed, old_names = data.draw(st.integers(0, 2**31), "seed"), data.draw(st.booleans(), "old names")
    prompts = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=2), "lengths of prompts")
    shard_size = data.draw(st.sampled_from(["20KB", "1GB"]), "size of a shard")
    theirs = random_model(family, settings, seed)
    folder = tmp_path_factory.mktemp(family)
    theirs.save_pretrained(folder, max_shard_size=shard_size)
    if old_names:
        write_old_names(folder)
    model = trace_decoder(open_folder(folder), "f32", CONTEXT)
    verify(model.graph)

    def ours(rows, caches):
        outputs = interpret(model.graph, step_inputs(rows, caches), lambda key: read_logical(model.weights, key))
        return outputs, {name: outputs[name] for name in caches}

    def reference(tokens):
        with torch.inference_mode():
            return theirs(torch.tensor([tokens])).logits[0, -1].numpy()

    rng = np.random.default_rng(seed)
    texts = [rng.integers(settings["vocab_size"], size=n + 1).tolist() for n in prompts]
    slots = rng.permutation(SLOTS).tolist()
    rows = [(slot, 0, text[:-1]) for slot, text in zip(slots, texts, strict=False)]
    outputs, caches = ours(rows, empty_caches(model.config))
    assert_close(outputs["logits"], np.stack([reference(text[:-1]) for text in texts]))
    steps = [(slot, len(text) - 1, text[-1:]) for slot, text in zip(slots, texts, strict=False)]
    outputs, _ = ours(steps, caches)
    assert_close(outputs["logits"], np.stack([reference(text) for text in texts]))

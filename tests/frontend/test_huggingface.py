"""Hugging Face folders: settings of every family and age, what is refused, the hub's cache, and a real model."""

import json
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.errors import AotcError, SourceError, UnsupportedError
from aotc.frontend.checkpoint import FAMILIES, DecoderConfig, generation_config, open_checkpoint, weight_shapes
from aotc.frontend.decoder import trace_decoder
from aotc.frontend.huggingface import find_in_hub, open_folder, read_config
from aotc.frontend.model import CheckpointWeights, read_logical
from aotc.frontend.safetensors import INDEX
from aotc.ir.interpret import interpret
from aotc.ir.text import print_graph
from aotc.models.config import Llama3Rope
from benchmarks.gguf_to_hf import convert
from tests.frontend.gguf_files import Q, write

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "torch_dtype": "float32",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = DecoderConfig(
    family="llama", vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=5000.0, max_position_embeddings=128, dtype="f32",
    bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def without(settings_, *names):
    return {k: v for k, v in settings_.items() if k not in names}


def read(changes, generation=None, leave_out=()):
    return read_config(without(LLAMA | changes, *leave_out), generation or {}, "config.json", None)


# Settings


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, {}),
        ({"dtype": "bfloat16"}, {"dtype": "bf16"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "f16"}),
        ({"torch_dtype": None}, {}),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"head_dim": None}, {}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"attention_bias": True, "mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}),
        ({"bos_token_id": None, "eos_token_id": None}, {"bos_token_id": None, "eos_token_ids": ()}),
        ({"eos_token_id": [2, 7, 2]}, {"eos_token_ids": (2, 7)}),
        ({"rope_theta": 1e6}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": 2.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, {"rope_scaling": 2}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64)}),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 9.0}}, {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64), "rope_theta": 9.0}),
        ({"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
         {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 128)}),
        ({"rope_scaling": None, "pretraining_tp": 1, "use_cache": True}, {}),
        (MISTRAL, {"family": "mistral", "sliding_window": 4096}),
        (MISTRAL | {"sliding_window": 64}, {"family": "mistral", "sliding_window": 64}),
        (MISTRAL | {"sliding_window": None}, {"family": "mistral"}),
        (QWEN2, {"family": "qwen2", "attention_bias": True}),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
         {"family": "qwen2", "attention_bias": True}),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
         {"family": "qwen2", "attention_bias": True, "sliding_window": 64}),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64}, {"family": "qwen2", "attention_bias": True}),
        (QWEN3, {"family": "qwen3", "qk_norm": True, "head_dim": 128}),
        (QWEN3 | {"layer_types": ["full_attention"] * 2, "head_dim": 8}, {"family": "qwen3", "qk_norm": True}),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 2, "head_dim": 8, "use_sliding_window": True, "sliding_window": 9},
         {"family": "qwen3", "qk_norm": True, "sliding_window": 9}),
    ],
)  # fmt: skip
def test_settings_old_and_new(changes, want):
    assert read(changes) == replace(PLAIN, **want)


def test_missing_settings_mean_what_they_mean_in_transformers():
    config = read({}, leave_out=("rms_norm_eps", "rope_theta", "num_key_value_heads", "tie_word_embeddings", "torch_dtype"))
    assert config == replace(PLAIN, rms_norm_eps=1e-6, rope_theta=10000.0, num_key_value_heads=4, dtype="f32")
    assert read_config(without(LLAMA, "torch_dtype"), {}, "config.json", "bf16").dtype == "bf16"


def test_eos_ids_of_both_files_end_an_answer():
    config = read({"eos_token_id": [2, 3]}, {"eos_token_id": [5, 3], "bos_token_id": 4})
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 3, 5), 4)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model_type": "gemma3"}, UnsupportedError, "'LlamaForCausalLM' is not supported|aotc compiles"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, UnsupportedError,
         f"architecture 'MambaForCausalLM' is not supported: aotc compiles {', '.join(FAMILIES)}"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedError, "'LlamaForSequenceClassification'"),
        ({"model_type": ["llama"], "architectures": None}, UnsupportedError, "is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, r"quantization_config \('gptq'\): give the"),
        ({"quantization_config": 4}, UnsupportedError, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.py"}}, UnsupportedError, "auto_map: aotc runs no code that a checkpoint brings"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act to 'gelu': aotc compiles silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedError, "rope_type to 'yarn': aotc compiles"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, UnsupportedError, "rope_type to 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, SourceError, "rope_type to linear and no factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, SourceError, "low_freq_factor 1.0 and high_freq_factor 0.5"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, SourceError, "low_freq_factor None"),
        ({"rope_scaling": [1]}, SourceError, "rope_parameters is"),
        ({"rope_parameters": {"full": {}, "local": {}}}, UnsupportedError, "by kind of layer"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"] * 2}, UnsupportedError, "layer_types, which llama models do not have"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, UnsupportedError,
         "mixes windows"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedError, "mixes windows"),
        ({"torch_dtype": "float8_e4m3fn"}, UnsupportedError, "dtype to 'float8_e4m3fn': aotc compiles float32, "),
        ({"hidden_size": None}, SourceError, "hidden_size is None, which is not a whole number between"),
        ({"hidden_size": 32.0}, SourceError, "hidden_size is 32.0"),
        ({"num_hidden_layers": 10**9}, SourceError, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, SourceError, r"num_attention_heads is 4, .* multiple of num_key_value_heads \(3\)"),
        ({"num_attention_heads": 0}, SourceError, "num_attention_heads is 0|head_dim"),
        ({"head_dim": 7}, SourceError, "head_dim is 7, which is not even"),
        ({"rms_norm_eps": -1}, SourceError, "rms_norm_eps is -1"),
        ({"rope_theta": 0}, SourceError, "rope_theta is 0"),
        ({"vocab_size": True}, SourceError, "vocab_size is True"),
        ({"tie_word_embeddings": "yes"}, SourceError, "tie_word_embeddings is 'yes', which is not true or false"),
        ({"eos_token_id": 50}, SourceError, r"eos_token_ids is \(50,\), .* below the vocabulary's size \(50\)"),
        ({"eos_token_id": list(range(300))}, SourceError, "has 300 EOS ids"),
        ({"eos_token_id": "</s>"}, SourceError, "eos_token_ids"),
        (MISTRAL | {"sliding_window": 0}, SourceError, "sliding_window is 0"),
    ],
)  # fmt: skip
def test_settings_that_aotc_does_not_compile_are_named(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        read(changes)
    assert "\n" not in str(caught.value)


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5)
    | st.lists(st.integers(), max_size=3)
)  # fmt: skip
NAMES = [*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "use_sliding_window",
         "max_window_layers", "dtype", "attention_bias", "mlp_bias", "partial_rotary_factor", "hidden_act"]  # fmt: skip


@settings(max_examples=300)
@given(
    family=st.sampled_from([{}, MISTRAL, QWEN2, QWEN3]),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES | st.dictionaries(st.sampled_from(list(LLAMA3)), VALUES), max_size=3),
    generation=st.dictionaries(st.sampled_from(["eos_token_id", "bos_token_id"]), VALUES, max_size=2),
)
def test_any_value_of_any_setting_gives_a_config_or_one_line(family, changes, generation):
    try:
        config = read(family | changes, generation)
    except AotcError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 400
    else:
        assert config.num_attention_heads % config.num_key_value_heads == 0
        assert all(type(i) is int and 0 <= i < config.vocab_size for i in config.eos_token_ids)


# Folders


def tensors_of(config):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


def make(folder, changes=None, tensors=None, **files):
    """A checkpoint of the plain config. Files are texts, or what becomes JSON; a name's last `_` stands for its dot."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = LLAMA | (changes or {})
    (folder / "config.json").write_text(json.dumps(raw))
    made = tensors_of(read_config(raw, {}, "config.json", None)) if tensors is None else tensors
    if made:
        safetensors.torch.save_file(made, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_opens_with_everything_that_belongs_to_it(tmp_path):
    folder = make(
        tmp_path / "tiny-chat", generation_config_json={"eos_token_id": [2, 9], "temperature": 0.7, "do_sample": True},
        tokenizer_config_json={"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ old }}"},
        chat_template_jinja="{{ messages }}",
    )  # fmt: skip
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "tiny-chat"
    assert checkpoint.config == replace(PLAIN, eos_token_ids=(2, 9))
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.tokenizer_json == b"{}"
    assert generation_config(checkpoint) == {
        "eos_token_id": [2, 9], "bos_token_id": 1, "temperature": 0.7, "do_sample": True, "bos_token": "<s>",
        "eos_token": "</s>",
    }  # fmt: skip
    for name, want in tensors_of(PLAIN).items():
        np.testing.assert_array_equal(checkpoint.weights.read(name), want.numpy())


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"tokenizer_config_json": {"chat_template": "{{ a }}"}}, "{{ a }}"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}},
         "d"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "tools", "template": "t"}]}}, None),
        ({"chat_template_json": {"chat_template": "{{ b }}"}}, "{{ b }}"),
    ],
)  # fmt: skip
def test_chat_templates_of_older_checkpoints(tmp_path, files, want):
    assert open_folder(make(tmp_path / "m", **files)).chat_template == want


def test_tied_weights_may_be_stored_twice_when_they_are_equal(tmp_path):
    tied = tensors_of(replace(PLAIN, tie_word_embeddings=True))
    embedding = tied["model.embed_tokens.weight"]
    heads = {"none": None, "equal": embedding.clone(), "other": embedding + 1, "short": embedding[:9].clone()}
    for name, head in heads.items():
        stored = tied | ({} if head is None else {"lm_head.weight": head})
        folder = make(tmp_path / name, {"tie_word_embeddings": True}, stored)
        if name in ("none", "equal"):
            assert open_folder(folder).config.tie_word_embeddings
        else:
            with pytest.raises(UnsupportedError, match="ties lm_head to the embedding, and holds another lm_head.weight"):
                open_folder(folder)


def remove(name):
    return lambda folder: (folder / name).unlink()


def rename(name, to):
    return lambda folder: (folder / name).rename(folder / to)


def put(name, content="{}"):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (remove("config.json"), SourceError, "has no config.json: give the folder of a Hugging Face checkpoint"),
        (lambda f: (rename("config.json", "model.Q4_0.gguf")(f)), SourceError,
         r"has no config.json: give a file in it \('model.Q4_0.gguf'\)"),
        (put("config.json", "{"), SourceError, "config.json is damaged"),
        (put("config.json", "[]"), SourceError, "config.json is damaged: it holds no JSON object"),
        (put("generation_config.json", "nope"), SourceError, "generation_config.json is damaged"),
        (put("adapter_config.json"), UnsupportedError, "is an adapter: merge it into its base model .peft's merge_and"),
        (remove("model.safetensors"), SourceError, f"has neither model.safetensors nor {INDEX}"),
        (rename("model.safetensors", "pytorch_model.bin"), UnsupportedError, "pickled .bin alone, which can run code: convert"),
        (rename("model.safetensors", "pytorch_model-00001-of-00002.bin"), UnsupportedError, "pickled .bin alone"),
        (rename("tokenizer.json", "tokenizer.model"), UnsupportedError, "has no tokenizer.json: load it with transformers'"),
        (rename("tokenizer.json", "vocab.json"), UnsupportedError, "has no tokenizer.json"),
        (put("tokenizer.json", "x"), SourceError, "tokenizer.json is damaged"),
        (put("chat_template.jinja", "x" * (2 << 20)), SourceError, "chat_template.jinja has over 1048576 bytes"),
        (put("tokenizer_config.json", '{"chat_template": 7}'), SourceError, "chat_template that is no text"),
        (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), SourceError, "is no UTF-8"),
    ],
)  # fmt: skip
def test_folders_that_are_no_checkpoint_say_what_to_do(tmp_path, change, kind, message):
    folder = make(tmp_path / "m")
    change(folder)
    with pytest.raises(kind, match=message) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model.norm.weight": None}, SourceError, "has no tensor model.norm.weight, which its config asks for"),
        ({"lm_head.weight": None}, SourceError, "has no tensor lm_head.weight"),
        ({"model.norm.weight": torch.ones(31)}, SourceError, r"tensor model.norm.weight has shape \(31,\), and by the config"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, UnsupportedError, "model.norm.weight is i8: aotc reads"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, UnsupportedError, "which llama models do not have"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, UnsupportedError, "which llama models do not have"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, changes, kind, message):
    tensors = {n: t for n, t in (tensors_of(PLAIN) | changes).items() if t is not None}
    with pytest.raises(kind, match=message):
        open_folder(make(tmp_path / "m", tensors=tensors))


def test_frequencies_that_old_checkpoints_store_are_left_aside(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert open_folder(make(tmp_path / "m", tensors=tensors_of(PLAIN) | extra)).config == PLAIN


# The hub's cache


COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache below HF_HOME with org/tiny: main, and the tag v1 at another commit."""
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    for commit, ref in ((COMMIT, "main"), (OTHER, "v1/rc")):
        make(repository / "snapshots" / commit)
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return repository


def test_a_cached_model_is_found_by_branch_tag_and_commit(hub):
    assert find_in_hub("org/tiny") == hub / "snapshots" / COMMIT
    assert find_in_hub("org/tiny", "v1/rc") == hub / "snapshots" / OTHER
    assert find_in_hub("org/tiny", OTHER) == hub / "snapshots" / OTHER
    checkpoint = open_checkpoint("org/tiny")
    assert (checkpoint.name, checkpoint.config) == ("tiny", PLAIN)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_lies_where_huggingface_hub_puts_it(hub, tmp_path, monkeypatch, variable):
    place = {"HF_HUB_CACHE": "x", "XDG_CACHE_HOME": "x/huggingface/hub", "HOME": "x/.cache/huggingface/hub"}[variable]
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    hub.parent.rename(tmp_path / place)
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "x"))
    assert find_in_hub("org/tiny") == tmp_path / place / hub.name / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("source", "revision", "command"),
    [
        ("org/absent", None, "hf download org/absent --revision main"),
        ("org/tiny", "v2", "hf download org/tiny --revision v2"),
        ("org/tiny", "c" * 40, f"hf download org/tiny --revision {'c' * 40}"),
    ],
)
def test_offline_a_missing_model_is_refused_with_the_command_that_gets_it(hub, source, revision, command):
    with pytest.raises(SourceError) as caught:
        find_in_hub(source, revision)
    assert f"not in the hub cache {hub.parent}: get it with `{command}`" in str(caught.value)


def test_a_snapshot_without_weights_does_for_random_ones_alone(hub):
    (hub / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="get it with `hf download org/tiny"):
        find_in_hub("org/tiny")
    assert find_in_hub("org/tiny", weights=False) == hub / "snapshots" / COMMIT
    assert open_checkpoint("org/tiny", weights="random:1").config == PLAIN


def test_a_ref_that_leads_elsewhere_is_not_followed(hub):
    (hub / "refs" / "main").write_text("../../../../etc")
    with pytest.raises(SourceError, match="not in the hub cache"):
        find_in_hub("org/tiny")


@pytest.mark.parametrize("source", ["tiny", "org/tiny/more", "../tiny", "org/..", "-org/tiny", "org/ti ny", "org--a/tiny", ""])
def test_what_is_no_hub_id_is_said_to_be_none(hub, source):
    with pytest.raises(SourceError, match="it is no hub id"):
        find_in_hub(source)


@pytest.mark.parametrize("revision", ["../main", "a/../b", "-x", "a b", "/etc"])
def test_what_is_no_revision_is_refused(hub, revision):
    with pytest.raises(SourceError, match="is no name of a branch, tag or commit"):
        find_in_hub("org/tiny", revision)


def test_online_the_model_is_downloaded_without_pickles_and_errors_are_one_line(hub, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    asked = []

    def download(source, **options):
        asked.append((source, options))
        if source == "org/gone":
            raise OSError("404\n  Not Found")
        return str(make(tmp_path / "got"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_in_hub("org/new", "v3") == tmp_path / "got"
    assert asked == [("org/new", {"revision": "v3", "allow_patterns": ["*.json", "*.jinja", "*.safetensors"]})]
    with pytest.raises(SourceError, match="cannot download org/gone: 404 Not Found .try `hf download org/gone"):
        find_in_hub("org/gone")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="get it with `hf download org/new"):
        find_in_hub("org/new")


# GGUF and Hugging Face


def step_inputs(checkpoint, tokens, context):
    """One sequence from its start."""
    config, count = checkpoint.config, len(tokens)
    cache = np.zeros((1, 2, config.num_key_value_heads, context, config.head_dim), np.float32)
    line = np.arange(count, dtype=np.int32)
    return {
        "tokens": np.array(tokens, np.int32), "positions": line, "rows": np.zeros(count, np.int32),
        "query_start": np.array([0, count], np.int32), "seq_lens": np.array([count], np.int32),
        "kv_index": np.zeros(1, np.int32), "sampler": np.zeros((1, 128), np.uint8),
        "history": np.zeros((1, context), np.int32), **{f"kv.{n}": cache.copy() for n in range(config.num_hidden_layers)},
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_0], ids=lambda k: k.name)
def test_a_model_is_the_same_through_both_front_ends(tmp_path, kind):
    """The graph too where nothing is quantised, and transformers' logits in any case."""
    write(tmp_path / "m.gguf", kind=kind, layers=2, tied=False)
    folder = convert(tmp_path / "m.gguf", tmp_path / "m")
    sources = [open_checkpoint(str(tmp_path / "m.gguf")), open_checkpoint(str(folder))]
    assert sources[0].config == sources[1].config
    models = [trace_decoder(source, "f32", 32) for source in sources]
    if kind == Q.F32:
        assert print_graph(models[0].graph) == print_graph(models[1].graph)
    tokens = [5, 9, 33, 266]
    logits = [
        interpret(m.graph, step_inputs(m.checkpoint, tokens, 32), lambda key, m=m: read_logical(m.weights, key))["logits"]
        for m in models
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        want = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, -1]
    np.testing.assert_allclose(logits[0][0], want.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_real_model_has_the_same_weights_in_either_form(smollm2_gguf, tmp_path):
    """Bit by bit: dequantised by the gguf package and written by transformers, or read by aotc."""
    file, folder = open_checkpoint(str(smollm2_gguf)), open_checkpoint(str(convert(smollm2_gguf, tmp_path / "m")))
    assert file.config == folder.config
    assert generation_config(file).items() <= generation_config(folder).items()
    assert (file.tokenizer_json, file.chat_template) == (folder.tokenizer_json, folder.chat_template)
    weights = [CheckpointWeights(c, {}) for c in (file, folder)]
    names = weight_shapes(file.config)
    assert len(names) == len(gguf.GGUFReader(smollm2_gguf).tensors)
    for name in names:
        left, right = (read_logical(w, name) for w in weights)
        assert left.dtype == right.dtype == np.float32
        assert np.array_equal(left, right), name

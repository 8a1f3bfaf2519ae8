"""Text encoders, in random small shapes, compute what transformers and sentence-transformers' pooling compute."""

import json

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aotc.errors import AotcError, SourceError, UnsupportedError
from aotc.frontend.encoder import trace_encoder
from aotc.frontend.encoder_checkpoint import is_encoder, open_encoder
from aotc.frontend.model import read_logical
from aotc.ir.interpret import interpret
from aotc.ir.verify import verify
from aotc.models.config import POOLINGS

EXAMPLES = 40 if hypothesis.settings.get_current_profile_name() == "soak" else 8
FLAGS = {
    "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
}  # fmt: skip
SMALL = {
    "vocab_size": 30, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip


@st.composite
def settings_of_bert(draw):
    heads = draw(st.integers(1, 4))
    return {
        "vocab_size": draw(st.integers(5, 70)), "hidden_size": heads * draw(st.integers(3, 12)),
        "intermediate_size": draw(st.integers(7, 60)), "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads, "max_position_embeddings": draw(st.integers(9, 20)),
        "type_vocab_size": draw(st.integers(1, 3)), "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-5, 1e-2])),
        "hidden_act": draw(st.sampled_from(["gelu", "gelu_new", "relu"])),
    }  # fmt: skip


def random_bert(settings, seed=0, kind=transformers.BertModel):
    """A model of transformers whose every parameter matters: biases and norms too."""
    model = kind(transformers.BertConfig(**settings, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "LayerNorm.weight" in name else 0.3 * noise)
    return model


def save(model, folder, pooling=None, normalize=False):
    """The model's folder as transformers writes it, or as sentence-transformers does where a pooling is given."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if pooling is None:
        return folder
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {flag: mode == pooling for mode, flag in FLAGS.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 12, **flags}))
    return folder


def reference(model, ids, lengths, pooling, normalize):
    """transformers' last hidden states, in f64, pooled as sentence-transformers' modules say."""
    own = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    with torch.inference_mode():
        hidden = model.double()(input_ids=torch.tensor(ids).long(), attention_mask=own.long()).last_hidden_state
    rows = [h[o] for h, o in zip(hidden, own, strict=True)]
    pooled = {
        "mean": lambda h: h.mean(0), "cls": lambda h: h[0], "max": lambda h: h.max(0).values,
        "mean_sqrt_len": lambda h: h.sum(0) / len(h) ** 0.5,
    }[pooling]  # fmt: skip
    out = torch.stack([pooled(h) for h in rows])
    return (out / out.norm(dim=-1, keepdim=True) if normalize else out).numpy()


def embed(model, ids, lengths):
    inputs = {"input_ids": np.asarray(ids, np.int32), "lengths": np.asarray(lengths, np.int32)}
    return interpret(model.graph, inputs, lambda key: read_logical(model.weights, key))["embeddings"]


def relative(ours, theirs):
    assert np.isfinite(ours).all()
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.slow
@hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_embeddings_equal_those_of_transformers(data, tmp_path_factory):
    settings, seed = data.draw(settings_of_bert(), "settings"), data.draw(st.integers(0, 2**31), "seed")
    pooling, normalize = data.draw(st.sampled_from(POOLINGS), "pooling"), data.draw(st.booleans(), "normalize")
    length = data.draw(st.integers(2, 9), "length")
    lengths = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=4), "lengths")
    theirs = random_bert(settings, seed)
    model = trace_encoder(open_encoder(save(theirs, tmp_path_factory.mktemp("bert"), pooling, normalize)), "f32", 8, 9)
    verify(model.graph)
    ids = np.random.default_rng(seed).integers(settings["vocab_size"], size=(len(lengths), length))
    ours = embed(model, ids, lengths)
    assert relative(ours, reference(theirs, ids, lengths, pooling, normalize)) < 1e-5
    for row, own in enumerate(lengths):  # padding changes nothing, whatever ids are there
        assert relative(ours[row], embed(model, ids[row : row + 1, :own], [own])[0]) < 1e-6


def test_sixteen_bit_weights_stay_near(tmp_path):
    theirs = random_bert(SMALL | {"num_hidden_layers": 2})
    checkpoint = open_encoder(save(theirs, tmp_path, "mean", True))
    ids, lengths = np.arange(24).reshape(3, 8), [8, 3, 5]
    expected = reference(theirs, ids, lengths, "mean", True)
    for dtype, most in (("bf16", 2e-2), ("f16", 2e-3)):
        assert 0 < relative(embed(trace_encoder(checkpoint, dtype, 4, 16), ids, lengths), expected) < most


def test_a_folder_without_modules_is_pooled_by_the_mean(tmp_path):
    checkpoint = open_encoder(save(random_bert(SMALL), tmp_path))
    assert (checkpoint.config.pooling, checkpoint.config.normalize) == ("mean", False)
    assert checkpoint.max_length == 16


def test_heads_and_old_names_of_norms(tmp_path):
    """bert-base-uncased is stored as BertForPreTraining, with gamma and beta."""
    theirs = random_bert(SMALL, kind=transformers.BertForMaskedLM)
    save(theirs, tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in load_file(path).items()}
    renamed = {k.replace("LayerNorm.bias", "LayerNorm.beta"): v.clone() for k, v in renamed.items()}
    assert any(k.startswith("bert.") and k.endswith("gamma") for k in renamed)
    save_file(renamed, path)
    ids, lengths = np.arange(10).reshape(2, 5), [5, 2]
    ours = embed(trace_encoder(open_encoder(tmp_path), "f32", 4, 16), ids, lengths)
    assert relative(ours, reference(theirs.bert, ids, lengths, "mean", False)) < 1e-5


def test_the_length_is_what_the_makers_say(tmp_path):
    save(random_bert(SMALL), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert open_encoder(tmp_path).max_length == 16
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 12}')
    assert open_encoder(tmp_path).max_length == 12
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 10}')
    assert open_encoder(tmp_path).max_length == 10


REFUSED = {
    "position_embedding_type": ("relative_key", "sets position_embedding_type to 'relative_key'"),
    "hidden_act": ("silu", "sets hidden_act to 'silu'"),
    "is_decoder": (True, "sets is_decoder to True"),
    "num_attention_heads": (5, "hidden_size is 12, which is not a multiple of num_attention_heads"),
    "vocab_size": (31, "embeddings.word_embeddings.weight has shape (30, 12), and by the config (31, 12)"),
    "num_hidden_layers": (2, "has no tensor encoder.layer.1."),
    "layer_norm_eps": ("big", "layer_norm_eps is 'big'"),
    "architectures": (["BertForQuestionAnswering"], "architecture 'BertForQuestionAnswering' is not supported"),
    "auto_map": ({"AutoModel": "x.Y"}, "runs no code that a checkpoint brings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_are_refused(tmp_path, name):
    save(random_bert(SMALL), tmp_path)
    value, message = REFUSED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(AotcError) as caught:
        open_encoder(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


MODULES = {
    "no list": ('{"a": 1}', SourceError, "is no list of modules"),
    "a layer after pooling": ('[{"type": "Transformer"}, {"type": "Pooling"}, {"type": "x.Dense"}]', UnsupportedError, "Dense"),
    "a path out of the folder": ('[{"type": "a.Transformer"}, {"type": "Pooling", "path": "../1"}]', SourceError, "no folder"),
    "no pooling mode": ('[{"type": "a.Transformer"}, {"type": "Pooling", "path": "2"}]', UnsupportedError, "no pooling mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_refused(tmp_path, name):
    text, kind, message = MODULES[name]
    save(random_bert(SMALL), tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(kind, match=message):
        open_encoder(tmp_path)


def test_changes_of_texts_that_are_refused(tmp_path):
    save(random_bert(SMALL), tmp_path)
    said = tmp_path / "sentence_bert_config.json"
    said.write_text('{"max_seq_length": 9, "do_lower_case": true}')
    with pytest.raises(UnsupportedError, match="sets do_lower_case"):
        open_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"normalizer": {"type": "BertNormalizer", "lowercase": true}}')
    assert open_encoder(tmp_path).max_length == 9
    (tmp_path / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(UnsupportedError, match="sets default_prompt_name"):
        open_encoder(tmp_path)


def test_other_folders_are_no_encoders(tmp_path, tiny_config):
    assert not is_encoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    assert not is_encoder(tmp_path)

"""GGUF files: tensors of every type, settings of every family, and files that are damaged, hostile or not for us."""

import struct
import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotc.errors import AotcError, SourceError, UnsupportedError
from aotc.frontend.gguf import open_gguf, read_gguf
from aotc.frontend.model import CheckpointWeights, read_logical
from aotc.models.config import Llama3Rope
from aotc.models.rope import inverse_frequencies
from tests.frontend.gguf_files import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, Q, tensors_of, write

TYPES = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


# Tensors


def interleave(rows, heads):
    """llama.cpp's order of the rows of q and k in llama models, from Hugging Face's: convert_hf_to_gguf's permute."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", TYPES, ids=[t.name for t in TYPES])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_read_as_gguf_dequantises(path, architecture, kind):
    """Under Hugging Face's names and in its order of rows, which for llama is not the file's."""
    write(path, architecture, kind, layers=2, tied=False)
    file, checkpoint = gguf.GGUFReader(path), open_gguf(path)
    weights = CheckpointWeights(checkpoint, {})
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight", "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
             "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
             "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
             "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
             "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight"}  # fmt: skip
    assert len(checkpoint.weights.names()) == len(file.tensors)
    for tensor in file.tensors:
        if tensor.name not in names:
            continue
        want = gguf.dequantize(tensor.data, tensor.tensor_type).reshape([int(s) for s in tensor.shape[::-1]])
        got = read_logical(weights, names[tensor.name]).astype(np.float32)
        if architecture == "llama" and "attn_q" in tensor.name:
            got = interleave(got, HEADS)
        if architecture == "llama" and "attn_k" in tensor.name:
            got = interleave(got, KV_HEADS)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_tensors_are_maps_of_the_file_and_not_copies(path):
    made = write(path)
    file = read_gguf(path)
    assert not file.read("token_embd.weight").flags.owndata
    np.testing.assert_array_equal(file.read("blk.0.ffn_down.weight"), made["blk.0.ffn_down.weight"])


def test_special_values_survive_packing(path):
    """Scales that are infinite, zero, or the smallest that f16 holds."""
    tensors = tensors_of("llama", 1, True)
    tensors["blk.0.ffn_up.weight"][:4] = [[0.0] * HIDDEN, [1e6] * HIDDEN, [6e-8] * HIDDEN, [-3.0] * HIDDEN]
    for kind in (Q.Q8_0, Q.Q4_0, Q.Q4_1):
        with np.errstate(all="ignore"):
            write(path, kind=kind, tensors=tensors)
        reader = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
        with np.errstate(all="ignore"):
            want = gguf.dequantize(reader.data, kind)
        got = read_logical(CheckpointWeights(open_gguf(path), {}), "model.layers.0.mlp.up_proj.weight")
        np.testing.assert_array_equal(got, want)


# Settings


def test_settings_of_a_plain_llama(path):
    write(path, tied=False, layers=3, kind=Q.F16)
    config = open_gguf(path).config
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == (
        "llama", VOCAB, HIDDEN, INNER,
    )  # fmt: skip
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        3, HEADS, KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (10000.0, None, 256)
    assert (config.tie_word_embeddings, config.dtype, config.sliding_window) == (False, "f16", None)


@pytest.mark.parametrize(
    ("architecture", "want"),
    [("qwen2", {"attention_bias": True, "qk_norm": False}), ("qwen3", {"attention_bias": False, "qk_norm": True})],
)
def test_settings_of_other_families(path, architecture, want):
    write(path, architecture)
    config = open_gguf(path).config
    assert config == replace(config, family=architecture, tie_word_embeddings=True, **want)


def test_a_window_makes_a_mistral(path):
    write(path, settings=lambda w: w.add_sliding_window(32))
    config = open_gguf(path).config
    assert (config.family, config.sliding_window) == ("mistral", 32)


def test_linear_rope_scaling(path):
    def settings_(w):
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(4.0)

    write(path, settings=settings_)
    assert open_gguf(path).config.rope_scaling == 4.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognised_from_its_factors(path, factor):
    """Converters write the divisors of the frequencies, not the numbers that they come from."""
    write(path, settings=lambda w: w.add_uint32("llama.rope.scaling.original_context_length", 8192))
    plain = open_gguf(path).config
    rope = Llama3Rope(factor, 1.0, 4.0, 8192)
    factors = inverse_frequencies(plain) / inverse_frequencies(replace(plain, rope_scaling=rope))
    tensors = tensors_of("llama", 1, True)
    write(path, tensors={**tensors, "rope_freqs.weight": factors.astype(np.float32)})
    assert open_gguf(path).config.rope_scaling == rope
    write(path, tensors={**tensors, "rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)})
    assert open_gguf(path).config.rope_scaling is None
    write(path, tensors={**tensors, "rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)})
    with pytest.raises(UnsupportedError, match="scales rope by a tensor, and not as Llama 3"):
        open_gguf(path)


def test_every_token_that_ends_an_answer_is_kept(path):
    def settings_(w):
        w.add_eot_token_id(268)
        w.add_uint32("tokenizer.ggml.eom_token_id", 267)
        w.add_chat_template("{{ messages }}")

    write(path, settings=settings_)
    checkpoint = open_gguf(path)
    assert checkpoint.config.eos_token_ids == (267, 268)
    assert checkpoint.generation_config == {"eos_token_id": [267, 268], "bos_token_id": 266}
    assert checkpoint.chat_template == "{{ messages }}"


# What is refused


def key(name, value):
    """A setting of its natural type."""
    add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    return lambda w: getattr(w, add[type(value)])(name, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("general.type", "adapter", "holds no model, but 'adapter'"),
        ("split.count", 3, "llama-gguf-split --merge"),
        ("llama.expert_count", 8, "sets llama.expert_count, which aotc does not compile"),
        ("llama.attn_logit_softcapping", 50.0, "sets llama.attn_logit_softcapping"),
        ("llama.attention.causal", False, "sets llama.attention.causal"),
        ("llama.attention.value_length", 8, "sets llama.attention.value_length"),
        ("llama.rope.dimension_count", 8, "sets llama.rope.dimension_count"),
        ("llama.rope.scaling.type", "yarn", "scales rope by 'yarn'"),
    ],
)
def test_settings_that_change_the_model_are_refused(path, name, value, message):
    write(path, settings=key(name, value))
    with pytest.raises(UnsupportedError, match=message):
        open_gguf(path)


def test_other_architectures_are_refused_with_the_families_that_are_not(path):
    write(path, "gemma3")
    with pytest.raises(UnsupportedError, match="architecture 'gemma3' is not supported: aotc compiles llama, mistral, "):
        open_gguf(path)


@pytest.mark.parametrize("kind", [q for q in Q if q not in TYPES], ids=lambda q: q.name)
def test_every_other_tensor_type_is_refused_by_its_name(path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 4 * size), np.uint8), raw_dtype=kind)
    assert block
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=f"'blk.0.ffn_up.weight' has type {kind.name}: aotc reads F32, F16, BF16, "):
        read_gguf(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama.block_count", "has no llama.block_count"),
        ("llama.embedding_length", "has no llama.embedding_length"),
        ("llama.attention.layer_norm_rms_epsilon", "has no llama.attention.layer_norm_rms_epsilon"),
        ("tokenizer.ggml.tokens", "has no list of strings tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", "has no list of strings tokenizer.ggml.merges"),
        ("tokenizer.ggml.token_type", "has no list of numbers tokenizer.ggml.token_type"),
    ],
)
def test_missing_settings_are_named(path, name, message):
    write(path, leave_out=name)
    with pytest.raises(SourceError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"blk.0.ffn_up.weight": None}, SourceError, "has no tensor model.layers.0.mlp.up_proj.weight"),
        ({"token_embd.weight": None}, SourceError, "has no token_embd.weight"),
        ({"blk.0.ffn_up.weight": (INNER, HIDDEN + 1)}, SourceError, "has shape .*96, 65.* by the config .*96, 64"),
        ({"blk.0.ffn_gate_exps.weight": (4, 4)}, UnsupportedError, "has tensor 'blk.0.ffn_gate_exps.weight', which"),
        ({"blk.7.ffn_up.weight": (INNER, HIDDEN)}, UnsupportedError, "has tensor 'model.layers.7.mlp.up_proj.weight'"),
    ],
)
def test_tensors_that_do_not_fit_the_settings_are_refused(path, change, kind, message):
    tensors = tensors_of("llama", 1, True) | {n: s and np.zeros(s, np.float32) for n, s in change.items()}
    write(path, tensors={n: t for n, t in tensors.items() if t is not None})
    with pytest.raises(kind, match=message):
        open_gguf(path)


# Damage


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(version=3, tensors=0, keys=0, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def tensor(name=b"t", dims=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def aligned(data, nbytes, alignment=32):
    return data + bytes(-len(data) % alignment) + bytes(nbytes)


ALIGNMENT = text(b"general.alignment") + struct.pack("<I", 4)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", SourceError, "cannot read .*empty file"),
        (b"GGU", SourceError, "does not begin with GGUF"),
        (b"GGUF\3\0", SourceError, "ends too early"),
        (header(magic=b"GGML"), SourceError, "does not begin with GGUF"),
        (header(1), UnsupportedError, "version 1: aotc reads little-endian GGUF of versions 2 and 3"),
        (header(4), UnsupportedError, "version 4"),
        (header(3 << 24), UnsupportedError, "is big endian"),
        (header(keys=1), SourceError, "ends too early"),
        (header(keys=2**63), SourceError, "9223372036854775808 keys"),
        (header(tensors=2**60), SourceError, "tensors and 0 keys"),
        (header(keys=1) + struct.pack("<Q", 2**62), SourceError, "a string of 4611686018427387904 bytes"),
        (header(keys=1) + text(b"\xff\xfe"), SourceError, "not UTF-8"),
        (header(keys=1) + text(b"k") + struct.pack("<I", 13), SourceError, "a value of unknown type 13"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), SourceError, "an array of type 9"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**61), SourceError, "an array of 2305843"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**30), SourceError, "an array of 1073741824 items"),
        (header(keys=2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), SourceError, "key 'k' stands twice"),
        (header(keys=1) + ALIGNMENT + struct.pack("<I", 48), SourceError, "alignment 48 is no power of two"),
        (header(keys=1) + ALIGNMENT + struct.pack("<I", 0), SourceError, "alignment 0 is no power of two"),
        (header(tensors=1) + tensor(dims=()), SourceError, "has 0 dimensions"),
        (header(tensors=1) + tensor(dims=(1,) * 5), SourceError, "has 5 dimensions"),
        (header(tensors=1) + tensor(dims=(0,)), SourceError, r"has shape \(0,\)"),
        (header(tensors=1) + tensor(dims=(2**33, 2**33)), SourceError, "has shape"),
        (header(tensors=1) + tensor(kind=12), UnsupportedError, "has type Q4_K"),
        (header(tensors=1) + tensor(kind=999), UnsupportedError, "has type 999"),
        (header(tensors=1) + tensor(dims=(48,), kind=8), SourceError, "do not divide into blocks of 32"),
        (aligned(header(tensors=1) + tensor(offset=1), 64), SourceError, "is not aligned"),
        (aligned(header(tensors=1) + tensor(), 15), SourceError, "'t' ends outside the file"),
        (aligned(header(tensors=1) + tensor(offset=2**64 - 32), 64), SourceError, "'t' ends outside the file"),
        (aligned(header(tensors=2) + tensor() + tensor(offset=32), 64), SourceError, "'t' stands twice"),
        (aligned(header(tensors=2) + tensor() + tensor(b"u"), 64), SourceError, "'t' and 'u' overlap"),
    ],
)
def test_damage_is_named_in_one_line(path, data, kind, message):
    path.write_bytes(data)
    with pytest.raises(kind, match=message) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_names_of_the_file_do_not_reach_the_terminal_as_they_are(path):
    path.write_bytes(header(tensors=1) + tensor(b"a\x1b[2J\nb" + b"c" * 900, dims=()))
    with pytest.raises(SourceError) as caught:
        read_gguf(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_and_cuts_are_refused_or_read_in_bounds(path, data):
    """The header is where damage can lead astray: most flips go there."""
    if not path.exists():
        write(path, "qwen3", Q.Q4_0)
    whole = bytearray(path.read_bytes())
    start = read_gguf(path).tensors["token_embd.weight"].offset
    places = st.integers(0, start - 1) | st.integers(0, 400) | st.integers(0, len(whole) - 1)
    for place, bit in data.draw(st.lists(st.tuples(places, st.integers(0, 7)), max_size=4)):
        whole[place] ^= 1 << bit
    cut = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(whole[:cut])
    tracemalloc.start()
    try:
        checkpoint = open_gguf(damaged)
        for name in checkpoint.weights.names():
            checkpoint.weights.read(name)
    except AotcError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20

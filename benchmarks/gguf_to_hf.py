"""Makes a Hugging Face folder of a llama model in a GGUF file: `python -m benchmarks.gguf_to_hf FOLDER [GGUF]`.

No small decoder comes in that form in a package, and the Hugging Face front end needs a real one. Reading is left to the
`gguf` package and writing to transformers, so that the folder is a witness of its own; only the tokenizer is aotc's,
which tests hold against llama.cpp. Quantised weights are dequantised: 538 MB in f32 for the model of the tests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from aotc.frontend.gguf import open_gguf
from benchmarks.fetch_model import fetch

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def convert(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes `folder` and returns it. Raises ValueError for an architecture other than llama."""
    reader = gguf.GGUFReader(source)
    if _field(reader, "general.architecture") != "llama":
        raise ValueError(f"{source} is no llama model")
    config = _config(reader)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {_name(t.name): _rows(t, config) for t in reader.tensors}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"{source}: missing {missing}, unexpected {unexpected}")
    transformers.utils.logging.disable_progress_bar()
    model.tie_weights()
    model.to(dtype).save_pretrained(folder)
    _write_tokenizer(source, folder)
    return folder


def _field(reader: gguf.GGUFReader, name: str):
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _config(reader: gguf.GGUFReader) -> transformers.LlamaConfig:
    def number(name: str):
        return _field(reader, f"llama.{name}")

    names = {t.name for t in reader.tensors}
    return transformers.LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")), hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"), num_hidden_layers=number("block_count"),
        num_attention_heads=number("attention.head_count"), num_key_value_heads=number("attention.head_count_kv"),
        max_position_embeddings=number("context_length"), rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings="output.weight" not in names, bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
    )  # fmt: skip


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}"


def _rows(tensor: gguf.ReaderTensor, config: transformers.LlamaConfig) -> torch.Tensor:
    """A tensor in f32, the rows of q and k in Hugging Face's order: llama.cpp has the halves of a head interleaved."""
    shape = [int(s) for s in reversed(tensor.shape)]
    array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in tensor.name), None)
    if count is not None:
        array = array.reshape(count, shape[0] // count // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return torch.from_numpy(np.array(array, np.float32))


def _write_tokenizer(source: Path, folder: Path) -> None:
    checkpoint = open_gguf(source)
    assert checkpoint.tokenizer_json is not None
    (folder / "tokenizer.json").write_bytes(checkpoint.tokenizer_json)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    if checkpoint.chat_template is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?", help="a llama model; without it, the model of the tests")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args()
    print(convert(options.gguf or fetch(), options.folder, getattr(torch, options.dtype)))


if __name__ == "__main__":
    main()

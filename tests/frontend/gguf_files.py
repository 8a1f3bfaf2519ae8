"""Small GGUF files, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 300
Q = gguf.GGMLQuantizationType
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def byte_letters() -> list[str]:
    """The letters of byte-level BPE, by byte: GPT-2's bytes_to_unicode."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in plain else next(others)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: the bytes, a few merges, and tokens that are no text."""
    merges = ["t h", "th e", "Ġ the", "1 2", "a n", "an d", "Ġ and", "Ġ Ġ", "ĠĠ ĠĠ", "Ã ©"]
    tokens = [*byte_letters(), *(m.replace(" ", "") for m in merges)]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED]
    tokens += ["<|im_start|>", "<|im_end|>", "<think>"]
    padding = VOCAB - len(tokens)
    return tokens + [f"[PAD{n}]" for n in range(padding)], types + [UNUSED] * padding, merges


def layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """One layer's tensors by GGUF's names."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,), "attn_q.weight": (q, HIDDEN), "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN), "attn_output.weight": (HIDDEN, q), "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER),
    }  # fmt: skip
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    return shapes


def tensors_of(architecture: str, layers: int, tied: bool) -> dict[str, np.ndarray]:
    """Random f32 tensors by GGUF's names."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for n in range(layers):
        shapes |= {f"blk.{n}.{name}": shape for name, shape in layer_shapes(architecture).items()}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = Q.F32,
    *,
    layers: int = 1,
    tied: bool = True,
    tensors: Mapping[str, np.ndarray] | None = None,
    settings: Callable[[gguf.GGUFWriter], Any] = lambda w: None,
    leave_out: str = "",
) -> dict[str, np.ndarray]:
    """Writes a model whose matrices have type `kind`, and gives its f32 tensors. `leave_out` names a key to leave out."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    settings(writer)
    for group in writer.kv_data:
        group.pop(leave_out, None)
    made = tensors_of(architecture, layers, tied) if tensors is None else dict(tensors)
    for name, array in made.items():
        matrix = array.ndim > 1 and kind != Q.F32
        writer.add_tensor(name, gguf.quantize(array, kind) if matrix else array, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made

"""Traces a decoder of `aotc.models` for a checkpoint's config: weights stay on the meta device."""

from __future__ import annotations

from dataclasses import replace

import torch

from aotc.frontend.checkpoint import Checkpoint
from aotc.frontend.exported import import_exported
from aotc.frontend.model import CheckpointWeights, Model, bind_weights
from aotc.ir.builder import Builder
from aotc.ir.dtypes import i32, u8
from aotc.ir.graph import Graph, TensorType
from aotc.ir.sizes import Dim, Size, symbol
from aotc.models.decoder import DTYPES, Decoder
from aotc.models.rope import inverse_frequencies

MAX_TOKENS, MAX_ROWS, MAX_SLOTS = 1 << 15, 1 << 10, 1 << 16
SAMPLER_BYTES = 128  # a row of settings, see aotc.runtime.sampling


def trace_decoder(checkpoint: Checkpoint, dtype: str, max_model_len: int) -> Model:
    """The model's graph over flat tokens, with sampling at its end.

    Inputs: tokens, positions, rows i32 [tokens]; query_start i32 [rows + 1]; seq_lens, kv_index i32 [rows];
    sampler u8 [rows, 128]; states kv.N [slots, 2, kv_heads, max_model_len, head_dim] and history i32
    [slots, max_model_len]. Outputs: logits f32 [rows, vocab], token i32 [rows], logprobs f32 and logprob_ids i32
    [rows, 21], and the states.
    """
    config = replace(checkpoint.config, dtype=dtype)
    exported = _export(config, max_model_len)
    tokens, rows, slots = symbol("tokens"), symbol("rows"), symbol("slots")
    cache = (slots, 2, config.num_key_value_heads, max_model_len, config.head_dim)
    inputs: dict[str, tuple[str, tuple[Size, ...]]] = {
        "tokens": ("i32", (tokens,)), "positions": ("i32", (tokens,)), "rows": ("i32", (tokens,)),
        "query_start": ("i32", (rows + 1,)), "seq_lens": ("i32", (rows,)), "kv_index": ("i32", (rows,)),
        **{f"kv.{n}": (dtype, cache) for n in range(config.num_hidden_layers)},
    }  # fmt: skip
    caches = tuple(f"kv.{n}" for n in range(config.num_hidden_layers))
    tied = config.tie_word_embeddings
    graph = import_exported(
        exported, name="step", inputs=inputs, outputs=("logits", *caches),
        dims=(Dim("tokens", 1, MAX_TOKENS), Dim("rows", 1, MAX_ROWS), Dim("slots", 1, MAX_SLOTS)),
        weight_key=lambda k: "model.embed_tokens.weight" if tied and k == "lm_head.weight" else k,
        aliases=tuple((c, c) for c in caches),
    )  # fmt: skip
    weights = CheckpointWeights(checkpoint, {"rotary.inv_freq": inverse_frequencies(config)})
    graph = bind_weights(_with_sampling(graph, max_model_len), weights)
    return Model(checkpoint.name, "llm", graph, weights, checkpoint, config, max_model_len)


def _export(config, max_model_len: int) -> torch.export.ExportedProgram:
    dims = torch.export.Dim
    tokens, rows, slots = dims("tokens", max=MAX_TOKENS), dims("seqs", max=MAX_ROWS), dims("slots", max=MAX_SLOTS)
    with torch.device("meta"):
        model = Decoder(config).eval()
        # Sizes of the example that no other size equals: torch must not take two dims for one.
        example = [torch.zeros(n, dtype=torch.int32) for n in (7, 7, 7, 6, 5, 5)]
        shape = (3, 2, config.num_key_value_heads, max_model_len, config.head_dim)
        caches = [torch.zeros(shape, dtype=DTYPES[config.dtype]) for _ in range(config.num_hidden_layers)]
    dynamic = ({0: tokens},) * 3 + ({0: dims.DYNAMIC}, {0: rows}, {0: rows}, [{0: slots}] * len(caches))
    with torch.no_grad():
        return torch.export.export(model, (*example, caches), dynamic_shapes=dynamic, strict=False)


def _with_sampling(graph: Graph, max_model_len: int) -> Graph:
    """Samples at the end, into a slot's history, and takes from there the tokens that the host does not know yet."""
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    rows, slots = symbol("rows"), symbol("slots")
    settings = builder.input("sampler", TensorType(u8, (rows, SAMPLER_BYTES)))
    history = builder.input("history", TensorType(i32, (slots, max_model_len)))
    by_name = {v.name: v for v in graph.inputs}
    feed = [by_name[n] for n in ("tokens", "positions", "rows", "kv_index")]
    fed = builder.emit("feed_tokens", *feed, history, sources=("feed_tokens",))
    first, logits = builder.nodes.pop(), graph.output("logits")
    nodes = (replace(n, inputs=tuple(fed if v is feed[0] else v for v in n.inputs)) for n in graph.nodes)
    token, logprobs, ids, past = builder.emit_many("sample", logits, settings, history, feed[3], sources=("sample",))
    named = dict(zip(graph.output_names, graph.outputs, strict=True))
    named |= {"token": token, "logprobs": logprobs, "logprob_ids": ids, "history": past}
    return replace(
        graph, inputs=(*graph.inputs, settings, history), nodes=(first, *nodes, *builder.nodes),
        outputs=tuple(named.values()), output_names=tuple(named), aliases=(*graph.aliases, ("history", "history")),
    )  # fmt: skip

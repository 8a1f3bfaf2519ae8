"""Traces a text encoder of `aotc.models` for a checkpoint's config: weights stay on the meta device."""

from __future__ import annotations

from dataclasses import replace

import torch

from aotc.frontend.encoder_checkpoint import EncoderCheckpoint
from aotc.frontend.exported import import_exported
from aotc.frontend.model import CheckpointWeights, Model, bind_weights
from aotc.ir.sizes import Dim, symbol
from aotc.models.bert import Bert

MAX_BATCH = 1 << 10


def trace_encoder(checkpoint: EncoderCheckpoint, dtype: str, max_batch: int, max_length: int) -> Model:
    """The graph of up to `max_batch` padded sequences of up to `max_length` tokens.

    Inputs: input_ids i32 [batch, length], padded on the right with any id; lengths i32 [batch], taken as 1 .. length.
    Output: embeddings f32 [batch, hidden], pooled as the config says.
    """
    config = replace(checkpoint.config, dtype=dtype)
    dims = torch.export.Dim
    batch, length = dims("batch", max=MAX_BATCH), dims("length", max=config.max_position_embeddings)
    with torch.device("meta"):
        model = Bert(config).eval()
        example = (torch.zeros(3, 7, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    with torch.no_grad():
        exported = torch.export.export(
            model, example, dynamic_shapes=({0: batch, 1: length}, {0: batch}), strict=False
        )  # fmt: skip
    rows = symbol("batch")
    graph = import_exported(
        exported, name="embed", outputs=("embeddings",), clamps_indices=True,
        inputs={"input_ids": ("i32", (rows, symbol("length"))), "lengths": ("i32", (rows,))},
        dims=(Dim("batch", 1, max_batch), Dim("length", 1, max_length)),
    )  # fmt: skip
    weights = CheckpointWeights(checkpoint, {})
    graph = bind_weights(graph, weights)
    return Model(
        checkpoint.name, "embedding", graph, weights, max_model_len=max_length, encoder=checkpoint, dtype=dtype
    )  # fmt: skip

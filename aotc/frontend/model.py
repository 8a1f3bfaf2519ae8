"""What every front end returns: a graph, the weights that it names, and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aotc.frontend.checkpoint import Checkpoint, DecoderConfig
from aotc.ir.builder import Builder
from aotc.ir.dtypes import DTYPES, from_numpy
from aotc.ir.graph import Graph, TensorType, Value, Weight, dead_code_free, substitute
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.shape import PackingAttrs
from aotc.ir.packing import PACKINGS

if TYPE_CHECKING:
    from aotc.frontend.encoder_checkpoint import EncoderCheckpoint


class Weights(Protocol):
    """Tensors of a source by key."""

    def type(self, key: str) -> TensorType:
        """Element type, shape and packing as stored."""
        ...

    def read(self, key: str) -> np.ndarray:
        """The physical array, memory mapped where possible."""
        ...


@dataclass(frozen=True)
class Model:
    """A traced model. `kind` is llm, embedding or tensor. LLMs carry their checkpoint (tokenizer, template) and config;
    text encoders carry theirs, with the `dtype` that they compute in."""

    name: str
    kind: str
    graph: Graph
    weights: Weights
    checkpoint: Checkpoint | None = None
    config: DecoderConfig | None = None
    max_model_len: int = 0
    encoder: EncoderCheckpoint | None = None
    dtype: str = ""


@dataclass(frozen=True)
class ArrayWeights:
    """Weights that are arrays at hand."""

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def type(self, key: str) -> TensorType:
        return TensorType(from_numpy(self.arrays[key].dtype), self.arrays[key].shape)

    def read(self, key: str) -> np.ndarray:
        return self.arrays[key]


@dataclass(frozen=True)
class CheckpointWeights:
    """Weights of a checkpoint, plus constants that the model computes from its config."""

    checkpoint: Checkpoint | EncoderCheckpoint
    constants: Mapping[str, np.ndarray]

    def type(self, key: str) -> TensorType:
        if key in self.constants:
            return ArrayWeights(self.constants).type(key)
        info = self.checkpoint.weights.info(key)
        return TensorType(DTYPES[info.dtype], tuple(info.shape), info.packing)

    def read(self, key: str) -> np.ndarray:
        return self.constants[key] if key in self.constants else self.checkpoint.weights.read(key)


def read_logical(weights: Weights, key: str) -> np.ndarray:
    """The array that a weight means, packings undone."""
    type_, array = weights.type(key), weights.read(key)
    if type_.packing is None:
        return array
    shape = tuple(int(s) for s in type_.shape)  # type: ignore[arg-type]
    unpacked = PACKINGS[type_.packing].unpack(array, shape)
    return unpacked.astype(type_.dtype.np, copy=False)


def bind_weights(graph: Graph, weights: Weights) -> Graph:
    """Types each weight as the source stores it, and converts from there to the type that the graph computes in."""
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    mapping: dict[Value, Value] = {}
    bound = []
    for weight in graph.weights:
        stored = weights.type(weight.key)
        wanted = weight.value.type
        if stored == wanted:
            bound.append(weight)
            continue
        value = builder.value(stored, f"{weight.key}.stored")
        bound.append(Weight(value, weight.key))
        if stored.packing is not None:
            value = builder.emit("repack", value, attrs=PackingAttrs(None), sources=(weight.key,))
        if value.type.dtype != wanted.dtype:
            value = builder.emit("convert", value, attrs=ConvertAttrs(wanted.dtype), sources=(weight.key,))
        mapping[weight.value] = value
    rest = substitute(graph, mapping)
    return dead_code_free(replace(rest, weights=tuple(bound), nodes=(*builder.nodes, *rest.nodes)))

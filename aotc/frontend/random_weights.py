"""Random weights for a config: for tests and for measuring models whose weights are not at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aotc.errors import AotcError, SourceError
from aotc.frontend.checkpoint import Checkpoint, DecoderConfig, TensorInfo, weight_shapes
from aotc.ir.dtypes import DTYPES

_STD = 0.02  # Hugging Face's initializer_range
_CHUNK = 1 << 22  # numbers made at a time


def random_checkpoint(checkpoint: Checkpoint, weights: str) -> Checkpoint:
    """The checkpoint with weights that follow from `weights`, "random:SEED", alone. Raises AotcError."""
    kind, _, seed = weights.partition(":")
    if kind != "random" or not seed.isascii() or not seed.isdecimal() or len(seed) > 19:
        raise AotcError(f"weights {weights!r} are unknown: give random:SEED, with a whole number for SEED")
    return replace(checkpoint, weights=RandomWeights(checkpoint.config, int(seed)))


class RandomWeights:
    """Normal with deviation 0.02, in the config's dtype; norms are 1 and biases 0. Made anew by each read.

    The numbers of a tensor depend on the seed and its name alone, not on which others are read, or when.
    """

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self._shapes, self._dtype, self._seed = dict(weight_shapes(config)), config.dtype, seed

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise SourceError(f"a model of this config has no tensor {name}")
        return TensorInfo(self._dtype, self._shapes[name])

    def read(self, name: str) -> np.ndarray:
        shape, dtype = self.info(name).shape, DTYPES[self._dtype].np
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype)
        if name.endswith(".bias"):
            return np.zeros(shape, dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        out = np.empty(shape, dtype)
        flat = out.reshape(-1)
        for at in range(0, flat.size, _CHUNK):
            part = flat[at : at + _CHUNK]
            part[:] = generator.standard_normal(part.size, np.float32) * np.float32(_STD)
        return out

"""Random weights for a config: for tests and for measuring models whose weights are not at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import Checkpoint, TensorInfo, shown, weight_shapes
from aotc.ir.dtypes import DTYPES

_STD = 0.02  # Hugging Face's initializer_range
_POOL = 1 << 22  # numbers that are drawn
_RUN = 1 << 17  # of them in a row, at most, before the next place is drawn


def random_checkpoint(checkpoint: Checkpoint, spec: str) -> Checkpoint:
    """The checkpoint with weights that follow from `spec`, "random:SEED", and its config alone.

    Raises UnsupportedError for another spec.
    """
    shapes, dtype = weight_shapes(checkpoint.config), checkpoint.config.dtype
    return replace(checkpoint, weights=RandomWeights(shapes, dtype, seed_of(spec)))


def seed_of(spec: str) -> int:
    """The seed of "random:SEED". Raises UnsupportedError for another spec."""
    kind, _, seed = spec.partition(":")
    if kind != "random" or not seed.isascii() or not seed.isdecimal() or len(seed) > 19:
        raise UnsupportedError(f"weights {shown(spec)} are unknown: give random:SEED, with a whole number for SEED")
    return int(seed)


class RandomWeights:
    """Normal with deviation 0.02, in one dtype; norms are 1 and biases 0.02. Made anew by each read.

    The numbers of a tensor depend on the seed and its name alone, not on which others are read, or when. Drawing
    billions of them takes minutes, so a tensor is runs of a pool drawn once, each from a place drawn for it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, seed: int) -> None:
        self._shapes, self._dtype, self._seed = dict(shapes), dtype, seed

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise SourceError(f"a model of this config has no tensor {shown(name)}")
        return TensorInfo(self._dtype, self._shapes[name])

    def read(self, name: str) -> np.ndarray:
        out = np.empty(self.info(name).shape, DTYPES[self._dtype].np)
        if name.lower().endswith("norm.weight"):
            out.fill(1)
        elif name.endswith(".bias"):
            out.fill(_STD)
        else:
            self._fill(out.reshape(-1), self._generator(name))
        return out

    def _fill(self, flat: np.ndarray, generator: np.random.Generator) -> None:
        places = generator.integers(_POOL - _RUN, size=-(-flat.size // _RUN))
        for n, place in enumerate(places):
            part = flat[n * _RUN : (n + 1) * _RUN]
            part[:] = self._pool[place : place + part.size]

    @cached_property
    def _pool(self) -> np.ndarray:
        numbers = self._generator("").standard_normal(_POOL, np.float32)
        return (numbers * np.float32(_STD)).astype(DTYPES[self._dtype].np)

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

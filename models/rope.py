"""Rotary position embeddings: the frequencies of each scaling kind, as Hugging Face defines them."""

from __future__ import annotations

import math

import numpy as np

from aotc.models.config import DecoderConfig, Llama3Rope


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """f32 [head_dim / 2]. Scaling: None, a linear factor, or Llama 3's (low frequencies divided, a smooth band)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    inverse = (1.0 / np.power(np.float32(config.rope_theta), exponent)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if not isinstance(scaling, Llama3Rope):
        return (inverse / np.float32(scaling)).astype(np.float32)
    return _llama3(inverse, scaling)


def _llama3(inverse: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = np.where(wavelength > original / low, inverse / scaling.factor, inverse)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(medium, blended, scaled).astype(np.float32)

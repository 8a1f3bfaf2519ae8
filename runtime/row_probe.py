"""Whether rows of a batch may belong to different callers: a model is asked before it is trusted with that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aotc.errors import RequestError
from aotc.runtime.signature import DTYPES

DEPENDENT = "rows of a batch change each other's results in this model: call it, submit is for models whose rows are apart"
_LOOSE = 0.05  # of an output's largest value: what another batch size may change by rounding, and no mean over rows would


def require_independent_rows(
    run: Callable[[list[np.ndarray]], list[np.ndarray]], shapes: list[tuple[int, ...]], dtypes: list[str],
    low: int, high: int,
) -> None:  # fmt: skip
    """Runs random rows of these shapes and types (by a plan's names), in batches of `low` to `high` rows. Raises
    RequestError where what a row gives depends on the others (bit for bit), on its place, or on how many there are
    (loosely).

    A model that passes may still mix rows in cases that random numbers do not meet.
    """
    count = max(2, low)
    if count > high:
        return
    rng = np.random.default_rng(0)

    def rows(scale: float) -> list[np.ndarray]:
        return [_random((count, *shape), dtype, rng, scale) for shape, dtype in zip(shapes, dtypes, strict=True)]

    base = rows(1.0)
    first = run(base)
    for scale in (1.0, 30.0, -30.0):
        for row in (0, count - 1):
            other = rows(scale)
            for array, kept in zip(other, base, strict=True):
                array[row] = kept[row]
            for a, b in zip(first, run(other), strict=True):
                if a[row].tobytes() != b[row].tobytes():
                    raise RequestError(DEPENDENT)
    if low == 1:
        for row in (0, count - 1):
            _compare(first, run([a[row : row + 1] for a in base]), row)


def _compare(together: list[np.ndarray], alone: list[np.ndarray], row: int) -> None:
    for a, b in zip(together, alone, strict=True):
        if a.dtype.kind == "f" and a.size and np.isfinite(a).all() and np.isfinite(b).all():
            difference = np.abs(a[row].astype(np.float64) - b[0]).max(initial=0)
            if difference > _LOOSE * np.abs(a).max():
                raise RequestError(DEPENDENT)


def _random(shape: tuple[int, ...], dtype: str, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Floats are normal, of both signs at scale 1 and of one sign at others; integers, which may be indices, 0 or 1."""
    if dtype not in ("f64", "f32", "f16", "bf16"):
        return rng.integers(0, 2, shape).astype(DTYPES[dtype])
    values = rng.standard_normal(shape)
    values = values if scale == 1.0 else np.abs(values) * scale
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype])

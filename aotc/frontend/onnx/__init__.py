"""The ONNX front end: a file becomes a Model whose graph computes what the file says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aotc.frontend.model import Model
from aotc.frontend.onnx.importer import import_model

__all__ = ["open_onnx"]


def open_onnx(path: str | Path, dims: Mapping[str, tuple[int, int]] | None = None, batch: int = 0) -> Model:
    """Reads an ONNX model (ai.onnx opsets 7 to 28) for inference.

    `dims` bounds each dynamic dim of the inputs, both ends inclusive; equal ends make it a number. Where one
    dim is left without them, `batch` is its upper bound, unless that is 0. Raises
    SourceError for a damaged file, UnsupportedError for what aotc does not compile, RequestError for wrong `dims`.
    """
    path = Path(path)
    graph, weights = import_model(path, dims or {}, batch)
    return Model(path.stem, "tensor", graph, weights)

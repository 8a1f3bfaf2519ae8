"""The ATen operators that the front end knows: one row an overload, each a few IR nodes. Rows stand by family in
`aten_elementwise`, `aten_shape`, `aten_reductions` and `aten_layers`."""

from __future__ import annotations

from aotc.frontend import aten_elementwise, aten_layers, aten_reductions, aten_shape
from aotc.frontend.aten_importer import Importer, Row, dtype_of

ATEN: dict[str, Row] = {**aten_elementwise.ROWS, **aten_shape.ROWS, **aten_reductions.ROWS, **aten_layers.ROWS}

__all__ = ["ATEN", "Importer", "Row", "dtype_of"]

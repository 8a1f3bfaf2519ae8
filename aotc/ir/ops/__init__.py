"""The ops of the Graph IR: one table, one row an op."""

from __future__ import annotations

from aotc.ir.ops import composite, contraction, control, decoder, elementwise, encoder, extra, indexing, shape
from aotc.ir.ops.op import Op

OPS: dict[str, Op] = {
    row.name: row
    for module in (elementwise, shape, indexing, contraction, composite, decoder, encoder, control, extra)
    for row in module.OPS
}

"""What is computed at compile time, and what is not."""

import numpy as np

from aotc.compiler import make_program
from aotc.ir.builder import Builder
from aotc.ir.dtypes import f32
from aotc.ir.graph import TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops.shape import SliceAttrs
from aotc.ir.program import interpret_program
from aotc.ir.sizes import Dim, symbol
from aotc.passes import split_weights


def test_a_part_of_a_weight_as_long_as_the_input_is_cut_at_run_time():
    """Position embeddings: how many rows are read is known when the model runs; what comes before is computed once."""
    length = symbol("length")
    b = Builder("embed", [Dim("length", 1, 6)])
    x = b.input("x", TensorType(f32, (length, 4)))
    table, other = (b.weight(k, TensorType(f32, (6, 4))) for k in ("table", "other"))
    places = b.emit("add", table, other)
    rows = b.emit("slice", places, attrs=SliceAttrs((0, 0), (length, 4), (1, 1)))
    graph = b.finish({"y": b.emit("add", x, rows)})
    prologue, main = split_weights(graph)
    assert [n.op for n in prologue.nodes] == ["add"]
    assert [n.op for n in main.nodes] == ["slice", "add"]
    rng = np.random.default_rng(0)
    arrays = {k: rng.standard_normal((6, 4)).astype(np.float32) for k in ("table", "other")}
    (key,) = prologue.output_names
    known = interpret(prologue, {}, arrays.__getitem__)
    given = {"x": np.ones((3, 4), np.float32)}
    got = interpret_program(make_program(main), given, {key: known[key]}.__getitem__)["y"]
    np.testing.assert_allclose(got, 1 + arrays["table"][:3] + arrays["other"][:3], rtol=1e-6)

"""Linear layers that follow one another become phases of one kernel, and compute what they did."""

import numpy as np
import pytest

from aotc.codegen.cuda.render import TEMPLATES
from aotc.compiler import make_program
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bool_, f32
from aotc.ir.graph import TensorType
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.ops.control import IfAttrs
from aotc.ir.ops.shape import AxisAttrs, ShapeAttrs
from aotc.ir.program import Branch, interpret_program
from aotc.ir.sizes import Dim, symbol
from aotc.passes import merge_phases

M, WIDTH = symbol("m"), 16
ROWS = 3


def family(kernel):
    """Any linear layer can be a phase."""
    return "any" if kernel.family == "matmul" else None


def width(kernel):
    """Those of one width can."""
    return kernel.body.outputs[0].type.shape[1] if kernel.family == "matmul" else None


class Layers:
    """A graph that is built of linear layers without a bias, each with a weight of its own."""

    def __init__(self, name="layers", width=WIDTH):
        self.b, self.count = Builder(name, (Dim("m", 1, 4),)), 0
        self.x = self.b.input("x", TensorType(f32, (M, width)))

    def weight(self, n=WIDTH, k=WIDTH):
        self.count += 1
        return self.b.input(f"w{self.count}", TensorType(f32, (n, k)))

    def linear(self, value, w=None, n=None):
        k = value.type.shape[1]
        w = w or self.weight(n or k, k)
        return self.b.emit("dot_general", value, w, attrs=DotAttrs((1,), (1,)), sources=(f"of {w.name}",))

    def linears(self, value, count):
        for _ in range(count):
            value = self.linear(value)
        return value

    def softmax(self, value):
        return self.b.emit("softmax", value, attrs=AxisAttrs(1))


def merged(graph, phase=family, most=8, **given):
    """The program after merging, which computes what it did before."""
    rng = np.random.default_rng(0)
    inputs = given | {
        v.name: rng.standard_normal(v.type.at({"m": ROWS}).shape).astype(np.float32)
        for v in graph.inputs if v.name not in given
    }  # fmt: skip
    before = make_program(graph, TEMPLATES)
    after = merge_phases(before, phase, most)
    wants, found = (interpret_program(p, inputs, {}.get) for p in (before, after))
    for name, value in wants.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(found[name], value)
    assert after.kernels.keys() == {c.kernel for c in after.calls()}
    assert (after.arena_bytes, after.inputs, after.outputs) == (before.arena_bytes, before.inputs, before.outputs)
    return after


def phases(program, body=None):
    """How many layers each linear call of a body computes, 0 for another call."""
    kernels = (program.kernels[c.kernel] for c in (program.body if body is None else body))
    return [{"chain": len(k.body.nodes), "matmul": 1}.get(k.family, 0) for k in kernels]


def test_what_phases_make_for_later_ones_and_for_others_stays():
    """A residual stream goes round a run, and through it; buffers of the arena have the places of dead ones."""
    g = Layers()
    first = g.linear(g.x)
    second = g.b.emit("add", first, g.linears(first, 4))
    late = g.b.emit("add", first, g.softmax(second))
    program = merged(g.b.finish({"y": g.linears(late, 2), "second": second}))
    assert phases(program) == [5, 0, 2]
    assert program.arena_bytes < 5 * ROWS * WIDTH * 4 * 2, "some share a place"
    chain, _, rest = program.body
    assert len(chain.inputs) == 6 and len(set(chain.outputs)) == 5
    made = {n.outputs[0] for n in program.kernels[chain.kernel].body.nodes}
    assert made == set(program.kernels[chain.kernel].body.outputs)
    assert {n.attrs.kind for n in program.kernels[rest.kernel].body.nodes} == {"matmul"}


@pytest.mark.parametrize(("most", "found"), [(8, [7]), (7, [7]), (3, [3, 3, 1]), (2, [2, 2, 2, 1]), (1, [1] * 7)])
def test_a_kernel_has_no_more_phases_than_are_asked_for(most, found):
    """What is left over stays the kernel that it was."""
    g = Layers()
    program = merged(g.b.finish({"y": g.linears(g.x, 7)}), most=most)
    assert phases(program) == found


def test_without_phases_nothing_changes():
    g = Layers()
    program = make_program(g.b.finish({"y": g.linears(g.x, 3)}), TEMPLATES)
    assert merge_phases(program, lambda kernel: None) == program


def test_single_calls_stay_as_they_are():
    g = Layers()
    program = make_program(g.b.finish({"y": g.linear(g.softmax(g.linear(g.x)))}), TEMPLATES)
    assert merge_phases(program, family) == program


def test_another_kind_ends_a_run():
    g = Layers()
    wide = g.linear(g.linears(g.x, 2), n=32)
    graph = g.b.finish({"y": g.linear(g.linears(wide, 2), n=8)})
    assert phases(merged(graph, width)) == [2, 3, 1]
    assert phases(merged(graph)) == [6]


def test_a_buffer_that_is_seen_as_two_shapes_ends_a_run():
    g = Layers()
    value = g.linears(g.x, 2)
    halves = g.b.emit("reshape", value, attrs=ShapeAttrs((2 * M, WIDTH // 2)))
    program = merged(g.b.finish({"y": g.linears(halves, 2)}))
    assert phases(program) == [2, 2]
    assert program.body[0].outputs[-1] == program.body[1].inputs[0], "there is no copy"


def test_another_run_may_see_it_as_another_shape():
    g = Layers()
    value = g.linears(g.x, 2)
    first = g.linear(g.softmax(value))
    halves = g.b.emit("reshape", value, attrs=ShapeAttrs((2 * M, WIDTH // 2)))
    assert phases(merged(g.b.finish({"first": first, "second": g.linear(halves)}))) == [2, 0, 2]


def test_a_branch_ends_a_run_and_has_runs_of_its_own():
    def side(name, count):
        g = Layers(name)
        weights, value = [g.weight() for _ in range(3)], g.x
        for w in weights[:count]:
            value = g.linear(value, w)
        return g.b.finish({"y": value})

    g = Layers()
    flag, value = g.b.input("flag", TensorType(bool_, ())), g.linears(g.x, 2)
    attrs = IfAttrs(side("then", 3), side("orelse", 2))
    chosen = g.b.emit("if", flag, value, *(g.weight() for _ in range(3)), attrs=attrs)
    graph = g.b.finish({"y": g.linears(chosen, 2)})
    for taken in (True, False):
        program = merged(graph, flag=np.array(taken))
        before, branch, after = program.body
        assert isinstance(branch, Branch)
        assert phases(program, (before, after)) == [2, 2]
        assert (phases(program, branch.then)[0], phases(program, branch.orelse)[0]) == (3, 2)


def test_equal_runs_are_one_kernel():
    """Layers of a decoder: what they compute is the same, on buffers of their own."""
    g = Layers()
    value = g.x
    for _ in range(3):
        value = g.softmax(g.linears(value, 2))
    program = merged(g.b.finish({"y": g.linears(value, 3)}))
    runs = [c for c in program.body if program.kernels[c.kernel].family == "chain"]
    assert [c.kernel == runs[0].kernel for c in runs] == [True, True, True, False]
    assert len({c.inputs for c in runs}) == 4


def test_a_call_says_what_all_of_its_phases_came_from():
    g = Layers()
    program = merged(g.b.finish({"y": g.linears(g.x, 3)}))
    assert [c.sources for c in program.body] == [("of w1", "of w2", "of w3")]


def test_a_weight_that_phases_share_is_passed_once():
    g = Layers()
    w, value = g.weight(), g.x
    for _ in range(3):
        value = g.linear(value, w)
    program = merged(g.b.finish({"y": value}))
    assert [len(c.inputs) for c in program.body] == [2] and phases(program) == [3]

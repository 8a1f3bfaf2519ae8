"""Every ATen operator with a row computes what torch computes; others are refused where they stand."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from aotc.errors import UnsupportedError
from aotc.frontend.aten import ATEN
from aotc.frontend.module import open_exported
from aotc.ir.dtypes import DTYPES
from aotc.ir.interpret import interpret
from aotc.ir.verify import verify
from tests.frontend.aten_cases import CASES, INPUTS, call_of, inputs_of

CUSTOM = {f"aotc.{n}.default" for n in ("kv_append", "attention", "last_rows", "self_attention")}
"""Of aotc's own decoders: tests/models compares these with transformers."""
TOLERANCES = {torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-2), torch.float64: (1e-9, 1e-9)}


class Uses(nn.Module):
    """Returns what several calls give, flat."""

    def __init__(self, calls, names):
        super().__init__()
        self.calls, self.names = calls, names

    def forward(self, *tensors):
        return pytree.tree_leaves([call(dict(zip(self.names, tensors, strict=True))) for call in self.calls])


def array(tensor):
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(DTYPES["bf16"].np) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def tensor(array):
    if array.dtype == DTYPES["bf16"].np:
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def imported(program):
    """The model of a program."""
    model = open_exported(program)
    verify(model.graph)
    return model


def run(model, tensors):
    """A model's results by the interpreter."""
    feed = {v.name: array(t) for v, t in zip(model.graph.inputs, tensors, strict=True)}
    return [tensor(a) for a in interpret(model.graph, feed, model.weights.read).values()]


@pytest.mark.parametrize("name", CASES)
def test_each_operator_computes_what_torch_computes(name):
    names = inputs_of(CASES[name])
    tensors = [INPUTS[n] for n in names]
    module = Uses([call_of(name, use) for use in CASES[name]], names)
    program = torch.export.export(module, tuple(tensors), strict=False)
    assert name in {str(n.target) for n in program.graph.nodes}
    for n, (got, want) in enumerate(zip(run(imported(program), tensors), module(*tensors), strict=True)):
        rtol, atol = TOLERANCES.get(want.dtype, (1e-5, 1e-6))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=n: f"result {n}: {m}")


def test_every_row_has_a_case():
    assert set(CASES) == set(ATEN) - CUSTOM


# Operators without a row, and modules as they are


class Function(nn.Module):
    """A function as a module, below a name."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = function

    def forward(self, *tensors):
        return self.inner(*tensors)


def holds(module, shapes, dynamic=None, others=()):
    """The module imported computes what it computes, on inputs of the shapes and of others that its dims allow."""
    module.eval()
    generator = torch.Generator().manual_seed(1)
    cases = [[torch.randn(*s, generator=generator) for s in sizes] for sizes in (shapes, *others)]
    program = torch.export.export(module, tuple(cases[0]), dynamic_shapes=dynamic, strict=False)
    model = imported(program)
    for tensors in cases:
        with torch.no_grad():
            wants = pytree.tree_leaves(module(*tensors))
        for got, want in zip(run(model, tensors), wants, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2),
        nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.GroupNorm(2, 4), nn.Hardswish(), nn.InstanceNorm2d(4, affine=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.LogSoftmax(-1),
    )  # fmt: skip


BATCH, LENGTH = torch.export.Dim("batch", max=16), torch.export.Dim("length", max=64)
MODULES = {
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [(2, 5, 16)], ({0: BATCH, 1: LENGTH},),
                [[(3, 9, 16)], [(1, 2, 16)]]),
    "attention": (nn.MultiheadAttention(16, 2, batch_first=True), [(2, 5, 16)] * 3),
    "convnet": (convnet(), [(2, 3, 8, 8)], ({0: BATCH},), [[(5, 3, 8, 8)]]),
    "lstm": (nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True), [(2, 5, 4)]),
    "gru": (nn.GRU(4, 8, batch_first=True), [(2, 5, 4)]),
    "rms_norm": (nn.RMSNorm(4), [(2, 3, 4)]),
    "nearest": (nn.Upsample(scale_factor=2), [(1, 2, 4, 3)]),
    "bilinear": (nn.Upsample(size=(7, 9), mode="bilinear", align_corners=True), [(1, 2, 4, 3)]),
    "pixels": (nn.PixelShuffle(2), [(1, 4, 3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_what_they_compute_in_torch(name):
    holds(*MODULES[name])


ACTIVATIONS = [
    nn.LeakyReLU(0.2), nn.ELU(), nn.Hardsigmoid(), nn.Softplus(), nn.Mish(), nn.SELU(), nn.CELU(), nn.PReLU(), nn.Hardtanh(),
    nn.Softsign(), nn.Tanhshrink(), nn.GLU(), nn.LogSigmoid(), nn.Softmin(-1), nn.Threshold(0.1, 2.0), nn.ReLU6(),
]  # fmt: skip


class All(nn.Module):
    """What each of several modules or functions gives: exporting one is quicker than many."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return [part(x) for part in self.parts]


def test_activations_without_a_row_are_taken_apart():
    holds(All(ACTIVATIONS), [(3, 4)], ({0: BATCH},), [[(7, 4)]])


def in_place(x):
    y = x.clone()
    y.add_(1).mul_(x)
    y[:, 1] = 0
    return y


FUNCTIONS = [
    in_place, lambda x: torch.where(x > 0, x, 0.5), lambda x: x.clamp_min(0.1),
    lambda x: x.std(), lambda x: functional.log_softmax(x, -1), lambda x: torch.tril(x, 1),
    lambda x: torch.logsumexp(x, -1), lambda x: x.repeat(2, 3), lambda x: x.T,
    lambda x: x.repeat_interleave(2, 0), lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: x[:, [0, 2]], lambda x: x // 0.5, lambda x: functional.normalize(x),
    lambda x: torch.roll(x, 1, 0), lambda x: x * x.size(0), lambda x: torch.lerp(x, x * 2, 0.3),
    lambda x: torch.outer(x[0], x[1]), lambda x: functional.one_hot((x > 0).long(), 2),
    lambda x: x + torch.linspace(0, 1, 4), lambda x: torch.nan_to_num(x / 0),
    lambda x: torch.meshgrid(x[0], x[1], indexing="ij"), lambda x: x.narrow(1, 1, 2).movedim(0, 1),
    lambda x: torch.hstack([x, x.tile(2)]), lambda x: x + torch.tensor([1.0, 2, 3, 4]),
    lambda x: (x.max(-1), x.min(), torch.max(x, x.flip(0))),
]  # fmt: skip


def test_functions_without_a_row_are_taken_apart():
    holds(All([Function(f) for f in FUNCTIONS]), [(3, 4)])


# What is refused


class Counter(nn.Module):
    """Changes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def refusal(module, *tensors, dynamic=None):
    program = torch.export.export(module.eval(), tensors, dynamic_shapes=dynamic, strict=False)
    with pytest.raises(UnsupportedError) as caught:
        open_exported(program)
    assert "\n" not in str(caught.value)
    return str(caught.value)


X = torch.ones(3, 4)


def test_an_operator_that_no_row_knows_is_named_with_its_place_in_the_module():
    message = refusal(nn.Sequential(nn.ReLU(), Function(lambda x: torch.cdist(x, x))), X)
    assert message == (
        "the model calls aten._cdist_forward.default at 1.inner/_cdist_forward, which has no row in aotc/frontend/aten.py: "
        "rewrite the module without it, or add a row"
    )


@pytest.mark.parametrize(
    ("module", "tensors", "message"),
    [
        (Counter(), (X,), "the module changes count when it runs: take it as an input, and return it"),
        (Function(lambda x: x.mul_(2)), (X.clone(),), "the module changes tensors_0 when it runs"),
        (Function(lambda x: (x, None)), (X,), "result 1 of the module is None, which is no tensor"),
        (Function(lambda x: (x, x.size(0))), (X,), "result 1 of the module is 3, which is no tensor"),
        (Function(lambda x: x + torch.rand_like(x)), (X,), "the model calls aten.rand_like.default at inner/rand_like"),
        (Function(lambda x: torch.fft.fft(x).real), (X,), "aten._fft_r2c.default at inner/"),
        (Function(lambda x: functional.pad(x, [-1, 0])), (X,), "at inner/.*: constant_pad_nd with negative padding"),
        (Function(lambda x: functional.pad(x[None], [1, 1], "reflect")), (X,), "at inner/"),
        (Function(lambda x: x.topk(2, 0)), (X,), "aten.topk.default at inner/topk: topk of the smallest, or not along"),
        (Function(lambda x: functional.max_pool2d(x[None, None], 2, ceil_mode=True)), (X,), "ceil_mode: pad the input"),
        (Function(lambda x: functional.avg_pool2d(x[None, None], 2, ceil_mode=True)), (X,), "ceil_mode or count"),
        (Function(lambda x: functional.adaptive_avg_pool1d(x[None], 3)), (X,), r"adaptive_avg_pool of \[4\] to \[3\]"),
        (Function(lambda x: functional.max_pool2d(x[None], 2)), (X,), "does not compile it with these arguments"),
        (Function(lambda x: torch.addmm(x, x, x.new_ones(4, 4), beta=2)), (X,), "addmm with alpha or beta"),
        (Function(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)), (X,), "dropout"),
    ],
)
def test_what_is_not_compiled_is_refused_in_one_line(module, tensors, message):
    assert re.search(message, refusal(module, *tensors))


def test_dims_without_an_upper_bound_are_refused_with_what_to_write():
    message = refusal(Function(lambda x: x + 1), X, dynamic=(({0: torch.export.Dim.DYNAMIC},),))
    assert re.search(r"axis 0 of input \w+ has no upper bound: export with torch.export.Dim\('\w+_0', max=N\)", message)


def test_means_over_a_dim_are_refused():
    message = refusal(Function(lambda x: x.mean(0)), X, dynamic=(({0: BATCH},),))
    assert "mean over a dynamic dim" in message


def test_a_number_among_the_inputs_is_built_in():
    class Scaled(nn.Module):
        def forward(self, x, k):
            return x * k

    program = torch.export.export(Scaled(), (X, 3), strict=False)
    (got,) = run(imported(program), [X])
    assert got.tolist() == (X * 3).tolist()


def test_indices_of_callers_stop_at_the_border():
    """torch raises for them; a kernel must not read beside the table."""
    table = torch.arange(12.0).reshape(4, 3)

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(table)

        def forward(self, i):
            row = functional.embedding(i, self.table)
            return row, self.table[i], self.table.index_select(0, i), self.table.gather(0, i[:, None].expand(-1, 3))

    program = torch.export.export(Lookup(), (torch.tensor([0, 3]),), strict=False)
    for got in run(imported(program), [torch.tensor([-(2**40), 2**40])]):
        assert got.tolist() == [[0.0, 1.0, 2.0], [9.0, 10.0, 11.0]]

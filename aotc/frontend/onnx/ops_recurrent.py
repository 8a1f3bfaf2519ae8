"""RNN, GRU and LSTM, unrolled over a static number of steps.

X is [steps, batch, in] (layout 0), W [directions, gates * hidden, in], R [directions, gates * hidden, hidden],
B [directions, 2 * gates * hidden]; Y is [steps, directions, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter
from aotc.frontend.onnx.known import Tensor
from aotc.frontend.onnx.ops_math import hard_sigmoid, softplus, softsign
from aotc.ir.ops.contraction import DotAttrs

Row = Callable[..., Sequence[Tensor]]
Function = Callable[[Tensor], Tensor]
_MOST_STEPS = 256


def _activation(b: Emitter, n: Call, name: str, alpha: float | None, beta: float | None) -> Function:
    """An activation by its name; alpha and beta default as the standard says."""

    def of(value: float | None, default: float) -> float:
        return default if value is None else value

    functions: dict[str, Function] = {
        "sigmoid": lambda x: b.op("logistic", x),
        "tanh": lambda x: b.op("tanh", x),
        "relu": lambda x: b.op("maximum", x, 0),
        "affine": lambda x: b.op("add", b.op("multiply", x, of(alpha, 1.0)), of(beta, 0.0)),
        "leakyrelu": lambda x: b.select(b.compare("LT", x, 0), b.op("multiply", x, of(alpha, 0.01)), x),
        "thresholdedrelu": lambda x: b.select(b.compare("GE", x, of(alpha, 1.0)), x, 0),
        "scaledtanh": lambda x: b.op("multiply", b.op("tanh", b.op("multiply", x, of(beta, 1.0))), of(alpha, 1.0)),
        "hardsigmoid": lambda x: hard_sigmoid(b, x, of(alpha, 0.2), of(beta, 0.5)),
        "elu": lambda x: b.select(
            b.compare("LT", x, 0), b.op("multiply", b.op("exponential_minus_one", x), of(alpha, 1.0)), x
        ),
        "softsign": lambda x: softsign(b, x),
        "softplus": lambda x: softplus(b, x),
    }
    if name.lower() not in functions:
        raise n.refusal(f"activation {name} is not known")
    return functions[name.lower()]


@dataclass(frozen=True)
class Cell:
    """One direction: its weights without the direction axis, its functions, and the node's settings."""

    b: Emitter
    n: Call
    weight: Tensor
    recurrent: Tensor
    bias: tuple[Tensor, Tensor] | None
    peepholes: Tensor | None
    functions: Sequence[Function]
    hidden: int

    def project(self, x: Tensor, weight: Tensor, bias: int | None) -> Tensor:
        """x [batch, k] by weight [m, k], plus one half of the bias."""
        out = self.b.emit("dot_general", x, weight, attrs=DotAttrs((1,), (1,)))
        return out if bias is None or self.bias is None else self.b.op("add", out, self.bias[bias])

    def gate(self, gates: Tensor, i: int) -> Tensor:
        """The i-th gate of [batch, gates * hidden]."""
        return self.b.slice(gates, 1, i * self.hidden, (i + 1) * self.hidden)

    def clipped(self, x: Tensor) -> Tensor:
        limit = self.n.attr_float("clip", 0.0)
        return self.b.op("maximum", self.b.op("minimum", x, limit), -limit) if limit else x

    def peep(self, x: Tensor, i: int, state: Tensor) -> Tensor:
        """x plus the cell state times the i-th peephole."""
        if self.peepholes is None:
            return x
        weight = self.b.slice(self.peepholes, 0, i * self.hidden, (i + 1) * self.hidden)
        return self.b.op("add", x, self.b.op("multiply", state, weight))


def _rnn_step(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    total = cell.b.op("add", cell.project(x, cell.weight, 0), cell.project(states[0], cell.recurrent, 1))
    return [cell.functions[0](cell.clipped(total))]


def _gru_step(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Gates z, r, h; with linear_before_reset the reset gate scales the projected state."""
    b, (state,), (f, g) = cell.b, states, cell.functions
    left, h = cell.project(x, cell.weight, 0), cell.hidden
    right = cell.project(state, cell.recurrent, 1)
    z, r = (f(cell.clipped(b.op("add", cell.gate(left, i), cell.gate(right, i)))) for i in range(2))
    if cell.n.attr_int("linear_before_reset", 0):
        back = b.op("multiply", r, cell.gate(right, 2))
    else:
        back = cell.project(b.op("multiply", r, state), b.slice(cell.recurrent, 0, 2 * h, 3 * h), None)
        if cell.bias is not None:
            back = b.op("add", back, b.slice(cell.bias[1], 0, 2 * h, 3 * h))
    new = g(cell.clipped(b.op("add", cell.gate(left, 2), back)))
    kept = b.op("multiply", z, state)
    return [b.op("add", b.op("multiply", b.op("subtract", 1.0, z), new), kept)]


def _lstm_step(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Gates i, o, f, c; peepholes in the order i, o, f."""
    b, (state, memory), (f, g, h) = cell.b, states, cell.functions
    gates = b.op("add", cell.project(x, cell.weight, 0), cell.project(state, cell.recurrent, 1))
    enter = f(cell.clipped(cell.peep(cell.gate(gates, 0), 0, memory)))
    if cell.n.attr_int("input_forget", 0):
        forget = b.op("subtract", 1.0, enter)
    else:
        forget = f(cell.clipped(cell.peep(cell.gate(gates, 2), 2, memory)))
    new = g(cell.clipped(cell.gate(gates, 3)))
    memory = b.op("add", b.op("multiply", forget, memory), b.op("multiply", enter, new))
    leave = f(cell.clipped(cell.peep(cell.gate(gates, 1), 1, memory)))
    return [b.op("multiply", leave, h(memory)), memory]


Step = Callable[[Cell, Tensor, list[Tensor]], list[Tensor]]


def _recurrent(step: Step, names: Sequence[str], states: int) -> Row:
    """A row whose step has the default activations `names` and so many states."""

    def row(
        b: Emitter, n: Call, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
        first: Tensor | None = None, memory: Tensor | None = None, peepholes: Tensor | None = None,
    ) -> Sequence[Tensor]:  # fmt: skip
        batch_first = n.attr_int("layout", 0)
        if batch_first:
            x = b.transpose(x, (1, 0, 2))
            first, memory = (None if s is None else b.transpose(s, (1, 0, 2)) for s in (first, memory))
        steps, batch, _ = x.type.shape
        if not isinstance(steps, int) or not 0 < steps <= _MOST_STEPS:
            raise n.refusal(f"unrolls {steps} steps: make that dim static, from 1 to {_MOST_STEPS}")
        if lengths is not None and any(v != steps for v in n.integers(lengths)):
            raise n.refusal("sequences of different lengths are not supported: give all the full length, or mask")
        hidden = r.type.shape[2]
        if not isinstance(hidden, int):
            raise n.refusal(f"its hidden size {hidden} is dynamic: make it static")
        direction = n.attr_string("direction", "forward")
        runs = []
        for d, backwards in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):
            parts = [None if p is None else _direction(b, p, d) for p in (w, r, bias, peepholes, first, memory)]
            cell = _cell(b, n, names, d, hidden, parts[:4])
            start = [p if p is not None else b.scalar(0, x.type.dtype, (batch, hidden)) for p in parts[4:]]
            runs.append(_run(b, cell, step, x, start[:states], bool(backwards)))
        outs = [b.concatenate([run[i] for run in runs], 1 if i == 0 else 0) for i in range(1 + states)]
        if batch_first:
            outs = [b.transpose(outs[0], (2, 0, 1, 3)), *(b.transpose(o, (1, 0, 2)) for o in outs[1:])]
        return outs

    return row


def _direction(b: Emitter, p: Tensor, d: int) -> Tensor:
    return b.reshape(b.slice(p, 0, d, d + 1), p.type.shape[1:])


def _cell(b: Emitter, n: Call, names: Sequence[str], d: int, hidden: int, parts: Sequence[Tensor | None]) -> Cell:
    chosen = (n.attr_strings("activations") or list(names) * (d + 1))[d * len(names) : (d + 1) * len(names)]
    alphas, betas = (n.attr_floats(f"activation_{p}") or [] for p in ("alpha", "beta"))
    functions = [
        _activation(b, n, name, *(v[i] if i < len(v) else None for v in (alphas, betas)))
        for i, name in enumerate(chosen, d * len(names))
    ]
    weight, recurrent, bias, peepholes = parts
    assert weight is not None and recurrent is not None
    halves = None
    if bias is not None:
        size = recurrent.type.shape[0]
        halves = (b.slice(bias, 0, 0, size), b.slice(bias, 0, size, size * 2))
    return Cell(b, n, weight, recurrent, halves, peepholes, functions, hidden)


def _run(b: Emitter, cell: Cell, step: Step, x: Tensor, states: list[Tensor], backwards: bool) -> list[Tensor]:
    """All steps of one direction: Y [steps, 1, batch, hidden], and the last states [1, batch, hidden]."""
    steps, batch, width = x.type.shape
    outs: list[Tensor] = []
    order = range(steps)  # type: ignore[arg-type]
    for t in order[::-1] if backwards else order:
        states = step(cell, b.reshape(b.slice(x, 0, t, t + 1), (batch, width)), states)
        outs.append(b.reshape(states[0], (1, 1, *states[0].type.shape)))
    last = [b.reshape(s, (1, *s.type.shape)) for s in states]
    return [b.concatenate(outs[::-1] if backwards else outs, 0), *last]


OPS: dict[str, Row] = {
    "RNN": _recurrent(_rnn_step, ("Tanh",), 1),
    "GRU": _recurrent(_gru_step, ("Sigmoid", "Tanh"), 1),
    "LSTM": _recurrent(_lstm_step, ("Sigmoid", "Tanh", "Tanh"), 2),
}

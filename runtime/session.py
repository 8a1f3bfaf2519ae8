"""A tensor model that keeps a state between calls: outputs that are the inputs of the next call, in memory of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aotc.artifact.plan import Tensor
from aotc.errors import RequestError
from aotc.runtime.gate import Gate
from aotc.runtime.signature import DTYPES, Signature

if TYPE_CHECKING:
    from aotc.runtime.tensor_model import TensorProgram

ENDED = "the session was closed: begin another one"
Slots = list[np.ndarray | None]
"""Arrays in the plan's order, with None where a state is."""


class Feedback(Protocol):
    """States on a device, twice: a run reads one copy and writes the other, which is the next run's to read."""

    def run(self, given: Slots, dims: tuple[int, ...], results: Slots) -> None:
        """A run as of TensorProgram. Where it raises, the states stay what they were."""
        ...

    def write(self, state: int, array: np.ndarray) -> None:
        """Sets what the next run reads."""
        ...

    def read(self, state: int) -> np.ndarray:
        """What the next run reads, as an array of its own."""
        ...

    def release(self) -> None: ...


class HostFeedback:
    """States in memory of the host, for a program that takes any arrays."""

    def __init__(self, program: TensorProgram, inputs: list[int], outputs: list[int], like: list[np.ndarray]) -> None:
        self._program, self._inputs, self._outputs = program, inputs, outputs
        self._now, self._next = ([np.zeros_like(a) for a in like] for _ in range(2))

    def run(self, given: Slots, dims: tuple[int, ...], results: Slots) -> None:
        given, results = list(given), list(results)
        for n, (begin, end) in enumerate(zip(self._inputs, self._outputs, strict=True)):
            given[begin], results[end] = self._now[n], self._next[n]
        self._program.run(given, dims, results)  # type: ignore[arg-type]
        self._now, self._next = self._next, self._now

    def write(self, state: int, array: np.ndarray) -> None:
        self._now[state][...] = array

    def read(self, state: int) -> np.ndarray:
        return self._now[state].copy()

    def release(self) -> None:
        self._now = self._next = []


class Session:
    """Call it with the inputs that are no states; it gives the outputs that are none. States begin as zeros, or as what
    `initial` says, and stay on the model's device. Thread-safe: calls come one after another. A context manager that
    closes it.

    Where a state's shape has dynamic dims, the first call after `reset` says them. Raises RequestError naming what does
    not fit, once the session or its model is closed, and in a process forked from the model's.
    """

    def __init__(
        self, program: TensorProgram, signature: Signature, gate: Gate, state: dict[str, str],
        initial: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        self._program, self._signature, self._gate = program, signature, gate
        self._pairs = [_pair(signature, begin, end) for begin, end in state.items()]
        if not state or len(set(state.values())) != len(state):
            raise RequestError('give states as {"input": "output"}, at least one, each output once')
        self._begins = [signature.names.index(i.name) for i, _ in self._pairs]
        self._ends = [signature.output_names.index(o.name) for _, o in self._pairs]
        self._initial = self._checked(initial)
        self._fresh, self._closed = True, False
        self._memory: Feedback | None = None
        self._like: dict[str, np.ndarray] = {}  # arrays of the states' shapes and types

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None and not isinstance(memory, HostFeedback):
            self._gate.garbage.append(memory.release)

    def close(self) -> None:
        """Gives the states' memory back. May be called more than once."""
        with self._gate.lock:
            self._closed = True
            self._drop()

    def reset(self, initial: dict[str, Any] | None = None) -> None:
        """States begin again, as zeros or as given by the names of the inputs."""
        with self._gate.lock:
            self._check_open()
            self._initial, self._fresh = self._checked(initial), True

    @property
    def state(self) -> dict[str, np.ndarray]:
        """What the next call reads, by the names of the inputs: arrays of the caller's own. Before the first call, what
        is known of it."""
        with self._gate.lock:
            self._check_open()
            if self._fresh or self._memory is None:
                return {name: array.copy() for name, array in self._initial.items()}
            return {name: self._memory.read(n) for n, name in enumerate(self._like)}

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """One step. Outputs are arrays of the caller's own."""
        with self._gate.lock:
            self._check_open()
            for state, _ in self._pairs:
                if state.name in arrays:
                    raise RequestError(f"{state.name} is a state that the session keeps: leave it out, or reset it")
            memory = self._begin(arrays) if self._fresh or self._memory is None else self._memory
            given, shapes = self._signature.fit({**arrays, **self._like})
            results: Slots = []
            for n, (shape, dtype) in enumerate(shapes.outputs):
                if n in self._ends:
                    self._check_same(n, shape)
                results.append(None if n in self._ends else np.empty(shape, dtype))
            memory.run([None if n in self._begins else a for n, a in enumerate(given)], shapes.dims, results)
            self._fresh = False
        return {n: a for n, a in zip(self._signature.output_names, results, strict=True) if a is not None}

    def _begin(self, arrays: dict[str, Any]) -> Feedback:
        """Memory for the states, with their first values."""
        wanted = self._signature.guess({**arrays, **self._initial}, [i.name for i, _ in self._pairs])
        for name, array in self._initial.items():
            if array.shape != wanted[name]:
                raise RequestError(f"initial {name} has shape {array.shape}, not {wanted[name]}")
        if self._memory is None or wanted != {n: a.shape for n, a in self._like.items()}:
            self._drop()
            like = {i.name: np.zeros(wanted[i.name], DTYPES[i.dtype]) for i, _ in self._pairs}
            self._gate.sweep()
            dims = self._signature.fit({**arrays, **like})[1].dims
            self._memory = self._program.feedback(self._begins, self._ends, list(like.values()), dims)
            self._like = like
        for n, name in enumerate(self._like):
            first = self._initial.get(name)
            self._memory.write(n, first if first is not None else np.zeros_like(self._like[name]))
        return self._memory

    def _check_open(self) -> None:
        self._gate.check()
        if self._closed:
            raise RequestError(ENDED)

    def _check_same(self, output: int, shape: tuple[int, ...]) -> None:
        state, result = self._pairs[self._ends.index(output)]
        if shape != self._like[state.name].shape:
            said = f"output {result.name} has shape {shape}, input {state.name} {self._like[state.name].shape}"
            raise RequestError(f"{said}: a state keeps its shape")

    def _checked(self, initial: dict[str, Any] | None) -> dict[str, np.ndarray]:
        """Copies of the first values, contiguous."""
        tensors, found = {i.name: i for i, _ in self._pairs}, {}
        for name, value in (initial or {}).items():
            if name not in tensors:
                raise RequestError(f"initial has {name}, the states are {', '.join(tensors)}")
            array = np.array(value, order="C")
            if array.dtype != DTYPES[tensors[name].dtype] or array.ndim != len(tensors[name].shape):
                wanted = f"{tensors[name].dtype} with {len(tensors[name].shape)} axes"
                raise RequestError(f"initial {name} is {array.dtype} with {array.ndim} axes, not {wanted}")
            found[name] = array
        return found

    def _drop(self) -> None:
        """Under the lock."""
        if self._memory is not None and self._gate.reason is None:
            self._memory.release()
        self._memory, self._like = None, {}


def _pair(signature: Signature, begin: str, end: str) -> tuple[Tensor, Tensor]:
    inputs, outputs = ({t.name: t for t in side} for side in (signature.inputs, signature.outputs))
    for name, side, kind in ((begin, inputs, "input"), (end, outputs, "output")):
        if name not in side:
            raise RequestError(f"{name} is no {kind} of the model: its {kind}s are {', '.join(side)}")
    one, other = inputs[begin], outputs[end]
    if (one.dtype, len(one.shape)) != (other.dtype, len(other.shape)):
        kinds = [f"{t.dtype} with {len(t.shape)} axes" for t in (one, other)]
        raise RequestError(f"input {begin} is {kinds[0]}, output {end} {kinds[1]}: a state keeps its type and rank")
    return one, other

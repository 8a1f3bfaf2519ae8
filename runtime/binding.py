"""A tensor model bound to memory of its caller: everything is checked once, and a run is one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from aotc.errors import RequestError
from aotc.runtime.dlpack import CPU, DEVICE_NAMES, View, view_of
from aotc.runtime.gate import Gate
from aotc.runtime.signature import Signature

if TYPE_CHECKING:
    from aotc.runtime.tensor_model import TensorProgram

UNBOUND = "the binding was closed: bind the arrays again"


@dataclass(frozen=True)
class Launch:
    """`run` runs the program, under the model's lock; `release` gives back what the binding took, under it too. `kept`
    must live as long."""

    run: Callable[[], None]
    release: Callable[[], None]
    kept: Any = None


class Binding:
    """Call it to run the model on the bound arrays. Thread-safe; takes no memory. Keeps the arrays alive until it is
    closed or dropped. A context manager that closes it.

    Raises RequestError once it or the model is closed, and in a process forked from the model's; DeviceLostError where
    the GPU fails.
    """

    __slots__ = ("_gate", "_kept", "_launch", "_run")

    def __init__(self, gate: Gate, launch: Launch, kept: Any) -> None:
        self._gate, self._launch, self._run, self._kept = gate, launch, launch.run, kept

    def __del__(self) -> None:
        if getattr(self, "_run", _unbound) is not _unbound:
            self._gate.garbage.append(self._launch.release)  # no lock here: the collector runs anywhere

    def __call__(self) -> None:
        gate = self._gate
        with gate.lock:
            if gate.reason is not None:
                raise RequestError(gate.reason)
            self._run()

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the arrays, after a run that has begun. May be called more than once."""
        with self._gate.lock:
            if self._run is not _unbound and self._gate.reason is None:
                self._launch.release()
            self._run, self._launch, self._kept = _unbound, Launch(_unbound, lambda: None), None


def _unbound() -> None:
    raise RequestError(UNBOUND)


def bind(program: TensorProgram, signature: Signature, gate: Gate, arrays: dict[str, Any], stream: int | None) -> Binding:
    """What `TensorModel.bind` says."""
    _check_names(signature, arrays)
    _check_stream(program, stream)
    with gate.lock:
        gate.check()
        used = program.stream_for(stream)
    views = [view_of(f"input {n}", arrays[n], used) for n in signature.names]
    views += [view_of(f"output {n}", arrays[n], used) for n in signature.output_names]
    inputs, outputs = views[: len(signature.names)], views[len(signature.names) :]
    fits = zip(signature.inputs, inputs, strict=True)
    shapes = signature.shapes([(v.shape, _named(v.dtype, t.dtype)) for t, v in fits])
    for tensor, view, (shape, _) in zip(signature.outputs, outputs, shapes.outputs, strict=True):
        if _named(view.dtype, tensor.dtype) != tensor.dtype:
            raise RequestError(f"output {tensor.name} is {view.dtype}, not {tensor.dtype}: bind an array of that type")
        if view.shape != shape:
            raise RequestError(f"output {tensor.name} has shape {view.shape}, not {shape}")
        if view.read_only:
            raise RequestError(f"output {tensor.name} is read-only: bind an array that can be written")
    _check_places(program, signature, views)
    with gate.lock:
        gate.check()
        gate.sweep()
        launch = program.bind([v.address for v in views], shapes.dims, stream)
    return Binding(gate, launch, views)


def _named(dtype: str, wanted: str) -> str:
    """bf16 also travels as its bits, for libraries that have no such type."""
    return wanted if (wanted, dtype) == ("bf16", "u16") else dtype


def _check_names(signature: Signature, arrays: dict[str, Any]) -> None:
    names = (*signature.names, *signature.output_names)
    if len(set(names)) != len(names):
        both = sorted(set(signature.names) & set(signature.output_names))[0]
        raise RequestError(f"{both} is the name of an input and of an output: rename one in the model to bind them")
    for name in (*arrays, *names):
        if (name in arrays) != (name in names):
            state = "missing" if name in names else "unknown"
            inputs, outputs = ", ".join(signature.names), ", ".join(signature.output_names)
            raise RequestError(f"bind takes all inputs ({inputs}) and outputs ({outputs}): {name} is {state}")


def _check_stream(program: TensorProgram, stream: int | None) -> None:
    if stream is None:
        return
    if CPU in program.devices:
        raise RequestError("stream is for models on a GPU: leave it out")
    if not isinstance(stream, int) or isinstance(stream, bool) or not 0 <= stream < 1 << 64:
        raise RequestError(f"stream is the address of a CUDA stream as an integer, not {stream!r}")


def _check_places(program: TensorProgram, signature: Signature, views: list[View]) -> None:
    """Right device, aligned, and no output over another array."""
    count = len(signature.names)
    named = [*(f"input {n}" for n in signature.names), *(f"output {n}" for n in signature.output_names)]
    ranges = []
    for n, (name, view) in enumerate(zip(named, views, strict=True)):
        if view.device not in program.devices or view.device_id != 0:
            here = DEVICE_NAMES.get(view.device, f"a device of kind {view.device}")
            number = f" {view.device_id}" if view.device_id else ""
            there = DEVICE_NAMES[program.devices[0]]
            raise RequestError(f"{name} is in memory of {here}{number}, the model runs on {there}: bind an array there")
        alignment = program.alignment or view.itemsize
        if view.nbytes and view.address % alignment:
            raise RequestError(f"{name} does not begin at a multiple of {alignment} bytes: bind a copy")
        if view.nbytes:
            ranges.append((view.address, view.address + view.nbytes, n >= count, name))
    for (begin, stop, writes, name), (first, last, written, other) in combinations(ranges, 2):
        if (writes or written) and begin < last and first < stop:
            raise RequestError(f"{name} and {other} share memory: an output needs memory of its own")

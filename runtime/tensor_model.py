"""A tensor model in this process: named numpy arrays in, named arrays out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aotc.artifact.manifest import TargetEntry
from aotc.artifact.plan import Plan, Tensor, evaluate
from aotc.artifact.reader import Artifact
from aotc.errors import RequestError
from aotc.runtime import dlpack
from aotc.runtime.batch_worker import Batcher, in_loop
from aotc.runtime.binding import Binding, Launch, bind
from aotc.runtime.buckets import Buckets
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, address_of, allocate
from aotc.runtime.devices.opening import choose_device
from aotc.runtime.gate import Gate
from aotc.runtime.memory import Memory, weight_bytes
from aotc.runtime.session import Feedback, HostFeedback, Session
from aotc.runtime.signature import REMEMBERED, Shapes, Signature

if TYPE_CHECKING:
    from aotc.runtime.devices.opening import Opening


_SHORT = 400_000  # operations and bytes together, of a run that one thread does alone: about 20 us


class TensorProgram(Protocol):
    """A tensor model on one device: its program, or one a bucket, of which the smallest runs that takes the rows. Calls
    come one at a time."""

    plan: Plan
    """Of the largest program: what the model takes."""
    buckets: Buckets
    memory: Memory
    devices: tuple[int, ...]
    """Kinds of memory, as DLPack numbers them, whose arrays can be bound."""
    alignment: int
    """Bytes that addresses of bound arrays must be multiples of; 0: of their elements."""

    def run(self, given: list[np.ndarray], dims: tuple[int, ...], results: list[np.ndarray]) -> None:
        """Fills `results`. Arrays are contiguous, of the shapes that the dims give, in the plan's order."""
        ...

    def bind(self, addresses: list[int], dims: tuple[int, ...], stream: int | None) -> Launch:
        """A run on memory at these addresses, of the inputs and then the outputs."""
        ...

    def stream_for(self, stream: int | None) -> int | None:
        """The stream in which a binding will use its arrays."""
        ...

    def feedback(
        self, inputs: list[int], outputs: list[int], like: list[np.ndarray], dims: tuple[int, ...]
    ) -> Feedback:  # fmt: skip
        """Memory for states: inputs and outputs by number, of the shapes and types of `like`. `dims` are those of the
        first run."""
        ...

    def close(self) -> None: ...


class CpuTensorProgram:
    """On the CPU: kernels read and write the caller's arrays where they lie."""

    devices, alignment = (dlpack.CPU, dlpack.CUDA_HOST), 0

    def __init__(self, artifact: Artifact, target: TargetEntry) -> None:
        self.buckets = Buckets(target.programs)
        self._plans = [artifact.plan(e.plan) for e in self.buckets.entries]
        self.plan = self._plans[-1]
        self._library = library = CpuLibrary(artifact.file(target.library), target.scratch_bytes)
        self._weights, self._arena = artifact.map_weights(target=target), allocate(target.arena_bytes)
        self._programs = [self._make(n) for n in range(len(self._plans))]
        self._spaces = [[t.space for t in (*p.inputs, *p.outputs)] for p in self._plans]
        self._short: dict[tuple[int, ...], bool] = {}  # by dims
        self.memory = Memory(weight_bytes(artifact.manifest, target), self._arena.nbytes, 0, library.scratch.nbytes, 0, 0)

    def _make(self, number: int) -> CpuProgram:
        program = CpuProgram(self._plans[number], self._library)
        program.bind("arena", "arena", self._arena.ctypes.data)
        program.bind("weights", "weights", self._weights.ctypes.data)
        return program

    def run(self, given: list[np.ndarray], dims: tuple[int, ...], results: list[np.ndarray]) -> None:
        number = self.buckets.at(dims)
        program = self._programs[number]
        for space, array in zip(self._spaces[number], (*given, *results), strict=True):
            program.set_base(space, address_of(array))
        program.set_dims(dims)
        (program.call_alone if self._is_short(dims) else program.call)()

    def _is_short(self, dims: tuple[int, ...]) -> bool:
        """Whether other threads would cost more, and more so at the 99.9th percentile, than they give."""
        short = self._short.get(dims)
        if short is None:
            plan = self._plans[self.buckets.at(dims)]
            values = dict(zip((d.name for d in plan.dims), dims, strict=True))
            work = sum(evaluate(c.flops, values) + evaluate(c.bytes, values) for c in plan.calls())
            if len(self._short) >= REMEMBERED:
                self._short.clear()
            short = self._short[dims] = work <= _SHORT
        return short

    def bind(self, addresses: list[int], dims: tuple[int, ...], stream: int | None) -> Launch:
        number = self.buckets.at(dims)
        program = self._make(number)
        for space, address in zip(self._spaces[number], addresses, strict=True):
            program.set_base(space, address)
        program.set_dims(dims)
        return Launch(program.call_alone if self._is_short(dims) else program.call, lambda: None, program)

    def stream_for(self, stream: int | None) -> int | None:
        return None

    def feedback(
        self, inputs: list[int], outputs: list[int], like: list[np.ndarray], dims: tuple[int, ...]
    ) -> Feedback:  # fmt: skip
        return HostFeedback(self, inputs, outputs, like)

    def close(self) -> None:
        self._weights = self._arena = np.zeros(0, np.uint8)


class TensorModel:
    """A loaded model: call it with its inputs by name. Thread-safe; results are the caller's own arrays. A context
    manager that closes it.

    Rank, bounds, element type and shape of every input are checked at each call. For `submit`,
    `max_batch_size` rows run together at most (the upper bound of the batch's dim); a request waits `max_wait_ms` (5) for
    others at most, which it does where more are expected in that time, and always while there are fewer rows than
    `min_batch_size` (1). A batch with just as many rows as one of `preferred_batch_sizes` (those that the artifact has
    programs for) waits no longer.
    """

    def __init__(
        self, artifact: Artifact, *, device: str = "auto", opening: Opening | None = None,
        max_batch_size: int | None = None, max_wait_ms: float = 5.0, min_batch_size: int = 1,
        preferred_batch_sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        _check_batching(max_batch_size, max_wait_ms, min_batch_size, preferred_batch_sizes)
        self._batching: dict[str, Any] = {
            "max_batch_size": max_batch_size, "max_wait_ms": max_wait_ms, "min_batch_size": min_batch_size,
            "preferred_batch_sizes": preferred_batch_sizes,
        }  # fmt: skip
        self.artifact = artifact
        self._program: TensorProgram
        gpu = choose_device(artifact, device, opening)
        if gpu is None:
            self._program = CpuTensorProgram(artifact, artifact.cpu_target())
        else:
            from aotc.runtime.cuda_tensor import CudaTensorProgram

            self._program = CudaTensorProgram(artifact, gpu)
        if preferred_batch_sizes is None:
            self._batching["preferred_batch_sizes"] = self._program.buckets.preferred
        self.plan: Plan = self._program.plan
        self.memory: Memory = self._program.memory
        """Exact bytes of what this model allocated."""
        self._gate, self._signature = Gate(), Signature(self.plan)
        self._batcher: Batcher | None = None
        self._making = threading.Lock()

    def __enter__(self) -> TensorModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory, after calls that run now. Calls raise RequestError afterwards, and so do requests that were
        submitted and have not begun."""
        if self._gate.reason is not None:
            return
        with self._making:
            batcher = self._batcher
        if batcher is not None:
            batcher.close()
        with self._gate.lock:
            if self._gate.close():
                self._program.close()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Names, element types and shapes that a call takes."""
        return self.plan.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Names, element types and shapes of what a call gives."""
        return self.plan.outputs

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Outputs by name. Raises RequestError naming the input that does not fit."""
        given, shapes = self._signature.fit(arrays)
        return dict(zip(self._signature.output_names, self._run(given, shapes), strict=True))

    def _run(self, given: list[np.ndarray], shapes: Shapes | None = None) -> list[np.ndarray]:
        """New arrays of the outputs. Inputs are in order, contiguous; their shapes need not be known."""
        shapes = shapes or self._signature.of(given)
        results = [np.empty(shape, dtype) for shape, dtype in shapes.outputs]
        gate = self._gate
        with gate.lock:
            gate.check()
            self._program.run(given, shapes.dims, results)
        return results

    def bind(self, *, stream: int | None = None, **arrays: Any) -> Binding:
        """A call on these arrays, of all inputs and outputs by name: each run reads and writes them where they lie, with
        no copy and no check. Numpy arrays and all that have `__dlpack__`, contiguous, on the model's device.

        `stream` is the address of a CUDA stream: runs begin in its order and are not waited for. Without it a run has
        ended when the call returns. Raises RequestError naming the array that does not fit.
        """
        return bind(self._program, self._signature, self._gate, arrays, stream)

    def session(self, state: dict[str, str], initial: dict[str, Any] | None = None) -> Session:
        """Calls that keep a state: `state` has names of inputs and of the outputs that are fed back into them at the next
        call; `initial` what they begin with (zeros, where nothing is said). Raises RequestError for what does not fit.
        """
        self._gate.check()
        return Session(self._program, self._signature, self._gate, state, initial)

    def submit(self, *, deadline_ms: float | None = None, **arrays: Any) -> asyncio.Future[dict[str, np.ndarray]]:
        """For an event loop: `await` it for what a call gives, computed together with requests of others. Rows of all
        inputs are along their first axis. The arrays must not be changed before the answer; cancelling drops a request
        that has not begun.

        Raises RequestError where inputs do not fit, or the model has no batch or mixes its rows; the await raises
        DeadlineExceeded where the run did not begin within `deadline_ms`.
        """
        return in_loop(self._submit(arrays, deadline_ms))

    def submit_sync(self, *, deadline_ms: float | None = None, **arrays: Any) -> dict[str, np.ndarray]:
        """The same for threads: waits for the answer."""
        future = self._submit(arrays, deadline_ms)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted

    def _submit(self, arrays: dict[str, Any], deadline_ms: float | None) -> Future[dict[str, np.ndarray]]:
        self._gate.check()
        batcher = self._batcher or self._make_batcher()
        given, _ = self._signature.fit(arrays)
        return batcher.submit(given, deadline_ms)

    def _make_batcher(self) -> Batcher:
        with self._making:
            if self._batcher is None:
                self._batcher = Batcher(self.plan, self._run, **self._batching)
            return self._batcher


def _check_batching(
    max_batch_size: int | None, max_wait_ms: float, min_batch_size: int, preferred: Sequence[int] | None
) -> None:
    for size in preferred or ():
        if size < 1:
            raise RequestError(f"preferred_batch_sizes has {size}: give numbers from 1 on")
    if max_batch_size is not None and max_batch_size < 1:
        raise RequestError(f"max_batch_size is {max_batch_size}: give 1 or more")
    if min_batch_size < 1:
        raise RequestError(f"min_batch_size is {min_batch_size}: give 1 or more")
    if not 0 <= max_wait_ms <= 5:
        raise RequestError(f"max_wait_ms is {max_wait_ms}: give 0 to 5")

"""A tensor model's programs on an NVIDIA GPU: inputs up, graphs, outputs down; or graphs on the caller's own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.artifact.manifest import TargetEntry
from aotc.artifact.reader import Artifact
from aotc.errors import DeviceError
from aotc.runtime import dlpack
from aotc.runtime.binding import Launch
from aotc.runtime.buckets import Buckets
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_program import CudaKernels, CudaProgram
from aotc.runtime.devices.cuda_weights import CudaWeights
from aotc.runtime.devices.driver import CU_EVENT_DISABLE_TIMING
from aotc.runtime.memory import dims_bytes, tensor_memory, tensor_places
from aotc.runtime.session import Slots

_SMALL = 64 << 10  # bytes of a block that goes up in one copy, gaps and all: a copy costs more than they do


class CudaTensorProgram:
    """All memory is taken here, for inputs and outputs at the upper bounds of their dims; a call takes none. The device
    is closed with it. Raises DeviceError, before anything is copied, where the GPU has too little memory.

    The arena is one, so runs follow each other: those of the own stream are waited for, and behind one that was left
    running in a caller's stream, an event stands that the next run waits for.
    """

    devices, alignment = (dlpack.CUDA, dlpack.CUDA_MANAGED), 16  # as kernels were told

    def __init__(self, artifact: Artifact, device: CudaDevice) -> None:
        self.device = device
        self._pending: Any = None  # (stream, event) of a run that nobody waited for
        try:
            device.enter()
            self._load(artifact, device.target_of(artifact))
        except BaseException:
            device.close()
            raise

    def _load(self, artifact: Artifact, target: TargetEntry) -> None:
        device, self.buckets = self.device, Buckets(target.programs)
        self._plans = [artifact.plan(e.plan) for e in self.buckets.entries]
        self.plan = plan = self._plans[-1]
        self._order = [[d.name for d in plan.dims].index(name) for name in target.dims]
        self._dims_bytes = dims_bytes(target)
        begins, up = tensor_places(plan, "input", self._dims_bytes)
        ends, down = tensor_places(plan, "output", 0)
        self._begins, self._ends = [begins[t.name] for t in plan.inputs], [ends[t.name] for t in plan.outputs]
        self.memory = tensor_memory(artifact.manifest, target, plan)
        device.require(self.memory.total, artifact, "give dims a smaller upper bound with --dim")
        self._weights = CudaWeights(artifact, target, device)
        self._inputs, self._outputs = device.allocate(up), device.allocate(down)
        self._host_inputs, self._host_outputs = device.pinned(up), device.pinned(down)
        arena, counters = device.allocate(target.arena_bytes), device.allocate(target.counter_bytes)
        self._bases = {"arena": arena, "counters": counters, "state": 0, "kv": 0, "dims": self._inputs}
        self._bases |= {name: self._inputs + at for name, at in begins.items()}
        self._bases |= {name: self._outputs + at for name, at in ends.items()}
        self._kernels = CudaKernels(device, artifact)
        self._programs = [self._make(n, device, {}) for n in range(len(self._plans))]
        self._weights.upload()
        device.synchronize()

    def _make(self, number: int, device: CudaDevice, places: Mapping[str, int]) -> CudaProgram:
        """A program, with some spaces elsewhere."""
        return CudaProgram(self._plans[number], device, self._kernels, {**self._bases, **places}, self._weights.address)

    def run(
        self, given: Sequence[np.ndarray | None], dims: tuple[int, ...], results: Sequence[np.ndarray | None],
        program: CudaProgram | None = None,
    ) -> None:  # fmt: skip
        """Fills `results`; None is in its place on the GPU. Raises DeviceLostError where the GPU fails; nothing runs
        afterwards."""
        used = 4 * len(self._order)
        self._host_inputs[:used].view(np.int32)[:] = [dims[n] for n in self._order]
        parts = [self._host_inputs[: max(used, 4)]]
        for at, array in zip(self._begins, given, strict=True):
            if array is None:
                continue
            part = self._host_inputs[at : at + array.nbytes]
            part[:] = array.reshape(-1).view(np.uint8)
            parts.append(part)
        if self._host_inputs.nbytes <= _SMALL:
            parts = [self._host_inputs]
        back = [(self._ends[n], array) for n, array in enumerate(results) if array is not None]
        runs = program or self._programs[self.buckets.at(dims)]
        self._guarded(lambda: self._exchange(parts, back, runs), runs.plan.program)
        for at, array in back:
            array.reshape(-1).view(np.uint8)[:] = self._host_outputs[at : at + array.nbytes]

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        """Does it as a step of the device, after which nothing runs any more where it fails."""
        device = self.device
        device.enter()
        device.steps += 1
        try:
            work()
        except DeviceError as error:
            raise device.fail(what, error) from None

    def _exchange(self, parts: list[np.ndarray], back: list[tuple[int, np.ndarray]], program: CudaProgram) -> None:
        device = self.device
        self._follow(device.stream)
        first = self._host_inputs.ctypes.data
        for part in parts:
            if part.nbytes:
                device.upload(self._inputs + part.ctypes.data - first, part)
        program.launch()
        for at, array in back:
            if array.nbytes:
                device.download(self._host_outputs[at : at + array.nbytes], self._outputs + at)
        device.synchronize()

    def _copy(self, copy: Callable[[], None], part: np.ndarray) -> None:
        """A copy of a state, which has ended afterwards."""

        def work() -> None:
            if part.nbytes:
                copy()
            self.device.synchronize()

        self._guarded(work, "copying a state")

    def _follow(self, stream: Any) -> None:
        """What goes into the stream from now on runs after what was left running in another."""
        if self._pending is not None and self._pending[0] != stream:
            self.device.call("cuStreamWaitEvent", stream, self._pending[1], 0)
            self._pending = None

    def _wait(self) -> None:
        if self._pending is not None:
            self.device.call("cuEventSynchronize", self._pending[1])
            self._pending = None

    def stream_for(self, stream: int | None) -> int | None:
        """The address of the stream in which a binding runs."""
        return self.device.stream if stream is None else stream

    def bind(self, addresses: list[int], dims: tuple[int, ...], stream: int | None) -> Launch:
        """Graphs on memory of the caller. Dims have a place of their own, written here."""
        self.device.enter()
        scope = self.device.scope(stream)
        try:
            names = [t.name for t in (*self.plan.inputs, *self.plan.outputs)]
            places = dict(zip(names, addresses, strict=True)) | {"dims": self._place_dims(scope, dims)}
            program = self._make(self.buckets.at(dims), scope, places)
            event = None if stream is None else scope.hold("cuEventDestroy", scope.call("cuEventCreate", CU_EVENT_DISABLE_TIMING))
            self.device.synchronize()
        except BaseException:
            scope.release()
            raise

        def run() -> None:
            self._guarded(lambda: self._start(scope, program, event), program.plan.program)

        return Launch(run, lambda: self._release(scope), program)

    def _place_dims(self, scope: CudaDevice, dims: tuple[int, ...]) -> int:
        if not dims:
            return self._inputs
        block = scope.pinned(self._dims_bytes)
        block[: 4 * len(self._order)].view(np.int32)[:] = [dims[n] for n in self._order]
        address = scope.allocate(self._dims_bytes, zero=False)
        self.device.upload(address, block)
        return address

    def _start(self, scope: CudaDevice, program: CudaProgram, event: Any) -> None:
        self._follow(scope.stream)
        program.launch()
        if event is None:
            scope.synchronize()
        else:
            scope.call("cuEventRecord", event, scope.stream)
            self._pending = (scope.stream, event)

    def _release(self, scope: CudaDevice) -> None:
        self.device.enter()
        self._wait()
        scope.release()

    def feedback(
        self, inputs: list[int], outputs: list[int], like: list[np.ndarray], dims: tuple[int, ...]
    ) -> CudaFeedback:  # fmt: skip
        """States in memory of the GPU."""
        self.device.enter()
        return CudaFeedback(self, inputs, outputs, like, self.buckets.at(dims))

    def close(self) -> None:
        if self._pending is not None and self.device.failure is None:
            self.device.enter()
            self._wait()
        self._host_inputs = self._host_outputs = np.zeros(0, np.uint8)
        self.device.close()


class CudaFeedback:
    """States of a session: two places on the GPU for each, and graphs for both directions: of the program that runs first,
    and of others when they are asked for, where no state says how many rows there are."""

    def __init__(
        self, owner: CudaTensorProgram, inputs: list[int], outputs: list[int], like: list[np.ndarray], first: int
    ) -> None:  # fmt: skip
        self._owner, self._inputs, self._outputs, self._like = owner, inputs, outputs, like
        self._scope = owner.device.scope()
        self._turn = 0  # which of both places the next run reads
        self._programs: dict[int, list[CudaProgram]] = {}  # of both turns, by the program's number
        try:
            self._places = [[self._scope.allocate(max(a.nbytes, 1)) for a in like] for _ in range(2)]
            self._both(first)
        except BaseException:
            self._scope.release()
            raise

    def _make(self, number: int, now: list[int], following: list[int]) -> CudaProgram:
        plan = self._owner.plan
        names = [plan.inputs[n].name for n in self._inputs], [plan.outputs[n].name for n in self._outputs]
        places = zip((*names[0], *names[1]), (*now, *following), strict=True)
        return self._owner._make(number, self._scope, dict(places))

    def run(self, given: Slots, dims: tuple[int, ...], results: Slots) -> None:
        self._owner.run(given, dims, results, self._both(self._owner.buckets.at(dims))[self._turn])
        self._turn = 1 - self._turn

    def _both(self, number: int) -> list[CudaProgram]:
        """A program on both turns. What was made before another one failed is kept."""
        made = self._programs.setdefault(number, [])
        if len(made) < 2:
            self._owner.device.enter()
            for turn in (self._places, self._places[::-1])[len(made) :]:
                made.append(self._make(number, *turn))
            self._owner.device.synchronize()
        return made

    def write(self, state: int, array: np.ndarray) -> None:
        owner, at = self._owner, self._owner._begins[self._inputs[state]]
        part = owner._host_inputs[at : at + array.nbytes]
        part[:] = array.reshape(-1).view(np.uint8)
        owner._copy(lambda: owner.device.upload(self._places[self._turn][state], part), part)

    def read(self, state: int) -> np.ndarray:
        owner, array = self._owner, np.empty_like(self._like[state])
        at = owner._ends[self._outputs[state]]
        part = owner._host_outputs[at : at + array.nbytes]
        owner._copy(lambda: owner.device.download(part, self._places[self._turn][state]), part)
        array.reshape(-1).view(np.uint8)[:] = part
        return array

    def release(self) -> None:
        self._owner._release(self._scope)

"""A tensor model's program on an NVIDIA GPU: inputs up, graphs, outputs down."""

from __future__ import annotations

import numpy as np

from aotc.artifact.manifest import TargetEntry
from aotc.artifact.reader import Artifact
from aotc.errors import DeviceError
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_program import CudaKernels, CudaProgram
from aotc.runtime.devices.cuda_weights import CudaWeights
from aotc.runtime.memory import dims_bytes, tensor_memory, tensor_places

_SMALL = 64 << 10  # bytes of a block that goes up in one copy, gaps and all: a copy costs more than they do


class CudaTensorProgram:
    """All memory is taken here, for inputs and outputs at the upper bounds of their dims; a call takes none. The device
    is closed with it. Raises DeviceError, before anything is copied, where the GPU has too little memory."""

    def __init__(self, artifact: Artifact, device: CudaDevice) -> None:
        self.device = device
        try:
            device.enter()
            self._load(artifact, device.target_of(artifact))
        except BaseException:
            device.close()
            raise

    def _load(self, artifact: Artifact, target: TargetEntry) -> None:
        device, (entry,) = self.device, target.programs
        self.plan = plan = artifact.plan(entry.plan)
        self._dims_order = target.dims
        self._begins, up = tensor_places(plan, "input", dims_bytes(target))
        self._ends, down = tensor_places(plan, "output", 0)
        self.memory = tensor_memory(artifact.manifest, target, plan)
        device.require(self.memory.total, artifact, "give dims a smaller upper bound with --dim")
        weights = CudaWeights(artifact, target, device)
        self._inputs, self._outputs = device.allocate(up), device.allocate(down)
        self._host_inputs, self._host_outputs = device.pinned(up), device.pinned(down)
        bases = {
            "arena": device.allocate(target.arena_bytes), "counters": device.allocate(target.counter_bytes), "state": 0, "kv": 0,
            "dims": self._inputs,
        }  # fmt: skip
        bases |= {name: self._inputs + at for name, at in self._begins.items()}
        bases |= {name: self._outputs + at for name, at in self._ends.items()}
        self._program = CudaProgram(plan, device, CudaKernels(device, artifact), bases, weights.address)
        weights.upload()
        device.synchronize()

    def run(self, given: dict[str, np.ndarray], dims: dict[str, int], results: dict[str, np.ndarray]) -> None:
        """Fills `results`. Raises DeviceLostError where the GPU fails; nothing runs afterwards."""
        device = self.device
        device.enter()
        device.steps += 1
        used = 4 * len(self._dims_order)
        self._host_inputs[:used].view(np.int32)[:] = [dims[name] for name in self._dims_order]
        parts = [self._host_inputs[: max(used, 4)]]
        for name, array in given.items():
            part = self._host_inputs[self._begins[name] : self._begins[name] + array.nbytes]
            part[:] = array.reshape(-1).view(np.uint8)
            parts.append(part)
        if self._host_inputs.nbytes <= _SMALL:
            parts = [self._host_inputs]
        try:
            self._exchange(parts, results)
        except DeviceError as error:
            raise device.fail(self.plan.program, error) from None
        for name, array in results.items():
            array.reshape(-1).view(np.uint8)[:] = self._host_outputs[self._ends[name] : self._ends[name] + array.nbytes]

    def _exchange(self, parts: list[np.ndarray], results: dict[str, np.ndarray]) -> None:
        device = self.device
        first = self._host_inputs.ctypes.data
        for part in parts:
            if part.nbytes:
                device.upload(self._inputs + part.ctypes.data - first, part)
        self._program.launch()
        for name, array in results.items():
            at = self._ends[name]
            if array.nbytes:
                device.download(self._host_outputs[at : at + array.nbytes], self._outputs + at)
        device.synchronize()

    def close(self) -> None:
        self._host_inputs = self._host_outputs = np.zeros(0, np.uint8)
        self.device.close()

"""Runs the steps of an LLM on an NVIDIA GPU: one copy up, one graph, one copy down a step."""

from __future__ import annotations

import numpy as np

from aotc.artifact.manifest import ProgramEntry
from aotc.artifact.reader import Artifact
from aotc.errors import DeviceError
from aotc.runtime.devices.cuda import CudaDevice, CudaKernels, CudaProgram
from aotc.runtime.devices.cuda_weights import upload_weights
from aotc.runtime.executor import LOGPROBS, DeviceExecutor, Memory, StepOutputs
from aotc.runtime.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from aotc.runtime.sequence import Row, Sequence
from aotc.runtime.step_inputs import ALIGNMENT, StepInputs, layout

_MAX_BANS = 2 * MAX_STOP_TOKEN_IDS  # stop ids, and the model's own ends


class CudaExecutor(DeviceExecutor):
    """All memory of a model on a GPU is taken here: weights, arena, a slot of state a sequence, results.

    Raises DeviceError, before anything is copied, where the GPU has too little memory.
    """

    def __init__(self, artifact: Artifact, max_num_seqs: int, device: CudaDevice) -> None:
        super().__init__(artifact, device.target_of(artifact), max_num_seqs)
        self.device, self._kernels = device, CudaKernels(device, artifact)
        rows = self.model.max_rows
        _, step = layout(self.max_num_batched_tokens, rows)
        self._dims_at = step
        dims = -(-4 * max(len(self.target.dims), 1) // ALIGNMENT) * ALIGNMENT
        results = rows * 4 * (1 + 2 * LOGPROBS)
        self._memory = Memory(
            artifact.manifest.weights_bytes, self.target.arena_bytes, self.slot_bytes * self.max_num_seqs,
            self.target.counter_bytes, step + dims,
            rows * self.vocab_size * 4 + results,
        )  # fmt: skip
        self._require(self._memory.total)
        self._weights = device.allocate(self._memory.weights)
        self._arena = device.allocate(self._memory.arena)
        self._state = device.allocate(self._memory.state)
        self._counters = device.allocate(self._memory.scratch)
        self._step = device.allocate(step + dims)
        self._logits = device.allocate(rows * self.vocab_size * 4)
        self._results = device.allocate(results)
        self._host_step = device.pinned(step + dims)
        self.inputs = StepInputs(self._host_step, self.max_num_batched_tokens, rows)
        self._dims = self._host_step[step:].view(np.int32)
        self._host_results = device.pinned(results)
        # Biases and bans of each slot: read by the sampler where they lie, in memory of the host.
        self._bias = device.pinned(self.max_num_seqs * 8 * MAX_LOGIT_BIAS).reshape(self.max_num_seqs, 2, -1)
        self._bans = device.pinned(self.max_num_seqs * 4 * _MAX_BANS).reshape(self.max_num_seqs, -1)
        self._prompt = device.pinned(4 * self.max_model_len).view(np.int32)
        device.synchronize()
        upload_weights(artifact, device, self._weights)
        token, logprobs, ids = np.split(self._host_results, [rows * 4, rows * 4 * (1 + LOGPROBS)])
        self.outputs = StepOutputs(
            token.view(np.int32), logprobs.view(np.float32).reshape(rows, LOGPROBS),
            ids.view(np.int32).reshape(rows, LOGPROBS), np.zeros((0, self.vocab_size), np.float32),
        )  # fmt: skip

    def _require(self, needed: int) -> None:
        free = self.device.free_bytes()
        if needed > free:
            raise DeviceError(
                f"{self.artifact.path} needs {needed / 1e9:.2f} GB on the GPU and {free / 1e9:.2f} GB are free: "
                "serve fewer sequences with --max-num-seqs, or compile with a smaller --max-model-len"
            )

    @property
    def memory(self) -> Memory:
        return self._memory

    def start(self, sequence: Sequence) -> None:
        slot, count = sequence.slot, sequence.prompt_len
        self._prompt[:count] = sequence.request.prompt_token_ids
        self.device.upload(self._state + slot * self.slot_bytes + self._history, self._prompt[:count])
        if sequence.bias:
            ids, values = (self._bias[slot, n].view(d) for n, d in enumerate((np.int32, np.float32)))
            size = len(sequence.bias[0])
            ids[:size], values[:size] = sequence.bias
            sequence.bias = (ids[:size], values[:size])
        if sequence.bans is not None and len(sequence.bans):
            bans = self._bans[slot].view(np.int32)[: len(sequence.bans)]
            bans[:] = sequence.bans
            sequence.bans = bans
        self.device.synchronize()  # the pinned prompt is free for the next sequence

    def _run(self, program: CudaProgram, dims: dict[str, int], rows: list[Row]) -> None:
        device = self.device
        for n, name in enumerate(self.target.dims):
            self._dims[n] = dims[name]
        device.upload(self._step, self._host_step)
        program.launch()
        count = len(rows)
        if any(r.sequence.request.params.logprobs is not None for r in rows):
            device.download(self._host_results, self._results)
        else:
            device.download(self._host_results[: 4 * count], self._results)
        device.synchronize()

    def _load(self, entry: ProgramEntry) -> CudaProgram:
        rows = self.model.max_rows
        bases = {
            "arena": self._arena, "weights": self._weights, "state": self._state, "counters": self._counters,
            "dims": self._step + self._dims_at,
            "logits": self._logits, "token": self._results, "logprobs": self._results + 4 * rows,
            "logprob_ids": self._results + 4 * rows * (1 + LOGPROBS),
        }  # fmt: skip
        bases |= {name: self._step + offset for name, (offset, _, _) in self.inputs.fields.items()}
        return CudaProgram(self.artifact.plan(entry.plan), self.device, self._kernels, bases)

    def logits(self, rows: int) -> np.ndarray:
        """Logits f32 [rows, vocab_size] of the last step, copied from the device: for checks."""
        host = np.empty((rows, self.vocab_size), np.float32)
        self.device.download(host.reshape(-1).view(np.uint8), self._logits)
        self.device.synchronize()
        return host

"""Runs the steps of an LLM on an NVIDIA GPU: one copy up, one graph, one copy down a step, two steps under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from aotc.artifact.manifest import ProgramEntry
from aotc.artifact.reader import Artifact
from aotc.errors import AotcError, DeviceError
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_pages import BUFFERS, CudaPages
from aotc.runtime.devices.cuda_program import CudaKernels, CudaProgram
from aotc.runtime.devices.cuda_weights import CudaWeights
from aotc.runtime.devices.driver import CU_EVENT_DISABLE_TIMING
from aotc.runtime.executor import STANDARD, CacheOptions, DeviceExecutor
from aotc.runtime.memory import LOGPROBS, Memory, decoder_memory, dims_bytes
from aotc.runtime.offload import PageCopy
from aotc.runtime.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from aotc.runtime.sequence import Row, Sequence
from aotc.runtime.step_frame import StepFrame, StepOutputs
from aotc.runtime.step_inputs import StepInputs

_MAX_BANS = 2 * MAX_STOP_TOKEN_IDS  # stop ids, and the model's own ends
_COPY_BYTES = 32 << 20  # of pinned memory for pages on their way out and back
_ADVICE = "serve fewer sequences with --max-num-seqs, or compile with a smaller --max-model-len"


def _seconds(work: Callable[[], object]) -> float:
    """Runs it; how long it took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class _CudaFrame(StepFrame):
    """A step's pinned memory: what goes up, what comes down, prompts of sequences that begin with it, on their way up.
    `ended` is the event after its last copy."""

    def __init__(
        self, inputs: StepInputs, outputs: StepOutputs, results: np.ndarray, prompts: np.ndarray, ended: Any
    ) -> None:
        super().__init__(inputs, outputs)
        self.results, self.prompts, self.ended = results, prompts, ended
        self.used, self.number = 0, 0  # of `prompts`; of the step
        self.program = ""


class CudaExecutor(DeviceExecutor):
    """All memory of a model on a GPU is taken here: weights, arena, a slot of state a sequence, results. The device
    is closed with it.

    Weights go up while kernels are loaded and the graphs of a first request are built; `warm` starts a thread that
    builds the others. Raises DeviceError, before anything is copied, where the GPU has too little memory.
    """

    offload_memory = 4 << 30
    runs_ahead = True

    def __init__(
        self, artifact: Artifact, max_num_seqs: int, device: CudaDevice, cache: CacheOptions = STANDARD
    ) -> None:
        try:
            device.enter()
            target = device.target_of(artifact)
            super().__init__(artifact, target, max_num_seqs, cache, lambda: device.call("cuMemGetInfo")[0])
            self.device, self._kernels = device, CudaKernels(device, artifact)
            self._background: threading.Thread | None = None
            device.enter()
            self._allocate_device()
            with ThreadPoolExecutor(1) as pool:
                weights = pool.submit(_seconds, self._weights.upload)
                self._allocate_host()
                graphs = _seconds(lambda: (self.program("decode", 1), self.program("extend", 1)))
                parts = {"modules": self._kernels.seconds, "graphs": graphs, "weights": weights.result()}
                self.startup = {**device.opened, **parts}
        except BaseException:
            device.close()
            raise

    def _allocate_device(self) -> None:
        device, rows = self.device, self.model.max_rows
        memory = decoder_memory(self.artifact.manifest, self.target, self.cache)
        device.require(memory.total, self.artifact, _ADVICE)
        self._weights = CudaWeights(self.artifact, self.target, device)
        self._arena = device.allocate(memory.arena)
        self._state = device.allocate(memory.state)
        self._kv = device.allocate(memory.kv_cache, zero=False)  # nothing of it is read before it is written
        self._counters = device.allocate(memory.scratch)
        self._step = device.allocate(memory.step)
        self._logits = device.allocate(rows * self.vocab_size * 4)
        self._result_bytes = memory.outputs - rows * self.vocab_size * 4
        self._results = device.allocate(self._result_bytes)
        self._step_bytes = memory.step

    def _allocate_host(self) -> None:
        """One block of pinned memory: of two steps the inputs and dims, results, prompts on their way up; of each slot the
        biases and bans, which the sampler reads where they lie. Last come pages on their way to pageable memory and back:
        no more than there are, and one a buffer at least."""
        device, slots = self.device, self.max_num_seqs
        pages = min(max(_COPY_BYTES // BUFFERS // max(self.page_bytes, 1), 1), -(-self.num_pages // BUFFERS))
        begun = slots * self.max_model_len  # tokens of all that can begin at once, but for pages that they share
        prompts = max(min(begun, self.num_pages * self.page_size or begun), self.max_model_len)
        frame = (self._step_bytes, self._result_bytes, 4 * prompts)
        sizes = (*frame, *frame, slots * 8 * MAX_LOGIT_BIAS, slots * 4 * _MAX_BANS, BUFFERS * pages * self.page_bytes)
        places = np.cumsum([0, *(-(-n // 64) * 64 for n in sizes)])
        block = device.pinned(int(places[-1]))
        self._memory = decoder_memory(self.artifact.manifest, self.target, self.cache, block.nbytes)
        *frames, bias, bans, copies = (block[p : p + n] for p, n in zip(places, sizes, strict=False))
        self._pages = CudaPages(device, self._kv, copies.reshape(BUFFERS, pages, self.page_bytes)) if pages else None
        self._bias, self._bans = bias.reshape(slots, 2, -1), bans.reshape(slots, -1)
        self._frames = [self._frame(*frames[:3]), self._frame(*frames[3:])]  # the next step's first
        self.fields = self._frames[0].inputs.fields  # where the device has a step's inputs

    def _frame(self, step: np.ndarray, results: np.ndarray, prompts: np.ndarray) -> _CudaFrame:
        rows, dims = self.model.max_rows, dims_bytes(self.target) // 4
        inputs = StepInputs(step, self.max_num_batched_tokens, rows, dims, self.cache.max_pages)
        token, logprobs, ids = np.split(results, [rows * 4, rows * 4 * (1 + LOGPROBS)])
        outputs = StepOutputs(
            token.view(np.int32), logprobs.view(np.float32).reshape(rows, LOGPROBS),
            ids.view(np.int32).reshape(rows, LOGPROBS), np.zeros((0, self.vocab_size), np.float32),
        )  # fmt: skip
        ended = self.device.hold("cuEventDestroy", self.device.call("cuEventCreate", CU_EVENT_DISABLE_TIMING))
        return _CudaFrame(inputs, outputs, results, prompts.view(np.int32), ended)

    @property
    def memory(self) -> Memory:
        return self._memory

    def warm(self) -> None:
        """Builds what later requests need in a thread; what is needed before that is built by whoever needs it."""
        if self._background is None:
            self._background = threading.Thread(target=self._build_rest, name="aotc-graphs")
            self._background.start()

    def _build_rest(self) -> None:
        try:
            self.device.enter()
            for entry in self._reachable():
                if self.closed or not threading.main_thread().is_alive():  # the process ends, and waits for this
                    return
                self._load_once(entry)
        except AotcError:  # raised again to whoever needs that program
            return

    def _reachable(self) -> list[ProgramEntry]:
        """The programs that steps of `max_num_seqs` rows can ask for, in the order in which they likely do."""
        most = next((e.bucket for e in self._entries if e.kind == "decode" and e.bucket >= self.max_num_seqs), 0)
        return [e for e in self._entries if e.kind == "extend" or e.bucket <= most]

    def finish_warming(self) -> None:
        """Waits until every program is built."""
        self.warm()
        assert self._background is not None
        self._background.join()

    def close(self) -> None:
        super().close()
        if self._background is not None:
            self._background.join()
        if self._pages is not None:
            self._pages.close()
        with self._loading:
            self._loaded.clear()
            self._bias = self._bans = np.zeros(0)
            self._pages = None
            self.device.close()

    def start(self, sequence: Sequence) -> None:
        self.require_open()
        self.device.enter()
        slot, count, frame = sequence.slot, len(sequence.tokens), self._frames[0]
        if sequence.bias:
            ids, values = (self._bias[slot, n].view(d) for n, d in enumerate((np.int32, np.float32)))
            size = len(sequence.bias[0])
            ids[:size], values[:size] = sequence.bias
            sequence.bias = (ids[:size], values[:size])
        if sequence.bans is not None and len(sequence.bans):
            bans = self._bans[slot].view(np.int32)[: len(sequence.bans)]
            bans[:] = sequence.bans
            sequence.bans = bans
        try:
            if frame.used + count > len(frame.prompts):  # more begin at once than it holds: the first ones go up now
                self.device.synchronize()
                frame.used = 0
            prompt = frame.prompts[frame.used : frame.used + count]
            prompt[:] = sequence.tokens
            frame.used += count
            self.device.upload(self._state + slot * self.slot_bytes + self._history, prompt)
        except DeviceError as error:
            raise self.device.fail("start", error) from None

    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> PageCopy:
        self.require_open()
        assert self._pages is not None
        return self._pages.save(ids, data)

    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> PageCopy:
        self.require_open()
        assert self._pages is not None
        return self._pages.load(data, ids)

    def settle(self) -> None:
        self.device.enter()
        self.device.synchronize()
        if self._pages is not None:
            self._pages.settle()

    def launch(self, rows: list[Row]) -> _CudaFrame:
        device = self.device
        self.require_open()
        device.enter()
        frame = self._frames[0]
        program, dims = self._prepare(frame, rows)
        device.steps += 1
        frame.number, frame.program = device.steps, program.plan.program
        for n, name in enumerate(self.target.dims):
            frame.inputs.dims[n] = dims[name]
        everything = any(r.sequence.request.params.logprobs is not None for r in rows)
        try:
            device.upload(self._step, frame.inputs.used(len(rows)))
            program.launch()
            device.download(frame.results if everything else frame.results[: 4 * len(rows)], self._results)
            device.call("cuEventRecord", frame.ended, device.stream)
        except DeviceError as error:
            raise device.fail(frame.program, error) from None
        self._frames.reverse()
        self._frames[0].used = 0  # its step has ended, as has all that was copied before
        return frame

    def wait(self, step: _CudaFrame) -> StepOutputs:
        self.require_open()
        self.device.enter()
        try:
            self.device.call("cuEventSynchronize", step.ended)
        except DeviceError as error:
            raise self.device.fail(step.program, error, step.number) from None
        return step.outputs

    def _forget_frames(self) -> None:
        self._frames = []

    def _load(self, entry: ProgramEntry) -> CudaProgram:
        self.device.enter()
        rows = self.model.max_rows
        bases = {
            "arena": self._arena, "state": self._state, "kv": self._kv, "counters": self._counters,
            "logits": self._logits, "token": self._results, "logprobs": self._results + 4 * rows,
            "logprob_ids": self._results + 4 * rows * (1 + LOGPROBS),
        }  # fmt: skip
        bases |= {name: self._step + offset for name, (offset, _, _) in self.fields.items()}
        return CudaProgram(self.artifact.plan(entry.plan), self.device, self._kernels, bases, self._weights.address)

    def logits(self, rows: int) -> np.ndarray:
        """Logits f32 [rows, vocab_size] of the last step, copied from the device: for checks."""
        self.device.enter()
        host = np.empty((rows, self.vocab_size), np.float32)
        self.device.download(host.reshape(-1).view(np.uint8), self._logits)
        self.device.synchronize()
        return host

"""Runs the steps of an LLM: fills the step's inputs, picks the program, reads the sampled tokens."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.artifact.manifest import ProgramEntry, TargetEntry
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, RequestError
from aotc.runtime.buckets import Buckets
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, allocate
from aotc.runtime.devices.opening import choose_device
from aotc.runtime.kv_cache import CachePlan, choose_cache, parse_bytes, plan_cache
from aotc.runtime.memory import CLOSED, LOGPROBS, Memory, decoder_memory, weight_bytes
from aotc.runtime.offload import PageCopy
from aotc.runtime.sequence import Row, Sequence
from aotc.runtime.step_frame import StepFrame, StepOutputs
from aotc.runtime.step_inputs import StepInputs, layout

if TYPE_CHECKING:
    from aotc.runtime.devices.opening import Opening

SHARE = 0.8  # of free memory that a cache of pages may take with all else, where nobody says how much


@dataclass(frozen=True)
class CacheOptions:
    """What the user chose: a layout of the KV cache (None: the usual one), and its bytes (None: enough for all sequences
    at their longest, within SHARE of the free memory)."""

    layout: str | None = None
    memory: int | str | None = None
    usual: str = "static"


STANDARD = CacheOptions()


class DeviceExecutor(ABC):
    """What devices have in common. `_load` binds a program to the executor's memory, `launch` and `wait` run steps."""

    runs_ahead = False
    closed = False
    offload_memory = 0  # on a CPU, what pages could be copied to is what they are made of

    def __init__(
        self, artifact: Artifact, target: TargetEntry, max_num_seqs: int, cache: CacheOptions, free: Callable[[], int]
    ) -> None:
        """`free` says how much memory the device has for this model."""
        manifest = artifact.manifest
        if manifest.state is None:
            raise ArtifactError(f"{artifact.path} is no language model")
        self.artifact, self.model, self.target = artifact, manifest.model, target
        kind = choose_cache(manifest, cache.layout, cache.usual)
        seqs, length = min(max_num_seqs, self.model.max_rows), self.model.max_model_len
        budget = None
        if kind.layout == "paged" and cache.memory is None:
            least = decoder_memory(manifest, target, CachePlan(kind, 0, seqs, -(-length // kind.block_tokens))).total
            budget = max(int(SHARE * free()) - least, 0)
        self.cache = plan_cache(kind, seqs, length, parse_bytes(cache.memory), budget)
        self.max_num_seqs, self.page_size = self.cache.seqs, self.cache.page_size
        self.num_pages = self.cache.blocks if self.page_size else 0
        self.page_bytes = self.cache.kind.block_bytes if self.page_size else 0
        self.max_num_batched_tokens, self.max_model_len = self.model.max_tokens, self.model.max_model_len
        self.vocab_size = self.model.vocab_size
        self.slot_bytes = manifest.state.slot_bytes
        self._history = next(f.offset for f in manifest.state.fields if f.name == "history")
        of_layout = [p for p in target.programs if p.kv_layout == kind.layout]
        self._entries = sorted(of_layout, key=lambda p: (p.kind, p.bucket))
        self._buckets = {k: Buckets(e for e in of_layout if e.kind == k) for k in ("decode", "extend")}
        self._loaded: dict[str, Any] = {}
        self._loading = threading.RLock()
        self.startup: dict[str, float] = {}  # seconds of what was done side by side

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """Exact bytes of every allocation."""

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Writes the tokens known so far into the slot's history, which penalties look at."""

    @abstractmethod
    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> PageCopy | None:
        """Copies pages i32 [n] of the KV cache into host memory u8 [n, page_bytes]; what is on its way."""

    @abstractmethod
    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> PageCopy | None:
        """Copies u8 [n, page_bytes] back to pages i32 [n]; what is on its way."""

    @abstractmethod
    def _load(self, entry: ProgramEntry) -> Any:
        """A program on the executor's memory."""

    @abstractmethod
    def launch(self, rows: list[Row]) -> Any:
        """Begins a step; what `wait` takes. Where the host does not know a token yet, `tokens` of its sequence has
        UNKNOWN there: it is what the step before sampled. Raises RequestError after `close`."""

    @abstractmethod
    def wait(self, step: Any) -> StepOutputs:
        """Waits for a step; its results by row, valid until one more step has been launched."""

    def step(self, rows: list[Row]) -> StepOutputs:
        """Runs one step. Results are indexed by row."""
        return self.wait(self.launch(rows))

    def _prepare(self, frame: StepFrame, rows: list[Row]) -> tuple[Any, dict[str, int]]:
        """Fills a frame; the step's program and dims."""
        self.require_open()
        tokens = frame.fill(rows, bool(self.page_size))
        dims = {"tokens": tokens, "rows": len(rows), "slots": self.max_num_seqs, "pages": self.num_pages}
        return self.program("decode" if tokens == len(rows) else "extend", tokens), dims

    def program(self, kind: str, size: int) -> Any:
        """The smallest program of a kind that takes `size` rows or tokens, loaded on first use. Thread-safe."""
        buckets = self._buckets[kind]
        number = buckets.smallest(size)
        if number == len(buckets.entries):
            raise RequestError(f"no {kind} program takes {size}: compile with a larger bucket")
        entry = buckets.entries[number]
        return self._loaded.get(entry.name) or self._load_once(entry)

    def _load_once(self, entry: ProgramEntry) -> Any:
        with self._loading:
            if entry.name not in self._loaded:
                self._loaded[entry.name] = self._load(entry)
            return self._loaded[entry.name]

    def warm(self) -> None:
        """Loads the programs of a first request."""
        self.program("decode", 1)
        self.program("extend", 1)

    def close(self) -> None:
        """Frees all memory. Views of results must not be touched afterwards; steps raise RequestError. May be called
        more than once, and never while a step runs."""
        self.closed = True
        self._loaded.clear()
        self._forget_frames()

    @abstractmethod
    def _forget_frames(self) -> None:
        """Lets go of what the host has of steps."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for what an interrupted step has left running on the device."""

    def require_open(self) -> None:
        """Raises RequestError after `close`."""
        if self.closed:
            raise RequestError(CLOSED)


class CpuExecutor(DeviceExecutor):
    """A model on the CPU: weights are the mapped file."""

    def __init__(self, artifact: Artifact, max_num_seqs: int, cache: CacheOptions = STANDARD) -> None:
        super().__init__(artifact, artifact.cpu_target(), max_num_seqs, cache, _available_bytes)
        self._library = CpuLibrary(artifact.file(self.target.library), self.target.scratch_bytes)
        self.weights = artifact.map_weights(target=self.target)
        self._arena = allocate(self.target.arena_bytes)
        self._state = allocate(self.slot_bytes * self.max_num_seqs)
        self._kv = allocate(self.cache.nbytes)
        rows = self.model.max_rows
        self._step = allocate(layout(self.max_num_batched_tokens, rows, max_pages=self.cache.max_pages)[1])
        inputs = StepInputs(self._step, self.max_num_batched_tokens, rows, max_pages=self.cache.max_pages)
        self._logits = allocate(rows * self.vocab_size * 4)
        self._token, self._logprobs, self._ids = (allocate(rows * 4 * n) for n in (1, LOGPROBS, LOGPROBS))
        outputs = StepOutputs(
            self._token.view(np.int32), self._logprobs.view(np.float32).reshape(rows, LOGPROBS),
            self._ids.view(np.int32).reshape(rows, LOGPROBS), self._logits.view(np.float32).reshape(rows, self.vocab_size),
        )  # fmt: skip
        self._frame: StepFrame | None = StepFrame(inputs, outputs)

    def close(self) -> None:
        super().close()
        none = np.zeros(0, np.uint8)
        self.weights = self._arena = self._state = self._kv = self._step = self._logits = self._token = none
        self._logprobs = self._ids = none

    @property
    def memory(self) -> Memory:
        outputs = sum(a.nbytes for a in (self._logits, self._token, self._logprobs, self._ids))
        return Memory(
            weight_bytes(self.artifact.manifest, self.target), self._arena.nbytes, self._state.nbytes,
            self._library.scratch.nbytes, self._step.nbytes, outputs, kv_cache=self._kv.nbytes,
            kv_blocks=self.cache.blocks,
        )  # fmt: skip

    def start(self, sequence: Sequence) -> None:
        self.require_open()
        history = self.history(sequence.slot)
        history[: len(sequence.tokens)] = sequence.tokens

    def save_pages(self, ids: np.ndarray, data: np.ndarray) -> None:
        self.require_open()
        self._kv.reshape(-1, self.page_bytes).take(ids, 0, data)

    def load_pages(self, data: np.ndarray, ids: np.ndarray) -> None:
        self.require_open()
        self._kv.reshape(-1, self.page_bytes)[ids] = data

    def settle(self) -> None:
        """A step has ended when its call returns."""

    def history(self, slot: int) -> np.ndarray:
        """Token ids i32 [max_model_len] of a slot."""
        begin = slot * self.slot_bytes + self._history
        return self._state[begin : begin + 4 * self.max_model_len].view(np.int32)

    def _forget_frames(self) -> None:
        self._frame = None

    def launch(self, rows: list[Row]) -> StepOutputs:
        self.require_open()
        assert self._frame is not None
        program, dims = self._prepare(self._frame, rows)
        program.run(dims)
        return self._frame.outputs

    def wait(self, step: StepOutputs) -> StepOutputs:
        return step

    def _load(self, entry: ProgramEntry) -> CpuProgram:
        assert self._frame is not None
        inputs = self._frame.inputs
        program = CpuProgram(self.artifact.plan(entry.plan), self._library)
        blocks = {
            "arena": self._arena, "weights": self.weights, "state": self._state, "kv": self._kv,
            "logits": self._logits, "token": self._token, "logprobs": self._logprobs, "logprob_ids": self._ids,
        }  # fmt: skip
        for space in program.plan.spaces:
            if space.kind == "input":
                offset = inputs.fields[space.name][0]
                program.bind(space.kind, space.name, self._step.ctypes.data + offset)
            else:
                program.bind(space.kind, space.name, blocks[space.name].ctypes.data)
        return program


def open_executor(
    artifact: Artifact, max_num_seqs: int, device: str = "auto", opening: Opening | None = None,
    cache: CacheOptions = STANDARD,
) -> DeviceExecutor:  # fmt: skip
    """The executor of a device. `auto` is the GPU where the artifact has code for one and there is one; `opening` is
    what `begin_opening` gave.

    Raises ArtifactError and DeviceError.
    """
    gpu = choose_device(artifact, device, opening)
    if gpu is None:
        return CpuExecutor(artifact, max_num_seqs, cache)
    from aotc.runtime.cuda_executor import CudaExecutor

    return CudaExecutor(artifact, max_num_seqs, gpu, cache)


def _available_bytes() -> int:
    """Memory of this machine that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0

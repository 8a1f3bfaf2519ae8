"""Runs the steps of an LLM on the CPU: fills the step's inputs, picks the program, reads the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aotc.artifact.manifest import ProgramEntry
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, RequestError
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, allocate
from aotc.runtime.sampling import fill_row
from aotc.runtime.sequence import Row, Sequence
from aotc.runtime.step_inputs import StepInputs, layout

LOGPROBS = 21


@dataclass(frozen=True)
class Memory:
    """Exact bytes by what they are for; `total` is everything that this model allocates."""

    weights: int
    arena: int
    state: int
    scratch: int
    step: int
    outputs: int

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.state + self.scratch + self.step + self.outputs


@dataclass(frozen=True)
class StepOutputs:
    """Views of the result block, valid until the next step."""

    token: np.ndarray
    logprobs: np.ndarray
    logprob_ids: np.ndarray
    logits: np.ndarray


class CpuExecutor:
    """All memory of a model, and its programs, loaded on first use; `warm` loads those that a first answer needs."""

    def __init__(self, artifact: Artifact, max_num_seqs: int) -> None:
        manifest = artifact.manifest
        if manifest.state is None:
            raise ArtifactError(f"{artifact.path} is no language model")
        self.artifact, self.model = artifact, manifest.model
        self.target = artifact.cpu_target()
        self.max_num_seqs = min(max_num_seqs, self.model.max_rows)
        self.max_num_batched_tokens, self.max_model_len = self.model.max_tokens, self.model.max_model_len
        self.vocab_size = self.model.vocab_size
        self.slot_bytes = manifest.state.slot_bytes
        self._history = next(f.offset for f in manifest.state.fields if f.name == "history")
        self._library = CpuLibrary(artifact.file(self.target.library), self.target.scratch_bytes)
        self.weights = artifact.map_weights()
        self._arena = allocate(self.target.arena_bytes)
        self._state = allocate(self.slot_bytes * self.max_num_seqs)
        rows = self.model.max_rows
        self._step = allocate(layout(self.max_num_batched_tokens, rows)[1])
        self.inputs = StepInputs(self._step, self.max_num_batched_tokens, rows)
        self._logits = allocate(rows * self.vocab_size * 4)
        self._token, self._logprobs, self._ids = (allocate(rows * 4 * n) for n in (1, LOGPROBS, LOGPROBS))
        self.outputs = StepOutputs(
            self._token.view(np.int32), self._logprobs.view(np.float32).reshape(rows, LOGPROBS),
            self._ids.view(np.int32).reshape(rows, LOGPROBS), self._logits.view(np.float32).reshape(rows, self.vocab_size),
        )  # fmt: skip
        self._entries = sorted(self.target.programs, key=lambda p: (p.kind, p.bucket))
        self._loaded: dict[str, CpuProgram] = {}

    @property
    def memory(self) -> Memory:
        """Exact bytes of every allocation; weights are the mapped file."""
        outputs = sum(a.nbytes for a in (self._logits, self._token, self._logprobs, self._ids))
        return Memory(
            self.weights.nbytes, self._arena.nbytes, self._state.nbytes, self._library.scratch.nbytes, self._step.nbytes,
            outputs,
        )  # fmt: skip

    def program(self, kind: str, size: int) -> CpuProgram:
        """The smallest program of a kind that takes `size` rows or tokens."""
        for entry in self._entries:
            if entry.kind == kind and entry.bucket >= size:
                if entry.name not in self._loaded:
                    self._loaded[entry.name] = self._load(entry)
                return self._loaded[entry.name]
        raise RequestError(f"no {kind} program takes {size}: compile with a larger bucket")

    def warm(self) -> None:
        """Loads the programs of a first request."""
        self.program("decode", 1)
        self.program("extend", 1)

    def start(self, sequence: Sequence) -> None:
        """Writes the prompt into the slot's history, which penalties look at."""
        history = self.history(sequence.slot)
        history[: sequence.prompt_len] = sequence.request.prompt_token_ids

    def history(self, slot: int) -> np.ndarray:
        """Token ids i32 [max_model_len] of a slot."""
        begin = slot * self.slot_bytes + self._history
        return self._state[begin : begin + 4 * self.max_model_len].view(np.int32)

    def step(self, rows: list[Row]) -> StepOutputs:
        """Runs one step. Results are indexed by row."""
        tokens = self._fill(rows)
        if tokens == len(rows):
            self.program("decode", tokens).run({"rows": tokens, "slots": self.max_num_seqs})
        else:
            self.program("extend", tokens).run({"tokens": tokens, "rows": len(rows), "slots": self.max_num_seqs})
        return self.outputs

    def _fill(self, rows: list[Row]) -> int:
        s, at = self.inputs, 0
        for r, (sequence, start, count, samples) in enumerate(rows):
            stop = at + count
            s.tokens[at:stop] = sequence.tokens[start : start + count]
            s.positions[at:stop] = range(start, start + count)
            s.rows[at:stop] = r
            s.query_start[r + 1] = stop
            s.seq_lens[r] = start + count
            s.kv_index[r] = sequence.slot
            # A row in the middle of its prompt samples too; its token is dropped, and overwritten in the history.
            length = start + count if samples else sequence.prompt_len
            _fill_sampler(s.sampler[r], sequence, length)
            at = stop
        return at

    def _load(self, entry: ProgramEntry) -> CpuProgram:
        program = CpuProgram(self.artifact.plan(entry.plan), self._library)
        blocks = {
            "arena": self._arena, "weights": self.weights, "state": self._state, "logits": self._logits,
            "token": self._token, "logprobs": self._logprobs, "logprob_ids": self._ids,
        }  # fmt: skip
        for space in program.plan.spaces:
            if space.kind == "input":
                offset = self.inputs.fields[space.name][0]
                program.bind(space.kind, space.name, self._step.ctypes.data + offset)
            else:
                program.bind(space.kind, space.name, blocks[space.name].ctypes.data)
        return program


def _fill_sampler(row: np.void, sequence: Sequence, history_len: int) -> None:
    request = sequence.request
    bias = sequence.bias
    bans = sequence.bans if sequence.bans is not None else np.zeros(0, np.int32)
    fill_row(
        row, request.params, seed=request.seed, prompt_len=sequence.prompt_len, history_len=history_len,
        choice=request.choice, bias=(bias[0].ctypes.data, bias[1].ctypes.data) if bias else (0, 0),
        ban_ids=bans.ctypes.data if len(bans) else 0, ban_count=len(bans),
    )  # fmt: skip

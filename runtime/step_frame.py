"""What the host writes and reads of one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from aotc.runtime.sampling import fill_row
from aotc.runtime.sequence import Row, Sequence
from aotc.runtime.step_inputs import StepInputs


@dataclass(frozen=True)
class StepOutputs:
    """Views of a result block."""

    token: np.ndarray
    logprobs: np.ndarray
    logprob_ids: np.ndarray
    logits: np.ndarray


class StepFrame:
    """What the host writes and reads of one step: while the device works on one, the host fills another."""

    def __init__(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        self.inputs, self.outputs = inputs, outputs
        rows = len(inputs.seq_lens)
        self._filled: list[tuple[Sequence, object, object] | None] = [None] * rows  # whose rows the sampler's are

    def fill(self, rows: list[Row], paged: bool) -> int:
        """Writes the step's inputs; the number of its tokens. A whole field at a time: an array takes a list as fast as
        two single elements."""
        s, n = self.inputs, len(rows)
        counts = [r.count for r in rows]
        total = sum(counts)
        if total == n:
            s.tokens[:n] = [r.sequence.tokens[r.start] for r in rows]
            s.positions[:n] = [r.start for r in rows]
            s.rows[:n] = range(n)
        else:
            s.tokens[:total] = [t for r in rows for t in r.sequence.tokens[r.start : r.start + r.count]]
            s.positions[:total] = [p for r in rows for p in range(r.start, r.start + r.count)]
            s.rows[:total] = [i for i, count in enumerate(counts) for _ in range(count)]
        s.query_start[1 : n + 1] = list(accumulate(counts))
        s.seq_lens[:n] = [r.start + r.count for r in rows]
        s.kv_index[:n] = [r.sequence.slot for r in rows]
        if paged:
            for i, row in enumerate(rows):
                pages = row.sequence.pages
                assert pages is not None
                s.block_table[i, : pages.count] = pages.ids[: pages.count]
        self._fill_samplers(rows)
        return total

    def _fill_samplers(self, rows: list[Row]) -> None:
        """Between steps of a sequence only the length of its history changes."""
        samplers = self.inputs.sampler
        for i, row in enumerate(rows):
            sequence = row.sequence
            filled = self._filled[i]
            if filled is None or filled[0] is not sequence or filled[1] is not sequence.bias or filled[2] is not sequence.bans:
                _fill_sampler(samplers[i], sequence)
                self._filled[i] = (sequence, sequence.bias, sequence.bans)
        # A row in the middle of its tokens samples too; its token is dropped, and overwritten in the history.
        lengths = [r.start + r.count if r.samples else len(r.sequence.tokens) for r in rows]
        samplers["history_len"][: len(rows)] = lengths


def _fill_sampler(row: np.void, sequence: Sequence) -> None:
    request = sequence.request
    bias = sequence.bias
    bans = sequence.bans if sequence.bans is not None else np.zeros(0, np.int32)
    fill_row(
        row, request.params, seed=request.seed, prompt_len=sequence.prompt_len,
        choice=request.choice, bias=(bias[0].ctypes.data, bias[1].ctypes.data) if bias else (0, 0),
        ban_ids=bans.ctypes.data if len(bans) else 0, ban_count=len(bans),
    )  # fmt: skip

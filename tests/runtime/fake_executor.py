"""A device whose next token is a hash of the history, a clock that stands still, and engines over both."""

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aotc.runtime.engine import Engine
from aotc.runtime.offload import Costs
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import UNKNOWN, Request

VOCAB = 50
EOS = 7
COPY, COMPUTE = Costs(1.0, 0.0, fixed=True), Costs(0.0, 1.0, fixed=True)  # what preempted sequences do


def next_token(history, seed=0):
    """What the fake model says after `history`."""
    return zlib.crc32(np.array([seed, *history], np.int64).tobytes()) % VOCAB


class Clock:
    """Seconds, as a test sets them."""

    now = 0.0

    def __call__(self):
        return self.now


USUAL = {"runs_ahead": False}  # what a test does not say: the fixture both_ways tries either


@dataclass(eq=False)
class Result:
    token: np.ndarray
    logprobs: np.ndarray
    logprob_ids: np.ndarray
    rows: list


@dataclass
class SlowSave:
    """Copies `most` pages whenever it is asked to go on, the last ones first."""

    pages: np.ndarray
    ids: np.ndarray
    data: np.ndarray
    most: int
    took = (0, 0.0)

    def __post_init__(self):
        self.left, self.stopped = len(self.ids), False

    def go_on(self):
        assert not self.stopped
        count = min(self.most, self.left)
        self.left -= count
        self.move(slice(self.left, self.left + count))
        return self.left

    def move(self, part):
        self.data[part] = self.pages[self.ids[part]]

    def stop(self):
        self.stopped = True


class SlowLoad(SlowSave):
    """The other way."""

    def move(self, part):
        self.pages[self.ids[part]] = self.data[part]


@dataclass
class FakeExecutor:
    """Keeps a cache of tokens a slot and checks every step against it: order, budget, slots. With pages, tokens lie where
    the block table says, and are read back from there. Where it runs ahead, it takes UNKNOWN for the token that the step
    before sampled in that slot, and gives nothing away before its step is waited for, in order, one step late at most."""

    max_num_seqs: int = 3
    max_num_batched_tokens: int = 8
    max_model_len: int = 40
    vocab_size: int = VOCAB
    poisoned: frozenset[str] = frozenset()
    num_pages: int = 0
    page_size: int = 4
    offload_memory: int = 0
    staging: int = 0  # pages that go on at once where copies take time
    runs_ahead: bool = field(default_factory=lambda: USUAL["runs_ahead"])
    cache: dict[int, list[int] | None] = field(default_factory=dict)
    left: dict[int, list[int] | None] = field(default_factory=dict)
    steps: list[list[tuple[str, int, bool]]] = field(default_factory=list)
    copied: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self):
        self.page_bytes = 8 * self.page_size
        self.pages = np.full((self.num_pages, self.page_size), -1)
        self.launched = deque()
        self.sampled = {}  # by slot: the position, and the token

    def start(self, sequence):
        assert 0 <= sequence.slot < self.max_num_seqs
        self.left[sequence.slot] = self.cache.get(sequence.slot)
        self.cache[sequence.slot] = None

    def save_pages(self, ids, data):
        self.copied.append(("save", len(ids)))
        return self._copy(SlowSave(self.pages, ids.copy(), data.view(np.int64), self.staging))

    def load_pages(self, data, ids):
        self.copied.append(("load", len(ids)))
        return self._copy(SlowLoad(self.pages, ids.copy(), data.view(np.int64), self.staging))

    def _copy(self, copy):
        if self.staging:
            return copy
        copy.most = len(copy.ids)
        assert copy.go_on() == 0
        return None

    def launch(self, rows):
        assert len(self.launched) < (2 if self.runs_ahead else 1), "a step too far ahead"
        self.launched.append(self.step(rows))
        return self.launched[-1]

    def wait(self, step):
        while step in self.launched:
            done = self.launched.popleft()
            assert done is step or all(r.sequence.ended for r in done.rows), "a step whose tokens nobody took"
        return step

    def settle(self):
        self.launched.clear()

    def step(self, rows):
        assert 0 < len(rows) <= self.max_num_seqs
        assert 0 < sum(r.count for r in rows) <= self.max_num_batched_tokens
        assert len({r.sequence.slot for r in rows}) == len(rows)
        result = Result(np.zeros(len(rows), np.int32), np.zeros((len(rows), 21), np.float32),
                        np.full((len(rows), 21), -1, np.int32), rows)  # fmt: skip
        for n, (sequence, start, count, samples) in enumerate(rows):
            cache = self.cache[sequence.slot]
            if cache is None:  # what it begins with: nothing, or what is in its pages, or what its session left here
                if self.num_pages:
                    places = sequence.pages.ids[: -(-start // self.page_size)] if start else []
                    cache = self.pages[places].reshape(-1)[:start].tolist()
                else:
                    cache = (self.left[sequence.slot] or [])[:start]
                self.cache[sequence.slot] = cache
            assert count > 0 and start == len(cache)
            fed = sequence.tokens[start : start + count]
            if UNKNOWN in fed:
                assert self.launched, "the step before has ended: its tokens are known"
                assert len(fed) == 1 and self.sampled[sequence.slot][0] == start
                fed = [max(self.sampled[sequence.slot][1], 0)]  # of a poisoned one the device has no token
            cache += fed
            if self.num_pages:
                self._write(sequence, start, cache, rows)
            assert samples == (start + count == len(sequence.tokens))
            poisoned = sequence.request.request_id in self.poisoned
            result.token[n] = -1 if poisoned else next_token(cache, sequence.request.seed)
            self.sampled[sequence.slot] = len(cache), int(result.token[n])
            result.logprob_ids[n, :3] = result.token[n], 1, 2
            result.logprobs[n, :3] = -0.5, -0.25, -1
        self.steps.append([(r.sequence.request.request_id, r.count, r.samples) for r in rows])
        return result

    def _write(self, sequence, start, cache, rows):
        mine = sequence.pages.ids[: sequence.pages.count]
        assert len(mine) == -(-len(cache) // self.page_size), "a page too many or too few"
        others = {p for r in rows if r.sequence is not sequence for p in r.sequence.pages.ids[: r.sequence.pages.count]}
        for p in range(start, len(cache)):
            page = mine[p // self.page_size]
            assert page not in others, "two sequences write to one page"
            self.pages[page, p % self.page_size] = cache[p]
        assert self.pages[mine].reshape(-1)[: len(cache)].tolist() == cache, "another sequence wrote here"


def request(name, prompt, seed=0, priority=0, deadline=None, salt="", session="", **fields):
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **fields})
    turn = {"priority": priority, "deadline": deadline, "cache_salt": salt, "session": session}
    return Request(name, tuple(prompt), params, seed, **turn)


def run(engine, outputs=None, steps=500):
    """Steps until all is done; returns request id -> list of its outputs."""
    outputs = {} if outputs is None else outputs
    while engine.has_work:
        steps -= 1
        assert steps, "the engine makes no progress"
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs, name):
    return [o.token_id for o in outputs.get(name, [])]


def expected(prompt, count, seed=0):
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, seed))
    return history[len(prompt) :]


def all_free(engine, executor):
    """Nothing waits or runs, and every slot, page and byte of host memory was given back."""
    pool = engine.scheduler.pool
    whole = pool is None or pool.free_pages == pool.num_pages and not engine.offload.used
    return engine.scheduler.free_slots == executor.max_num_seqs and not engine.has_work and whole


def make(eos=(EOS,), options=None, **fields):
    """An engine with these options over a device with these fields."""
    executor = FakeExecutor(**fields)
    return Engine(executor, eos, **{"clock": Clock(), **(options or {})}), executor

"""Sampling: settings, the C++ kernel against the reference, and both against plain probabilities."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotc.errors import RequestError
from aotc.ir.ops import sample_reference as reference
from aotc.runtime.sampling import SAMPLER_DTYPE, SamplingParams, fill_row

HEADER = Path(__file__).parents[2] / "codegen/cpu/lib/sampler.h"
SHIM = """
#include "sampler.h"
extern "C" {
size_t scratch_bytes(int vocab) { return sample_scratch_bytes(vocab); }
void sample(const float* logits, int vocab, const SamplerRow* row, const int32_t* history, void* scratch,
            int32_t* token, float* logprobs, int32_t* ids) {
    sample_row(logits, vocab, row, history, scratch, token, logprobs, ids);
}
void count(const float* logits, int vocab, SamplerRow* row, const int32_t* history, void* scratch, int draws,
           int64_t* counts) {
    int32_t token, ids[21];
    float logprobs[21];
    for (int i = 0; i < draws; ++i) {
        row->counter_base = i;
        sample_row(logits, vocab, row, history, scratch, &token, logprobs, ids);
        ++counts[token];
    }
}
void philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
    sampler::philox4x32(counter, key, out);
}
}
"""


def compile_cpp(folder: Path, source: str, name: str, *flags: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (folder / f"{name}.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", *flags]
    subprocess.run([*command, f"{name}.cpp", "-o", name], cwd=folder, check=True)
    return folder / name


@dataclass
class Case:
    """One call: plain values, and the row that points to them."""

    logits: np.ndarray
    history: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    mask: np.ndarray | None = None  # u32 words
    settings: dict[str, Any] = field(default_factory=dict)

    def row(self) -> np.void:
        self.bias_ids = np.array(list(self.bias), np.int32)
        self.bias_values = np.array(list(self.bias.values()), np.float32)
        self.ban_ids = np.array(self.banned, np.int32)
        row = np.zeros(1, SAMPLER_DTYPE)[0]
        addresses = {"bias_ids": self.bias_ids, "bias_values": self.bias_values, "ban_ids": self.ban_ids}
        values = {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "n_logprobs": -1}
        values |= {name: array.ctypes.data for name, array in addresses.items()}
        values |= {"bias_count": len(self.bias), "ban_count": len(self.banned)}
        values |= {"history_len": len(self.history)}
        if self.mask is not None:
            values |= {"mask": self.mask.ctypes.data, "mask_words": len(self.mask)}
        for name, value in (values | self.settings).items():
            row[name] = value
        return row


class Kernel:
    """sampler.h behind the reference's signature."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.scratch_bytes.restype = ctypes.c_size_t

    def __call__(self, case: Case) -> reference.Sampled:
        row, logits = case.row(), np.ascontiguousarray(case.logits, np.float32)
        history = np.ascontiguousarray(case.history, np.int32)
        guard = 64
        size = self.library.scratch_bytes(len(logits))
        scratch = np.full(size + guard, 0xA5, np.uint8)
        token = np.zeros(1, np.int32)
        logprobs, ids = np.full(21, np.nan, np.float32), np.full(21, 99, np.int32)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (history, scratch, token, logprobs, ids)]
        settings = np.array([row], SAMPLER_DTYPE)
        self.library.sample(
            ctypes.c_void_p(logits.ctypes.data), len(logits), ctypes.c_void_p(settings.ctypes.data), *pointers
        )
        assert (scratch[size:] == 0xA5).all(), "wrote past its scratch memory"
        return reference.Sampled(int(token[0]), logprobs, ids, 0)

    def count(self, case: Case, draws: int) -> np.ndarray:
        """How often each token comes in `draws` calls that differ in `counter_base` only."""
        row, logits = np.array([case.row()]), np.asarray(case.logits, np.float32)
        counts = np.zeros(len(logits), np.int64)
        scratch = np.zeros(self.library.scratch_bytes(len(logits)), np.uint8)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (row, case.history, scratch, counts, logits)]
        self.library.count(pointers[4], len(logits), *pointers[:3], draws, pointers[3])
        return counts


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = compile_cpp(tmp_path_factory.mktemp("sampler"), SHIM, "sampler.so", "-shared", "-fPIC")
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def kernel(library: ctypes.CDLL) -> Kernel:
    return Kernel(library)


def refer(case: Case) -> reference.Sampled:
    return reference.sample_row(np.asarray(case.logits, np.float32), case.row(), case.history)


# --- the format ---


def test_row_has_the_same_layout_in_numpy_in_c_and_in_the_reference(tmp_path: Path) -> None:
    names = SAMPLER_DTYPE.names or ()
    prints = "".join(f'printf("%zu %zu\\n", offsetof(R, {n}), sizeof(R::{n}));' for n in names)
    source = f'#include "sampler.h"\n#include <stdio.h>\nusing R = SamplerRow;\nint main() {{ {prints} }}'
    printed = subprocess.check_output([compile_cpp(tmp_path, source, "offsets")], text=True)
    in_c = [tuple(map(int, line.split())) for line in printed.splitlines()]
    fields: Any = SAMPLER_DTYPE.fields
    assert in_c == [(fields[n][1], fields[n][0].itemsize) for n in names]
    assert SAMPLER_DTYPE.itemsize == 128
    assert reference.ROW.fields == fields


def test_kernel_needs_no_libm_and_no_cpp_runtime(library: ctypes.CDLL) -> None:
    listed = subprocess.run(["nm", "-uD", library._name], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[1].split("@")[0] for line in listed.splitlines() if line.split()[0] == "U"}
    assert needed <= {"memcpy", "memset", "__stack_chk_fail"}


def test_kernel_refuses_fast_math(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compile_cpp(tmp_path, SHIM, "fast.so", "-shared", "-fPIC", "-ffast-math")


# counter, key, output: kat_vectors of Random123, "philox4x32 10"
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "output"), PHILOX)
def test_philox_known_answers(library: ctypes.CDLL, counter: str, key: str, output: str) -> None:
    words = [np.array([int(w, 16) for w in text.split()], np.uint32) for text in (counter, key, output)]
    assert (reference.philox4x32(words[0], words[1]) == words[2]).all()
    out = np.zeros(4, np.uint32)
    library.philox(*(ctypes.c_void_p(a.ctypes.data) for a in (words[0], words[1], out)))
    assert (out == words[2]).all()


# --- the kernel against the reference ---


def random_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    kind = rng.integers(5)
    if kind == 0:
        return rng.normal(0, rng.choice([0.01, 1, 4, 30]), vocab).astype(np.float32)
    if kind == 1:  # many equal ones
        return rng.integers(-3, 4, vocab).astype(np.float32)
    if kind == 2:
        return np.sort(rng.normal(0, 2, vocab)).astype(np.float32)
    if kind == 3:
        return np.full(vocab, rng.normal(), np.float32)
    x = rng.normal(0, 3, vocab).astype(np.float32)
    x[rng.random(vocab) < 0.5] = -np.inf
    return x


def random_case(rng: np.random.Generator) -> Case:
    vocab = int(rng.choice([1, 2, 17, 256, 257, 1000, 5003]))
    length = int(rng.integers(0, 40))
    maybe = rng.random(12) < 0.4
    settings: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.0, 1.5, 50.0]),
        "top_k": rng.choice([1, 2, 5, 50, 4000]) if maybe[0] else 0,
        "top_p": rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999]) if maybe[1] else 1,
        "min_p": rng.choice([1e-5, 0.01, 0.3, 1.0]) if maybe[2] else 0,
        "repetition_penalty": rng.choice([0.5, 1.3]) if maybe[3] else 1,
        "presence_penalty": rng.choice([-1.5, 0.5]) if maybe[4] else 0,
        "frequency_penalty": rng.choice([-0.2, 0.3]) if maybe[5] else 0,
        "n_logprobs": rng.choice([0, 1, 5, 20]) if maybe[6] else -1,
        "prompt_len": rng.integers(0, length + 1),
        "seed": rng.integers(0, 2**63),
        "counter_base": rng.integers(0, 2**40),
        "ban_until": length + rng.integers(0, 2),
    }
    history = rng.integers(-1, vocab + 1, length).astype(np.int32)
    case = Case(random_logits(rng, vocab), history, settings=settings)
    if maybe[7]:
        ids = rng.choice(vocab + 2, min(vocab, 6), replace=False)
        case.bias = {int(i): float(rng.choice([-100, -1, 0.5, 100])) for i in ids}
    if maybe[8]:
        case.banned = tuple(int(i) for i in rng.integers(-1, vocab + 1, 3))
    if maybe[9]:
        words = max(1, (vocab + 31) // 32 - int(rng.integers(0, 2)))
        case.mask = rng.integers(0, 2**32, words, dtype=np.uint32)
    return case


def test_kernel_samples_what_the_reference_samples(kernel: Kernel) -> None:
    rng = np.random.default_rng(1)
    excused, kinds, cases = 0, Counter(), 3000
    for number in range(cases):
        case = random_case(rng)
        ours, expected = kernel(case), refer(case)
        kinds[min(expected.token, 0)] += 1
        if expected.margin < 1e-6 and ours.token != expected.token:
            excused += 1
            continue
        assert ours.token == expected.token, f"case {number}: {case.settings}"
        assert (ours.ids == expected.ids).all(), f"case {number}: {case.settings}"
        assert np.allclose(ours.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5), f"case {number}"
    assert excused < cases // 500
    assert kinds[0] > cases // 2 and kinds[reference.EMPTY] > 10  # the cases reach both


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.95}, {"top_k": 700}, {"min_p": 0.02, "n_logprobs": 20}])
def test_kernel_agrees_at_the_size_of_a_real_vocabulary(kernel: Kernel, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    for _ in range(3):
        logits = rng.normal(0, 4, 128256).astype(np.float32)
        case = Case(logits, settings=settings | {"seed": rng.integers(2**62)})
        expected = refer(case)
        assert expected.margin < 1e-6 or kernel(case).token == expected.token


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 3}, {"temperature": 0, "n_logprobs": 2}])
def test_bad_logits_never_give_a_token(kernel: Kernel, settings: dict[str, Any]) -> None:
    for vocab in (1, 40, 1000):
        for place in (0, vocab // 2, vocab - 1):
            for bad in (np.nan, -np.nan, np.inf):
                logits = np.zeros(vocab, np.float32)
                logits[place] = bad
                mask = np.zeros((vocab + 31) // 32, np.uint32)  # does not hide what is wrong
                for case in (Case(logits, settings=settings), Case(logits, mask=mask, settings=settings)):
                    assert kernel(case).token == refer(case).token == reference.NAN
        for case in (
            Case(np.full(vocab, -np.inf), settings=settings),
            Case(np.zeros(vocab), mask=np.zeros(1, np.uint32), settings=settings),
            Case(np.zeros(1), banned=(0,), settings=settings | {"ban_until": 9}),
        ):
            got = kernel(case)
            assert got.token == refer(case).token == reference.EMPTY
            assert (got.ids == -1).all() and (got.logprobs == 0).all()


def test_penalties_that_overflow_are_reported(kernel: Kernel) -> None:
    settings = {"repetition_penalty": 0.01, "temperature": 0}
    case = Case(np.array([3e38, 0], np.float32), np.zeros(1, np.int32), settings=settings)
    assert kernel(case).token == refer(case).token == reference.NAN


def test_greedy_takes_the_first_of_equal_logits(kernel: Kernel) -> None:
    rng = np.random.default_rng(3)
    for vocab in (1, 5, 255, 256, 257, 4096, 49152):
        logits = rng.integers(0, 3, vocab).astype(np.float32)
        assert kernel(Case(logits, settings={"temperature": 0})).token == int(np.argmax(logits))


def test_logprobs_are_of_the_raw_logits(kernel: Kernel) -> None:
    logits = np.array([1, 3, 2, 3], np.float32)
    plain = logits - math.log(np.exp(logits.astype(np.float64)).sum())
    got = kernel(Case(logits, bias={0: 100}, settings={"temperature": 0, "n_logprobs": 3}))
    assert got.ids[:5].tolist() == [
        0,
        1,
        3,
        2,
        -1,
    ]  # the sampled one, then the best, of equal ones the lower id
    assert np.allclose(got.logprobs[:4], plain[[0, 1, 3, 2]], atol=1e-6)


def test_a_token_depends_on_seed_and_position_only(kernel: Kernel) -> None:
    logits = np.random.default_rng(4).normal(0, 1, 1000).astype(np.float32)
    tokens = {
        (seed, choice, position): kernel(
            Case(logits, settings={"seed": seed, "counter_base": choice, "history_len": position})
        ).token
        for seed in (0, 1, 2**64 - 1)
        for choice in (0, 1, 2**33)
        for position in range(20)
    }
    assert len(set(tokens.values())) > 150
    settings = {"seed": 1, "counter_base": 1, "history_len": 7, "prompt_len": 3}
    assert kernel(Case(logits, settings=settings)).token == tokens[1, 1, 7]


# --- both against plain probabilities ---

LOGITS = np.log(np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], np.float64)).astype(np.float32)
P = np.exp(LOGITS.astype(np.float64))
HISTORY = np.array([0, 0, 1, 1, 2, 1], np.int32)


def kept(*ids: int) -> np.ndarray:
    return np.where(np.isin(np.arange(8), ids), P, 0)


DISTRIBUTIONS = {
    "plain": (Case(LOGITS), P),
    "shifted": (Case(LOGITS + 500), P),
    "hot": (Case(LOGITS, settings={"temperature": 2}), P**0.5),
    "cold": (Case(LOGITS, settings={"temperature": 0.5}), P**2),
    "top_k": (Case(LOGITS, settings={"top_k": 3}), kept(0, 1, 2)),
    "top_k keeps equal ones": (Case(LOGITS, settings={"top_k": 4}), kept(0, 1, 2, 3, 4)),
    "top_p": (Case(LOGITS, settings={"top_p": 0.6}), kept(0, 1, 2)),
    "top_p of what top_k left": (Case(LOGITS, settings={"top_p": 0.7, "top_k": 3}), kept(0, 1)),
    "top_p after temperature": (Case(LOGITS, settings={"top_p": 0.6, "temperature": 0.5}), kept(0, 1) ** 2),
    "min_p": (Case(LOGITS, settings={"min_p": 0.25}), kept(0, 1, 2, 3, 4, 5)),
    "min_p after heat": (Case(LOGITS, settings={"min_p": 0.6, "temperature": 2}), kept(0, 1, 2) ** 0.5),
    "bias": (Case(LOGITS, bias={7: math.log(20), 0: -100}), P * [0, 1, 1, 1, 1, 1, 1, 20]),
    "mask": (Case(LOGITS, mask=np.array([0b10100110], np.uint32)), kept(1, 2, 5, 7)),
    "ban": (Case(LOGITS, banned=(0, 4), settings={"ban_until": 1}), kept(1, 2, 3, 5, 6, 7)),
    "ban is over": (Case(LOGITS, banned=(0, 4), settings={"ban_until": 0}), P),
    "frequency": (
        Case(LOGITS, HISTORY, settings={"prompt_len": 2, "frequency_penalty": 0.5}),
        P * np.exp(-0.5 * np.array([0, 3, 1, 0, 0, 0, 0, 0])),
    ),
    "presence": (
        Case(LOGITS, HISTORY, settings={"prompt_len": 2, "presence_penalty": 1}),
        P * np.exp([0, -1, -1, 0, 0, 0, 0, 0]),
    ),
    "repetition of negative logits": (
        Case(LOGITS, HISTORY[:3], settings={"prompt_len": 2, "repetition_penalty": 1.5}),
        np.where([1, 1, 0, 0, 0, 0, 0, 0], P**1.5, P),
    ),
    "repetition of positive logits": (
        Case(LOGITS + 4, HISTORY[:3], settings={"prompt_len": 2, "repetition_penalty": 1.5}),
        np.where([1, 1, 0, 0, 0, 0, 0, 0], np.exp((np.log(P) + 4) / 1.5), P * np.exp(4)),
    ),
}


def chi_square_limit(freedom: int) -> float:
    """The chi-square that chance exceeds once in about 100,000 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def refer_count(case: Case, draws: int) -> np.ndarray:
    row, logits = case.row(), np.asarray(case.logits, np.float32)
    counts = np.zeros(len(logits))
    for i in range(draws):
        row["counter_base"] = i
        counts[reference.sample_row(logits, row, case.history).token] += 1
    return counts


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_filters_give_the_probabilities_they_promise(kernel: Kernel, name: str) -> None:
    case, weights = DISTRIBUTIONS[name]
    for count, draws in ((kernel.count, 200_000), (refer_count, 1_000)):
        expected = weights / weights.sum() * draws
        possible = expected > 0
        counts = count(case, draws)
        assert counts[~possible].sum() == 0
        distance = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert distance < chi_square_limit(max(possible.sum() - 1, 1))


# --- settings of a request ---

WRONG = [
    ("max_tokens", [0, -1, 2**31, 1.5, True, "4"]),
    ("min_tokens", [-1, 2**31, None]),
    ("temperature", [-0.1, math.nan, math.inf, 1001, "1", True, 10**400]),
    ("top_k", [-2, 2**31, 1.0]),
    ("top_p", [0, -1, 1.01, math.nan]),
    ("min_p", [-0.01, 1.01, math.nan]),
    ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("logit_bias", [{-1: 0}, {2**31: 0}, {"5": 1}, {1: 100.5}, {1: math.nan}, [1], None]),
    ("logit_bias", [dict.fromkeys(range(1025), 0)]),
    ("seed", [-1, 2**64, 0.5, 10**5000]),
    ("stop", ["", ["a"] * 17, ["a", 1], ["a" * 1025], 3, None]),
    ("stop_token_ids", [[-1], [2**31], [True], 3, list(range(129)), None]),
    ("include_stop_str_in_output", [1, "yes"]),
    ("skip_special_tokens", [None]),
    ("ignore_eos", [0]),
    ("logprobs", [-1, 21, True]),
    ("n", [0, -1, 129, None]),
]


@pytest.mark.parametrize(("name", "values"), WRONG, ids=[name for name, _ in WRONG])
def test_settings_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=name) as refused:
            SamplingParams(**{name: value})
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 150


def test_settings_are_normalised() -> None:
    given: dict[str, Any] = {"stop": ["a", "b"], "seed": np.int64(3), "temperature": np.float32(0.5)}
    end: dict[str, Any] = {"stop": "end"}
    params = SamplingParams(top_k=-1, logit_bias={4: 1}, **given)
    assert (params.top_k, params.stop, params.seed, params.temperature) == (0, ("a", "b"), 3, 0.5)
    assert SamplingParams(**end).stop == ("end",) and not params.greedy
    assert SamplingParams(temperature=0).greedy and hash(params)
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_ids_out_of_the_vocabulary_are_refused() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=(9,)).check_vocab(10)
    with pytest.raises(RequestError, match="logit_bias must hold token ids below 10, got 10"):
        SamplingParams(logit_bias={10: 1}).check_vocab(10)
    with pytest.raises(RequestError, match="stop_token_ids must hold token ids below 10"):
        SamplingParams(stop_token_ids=(11,)).check_vocab(10)


def test_filled_row_does_what_the_settings_say(kernel: Kernel) -> None:
    bias = {2: 50, 3: 40}
    params = SamplingParams(temperature=0, logit_bias=bias, min_tokens=2, stop_token_ids=(2,), logprobs=1)
    ids, values = params.bias_arrays()
    banned = params.banned_ids([0])
    assert banned.tolist() == [0, 2]
    rows = np.full(128, 0xFF, np.uint8).view(SAMPLER_DTYPE)
    fill_row(
        rows[0], params, seed=1, prompt_len=3, bias=(ids.ctypes.data, values.ctypes.data),
        ban_ids=banned.ctypes.data, ban_count=len(banned),
    )  # fmt: skip
    history = np.array([1, 1, 1, 3, 3, 2], np.int32)
    tokens = []
    for length in (3, 4, 5):
        rows[0]["history_len"] = length
        tokens.append(reference.sample_row(np.zeros(5, np.float32), rows[0], history).token)
    assert tokens == [3, 3, 2]  # the stop token only after two tokens of output
    assert rows["n_logprobs"] == 1 and (rows["reserved"] == 0).all()
    with pytest.raises(ValueError, match="logit_bias"):
        fill_row(rows[0], params, seed=1, prompt_len=3)


def test_a_batch_of_the_reference_appends_to_its_histories() -> None:
    logits = np.array([[0, 1, 2], [np.nan, 0, 0]], np.float32)
    rows = np.zeros(2, SAMPLER_DTYPE)
    for row, length in zip(rows, (2, 0), strict=True):
        fill_row(row, SamplingParams(temperature=0, logprobs=0), seed=0, prompt_len=length)
    history = np.full((3, 4), 7, np.int32)
    index = np.array([2, 0], np.int32)
    settings = rows.view(np.uint8).reshape(2, 128)
    tokens, logprobs, ids, history = reference.sample_rows(logits, settings, history, index)
    assert tokens.tolist() == [2, reference.NAN]
    assert history.tolist() == [[7, 7, 7, 7], [7, 7, 7, 7], [7, 7, 2, 7]]
    assert ids[:, 0].tolist() == [2, -1] and logprobs.shape == (2, 21) and logprobs[0, 0] < 0

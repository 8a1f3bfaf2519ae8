"""Figures against ones worked out by hand, as vLLM's benchmark defines them."""

import math

import numpy as np
import pytest

from aotc.errors import RequestError
from aotc.loadtest.generator import Outcome
from aotc.loadtest.goals import Memory, judge, parse_slo, read_memory
from aotc.loadtest.report import as_json, costs, details, parse_goals, summarise, sweep_table, table

# Three answers: of 5 tokens, of one, and of 3 tokens in two events; and a failure, which counts nowhere else.
OUTCOMES = [
    Outcome(10, 100.0, 0.1, 0.5, 5, [0.1, 0.1, 0.1, 0.1]),
    Outcome(20, 100.2, 0.3, 0.3, 1, []),
    Outcome(30, 101.0, 0.2, 0.8, 3, [0.6]),
    Outcome(40, 101.0, 0.9, 0.9, 7, [0.9], error="status 500"),
]


@pytest.fixture
def figures():
    return summarise(OUTCOMES, 2.0, {"ttft": 250.0, "tpot": 200.0})


def test_counts_and_rates(figures):
    assert (figures.completed, figures.failed, figures.total_input, figures.total_output) == (3, 1, 60, 9)
    rates = figures.request_throughput, figures.output_throughput, figures.total_token_throughput
    assert rates == (1.5, 4.5, 34.5)
    assert figures.peak_concurrency == 2
    assert figures.peak_output_throughput == 6  # five of the first, one of the second answer


def test_times(figures):
    assert figures.times["ttft"].tolist() == [0.1, 0.3, 0.2]
    assert figures.times["tpot"].tolist() == pytest.approx([0.1, 0.3])  # (0.8 - 0.2) / 2; an answer of one has none
    assert figures.times["itl"].tolist() == [0.1, 0.1, 0.1, 0.1, 0.6]
    assert figures.times["e2el"].tolist() == [0.5, 0.3, 0.8]
    assert figures.milliseconds("ttft", "mean") == pytest.approx(200)
    assert figures.milliseconds("itl", "median") == pytest.approx(100)
    assert figures.milliseconds("e2el", "p99") == pytest.approx(np.percentile([500, 300, 800], 99))
    assert figures.milliseconds("ttft", "std") == pytest.approx(np.std([100, 300, 200]))


def test_goodput():
    """Answers of one token have a tpot of 0 here."""
    for goals, good in [({"ttft": 250}, 2), ({"tpot": 200}, 2), ({"ttft": 250, "tpot": 200}, 1), ({"e2el": 800}, 3)]:
        assert summarise(OUTCOMES, 2.0, goals).goodput == good / 2
    assert summarise(OUTCOMES, 2.0).goodput is None
    assert parse_goals(["ttft:500", "tpot:30.5"]) == {"ttft": 500.0, "tpot": 30.5}
    for wrong in ("ttft", "itl:3", "ttft:fast", "ttft:-1", "ttft:nan"):
        with pytest.raises(RequestError, match=f"--goodput {wrong}: write"):
            parse_goals([wrong])


def test_costs(figures):
    found = costs(figures, 9.0)  # 0.0025 a second
    assert found["cost_per_million_output_tokens"] == pytest.approx(0.0025 / 4.5 * 1e6)
    assert found["cost_per_million_total_tokens"] == pytest.approx(0.0025 / 34.5 * 1e6)
    nothing = summarise(OUTCOMES[3:], 2.0)
    assert set(costs(nothing, 9.0).values()) == {math.inf}
    assert as_json(nothing, (), 9.0)["cost_per_million_output_tokens"] is None


def test_a_run_without_an_answer():
    figures = summarise(OUTCOMES[3:], 2.0)
    assert (figures.completed, figures.failed, figures.peak_concurrency) == (0, 1, 0)
    assert figures.milliseconds("ttft", "p99") == 0.0
    assert "Failed requests:                         1\n" in table(figures, {}, ("p99",), None)


def test_json_has_vllms_keys(figures):
    found = as_json(figures, ("p90", "p99.9"), None)
    assert found["request_goodput"] == 0.5 and found["failed"] == 1
    assert found["mean_tpot_ms"] == pytest.approx(200) and found["p99.9_e2el_ms"] == pytest.approx(799.4)
    assert {
        f"{s}_{t}_ms" for t in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p90")
    } <= found.keys()
    assert details(OUTCOMES)["errors"] == ["", "", "", "status 500"]
    assert details(OUTCOMES)["itls"][2] == [0.6]


def test_tables(figures):
    lines = table(figures, {"Maximum request concurrency": 4}, ("p90", "p99"), 9.0).splitlines()
    for line in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             4",
        "Request goodput (req/s):                 0.50",
        "Output token throughput (tok/s):         4.50",
        "Cost of 1M output tokens:                555.5556",
        "---------------Time to First Token----------------",
        "Median TTFT (ms):                        200.00",
        "P99 E2EL (ms):                           794.00",
    ):
        assert line in lines
    rows = [line.split() for line in sweep_table("rate", [(0.5, figures), (16.0, figures)], None).splitlines()]
    assert [row[:5] for row in rows[1:]] == [
        ["0.5", "1", "1.50", "4.50", "34.50"],
        ["16", "1", "1.50", "4.50", "34.50"],
    ]


@pytest.mark.parametrize(
    ("slo", "verdicts"),
    [
        ("ttft_p99=299ms,failed=1", ["pass  ttft_p99=299ms: 298.00 ms", "pass  failed=1: 1 of 4"]),
        ("ttft_p99=0.2s,failed=25%", ["FAIL  ttft_p99=0.2s: 298.00 ms", "pass  failed=25%: 1 of 4"]),
        ("itl_median=99999us,failed=24%", ["FAIL  itl_median=99999us: 100.00 ms", "FAIL  failed=24%: 1 of 4"]),
        ("tpot_mean=201", ["pass  tpot_mean=201: 200.00 ms", "FAIL  failed=0: 1 of 4"]),
        ("output_throughput=4,goodput=1,failed=1",
         ["pass  output_throughput=4: 4.50 tokens a second", "FAIL  goodput=1: 0.50 requests a second",
          "pass  failed=1: 1 of 4"]),
        ("device_mem=80%,failed=1", ["pass  device_mem=80%: 75.0%", "pass  failed=1: 1 of 4"]),
        ("device_mem=74.9%,failed=1", ["FAIL  device_mem=74.9%: 75.0%", "pass  failed=1: 1 of 4"]),
    ],
)  # fmt: skip
def test_goals(figures, slo, verdicts):
    found = judge(parse_slo(slo), figures, Memory(3e9, 4e9))
    assert [v.line for v in found] == verdicts
    assert [v.passed for v in found] == [line.startswith("pass") for line in verdicts]


def test_what_is_not_known_is_not_met():
    nothing = summarise(OUTCOMES[1:2], 2.0)
    goals = parse_slo("itl_p99=1s,tpot_p99=1s,goodput=0,device_mem=100%")
    for memory in (None, Memory(None, None), Memory(5.0, None)):
        *unknown, failed = judge(goals, nothing, memory)
        assert failed.passed and not any(v.passed for v in unknown)
        assert all("unknown: " in v.line for v in unknown)
    assert "/metrics has no device_memory_used_bytes" in unknown[3].line


@pytest.mark.parametrize(
    "slo", ["", "ttft_p99", "ttft_p99=", "ttft=5ms", "ttft_p101=5ms", "ttft_p99=5min", "device_mem=80", "failed=x",
            "speed=3", "ttft_p99=5ms,", "ttft_p99=1s,ttft_p99=2s", "output_throughput=5%", "ttft_p99=-1ms"],
)  # fmt: skip
def test_wrong_goals(slo):
    with pytest.raises(RequestError, match="--slo"):
        parse_slo(slo)


def test_memory_of_the_fullest_device():
    text = """# HELP x
aotc:device_memory_used_bytes{model_name="m",device="0"} 2e9
aotc:device_memory_used_bytes{model_name="m",device="1"} 3000000000.0
aotc:device_memory_total_bytes{model_name="m",device="0"} 4e9 1700000000
aotc:device_memory_total_bytes{model_name="m",device="1"} 4e9
aotc:other_total_bytes 7
aotc:device_memory_used_bytes_sum NaN
"""
    assert read_memory(text) == Memory(3e9, 4e9) and read_memory(text).share == 75.0
    assert read_memory("device_memory_used_bytes 5\n") == Memory(5.0, None)
    assert read_memory("") == Memory(None, None)

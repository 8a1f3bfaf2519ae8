"""Metrics: vLLM's names and meaning, and counts that are right."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import post, wait

from aotc.loadtest.goals import Memory, read_memory
from aotc.runtime.server.messages import Load
from aotc.runtime.server.metrics import Metrics, ModelMetrics

NAMES = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter", "generation_tokens": "counter", "request_success": "counter",
    "circuit_breaker_state": "gauge", "device_memory_bytes": "gauge", "device_memory_used_bytes": "gauge",
    "device_memory_total_bytes": "gauge", "iteration_tokens_total": "histogram",
    "num_preemptions": "counter", "prefix_cache_queries": "counter", "prefix_cache_hits": "counter",
    "request_queue_time_seconds": "histogram", "engine_step_seconds": "histogram", "engine_step_sequences": "histogram",
    "engine_restarts": "counter", "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram", "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}  # fmt: skip


@pytest.fixture
def counted(server):
    """counted() -> what each metric has grown by since the test began; zeros are left out."""

    def values():
        found = {}
        for family in text_string_to_metric_families(server.client.get("/metrics").text):
            for sample in family.samples:
                if not sample.name.endswith(("_created", "_bucket", "_sum")):
                    reason = sample.labels.get("finished_reason")
                    found[sample.name.removeprefix("aotc:") + (f"/{reason}" if reason else "")] = sample.value
        return found

    wait(lambda: server.engine.load.running == 0 and server.engine.unfinished == 0)
    before = values()
    return lambda: {k: v - before.get(k, 0) for k, v in values().items() if v != before.get(k, 0)}


def test_names_and_types():
    metrics = Metrics("vllm")
    model = ModelMetrics(metrics, "some/model")
    model.finished("stop", 3, 4, 0.5)
    model.update(Load(1, 0, 0.25), 3, 0)
    text = metrics.render().decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {n.removeprefix("vllm:"): f.type for n, f in families.items() if not n.endswith("_created")} == NAMES
    for family in families.values():
        assert all(sample.labels["model_name"] == "some/model" for sample in family.samples)


def test_metrics_are_prometheus_text(server):
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_counts_of_one_answer(server, counted):
    server.complete("abc", max_tokens=7)
    assert counted() == {
        "prompt_tokens_total": 3, "generation_tokens_total": 7, "request_success_total/length": 1,
        "time_to_first_token_seconds_count": 1, "inter_token_latency_seconds_count": 6,
        "e2e_request_latency_seconds_count": 1, "request_prompt_tokens_count": 1, "request_generation_tokens_count": 1,
        "request_queue_time_seconds_count": 1, "engine_step_seconds_count": 7, "engine_step_sequences_count": 7,
        "iteration_tokens_total_count": 7,
    }  # fmt: skip


def test_every_choice_counts_as_a_request(server, counted):
    server.complete(["abc", "defgh"], n=2, max_tokens=2, stream=True)
    got = counted()
    assert (got["request_success_total/length"], got["prompt_tokens_total"], got["generation_tokens_total"]) == (
        4,
        16,
        8,
    )


def test_reasons(server, counted):
    server.chat("eos:2", max_tokens=9)  # two tokens and the one that ends
    server.complete("abcdef", max_tokens=9, stop="d")
    server.complete("nan:1", max_tokens=9)
    server.complete("abc", max_tokens=1)
    got = counted()
    reasons = {k.partition("/")[2]: v for k, v in got.items() if "success" in k}
    assert reasons == {"stop": 2, "error": 1, "length": 1}
    assert got["generation_tokens_total"] == 3 + 4 + 1 + 1


def test_refused_requests_are_not_counted(server, counted):
    server.complete("abc", n=0)
    server.complete("abc", model="other")
    server.client.get("/nowhere")
    assert counted() == {}


def test_gauges_while_requests_run_and_when_they_are_gone(server, counted):
    body = {"prompt": "slow", "max_tokens": 190, "n": 6}
    with server.connect(post("/v1/completions", body)):
        wait(lambda: server.engine.load.running == 4 and server.engine.unfinished == 6)
        assert server.metric("aotc:num_requests_running") == 4
        assert server.metric("aotc:num_requests_waiting") == 2
        assert server.metric("aotc:kv_cache_usage_perc") == 1.0
    wait(lambda: server.engine.load.running == 0)
    assert server.metric("aotc:num_requests_running") == server.metric("aotc:num_requests_waiting") == 0
    assert server.metric("aotc:kv_cache_usage_perc") == 0
    assert counted()["request_success_total/abort"] == 6


def test_what_the_engine_counts():
    """Differences add up, also over engines that were started again."""
    metrics = Metrics("aotc")
    model = ModelMetrics(metrics, "m")
    model.remember({"weights": 100, "kv_cache": 50, "kv_blocks": 7, "device_used": 600, "device_total": 1000})
    model.remember({"device_used": 700, "device_total": 1000})
    model.absorb(Load(2, 1, 0.5, 3, 40, 30, [0.02, 3.0], [(0.004, 2, 2), (0.004, 70, 0), (0.004, 70, 300)]))
    model.absorb(Load(2, 1, 0.5, 1, 5, 0, [], []))
    text = metrics.render().decode()
    for line in (
        'aotc:num_preemptions_total{model_name="m"} 4.0', 'aotc:prefix_cache_queries_total{model_name="m"} 45.0',
        'aotc:prefix_cache_hits_total{model_name="m"} 30.0', 'aotc:request_queue_time_seconds_sum{model_name="m"} 3.02',
        'aotc:engine_step_seconds_count{model_name="m"} 3.0', 'aotc:engine_step_sequences_sum{model_name="m"} 142.0',
        'aotc:device_memory_bytes{model_name="m",purpose="weights"} 100.0',
        'aotc:device_memory_used_bytes{model_name="m"} 700.0', 'aotc:device_memory_total_bytes{model_name="m"} 1000.0',
        'aotc:iteration_tokens_total_count{model_name="m"} 2.0', 'aotc:iteration_tokens_total_sum{model_name="m"} 302.0',
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "kv_blocks" not in text


def test_memory_is_that_of_the_engine(server):
    assert server.metric("aotc:device_memory_bytes", purpose="weights") == 1


def test_a_load_test_can_tell_how_full_the_gpu_is(server):
    """`aotc bench serve --slo device_mem=80%` reads these."""
    read = wait(lambda: (m := read_memory(server.client.get("/metrics").text)).used and m)
    assert read == Memory(30 << 30, 40 << 30) and read.share == 75.0


def test_tokens_count_while_they_come(server, counted):
    with server.connect(post("/v1/completions", {"prompt": "slow", "max_tokens": 190})):
        wait(lambda: counted().get("generation_tokens_total", 0) >= 3)
        assert server.engine.unfinished == 1
    wait(lambda: server.engine.unfinished == 0)

"""`aotc bench serve` from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from fake_server import answer, whole

from aotc.errors import ArtifactError
from aotc.loadtest import served as served_module

ROOT = Path(__file__).resolve().parents[2]


def row(out, name):
    """The number in a row of the table."""
    (value,) = re.findall(rf"^{re.escape(name)} +([\d.]+)$", out, re.MULTILINE)
    return float(value)


def refused(answered, *parts):
    assert answered.code == 2 and re.fullmatch(r"aotc: error: [^\n]+\n", answered.err), answered
    assert [part for part in parts if part not in answered.err] == []


def test_a_run(serve, bench):
    server = serve()
    answered = bench(server.url)
    assert (answered.code, answered.err) == (0, "")
    assert row(answered.out, "Successful requests:") == 6 and row(answered.out, "Failed requests:") == 0
    assert row(answered.out, "Total input tokens:") == 48 and row(answered.out, "Total generated tokens:") == 18
    bodies = server.bodies()
    assert len(bodies) == 7  # a warm-up before
    assert {**bodies[0], "prompt": []} == {
        "model": "fake/model", "prompt": [], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert all({*body["prompt"]} <= {7, 11, 13} and len(body["prompt"]) == 8 for body in bodies)


def test_options_reach_the_server(serve, bench):
    server = serve(tokenize=False)
    arguments = ["--model", "other", "--api-key", "k", "--endpoint", "/v1/chat/completions", "--no-ignore-eos"]
    arguments += ["--temperature", 0.5, "--num-warmups", 0, "--random-prefix-len", 2, "--extra-body", '{"top_k": 4}']
    answered = bench(server.url, *arguments)
    assert answered.code == 0
    assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer k"}
    path, _, body = server.asked[-2]
    assert path == "/v1/chat/completions" and len(server.bodies()) == 6
    assert (body["model"], body["temperature"], body["max_completion_tokens"], body["top_k"]) == ("other", 0.5, 3, 4)
    assert "ignore_eos" not in body and len(body["messages"][0]["content"].split()) == 10


def test_words_where_there_is_no_tokenize(serve, bench):
    server = serve(tokenize=False)
    answered = bench(server.url)
    assert answered.code == 0
    assert answered.err.startswith("aotc: note: the server has no /tokenize: ") and answered.err.count("\n") == 1
    assert all(isinstance(body["prompt"], str) for body in server.bodies())


def test_the_same_seed_asks_the_same(serve, bench):
    def asked(*arguments):
        server = serve()
        bench(server.url, "--random-range-ratio", 0.5, "--max-concurrency", 1, *arguments)
        return server.bodies()

    first = asked("--seed", 3)
    assert asked("--seed", 3) == first and asked("--seed", 4) != first


def test_concurrency_and_rate(serve, bench):
    server = serve(lambda body, n: [0.02, *answer(body)])
    answered = bench(server.url, "--max-concurrency", 2, "--request-rate", 500)
    assert row(answered.out, "Maximum request concurrency:") == 2
    assert row(answered.out, "Request rate configured (RPS):") == 500
    assert server.most == 2


def test_failures_are_counted(serve, bench):
    server = serve(
        lambda body, n: [whole(429, {"error": {"message": "later"}}, "Busy")] if n in (2, 4) else answer(body)
    )
    answered = bench(server.url, "--max-concurrency", 1)
    assert answered.code == 0
    assert row(answered.out, "Successful requests:") == 4 and row(answered.out, "Failed requests:") == 2
    assert answered.err == "aotc: note: 2 of 6 requests failed; the first: status 429 Busy: later\n"


def test_nothing_but_failures(serve, bench):
    server = serve(lambda body, n: [whole(500, b"")] if n else answer(body))
    answered = bench(server.url)
    assert answered.code == 1 and row(answered.out, "Failed requests:") == 6


@pytest.mark.parametrize(
    ("slo", "code", "lines"),
    [
        ("ttft_p99=60s,tpot_p99=60s", 0, ["pass  ttft_p99=60s: ", "pass  tpot_p99=60s: ", "pass  failed=0: 0 of 6"]),
        ("e2el_p50=0us", 1, ["FAIL  e2el_p50=0us: ", "pass  failed=0: 0 of 6"]),
        ("device_mem=80%", 0, ["pass  device_mem=80%: 25.0%", "pass  failed=0: 0 of 6"]),
        ("device_mem=20%", 1, ["FAIL  device_mem=20%: 25.0%", "pass  failed=0: 0 of 6"]),
    ],
)
def test_slo(serve, bench, slo, code, lines):
    metrics = "aotc:device_memory_used_bytes 1e9\naotc:device_memory_total_bytes 4e9\n"
    answered = bench(serve(metrics=metrics).url, "--slo", slo)
    assert answered.code == code
    found = [line for line in answered.out.splitlines() if line.startswith(("pass", "FAIL"))]
    assert len(found) == len(lines) and all(f.startswith(line) for f, line in zip(found, lines, strict=True))


def test_slo_where_memory_is_not_known(serve, bench):
    answered = bench(serve().url, "--slo", "device_mem=80%")
    assert answered.code == 1
    assert "FAIL  device_mem=80%: unknown: the server's /metrics has no device_memory_used_bytes" in answered.out


def test_results_of_a_run(serve, bench, tmp_path):
    path = tmp_path / "new" / "result.json"
    arguments = ["--save-result", path.name, "--result-dir", path.parent, "--save-detailed", "--goodput", "ttft:60000"]
    answered = bench(serve().url, *arguments, "--price-per-hour", 3.6, "--metric-percentiles", "50,99.9")
    assert answered.code == 0
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["num_prompts"], found["model_id"]) == (6, 0, 6, "fake/model")
    assert (found["request_rate"], found["max_concurrency"], found["endpoint_type"]) == ("inf", None, "openai")
    assert found["request_goodput"] == found["request_throughput"] == 6 / found["duration"]
    assert found["cost_per_million_output_tokens"] == pytest.approx(1000 / found["output_throughput"])
    assert {"p50_ttft_ms", "p99.9_itl_ms"} <= found.keys() and "p99_ttft_ms" not in found
    assert found["output_lens"] == [3] * 6 and [len(gaps) for gaps in found["itls"]] == [2] * 6
    assert row(answered.out, "Request goodput (req/s):") == pytest.approx(found["request_goodput"], abs=0.01)


def test_results_named_as_vllm_does(serve, bench, tmp_path):
    assert bench(serve().url, "--max-concurrency", 3, "--result-dir", tmp_path, "--save-result").code == 0
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"openai-infqps-concurrency3-model-\d{8}-\d{6}\.json", path.name)
    assert bench(serve().url, "--save-result", "--result-dir", tmp_path, "--result-filename", "x.json").code == 0
    assert json.loads((tmp_path / "x.json").read_text())["completed"] == 6


def test_a_sweep(serve, bench, tmp_path):
    server = serve(lambda body, n: [0.01, *answer(body)])
    arguments = [
        "--sweep",
        "1,3",
        "--slo",
        "ttft_p99=60s",
        "--save-result",
        tmp_path / "s.json",
        "--plot",
        tmp_path / "p.svg",
    ]
    answered = bench(server.url, *arguments)
    assert (answered.code, answered.err) == (0, "")
    lines = answered.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["concurrency", "1", "3"]
    assert [line[:24] for line in lines[3:]] == [
        "concurrency 1: pass  ttf", "concurrency 1: pass  fai", "concurrency 3: pass  ttf", "concurrency 3: pass  fai",
    ]  # fmt: skip
    found = json.loads((tmp_path / "s.json").read_text())
    assert [(r["max_concurrency"], r["completed"], r["slo"]["failed=0"]) for r in found] == [(1, 6, True), (3, 6, True)]
    assert server.most == 3 and len(server.bodies()) == 13
    texts = [e.text for e in xml.parse(tmp_path / "p.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"fake/model", "TTFT, ms", "TPOT, ms", "output tokens a second", "requests at once"} <= {*texts}


def test_a_sweep_of_rates(serve, bench):
    answered = bench(serve().url, "--sweep", "rate=100,inf", "--slo", "e2el_p99=0s")
    assert answered.code == 1
    assert [line.split()[0] for line in answered.out.splitlines()[:3]] == ["rate", "100", "inf"]
    assert "rate inf: FAIL  e2el_p99=0s" in answered.out


def test_plot_says_what_to_install(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(
        bench("http://x", "--sweep", 1, "--plot", "p.svg"), "matplotlib is not installed: pip install 'aotc[bench]'"
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--request-rate 0", "--request-rate, --burstiness, --timeout and --ready-timeout are greater than 0"),
        ("--ready-timeout nan", "--timeout and --ready-timeout are greater than 0"),
        ("--request-rate nan", "--request-rate"),
        ("--burstiness -1", "--burstiness"),
        ("--timeout 0", "--timeout"),
        ("--max-concurrency 0", "--max-concurrency is at least 1"),
        ("--num-prompts 0", "--num-prompts"),
        ("--random-range-ratio 1", "--random-range-ratio"),
        ("--seed -1", "--seed"),
        ("--metric-percentiles 101", "--metric-percentiles 101: write numbers from 0 to 100"),
        ("--metric-percentiles x", "--metric-percentiles x"),
        ("--price-per-hour -3", "--price-per-hour"),
        ("--slo fast", "--slo fast: write goals as"),
        ("--goodput fast", "--goodput fast: write"),
        ("--sweep x", "--sweep x: write 1,4,16"),
        ("--plot p.svg", "give one, as --sweep 1,4,16"),
        ("--sweep 1 --plot /nowhere/p.svg", "--plot /nowhere/p.svg: there is no such folder"),
        ("--save-detailed", "goes with --save-result"),
        ("--result-dir /tmp", "go with --save-result"),
        ("--save-result /tmp", "--save-result /tmp is a folder"),
        ("--save-result /dev/null/x.json", "cannot read or write /dev/null"),
        ("--num-prompt 3", "unrecognized arguments: --num-prompt"),
        ("--api-key é", "--api-key"),
        ("--extra-body [1]", "--extra-body [1]: write an object of JSON"),
        ("--extra-body {", "--extra-body {: write"),
    ],
)
def test_wrong_arguments(bench, arguments, part):
    """All of it is said before the server, which is not there, is asked."""
    refused(bench("http://127.0.0.1:9", *arguments.split()), part)


def test_servers_that_cannot_be_asked(serve, bench):
    refused(
        bench("http://127.0.0.1:9"), "cannot ask http://127.0.0.1:9/v1/models (connection failed: ", "is the server up?"
    )
    refused(bench("ftp://x"), "ftp://x is no address of a server")
    refused(bench("nowhere/artifact"), "the server did not start: ", "nowhere/artifact")
    denied = whole(401, {"error": {"message": "the API key is missing"}})
    refused(bench(serve(models=denied).url), "the API key is missing: give the key with --api-key")
    for models in (whole(404, {}), whole(200, {"data": []}), whole(200, b"x")):
        refused(bench(serve(models=models).url), "names no model", "name one with --model")
    refused(bench(serve().url, "--random-input-len", 4094), "fake/model takes 4096 tokens", "has up to 4097")
    failing = serve(lambda body, n: [whole(500, {"error": {"message": "no"}}, "Bad")])
    refused(bench(failing.url), "does not answer a first request: status 500 Bad: no")


def test_a_server_that_says_nothing(serve, bench, monkeypatch):
    monkeypatch.setattr("aotc.loadtest.client.FETCH_SECONDS", 0.2)
    server = serve()
    monkeypatch.setattr(server, "_parts", lambda path, body: [60])
    refused(bench(server.url), "/v1/models (no answer): is the server up?")


def test_a_server_without_a_list_of_models(serve, bench):
    assert bench(serve(models=whole(404, {})).url, "--model", "m").code == 0


# The server of a DIR


@pytest.fixture
def fake_command(monkeypatch, tmp_path):
    """fake_command(program): what runs in place of `aotc serve`; its process ids are written to tmp_path / "pid"."""

    def use(program):
        script = tmp_path / "server.py"
        script.write_text(
            f"import os, sys, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{program}"
        )
        monkeypatch.setattr(served_module, "COMMAND", (sys.executable, str(script)))
        return tmp_path / "pid"

    return use


def ended(pid):
    """Whether the process whose id is in a file is gone; without an id it ended before it could write one."""
    text = pid.read_text() if pid.exists() else ""
    return not text or not Path(f"/proc/{text}").exists()


def test_a_server_that_does_not_start(fake_command):
    fake_command("print('a warning\\naotc: error: it is broken', file=sys.stderr); sys.exit(2)")
    with (
        pytest.raises(ArtifactError, match="the server did not start: it is broken$"),
        served_module.served("d", [], 20),
    ):
        pass


READY = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        print("a warning", self.path, file=sys.stderr)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"aotc: serving m at http://127.0.0.1:{server.server_address[1]}", file=sys.stderr, flush=True)
server.serve_forever()
"""


def test_what_a_server_complains_about_is_repeated(fake_command, capfd):
    pid = fake_command(READY)
    with served_module.served("d", ["--x"], 60) as url:
        for n in range(24):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"{url}/{n}")
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["server: a warning /health", "server: a warning /0"]
    assert len(lines) == 21 and lines[-1] == "server: and 5 lines more"
    assert ended(pid)


def test_a_server_that_is_never_ready(fake_command):
    pid = fake_command("time.sleep(600)")
    with pytest.raises(ArtifactError, match="not ready within 0.5 s"), served_module.served("d", [], 0.5):
        pass
    assert ended(pid)


def test_a_server_that_does_not_want_to_end(fake_command, monkeypatch):
    monkeypatch.setattr(served_module, "END_SECONDS", 0.2)
    pid = fake_command("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    with pytest.raises(ArtifactError, match="not ready"), served_module.served("d", [], 1.0):
        pass
    assert ended(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_the_command(tmp_path, number):
    """A server that never gets ready; the command is told to end meanwhile."""
    pid = tmp_path / "pid"
    server = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"""
import sys
from aotc.cli import main
from aotc.loadtest import served
served.COMMAND = (sys.executable, "-c", {server!r})
sys.exit(main(["bench", "serve", "nowhere"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert ended(pid)

"""`aotc serve` over a real artifact, asked through OpenAI's own client."""

import json
import os
import signal
import subprocess
import sys
import time

import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import aotc
from aotc.cli import main

KEY = "secret"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, tiny_config):
    """A tiny Llama with random weights, a tokenizer of ASCII characters and a chat template, compiled for this CPU."""
    folder = tmp_path_factory.mktemp("serve")
    letters = [chr(n) for n in range(33, 127)] + ["\u0120"]  # and the blank, as byte-level tokenizers spell it
    made = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {**tiny_config, "vocab_size": 97, "bos_token_id": 95, "eos_token_id": 96, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [
        "compile",
        str(folder),
        "--weights",
        "random:7",
        "--arch",
        "cpu",
        "--dtype",
        "f32",
        "--max-num-seqs",
        "4",
    ]
    arguments += ["--max-num-batched-tokens", "16", "--kv-page-size", "16", "-o", str(folder / "tiny"), "--quiet"]
    assert main(arguments) == 0
    return folder / "tiny"


def start(artifact, errors, *arguments):
    """`aotc serve` in a process of its own, its standard error in the file `errors`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "AOTC_API_KEY": KEY}
    command = [sys.executable, "-m", "aotc", "serve", str(artifact), "--port", "0", *arguments]
    with open(errors, "w") as file:
        return subprocess.Popen(command, stderr=file, env=environment)


def wait(condition):
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def url_of(errors):
    """The address that the server says."""
    lines = [line for line in errors.read_text().splitlines() if line.startswith("aotc: serving tiny at ")]
    return lines and lines[0].rpartition(" ")[2]


@pytest.fixture(scope="module")
def server(artifact, tmp_path_factory):
    """The address of a running server; it ends without a word of complaint."""
    errors = tmp_path_factory.mktemp("log") / "stderr"
    process = start(artifact, errors, "--log-level", "warning")
    try:
        wait(lambda: url_of(errors) or process.poll() is not None)
        yield url_of(errors)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert errors.read_text().count("\n") == 1
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client of the server."""
    with openai.OpenAI(base_url=server + "/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def llm(artifact):
    """The same artifact in this process."""
    return aotc.load(artifact)


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "aotc")
    assert client.models.retrieve("tiny").id == "tiny"


def test_completions(client, llm):
    expected = llm.generate(PROMPT, max_tokens=30, temperature=0)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(expected.token_ids))
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == expected.text and len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    assert (last.choices, last.usage) == ([], usage)


def test_chat(client, llm):
    expected = llm.chat(HELLO, max_tokens=30, temperature=0)
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    answer = client.chat.completions.create(**fields)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids) == len("hello") + 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(expected.token_ids)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in chunks) == expected.text and len(chunks) > 5
    assert last.usage == answer.usage


def test_cached_tokens(client):
    """A prefix is computed once, and by each tenant for itself."""
    fields = {"model": "tiny", "prompt": "z" * 40, "max_tokens": 4, "temperature": 0}

    def ask(**extra):
        answer = client.completions.create(**fields, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    (first, text), (second, again) = ask(), ask()
    assert first == 0 and 16 <= second < 40 and again == text
    assert ask(cache_salt="other") == (0, text)
    assert ask(cache_salt="other") == (second, text)
    stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert list(stream)[-1].usage.prompt_tokens_details.cached_tokens == second


def test_json_logs(artifact, tmp_path):
    """The command's own log: every line is an object, but for the one that says where it listens."""
    process = start(artifact, tmp_path / "stderr", "--log-format", "json")
    try:
        url = wait(lambda: url_of(tmp_path / "stderr"))
        with openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=3, timeout=30) as client:
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines() if line[:5] != "aotc:"]
    (request,) = [line for line in lines if line["event"] == "request"]
    assert (request["model"], request["tokens"], request["prompt_tokens"]) == ("tiny", 3, len(PROMPT))
    assert [line["path"] for line in lines if line["event"] == "access"] == ["/v1/completions"]


def test_seeds_and_logprobs(client, llm):
    """Sampling in the server is that of this process: the same seed gives the same tokens."""
    expected = llm.generate(PROMPT, max_tokens=12, temperature=1, seed=5, logprobs=2)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=1, seed=5, logprobs=2, n=2
    )
    assert answer.choices[0].text == expected.text != answer.choices[1].text
    got = answer.choices[0].logprobs
    assert got.token_logprobs == pytest.approx([pairs[0][1] for pairs in expected.logprobs], abs=1e-4)
    assert all(len(best) == 2 for best in got.top_logprobs)


def test_many_at_once(client, llm):
    """More requests than slots, together: each is answered as if it were alone."""
    prompts = [PROMPT[: n + 1] for n in range(10)]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == llm.generate(prompt, max_tokens=20, temperature=0).text


def test_error_classes(client, server):
    fields = {"model": "tiny", "messages": HELLO}
    with pytest.raises(openai.NotFoundError, match="not served here") as error:
        client.chat.completions.create(**{**fields, "model": "gpt-5"})
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="wrong").chat.completions.create(**fields)
    assert error.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError, match="temperature must be") as error:
        client.chat.completions.create(**fields, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="compiled for 64") as error:
        client.completions.create(model="tiny", prompt="x" * 200)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(**fields, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    assert client.with_options(api_key="wrong", base_url=server).get("/health", cast_to=object) == {"status": "ready"}


def test_a_damaged_artifact_ends_the_command(artifact, tmp_path):
    """The server itself does not read the weights: its engine does, and says what to do."""
    weights = artifact / "weights.bin"
    good = weights.read_bytes()
    weights.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    try:
        process = start(artifact, tmp_path / "stderr")
        assert process.wait(60) == 2
    finally:
        weights.write_bytes(good)
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert last.startswith("aotc: error: ") and "weights.bin is damaged" in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "64"], "--max-model-len is fixed at compile time: recompile with"),
        (["--port", "65536"], "--port is 0 to 65535"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--metrics-prefix", "a-b"], "--metrics-prefix"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1 port 8000"),
        (["--host", "a..b"], "cannot listen on a..b"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_arguments_that_cannot_be(artifact, capsys, arguments, message):
    assert main(["serve", str(artifact), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("aotc: error: ") and message in error


def test_a_port_that_is_taken(artifact, server, capsys):
    port = server.rpartition(":")[2]
    assert main(["serve", str(artifact), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use)" in capsys.readouterr().err


# Under load: `aotc bench serve`


def bench(capsys, target, *arguments):
    lengths = ["--num-prompts", "9", "--random-input-len", "12", "--random-output-len", "5", "--random-range-ratio", "0.4"]
    code = main(["bench", "serve", str(target), *lengths, "--save-result", *map(str, arguments)])
    assert code == 0, capsys.readouterr()
    return capsys.readouterr()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_bench_of_a_server(server, capsys, tmp_path, endpoint):
    path = tmp_path / "result.json"
    words = ["--random-input-len", 4] if "chat" in endpoint else []  # and each letter is a token here
    arguments = ["--api-key", KEY, "--endpoint", endpoint, "--save-detailed", "--max-concurrency", 3, *words]
    answered = bench(capsys, server, path, *arguments)
    assert answered.err == ""
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["model_id"]) == (9, 0, "tiny")
    assert min(found["output_lens"]) >= 3 and max(found["output_lens"]) <= 7
    if endpoint == "/v1/completions":
        assert min(found["input_lens"]) >= 7 and max(found["input_lens"]) <= 17
    for ttft, gaps in zip(found["ttfts"], found["itls"], strict=True):
        assert ttft > 0 and all(gap >= 0 for gap in gaps)
    assert found["total_output_tokens"] == sum(found["output_lens"])


def test_bench_of_an_artifact(artifact, capsys, tmp_path, monkeypatch):
    """It starts a server and ends it: nothing listens afterwards, and no process is left."""
    monkeypatch.delenv("AOTC_API_KEY", raising=False)
    path = tmp_path / "result.json"
    bench(capsys, artifact, path, "--sweep", "1,4", "--slo", "ttft_p99=60s,failed=0", "--max-num-seqs", 4)
    found = json.loads(path.read_text())
    assert [(r["max_concurrency"], r["completed"], r["failed"]) for r in found] == [(1, 9, 0), (4, 9, 0)]
    assert found[0]["total_output_tokens"] > 9

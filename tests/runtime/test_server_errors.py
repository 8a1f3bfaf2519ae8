"""What the server refuses: each with OpenAI's error object, a status that clients act on, and a line that helps."""

import json
import socket

import pytest
from serving import MAX_LEN, post, wait

from aotc.runtime.server import app, protocol

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refused(response, status, param=None, code=None):
    """Checks an error object and returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert (error["param"], error["code"]) == (param, code), error
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    assert "\n" not in error["message"] and len(error["message"]) < 300
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"prompt"', b"\xff\xfe", b'{"prompt": "a"} x', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 100_000, b"{}", b'{"prompt": 1}', b'{"prompt": {"a": 1}}',
        b'{"prompt": [[[1]]]}', b'{"prompt": [1.5]}', b'{"prompt": [true]}', b'{"prompt": "a", "max_tokens": "7"}',
        b'{"prompt": "a", "stream": "yes"}', b'{"prompt": "a", "stop": 3}', b'{"prompt": "a", "stop": [3]}',
        b'{"prompt": "a", "n": 1.5}', b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}", b'{"prompt": [1' + b"0" * 30 + b"]}",
        b'{"prompt": "a", "logit_bias": {"5": "x"}}', b'{"prompt": "a", "logit_bias": [1]}',
        b'{"prompt": "a", "stream_options": 1}', b'{"prompt": "a", "temperature": 1e999}',
    ],
    ids=lambda v: ascii(v[:40]),
)  # fmt: skip
def test_malformed_bodies(server, body):
    response = server.client.post(COMPLETIONS, content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": []}, "prompt", "1 to 64"),
        ({"prompt": ["a"] * 65}, "prompt", "1 to 64"),
        ({"prompt": ["a", 1]}, "prompt", "token ids"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": ["a", ""]}, "prompt", "no tokens"),
        ({"prompt": [[1], []]}, "prompt", "no tokens"),
        ({"prompt": [258]}, "prompt", "outside 0..257"),
        ({"prompt": [[1], [-1]]}, "prompt", "outside 0..257"),
        ({"temperature": -0.1}, "temperature", "temperature must be a number from 0"),
        ({"top_p": 0}, "top_p", "top_p must be a number above 0"),
        ({"top_p": 1.01}, "top_p", "top_p"),
        ({"top_k": -2}, "top_k", "top_k"),
        ({"min_p": 2}, "min_p", "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens must be at most max_tokens"),
        ({"n": 0}, "n", "n must be"),
        ({"n": 17}, "n", "n must be at most 16"),
        ({"n": 16, "prompt": ["a"] * 5}, "n", "80 answers, this server takes 64"),
        ({"seed": 2**64 - 1, "logprobs": 21}, "logprobs", "logprobs"),
        ({"seed": -(2**63) - 1}, "seed", "seed must be an integer from 0"),
        ({"stop": [""]}, "stop", "stop must hold strings of 1 to"),
        ({"stop": ["a"] * 17}, "stop", "stop must be at most 16"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "stop_token_ids must hold token ids below 258"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "stop_token_ids"),
        ({"priority": 2**31}, "priority", "32 bits"),
        ({"priority": -(2**31) - 1}, "priority", "32 bits"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
        ({"cache_salt": "x" * 257}, "cache_salt", "1 to 256 characters"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "logit_bias must hold token ids below 258"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_values_out_of_range(server, fields, param, message):
    before = len(server.log("submit"))
    got = server.client.post(COMPLETIONS, json={"prompt": "abc", **fields})
    assert message in refused(got, 400, param)
    assert len(server.log("submit")) == before


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, None, "messages must be a list of one message or more"),
        ({"messages": [{"content": "a"}]}, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not 'messages'"),
        ({"chat_template_kwargs": {"enable_thinking": 3}}, None, "enable_thinking must be true or false"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_chat_values_out_of_range(server, fields, param, message):
    assert message in refused(server.client.post(CHAT, json={"messages": HELLO, **fields}), 400, param)


UNSUPPORTED = {
    "best_of": 2, "echo": True, "suffix": "x", "use_beam_search": True, "prompt_logprobs": 1, "bad_words": ["a"],
    "allowed_token_ids": [1], "structured_outputs": {"json": {}}, "guided_json": {"type": "object"}, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": "root", "response_format": {"type": "json_object"},
}  # fmt: skip
UNSUPPORTED_IN_CHAT = {
    "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"},
    "modalities": ["text", "audio"], "audio": {"voice": "x"}, "chat_template": "{{ messages }}",
    "continue_final_message": True, "response_format": {"type": "json_schema", "json_schema": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_named(server, name):
    got = server.client.post(COMPLETIONS, json={"prompt": "abc", name: UNSUPPORTED[name]})
    assert name in refused(got, 400, name)


@pytest.mark.parametrize("name", UNSUPPORTED_IN_CHAT)
def test_unsupported_fields_of_chat_are_named(server, name):
    got = server.client.post(CHAT, json={"messages": HELLO, name: UNSUPPORTED_IN_CHAT[name]})
    assert name in refused(got, 400, name)


def test_values_that_ask_for_nothing_are_taken(server):
    """Clients send defaults and nulls for what they do not use."""
    names = [*UNSUPPORTED, "stream", "stream_options", "n", "max_tokens", "temperature", "stop", "seed", "logprobs"]
    body = {"prompt": "abc", **dict.fromkeys(names), "best_of": 1, "echo": False, "suffix": "", "user": "u"}
    assert server.client.post(COMPLETIONS, json=body).json()["choices"][0]["finish_reason"] == "length"
    body = {
        "messages": HELLO, **dict.fromkeys(UNSUPPORTED_IN_CHAT), "tools": [], "tool_choice": "auto", "logprobs": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "metadata": {"a": "b"}, "stream": None,
        "max_completion_tokens": 5, "max_tokens": None, "chat_template_kwargs": {"enable_thinking": False}, "seed": -1,
    }  # fmt: skip
    assert server.client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 5


def test_defaults_of_the_model_hold_where_the_request_is_silent(fresh):
    """The fake model repeats its prompt from an offset unless it is asked greedily."""
    running = fresh(config={"temperature": 0.0, "top_p": None, "top_k": 20, "pad_token_id": 0}).wait_ready()
    body = {"prompt": "abc", "max_tokens": 3, "seed": 1}
    assert running.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "abc"
    text = running.client.post(COMPLETIONS, json={**body, "temperature": 1}).json()["choices"][0]["text"]
    assert text == "bca"


def test_prompts_that_are_too_long(server):
    fits = server.complete("a" * (MAX_LEN - 1), max_tokens=5).json()
    assert (fits["usage"]["prompt_tokens"], fits["usage"]["total_tokens"]) == (MAX_LEN - 1, MAX_LEN)
    for response, param in [
        (server.complete("a" * MAX_LEN), "prompt"),
        (server.complete(["a", "b" * 100_000]), "prompt"),
        (server.complete([5] * MAX_LEN, stream=True), "prompt"),
        (server.chat("a" * MAX_LEN), "messages"),
    ]:
        message = refused(response, 400, param, "context_length_exceeded")
        assert "the model was compiled for 200" in message


def test_models_that_are_not_served(server):
    for response in [
        server.complete("a", model="gpt-4"),
        server.chat("a", model="gpt-4"),
        server.client.get("/v1/models/gpt-4"),
        server.client.get("/v1/models/some/thing"),
    ]:
        assert "fake" in refused(response, 404, "model", "model_not_found")
    assert server.complete("a", model="fake").status_code == 200
    assert server.client.get("/v1/models/fake").json()["id"] == "fake"


def test_paths_and_methods_that_do_not_exist(server):
    for path in ("/", "/v1", "/v1/completions/", "/v1/chat/../../etc/passwd", "/%00"):
        refused(server.client.post(path, json={}), 404)
    for method, path in (("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("PUT", CHAT), ("POST", "/metrics")):
        response = server.client.request(method, path)
        refused(response, 405)
        assert response.headers["allow"]


def test_a_model_without_a_chat_template(fresh):
    running = fresh(template=None).wait_ready()
    assert "/v1/completions" in refused(running.chat("hello"), 400)
    assert running.complete("abc").status_code == 200


def test_a_template_that_refuses(fresh):
    running = fresh(template="{{ raise_exception('roles must alternate') }}").wait_ready()
    assert "roles must alternate" in refused(running.chat("hello"), 400)


def test_the_api_key(fresh):
    running = fresh(api_key="sécret").wait_ready()
    body = {"prompt": "abc"}
    good = "Bearer sécret".encode()
    for given in ("", "Bearer", "Bearer wrong", "Bearer sécret ü", "Basic sécret", b"\xff", good[:-1]):
        headers = [("Authorization", given.encode() if isinstance(given, str) else given)]
        refused(running.client.post(COMPLETIONS, json=body, headers=headers), 401, code="invalid_api_key")
    for path in (COMPLETIONS, CHAT, "/v1/models", "/v1/models/fake", "/tokenize", "/detokenize"):
        response = running.client.request("GET" if "models" in path else "POST", path)
        refused(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert running.client.post(COMPLETIONS, json=body, headers=[("Authorization", good)]).status_code == 200
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        assert running.client.get(path).status_code == 200


def test_bodies_that_are_too_large(server, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY", 1000)
    assert "1000 bytes" in refused(server.client.post(COMPLETIONS, content=b"x" * 1001), 413)
    chunked = server.client.post(COMPLETIONS, content=iter([b"x" * 600, b"x" * 600]))
    assert chunked.request.headers["transfer-encoding"] == "chunked"
    assert "1000 bytes" in refused(chunked, 413)
    body = json.dumps({"prompt": "abc", "user": "u" * 900}).encode()
    assert len(body) < 1000 and server.client.post(COMPLETIONS, content=body).status_code == 200
    with server.connect(post(COMPLETIONS, b"", {"Content-Length": 10**18})) as connection:  # refused before it is read
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "٣", "1, 2"])
def test_lengths_that_are_none(server, length):
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode()
    with server.connect(request) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_stops_half_way(server, monkeypatch):
    """Until the time for it is over, other requests are answered; a client that goes away costs nothing."""
    whole = post(COMPLETIONS, {"prompt": "half"})
    with server.connect(whole[:-5]):
        assert server.complete("abc").status_code == 200
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with server.connect(whole[:-5]) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    with server.connect(whole[:40]):  # in the middle of the headers
        assert server.complete("abc").status_code == 200
    assert server.submitted("half") == 0


def test_request_ids(server):
    given = server.client.get("/v1/models", headers={"X-Request-Id": "my-1.id_"})
    assert given.headers["x-request-id"] == "my-1.id_"
    answered = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "abc"})
    assert answered.json()["id"] == "cmpl-abc"
    for bad in ("", "a b", "é".encode(), "x" * 129, "a\tb", '"'):
        response = server.client.get("/v1/models", headers=[("X-Request-Id", bad)])
        assert len(response.headers["x-request-id"]) == 24
    assert len(server.complete("a", n=0).headers["x-request-id"]) == 24  # errors have one too


def test_the_queue(fresh):
    running = fresh(queue=3, seqs=1).wait_ready()
    open_streams = [running.connect(post(COMPLETIONS, {"prompt": f"slow{n}", "max_tokens": 150})) for n in range(2)]
    wait(lambda: len(running.log("submit")) == 2)
    for fields in ({"n": 2}, {"n": 2, "stream": True}):
        response = running.complete("abc", **fields)
        refused(response, 429, code="rate_limit_exceeded")
        assert response.headers["retry-after"] == "1"
    for connection in open_streams:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    wait(lambda: running.complete("abc", n=2).status_code == 200)  # as soon as there is room


def test_bugs_show_no_traces(server, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(server.model.tokenizer, "encode", broken)
    response = server.complete("abc")
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"] == {
        "message": "internal error", "type": "server_error", "param": None, "code": None
    }  # fmt: skip

"""The HTTP server over a fake engine process, through real sockets."""

import time

import pytest
from serving import MAX_LEN, events


def usage(prompt, completion, cached=0):
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def test_completion(server):
    response = server.complete("abc", max_tokens=7)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["id"].startswith("cmpl-")
    assert abs(body["created"] - time.time()) < 60
    assert body["choices"] == [
        {"index": 0, "text": "abcabca", "finish_reason": "length", "stop_reason": None, "logprobs": None}
    ]
    assert body["usage"] == usage(3, 7)


def test_the_default_of_completions_is_sixteen_tokens_and_of_chat_the_context(server):
    assert server.complete("abc").json()["usage"]["completion_tokens"] == 16
    assert server.chat("abc").json()["usage"]["completion_tokens"] == MAX_LEN - 3


def test_chat(server):
    body = server.chat("hello", max_completion_tokens=8).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hellohel"}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_adds_up_to_the_whole(server, kind):
    ask = server.complete if kind == "completion" else server.chat
    whole = ask("añc:", max_tokens=9).json()
    response = ask("añc:", max_tokens=9, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({c["id"] for c in chunks}) == 1 and all(c["usage"] is None for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if kind == "chat":
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in choices) == whole["choices"][0]["message"]["content"]
        assert len(choices) > 4  # piece by piece
    else:
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"] and len(choices) > 3
    assert not any("usage" in c for c in events(ask("abc", max_tokens=2, stream=True)))


def test_prompts_as_text_ids_and_lists(server):
    ids = [ord(c) - 33 for c in "abc"]
    assert server.complete(ids, max_tokens=3).json()["choices"][0]["text"] == "abc"
    for prompts in (["abc", "xy"], [ids, [ord(c) - 33 for c in "xy"]]):
        body = server.complete(prompts, max_tokens=3).json()
        assert [c["text"] for c in body["choices"]] == ["abc", "xyx"]
        assert body["usage"] == usage(5, 6)


def test_n_choices_differ_and_a_seed_repeats_them(server):
    def texts(**fields):
        body = server.complete("abcdefg", n=3, temperature=1, max_tokens=4, **fields).json()
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        return [c["text"] for c in body["choices"]]

    assert texts(seed=1) == texts(seed=1) == ["abcd", "bcde", "cdef"]
    assert texts(seed=0) == ["abcd", "bcde", "cdef"] and len(set(texts())) == 3
    streamed = events(server.complete("abcdefg", n=2, temperature=1, max_tokens=4, seed=1, stream=True))
    for index, text in enumerate(["abcd", "bcde"]):
        assert "".join(c["choices"][0]["text"] for c in streamed if c["choices"][0]["index"] == index) == text


def test_stop_strings_are_cut_off_wherever_pieces_end(server):
    for stream in (False, True):
        response = server.complete("abcdef", max_tokens=30, stop=["zz", "de"], stream=stream)
        choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
        assert "".join(c["text"] for c in choices) == "abc" and choices[-1]["finish_reason"] == "stop"
    body = server.complete("abcdef", max_tokens=30, stop="de", include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "abcde" and body["choices"][0]["stop_reason"] == "de"
    body = server.complete("abcdef", max_tokens=3, stop="cx").json()
    assert body["choices"][0]["text"] == "abc" and body["choices"][0]["finish_reason"] == "length"


def test_the_end_of_sequence_and_stop_ids(server):
    choice = server.chat("eos:3", max_tokens=9).json()["choices"][0]
    assert choice["message"]["content"] == "eos" and choice["finish_reason"] == "stop"
    choice = server.complete("abc", stop_token_ids=[ord("c") - 33]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("c") - 33)


def test_logprobs(server):
    body = server.complete("ab", max_tokens=2, logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"] and logprobs["token_logprobs"] == [-0.5, -0.5]
    assert [set(t) for t in logprobs["top_logprobs"]] == [{'"', "#"}] * 2
    content = server.chat("ab", max_tokens=2, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [(t["token"], t["logprob"], t["bytes"]) for t in content] == [("a", -0.5, [97]), ("b", -0.5, [98])]
    assert [len(t["top_logprobs"]) for t in content] == [1, 1]
    streamed = events(server.chat("ab", max_tokens=2, logprobs=True, stream=True))
    pieces = [c["choices"][0]["logprobs"] for c in streamed]
    assert [t["token"] for p in pieces if p for t in p["content"]] == ["a", "b"]


def test_logprobs_of_parts_of_characters(server):
    """Their text is no text; bytes are, and keys of the older form do not fall together."""
    content = server.chat("é", max_tokens=2, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(t["token"], t["bytes"]) for t in content] == [("\ufffd", [0xC3]), ("\ufffd", [0xA9])]
    logprobs = server.complete("é", max_tokens=2, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_models_tokenize_and_detokenize(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "fake" and model["max_model_len"] == MAX_LEN
    asked = server.client.post("/tokenize", json={"prompt": "ab"}).json()
    assert asked["tokens"] == [64, 65] and asked["count"] == 2
    assert server.client.post("/detokenize", json={"tokens": [64, 65]}).json() == {"prompt": "ab"}


def test_priority_and_salt_reach_the_engine(server):
    before = len(server.log("submit"))
    fields = {"max_tokens": 1, "priority": -3, "cache_salt": "tenant", "n": 2}
    assert server.complete("abc", **fields).status_code == server.chat("abc", **fields).status_code == 200
    asked = server.log("submit")[before:]
    assert [(a["priority"], a["salt"]) for a in asked] == [(-3, "tenant")] * 4
    assert server.complete("abc", max_tokens=1, priority=None, cache_salt=None).status_code == 200
    assert (server.log("submit")[-1]["priority"], server.log("submit")[-1]["salt"]) == (0, "")


def test_an_answer_that_takes_too_long(fresh):
    running = fresh(request_timeout=0.3).wait_ready()
    response = running.complete("slow", max_tokens=100)
    assert response.status_code == 504 and "not done in time" in response.json()["error"]["message"]
    *chunks, last = events(running.complete("slow", max_tokens=100, stream=True))
    assert last["error"]["message"] == "the answer was not done in time" and len(chunks) > 1
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert running.metric("aotc:request_success_total", finished_reason="error") == 2

"""`aotc serve` of a text encoder, asked through OpenAI's own client."""

import base64
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

import aotc
from aotc.cli import main

KEY = "secret"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "lamp", "ship", "stone", "tower"]
CONFIG = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 8, "hidden_size": 12, "intermediate_size": 20,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A tiny encoder with random weights and eight words, compiled for this CPU."""
    folder = tmp_path_factory.mktemp("encoder")
    made = tokenizers.Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "cpu", "--max-num-seqs", "8"]
    assert main([*arguments, "-o", str(folder / "tiny"), "--quiet"]) == 0
    return folder / "tiny"


@pytest.fixture(scope="module")
def client(artifact, tmp_path_factory):
    """A client of a server in a process of its own, which ends well when it is asked to."""
    errors = tmp_path_factory.mktemp("serve") / "errors"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "AOTC_API_KEY": KEY}
    command = [sys.executable, "-m", "aotc", "serve", str(artifact), "--port", "0"]
    with open(errors, "w") as file:
        process = subprocess.Popen(command, stderr=file, env=environment)
    end = time.monotonic() + 60
    while " at http" not in (said := errors.read_text()):
        assert time.monotonic() < end and process.poll() is None, said
        time.sleep(0.02)
    url = said.partition(" at ")[2].split()[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM, errors.read_text()


@pytest.fixture(scope="module")
def embedder(artifact):
    with aotc.load(artifact) as embedder:
        yield embedder


def test_vectors_of_texts_in_both_formats(client, embedder):
    texts = ["lamp ship", "stone", "", "tower tower tower lamp"]
    expected = embedder.embed(texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [d.index for d in plain.data] == [0, 1, 2, 3] and plain.model == "tiny" and plain.object == "list"
    np.testing.assert_allclose([d.embedding for d in plain.data], expected, rtol=0, atol=1e-6)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 4 + 3 + 2 + 6
    packed = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64, and decodes it
    np.testing.assert_allclose([d.embedding for d in packed.data], expected, rtol=0, atol=1e-6)
    raw = client.post("/embeddings", body={"input": "stone", "encoding_format": "base64"}, cast_to=object)
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * 12


def test_token_ids(client, embedder):
    (one,) = client.embeddings.create(model="tiny", input=[2, 4, 3]).data
    np.testing.assert_allclose(one.embedding, embedder.embed("lamp")[0], rtol=0, atol=1e-6)
    assert len(client.embeddings.create(model="tiny", input=[[2, 4, 3], [2, 5, 5, 3]]).data) == 2


REFUSED = {
    "too long": ({"input": "lamp " * 15}, 400, "input", "the text has 17 tokens, and the model takes 16"),
    "nothing": ({"input": []}, 400, "input", "input must be a text"),
    "no tokens": ({"input": [[]]}, 400, "input", "a text without tokens"),
    "an unknown token": ({"input": [2, 8]}, 400, "input", "8 is no token id"),
    "fewer dimensions": ({"input": "lamp", "dimensions": 6}, 400, "dimensions", "vectors have 12 dimensions"),
    "a cut": ({"input": "lamp", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", "is -1 or 16"),
    "a format": ({"input": "lamp", "encoding_format": "int8"}, 400, None, "the body is not a valid request"),
    "a model": ({"input": "lamp", "model": "other"}, 404, "model", "is not one of the text encoders served here: tiny"),
    "too many": ({"input": ["lamp"] * 2049}, 400, "input", "1 to 2048"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, name):
    body, status, param, message = REFUSED[name]
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/embeddings", body=body, cast_to=object)
    error = caught.value.response.json()["error"]
    assert (caught.value.status_code, error["param"]) == (status, param) and message in error["message"]


def test_dimensions_and_cuts_that_fit(client):
    body = {"input": "lamp " * 15, "dimensions": 12, "truncate_prompt_tokens": -1}
    assert client.post("/embeddings", body=body, cast_to=object)["usage"]["prompt_tokens"] == 16


def test_other_paths(client):
    assert [(m.id, m.max_model_len) for m in client.models.list().data] == [("tiny", 16)]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.BadRequestError, match="is a text encoder: ask /v1/embeddings"):
        client.completions.create(model="tiny", prompt="lamp")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(model="tiny", input="lamp")

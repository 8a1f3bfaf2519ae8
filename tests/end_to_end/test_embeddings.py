"""A real text encoder, all-MiniLM-L6-v2, from its checkpoint to vectors, against transformers' own copy of it."""

import asyncio
import json
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer

import aotc
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.errors import DeadlineExceeded, RequestError
from aotc.runtime.embedder import bucket

TEXTS = [
    "A cat sits on the mat.", "", "Ein Hund liegt auf dem Teppich.", "the stock market fell by 3,1 % today",
    "Fires were kept on hills, and ships read them as well as they could. " * 9, "x", "naïve café, 東京 🙂",
    "Keepers lived beside the lamp and counted the hours of the night by the turning of the lens. " * 4,
]  # fmt: skip
LONG = "hello " * 300


@pytest.fixture(scope="module")
def folder(minilm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("minilm") / "artifact"
    assert main(["compile", str(minilm), "--arch", "cpu", "--max-num-seqs", "8", "-o", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def embedder(folder):
    with aotc.load(folder) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def reference(minilm):
    """reference(ids of each text) -> vectors f64, as sentence-transformers makes them: the mean, of length 1."""
    torch = pytest.importorskip("torch")
    from transformers import BertModel

    model = BertModel.from_pretrained(str(minilm), dtype=torch.float64).eval()

    def embed(tokens):
        with torch.inference_mode():
            rows = [model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in tokens]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()

    return embed


@pytest.fixture(scope="module")
def tokens(minilm):
    """Ids of the texts by the checkpoint's own tokenizer, and of the first 256 of the long one."""
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [tokenizer.encode(text).ids for text in [*TEXTS, LONG]]


def relative(ours, theirs):
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def test_the_manifest_says_what_it_is(folder):
    model = open_artifact(folder).manifest.model
    assert (model.name, model.kind, model.family, model.dtype) == ("all-MiniLM-L6-v2", "embedding", "bert", "f32")
    assert (model.pooling, model.normalize, model.max_model_len, model.max_rows) == ("mean", True, 256, 8)
    assert model.parameters == 22_713_216 - 384 * 385  # without the pooler, which sentence-transformers does not run


def test_vectors_equal_those_of_transformers(embedder, reference, tokens):
    assert embedder.encode([*TEXTS, LONG], truncate=True) == tokens
    ours = embedder.embed([*TEXTS, LONG], truncate=True)
    assert ours.dtype == np.float32
    assert relative(ours, reference(tokens)) < 1e-5
    np.testing.assert_array_equal(embedder.embed(tokens), ours)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=1e-6)


def test_batches_change_nothing(embedder):
    """More texts than a batch takes, of all lengths, in any order: each as if it were alone."""
    texts = [" ".join(["lighthouse"] * n) for n in (1, 40, 3, 90, 17, 2, 2, 33, 5, 64, 8, 1, 31, 120, 12, 6, 7, 9, 11)]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed(text) for text in texts])
    assert relative(together, alone) < 1e-5
    assert embedder.embed([]).shape == (0, 384)


def test_sixteen_bit_weights_stay_near(minilm, tmp_path, reference, tokens):
    arguments = ["compile", str(minilm), "--arch", "cpu", "--dtype", "bf16", "--max-num-seqs", "4", "--quiet"]
    assert main([*arguments, "-o", str(tmp_path / "bf16")]) == 0
    with aotc.load(tmp_path / "bf16") as embedder:
        cosines = (embedder.embed(tokens) * reference(tokens)).sum(-1)
        assert embedder.memory.weights < 50 << 20
    assert cosines.min() > 0.999


def test_what_is_refused(embedder):
    for texts, message in (
        (LONG, "the text has 302 tokens, and the model takes 256"),
        ("x" * 100_000, "text must have at most 32768 bytes"),
        ([[]], "a text without tokens has no embedding"),
        ([[101, 30522]], "30522 is no token id: they are whole numbers from 0 to 30521"),
        ([[1] * 257], "the text has 257 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            embedder.embed(texts)


def test_threads_get_their_own_vectors(embedder):
    texts = [f"number {n}" for n in range(24)]
    expected, got = embedder.embed(texts), {}

    def ask(n):
        got[n] = embedder.embed(texts[n])[0]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert relative(np.stack([got[n] for n in range(len(texts))]), expected) < 1e-5


def test_an_event_loop_shares_batches(embedder):
    """Callers at once, of texts alike in length and not: each gets its own vectors, of a few runs in common."""
    texts = [[f"number {n}"] for n in range(12)] + [["a " * n for n in (40, 3, 100)], TEXTS, []]
    expected = [embedder.embed(some) for some in texts]
    embedder.embed(["x"])
    runs, run = [], embedder.model._run

    def counted(given, *more):
        runs.append(given[0].shape)
        return run(given, *more)

    async def all_at_once():
        return await asyncio.gather(*(embedder.aembed(some) for some in texts))

    asyncio.run(all_at_once())  # proves that rows are independent, which takes runs of its own
    embedder.model._batcher._run = counted
    got = asyncio.run(all_at_once())
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape and (not len(ours) or relative(ours, theirs) < 1e-5)
    assert sum(rows for rows, _ in runs) == sum(map(len, texts)) and len(runs) < 16
    assert {bucket(length) for _, length in runs} == {length for _, length in runs}


def test_an_event_loop_is_told_of_errors(embedder):
    async def ask(texts, **options):
        return await embedder.aembed(texts, **options)

    with pytest.raises(RequestError, match="the text has 302 tokens"):
        asyncio.run(ask(["short", LONG]))
    with pytest.raises(RequestError, match="deadline_ms is 0"):
        asyncio.run(ask("short", deadline_ms=0))
    with pytest.raises(DeadlineExceeded):
        asyncio.run(ask("short", deadline_ms=1e-6))
    assert asyncio.run(ask(LONG, truncate=True)).shape == (1, 384)


def test_the_command_line(folder, embedder, minilm, capsys):
    expected = embedder.embed("hello")[0]
    assert main(["run", str(folder), "--prompt", "hello", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_tokens"] == 3
    np.testing.assert_array_equal(np.array(answer["embedding"], np.float32), expected)
    assert main(["run", str(folder), "--prompt", "hello"]) == 0
    assert capsys.readouterr().out.startswith(f"{expected[0]:.6f} {expected[1]:.6f} ")
    assert main(["run", str(folder), "--prompt", "hello", "--top-k", "3"]) == 2
    assert "--top-k does not apply to a text encoder" in capsys.readouterr().err
    assert main(["verify", str(folder), "--against", str(minilm)]) == 0
    assert "ok   against all-MiniLM-L6-v2" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 0
    said = "all-MiniLM-L6-v2  embedding bert f32, pooled by mean, normalised, texts of up to 256 tokens"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag", [["--kv-layout", "paged"], ["--max-model-len", "513"], ["--max-num-batched-tokens", "64"]]
)
def test_flags_of_compile_that_do_not_apply(minilm, tmp_path, capsys, flag):
    assert main(["compile", str(minilm), "--arch", "cpu", "-o", str(tmp_path / "a"), "--quiet", *flag]) == 2
    assert flag[0] in capsys.readouterr().err


def test_buckets_are_the_next_step_up():
    for n in range(1, 513):
        assert n <= bucket(n) < n + max(8, n / 2) and bucket(bucket(n)) == bucket(n)

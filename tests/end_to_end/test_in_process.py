"""A language model inside an application: conversations on a real device, beside torch, and at the end of a process."""

import random
import subprocess
import sys
import textwrap

import pytest

import aotc
from aotc.errors import ArtifactError, RequestError

SETTINGS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.9}


@pytest.fixture
def program(both_layouts, repo_root):
    """program(script) -> what it prints, as a process of its own that has to end by itself without an error."""

    def run(script):
        command = [sys.executable, "-c", textwrap.dedent(script), str(both_layouts.path)]
        done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return run


@pytest.mark.parametrize("layout", ["static", "paged"])
def test_a_conversation_says_what_its_whole_text_would_say(both_layouts, layout):
    """With turns that are prefilled, cut and edited, of more conversations than slots. The cache begins as NaN."""
    rng = random.Random(3)
    with aotc.load(both_layouts.path, device="cpu", kv_layout=layout, max_num_seqs=3) as llm:
        llm._executor._kv[:] = 0xFF
        chats = [llm.session() for _ in range(5)]
        for turn in range(40):
            chat, new = rng.choice(chats), [rng.randrange(2, 200) for _ in range(rng.randrange(1, 12))]
            if rng.randrange(4) == 0 or len(chat.token_ids) > 70:
                chat.replace(chat.token_ids[: rng.randrange(30)])
            chat.prefill(new[:-1])
            stream = chat.stream(new[-1:], **SETTINGS, seed=turn)
            got = [next(stream).token_ids[0] for _ in range(rng.randrange(1, 8))]
            stream.close()
            prompt, said = chat.token_ids[: -len(got)], chat.token_ids[-len(got) :]
            assert list(said) == got and list(prompt[-len(new) :]) == new
            assert llm.generate(prompt, **SETTINGS, seed=turn).token_ids[: len(got)] == said


def test_without_a_tokenizer_there_are_token_ids_alone(both_layouts):
    with aotc.load(both_layouts.path, device="cpu", max_num_seqs=1) as llm:
        answer = llm.generate([5, 6], **SETTINGS, seed=1)
        assert answer.text == "" and len(answer.token_ids) == 8
        with pytest.raises(ArtifactError, match="has no tokenizer: give token ids$"):
            llm.generate("text")
        with pytest.raises(RequestError, match="^stop strings need a tokenizer, which the artifact has not: use stop_token_i"):
            llm.generate([5], stop="x")


HOST = """
    import logging, signal, sys, threading
    signals = [signal.getsignal(s) for s in signal.valid_signals()]
    ask = dict(max_tokens=8, temperature=0, ignore_eos=True)

    def use(llm):
        import asyncio
        whole = llm.generate([5, 6], **ask).token_ids
        assert asyncio.run(llm.agenerate([5, 6], **ask)).token_ids == whole
        with llm.session() as chat:
            chat.prefill([5])
            assert chat.generate([6], **ask).token_ids == whole
        return whole
"""


def test_beside_torch_and_without_a_trace(program):
    """Whichever is imported first; threads, signal handlers and the root logger are the application's."""
    lines = program(HOST + """
    import aotc
    first = aotc.load(sys.argv[1], device="cpu")
    said = use(first)
    assert "torch" not in sys.modules
    import torch
    a = torch.arange(90000, dtype=torch.float32).reshape(300, 300) / 90000
    product = a @ a
    second = aotc.load(sys.argv[1], device="cpu", kv_layout="paged")
    for _ in range(3):
        assert use(first) == use(second) == said and torch.equal(a @ a, product)
    first.close()
    assert use(second) == said
    second.close()
    assert torch.equal(a @ a, product)
    assert threading.enumerate() == [threading.main_thread()]
    assert [signal.getsignal(s) for s in signal.valid_signals()] == signals
    root = logging.getLogger()
    assert root.handlers == [] and root.level == logging.WARNING and not logging.getLogger("aotc").handlers
    print("fine", len(said))
    """)  # fmt: skip
    assert lines == ["fine", "8"]


def test_a_process_that_forgets_to_close_ends(program):
    """With an answer half computed in the thread of asyncio, a stream half read, and a thread that waits for its turn."""
    lines = program(HOST + """
    import aotc, asyncio
    llm = aotc.load(sys.argv[1], device="cpu")
    long = dict(ask, max_tokens=90)
    stream = llm.stream([5, 6], **long)
    next(stream)
    kept = []

    async def main():
        kept.append(await llm.astream([5, 6], **long).__aenter__())
        await anext(kept[0])
        threading.Thread(target=lambda: [llm.generate([7], **long) for _ in range(1000)], daemon=True).start()
        await anext(kept[0])

    asyncio.run(main())
    print("end")
    """)  # fmt: skip
    assert lines == ["end"]

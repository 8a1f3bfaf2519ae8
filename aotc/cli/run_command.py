"""Answer one prompt with an artifact: the text alone goes to standard output. Of a text encoder, the prompt's vector does.

Exit codes: 0; 2 for an error that is said in a line; 70 when the GPU failed while it answered; 130 for an interrupt."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import TYPE_CHECKING

from aotc.cli.options import add_device, add_kv_cache

if TYPE_CHECKING:
    from aotc.artifact.reader import Artifact
    from aotc.runtime.devices.opening import Opening


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", help="an artifact of a language model or a text encoder")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the question, or the text to embed; - reads standard input"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of the answer")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to this mass"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add_device(parser)
    add_kv_cache(parser, "static")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print text, token ids, finish reason and timings as JSON; of a text encoder, the whole vector",
    )


def run(options: argparse.Namespace) -> int:
    from aotc.runtime.devices.opening import begin_opening

    opening = begin_opening(options.artifact, options.device)  # before the imports, which take as long
    from aotc.artifact.reader import open_artifact
    from aotc.errors import RequestError

    artifact = open_artifact(options.artifact)
    if artifact.manifest.model.kind == "embedding":
        return _embed(options, artifact, opening)
    if artifact.manifest.model.kind != "llm":
        raise RequestError(f"{options.artifact} is no language model: call it from Python with aotc.load(...)(...)")
    from aotc.runtime.llm import LLM

    chat = not options.raw and artifact.has("chat_template.jinja")
    if chat and opening is not None:
        importlib.import_module("aotc.runtime.template_sandbox")  # needed later; the GPU is still being opened
    llm = LLM(
        artifact, max_num_seqs=1, device=options.device, kv_layout=options.kv_layout,
        kv_cache_memory=options.kv_cache_memory, opening=opening,
    )  # fmt: skip
    settings = {
        "max_tokens": options.max_tokens, "temperature": options.temperature, "top_p": options.top_p,
        "top_k": options.top_k, "seed": options.seed,
    }  # fmt: skip
    text = _standard_input() if options.prompt == "-" else options.prompt
    prompt = llm.chat_tokens([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
    if not prompt:
        raise RequestError("the prompt has no tokens: give some text")
    if options.json:
        answer = llm.generate(prompt, **settings)
        fields = {
            "text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason,
            "prompt_tokens": len(prompt), "timings": vars(answer.timings),
        }  # fmt: skip
        print(json.dumps(fields, ensure_ascii=False))
        return 0
    for chunk in llm.stream(prompt, **settings):
        print(chunk.text, end="", flush=True)
    print()
    return 0


SHOWN = 8  # numbers of a vector that are printed for people


def _embed(options: argparse.Namespace, artifact: Artifact, opening: Opening | None) -> int:
    """Prints the vector of the prompt: its first numbers, or all of it as JSON."""
    from aotc.errors import RequestError
    from aotc.runtime.embedder import Embedder

    usual = {"raw": False, "max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None,
             "kv_layout": None, "kv_cache_memory": None}  # fmt: skip
    for name, value in usual.items():
        if getattr(options, name) != value:
            raise RequestError(f"--{name.replace('_', '-')} does not apply to a text encoder: leave it out")
    with Embedder(artifact, device=options.device, opening=opening) as embedder:
        tokens = embedder.encode([_standard_input() if options.prompt == "-" else options.prompt])
        vector = embedder.embed(tokens)[0].tolist()
    if options.json:
        print(json.dumps({"embedding": vector, "prompt_tokens": len(tokens[0])}))
    else:
        more = f" ... ({len(vector)} numbers; --json prints all)" if len(vector) > SHOWN else ""
        print(" ".join(f"{x:.6f}" for x in vector[:SHOWN]) + more)
    return 0


def _standard_input() -> str:
    from aotc.errors import RequestError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on standard input is no UTF-8 at byte {error.start}") from None

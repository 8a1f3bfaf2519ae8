"""Flags that several commands share."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def parse_bytes(flag: str, text: str) -> int:
    """`1048576`, `512MiB` or `1.5 GB` as bytes. Raises RequestError."""
    from aotc.errors import RequestError

    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2].upper() not in UNITS or (match[2] == "" and "." in match[1]):
        raise RequestError(f"{flag} {text}: write a number of bytes, or one with a unit, such as 512MiB or 2GB")
    whole, _, part = match[1].partition(".")
    return int(whole + part) * UNITS[match[2].upper()] // 10 ** len(part)


ALL_SEQS = 1024
"""Sequences at once where nobody says how many: a model takes as many as it was compiled for, and never more than this."""


def add_device(parser: Parser) -> None:
    """`--device`: where an artifact runs."""
    parser.add_argument(
        "--device", default="auto", metavar="NAME",
        help="cpu, cuda, cuda:NUMBER, or auto: the GPU if the artifact has code for it (auto)",
    )  # fmt: skip


def add_kv_cache(parser: Parser, usual: str) -> None:
    """`--kv-layout` and `--kv-cache-memory`, with vLLM's name for the latter beside ours."""
    parser.add_argument(
        "--kv-layout", choices=["static", "paged"], default=None,
        help=f"a KV cache for each sequence at its longest, or pages as they grow (usually {usual})",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="BYTES",
        help="memory of the KV cache, as 2GiB (enough for all sequences, within 80%% of the free memory where paged)",
    )  # fmt: skip

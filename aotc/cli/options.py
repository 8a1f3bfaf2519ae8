"""Flags that several commands share."""

from __future__ import annotations

import argparse


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`: where an artifact runs; the names are those of `aotc.runtime.devices.opening.DEVICES`."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: the GPU if the artifact has code for it"
    )


def add_kv_cache(parser: argparse.ArgumentParser, usual: str) -> None:
    """`--kv-layout` and `--kv-cache-memory`, with vLLM's name for the latter beside ours."""
    parser.add_argument(
        "--kv-layout", choices=["static", "paged"], default=None,
        help=f"a KV cache for each sequence at its longest, or pages as they grow (usually {usual})",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="BYTES",
        help="memory of the KV cache, as 2GiB (enough for all sequences, within 80%% of the free memory where paged)",
    )  # fmt: skip

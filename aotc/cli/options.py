"""Flags that several commands share."""

from __future__ import annotations

import argparse


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`: where an artifact runs; the names are those of `aotc.runtime.devices.opening.DEVICES`."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: the GPU if the artifact has code for it"
    )

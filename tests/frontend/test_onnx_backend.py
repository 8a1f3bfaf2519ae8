"""onnx's own backend suite: each node test agrees, or is refused for the reason that tests/frontend/onnx_refused.txt
names. An operator that is lost, won or refused for another reason shows as a difference of that file."""

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from onnx.backend.test.case.test_case import TestCase

from aotc.errors import UnsupportedError
from aotc.frontend.onnx.operators import OPERATORS
from tests.frontend.onnx_cases import cases, run

REFUSED = Path(__file__).with_name("onnx_refused.txt")
UNTESTED = {"GlobalLpPool", "NonZero", "Not"}
"""Operators with a row that the suite has no passing case for: test_onnx_importer.py has theirs."""


def reason(message: str, path: Path) -> str:
    """A refusal without names of tensors and files, which say nothing about support."""
    return re.sub(r"'[^']*'", "...", message.replace(str(path), "the file"))


def listed(refused: dict[tuple[str, str], list[str]]) -> str:
    """The file's text: an operator and a reason, and below it the cases that are refused for it."""
    blocks = (
        f"{operator}: {why}\n" + "".join(f"    {name}\n" for name in sorted(names))
        for (operator, why), names in sorted(refused.items())
    )
    return "".join(blocks)


def outcome(case: TestCase, path: Path, dynamic: bool = False) -> tuple[str, str]:
    """("passed", ""), ("refused", reason) or ("wrong", what)."""
    try:
        found = run(case, path, dynamic)
    except UnsupportedError as error:
        assert "\n" not in str(error)
        return "refused", reason(str(error), path)
    except Exception as error:  # a case is a valid model: anything but a refusal is a fault of ours
        found = f"{type(error).__name__}: {error}"
    return ("wrong", found) if found else ("passed", "")


@pytest.mark.slow
def test_every_case_agrees_or_is_refused_for_a_known_reason(tmp_path, update_golden):
    """With sizes as they stand, and once more with dims in their place (not for expansions), where fewer compile."""
    refused, wrong, passed, dynamic = defaultdict(list), {}, Counter(), Counter()
    for operator, group in cases().items():
        for case in group:
            kind, why = outcome(case, tmp_path / "model.onnx")
            if kind == "refused":
                refused[operator, why].append(case.name)
                continue
            passed[operator] += kind == "passed"
            again, other = "", ""
            if "_expanded" not in case.name:
                again, other = outcome(case, tmp_path / "model.onnx", dynamic=True)
                dynamic[again] += 1
            wrong |= {f"{case.name}{label}": w for label, k, w in (("", kind, why), (" (dynamic)", again, other))
                      if k == "wrong"}  # fmt: skip
    assert wrong == {}
    if update_golden:
        REFUSED.write_text(listed(refused))
    assert listed(refused) == REFUSED.read_text(), "see the difference with --update-golden"
    assert set(OPERATORS) - set(+passed) == UNTESTED
    assert passed.total() == 1510
    assert dynamic == {"passed": 874, "refused": 233}

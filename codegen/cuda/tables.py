"""Schedules by architecture and shape class: a table of measured ones is asked first, then a rule of thumb.

A table is a JSON file, `schedules/ARCH.json` for what comes with aotc, and `aotc tune` writes more. It is part of
what a compile reads: the same model and tables give the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from aotc.errors import RequestError

FORMAT = 1
MOST_TRIES = 30  # of a kernel: of more candidates, every second or third is tried
S = TypeVar("S")
P = TypeVar("P")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured schedule: the fields of the family's dataclass, what it took, and what the rule's took there."""

    schedule: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    microseconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    by_rule: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measured schedules of an architecture by key; `device` is the card that they were measured on."""

    format: int
    arch: str
    schedules: dict[str, Entry]
    device: str = ""


class Setting(Protocol):
    """What a schedule is chosen for: see `aotc.codegen.cuda.frame.Setting`."""

    @property
    def arch(self) -> str: ...
    @property
    def schedules(self) -> Schedules | None: ...


@dataclass(frozen=True)
class Family(Generic[S, P]):
    """A template with a choice. `schedule` is a dataclass of positive integers, all that is chosen; shapes of class P
    print as what the choice depends on. `rule` and `candidates` (the ones that `aotc tune` tries) take (arch, shape);
    `wrong` says why a schedule does not fit a shape, or nothing. `smaller` lists shapes whose measured schedules are a
    better guess for a shape than the rule's, the best one first."""

    name: str
    schedule: type[S]
    rule: Callable[[str, P], S]
    candidates: Callable[[str, P], Iterable[S]]
    wrong: Callable[[P, S], str] = lambda _, __: ""
    smaller: Callable[[P], Iterable[P]] | None = None

    def key(self, shape: P) -> str:
        """The shape class, as tables name it. Keys are made here alone."""
        return f"{self.name} {shape}"

    def choose(self, setting: Setting, shape: P) -> S:
        """The schedule of a kernel. Raises RequestError where the table has one that does not fit."""
        schedules = setting.schedules or Schedules(setting.arch)
        return schedules.choose(self, shape)

    def tries(self, arch: str, shape: P) -> list[S]:
        """The rule's schedule, then the other candidates that fit, each once."""
        first, *rest = dict.fromkeys([self.rule(arch, shape), *self.candidates(arch, shape)])
        rest = [s for s in rest if not self.wrong(shape, s)]
        return [first, *rest[:: -(-len(rest) // (MOST_TRIES - 1)) or 1]]


@dataclass(frozen=True)
class Choice:
    """What was chosen for a key, and whether a table had it."""

    family: Family[Any, Any]
    shape: Any
    schedule: Any
    measured: bool


class Schedules:
    """Chooses the schedules of one architecture and notes each choice in `chosen`, by key.

    Tables of other architectures are passed over; a later table goes before an earlier one, all before what comes
    with aotc.
    """

    def __init__(self, arch: str, tables: Iterable[Table] = ()) -> None:
        self.arch, self.chosen = arch, dict[str, Choice]()
        self.entries = dict(packaged(arch).schedules)
        for table in tables:
            if table.arch == arch:
                self.entries |= table.schedules

    def choose(self, family: Family[S, P], shape: P) -> S:
        key = family.key(shape)
        entry = self.entries.get(key)
        schedule = self._guess(family, shape) if entry is None else self._read(key, family, shape, entry)
        self.chosen[key] = Choice(family, shape, schedule, entry is not None)
        return schedule

    def _guess(self, family: Family[S, P], shape: P) -> S:
        for other in family.smaller(shape) if family.smaller is not None else ():
            key = family.key(other)
            if key in self.entries:
                schedule = self._read(key, family, other, self.entries[key])
                if not family.wrong(shape, schedule):
                    return schedule
        return family.rule(self.arch, shape)

    def _read(self, key: str, family: Family[S, P], shape: P, entry: Entry) -> S:
        try:
            schedule = family.schedule(**entry.schedule)
            reason = family.wrong(shape, schedule)
        except (TypeError, ValueError) as error:
            reason, schedule = str(error).partition("() ")[2] or str(error), None
        if reason or schedule is None:
            raise RequestError(
                f"the table's schedule of {key!r} for {self.arch} does not fit: {reason}; "
                "measure it again with `aotc tune --force`, or take it out"
            )
        return schedule

    def used(self) -> Table:
        """All that was chosen, as a table: what an artifact keeps, so that its kernels can be rendered again."""
        return Table(FORMAT, self.arch, {k: Entry(asdict(c.schedule)) for k, c in sorted(self.chosen.items())})

    def untuned(self) -> str:
        """A line for the user on what no table had, or nothing."""
        missing = sum(not c.measured for c in self.chosen.values())
        if not missing:
            return ""
        return (
            f"{missing} of {len(self.chosen)} schedules of {self.arch} are untuned (rules of thumb): "
            "run `aotc tune` on such a card"
        )


class Forced(Schedules):
    """Takes these schedules by key, whatever tables say: for measuring candidates."""

    def __init__(self, arch: str, forced: Mapping[str, Any]) -> None:
        super().__init__(arch)
        self._forced = forced

    def choose(self, family: Family[S, P], shape: P) -> S:
        forced = self._forced.get(family.key(shape))
        return super().choose(family, shape) if forced is None else forced


@cache
def packaged(arch: str) -> Table:
    """The table that comes with aotc; an empty one where there is none."""
    file = resources.files("aotc.codegen.cuda") / "schedules" / f"{arch}.json"
    return decode_table(file.read_bytes(), file.name) if file.is_file() else Table(FORMAT, arch, {})


def read_table(path: str | Path) -> Table:
    """Reads and checks a table. Raises RequestError in one line for a damaged one, OSError where there is no file."""
    return decode_table(Path(path).read_bytes(), str(path))


def decode_table(data: bytes, name: str) -> Table:
    """A table from JSON. Raises RequestError, naming the file."""
    try:
        table = msgspec.json.decode(data, type=Table)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} is no table of schedules: {error}; make one with `aotc tune`") from None
    if table.format != FORMAT:
        raise RequestError(f"{name} is a table of format {table.format}, not {FORMAT}: make it again with `aotc tune`")
    return table


def encode_table(table: Table) -> bytes:
    """JSON with keys in order, the same bytes for the same table."""
    return msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n"


def write_table(table: Table, path: str | Path) -> None:
    """Replaces the file in one step."""
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(encode_table(table))
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

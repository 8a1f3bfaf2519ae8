"""`aotc tune` and `compile --schedules`: candidates compile here, and what measures them is a function of the test."""

import json
from dataclasses import asdict, dataclass, field

import msgspec
import numpy as np
import pytest

from aotc import meter
from aotc.artifact.reader import open_artifact
from aotc.codegen.cuda.frame import Setting
from aotc.codegen.cuda.schedule import ATTENTION, ATTENTION_DECODE, MATMUL, MATVEC, SKINNY, Heads, Linear, Tile
from aotc.codegen.cuda.tables import FORMAT, Entry, Family, Schedules, Table, encode_table, packaged, read_table
from aotc.errors import DeviceError, DeviceLostError, RequestError
from aotc.ir.dtypes import bf16, f32
from aotc.tuner import Timing

SIZE = ["--weights", "random:7", "--dtype", "bf16", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]


@dataclass
class FakeMeter:
    """Every tile takes 10 us, less where `better` says so; outputs are ones, or what `wrong` makes of them."""

    arch: str = "sm90"
    device: str = "Fake GPU"
    better: dict = field(default_factory=dict)  # number of a job's trial -> microseconds
    wrong: dict = field(default_factory=dict)  # number -> output, or an error to raise
    kernels: int = 1000  # after these the GPU is lost
    keys: list = field(default_factory=list)
    trials: list = field(default_factory=list)

    def __call__(self, job, trial):
        if not self.keys or self.keys[-1] != job.key:
            if len(self.keys) == self.kernels:
                raise DeviceLostError("the GPU is lost")
            self.keys.append(job.key)
            self.trials.append([])
        number = len(self.trials[-1])
        self.trials[-1].append(trial)
        output = self.wrong.get(number, np.ones(4, np.float32))
        if isinstance(output, Exception):
            raise output
        return Timing(self.better.get(number, 10.0), [output])


@pytest.fixture
def use_meter(monkeypatch):
    """use_meter(**options) -> a fake meter, which stands in for the GPU's."""

    def use(**options):
        made = FakeMeter(**options)
        monkeypatch.setattr(meter, "open_meter", lambda arch: made)
        return made

    return use


@pytest.fixture
def few_candidates(monkeypatch):
    monkeypatch.setattr("aotc.codegen.cuda.tables.MOST_TRIES", 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("tune")
    (folder / "config.json").write_text(json.dumps(tiny_config))
    return folder


def test_the_fastest_lands_in_the_table_and_the_next_compile_uses_it(
    cli, use_meter, few_candidates, checkpoint, tmp_path
):
    table, artifact = tmp_path / "table.json", tmp_path / "artifact"
    made = use_meter(better={1: 5.0, 2: 7.0})
    answer = cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", table)
    assert answer.code == 0, answer.err
    written = read_table(table)
    assert written.device == "Fake GPU" and sorted(written.schedules) == sorted(made.keys)
    assert {k.split()[0] for k in made.keys} == {"matvec", "skinny", "attention_decode"}
    assert {" paged" in k for k in made.keys if k.startswith("attention_decode 2")} == {True, False}
    assert all(e.microseconds == 5.0 and e.by_rule == 10.0 for e in written.schedules.values())
    assert [len(t) for t in made.trials] == [3] * len(made.keys)
    assert f"{len(made.keys)} of the {len(made.keys)} schedules" in answer.err and "Fake GPU" in answer.err

    # Nothing is left to measure; --force measures again, and better times replace the old ones.
    again = use_meter()
    assert cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", table).code == 0 and again.keys == []
    assert read_table(table) == written
    forced = use_meter(better={2: 1.0})
    assert cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", table, "--force", "--quiet").code == 0
    assert forced.keys == made.keys
    assert all(e.microseconds == 1.0 for e in read_table(table).schedules.values())

    table.write_bytes(encode_table(written))
    answer = cli("compile", checkpoint, *SIZE, "--arch", "sm90", "--schedules", table, "-o", artifact)
    assert answer.code == 0, answer.err
    opened = open_artifact(artifact)
    kernels = {
        (k.symbol, tuple(k.meta["grid"]))
        for p in opened.manifest.targets[0].programs if p.kind == "decode"
        for k in opened.plan(p.plan).kernels
    }  # fmt: skip
    symbols = {symbol for symbol, _ in kernels}
    # Symbols hash the source: a cache's stride, which tuning leaves out, changes those of attention.
    linear = [t for key, t in zip(made.keys, made.trials, strict=True) if not key.startswith("attention")]
    assert len(linear) > 3 and all(t[1].source.symbol in symbols and t[0].source.symbol not in symbols for t in linear)
    used = msgspec.json.decode(opened.read("schedules/sm90.json"), type=Table)
    assert {k: used.schedules[k].schedule for k in made.keys} == {k: written.schedules[k].schedule for k in made.keys}
    untuned = len(used.schedules) - len(made.keys)
    assert (
        f"{untuned} of {len(used.schedules)} schedules of sm90 are untuned (rules of thumb): run `aotc tune`"
        in answer.err
    )


def test_a_budget_stops_between_kernels_and_the_next_run_goes_on(
    cli, use_meter, few_candidates, checkpoint, tmp_path, monkeypatch
):
    table, clock = tmp_path / "table.json", iter([0.0, 0.0, 1.0, 99.0])
    monkeypatch.setattr("aotc.tuner.clock", lambda: next(clock))
    first = use_meter()
    answer = cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", table, "--budget", "10")
    assert answer.code == 0 and len(first.keys) == 2 == len(read_table(table).schedules)
    assert "run the command again to go on" in answer.err
    monkeypatch.undo()
    monkeypatch.setattr("aotc.codegen.cuda.tables.MOST_TRIES", 3)
    second = use_meter()
    assert cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", table).code == 0
    assert second.keys and not set(first.keys) & set(second.keys)
    assert sorted([*first.keys, *second.keys]) == sorted(read_table(table).schedules)


@pytest.mark.parametrize(
    ("wrong", "reason", "kept"),
    [
        ({1: DeviceError("too many resources")}, "too many resources", 2),
        ({1: np.full(4, 1.5, np.float32)}, "differs from the first candidate's by 0.5", 2),
        ({1: np.full(4, np.nan, np.float32)}, "not finite", 2),
        ({0: DeviceError("no"), 2: np.zeros(4, np.float32)}, "by 1", 1),
    ],
)
def test_candidates_that_fail_or_differ_are_skipped_with_a_reason(
    cli, use_meter, few_candidates, checkpoint, tmp_path, wrong, reason, kept
):
    made = use_meter(wrong=wrong, better={1: 2.0, 2: 5.0})
    answer = cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", tmp_path / "t.json")
    assert answer.code == 0 and answer.err.count("skipped ") == len(wrong) * len(made.keys) and reason in answer.err
    assert {e.microseconds for e in read_table(tmp_path / "t.json").schedules.values()} == {made.better[kept]}


def test_a_lost_gpu_ends_the_command_and_what_was_measured_stays(cli, use_meter, few_candidates, checkpoint, tmp_path):
    use_meter(kernels=2)
    answer = cli("tune", checkpoint, *SIZE, "--programs", "decode", "-o", tmp_path / "t.json", "--quiet")
    assert (answer.code, answer.err) == (70, "aotc: error: the GPU is lost\n")
    assert len(read_table(tmp_path / "t.json").schedules) == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--programs", "prefill"], ["--programs prefill: this model has decode, extend"]),
        (["--arch", "cpu"], ["one GPU architecture"]),
        (["--arch", "sm80,sm90"], ["one GPU architecture"]),
        (["--budget", "0"], ["--budget 0"]),
        (["--persistent-kernel", "on"], ["--persistent-kernel on does not apply to tune"]),
        (["-o", "{}/other.json"], ["has schedules of sm80, not sm90"]),
        (["-o", "{}/card.json"], ["was measured on H100, this is Fake GPU"]),
        (["-o", "{}/torn.json"], ["torn.json is no table of schedules"]),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(cli, use_meter, checkpoint, tmp_path, arguments, parts):
    (tmp_path / "other.json").write_bytes(encode_table(Table(FORMAT, "sm80", {})))
    (tmp_path / "card.json").write_bytes(encode_table(Table(FORMAT, "sm90", {"a": Entry({"m": 1})}, "H100")))
    (tmp_path / "torn.json").write_bytes(b'{"format": 1,')
    use_meter()
    output = [] if "-o" in arguments else ["-o", tmp_path / "t.json"]
    arguments = [a.replace("{}", str(tmp_path)) for a in arguments]
    cli("tune", checkpoint, *SIZE, "--quiet", *output, *arguments).refuses(*parts)


# Tables


def table_of(**entries):
    return Table(FORMAT, "sm90", {k: Entry(v) for k, v in entries.items()})


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"{", ["is no table of schedules", "aotc tune"]),
        (b"[]", ["is no table of schedules"]),
        (b"\xff", ["is no table of schedules"]),
        (b'{"format": 2, "arch": "sm90", "schedules": {}}', ["format 2, not 1"]),
        (b'{"format": 1, "arch": "sm90", "schedules": {"a": {"schedule": {"m": 0}}}}', ["no table", "schedules"]),
        (b'{"format": 1, "arch": "sm90", "schedules": {"a": {"tile": {}}}}', ["no table", "tile"]),
        (b'{"format": 1, "arch": "sm80", "schedules": {}}', ["is for sm80, which --arch does not name"]),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(cli, tmp_path, data, parts):
    (tmp_path / "t.json").write_bytes(data)
    answer = cli("compile", "missing", "--arch", "sm90", "-o", tmp_path / "o", "--schedules", tmp_path / "t.json")
    answer.refuses("t.json", *parts)


@pytest.mark.parametrize(
    ("family", "shape", "schedule", "reason"),
    [
        (MATVEC, Linear(1, 64, 64, 1, bf16), {"m": 2, "n": 4, "k": 64}, "m must be 1"),
        (MATVEC, Linear(1, 64, 64, 1, bf16), {"m": 1, "n": 3, "k": 64}, "n = 3 is no power of two"),
        (MATVEC, Linear(1, 64, 64, 1, bf16), {"m": 1, "n": 4}, "missing 1 required positional argument: 'k'"),
        (MATVEC, Linear(1, 64, 64, 1, bf16), {"m": 1, "n": 4, "k": 64, "z": 1}, "unexpected keyword argument 'z'"),
        (SKINNY, Linear(40, 64, 64, 1, bf16), {"m": 32, "n": 16, "k": 64}, "m must be at least 40"),
        (MATMUL, Linear(128, 64, 64, 1, bf16), {"m": 64, "n": 8, "k": 64}, "at least 16"),
        (ATTENTION, Heads(128, 2, 32, 64, bf16), {"m": 16, "n": 64, "k": 64}, "m must be at least 32"),
        (ATTENTION_DECODE, Heads(1, 2, 4, 64, bf16), {"m": 16, "n": 64, "k": 32}, "k must be 64"),
        (ATTENTION_DECODE, Heads(1, 2, 4, 64, bf16), {"m": 16, "n": 64, "k": 64, "splits": 3}, "power of two"),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_is_refused_in_one_line(family, shape, schedule, reason):
    schedules = Schedules("sm90", [table_of(**{family.key(shape): schedule})])
    with pytest.raises(RequestError, match=f"^[^\n]*{family.key(shape)!r}[^\n]*does not fit: [^\n]*{reason}[^\n]*$"):
        family.choose(Setting("sm90", (), (), schedules=schedules), shape)


def test_later_tables_go_first_and_those_of_other_architectures_do_not_count():
    shape = Linear(1, 4096, 4096, 1, bf16)
    key = MATVEC.key(shape)
    assert key == "matvec 1 4096x4096x1 bf16"
    one, two = (table_of(**{key: {"m": 1, "n": n, "k": 1024}}) for n in (1, 2))
    other = msgspec.structs.replace(two, arch="sm80")
    schedules = Schedules("sm90", [two, one, other])
    assert MATVEC.choose(Setting("sm90", (), (), schedules=schedules), shape) == Tile(1, 1, 1024)
    rule = MATVEC.choose(Setting("sm90", (), ()), shape)
    assert rule == MATVEC.rule("sm90", shape) != Tile(1, 1, 1024)
    assert schedules.untuned() == ""
    SKINNY.choose(Setting("sm90", (), (), schedules=schedules), shape)
    assert schedules.untuned().startswith("1 of 2 schedules of sm90 are untuned")


def test_what_is_good_for_many_rows_is_guessed_for_more():
    layer = [Linear(rows, 120, 72, 1, bf16) for rows in (128, 256, 512, 2048)]
    small, large = {"m": 64, "n": 32, "k": 32}, {"m": 128, "n": 16, "k": 16}
    schedules = Schedules("sm80", [msgspec.structs.replace(
        table_of(**{MATMUL.key(layer[0]): small, MATMUL.key(layer[2]): large}), arch="sm80")])  # fmt: skip
    setting = Setting("sm80", (), (), schedules=schedules)
    assert [MATMUL.choose(setting, s).m for s in layer] == [64, 64, 128, 128]
    for other in (Linear(64, 120, 72, 1, bf16), Linear(512, 120, 72, 2, bf16), Linear(512, 120, 72, 1, f32)):
        assert MATMUL.choose(setting, other) == MATMUL.rule("sm80", other)
    assert schedules.untuned().startswith("5 of 7 schedules of sm80 are untuned")


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"])
def test_packaged_tables_fit_and_candidates_are_few_and_fit(arch):
    assert packaged(arch).arch == arch
    for dtype in (bf16, f32):
        linear = [Linear(1, n, d, p, dtype) for n, d, p in ((3072, 2048, 1), (8192, 2048, 2), (120, 72, 1))]
        heads = [Heads(64, h, g, d, dtype) for h, g, d in ((8, 4, 128), (3, 3, 8), (1, 8, 256), (2, 40, 64))]
        cases = [(f, s) for f in (MATVEC, SKINNY, MATMUL) for s in linear]
        cases += [(f, s) for f in (ATTENTION, ATTENTION_DECODE) for s in heads]
        for family, shape in cases:
            tries = family.tries(arch, shape)
            assert tries[0] == family.rule(arch, shape) and len(set(tries)) == len(tries) <= 30, family.key(shape)
            assert all(not family.wrong(shape, t) for t in tries), family.key(shape)


def test_a_family_is_a_row():
    """All that another template needs: a dataclass of its own, a rule, candidates."""

    @dataclass(frozen=True)
    class Ring:
        stages: int

    ring = Family("ring", Ring, lambda arch, shape: Ring(4), lambda arch, shape: [Ring(2), Ring(4)])
    schedules = Schedules("sm90", [table_of(**{"ring small": {"stages": 7}})])
    setting = Setting("sm90", (), (), schedules=schedules)
    assert ring.choose(setting, "small") == Ring(7) and ring.choose(setting, "large") == Ring(4)
    assert ring.tries("sm90", "small") == [Ring(4), Ring(2)]
    assert {k: asdict(c.schedule) for k, c in schedules.chosen.items()} == {
        "ring small": {"stages": 7}, "ring large": {"stages": 4},
    }  # fmt: skip

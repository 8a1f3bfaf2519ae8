"""The command line: what is wrong is said in one line on standard error with exit code 2, and nothing is left behind."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest

import aotc
from aotc.cli import COMMANDS
from aotc.cli.compile_command import parse_dims
from aotc.cli.serve_command import FIXED
from aotc.errors import RequestError

FAMILIES = "llama, mistral, qwen2, qwen3"
KEPT = Path(__file__).resolve().parents[1] / "end_to_end" / "artifact_format_1"

FLAGS = {
    "compile": "--arch --output --dtype --max-model-len --max-num-seqs --max-num-batched-tokens --weights --revision "
    "--dim --batch-sizes --quiet --schedules --workspace-size --batch-invariant "
    "--persistent-kernel MODEL",
    "tune": "--arch --programs --budget --output --force --dtype --max-model-len --max-num-seqs --weights --quiet MODEL",
    "run": "--prompt --raw --max-tokens --temperature --top-p --top-k --seed --json DIR",
    "serve": "--host --port --served-model-name --api-key --max-num-seqs --max-num-queued-reqs --shutdown-timeout "
    "--metrics-prefix --log-level --disable-access-log DIR",
    "inspect": "--json DIR",
    "verify": "--against DIR",
    "bench": "startup latency serve",
    "bench startup": "--json --repeat --prompt-len --profile --device DIR",
    "bench latency": "--json --repeat --prompt-len --profile --device DIR",
    "bench serve": "--model --api-key --endpoint --num-prompts --request-rate --burstiness --max-concurrency --sweep "
    "--random-input-len --random-output-len --random-range-ratio --random-prefix-len --seed --ignore-eos --num-warmups "
    "--timeout --goodput --slo --metric-percentiles --price-per-hour --save-result --result-dir --plot URL|DIR",
}


# Help, and arguments that fit no command


def test_help_names_every_command(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    answer = cli("--help")
    assert answer.code == 0 and answer.err == ""
    assert {command.partition(" ")[0] for command in FLAGS} == COMMANDS.keys()
    assert [name for name, text in COMMANDS.items() if f"{name} " not in answer.out or text not in answer.out] == []


@pytest.mark.parametrize("command", FLAGS)
def test_help_of_a_command_names_its_flags(cli, command):
    answer = cli(*command.split(), "--help")
    assert answer.code == 0 and answer.err == ""
    assert [flag for flag in FLAGS[command].split() if flag not in answer.out] == []


def test_version(cli):
    answer = cli("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"aotc {aotc.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("", ["required: COMMAND", "aotc --help"]),
        ("eat", ["invalid choice: 'eat'"]),
        ("compile m", ["required: --arch, -o/--output", "aotc compile --help"]),
        ("compile m --arch sm12 -o o", ["no target 'sm12': choose from cpu, x86-64-v3", "sm90 (h100"]),
        ("compile m --arch , -o o", ["--arch names no target"]),
        ("compile m --arch cpu -o o --dtype q4", ["'q4'", "bf16", "f32"]),
        ("compile m --arch cpu -o o --max-num-s 4", ["unrecognized arguments: --max-num-s"]),
        ("bench startup o --repeat 0", ["--repeat and --prompt-len are at least 1"]),
        ("serve o --port 70000", ["--port is 0 to 65535"]),
        ("serve o --max-num-seqs 0", ["--max-num-seqs"]),
        ("serve o --port http", ["--port", "'http'", "aotc serve --help"]),
    ],
)
def test_wrong_arguments(cli, arguments, parts):
    cli(*arguments.split()).refuses(*parts)


@pytest.mark.parametrize("flag", FIXED)
@pytest.mark.parametrize("value", [["half"], []])
def test_what_compiling_decided_is_not_decided_again(cli, flag, value):
    say = f"{flag} is fixed at compile time: recompile with `aotc compile ... {FIXED[flag]} "
    cli("serve", KEPT, flag, *value).refuses(say)


def test_wrong_environment(cli, monkeypatch):
    monkeypatch.setenv("AOTC_LOG", "loud")
    cli("inspect", KEPT).refuses("AOTC_LOG is 'loud'; set it to one of debug, info")


def test_output_that_cannot_be_written(process):
    with open("/dev/full", "w") as full:
        answer = process.end(process.start("inspect", KEPT, stdout=full))
    assert answer.code == 2 and answer.err == "aotc: error: cannot read or write the output: No space left on device\n"


def test_a_reader_that_is_gone_is_no_error(process):
    """As in `aotc inspect DIR | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    answer = process.end(process.start("inspect", KEPT, stdout=writer))
    os.close(writer)
    assert (answer.code, answer.err) == (0, "")


# Sources. Each compile names a folder whose parent is not there: neither may be there afterwards.


@pytest.fixture
def refused(cli, tmp_path):
    """refused(source, *parts, options=()): a compile that must be refused, in a line with these parts."""

    def call(source: object, *parts: str, options=()) -> None:
        before = sorted(p.name for p in tmp_path.iterdir())
        output = tmp_path / "made" / "out"
        cli("compile", source, "--arch", "x86-64-v3", "--quiet", "-o", output, *options).refuses(*parts)
        assert sorted(p.name for p in tmp_path.iterdir()) == before

    return call


@pytest.fixture
def checkpoint(made_checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint to spoil."""
    return Path(shutil.copytree(made_checkpoint, tmp_path / "tiny"))


@pytest.fixture
def reached(monkeypatch):
    """Lets a compile end where the source was accepted, with this error."""

    def accept(*_):
        raise RequestError("the source was accepted")

    monkeypatch.setattr("aotc.frontend.decoder.trace_decoder", accept)
    return "the source was accepted"


def edit(checkpoint: Path, **settings) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return checkpoint


def test_the_sources_are_accepted_whole(refused, reached, checkpoint, made_gguf):
    refused(checkpoint, reached)
    refused(made_gguf, reached)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("m.gguf", "there is no file m.gguf: check the path"),
        ("folder/m.gguf", "there is no file folder/m.gguf: check the path"),  # not a hub id
        ("/nowhere/m.safetensors", "there is no file /nowhere/m.safetensors: check the path"),
        ("m.onnx", "m.onnx cannot be read: No such file or directory"),
        ("folder", "there is no file or folder folder, and it is no hub id (org/name): check the path"),
        ("/nowhere/m", "there is no file or folder /nowhere/m, and it is no hub id (org/name): check the path"),
    ],
)
def test_a_path_that_is_not_there(refused, name, part):
    refused(name, part)


def test_files_that_are_no_models(refused, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x02pickle")
    refused(tmp_path / "model.bin", "is no model that aotc reads: give a .gguf file or a Hugging Face folder")
    (tmp_path / "m.onnx").write_bytes(b"onnx?")
    refused(tmp_path / "m.onnx", "is no ONNX file, or is cut off")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "has no config.json: give the folder of a Hugging Face checkpoint")
    (tmp_path / "folder" / "a.gguf").write_bytes(b"")
    refused(tmp_path / "folder", "has no config.json: give a file in it ('a.gguf')")
    refused(tmp_path / "folder" / "a.gguf", "cannot read")


def test_a_hub_id_that_is_not_here(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    refused("org/model", "org/model is no file or folder here", "get it with `hf download org/model --revision main`")
    refused("org/model", "`hf download org/model --revision v1.0`", options=["--revision", "v1.0"])
    refused("org/model", "revision '../x' is no name of a branch", options=["--revision", "../x"])


def test_what_aotc_does_not_compile(refused, checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(tmp_path / "aside")
    refused(checkpoint, "has neither model.safetensors nor model.safetensors.index.json")
    (checkpoint / "pytorch_model.bin").write_bytes(b"pickle")
    refused(checkpoint, "pickled .bin alone, which can run code: convert them with", "save_pretrained")
    (tmp_path / "aside").rename(checkpoint / "model.safetensors")
    edit(checkpoint, quantization_config={"quant_method": "awq"})
    refused(checkpoint, "sets quantization_config ('awq'): give the original checkpoint, or a GGUF file")
    edit(checkpoint, quantization_config=None, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    refused(checkpoint, f"architecture 'GPT2LMHeadModel' is not supported: aotc compiles {FAMILIES}")
    edit(checkpoint, model_type="llama", architectures=["LlamaForSequenceClassification"])
    refused(checkpoint, f"architecture 'LlamaForSequenceClassification' is not supported: aotc compiles {FAMILIES}")
    (checkpoint / "adapter_config.json").write_text("{}")
    refused(checkpoint, "is an adapter: merge it into its base model (peft's merge_and_unload) first")


def test_a_gguf_of_another_architecture_or_packing(refused, made_gguf, tmp_path):
    data, path = made_gguf.read_bytes(), tmp_path / "m.gguf"
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gpt-2", 1))
    refused(path, f"architecture 'gpt-2' is not supported: aotc compiles {FAMILIES}")
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # dimensions, and their number
    assert struct.unpack_from("<I", data, place) == (8,)  # Q8_0
    for kind, shown in ((14, "Q6_K"), (12, "Q4_K"), (99, "99")):
        path.write_bytes(data[:place] + struct.pack("<I", kind) + data[place + 4 :])
        refused(path, f"tensor 'blk.0.attn_q.weight' has type {shown}: aotc reads F32, F16, BF16, Q8_0, Q4_0, Q4_1")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--max-model-len 0", "--max-model-len 0 is not between 2 and 16"),
        ("--max-model-len 17", "--max-model-len 17 is not between 2 and 16"),
        ("--max-num-seqs 0", "--max-num-seqs 0 is not between 1 and 1024"),
        ("--max-num-seqs 5000", "--max-num-seqs 5000 is not between 1 and 1024"),
        ("--max-num-batched-tokens -1", "--max-num-batched-tokens -1 is not between 1 and 32768"),
        ("--weights zeros", "weights 'zeros' are unknown: give random:SEED"),
        ("--dim batch=1..2", "--dim does not apply to a language model"),
        ("--batch-sizes 1,4", "--batch-sizes does not apply to a language model"),
    ],
)
def test_options_out_of_range(refused, reached, made_checkpoint, options, part):
    refused(made_checkpoint, part, options=options.split())


@pytest.mark.parametrize("arch", ["cpu", "sm80", "sm90,sm80", "x86-64-v3,sm90"])
def test_a_persistent_kernel_is_for_one_architecture(refused, reached, made_checkpoint, arch):
    options = ["--arch", arch, "--persistent-kernel", "on"]
    refused(made_checkpoint, "--persistent-kernel on is for sm90: leave it out, or the others out of --arch", options=options)
    refused(made_checkpoint, reached, options=["--arch", arch, "--persistent-kernel", "off"])
    refused(made_checkpoint, reached, options=["--arch", "sm90", "--persistent-kernel", "on"])


def test_options_of_other_models(refused, onnx_files, tmp_path):
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "bert"}')
    for options in ("--dtype bf16", "--max-model-len 8", "--weights random:1", "--revision main"):
        flag = options.split()[0]
        refused(onnx_files[0], f"{flag} does not apply to an ONNX model: leave it out", options=options.split())
    for kernel in ("on", "off"):
        options = ["--arch", "sm90", "--persistent-kernel", kernel]
        refused(onnx_files[0], "--persistent-kernel does not apply to an ONNX model: leave it out", options=options)
        refused(encoder, "--persistent-kernel does not apply to a text encoder: leave it out", options=options)
    refused(onnx_files[0], "--dim batch: write NAME=LO..HI", options=["--dim", "batch"])
    assert parse_dims(["a=2", "b=1..8"]) == {"a": (2, 2), "b": (1, 8)}


# Damaged files: a source has no checksums, so that a flipped bit of a weight or of a word goes unseen. Everything else
# is refused, and nothing crashes.


def header_size(path: Path) -> int:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return 8 + struct.unpack_from("<Q", data)[0]
    return data.index(b"output_norm.weight") + 64


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_cut_files(refused, reached, checkpoint, made_gguf, tmp_path, kind):
    source = Path(shutil.copy(made_gguf, tmp_path)) if kind == "gguf" else checkpoint
    path = source if kind == "gguf" else checkpoint / "model.safetensors"
    data, header = path.read_bytes(), header_size(path)
    chosen = random.Random(5)
    for size in (0, 1, 4, 7, 8, 12, header - 1, header, len(data) - 1, *chosen.sample(range(len(data)), 20)):
        path.write_bytes(data[:size])
        refused(source, str(path))
    path.write_bytes(data)
    refused(source, reached)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_flipped_bits(cli, refused, reached, checkpoint, made_gguf, tmp_path, kind):
    source = Path(shutil.copy(made_gguf, tmp_path)) if kind == "gguf" else checkpoint
    path = source if kind == "gguf" else checkpoint / "model.safetensors"
    data = path.read_bytes()
    chosen = random.Random(6)
    places = [*range(8), *chosen.sample(range(8, header_size(path)), 120)]
    unseen = 0
    for place in places:
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(spoilt)
        answer = cli("compile", source, "--arch", "x86-64-v3", "--quiet", "-o", tmp_path / "out")
        answer.refuses()
        unseen += reached in answer.err
    assert not (tmp_path / "out").exists()
    assert unseen < len(places) / 2, "most bits of a header mean something"

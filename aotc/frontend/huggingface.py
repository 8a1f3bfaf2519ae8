"""Reads checkpoints in Hugging Face's layout: config.json and safetensors in a folder, or in the hub's cache.

Settings are read as transformers 5 writes them (`dtype`, `rope_parameters`) and as older versions did (`torch_dtype`,
`rope_theta`, `rope_scaling`). Missing ones mean what they mean in transformers' configuration classes, but that sizes
must be given and that a config without an EOS has none.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import Checkpoint, WeightSource, check_config, check_weights, shown, unknown_family
from aotc.frontend.safetensors import INDEX, open_safetensors, parse_json, read_bytes
from aotc.models.config import DecoderConfig, Llama3Rope

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_SMALL_FILES = ("*.json", "*.jinja")  # config, tokenizer, templates
_MOST_TEMPLATE, _MOST_ENDS = 1 << 20, 256


def open_folder(folder: Path, *, random: bool = False) -> Checkpoint:
    """The checkpoint in a folder. With `random`, its weights are left out and need not be there.

    Raises SourceError for what is missing or malformed, UnsupportedError for what aotc does not compile.
    """
    config_path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(f"{folder} is an adapter: merge it into its base model (peft's merge_and_unload) first")
    if not config_path.is_file():
        ggufs = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"give a file in it ({shown(ggufs[0])})" if ggufs else "give the folder of a Hugging Face checkpoint"
        raise SourceError(f"{folder} has no config.json: {hint}")
    raw = parse_json(read_bytes(config_path), str(config_path))
    generation = read_json(folder, "generation_config.json")
    weights = None if random else read_weights(folder)
    config = read_config(raw, generation, str(config_path), _stored_dtype(weights))
    if weights is not None:
        check_weights(str(folder), config, weights)
        _check_tied(folder, config, weights)
    tokenizer_config = read_json(folder, "tokenizer_config.json")
    ends = {"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}
    begins = {} if config.bos_token_id is None else {"bos_token_id": config.bos_token_id}
    return Checkpoint(
        model_name(folder), config, NoWeights() if weights is None else weights, read_tokenizer(folder, random),
        tokenizer_config, _chat_template(folder, tokenizer_config), {**generation, **begins, **ends},
    )  # fmt: skip


class NoWeights:
    """Stands where weights are not asked for."""

    def names(self) -> list[str]:
        return []

    def info(self, name: str) -> Any:
        raise SourceError(f"the checkpoint was opened without weights, {name} among them")

    def read(self, name: str) -> np.ndarray:
        return self.info(name)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return parse_json(read_bytes(path), str(path)) if path.is_file() else {}


def read_weights(folder: Path) -> WeightSource:
    weights = open_safetensors(folder)
    if weights is not None:
        return weights
    if any(folder.glob("pytorch_model*.bin")):
        raise UnsupportedError(
            f"{folder} has weights as pickled .bin alone, which can run code: convert them with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers, which writes safetensors"
        )
    raise SourceError(f"{folder} has neither model.safetensors nor {INDEX}")


def _stored_dtype(weights: WeightSource | None) -> str | None:
    name = "model.embed_tokens.weight"
    return weights.info(name).dtype if weights is not None and name in weights.names() else None


def _check_tied(folder: Path, config: DecoderConfig, weights: WeightSource) -> None:
    """transformers 4 and 5 differ in which of two different matrices wins."""
    if config.tie_word_embeddings and "lm_head.weight" in weights.names():
        head, embedding = weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight")
        rows = range(0, len(embedding), 4096)
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        if not same or not all(np.array_equal(head[n : n + 4096], embedding[n : n + 4096]) for n in rows):
            raise UnsupportedError(
                f"{folder} ties lm_head to the embedding, and holds another lm_head.weight: set tie_word_embeddings to "
                "false in its config.json, or remove the tensor"
            )


def read_tokenizer(folder: Path, random: bool) -> bytes | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        data = read_bytes(path)
        parse_json(data, str(path))
        return data
    if not random and any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise UnsupportedError(
            f"{folder} has no tokenizer.json: load it with transformers' AutoTokenizer and save_pretrained it there"
        )
    return None


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or what older versions wrote: a text, or several with names, in the tokenizer's config; or
    chat_template.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path, _MOST_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise SourceError(f"{path} is no UTF-8") from None
    template, name = tokenizer_config.get("chat_template"), "tokenizer_config.json"
    if template is None:
        name = "chat_template.json"
        template = read_json(folder, name).get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if template is not None and not (isinstance(template, str) and len(template) <= _MOST_TEMPLATE):
        raise SourceError(f"{folder / name} has a chat_template that is no text of up to {_MOST_TEMPLATE} characters")
    return template


def read_config(raw: dict[str, Any], generation: dict[str, Any], where: str, stored_dtype: str | None) -> DecoderConfig:
    """The config of a checkpoint. `generation` is its generation_config.json: EOS ids of both files end an answer.

    Raises SourceError and UnsupportedError, which name the setting.
    """
    family = _family(raw)
    _refuse(raw, where)
    rope, llama = _rope(raw, where), family == "llama"
    heads, hidden = given(raw, "num_attention_heads"), given(raw, "hidden_size")
    whole = type(heads) is int and type(hidden) is int and heads > 0
    # As many key-value heads as heads: that is null in all families, and in Llama's oldest files a missing key.
    named_none = "num_key_value_heads" in raw
    return check_config(DecoderConfig(
        family=family, vocab_size=given(raw, "vocab_size"), hidden_size=hidden,
        intermediate_size=given(raw, "intermediate_size"), num_hidden_layers=given(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=given(raw, "num_key_value_heads", heads if llama or named_none else None),
        head_dim=given(raw, "head_dim", 128 if family == "qwen3" else hidden // heads if whole else None),
        rms_norm_eps=given(raw, "rms_norm_eps", 1e-6),
        rope_theta=given(rope, "rope_theta", given(raw, "rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, raw, where), max_position_embeddings=given(raw, "max_position_embeddings"),
        tie_word_embeddings=given(raw, "tie_word_embeddings", False),
        attention_bias=family == "qwen2" or (family != "mistral" and given(raw, "attention_bias", False)),
        mlp_bias=given(raw, "mlp_bias", False) if llama else False, qk_norm=family == "qwen3",
        sliding_window=_window(raw, family, where), dtype=read_dtype(raw, where) or stored_dtype or "f32",
        bos_token_id=given(generation, "bos_token_id", raw.get("bos_token_id")),
        eos_token_ids=_end_ids((raw.get("eos_token_id"), generation.get("eos_token_id")), where),
    ), where)  # fmt: skip


def given(raw: dict[str, Any], name: str, default: Any = None) -> Any:
    """A setting; null means that it is not given."""
    value = raw.get(name)
    return default if value is None else value


def _family(raw: dict[str, Any]) -> str:
    family, architectures = raw.get("model_type"), raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise unknown_family(named or family)
    if named is not None and named != _ARCHITECTURES[family]:
        raise unknown_family(named)
    return family


def refuse_foreign(raw: dict[str, Any], where: str) -> None:
    """Raises UnsupportedError for weights in a form that is not Hugging Face's own, and for code beside them."""
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedError(
            f"{where} sets quantization_config ({shown(method)}): give the original checkpoint, or a GGUF file"
        )
    if raw.get("auto_map") is not None:
        raise UnsupportedError(f"{where} sets auto_map: aotc runs no code that a checkpoint brings")


def _refuse(raw: dict[str, Any], where: str) -> None:
    refuse_foreign(raw, where)
    if given(raw, "hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError(f"{where} sets hidden_act to {shown(raw['hidden_act'])}: aotc compiles silu")


def _rope(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What the config says of rope, new form or old."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise SourceError(f"{where}: rope_parameters is {shown(rope)}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedError(f"{where} sets rope_parameters by kind of layer, which aotc does not compile")
    if given(rope, "partial_rotary_factor", given(raw, "partial_rotary_factor", 1.0)) != 1:
        raise UnsupportedError(f"{where} sets partial_rotary_factor: aotc rotates whole heads")
    return rope


def _rope_scaling(rope: dict[str, Any], raw: dict[str, Any], where: str) -> Llama3Rope | float | None:
    kind = given(rope, "rope_type", given(rope, "type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise UnsupportedError(f"{where} sets rope_type to {shown(kind)}: aotc compiles default, linear and llama3")
    if rope.get("factor") is None:
        raise SourceError(f"{where} sets rope_type to {kind} and no factor")
    if kind == "linear":
        return rope["factor"]
    return Llama3Rope(
        rope["factor"], given(rope, "low_freq_factor"), given(rope, "high_freq_factor"),
        given(rope, "original_max_position_embeddings", raw.get("max_position_embeddings")),
    )  # fmt: skip


def _window(raw: dict[str, Any], family: str, where: str) -> int | None:
    """The window of attention that all layers have. Layers that differ are refused."""
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    mixed = UnsupportedError(f"{where} mixes windows (layer_types, max_window_layers): aotc compiles one for all")
    if family in ("llama", "mistral"):
        if kinds is not None:
            raise UnsupportedError(f"{where} sets layer_types, which {family} models do not have")
        return raw.get("sliding_window", 4096) if family == "mistral" else None
    window = raw.get("sliding_window", 4096) if given(raw, "use_sliding_window", False) else None
    if kinds is None and window is not None:
        full = given(raw, "max_window_layers", 28)  # so many layers see everything, the others a window
        if type(full) is not int or type(layers) is not int or 0 < full < layers:
            raise mixed
        return window if full <= 0 else None
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind != kinds[0] for kind in kinds):
        raise mixed
    if kinds[0] == "full_attention":
        return None
    if kinds[0] != "sliding_attention" or window is None:
        raise UnsupportedError(f"{where} sets layer_types to {shown(kinds[0])}, and sliding_window to {shown(window)}")
    return window


def read_dtype(raw: dict[str, Any], where: str) -> str | None:
    name = given(raw, "dtype", raw.get("torch_dtype"))
    if name is None:
        return None
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise UnsupportedError(f"{where} sets dtype to {shown(name)}: aotc compiles {', '.join(_DTYPES)}")
    return dtype


def _end_ids(settings: tuple[Any, Any], where: str) -> tuple[Any, ...]:
    """Ids of both files, each once; each file has none, one or a list. check_config looks at their types."""
    ids = [i for value in settings for i in (value if isinstance(value, list) else [value]) if i is not None]
    if len(ids) > _MOST_ENDS:
        raise SourceError(f"{where} has {len(ids)} EOS ids")
    return tuple(i for n, i in enumerate(ids) if i not in ids[:n])


_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_in_hub(source: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model of the hub: from its cache, else downloaded where huggingface_hub is there and allowed to.

    Raises SourceError, which says how to get the model.
    """
    if not _HUB_ID.fullmatch(source) or "--" in source or ".." in source:
        raise SourceError(f"there is no file or folder {source}, and it is no hub id (org/name): check the path")
    revision = revision or "main"
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise SourceError(f"revision {shown(revision)} is no name of a branch, tag or commit")
    cached = _in_cache(source, revision)
    if cached is not None and (not weights or any((cached / n).is_file() for n in ("model.safetensors", INDEX))):
        return cached
    command = f"hf download {source} --revision {revision}"
    if _is_offline() or importlib.util.find_spec("huggingface_hub") is None:
        raise SourceError(
            f"{source} is no file or folder here and is not in the hub cache {_cache()}: get it with `{command}`"
        )
    return _download(source, revision, command, [*_SMALL_FILES, *(["*.safetensors"] if weights else [])])


def _download(source: str, revision: str, command: str, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the library raises its own errors and those of its network client
        reason = " ".join(str(error).split())[:200]
        raise SourceError(f"cannot download {source}: {reason} (try `{command}`)") from None


def _in_cache(source: str, revision: str) -> Path | None:
    """The cached snapshot of a revision: refs/REVISION names a commit, snapshots/COMMIT holds its files."""
    repository = _cache() / f"models--{source.replace('/', '--')}"
    commit, ref = revision, repository / "refs" / revision
    if ref.is_file():
        commit = read_bytes(ref, 1 << 10).decode(errors="replace").strip()
    snapshot = repository / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and (snapshot / "config.json").is_file() else None


def _cache() -> Path:
    """Where huggingface_hub keeps models: HF_HUB_CACHE, or `hub` in HF_HOME."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def model_name(folder: Path) -> str:
    """The model's name: that of the folder, or of the repository whose snapshot it is."""
    folder = folder.absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return folder.name

"""The folder that a quantized model is saved in: whole under its name, or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fastinfer.models.architectures import architecture
from fastinfer.models.checkpoint import extra
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_checkpoint import read_json
from fastinfer.models.tokenizer import Tokenizer

_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_SHARD_BYTES = 4 << 30


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Writes a safetensors file that is there whole or not at all."""
    errors = extra("safetensors", "writing safetensors files")
    safetensors = extra("safetensors.torch", "writing safetensors files")
    part = path.with_name(path.name + ".part")
    part.touch()
    mode = part.stat().st_mode
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.save_file(contiguous, part, metadata={"format": "pt", **metadata})
    except errors.SafetensorError as error:  # such as a full disk
        raise OSError(f"{path}: cannot be written ({error})") from error
    part.chmod(mode)  # some versions make it readable to its owner alone
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file that `write_tensors` wrote."""
    safetensors = extra("safetensors", "reading safetensors files")
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def write_folder(
    out: Path,
    building: Path,
    source: Path,
    tokenizer: Tokenizer,
    config: ModelConfig,
    quantization_config: Mapping[str, Any],
    parts: Sequence[Path],
    report: Mapping[str, Any],
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a Hugging Face folder beside its place, and renames it.

    Args:
        out: its place, where nothing is.
        building: where it is written, on the same file system; what is there is removed.
        source: the model's folder or GGUF file: of its config and tokenizer.
        tokenizer: of the model.
        config: of the model.
        quantization_config: what config.json says of how it is quantized.
        parts: safetensors files with all tensors, which stay as they are.
        report: for quantization_report.json.
        shard_bytes: a file holds parts up to this size, or one larger part.
    """
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    if source.is_dir():
        fields = read_json(source / "config.json")
        for pattern in _COPIED:
            for file in source.glob(pattern):
                own = file.name == "config.json" or file.name.endswith(".index.json")
                if file.is_file() and not own:
                    shutil.copyfile(file, building / file.name)
    else:
        fields = hf_fields(config)
        tokenizer.save(building)
    write_json(building / "config.json", {**fields, "quantization_config": quantization_config})
    write_json(building / "quantization_report.json", report)
    _write_shards(building, parts, shard_bytes)
    os.rename(building, out)


def hf_fields(config: ModelConfig) -> dict[str, Any]:
    """A config.json for a model that came without one, from a GGUF file.

    Raises:
        ValueError: the configuration cannot be said in these fields.
    """
    arch = architecture(config.architecture)
    fields = {
        "architectures": [arch.hf_class],
        "model_type": arch.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(config.dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    again = ModelConfig.from_hf(fields)
    if again != config:
        differing = [n for n in vars(config) if getattr(again, n) != getattr(config, n)]
        raise ValueError(
            f"quantize: a GGUF file whose {', '.join(differing)} cannot be written to a "
            "config.json yet; expected the model's safetensors folder instead"
        )
    return fields


def _write_shards(folder: Path, parts: Sequence[Path], shard_bytes: int) -> None:
    shards = list(_shards(parts, shard_bytes))
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", _all_tensors(shards[0]))
        return
    weight_map: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = _all_tensors(shard)
        write_tensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(t.nbytes for t in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def _shards(parts: Sequence[Path], shard_bytes: int) -> Iterator[list[Path]]:
    shard: list[Path] = []
    size = 0
    for part in parts:
        if shard and size + part.stat().st_size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(part)
        size += part.stat().st_size
    yield shard


def _all_tensors(parts: Sequence[Path]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in read_tensors(part)[0].items()}

"""A Hugging Face folder as a checkpoint: config.json and safetensors files, sharded or not."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.models.architectures import HEAD, WeightNames, architecture
from fastinfer.models.checkpoint import CheckpointTensor, extra
from fastinfer.models.config import ModelConfig
from fastinfer.models.quantized_checkpoint import Header, QuantizedFormat, quantized_format
from fastinfer.ops.packed_weights import PackedWeight

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLED_MESSAGE = (
    "a pickled checkpoint is refused, since loading it runs code from the file; "
    "convert it to safetensors"
)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class HFCheckpoint:
    """Config and weights of a folder; projections may be quantized as its config says.

    Raises:
        FileNotFoundError: config.json, the weights, or a shard that the index names is missing.
        ValueError: a damaged or truncated file, a pickled checkpoint, or what `ModelConfig` or
            `QuantizedFormat` refuses; with the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        self._format = read_quantization(path)
        self.quantization = None if self._format is None else self._format.method
        self._files = _weight_files(path)

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor of the folder; each is read when it is copied, before the next one is asked
        for. The tensors of a projection's codes are one.
        """
        names = architecture(self.config.architecture).names
        with contextlib.ExitStack() as stack:
            files = self._open(stack)
            coded = {} if self._format is None else self._coded(files, self._format)
            for name, file in files.items():
                split = None if self._format is None else self._format.split(name)
                if self._format is not None and split is not None:
                    module, _ = split
                    if module in coded:  # at the first of its tensors
                        yield self._quantized(self._format, module, coded.pop(module), names)
                    continue
                header = _header(file, name)
                yield CheckpointTensor(
                    name,
                    _slot_name(name, names),
                    header.shape,
                    header.dtype,
                    header.dtype in _FLOATS,
                    functools.partial(_copy, file, name),
                    is_buffer=name.endswith(names.buffers),
                    beside_codes=self._format is not None
                    and name.endswith(".bias")
                    and f"{name.removesuffix('bias')}{self._format.codes}" in files,
                )

    def _open(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        """The file of each tensor, in the order of files."""
        safetensors = extra("safetensors", "reading safetensors files")
        found = {}
        for path, wanted in self._files.items():
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"safetensors file {path}: damaged or truncated ({error})"
                ) from error
            held = set(file.keys())
            for name in sorted(held) if wanted is None else wanted:
                if name not in held:
                    raise ValueError(
                        f"safetensors file {path}: tensor {name} is missing, which {_INDEX} "
                        "places there"
                    )
                found[name] = file
        return found

    def _coded(
        self, files: Mapping[str, Any], format: QuantizedFormat
    ) -> dict[str, dict[str, Any]]:
        """The quantized projections, each with the files of its tensors."""
        tensors: dict[str, dict[str, Any]] = {}
        for name, file in files.items():
            split = format.split(name)
            if split is not None:
                tensors.setdefault(split[0], {})[split[1]] = file
        if not tensors:
            raise ValueError(
                f"{self.path}: config.json says {format.method!r}, but there is no tensor that "
                f"ends in .{format.codes}"
            )
        return tensors

    def _quantized(
        self,
        format: QuantizedFormat,
        module: str,
        files: Mapping[str, Any],
        names: WeightNames,
    ) -> CheckpointTensor:
        """A projection as one tensor; its headers are checked."""

        def tensor(suffix: str) -> Tensor:
            value: Tensor = files[suffix].get_tensor(f"{module}.{suffix}")
            return value

        def read(device: torch.device) -> PackedWeight:
            # The shape is a pair of numbers for the host, wherever the weight goes.
            tensors = {
                suffix: tensor(suffix).to("cpu" if suffix == "weight_shape" else device)
                for suffix in files
            }
            try:
                return format.pack(module, tensors)
            except ValueError as error:
                raise ValueError(f"{self.path}: {module}: {error}") from error

        def copy_to(out: Tensor) -> None:
            matrix = read(out.device).dequantize(out.dtype)
            out.copy_(matrix.t() if names.transposed else matrix)

        headers = {suffix: _header(file, f"{module}.{suffix}") for suffix, file in files.items()}
        try:
            n, k = format.shape(module, headers, tensor)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        return CheckpointTensor(
            f"{module}.{format.codes}",
            _slot_name(module + ".weight", names),
            (k, n) if names.transposed else (n, k),
            format.method,
            True,
            copy_to,
            read_codes=read,
        )


def _slot_name(name: str, names: WeightNames) -> str:
    """The name in `Decoder.weight_slots`."""
    bare = names.prefix_optional and name != HEAD and not name.startswith(names.prefix)
    return names.prefix + name if bare else name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the path if it holds no valid one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object expected, got {type(value).__name__}")
    return value


def read_config(path: Path) -> ModelConfig:
    """The config of a folder; what generation_config.json says about the end of text goes first."""
    file = path / "config.json"
    if not file.is_file():
        held = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {held[0]}: pass that file" if held else ""
        raise FileNotFoundError(f"model folder {path}: there is no config.json{hint}")
    fields = read_json(file)
    generation = path / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            fields["eos_token_id"] = eos
    try:
        return ModelConfig.from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read_quantization(path: Path) -> QuantizedFormat | None:
    """How the weights of a folder are quantized; None if they are not."""
    file = path / "config.json"
    try:
        return quantized_format(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors files and the tensors to take from each (None: all)."""
    if (path / _SINGLE).is_file():
        return {path / _SINGLE: None}
    index = path / _INDEX
    if not index.is_file():
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in PICKLED_SUFFIXES)
        if pickled:
            raise ValueError(f"model folder {path}: {pickled[0]}: {PICKLED_MESSAGE}")
        raise FileNotFoundError(f"model folder {path}: neither {_SINGLE} nor {_INDEX} is there")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: the key 'weight_map' is missing or empty")
    files: dict[Path, list[str] | None] = {}
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise ValueError(
                f"{index}: {name}: a safetensors file beside it expected, got {shard!r}"
            )
        if not (path / shard).is_file():
            raise FileNotFoundError(f"{index}: the shard {shard} is missing")
        names = files.setdefault(path / shard, [])
        assert names is not None
        names.append(name)
    # Neighbours first, so that a layer spread over two files is soon complete: see `fill`.
    return dict(sorted(files.items()))


def _header(file: Any, name: str) -> Header:
    header = file.get_slice(name)
    return Header(tuple(header.get_shape()), header.get_dtype())


def _copy(file: Any, name: str, out: Tensor) -> None:
    out.copy_(file.get_tensor(name))

"""Builds a decoder and fills it: `load`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from fastinfer.models.architectures import HEAD
from fastinfer.models.checkpoint import CheckpointTensor
from fastinfer.models.config import DTYPES, ModelConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint, read_config, read_json
from fastinfer.models.linear import QUANTIZATIONS, Linear
from fastinfer.models.norm import Norm
from fastinfer.models.source import resolve

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True)
class LoadedModel:
    """What `load` returns."""

    config: ModelConfig
    decoder: Decoder
    dtype: torch.dtype
    max_model_len: int
    tokenizer_source: Path | None
    """What `load_tokenizer` takes; None for a model made from a `ModelConfig` alone."""


class Checkpoint(Protocol):
    """A source of weights."""

    path: Path
    config: ModelConfig
    quantization: str | None
    """The method by which projections are quantized in it, whose codes are kept; None: none are."""

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor it holds."""
        ...


def load(
    model: str | Path | ModelConfig,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
) -> LoadedModel:
    """Loads a model for inference.

    A folder may hold projections quantized by GPTQ, AWQ or compressed-tensors (pack-quantized), as
    the `quantization_config` of its config.json says. They run on the codes, scales and zero points
    of the file, nothing is rounded anew, and layers that are plain in the file stay plain.

    Args:
        model: a folder with safetensors, a GGUF file, a hub id, or "smollm2"; with load_format
            "dummy" also a `ModelConfig`, or a folder with config.json alone.
        dtype: of weights and activations: a torch dtype or its name; "auto" is float32 on the CPU
            and elsewhere what the checkpoint was saved in.
        device: where the weights go.
        max_model_len: tokens a sequence may have; None: what the model was made for. Rope scaling
            may allow more, and "dynamic" scaling sets its frequencies by it.
        load_format: "auto", "safetensors", "gguf", or "dummy" for random weights.
        quantization: rounds the weights of layers' projections to nearest. "int2", "int3", "int4"
            or "int8": to so many bits, in groups of 128 with zero points. "fp8" or "int8_w8a8": to
            8 bits, a scale for each output feature, and the projections' inputs as well, each token
            by a scale of its own when it is computed. Embeddings, attention and the output
            projection stay as they are. Each layer is rounded as soon as it is read, so no more
            memory is needed than for the result and one layer (beside those that begin in one file
            and end in the next). None: no quantization beyond the checkpoint's own, besides which
            there can be no other.

    Raises:
        FileNotFoundError: the model, or a file of it, is missing.
        ValueError: a damaged, pickled, unknown or unsupported checkpoint (also in the way that it
            is quantized), a tensor that is missing, unexpected, or of another shape or type than
            expected, or an argument out of its range.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load: load_format must be one of {LOAD_FORMATS}, got {load_format!r}")
    _check_quantization(quantization)
    if isinstance(model, ModelConfig) and load_format != "dummy":
        raise ValueError("load: a ModelConfig has no weights; load_format='dummy' expected")
    device = torch.device(device)
    path = None if isinstance(model, ModelConfig) else resolve(model)
    checkpoint: Checkpoint | None = None
    if isinstance(model, ModelConfig):
        config = model
    elif load_format == "dummy" and path is not None and path.is_dir():
        config = read_config(path)
        if quantization is None and read_json(path / "config.json").get("quantization_config"):
            raise ValueError(
                f"load: {path}: its config.json has a quantization_config, and dummy weights can "
                "only be rounded to nearest: pass quantization= to have that"
            )
    else:
        assert path is not None
        checkpoint = open_checkpoint(path, load_format)
        config = checkpoint.config
        if quantization is not None and checkpoint.quantization is not None:
            raise ValueError(
                f"load: quantization={quantization!r} is for plain weights, but {path} is "
                f"quantized already ({checkpoint.quantization}); leave it out"
            )
    dtype = _dtype(dtype, device, config)
    max_model_len = _max_model_len(max_model_len, config)
    decoder = Decoder(
        config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        quantization=quantization,
        deferred=checkpoint is not None and checkpoint.quantization is not None,
    )
    if load_format == "dummy" or checkpoint is None:
        fill_dummy(decoder)
    else:
        fill(decoder, checkpoint)
    decoder.pack_weights()
    return LoadedModel(config, decoder, dtype, max_model_len, path)


def fill(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's weights to their places in a decoder's merged parameters.

    A projection that is to be quantized, or that may come as codes, gets memory for its plain
    weight with the first part of it, and is packed with the last of its layer. (Checkpoints hold
    layers one after the other, or nearly.)

    Raises:
        ValueError: as `load`; all names, shapes and types are checked before anything is copied.
    """
    slots = decoder.weight_slots()
    embedding = decoder.embed_tokens.data
    check_weights(checkpoint, slots, embedding)
    by_layer = decoder.quantization is not None or decoder.deferred
    layers = range(len(decoder.layers) if by_layer else 0)
    layer_of = {name: i for i in layers for name in decoder.layer_slots(i)}
    deferred_head = decoder.deferred and HEAD in slots
    missing = Counter(layer_of.values())
    progress = tqdm(
        checkpoint.tensors(),
        total=len(slots),
        desc="loading weights",
        unit="tensor",
        delay=1.0,
        disable=not sys.stderr.isatty(),
    )
    tied_head = embedding
    for tensor in progress:
        if is_tied_head(tensor, slots):
            tied_head = torch.empty_like(embedding)
            tensor.copy_to(tied_head)
        elif tensor.slot in layer_of:
            i = layer_of[tensor.slot]
            linear, first = decoder.layer_projections(i).get(tensor.slot, (None, 0))
            if linear is None or not _fill_projection(linear, first, tensor):
                tensor.copy_to(decoder.layer_slots(i)[tensor.slot])
            missing[i] -= 1
            if not missing[i]:
                _pack(decoder, i, checkpoint.path)
        elif deferred_head and tensor.slot == HEAD:
            if not _fill_projection(decoder.lm_head, 0, tensor):
                tensor.copy_to(decoder.lm_head.plain_weight())
        elif tensor.slot is not None and tensor.slot in slots:
            tensor.copy_to(slots[tensor.slot])
    check_tied_head(checkpoint, tied_head, embedding)


def fill_dummy(decoder: Decoder) -> None:
    """Random weights, the same at every call: N(0, 0.02), and norms that only normalise.

    Those that are to be quantized are so at once, one projection after the other.
    """
    generator = torch.Generator(decoder.embed_tokens.device).manual_seed(0)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.allocate()
        for parameter in module.parameters(recurse=False):  # drawn where they live
            if module is not decoder.lm_head or parameter is not decoder.embed_tokens:
                parameter.data.normal_(0.0, 0.02, generator=generator)
        if isinstance(module, Norm):
            module.fill_neutral()
        if isinstance(module, Linear) and module.quantization is not None:
            module.pack()


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """The folder or GGUF file at a path, whose weights are not read yet; raises as `load`."""
    if path.is_dir():
        if load_format == "gguf":
            raise ValueError(f"load: load_format 'gguf' needs a file, got the folder {path}")
        return HFCheckpoint(path)
    if load_format == "safetensors":
        raise ValueError(f"load: load_format 'safetensors' needs a folder, got the file {path}")
    return GGUFCheckpoint(path)


def check_weights(checkpoint: Checkpoint, slots: dict[str, Tensor], embedding: Tensor) -> None:
    """A checkpoint has the weights of `Decoder.weight_slots`, and no other; ValueError."""
    missing = dict(slots)
    for tensor in checkpoint.tensors():
        where = f"{checkpoint.path}: tensor {tensor.name}"
        if tensor.is_buffer:
            continue
        if is_tied_head(tensor, slots):
            slot = embedding
        elif tensor.slot is None or tensor.slot not in slots:
            if tensor.beside_codes and _is_zero(tensor):
                continue
            raise ValueError(f"{where}: the model has no such weight, so its result would be wrong")
        else:
            slot = slots[tensor.slot]
            if missing.pop(tensor.slot, None) is None:
                raise ValueError(f"{where}: the checkpoint holds this weight twice")
        if tensor.shape != tuple(slot.shape) and tensor.read_codes is not None:
            raise ValueError(
                f"{where}: codes of a weight of shape {tuple(slot.shape)} expected, got those of "
                f"{tensor.shape}"
            )
        if tensor.shape != tuple(slot.shape):
            raise ValueError(f"{where}: shape {tuple(slot.shape)} expected, got {tensor.shape}")
        if not tensor.is_float:
            raise ValueError(f"{where}: a floating-point type expected, got {tensor.dtype}")
    if missing:
        name, slot = next(iter(missing.items()))
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(
            f"{checkpoint.path}: tensor {name} of shape {tuple(slot.shape)} is missing{more}"
        )


def check_tied_head(checkpoint: Checkpoint, head: Tensor, embedding: Tensor) -> None:
    """A tied checkpoint may hold the matrix twice; if the copies differ, its config is wrong:
    ValueError.
    """
    if head is not embedding and not torch.equal(head, embedding):
        raise ValueError(
            f"{checkpoint.path}: tensor lm_head.weight: equal to the embedding expected, since the "
            "config says tie_word_embeddings, got another matrix"
        )


def is_tied_head(tensor: CheckpointTensor, slots: Mapping[str, Tensor]) -> bool:
    """It is an output projection, and the model has none beside its embedding."""
    return tensor.slot == HEAD and HEAD not in slots


def _fill_projection(linear: Linear, first: int, tensor: CheckpointTensor) -> bool:
    """Gives a projection the codes that a checkpoint has of it, or else memory to be filled."""
    if tensor.read_codes is None:
        linear.allocate()
        return False
    linear.set_codes(first, tensor.read_codes(linear.device))
    return True


def _is_zero(tensor: CheckpointTensor) -> bool:
    value = torch.empty(tensor.shape)
    tensor.copy_to(value)
    return not value.any()


def _pack(decoder: Decoder, i: int, path: Path) -> None:
    try:
        decoder.layer(i).pack()
    except ValueError as error:
        raise ValueError(f"{path}: layer {i}: {error}") from error


def _check_quantization(quantization: object) -> None:
    if quantization is not None and (
        not isinstance(quantization, str) or quantization not in QUANTIZATIONS
    ):
        accepted = ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(
            f"load: quantization must be None or one of {accepted}, got {quantization!r}"
        )


def _dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    resolved = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ValueError(f"load: dtype must be 'auto' or one of {sorted(DTYPES)}, got {dtype!r}")
    assert resolved is not None
    return resolved


def _max_model_len(value: int | None, config: ModelConfig) -> int:
    if value is None:
        return config.max_position_embeddings
    if not 1 <= value <= config.max_context:
        raise ValueError(
            f"load: max_model_len must be in 1..{config.max_context} (the model's context), got "
            f"{value}"
        )
    return value

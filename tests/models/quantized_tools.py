"""Makes a tiny model's folder into one that GPTQ, AWQ or compressed-tensors could have written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reference.checkpoints import (
    Matrix,
    awq_file,
    compressed_file,
    gemv_file,
    gptq_file,
)

Tensors = dict[str, Tensor]
Pack = Callable[[Matrix], Mapping[str, Tensor]]


def quantized(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool, order: int | None = None
) -> Matrix:
    """A weight [N, K] rounded to nearest; `order`: seed of the groups' shuffle, None: none."""
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    g_idx = np.arange(k) // size
    if order is not None:
        np.random.default_rng(order).shuffle(g_idx)
    groups, top = -(-k // size), 2**bits - 1
    codes, zeros = np.zeros((n, k), np.int64), np.zeros((n, groups), np.int64)
    scales = torch.zeros(n, groups, dtype=torch.float16)
    for g in range(groups):
        columns = weight[:, torch.from_numpy(g_idx == g)].double()
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        span = 2 * torch.maximum(high, -low) if symmetric else high - low
        scale = (span / top).half()
        zero = (-low / scale.double()).round().clamp(0, top)
        if symmetric:
            zero.fill_(2 ** (bits - 1))
        rounded = (columns / scale.double()[:, None]).round() + zero[:, None]
        codes[:, g_idx == g] = rounded.clamp(0, top).long().numpy()
        zeros[:, g] = zero.long().numpy()
        scales[:, g] = scale
    return Matrix(codes, zeros, scales, g_idx, bits, group_size)


def values(matrix: Matrix) -> Tensor:
    """W [N, K] in fp32; a scale of fp16 times a code is exact in it."""
    steps = matrix.codes - matrix.zeros[:, matrix.g_idx]
    return torch.from_numpy(steps).float() * matrix.scales[:, matrix.g_idx].float()


def gptq(version: str = "gptq") -> Pack:
    return lambda matrix: gptq_file(matrix, version)


def awq(matrix: Matrix) -> Mapping[str, Tensor]:
    return awq_file(matrix)._asdict()


def awq_gemv(matrix: Matrix) -> Mapping[str, Tensor]:
    return gemv_file(matrix)._asdict()


def compressed(*, symmetric: bool, act_order: bool) -> Pack:
    def pack(matrix: Matrix) -> Mapping[str, Tensor]:
        tensors = compressed_file(matrix)
        if symmetric:
            del tensors["weight_zero_point"]
        if not act_order:
            del tensors["weight_g_idx"]
        return tensors

    return pack


def compressed_config(
    bits: int, group_size: int, symmetric: bool, actorder: str | bool | None = None, **weights: Any
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    strategy = "channel" if group_size == -1 else "group"
    scheme = {
        "num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric,
        "group_size": None if group_size == -1 else group_size, "actorder": actorder,
        "block_structure": None, "dynamic": False, "observer": "minmax", **weights,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*down_proj"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "output_activations": None}},
    }


def is_projection(name: str) -> bool:
    return ".layers." in name and name.endswith("_proj.weight")


@torch.no_grad()
def save_quantized(
    hf: Any,
    path: Path,
    config: dict[str, Any],
    quantize: Callable[[str, Tensor], Matrix | None],
    pack: Pack,
    *,
    wanted: Callable[[str], bool] = is_projection,
    change: Callable[[Tensors], object] = lambda tensors: None,
) -> Path:
    """Writes the folder, and gives the model the weights that are in it.

    Args:
        hf: a transformers model.
        path: of the folder.
        config: its `quantization_config`.
        quantize: the codes of a weight by its name; None: it stays plain.
        pack: the format.
        wanted: the weights to quantize.
        change: of the tensors, before they are written.
    """
    tensors: Tensors = {}
    tied = hf.config.tie_word_embeddings
    for name, weight in hf.state_dict().items():
        matrix = quantize(name, weight) if wanted(name) else None
        if matrix is not None:
            plain = weight.t() if hf.config.model_type == "gpt2" else weight
            plain.copy_(values(matrix))
            module = name.removesuffix("weight")
            tensors |= {module + suffix: t.contiguous() for suffix, t in pack(matrix).items()}
        elif not (tied and name == "lm_head.weight"):
            tensors[name] = weight.clone()
    change(tensors)
    path.mkdir(exist_ok=True)
    hf.config.save_pretrained(path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    save_file(tensors, path / "model.safetensors")
    return path

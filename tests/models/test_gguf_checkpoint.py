"""GGUF checkpoints: dequantized and reordered right, and damaged files refused."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fastinfer.models import Decoder, load
from fastinfer.models import gguf_checkpoint as module
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_file import GGUFFile
from fastinfer.models.loader import fill
from fastinfer.models.rotary import inverse_frequencies
from tests.models.gguf_tools import write_gguf
from tests.models.tools import paged_logits, save, tiny_model

Q = gguf.GGMLQuantizationType
CPU = torch.device("cpu")


def filled(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a GGUF file, by the names of the slots."""
    checkpoint = GGUFCheckpoint(path)
    decoder = Decoder(checkpoint.config, dtype=torch.float32, device=CPU, max_model_len=8)
    fill(decoder, checkpoint)
    return decoder.weight_slots()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_equals_the_folder(tmp_path: Path, kind: str, tied: bool) -> None:
    hf = tiny_model(kind, tie_word_embeddings=tied)
    from_folder = load(save(hf, tmp_path / "hf"))
    from_gguf = load(write_gguf(tmp_path / "m.gguf", hf))
    assert from_gguf.config.tie_word_embeddings == tied
    assert from_gguf.config.qkv_bias == (kind == "qwen2")
    assert from_gguf.config.qk_norm == (kind == "qwen3")
    ids = [[1, *range(20, 60)]]
    a, b = (paged_logits(m.decoder, ids, 64)[0] for m in (from_folder, from_gguf))
    assert torch.equal(a, b)


@pytest.mark.parametrize("quantization", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16])
def test_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: gguf.GGMLQuantizationType
) -> None:
    """In pieces of a few rows, equal to the formula applied to the whole matrix."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 200)
    hf = tiny_model("llama", hidden_size=96, intermediate_size=96)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    kinds = dict.fromkeys((*parts, "embed_tokens", "lm_head"), quantization)
    slots = filled(write_gguf(tmp_path / "m.gguf", hf, quantized=kinds))
    for name, weight in hf.state_dict().items():
        expected = weight
        if name.split(".")[-2] in kinds:
            # Blocks lie along rows, so reordering rows before or after quantizing is the same.
            raw = gguf.quantize(weight.numpy(), quantization)
            expected = torch.from_numpy(gguf.dequantize(raw, quantization).copy())
            assert not torch.equal(expected, weight)
        assert torch.equal(slots[name], expected), name


@pytest.mark.parametrize("quantization", [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K, Q.IQ4_XS])
def test_k_quants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: gguf.GGMLQuantizationType
) -> None:
    """There is no quantizer for these in Python, so the blocks are random bytes."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2000)
    hf = tiny_model("qwen2", hidden_size=256, intermediate_size=256)
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    shape = (hf.config.intermediate_size, hf.config.hidden_size // block * size)
    # Bytes below 0x78 make every fp16 scale finite, wherever it lies in the block.
    data = np.random.default_rng(0).integers(0, 0x78, shape, dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", hf)
    file = GGUFFile(path)
    target = file.tensors["blk.1.ffn_up.weight"]
    replaced = type(target)(target.name, target.shape, quantization, data)
    out = torch.empty(target.shape)
    module._copy(replaced, 0, path, out)
    expected = torch.from_numpy(gguf.dequantize(data, quantization).copy())
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert torch.equal(out, expected)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    hf = tiny_model("llama", num_hidden_layers=1)
    return write_gguf(tmp_path_factory.mktemp("healthy") / "m.gguf", hf).read_bytes()


def test_truncated_anywhere(tmp_path: Path, healthy: bytes) -> None:
    path = tmp_path / "m.gguf"
    for length in [*range(0, len(healthy), 211), len(healthy) - 1]:
        path.write_bytes(healthy[:length])
        with pytest.raises(ValueError, match=r"m.gguf: truncated"):
            GGUFFile(path)


def test_damaged_anywhere(tmp_path: Path, healthy: bytes) -> None:
    """A flipped byte in the header gives a clear error or another valid file, nothing else."""
    path = tmp_path / "m.gguf"
    rng = random.Random(3)
    refused = 0
    for _ in range(400):
        broken = bytearray(healthy)
        for _ in range(rng.choice([1, 1, 4])):
            broken[rng.randrange(3000)] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            GGUFCheckpoint(path)
        except ValueError as error:
            assert "m.gguf" in str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "magic"),
        (4, struct.pack("<I", 1), "version"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 2**60), "number of tensors claims"),
        (16, struct.pack("<Q", 2**60), "number of key-value pairs claims"),
        (24, struct.pack("<Q", 2**62), "metadata key claims"),
    ],
)
def test_header(tmp_path: Path, healthy: bytes, at: int, value: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(healthy[:at] + value + healthy[at + len(value) :])
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "unknown architecture 'mamba'.*llama.*qwen2"),
        ({"llama.block_count": None}, "'block_count' is missing"),
        ({"llama.block_count": 2.5}, "block_count must be an integer, got 2.5"),
        ({"llama.attention.head_count": 0}, "num_heads must be >= 1"),
        ({"llama.attention.head_count_kv": 4}, "multiple of num_kv_heads"),
        ({"general.architecture": "gpt2"}, "unknown architecture 'gpt2' of a GGUF file"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported; .*'yarn'"),
        ({"llama.rope.scaling.type": "yarn"}, "'rope.scaling.factor' is missing"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            "rope.scaling.yarn_log_multiplier = 0.1.* is not supported",
        ),
        ({"llama.rope.scale_linear": 2.0}, "rope.scale_linear = 2.0 is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"split.count": 2}, "in 2 parts"),
        ({"llama.embedding_length": 64}, r"shape \(97, 64\) expected, got \(97, 48\)"),
        ({"llama.block_count": 2}, "tensor blk.2.* no such weight"),
        ({"llama.block_count": 4}, r"tensor model.layers.3.input_layernorm.weight .*is missing"),
    ],
)
def test_metadata(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "m.gguf" in str(error.value)


def test_missing_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), leave_out=name)
    with pytest.raises(ValueError, match=rf"tensor {name} of shape \(80, 48\) is missing"):
        load(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    """The same as the folder that says so in config.json."""
    original = {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0, **original}
    hf = tiny_model("llama", rope_parameters=rope)
    prefix = "llama.rope.scaling."
    metadata = {prefix + "type": kind, prefix + "factor": 4.0}
    if original:
        metadata[prefix + "original_context_length"] = 16
    from_folder = load(save(hf, tmp_path / "hf"))
    from_gguf = load(write_gguf(tmp_path / "m.gguf", hf, metadata=metadata))
    assert from_gguf.config.rope_scaling == from_folder.config.rope_scaling
    ids = [[1, *range(20, 60)]]
    a, b = (paged_logits(m.decoder, ids, 64)[0] for m in (from_folder, from_gguf))
    assert torch.equal(a, b)


def test_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1 files carry their rope scaling as a tensor."""
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 100.0}
    rope |= {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    hf = tiny_model("llama", rope_parameters=rope)
    plain = inverse_frequencies(100.0, 16)
    factors = plain / hf.model.rotary_emb.inv_freq
    assert factors.min() == 1.0 and factors.max() == 8.0 and len(factors.unique()) > 2
    tensors = {"rope_freqs.weight": factors.numpy()}
    loaded = load(write_gguf(tmp_path / "m.gguf", hf, more_tensors=tensors))
    scaling = loaded.config.rope_scaling
    torch.testing.assert_close(
        inverse_frequencies(100.0, 16, scaling), hf.model.rotary_emb.inv_freq, rtol=2**-22, atol=0
    )
    # The table is made from them.
    plain_table = load(write_gguf(tmp_path / "plain.gguf", hf)).decoder.cos_sin
    assert torch.equal(loaded.decoder.cos_sin[:, 0], plain_table[:, 0])
    assert not torch.equal(loaded.decoder.cos_sin[:, 7], plain_table[:, 7])


@pytest.mark.parametrize(
    ("factors", "metadata", "message"),
    [
        (np.ones(7, np.float32), {}, "8 frequency factors expected, got 7"),
        (np.zeros(8, np.float32), {}, "frequency factors > 0 expected"),
        (np.ones((2, 4), np.float32), {}, r"rope_freqs.weight: one dimension expected"),
        (
            np.ones(8, np.float32),
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            "rope.scaling.type = 'linear' is not supported",
        ),
    ],
)
def test_bad_rope_factors(
    tmp_path: Path, factors: Any, metadata: dict[str, Any], message: str
) -> None:
    hf = tiny_model("llama")
    tensors = {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", hf, metadata=metadata, more_tensors=tensors)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "m.gguf" in str(error.value)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    hf = tiny_model("llama")
    state = {**hf.state_dict(), "model.norm.weight": torch.ones(48, dtype=torch.int32)}
    hf_like = type("Model", (), {"config": hf.config, "state_dict": lambda self: state})()
    with pytest.raises(ValueError, match=r"tensor output_norm.weight: .* expected, got I32"):
        load(write_gguf(tmp_path / "m.gguf", hf_like))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing.gguf"):
        load(tmp_path / "nothing.gguf")

"""Folders: what a GGUF file's model is saved as."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from fastinfer.models import load
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.rotary import RopeScaling
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import quantize_model
from fastinfer.quantizer.folder import hf_fields, read_tensors, write_tensors
from tests.models.gguf_tools import write_gguf
from tests.models.tools import paged_logits, tiny_model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_config_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    config = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_model(kind))).config
    assert ModelConfig.from_hf(hf_fields(config)) == config


def test_what_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    config = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_model("llama"))).config
    scaling = RopeScaling("linear", factor=2.0, original_context=32)
    config = ModelConfig(**{**vars(config), "rope_scaling": scaling})
    with pytest.raises(ValueError, match="a GGUF file whose rope_scaling cannot be written"):
        hf_fields(config)


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, tiny_tokenizer: Any) -> None:
    hf = tiny_model("llama", hidden_size=48, max_position_embeddings=128)
    path = write_gguf(tmp_path / "m.gguf", hf)
    recipe = Recipe(Scheme("gptq", 8, 16, symmetric=False))
    text = ["0123456789 " * 200]
    quantize_model(path, tmp_path / "out", recipe, text, samples=8, seq_len=32)
    ids = [[1, *range(20, 60)]]
    one, other = (
        paged_logits(load(p).decoder, ids, 64)[0].double() for p in (path, tmp_path / "out")
    )
    assert 0 < float((one - other).norm() / one.norm()) < 0.05


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.arange(4).reshape(2, 2).t()}, report="[]")
    tensors, metadata = read_tensors(path)
    assert torch.equal(tensors["x"], torch.tensor([[0, 2], [1, 3]]))
    assert metadata["report"] == "[]"
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(path, {"x": torch.zeros(1000)})
    assert torch.equal(read_tensors(path)[0]["x"], tensors["x"])


def test_a_full_disk_is_an_os_error_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"a\.safetensors: cannot be written \(.*No space left"):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3)})
    assert not (tmp_path / "a.safetensors").exists()

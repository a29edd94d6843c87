"""Hugging Face folders: sharded or not, dummy weights, and everything that must be refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastinfer.models import ModelConfig, load
from tests.models.tools import paged_logits, save, tiny_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
IDS = [[1, *range(20, 60)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as a single file, in shards, in bf16, and tied."""
    root = tmp_path_factory.mktemp("folders")
    hf = tiny_model("llama")
    save(hf, root / "single")
    save(hf, root / "sharded", max_shard_size="50KB")
    save(tiny_model("llama", tie_word_embeddings=True), root / "tied")
    save(hf.bfloat16(), root / "bf16")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """A copy of the single-file model, to be broken."""
    return Path(shutil.copytree(folders / "single", tmp_path / "m"))


@pytest.fixture
def sharded(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "sharded", tmp_path / "s"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def test_shards_equal_the_single_file(folders: Path) -> None:
    single, sharded = load(folders / "single"), load(str(folders / "sharded"))
    assert single.config == sharded.config
    assert torch.equal(
        paged_logits(single.decoder, IDS, 64)[0], paged_logits(sharded.decoder, IDS, 64)[0]
    )


def test_what_is_returned(folders: Path) -> None:
    loaded = load(folders / "single")
    assert loaded.config.eos_token_ids == (2,)
    assert (loaded.dtype, loaded.max_model_len) == (torch.float32, 64)
    assert loaded.tokenizer_source == folders / "single"
    assert load(folders / "single", max_model_len=7).decoder.cos_sin.shape == (7, 16)


def test_dtype(folders: Path) -> None:
    assert load(folders / "bf16").config.dtype is torch.bfloat16
    assert load(folders / "bf16").dtype is torch.float32  # the CPU's default
    assert load(folders / "bf16", dtype="bfloat16").decoder.embed_tokens.dtype is torch.bfloat16


def test_a_tied_head_may_be_there_twice_if_it_is_the_same(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "tied", tmp_path / "t"))
    embedding = "model.embed_tokens.weight"
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    load(folder)
    edit_tensors(folder, lambda t: t["lm_head.weight"][0, 0].add_(1.0))
    with pytest.raises(ValueError, match=r"lm_head.weight: equal to the embedding expected"):
        load(folder)


def test_old_rotary_buffers_are_no_weights(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


# Dummy weights.


def test_dummy(folder: Path) -> None:
    (folder / SINGLE).unlink()
    first = load(folder, load_format="dummy")
    again = load(first.config, load_format="dummy")
    a, b = (paged_logits(m.decoder, IDS, 64)[0] for m in (first, again))
    assert a.isfinite().all() and a.std() > 0
    assert torch.equal(a, b)
    assert again.tokenizer_source is None


# Bad arguments.


def test_bad_arguments(folders: Path) -> None:
    folder = folders / "single"
    config = load(folder).config
    for arguments, message in (
        ({"load_format": "pickle"}, "load_format must be one of"),
        ({"load_format": "gguf"}, "needs a file"),
        ({"dtype": "int8"}, "dtype must be 'auto' or one of"),
        ({"dtype": torch.float64}, "dtype must be 'auto' or one of"),
        ({"max_model_len": 65}, r"max_model_len must be in 1..64"),
        ({"max_model_len": 0}, r"max_model_len must be in 1..64"),
        ({"max_model_len": -3}, r"max_model_len must be in 1..64"),
    ):
        with pytest.raises(ValueError, match=message):
            load(folder, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"load_format='dummy' expected"):
        load(config)


# Bad folders.


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no config.json"):
        load(folder)
    (folder / "x.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"it holds x.gguf: pass that file"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1,}', "\udcff"])
def test_config_is_not_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config.json: (not valid JSON|a JSON object expected)"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match=rf"neither {SINGLE} nor {INDEX}"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / SINGLE).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")  # would run a command
    for path in (folder, folder / name):
        with pytest.raises(ValueError, match=rf"{name}: a pickled checkpoint is refused"):
            load(path)


def test_truncated_weights(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        (folder / SINGLE).write_bytes(data[:length])
        with pytest.raises(ValueError, match=rf"{SINGLE}: damaged or truncated"):
            load(folder)


def test_damaged_weights(folder: Path) -> None:
    data = bytearray((folder / SINGLE).read_bytes())
    for damage in (b"\xff" * 8, (2**40).to_bytes(8, "little"), b"\x00" * 8):
        (folder / SINGLE).write_bytes(damage + data[8:])
        with pytest.raises(ValueError, match=rf"{SINGLE}: damaged or truncated"):
            load(folder)


def test_missing_tensor(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=rf"tensor {name} of shape \(32, 48\) is missing$"):
        load(folder)


def test_unexpected_tensor(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    edit_tensors(folder, lambda t: t.update({name: torch.ones(16)}))
    with pytest.raises(ValueError, match=rf"tensor {name}: the model has no such weight"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].T.contiguous()}))
    with pytest.raises(ValueError, match=rf"{name}: shape \(48, 80\) expected, got \(80, 48\)"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_wrong_dtype(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=rf"{name}: a floating-point type expected, got [IF]"):
        load(folder)


def test_missing_shard(sharded: Path) -> None:
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{INDEX}: the shard {shard.name} is missing"):
        load(sharded)


def test_index_names_a_tensor_that_is_not_there(sharded: Path) -> None:
    def move(index: dict[str, Any]) -> None:
        shards = sorted(set(index["weight_map"].values()))
        index["weight_map"]["model.norm.weight"] = next(
            s for s in shards if s != index["weight_map"]["model.norm.weight"]
        )

    edit_json(sharded / INDEX, move)
    with pytest.raises(ValueError, match=r"tensor model.norm.weight is missing, which .*places"):
        load(sharded)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "x.bin", 3, None])
def test_index_names_no_file_beside_it(sharded: Path, shard: object) -> None:
    edit_json(sharded / INDEX, lambda i: i["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(ValueError, match=r"model.norm.weight: a safetensors file beside it"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX):
        load(sharded)


def test_bad_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json: not valid JSON"):
        load(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token_id must be a token id or a list"):
        load(folder)


def test_config_error_names_the_file(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.pop("hidden_size"))
    with pytest.raises(ValueError, match=r"config.json: .*the key 'hidden_size' is missing"):
        load(folder)


def test_config_alone_is_read_only_for_dummy(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert isinstance(load(folder, load_format="dummy").config, ModelConfig)
    with pytest.raises(FileNotFoundError):
        load(folder)

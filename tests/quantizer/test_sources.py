"""Sources as they come: sizes that divide nothing, weights that are not numbers or contradict each
other, folders with more in them than a model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastinfer.models import load
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import quantize_model
from tests.models.tools import paged_logits
from tests.quantizer.conftest import TEXT

Make = Callable[..., Path]
OPTIONS: dict[str, Any] = {"samples": 8, "seq_len": 32}


def logits_of(path: Path) -> Tensor:
    return torch.cat(paged_logits(load(path).decoder, [[5, 17, 88, 200, 319, 40, 3]], 8))


@pytest.mark.parametrize("group_size", [-1, 128, 32])
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_odd_widths(folder: Make, tmp_path: Path, format: str, group_size: int) -> None:
    source, out = folder(intermediate_size=83), tmp_path / "out"
    quantize_model(source, out, Recipe(Scheme("rtn", 8, group_size)), [TEXT], format=format,
                   **OPTIONS)  # fmt: skip
    plain = logits_of(source)
    assert float((logits_of(out) - plain).norm() / plain.norm()) < 0.1


def change(folder: Path, name: str, changed: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Gives the checkpoint of a folder another tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = changed(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_that_is_another_matrix_is_refused(folder: Make, tmp_path: Path) -> None:
    source, out = folder(tie_word_embeddings=True), tmp_path / "out"
    change(source, "lm_head.weight", lambda t: 2 * t["model.embed_tokens.weight"])
    for call in (load, lambda path: quantize_model(path, out, Recipe(), [TEXT], **OPTIONS)):
        with pytest.raises(ValueError, match=r"lm_head\.weight: equal to the embedding expected"):
            call(source)
    assert list(tmp_path.iterdir()) == [source]
    change(source, "lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone())
    quantize_model(source, out, Recipe(), [TEXT], **OPTIONS)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    "name", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.1.mlp.down_proj"]
)
def test_weights_that_stay_plain_are_numbers(
    folder: Make, tmp_path: Path, name: str, value: float
) -> None:
    def broken(tensors: dict[str, Tensor]) -> Tensor:
        weight = tensors[f"{name}.weight"].clone()
        weight.view(-1)[-1] = value
        return weight

    source, out = folder(), tmp_path / "out"
    change(source, f"{name}.weight", broken)
    recipe = Recipe(overrides={"*.1.mlp.down_proj": None})
    with pytest.raises(
        ValueError, match=rf"{name}: weight: expected finite values, got {value} at \["
    ):
        quantize_model(source, out, recipe, [TEXT], **OPTIONS)
    assert not out.exists()


def test_what_is_no_file_is_not_copied(folder: Make, tmp_path: Path) -> None:
    source, out = folder(), tmp_path / "out"
    (source / "training.json").mkdir()
    (source / "notes.txt").symlink_to("nowhere")
    quantize_model(source, out, Recipe(Scheme("rtn")), [TEXT], **OPTIONS)
    assert not {p.name for p in out.iterdir()} & {"training.json", "notes.txt"}


def test_a_result_inside_of_its_source_is_refused(folder: Make, tmp_path: Path) -> None:
    source = folder()
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.iterdir())
    for out in (source / "out", source / "more" / "out", tmp_path / "link" / "out"):
        with pytest.raises(ValueError, match=r"out: expected a folder outside of the model's"):
            quantize_model(source, out, Recipe(), [TEXT], **OPTIONS)
    assert sorted(source.iterdir()) == before


def test_rows_that_awq_has_no_words_for_are_refused_at_once(folder: Make, tmp_path: Path) -> None:
    source, out = folder(intermediate_size=83), tmp_path / "out"
    message = r"layers\.0\.mlp\.gate_proj.* 'awq': expected a multiple of 8 output .*, got 83"
    with pytest.raises(ValueError, match=message):
        quantize_model(source, out, Recipe(), [TEXT], format="awq", **OPTIONS)
    assert list(tmp_path.iterdir()) == [source]
    recipe = Recipe(overrides={"*.gate_proj": None, "*.up_proj": None})
    quantize_model(source, out, recipe, [TEXT], format="awq", **OPTIONS)
    assert logits_of(out).isfinite().all()


def test_partial_groups_are_warned_of(
    folder: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = folder()  # 48, 64 and 80 inputs
    for group_size, some in ((16, False), (-1, False), (32, True), (128, True)):
        caplog.clear()
        recipe = Recipe(Scheme("rtn", 4, group_size), {"*.1.*": None})
        quantize_model(source, tmp_path / f"out{group_size}", recipe, [TEXT], **OPTIONS)
        message = f"48 inputs are not a multiple of group_size {group_size}"
        assert (message in caplog.text) == some
        assert caplog.text.count("not a multiple") == some


def test_devices_that_there_are_not(folder: Make, tmp_path: Path) -> None:
    source = folder()
    for device in ("gpu", "meta", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ValueError, match=rf"device: expected .* usable here, got '{device}'"):
            quantize_model(source, tmp_path / "out", Recipe(), [TEXT], device=device, **OPTIONS)
    assert list(tmp_path.iterdir()) == [source]

"""Whole models: what is saved computes what was measured, in every format and architecture; what is
interrupted goes on to the same result; what is refused leaves everything as it was.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastinfer import LLM, SamplingParams
from fastinfer.models import load
from fastinfer.nn import LowBitLinear
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import driver, quantize_model
from fastinfer.quantizer.formats import FORMATS
from fastinfer.quantizer.walk import Walk
from fastinfer.quantizer.windows import window_batch, window_cache
from tests.models.tools import paged_logits
from tests.quantizer.conftest import TEXT

Make = Callable[..., Path]
PROMPTS = [[5, 17, 88, 200, 319, 40, 3], [250, 1, 90]]
OPTIONS: dict[str, Any] = {"samples": 12, "seq_len": 32}


def files_of(path: Path) -> dict[str, str]:
    return {
        str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def logits_of(path: Path) -> torch.Tensor:
    return torch.cat(paged_logits(load(path).decoder, PROMPTS, 8))


RECIPES: dict[str, Recipe] = {
    "rtn": Recipe(Scheme("rtn", 4, 32)),
    "gptq": Recipe(Scheme("gptq", 3, 16, symmetric=True)),
    "gptq-act": Recipe(Scheme("gptq", 4, 32, order="act")),
    "gptq-row": Recipe(Scheme("gptq", 8, -1, order="act")),
    "awq": Recipe(Scheme("awq", 4, 16)),
    "mixed": Recipe(
        Scheme("awq", 4, 32),
        {"*.0.mlp.down_proj": None, "*.1.*": Scheme("gptq", 8, 16), "*.v_proj": Scheme("rtn", 2)},
    ),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq"])
def test_what_is_saved_loads_and_computes_what_was_measured(
    folder: Make, tmp_path: Path, format: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, recipe = folder(), tmp_path / "out", RECIPES[name]
    before = files_of(source)
    if format == "awq" and name not in ("rtn", "awq"):
        with pytest.raises(ValueError, match="format 'awq': expected"):
            quantize_model(source, out, recipe, [TEXT], format=format, **OPTIONS)
        assert not out.exists() and not (tmp_path / "out.work").exists()
        return
    walks: list[Walk] = []
    monkeypatch.setattr(driver, "Walk", lambda *a: walks.append(Walk(*a)) or walks[-1])
    reports = quantize_model(source, out, recipe, [TEXT], format=format, **OPTIONS)
    assert files_of(source) == before
    assert not (tmp_path / "out.work").exists()
    assert len(reports) == 14 - (name == "mixed")
    saved = json.loads((out / "quantization_report.json").read_text())
    assert saved["projections"] == [vars(r) for r in reports]
    assert Recipe.from_dict(saved["recipe"]) == recipe
    bound = {2: 0.4, 3: 0.1, 4: 0.02, 8: 1e-4}
    assert all(0 < r.relative_error < bound[r.bits] for r in reports)
    # The loaded model takes the calibration data to where the driver's own layers took it.
    assert (json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
            == format)  # fmt: skip
    decoder = load(out).decoder
    assert any(isinstance(m, LowBitLinear) for m in decoder.modules())
    walk = walks[0]
    assert all(p.linear.plain_weight().is_meta for i in range(2) for p in walk.projections(i))
    ids = driver.calibration_windows([TEXT], driver.load_tokenizer(source), samples=12, length=32)
    hidden = paged_hidden(decoder, ids[0].tolist())
    residual = walk.states[0].clone()
    expected = walk.decoder.norm(residual)
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
    out_text = LLM(out, kv_cache_memory_bytes=1 << 22).generate(
        ["the quick"], SamplingParams(temperature=0, max_tokens=4)
    )
    assert out_text[0].text


def paged_hidden(decoder: Any, ids: list[int]) -> torch.Tensor:
    caches = [window_cache(decoder.config, len(ids), torch.float32, torch.device("cpu"))
              for _ in decoder.layers]  # fmt: skip
    with torch.inference_mode():
        hidden: torch.Tensor = decoder(window_batch(torch.tensor(ids)), caches)
    return hidden


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"])
def test_every_architecture(folder: Make, tmp_path: Path, kind: str) -> None:
    changes = {} if kind != "phi3" else {"head_dim": 12, "pad_token_id": 0}
    if kind == "gemma3_text":
        changes = {"sliding_window": 6, "sliding_window_pattern": 2}
    source = folder(kind, **changes)
    plain = logits_of(source)
    errors = {}
    for bits in (8, 4):
        out = tmp_path / f"out{bits}"
        method = "gptq" if bits == 8 else "awq"
        recipe = Recipe(Scheme(method, bits, 16, symmetric=False))
        quantize_model(source, out, recipe, [TEXT], **OPTIONS)
        errors[bits] = float((logits_of(out) - plain).norm() / plain.norm())
    assert errors[8] < 0.03 < errors[4] < 0.8, errors


@pytest.mark.parametrize("name, symmetric", [("compressed-tensors", True), ("awq", False)])
@pytest.mark.parametrize("asked", [None, True, False])
def test_zero_points_are_the_formats_choice_or_the_recipes(
    folder: Make, tmp_path: Path, name: str, symmetric: bool, asked: bool | None
) -> None:
    recipe = Recipe(Scheme("rtn", 4, 16, symmetric=asked))
    quantize_model(folder(), tmp_path / "out", recipe, [TEXT], format=name, **OPTIONS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if name == "awq":
        got = not config["zero_point"]
    else:
        got = config["config_groups"]["group_0"]["weights"]["symmetric"]
    assert got is (symmetric if asked is None else asked)


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_was_interrupted_goes_on_to_the_same_result(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    source, out, recipe = folder(dtype=torch.bfloat16), tmp_path / "out", Recipe(Scheme(method))
    whole = tmp_path / "whole"
    quantize_model(source, whole, recipe, [TEXT], **OPTIONS)
    quantized: list[int] = []
    quantize_layer = driver.quantize_layer

    interrupted = True

    def recorded(walk: Walk, i: int, *arguments: Any, **options: Any) -> Any:
        if i == 1 and interrupted:
            raise _Interrupted
        quantized.append(i)
        return quantize_layer(walk, i, *arguments, **options)

    def run() -> Any:
        return quantize_model(source, out, recipe, [TEXT], **OPTIONS)

    monkeypatch.setattr(driver, "quantize_layer", recorded)
    with pytest.raises(_Interrupted):
        run()
    assert not out.exists() and (tmp_path / "out.work" / "layer-00000.safetensors").exists()
    interrupted = False
    # Then on the way to the final name.
    rename = os.rename

    def not_renaming(*arguments: Any) -> None:
        raise _Interrupted

    monkeypatch.setattr("os.rename", not_renaming)
    with pytest.raises(_Interrupted):
        run()
    assert not out.exists()
    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(ValueError, match=r"out\.work is of an interrupted run with another recipe"):
        quantize_model(source, out, Recipe(Scheme(bits=8)), [TEXT], **OPTIONS)
    with pytest.raises(ValueError, match="with another calibration"):
        quantize_model(source, out, recipe, [TEXT[::-1]], **OPTIONS)
    run()
    assert quantized == [0, 1]
    assert files_of(out) == files_of(whole)
    assert not (tmp_path / "out.work").exists()


def test_bad_input_is_refused_before_anything_is_written(folder: Make, tmp_path: Path) -> None:
    source, out = folder(), tmp_path / "out"
    before = files_of(tmp_path)

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        arguments = {"model": source, "out": out, "recipe": Recipe(), "texts": [TEXT], **OPTIONS}
        with pytest.raises(error, match=match):
            quantize_model(**{**arguments, **changes})
        assert files_of(tmp_path) == before

    refused(ValueError, "'k_prj' matches no projection", recipe=Recipe(overrides={"k_prj": None}))
    refused(ValueError, "expected a scheme for some", recipe=Recipe(overrides={"*": None}))
    refused(ValueError, "expected text of at least 32 tokens .*, got 0", texts=[])
    refused(ValueError, "expected text of at least 32 tokens .*, got", texts=["a few words"])
    refused(ValueError, "seq_len: expected up to the model's context of 128", seq_len=129)
    refused(ValueError, "samples: expected at least 1, got 0", samples=0)
    refused(ValueError, "format: expected one of", format="gguf")
    refused(FileNotFoundError, "no such file or folder", model=tmp_path / "none")
    refused(FileExistsError, "expected a folder that does not exist yet", out=source)
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine").touch()
    before = files_of(tmp_path)
    refused(ValueError, r"out\.work: expected a work folder with run\.json, got another")


def test_nan_and_quantized_models_are_refused_by_name(folder: Make, tmp_path: Path) -> None:
    source, out = folder(), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name}: .*weight: expected finite.*nan at \[3, 5\]"):
        quantize_model(source, out, Recipe(), [TEXT], **OPTIONS)
    assert not out.exists()
    tensors[f"{name}.weight"][3, 5] = 0
    tensors["model.layers.0.input_layernorm.weight"][0] = 1e30  # whose squares are infinite
    other = tmp_path / "other"
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj: .*hessian: expected finite values"):
        quantize_model(other, tmp_path / "out2", Recipe(), [TEXT], **OPTIONS)
    quantize_model(folder(), tmp_path / "good", Recipe(), [TEXT], **OPTIONS)
    with pytest.raises(ValueError, match=r"good: expected a plain model.*compressed-tensors"):
        quantize_model(tmp_path / "good", tmp_path / "twice", Recipe(), [TEXT], **OPTIONS)


def test_several_files_and_an_index(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tie_word_embeddings=True)
    quantize_model(source, tmp_path / "one", Recipe(), [TEXT], **OPTIONS)
    monkeypatch.setitem(driver.write_folder.__kwdefaults__, "shard_bytes", 1)
    quantize_model(source, tmp_path / "many", Recipe(), [TEXT], **OPTIONS)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    assert torch.equal(logits_of(tmp_path / "one"), logits_of(tmp_path / "many"))


def test_order_act_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for order, actorder in (("none", None), ("static", "static"), ("group", "static"),
                            ("act", "group")):  # fmt: skip
        caplog.clear()
        config = FORMATS["compressed-tensors"].config({"a": Scheme(order=order)})
        assert config["config_groups"]["group_0"]["weights"]["actorder"] == actorder
        assert ("need weight_g_idx" in caplog.text) == (order == "act")


def test_gptq_settings_by_name_and_awq_refused() -> None:
    four, eight = Scheme(symmetric=True), Scheme(bits=8, symmetric=True, order="act")
    config = FORMATS["gptq"].config({"m.a": four, "m.b": eight, "m.c": None, "m.d": four})
    assert (config["bits"], config["desc_act"], config["checkpoint_format"]) == (4, False, "gptq")
    assert config["dynamic"] == {
        r"+:m\.b$": {"bits": 8, "group_size": 128, "sym": True, "desc_act": True},
        r"-:m\.c$": {},
    }
    assert FORMATS["gptq"].config({"a": Scheme()})["checkpoint_format"] == "gptq_v2"
    for schemes, message in (
        ({"a": Scheme(bits=3)}, "expected 4 bits and columns in order, got 3 bits"),
        ({"a": Scheme(order="act")}, "got 4 bits in order of activation"),
        ({"a": Scheme(), "b": Scheme(group_size=64)}, "expected one scheme .*, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            FORMATS["awq"].config(schemes)


def test_one_layer_has_memory_at_a_time(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Walk.advance
    allocated: list[list[bool]] = []

    def observed(walk: Walk, i: int) -> None:
        linears = [[p.linear for p in walk.projections(layer)] for layer in range(3)]
        allocated.append([not any(x.plain_weight().is_meta for x in of) for of in linears])
        advance(walk, i)

    monkeypatch.setattr(Walk, "advance", observed)
    source = folder(num_hidden_layers=3)
    quantize_model(source, tmp_path / "out", Recipe(Scheme("rtn")), [TEXT], **OPTIONS)
    assert allocated == [[i == j for j in range(3)] for i in range(3)]

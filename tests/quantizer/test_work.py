"""The work folder: whatever ended a run, the next one goes on or says why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import driver, quantize_model
from tests.quantizer.conftest import TEXT

Make = Callable[..., Path]
OPTIONS: dict[str, Any] = {"samples": 8, "seq_len": 32}
RECIPE = Recipe(Scheme("rtn"))


def test_another_config_is_another_model(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = folder(), tmp_path / "out"

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "write_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(ValueError, match=r"out\.work is of an interrupted run with another model"):
        quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)

"""The work folder: whatever ended a run, the next one goes on or says why not."""

import json
import os
import subprocess
import sys
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
        raise RuntimeError

    monkeypatch.setattr(driver, "write_folder", interrupted)
    with pytest.raises(RuntimeError):
        quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(ValueError, match=r"out\.work is of an interrupted run with another model"):
        quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)


def test_a_run_that_ended_while_it_began_is_no_hindrance(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = folder(), tmp_path / "out"
    replace = os.replace

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    assert list((tmp_path / "out.work").glob("*.part"))
    monkeypatch.setattr("os.replace", replace)
    quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out"]


def test_a_work_folder_is_a_folder(folder: Make, tmp_path: Path) -> None:
    source, work = folder(), tmp_path / "out.work"
    work.write_text("mine")
    with pytest.raises(ValueError, match=r"out\.work: expected a work folder, got a file"):
        quantize_model(source, tmp_path / "out", RECIPE, [TEXT], **OPTIONS)
    assert work.read_text() == "mine"
    work.unlink()
    (tmp_path / "elsewhere").mkdir()
    work.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="got a file or a link"):
        quantize_model(source, tmp_path / "out", RECIPE, [TEXT], **OPTIONS)


def test_one_run_at_a_time(folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = folder(), tmp_path / "out"
    quantize_layer = driver.quantize_layer
    refused = []

    def beside_another(*arguments: Any, **options: Any) -> Any:
        before = sorted((tmp_path / "out.work").iterdir())
        with pytest.raises(ValueError, match=r"out\.work: expected no other run .* one that is"):
            quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
        assert sorted((tmp_path / "out.work").iterdir()) == before
        refused.append(True)
        return quantize_layer(*arguments, **options)

    monkeypatch.setattr(driver, "quantize_layer", beside_another)
    quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    assert refused == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out"]


_KILLED = """
import os, signal, sys
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import driver, quantize_model
quantize_layer = driver.quantize_layer

def killed(walk, i, *arguments, **options):
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return quantize_layer(walk, i, *arguments, **options)

driver.quantize_layer = killed
quantize_model(sys.argv[1], sys.argv[2], Recipe(Scheme("rtn")), [sys.argv[3]], samples=8,
               seq_len=32)
"""


def test_a_killed_run_holds_nothing(folder: Make, tmp_path: Path) -> None:
    source, out = folder(), tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(source), str(out), TEXT]
    assert subprocess.run(command, check=False, timeout=120).returncode == -9
    assert (tmp_path / "out.work" / "layer-00000.safetensors").exists() and not out.exists()
    with pytest.raises(ValueError, match="with another recipe"):
        quantize_model(source, out, Recipe(Scheme("rtn", 8)), [TEXT], **OPTIONS)
    quantize_model(source, out, RECIPE, [TEXT], **OPTIONS)
    quantize_model(source, tmp_path / "whole", RECIPE, [TEXT], **OPTIONS)
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()

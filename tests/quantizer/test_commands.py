"""`fastinfer quantize` and `fastinfer eval`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fastinfer.cli import main
from tests.quantizer.conftest import TEXT

Make = Callable[..., Path]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_quantize_and_eval(
    folder: Make, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(folder()), str(tmp_path / "out")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"bits": 4, "overrides": {"*.down_proj": None}}))
    small = ["--samples", "4", "--seq-len", "32"]
    options = ["--method", "gptq", "--bits", "8", "--group-size", "16", "--order", "static"]
    arguments = ["quantize", source, out, "--text", text, "--recipe", str(recipe), *small]
    assert main([*arguments, *options, "--symmetric", "--no-sequential"]) == 0
    printed = capsys.readouterr()
    assert f"{out}: 12 projections" in printed.out and "layer 2/2" in printed.err
    weights = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (8, 16, True)
    found = []
    for model in (source, out):
        assert main(["eval", model, "--text", text, "--window", "64", "--windows", "3"]) == 0
        match = re.search(r"perplexity (\S+) of 189 tokens in 3 windows", capsys.readouterr().out)
        assert match is not None
        found.append(float(match[1]))
    assert found[0] != found[1] and found[1] == pytest.approx(found[0], rel=0.05)


def test_bad_input_is_one_line_and_exit_code_2(
    folder: Make, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(folder()), str(tmp_path / "out")
    quantize = ["quantize", source, out, "--text", text]
    for arguments, message in (
        ([*quantize, "--bits", "5"], "bits of 'gptq': expected one of"),
        ([*quantize, "--seq-len", "100000"], "expected text of at least 100000 tokens"),
        (["quantize", source, source, "--text", text], "expected a folder that does not exist"),
        (["eval", source, "--text", str(tmp_path / "none.txt")], "none.txt"),
        (["eval", source, "--text", text], "window: expected 2..128"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1] and error[-1].startswith("fastinfer: error: ")
    assert not Path(out).exists()

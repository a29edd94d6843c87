"""A built wheel works away from the source tree, and holds exactly the package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "fastinfer/_ops.so" in names
    assert any(n.startswith("fastinfer/_host.") and n.endswith(".so") for n in names)
    assert "fastinfer/py.typed" in names and "fastinfer/_host.pyi" in names
    assert {n.split("/")[0].split("-")[0] for n in names} == {"fastinfer"}
    for module in (ROOT / "fastinfer").rglob("*.py"):
        assert str(module.relative_to(ROOT)) in names


def test_wheel_runs_an_op_away_from_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import torch, fastinfer, fastinfer._host, fastinfer.ops as ops\n"
        f"assert fastinfer.__file__.startswith({str(target)!r}), fastinfer.__file__\n"
        "x = torch.randn(3, 8)\n"
        "expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)\n"
        "torch.testing.assert_close(ops.rms_norm(x, torch.ones(8)), expected)\n"
    )
    env = os.environ | {"PYTHONPATH": str(target)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)

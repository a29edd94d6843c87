"""Host code of the CUDA kernels, compiled into programs that answer what they are asked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "csrc" / "cuda"
INCLUDES = (HERE / "counting_runtime", CUDA, CUDA / "gemm")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Callable[..., list[str]]]:
    """Makes a program of tests/cuda/<name>.cpp and of files in csrc/cuda.

    What it makes takes requests, a line each, and returns the lines of the answers.
    """

    def compiled(name: str, *others: str) -> Callable[..., list[str]]:
        path = tmp_path_factory.mktemp(name) / name
        sources = [HERE / f"{name}.cpp", *(CUDA / other for other in others)]
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-pthread"]
        command += [f"-I{folder}" for folder in INCLUDES]
        subprocess.run([*command, *map(str, sources), "-o", str(path)], check=True)

        def run(*requests: str) -> list[str]:
            asked = "\n".join(requests)
            ran = subprocess.run(
                [str(path)], input=asked, stdout=subprocess.PIPE, text=True, check=True
            )
            return [line.strip() for line in ran.stdout.splitlines()]

        return run

    return compiled

"""What a launch asks the driver for, run here without a GPU: a stand-in counts the calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"


def test_shared_memory_is_asked_for_once_for_each_kernel_and_device(tmp_path: Path) -> None:
    program = tmp_path / "launch"
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{HERE / 'counting_runtime'}", f"-I{SOURCES}"]
    source = str(HERE / "launch.cpp")
    subprocess.run([os.environ.get("CXX", "c++"), *flags, source, "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == [
        "1 allowed",  # three launches on device 0
        "1 allowed",  # on another device
        "1 allowed",  # on the last one that is remembered
        "3 allowed",  # beyond: asked each time, and never mistaken for another device
        "3 allowed",
        "0 allowed",  # device 0 again
        "1 failed",  # another kernel, which the driver refuses
        "1 failed",  # a failure is not taken for done
        "1 allowed",
        "200",  # bytes
        "1",  # eight threads at once
        "0 allowed",  # what they did is remembered
    ]

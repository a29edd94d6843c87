"""What a launch asks the driver for, run here without a GPU: a stand-in counts the calls."""

from __future__ import annotations


def test_shared_memory_is_asked_for_once_for_each_kernel_and_device(program) -> None:
    assert program("launch")() == [
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

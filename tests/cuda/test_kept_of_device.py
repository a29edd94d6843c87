"""How often a device is looked up, run here without a GPU."""

from __future__ import annotations


def test_a_device_is_looked_up_once(program) -> None:
    assert program("kept_of_device")() == [
        "100 100 100 calls 1",
        "163 163 163 calls 1",  # the last one that is remembered
        "164 164 calls 2",  # beyond: looked up each time, and never mistaken for another device
        "99 99 calls 2",
        "100 100 calls 0",
        "failed 101 101 calls 2",  # a failure is not kept
        "1",  # eight threads at once
        "1039 calls 0",  # what they found is kept
    ]

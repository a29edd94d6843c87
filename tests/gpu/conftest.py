"""Tests that need a GPU. Without one they are skipped by name; FASTINFER_REQUIRE_GPU=1 makes that a
failure.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("FASTINFER_REQUIRE_GPU") == "1":
        raise pytest.UsageError("FASTINFER_REQUIRE_GPU=1 but torch finds no CUDA device")
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU (make test-gpu)"))

"""Fixtures of the tests that quantize whole models: tiny ones with a byte-level tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import tiny_tokenizer  # noqa: F401
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.tools import save, tiny_model

# A partial group of 32, and sizes that AWQ's words of eight columns divide.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GPT2_SIZES = {
    "vocab_size": 320, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 128,
}  # fmt: skip
TEXT = "".join(f"{i} quick brown foxes jump over {i * i} lazy dogs. " for i in range(400))


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:  # noqa: F811
    """Saves a tiny model with its tokenizer; changes are those of its config."""

    def make(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        sizes = GPT2_SIZES if kind == "gpt2" else {**SIZES, **changes}
        model = tiny_model(kind, **sizes).to(dtype)
        path = save(model, tmp_path / kind)
        tiny_tokenizer.save_pretrained(path)
        return path

    return make

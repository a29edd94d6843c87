"""Tools of the tests with transformers' models: inputs, references, and what generation gives."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fastinfer.integrations.transformers as integration
from fastinfer import ops
from tests.helpers import assert_accurate
from tests.models.tools import CONFIGS, _InFloat64

FAMILIES = [*CONFIGS]
VOCABULARY = 97


def token_ids(rows: int = 3, length: int = 19) -> Tensor:
    """Random ids [rows, length] that are no special tokens."""
    return torch.randint(3, VOCABULARY, (rows, length))


def left_padding(ids: Tensor) -> Tensor:
    """A mask whose first row has 5 tokens of padding, and whose second one has 4 tokens left."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :-4] = 0
    return mask


@torch.no_grad()
def float64_logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of the model by transformers' own attention, every step of it in float64."""
    double = copy.deepcopy(model)
    double.set_attn_implementation("eager")
    with _InFloat64():
        logits: Tensor = double.double()(ids, **inputs).logits
    return logits


@torch.no_grad()
def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of the model as it is."""
    result: Tensor = model(ids, **inputs).logits
    return result


def assert_same_logits(
    model: Any, baseline: Any, ids: Tensor, rows: Tensor | None = None, **inputs: Any
) -> None:
    """Those of `model` err no more than twice as much from float64 as those of the untouched one.

    rows: bool [B, S], the tokens that count; None: all.
    """
    expected, before = float64_logits(baseline, ids, **inputs), logits(baseline, ids, **inputs)
    after = logits(model, ids, **inputs)
    rows = torch.ones_like(ids).bool() if rows is None else rows.bool()
    assert_accurate(after[rows], expected[rows], before[rows], what="logits")


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "static cache": {"cache_implementation": "static"},
}


def generated(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """What transformers' own generation adds, always from the same seed."""
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0, **options}
    out: Tensor = model.generate(ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :]


def forbid_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on attention that is not one of the ops fails."""

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("attention went to torch")

    monkeypatch.setattr(integration, "sdpa_attention_forward", refused)
    monkeypatch.setattr(integration, "_attention_by_formula", refused)


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, int]:
    """How often each of these ops is called from now on."""
    calls = dict.fromkeys(names, 0)

    def counted(name: str) -> None:
        op = getattr(ops, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return op(*args, **options)

        monkeypatch.setattr(ops, name, call)

    for name in names:
        counted(name)
    return calls

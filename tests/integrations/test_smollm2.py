"""The embedded default model in transformers, before and after `fastinfer.optimize`."""

import copy
from typing import Any

import torch

import fastinfer
from tests.integrations.tools import assert_same_logits, generated
from tests.models.test_smollm2 import theirs

__all__ = ["theirs"]


def test_logits_and_tokens_before_and_after(theirs: Any) -> None:
    model = copy.deepcopy(theirs)
    report = fastinfer.optimize(model)
    assert report.left == [] and len(report.swapped) == 61 + 30 + 30 + 1
    ids = torch.randint(0, 49152, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert_same_logits(model, theirs, ids, mask, attention_mask=mask)
    before = generated(theirs, ids, mask, max_new_tokens=6)
    assert torch.equal(generated(model, ids, mask, max_new_tokens=6), before)

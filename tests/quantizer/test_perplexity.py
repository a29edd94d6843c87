"""Perplexity, by the protocol that its docstring tells, against float64."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from fastinfer.models import load, load_tokenizer
from fastinfer.quantizer import evaluation_tokens, perplexity
from tests.models.tools import transformers_float64_logits

Make = Callable[..., Path]


def test_equals_float64(folder: Make) -> None:
    path = folder()
    hf = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.randint(2, 320, (100,))
    got = perplexity(load(path), tokens, window=24, max_windows=3)
    losses = []
    for window in tokens[:72].view(3, 24):
        logits = transformers_float64_logits(hf, window.tolist())
        losses.append(F.cross_entropy(logits[:-1], window[1:], reduction="none"))
    assert got.value == pytest.approx(math.exp(float(torch.cat(losses).mean())), rel=1e-4)
    assert (got.tokens, got.windows) == (3 * 23, 3)
    assert perplexity(load(path), tokens, window=24).windows == 4


def test_the_beginning_is_left_out(folder: Make) -> None:
    tokenizer = load_tokenizer(folder())
    short, long = "0123456789" * 10, "abcdefghij" * 30000
    assert evaluation_tokens(short, tokenizer).tolist() == tokenizer.encode(short[10:])
    assert evaluation_tokens(long, tokenizer).tolist() == tokenizer.encode(long[20000:])


def test_bad_arguments_are_refused(folder: Make) -> None:
    model, tokens = load(folder()), torch.arange(2, 32)
    with pytest.raises(ValueError, match=r"expected text of at least 31 tokens .*, got 30"):
        perplexity(model, tokens, window=31)
    for window in (1, 129):
        with pytest.raises(ValueError, match=r"window: expected 2\.\.128 .*, got"):
            perplexity(model, tokens, window=window)
    with pytest.raises(ValueError, match="max_windows: expected at least 1, got 0"):
        perplexity(model, tokens, window=8, max_windows=0)


def test_a_model_that_is_certain_and_wrong_has_infinite_perplexity(folder: Make) -> None:
    model = load(folder(tie_word_embeddings=False))
    model.decoder.norm.weight.data.mul_(1e5)
    got = perplexity(model, torch.arange(2, 66), window=32)
    assert got.value == math.inf


def test_tokens_of_another_model_are_refused(folder: Make) -> None:
    with pytest.raises(ValueError, match=r"expected token ids in 0\.\.319, got 320"):
        perplexity(load(folder()), torch.arange(300, 321), window=8)

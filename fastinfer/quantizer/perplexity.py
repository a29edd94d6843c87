"""Perplexity of a model on a text."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastinfer.models.loader import LoadedModel
from fastinfer.models.tokenizer import Tokenizer
from fastinfer.quantizer.windows import window_batch, window_cache

_ROWS = 128  # whose logits are computed at a time
_SKIPPED_CHARACTERS = 20000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perplexity:
    """What `perplexity` measured."""

    value: float
    """exp of the mean negative log-likelihood of a token; infinity beyond floats."""
    tokens: int
    """That were scored."""
    windows: int


def evaluation_tokens(text: str, tokenizer: Tokenizer) -> Tensor:
    """Token ids [T] of a text without its beginning, which is often a preface or a licence.

    The text begins at character min(20000, a tenth of its length), without special tokens.
    """
    begin = min(_SKIPPED_CHARACTERS, len(text) // 10)
    return torch.tensor(tokenizer.encode(text[begin:], add_special_tokens=False))


@torch.inference_mode()
def perplexity(
    model: LoadedModel, tokens: Tensor, *, window: int = 1024, max_windows: int | None = None
) -> Perplexity:
    """exp(mean of -log p(token | the tokens before it in its window)).

    Windows follow one another without overlap; the first token of each is not scored, and what does
    not fill a window is left out.

    Args:
        model: what `fastinfer.models.load` returned.
        tokens: int64 [T].
        window: tokens of each, at least 2 and at most the model's length.
        max_windows: at least 1; None: all.

    Raises:
        ValueError: an argument or a token out of its range, or a text shorter than a window.
    """
    if not 2 <= window <= model.max_model_len:
        raise ValueError(
            f"perplexity: window: expected 2..{model.max_model_len} (the model's length), got "
            f"{window}"
        )
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"perplexity: max_windows: expected at least 1, got {max_windows}")
    count = len(tokens) // window
    if not count:
        raise ValueError(
            f"perplexity: expected text of at least {window} tokens (a window), got {len(tokens)}"
        )
    known = model.config.vocab_size
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < known:
            raise ValueError(
                f"perplexity: expected token ids in 0..{known - 1}, got {token}: the tokenizer is "
                "that of another model"
            )
    count = count if max_windows is None else min(count, max_windows)
    decoder, device = model.decoder, model.decoder.embed_tokens.device
    caches = [
        window_cache(model.config, window, model.dtype, device)
        for _ in range(model.config.num_layers)
    ]
    total, scored = 0.0, 0
    for i, ids in enumerate(tokens[: count * window].view(count, window).to(device)):
        hidden = decoder(window_batch(ids), caches)
        for begin in range(0, window - 1, _ROWS):
            end = min(begin + _ROWS, window - 1)
            logits = decoder.compute_logits(hidden[begin:end]).float()
            total += float(F.cross_entropy(logits, ids[begin + 1 : end + 1], reduction="sum"))
        scored += window - 1
        _log.info("window %d/%d: perplexity so far %.3f", i + 1, count, _exp(total / scored))
    return Perplexity(_exp(total / scored), scored, count)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf

"""What `fastinfer quantize` and `fastinfer eval` do; progress goes to stderr."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastinfer.models.hf_checkpoint import read_json
from fastinfer.models.loader import load
from fastinfer.models.tokenizer import load_tokenizer
from fastinfer.quant import Recipe
from fastinfer.quantizer.calibration import read_texts
from fastinfer.quantizer.driver import quantize_model
from fastinfer.quantizer.perplexity import evaluation_tokens, perplexity

_WORST = 3


def quantize(
    model: str, out: str, text: Sequence[str], *, recipe: str | None = None, **options: Any
) -> int:
    """Quantizes a model; prints where it is and which projections lost most.

    Args:
        model, out: as in `quantize_model`.
        text: files to calibrate on.
        recipe: a JSON file as `Recipe.from_dict` reads it; None: all projections alike.
        options: fields of `Scheme`, which go before those of the file, and options of
            `quantize_model`.
    """
    _show_progress()
    start = time.perf_counter()
    scheme = {name: options.pop(name) for name in SCHEME_FIELDS if name in options}
    fields = {} if recipe is None else read_json(Path(recipe))
    reports = quantize_model(
        model, out, Recipe.from_dict({**fields, **scheme}), read_texts(text), **options
    )
    size = sum(file.stat().st_size for file in Path(out).glob("*.safetensors"))
    seconds = time.perf_counter() - start
    print(f"{out}: {len(reports)} projections, {size / 2**20:.1f} MiB, {seconds:.0f} s")
    for report in sorted(reports, key=lambda r: -r.relative_error)[:_WORST]:
        print(f"largest relative errors: {report.name} {report.relative_error:.2e}")
    return 0


def evaluate(
    model: str,
    text: Sequence[str],
    *,
    window: int = 1024,
    windows: int | None = None,
    **options: Any,
) -> int:
    """Prints the perplexity of a model on each file.

    Args:
        model: as in `fastinfer.models.load`, which gets the options.
        text: files.
        window: tokens of a window.
        windows: at most so many of each file; None: all.
    """
    _show_progress()
    texts = {file: "\n\n".join(read_texts([file])) for file in text}
    tokenizer = load_tokenizer(model)
    loaded = load(model, **options)
    for file, content in texts.items():
        start = time.perf_counter()
        tokens = evaluation_tokens(content, tokenizer)
        found = perplexity(loaded, tokens, window=window, max_windows=windows)
        print(
            f"{file}: perplexity {found.value:.3f} of {found.tokens} tokens in {found.windows} "
            f"windows of {window}, {time.perf_counter() - start:.1f} s"
        )
    return 0


SCHEME_FIELDS = ("method", "bits", "group_size", "symmetric", "order", "damping")


def _show_progress() -> None:
    logger = logging.getLogger("fastinfer.quantizer")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)

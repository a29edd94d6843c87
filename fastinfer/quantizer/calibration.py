"""Text for calibration and evaluation: files to windows of token ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.models.tokenizer import Tokenizer

FEW_SAMPLES = 128
_log = logging.getLogger(__name__)


def read_texts(files: Iterable[str | Path]) -> list[str]:
    """The texts of files: a .jsonl file holds one in each line, under "text"; any other is one.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: no files, one that is not UTF-8 or holds no text, or a line that is otherwise.
    """
    texts: list[str] = []
    for path in map(Path, files):
        try:
            content = path.read_text(encoding="utf-8-sig")  # with or without a mark
        except UnicodeDecodeError as error:
            raise ValueError(f"text file {path}: expected UTF-8 ({error})") from error
        found = _json_lines(path, content) if path.suffix == ".jsonl" else [content]
        if not any(text.strip() for text in found):
            raise ValueError(f"text file {path}: expected text, got an empty file")
        texts += found
    if not texts:
        raise ValueError("text: expected at least one file, got none")
    return texts


def calibration_windows(
    texts: Sequence[str], tokenizer: Tokenizer, *, samples: int, length: int
) -> Tensor:
    """Windows of tokens to calibrate on, spread evenly over the texts laid end to end.

    Args:
        texts: tokenized without special tokens.
        tokenizer: of the model.
        samples: windows, if the texts have as many that do not overlap.
        length: tokens of each.

    Returns:
        int64 [up to samples, length].

    Raises:
        ValueError: samples or length < 1, or less text than one window.
    """
    for name, value in (("samples", samples), ("seq_len", length)):
        if value < 1:
            raise ValueError(f"calibration: {name}: expected at least 1, got {value}")
    tokens = torch.tensor(
        [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    )
    found = len(tokens) // length
    if not found:
        raise ValueError(
            f"calibration: expected text of at least {length} tokens (seq_len), got {len(tokens)}"
        )
    if found < samples:
        _log.warning("calibration: %d samples asked for, the text has %d", samples, found)
    count = min(samples, found)
    if count < FEW_SAMPLES:
        _log.warning("calibration: %d samples are few; %d or more are usual", count, FEW_SAMPLES)
    chosen = torch.arange(count) * found // count
    return tokens[: found * length].view(found, length)[chosen]


def _json_lines(path: Path, content: str) -> list[str]:
    texts = []
    # Not splitlines, which also splits where a string may have U+2028 and its like.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"text file {path}: line {number}: not valid JSON ({error})"
            ) from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f'text file {path}: line {number}: expected an object with a string "text", got '
                f"{line[:60]!r}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text file {path}: line {number}: expected text in Unicode, got half of a "
                f"surrogate pair at {error.start}"
            ) from error
        texts.append(text)
    return texts

"""Text: files, windows, and what is too little."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.models.tokenizer import Tokenizer
from fastinfer.quantizer import calibration_windows, read_texts


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Tokenizer:
    return Tokenizer(tiny_tokenizer, (1,), "a test")


def test_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8")
    lines = [{"text": "three", "id": 3}, {"text": "für"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    files = [str(tmp_path / "a.txt"), tmp_path / "b.jsonl"]
    assert read_texts(files) == ["one\ntwo", "three", "für"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "expected text, got an empty file"),
        ("a.txt", b" \n", "expected text, got an empty file"),
        ("a.jsonl", b"\n", "expected text, got an empty file"),
        ("a.txt", b"\xff\xfe", "expected UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        ("a.jsonl", b'{"content": "a"}', 'line 1: expected an object with a string "text"'),
        ("a.jsonl", b'["a"]', "line 1: expected an object"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        read_texts([tmp_path / name])


def test_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one file"):
        read_texts([])
    with pytest.raises(FileNotFoundError):
        read_texts([tmp_path / "none.txt"])


def test_windows_are_spread_evenly(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["0123456789" * 20, "abcdefghij" * 20]
    ids = torch.tensor([t for text in texts for t in tokenizer.encode(text)])
    count = len(ids) // 16
    with caplog.at_level(logging.WARNING):
        got = calibration_windows(texts, tokenizer, samples=5, length=16)
    assert got.shape == (5, 16) and got.dtype == torch.int64
    starts = [i * count // 5 * 16 for i in range(5)]
    assert torch.equal(got, torch.stack([ids[s : s + 16] for s in starts]))
    assert "5 samples are few; 128 or more are usual" in caplog.text
    assert "asked for" not in caplog.text
    everything = calibration_windows(texts, tokenizer, samples=500, length=16)
    assert torch.equal(everything.flatten(), ids[: count * 16])
    assert f"500 samples asked for, the text has {count}" in caplog.text


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0cd\x1ce"  # none of which JSON escapes, but for the last two
    file = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False), json.dumps({"text": "next"})]
    file.write_bytes("\r\n".join(lines).encode())
    assert read_texts([file]) == [text, "next"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plain, lines = tmp_path / "text.txt", tmp_path / "text.jsonl"
    plain.write_text("some text", encoding="utf-8-sig")
    lines.write_text('{"text": "some text"}', encoding="utf-8-sig")
    assert read_texts([plain, lines]) == ["some text", "some text"]


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "good \\ud83d\\ude00"}\n{"text": "bad \\ud83d"}\n')
    with pytest.raises(ValueError, match=r"line 2: expected text in Unicode, got .* at 4"):
        read_texts([file])

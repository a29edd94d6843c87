"""Incremental decoding and stop strings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fastinfer.engine.detokenizer import IncrementalDecoder, StopStrings, decode_all

TEXT = "Grüße aus Köln: 你好，世界! 🙂🇩🇪 👩‍👩‍👧 – naïve café\n\n\tx = f(y)  # ∀ε>0"


def byte_decode(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(ids, decode, context=()):
    decoder = IncrementalDecoder(decode, context)
    return [decoder.push(i) for i in ids], decoder.flush()


def test_no_part_of_a_character_comes_out():
    out, rest = pieces(list(TEXT.encode()), byte_decode)
    assert "".join(out) == TEXT and rest == ""
    assert all("\ufffd" not in piece for piece in out)
    # A character comes with its last byte, not later.
    sent = 0
    for i, piece in enumerate(out):
        sent += len(piece)
        whole = TEXT.encode()[: i + 1].decode("utf-8", errors="ignore")
        assert sent == len(whole)


def test_with_a_real_tokenizer(tiny_tokenizer):
    ids = tiny_tokenizer.encode("the quick " + TEXT, add_special_tokens=False)
    out, rest = pieces(ids, tiny_tokenizer.decode)
    assert "".join(out) + rest == "the quick " + TEXT
    assert len([p for p in out if p]) > 10


@given(st.lists(st.sampled_from([*b"ab", 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82, 0xC3])))
def test_any_bytes_give_the_text_of_all_of_them(ids):
    out, rest = pieces(ids, byte_decode)
    assert "".join(out) + rest == byte_decode(ids)


def test_an_unfinished_character_comes_at_the_end():
    out, rest = pieces(list("a€".encode()[:-1]), byte_decode)
    assert "".join(out) == "a" and rest == "\ufffd"


@pytest.mark.parametrize("kind", ["text", "never a character", "special tokens"])
def test_a_token_costs_the_same_however_long_the_text(kind):
    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return byte_decode([i for i in ids if i < 256])

    rng = random.Random(0)
    tokens = {
        "text": list((TEXT * 100).encode()),
        "never a character": [0x80] * 5000,
        "special tokens": [rng.choice([300, 301]) for _ in range(5000)],
    }[kind]
    out, rest = pieces(tokens, decode)
    assert "".join(out) + rest == byte_decode([i for i in tokens if i < 256])
    # The window holds at most twice what is held back before it is given out as it is.
    assert decoded / len(tokens) < 2 * 33


def test_byte_fallback_tokens():
    # SentencePiece models fall back to byte tokens; a run of them is text only once it is whole.
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ids = [1, *(3 + b for b in "你🙂".encode()), 2, *(3 + b for b in "é".encode())]
    out, rest = pieces(ids, tokenizer.decode)
    assert "".join(out) + rest == " a你🙂bé"
    assert all("\ufffd" not in piece for piece in out)


def test_the_space_before_the_first_word_survives():
    # A Metaspace decoder drops the space at the start of a text, which the output is not.
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([2, 3]) == "cats"
    out, rest = pieces([2, 3], tokenizer.decode, context=[1] * 20)
    assert "".join(out) + rest == " cats"


def test_a_context_that_ends_inside_a_character():
    euro = list("€".encode())
    out, rest = pieces([euro[2], *b"x"], byte_decode, context=[*b"ab", *euro[:2]])
    assert "".join(out) + rest == "€x"


# Stop strings


def expected_stop(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Character by character: the first string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cuts(parts, stops, include):
    finder = StopStrings(stops, include)
    out, seen = "", ""
    for part in parts:
        out += finder.push(part)
        seen += part
        want, stopped = expected_stop(seen, stops, include)
        assert finder.stopped == stopped
        if stopped:
            assert out == want
            return
        # Held back is exactly what may still become a stop string.
        starts = [s[:n] for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
        held = 0 if include else max(map(len, starts), default=0)
        assert out == seen[: len(seen) - held]
    assert out + finder.flush() == seen


def test_a_string_complete_before_it_may_stop_is_let_through():
    finder = StopStrings(["ab"])
    assert finder.push("xa", active=False) == "x"
    assert finder.push("b", active=False) == "ab"
    assert finder.push("ca") == "c"
    assert finder.push("b") == "" and finder.stopped
    assert finder.flush() == ""


def test_a_string_begun_before_it_may_stop_counts():
    finder = StopStrings(["abc"])
    assert finder.push("xab", active=False) == "x"
    assert finder.push("c") == "" and finder.stopped


def test_without_stop_strings_all_is_let_through():
    finder = StopStrings()
    assert finder.push("abc") == "abc" and finder.flush() == "" and not finder.stopped


@given(st.lists(st.integers(0, 255), max_size=60), st.lists(st.integers(0, 255), max_size=9))
@settings(max_examples=300, deadline=None)
def test_all_at_once_is_the_same(ids, context):
    out, rest = pieces(ids, byte_decode, context)
    assert decode_all(byte_decode, context, ids) == "".join(out) + rest


@given(st.text(max_size=40), st.text(max_size=10), st.data())
@settings(max_examples=200, deadline=None)
def test_all_at_once_with_a_real_tokenizer(tiny_tokenizer, text, before, data):
    ids = tiny_tokenizer.encode(text)
    ids.insert(data.draw(st.integers(0, len(ids))), 0)  # a special token, which has no text

    def decode(tokens):
        return tiny_tokenizer.decode(tokens, skip_special_tokens=True)

    context = tiny_tokenizer.encode(before)
    out, rest = pieces(ids, decode, context)
    assert decode_all(decode, context, ids) == "".join(out) + rest

"""Builds a tokenizer from a GGUF file's metadata.

A GGUF file holds the vocabulary and the merges of a byte-level BPE, but of the rule that splits
text before merging only a name (`tokenizer.ggml.pre`), so the rules are here, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastinfer.models.checkpoint import extra
from fastinfer.models.fields import token_ids
from fastinfer.models.gguf_file import GGUFFile

# Token types (tokenizer.ggml.token_type): control tokens are special; user-defined ones are
# matched whole but are text.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class _Rule:
    """A pre-tokenizer: splits text into the pieces that merges never cross."""

    split: Callable[[Any], list[Any]]
    """From the module tokenizers, the steps before bytes become characters."""
    gpt2_split: bool
    """Then GPT-2's own split."""
    nfc: bool = False
    """Unicode NFC first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole becomes that token, whatever the merges say."""
    add_bos: bool = False
    """Begin with bos where the file does not say."""


def _regex(digits: str) -> Callable[[Any], list[Any]]:
    """Contractions, words, digits, punctuation, line ends, spaces: as Llama 3 and Qwen2 split."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda t: [t.pre_tokenizers.Split(t.Regex(pattern), behavior="isolated")]


_RULES = {
    "smollm": _Rule(lambda t: [t.pre_tokenizers.Digits(individual_digits=True)], gpt2_split=True),
    "qwen2": _Rule(_regex(r"\p{N}"), gpt2_split=False, nfc=True),
    "llama-bpe": _Rule(_regex(r"\p{N}{1,3}"), gpt2_split=False, ignore_merges=True, add_bos=True),
}


def from_gguf(path: Path) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer (a `transformers.PreTrainedTokenizerFast`) and the ids that end a text.

    Raises:
        ValueError: naming an unknown tokenizer model or pre-tokenizer, or what is missing or
            malformed.
    """
    metadata = GGUFFile(path).metadata
    try:
        return _build(metadata)
    except ValueError as error:
        raise ValueError(f"tokenizer of {path}: {error}") from error


def _build(metadata: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
    tokenizers = extra("tokenizers", "loading a tokenizer")
    transformers = extra("transformers", "loading a tokenizer")
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer model {kind!r} is not supported (tokenizer.ggml.model); expected 'gpt2'; "
            "take the tokenizer from the original folder"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    rule = _RULES.get(pre) if isinstance(pre, str) else None
    if rule is None:
        raise ValueError(
            f"unknown pre-tokenizer {pre!r} (tokenizer.ggml.pre); supported: {', '.join(_RULES)}"
        )
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} different tokens, each with its type, expected")
    try:
        model = tokenizers.models.BPE(vocab, merges, ignore_merges=rule.ignore_merges)
    except (
        Exception
    ) as error:  # tokenizers raises plain Exception, or TypeError for a merge of not 2
        raise ValueError(f"the merges do not fit the tokens ({error})") from error
    tokenizer = tokenizers.Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    byte_level = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=rule.gpt2_split
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [*rule.split(tokenizers), byte_level]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    ids = {name: _special(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "padding")}
    bos = ids["bos"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    named = {
        f"{name}_token": tokens[i]
        for name, i in (("bos", bos), ("eos", ids["eos"]), ("pad", ids["padding"]))
        if i is not None
    }
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=metadata.get("tokenizer.chat_template"), **named
    )
    return fast, tuple(i for i in (ids["eos"], ids["eot"]) if i is not None)


def _list(metadata: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"tokenizer.ggml.{name}: a list of {kind.__name__} expected")
    return values


def _special(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    ids = token_ids(metadata.get(key), key)
    if ids and not 0 <= ids[0] < vocab_size:
        raise ValueError(f"{key} must be in [0, {vocab_size}), got {ids[0]}")
    return ids[0] if ids else None

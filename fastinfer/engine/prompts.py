"""The three kinds of prompt (text, token ids, chat messages) and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

from fastinfer.engine.sampling_params import SamplingParams, is_integer
from fastinfer.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    A string, a list of ints and a list of dicts are one prompt; any other list is a list of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise TypeError(f"LLM: a prompt must be {_KINDS}, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], Integral | Mapping):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
    """Whether it is a list of chat messages (it may still hold bad ones)."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def prepare(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> list[tuple[str | None, list[int], SamplingParams]]:
    """Text (None for token ids), token ids and `SamplingParams` of each prompt.

    Raises:
        TypeError, ValueError: what is not a prompt or no `SamplingParams`, an empty prompt, too few
            or too many params, ids outside the vocabulary, text without a tokenizer.
    """
    prompt_list = as_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompt_list)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"LLM: sampling_params must be SamplingParams or a list, got {params!r}")
    if len(params) != len(prompt_list):
        counts = f"{len(params)} for {len(prompt_list)}"
        raise ValueError(f"LLM: one SamplingParams per prompt expected, got {counts}")
    prepared = []
    for prompt, p in zip(prompt_list, params, strict=True):
        if p.stop and tokenizer is None:
            raise ValueError("LLM: stop strings need a tokenizer, and this model has none")
        text, ids = _encode(prompt, tokenizer)
        in_vocabulary = (("prompt", ids), ("logit_bias", p.logit_bias), ("stop", p.stop_token_ids))
        for name, used in in_vocabulary:
            outside = [i for i in used or () if not 0 <= i < vocab_size]
            if outside:
                raise ValueError(
                    f"LLM: {name} token ids must be in [0, {vocab_size}), got {outside[0]}"
                )
        prepared.append((text, ids, p))
    return prepared


def _encode(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    text: str | None = None
    if isinstance(prompt, str) or is_conversation(prompt):
        if tokenizer is None:
            raise ValueError("LLM: this model has no tokenizer; prompts must be token ids")
        text = prompt if isinstance(prompt, str) else tokenizer.render_chat(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"LLM: the prompt is not valid Unicode: {error}") from None
        ids = tokenizer.encode(text, add_special_tokens=isinstance(prompt, str))
    elif isinstance(prompt, Sequence) and all(map(is_integer, prompt)):
        ids = [int(i) for i in prompt]  # type: ignore[arg-type]
    else:
        raise TypeError(f"LLM: a prompt must be {_KINDS}, got {prompt!r:.80}")
    if not ids:
        raise ValueError("LLM: the prompt is empty; at least one token is needed")
    return text, ids


_KINDS = "a string, a list of token ids (int), or a list of messages (dict)"

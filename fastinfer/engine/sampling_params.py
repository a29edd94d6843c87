"""What a request asks for: how its tokens are chosen, when it ends, what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request; every field is checked when the object is made.

    They act on a row of logits ``z`` in this order:

    1. ``logit_bias``: ``z[id] += bias`` (``-inf`` bans a token, ``+inf`` forces it);
    2. until ``min_tokens`` tokens are out, the end-of-text and the stop tokens are banned;
    3. ``repetition_penalty`` r, tokens of prompt and output: ``z / r`` if z > 0, else ``z * r``;
    4. for tokens of the output: ``z -= frequency_penalty * count + presence_penalty``;
    5. ``temperature``, then ``top_k``, ``top_p``, ``min_p``, the draw: see `fastinfer.ops.sample`.

    Args:
        n: completions of the prompt; copy 0 uses ``seed``, the others seeds derived from it.
        temperature: 0 is greedy (the lowest index among the maxima).
        top_k: keep the k largest logits; 0 (or -1) keeps all.
        top_p: in (0, 1]; keep the smallest set of tokens whose mass reaches it; 1 keeps all.
        min_p: in [0, 1]; keep tokens with this share of the largest probability; 0 keeps all.
        repetition_penalty: > 0; 1 is off.
        presence_penalty, frequency_penalty: in [-2, 2]; 0 is off.
        logit_bias: token id to the number added to its logit.
        seed: of this request's random numbers. A token depends on the seed and its position, never
            on what else is in the batch. None: drawn from the `LLM`'s own seeded generator.
        max_tokens: at most this many tokens; None: to the end of the context.
        min_tokens: no end of text and no stop token or string before that many tokens.
        stop: a string or several; generation ends where one appears in the text.
        stop_token_ids: tokens that end generation, besides the model's own end-of-text tokens.
        ignore_eos: go on after an end-of-text token.
        logprobs: return so many most likely tokens with their log-probabilities, and always the
            chosen one (0: that one alone). They are ``log_softmax`` of the model's raw logits,
            before bias, penalties and temperature.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        TypeError, ValueError: a field has the wrong type, or is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._integer("n", 1)
        self._number("temperature", 0.0, math.inf)
        self._integer("top_k", -1)
        self._number("top_p", 0.0, 1.0, low_open=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, low_open=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("seed", -(2**63), 2**63 - 1, optional=True)
        self._integer("max_tokens", 1, optional=True)
        self._integer("min_tokens", 0)
        self._integer("logprobs", 0, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams: min_tokens must be <= max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise self._type_error(name, "a bool")
        self._normalise_stops()
        self._normalise_logit_bias()

    def _normalise_stops(self) -> None:
        """Stores ``stop`` and ``stop_token_ids`` as tuples, empty when not given."""
        strings = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
            raise self._type_error("stop", "a string or a list of strings")
        if "" in strings:
            raise ValueError("SamplingParams: stop must not hold an empty string")
        ids = self.stop_token_ids or ()
        if not isinstance(ids, Sequence) or not all(is_integer(i) for i in ids):
            raise self._type_error("stop_token_ids", "a list of token ids (int)")
        if any(i < 0 for i in ids):
            raise ValueError(f"SamplingParams: stop_token_ids must be >= 0, got {min(ids)}")
        object.__setattr__(self, "stop", tuple(strings))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))

    def _normalise_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise self._type_error("logit_bias", "a dict of token id to number")
        for token, bias in self.logit_bias.items():
            expected = "SamplingParams: logit_bias must map token ids >= 0 (int) to numbers"
            if not is_integer(token) or not _is_number(bias):
                raise TypeError(f"{expected}, got {token!r}: {bias!r}")
            if token < 0 or math.isnan(bias):
                raise ValueError(f"{expected} that are not NaN, got {token}: {bias}")
        normal = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", normal)

    def _integer(
        self, name: str, low: int, high: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not is_integer(value):
            raise self._type_error(name, "an int or None" if optional else "an int")
        if value < low or (high is not None and value > high):
            bound = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"SamplingParams: {name} must be {bound}, got {value}")

    def _number(self, name: str, low: float, high: float, low_open: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value):
            raise self._type_error(name, "a number")
        inside = (low < value if low_open else low <= value) and value <= high
        if not (inside and math.isfinite(value)):  # NaN fails every comparison
            sign = ">" if low_open else ">="
            bound = f"finite and {sign} {low:g}" if math.isinf(high) else None
            bound = bound or f"in {'(' if low_open else '['}{low:g}, {high:g}]"
            raise ValueError(f"SamplingParams: {name} must be {bound}, got {value}")

    def _type_error(self, name: str, expected: str) -> TypeError:
        return TypeError(f"SamplingParams: {name} must be {expected}, got {getattr(self, name)!r}")


def is_integer(value: Any) -> bool:
    """Whether it is an int of Python's or of numpy's; a bool is none here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)

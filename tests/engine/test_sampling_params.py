"""`SamplingParams`: what is accepted, and what each refusal says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastinfer import SamplingParams

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("n", 0, ValueError),
        ("n", 1.0, TypeError),
        ("n", True, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", NAN, ValueError),
        ("temperature", INF, ValueError),
        ("temperature", "1", TypeError),
        ("temperature", None, TypeError),
        ("top_k", -2, ValueError),
        ("top_k", 1.5, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.01, ValueError),
        ("top_p", NAN, ValueError),
        ("min_p", -0.1, ValueError),
        ("min_p", 1.1, ValueError),
        ("repetition_penalty", 0.0, ValueError),
        ("repetition_penalty", -1.0, ValueError),
        ("repetition_penalty", INF, ValueError),
        ("presence_penalty", 2.1, ValueError),
        ("presence_penalty", -2.1, ValueError),
        ("frequency_penalty", 2.1, ValueError),
        ("frequency_penalty", NAN, ValueError),
        ("logit_bias", [1], TypeError),
        ("logit_bias", {"a": 1.0}, TypeError),
        ("logit_bias", {1: "a"}, TypeError),
        ("logit_bias", {-1: 1.0}, ValueError),
        ("logit_bias", {1: NAN}, ValueError),
        ("seed", 1.5, TypeError),
        ("seed", 2**63, ValueError),
        ("max_tokens", 0, ValueError),
        ("max_tokens", -1, ValueError),
        ("max_tokens", 2.0, TypeError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 17, ValueError),
        ("stop", "", ValueError),
        ("stop", ["a", ""], ValueError),
        ("stop", 3, TypeError),
        ("stop", [3], TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", ["a"], TypeError),
        ("stop_token_ids", 5, TypeError),
        ("ignore_eos", 1, TypeError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("include_stop_str_in_output", None, TypeError),
        ("skip_special_tokens", 0, TypeError),
    ],
)
def test_a_bad_value_is_refused_and_named(name, value, error):
    with pytest.raises(error, match=rf"SamplingParams: .*{name}"):
        SamplingParams(**{name: value})


def test_the_message_says_what_was_expected_and_what_came():
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="temperature must be finite and >= 0, got -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match=r"min_tokens must be <= max_tokens \(3\), got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_the_edges_are_accepted():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, min_tokens=16, logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=10**6, seed=-(2**63), presence_penalty=-2)
    SamplingParams(logit_bias={0: -INF, 1: INF})
    SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=[np.int64(3)])


def test_stops_become_tuples():
    params = SamplingParams(stop="a", stop_token_ids=[1, 2])
    assert params.stop == ("a",) and params.stop_token_ids == (1, 2)
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_it_is_frozen_and_does_not_share_the_callers_dict():
    bias = {1: 2}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 5
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert dataclasses.replace(params, n=3).logit_bias == {1: 2.0}

"""The sampler against direct computations, and what it hands to `fastinfer.ops.sample`."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from fastinfer import SamplingParams
from fastinfer._host import BlockManager, step_layout
from fastinfer.engine import sampler as sampler_module
from fastinfer.engine.buffers import StepBuffers
from fastinfer.engine.request import Request
from fastinfer.engine.sampler import Sampler

V = 50
EOS = (3, 4)


def request(params: SamplingParams, prompt=(1, 2, 3, 2), output=(), seed=7) -> Request:
    made = Request(0, prompt, params, seed=seed)
    made.output_token_ids.extend(output)
    return made


def logits_of(rows: int, dtype=torch.float32, seed=0) -> torch.Tensor:
    return (3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))).to(dtype)


def packed_options(requests: list[Request]) -> dict[str, torch.Tensor]:
    """The requests' sampling parameters on the way that they take in the engine."""
    rows, kv = len(requests), BlockManager(len(requests) + 1)
    for i, r in enumerate(requests):
        p = r.params
        kv.add(i, [*r.prompt_token_ids, *r.output_token_ids])
        kv.set_sampling(i, p.temperature, p.top_k, p.top_p, p.min_p, r.seed)
        kv.reserve(i, r.num_tokens)
    layout = step_layout(rows, rows, 1, rows)
    buffers = StepBuffers(layout.nbytes, torch.device("cpu"))
    starts, ones = [r.num_tokens - 1 for r in requests], [1] * rows
    use = buffers.fill(
        lambda memory: kv.pack(memory, layout, list(range(rows)), starts, ones, ones),
        layout.nbytes,
    )
    return buffers.sampling(layout, rows, use)


@pytest.fixture
def sampled(monkeypatch):
    """Runs the sampler; returns its result and the arguments that `ops.sample` got."""
    calls = []
    real = sampler_module.ops.sample

    def spy(logits, temperature=None, **options):
        calls.append((logits, temperature, options))
        return real(logits, temperature, **options)

    monkeypatch.setattr(sampler_module.ops, "sample", spy)

    def run(requests, logits):
        before = logits.clone()
        sampler = Sampler(logits.device, len(requests) + 3, EOS)
        result = sampler(requests, logits, packed_options(requests))
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were changed"
        return result, *(calls[-1] if calls else ())

    return run


def expected(row: torch.Tensor, req: Request) -> list[float]:
    """Bias, bans and penalties of one row in Python floats, straight from the documentation."""
    p = req.params
    z = row.double().tolist()
    for token, bias in (p.logit_bias or {}).items():
        z[token] += bias
    if len(req.output_token_ids) < p.min_tokens:
        for token in (*EOS, *p.stop_token_ids):
            z[token] = -math.inf
    for token in {*req.prompt_token_ids, *req.output_token_ids}:
        z[token] = (
            z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
        )
    for token, count in Counter(req.output_token_ids).items():
        z[token] -= p.frequency_penalty * count + p.presence_penalty
    return z


ASKING = [
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, presence_penalty=0.6),
    SamplingParams(temperature=0, frequency_penalty=-0.4),
    SamplingParams(temperature=0, logit_bias={2: 5, 9: -math.inf, 40: -1.25}),
    SamplingParams(temperature=0, min_tokens=6, stop_token_ids=[10, 11]),
    SamplingParams(
        temperature=0,
        repetition_penalty=0.8,
        presence_penalty=1.0,
        frequency_penalty=0.3,
        logit_bias={3: 4.0, 5: 2.5},
        min_tokens=9,
        stop_token_ids=[5],
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_ask_are_adjusted_and_the_others_are_not(sampled, dtype):
    plain = SamplingParams(temperature=0)
    requests = [request(plain)]
    for params in ASKING:
        requests += [request(params, output=(7, 7, 2, 8, 7)), request(plain, output=(5,))]
    logits = logits_of(len(requests), dtype)
    result, given, _, _ = sampled(requests, logits)
    for row, (got, req) in enumerate(zip(given, requests, strict=True)):
        if req.params is plain:
            assert torch.equal(got, logits[row].float())
            continue
        want = torch.tensor(expected(logits[row], req), dtype=torch.float64)
        assert not torch.equal(got, logits[row].float())
        # Three roundings of fp32 at most.
        torch.testing.assert_close(got.double(), want, rtol=4 * 2**-24, atol=4 * 2**-24)
        assert result.token_ids[row] == int(got.argmax())


def test_without_requests_that_ask_the_logits_go_on_as_they_are(sampled):
    logits = logits_of(2, torch.bfloat16)
    _, given, temperature, options = sampled([request(SamplingParams(temperature=0))] * 2, logits)
    assert given is logits and temperature is None
    assert options.keys() == {"token_ids", "valid"}


def test_a_bias_forces_and_bans(sampled):
    best = int(logits_of(1).argmax())
    result, *_ = sampled([request(SamplingParams(logit_bias={17: math.inf}))], logits_of(1))
    assert result.token_ids == [17]
    ban = SamplingParams(temperature=0, logit_bias={best: -math.inf})
    result, *_ = sampled([request(ban)], logits_of(1))
    assert result.token_ids == [int(logits_of(1).topk(2).indices[0, 1])]


def test_min_tokens_counts_output_only(sampled):
    logits = torch.zeros(1, V)
    logits[0, EOS[1]] = 10.0
    params = SamplingParams(temperature=0, min_tokens=2)
    for output, want in (((), 0), ((5,), 0), ((5, 5), EOS[1])):
        result, *_ = sampled([request(params, output=output)], logits)
        assert result.token_ids == [want]


def test_what_sample_gets(sampled):
    requests = [
        request(SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1), seed=11),
        request(SamplingParams(temperature=0), output=(1, 2), seed=12),
        request(SamplingParams(temperature=1, top_k=-1), prompt=(1,), seed=2**63 - 1),
    ]
    _, _, temperature, options = sampled(requests, logits_of(3))
    assert temperature.tolist() == [0.5, 0.0, 1.0] and temperature.dtype == torch.float32
    assert options["seeds"].tolist() == [11, 12, 2**63 - 1]
    # The index, in its sequence, of the token that is being sampled.
    assert options["positions"].tolist() == [4, 6, 1]
    assert options["top_k"].tolist() == [5, 0, 0] and options["top_k"].dtype == torch.int32
    assert options["top_p"].tolist() == pytest.approx([0.9, 1.0, 1.0])
    assert options["min_p"].tolist() == pytest.approx([0.1, 0.0, 0.0])


def test_extreme_values_hurt_no_other_row(sampled):
    extreme = [
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1e-300),
        SamplingParams(top_p=1e-300, seed=1),
        SamplingParams(min_p=1e-300),
        SamplingParams(top_k=2**40),
        SamplingParams(temperature=0, repetition_penalty=1e300),
        SamplingParams(temperature=0, repetition_penalty=1e-300),
        SamplingParams(temperature=0, logit_bias={1: 1e300}),
    ]
    logits = logits_of(1).expand(len(extreme) + 1, V)
    requests = [*map(request, extreme), request(SamplingParams(temperature=0))]
    result, *_ = sampled(requests, logits)
    assert all(result.valid)
    best = int(logits[0].argmax())
    assert result.token_ids[1] == result.token_ids[2] == result.token_ids[-1] == best
    assert result.token_ids[5] not in (1, 2, 3) and result.token_ids[7] == 1


def test_a_row_samples_the_same_alone_and_in_any_batch(sampled):
    params = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.5)
    logits = logits_of(8)
    requests = [request(params, output=[i] * i, seed=100 + i) for i in range(8)]
    together, *_ = sampled(requests, logits)
    alone = [sampled([r], logits[i : i + 1])[0].token_ids[0] for i, r in enumerate(requests)]
    assert together.token_ids == alone
    assert len(set(alone)) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_log_softmax_of_the_raw_logits(sampled, dtype):
    requests = [
        request(SamplingParams(temperature=0)),
        request(SamplingParams(temperature=0.7, logprobs=4, logit_bias={30: 100.0})),
        request(SamplingParams(temperature=0, logprobs=0, repetition_penalty=1.5)),
        request(SamplingParams(temperature=0, logprobs=2)),
        request(SamplingParams(temperature=0, logprobs=1000)),
    ]
    logits = logits_of(5, dtype)
    result, *_ = sampled(requests, logits)
    reference = logits.double().log_softmax(-1)
    assert result.logprobs[0] is None
    for row, count in ((1, 4), (2, 0), (3, 2), (4, V)):
        entry, token = result.logprobs[row], result.token_ids[row]
        top = logits[row].float().topk(count).indices.tolist()
        assert list(entry) == list(dict.fromkeys([*top, token]))
        for i, value in entry.items():
            assert value == pytest.approx(float(reference[row, i]), rel=1e-5, abs=1e-5)
    assert result.token_ids[1] == 30 and len(result.logprobs[1]) == 5
    assert len(result.logprobs[3]) == 2  # the chosen token is the first of them


def test_a_row_without_a_distribution_is_marked_and_the_others_are_right(sampled):
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    result, *_ = sampled([request(SamplingParams(temperature=0, logprobs=1))] * 4, logits)
    assert result.valid == [True, False, False, True]
    assert [result.token_ids[0], result.token_ids[3]] == [best[0], best[3]]
    assert all(0 <= token < V for token in result.token_ids)


def test_no_rows(sampled):
    result, *_ = sampled([], torch.empty(0, V))
    assert result.token_ids == [] and result.valid == [] and result.logprobs == []

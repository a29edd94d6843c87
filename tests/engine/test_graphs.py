"""Steps filled up to fixed sizes give the tokens of steps that are not; shown without a GPU.

`run_directly` stands in for the recorder of CUDA graphs, so that all but the recording is what a
GPU runs: the same sizes, layouts and static buffers. The CPU kernels check every length.
"""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fastinfer import LLM, SamplingParams
from fastinfer.engine.buffers import StepLimits
from fastinfer.engine.graphs import Ladder, Rung, run_directly
from fastinfer.engine.runner import ModelRunner


@given(st.integers(1, 700), st.integers(1, 9000), st.data())
@settings(max_examples=300, deadline=None)
def test_every_step_finds_the_smallest_rung_that_holds_it(max_num_seqs, max_num_tokens, data):
    limits = StepLimits(max_num_seqs, max_num_tokens, 128)
    ladder = Ladder(limits)
    seqs = data.draw(st.integers(1, limits.max_rows))
    tokens = data.draw(st.integers(seqs, max_num_tokens))
    longest = data.draw(st.integers(-(-tokens // seqs), tokens - seqs + 1))
    rung = ladder.rung(tokens, longest)
    assert rung is not None
    assert rung.num_tokens >= tokens and rung.max_seqlen_q >= longest
    assert limits.max_rows + 1 >= rung.num_logits >= seqs
    assert rung.num_seqs >= seqs + (rung.num_tokens > tokens), "filler tokens need a sequence"
    rungs = ladder.decode if longest == 1 else ladder.mixed
    assert all(r.num_tokens < tokens for r in rungs[: rungs.index(rung)])


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (5, 3), (256, 2048), (100, 1000)])
def test_the_rungs(seqs, tokens):
    ladder = Ladder(StepLimits(seqs, tokens, 64))
    for rungs, last in ((ladder.decode, min(seqs, tokens)), (ladder.mixed, tokens)):
        sizes = [rung.num_tokens for rung in rungs]
        assert sizes == sorted(set(sizes)) and sizes[-1] == last
        assert all(b <= 1.25 * a for a, b in itertools.pairwise(sizes) if a >= 256)
    assert all(rung == Rung(rung.num_tokens, rung.num_tokens, 1) for rung in ladder.decode)


def test_decode_sizes():
    sizes = [rung.num_tokens for rung in Ladder(StepLimits(320, 2048, 64)).decode]
    assert sizes[:12] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80]
    assert sizes[-4:] == [240, 256, 288, 320]


def on_rungs(
    llm: LLM, max_num_seqs: int, max_num_tokens: int, record=run_directly
) -> tuple[LLM, list[Rung]]:
    """The engine with every step on a rung, its buffer poisoned before; the rungs as they come."""
    limits = StepLimits(max_num_seqs, max_num_tokens, llm.max_model_len)
    seen: list[Rung] = []

    class Watched(Ladder):
        def rung(self, num_tokens, max_count):
            rung = super().rung(num_tokens, max_count)
            assert rung is not None
            seen.append(rung)
            return rung

    old = llm._core._runner
    runner = llm._core._runner = ModelRunner(
        old._decoder,
        llm.blocks,
        dtype=old.kv_caches[0][0].dtype,
        limits=limits,
        ladder=Watched(limits),
        record=record,
        clock=llm._core._clock,
    )
    for keys_and_values in runner.kv_caches:
        for pages in keys_and_values:
            pages.fill_(float("nan"))
    fill = runner._buffers.fill

    def poisoned(pack, nbytes):
        runner._buffers.device.fill_(0x7B)
        return fill(pack, nbytes)

    runner._buffers.fill = poisoned
    return llm, seen


def serve(llm: LLM, work: list[tuple[int, list[int], SamplingParams]]) -> list[list[int]]:
    """Runs requests that arrive at given steps; returns their tokens."""
    ids: list[int] = []
    tokens: dict[int, list[int]] = {}
    step = 0
    while len(ids) < len(work) or llm.has_unfinished:
        while len(ids) < len(work) and work[len(ids)][0] <= step:
            _, prompt, params = work[len(ids)]
            ids.append(llm.add_request(prompt, params))
            tokens[ids[-1]] = []
        for delta in llm.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
        step += 1
    llm.blocks.check_integrity()
    return [tokens[i] for i in ids]


def random_work(seed: int, count: int) -> list[tuple[int, list[int], SamplingParams]]:
    draw = random.Random(seed)
    work, arrival = [], 0
    for index in range(count):
        arrival += draw.choice([0, 0, 0, 1, 3, 9])
        prompt = [draw.randrange(320) for _ in range(draw.choice([1, 2, 7, 16, 30, 90]))]
        sampling = draw.choice(
            [
                {"temperature": 0},
                {"temperature": 0.9, "top_p": 0.9, "seed": index},
                {"temperature": 1.1, "top_k": 9, "min_p": 0.05, "seed": index},
                {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
            ]
        )
        length = draw.randrange(1, 25)
        work.append(
            (arrival, prompt, SamplingParams(max_tokens=length, ignore_eos=True, **sampling))
        )
    return work


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [None, 20])
def test_tokens_are_the_same_as_without_rungs(tiny_folder, shared_llm, seed, blocks):
    work = random_work(seed, 14)
    want = serve(shared_llm, work)
    memory = None if blocks is None else blocks * 16 * 512
    options = {"max_num_seqs": 9, "max_num_batched_tokens": 70, "kv_cache_memory_bytes": memory}
    llm, seen = on_rungs(LLM(tiny_folder, **options), 9, 70)
    assert serve(llm, work) == want
    assert {rung.max_seqlen_q > 1 for rung in seen} == {True, False}
    assert len(set(seen)) > 3


def test_recording_in_advance_changes_no_page(tiny_folder, llm):
    llm_on_rungs, seen = on_rungs(
        LLM(tiny_folder, max_num_seqs=4, max_num_batched_tokens=40), 4, 40
    )
    runner = llm_on_rungs._core._runner
    runner.record_rungs([*reversed(runner._ladder.mixed), *reversed(runner._ladder.decode)])
    for keys, values in runner.kv_caches:
        assert keys.isnan().all() and values.isnan().all()
    assert len(runner._replays) == len(runner._ladder.mixed) + len(runner._ladder.decode)
    params = SamplingParams(temperature=0, max_tokens=8)
    got = llm_on_rungs.generate(["the quick", "fox"], params)
    assert [o.token_ids for o in got] == [
        o.token_ids for o in llm.generate(["the quick", "fox"], params)
    ]
    assert seen


def test_a_step_of_filler_has_the_size_it_is_asked_for(tiny_folder):
    llm = LLM(tiny_folder)
    hidden = llm._core._runner.run_filler(50, 7)
    assert hidden.shape == (7, llm.config.hidden_size) and hidden.isfinite().all()

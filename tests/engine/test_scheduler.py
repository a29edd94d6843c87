"""Scheduler: each rule by itself, then 100 000 random steps with the simulated cache."""

import random
import subprocess
import sys

import pytest

from fastinfer._host import BlockManager
from fastinfer.engine.request import Request, RequestStatus
from fastinfer.engine.sampling_params import SamplingParams
from fastinfer.engine.scheduler import Scheduler
from tests.engine.fake_engine import FakeEngine, expected_output


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 3 * i) % 40 for i in range(length)]


def shape(step) -> list[tuple[int, int, int, bool]]:
    return [(s.request.request_id, s.start, s.num_tokens, s.samples) for s in step]


def test_scheduler_and_host_module_do_without_torch():
    # An empty package stands in for fastinfer.engine, which offers the whole engine on import.
    code = """
import importlib.util, sys
spec = importlib.util.find_spec("fastinfer")
import fastinfer
package = type(sys)("fastinfer.engine")
package.__path__ = [spec.submodule_search_locations[0] + "/engine"]
sys.modules[package.__name__] = package
import fastinfer.engine.scheduler
print([m for m in sys.modules if m.split(".")[0] in ("torch", "numpy", "transformers")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- Adding ----


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_checked(name, value):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be >= \d, got {value}"):
        Scheduler(BlockManager(1, 8), **limits)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "message"),
    [
        ([], 4, "prompt is empty"),
        ([1] * 64, 1, r"at most 63 tokens \(max_model_len - 1\), got 64"),
        ([1] * 1000, 1, "got 1000"),
        ([1] * 20, 14, "need 33 slots of the KV cache, which has 32"),
        ([1] * 34, 1, "34 prompt tokens and up to 1 output tokens"),
        ([1] * 20, None, "need 63 slots"),
    ],
)
def test_a_request_that_can_never_run_is_refused(tokens, max_tokens, message):
    engine = FakeEngine(num_blocks=4, max_model_len=64)
    other = engine.add(prompt(9), 5)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add(tokens, max_tokens)
    assert engine.kv.num_sequences == 1
    engine.run()
    assert other.finish_reason == "length"


def test_max_tokens_below_one_is_refused():
    engine = FakeEngine()
    params = SamplingParams()
    object.__setattr__(params, "max_tokens", 0)  # as an unchecked caller might
    with pytest.raises(ValueError, match="expected max_tokens >= 1, got 0"):
        engine.scheduler.add(Request(1, [1], params))


def test_ids_and_requests_are_used_once():
    engine = FakeEngine()
    first = engine.add(prompt(5), 1)
    with pytest.raises(ValueError, match="expected an id that is not in use, got 0"):
        engine.scheduler.add(Request(0, prompt(3), SamplingParams()))
    engine.run()
    assert first.is_finished
    with pytest.raises(ValueError, match="expected a new request"):
        engine.scheduler.add(first)
    engine.scheduler.add(Request(0, prompt(3), SamplingParams()))  # the id is free again


def test_max_tokens_is_capped_to_the_context():
    engine = FakeEngine(max_model_len=32)
    requests = [engine.add(prompt(20, i), n) for i, n in enumerate([1, 12, 13, 10**9, None])]
    assert [r.max_output_tokens for r in requests] == [1, 12, 12, 12, 12]
    engine.run()
    assert [len(r.output_token_ids) for r in requests] == [1, 12, 12, 12, 12]


@pytest.mark.parametrize("length", [63, 62, 61, 60, 57, 56, 55])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_prompt_near_the_end_of_the_context(length, budget):
    """R29: it finishes and never holds more blocks than the context has."""
    engine = FakeEngine(num_blocks=8, max_model_len=64, budget=budget)
    request = engine.add(prompt(length), None)
    while engine.scheduler.has_unfinished:
        engine.step()
        if not request.is_finished:
            assert len(engine.kv.block_table(request.request_id)) <= 8
            assert request.num_tokens <= 64
    assert len(request.output_token_ids) == 64 - length
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 64 - length)


def test_a_request_may_fill_the_pool_exactly():
    engine = FakeEngine(num_blocks=4, max_model_len=64)
    request = engine.add(prompt(20), 13)  # the last token needs no slot
    engine.add(prompt(30, 1), 3)
    engine.add(prompt(1, 2), 32)
    engine.run()
    assert len(request.output_token_ids) == 13


# ---- What a step holds ----


@pytest.mark.parametrize(("budget", "chunks"), [(1, [1] * 20), (7, [7, 7, 6]), (64, [20])])
def test_prompts_are_chunked(budget, chunks):
    engine = FakeEngine(budget=budget)
    request = engine.add(prompt(20), 3)
    start = 0
    for chunk in chunks:
        end = start + chunk
        assert shape(engine.step()) == [(0, start, chunk, end == 20)]
        start = end
    assert shape(engine.step()) == [(0, 20, 1, True)]
    engine.run()
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 3)


def test_running_first_then_waiting_under_one_budget():
    engine = FakeEngine(budget=10)
    engine.add(prompt(4, 0), 10)
    engine.add(prompt(30, 1), 10)
    engine.add(prompt(4, 2), 10)
    assert shape(engine.step()) == [(0, 0, 4, True), (1, 0, 6, False)]
    assert shape(engine.step()) == [(0, 4, 1, True), (1, 6, 9, False)]
    assert shape(engine.step()) == [(0, 5, 1, True), (1, 15, 9, False)]
    assert shape(engine.step()) == [(0, 6, 1, True), (1, 24, 6, True), (2, 0, 3, False)]
    assert shape(engine.step()) == [(0, 7, 1, True), (1, 30, 1, True), (2, 3, 1, True)]
    engine.run()


def test_max_num_seqs():
    engine = FakeEngine(max_num_seqs=2)
    for i in range(5):
        engine.add(prompt(3, i), 2)
    assert [s.request.request_id for s in engine.step()] == [0, 1]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 3)
    assert [s.request.request_id for s in engine.step()] == [0, 1]
    assert [s.request.request_id for s in engine.step()] == [2, 3]
    engine.run()


def test_an_empty_scheduler_has_an_empty_step():
    engine = FakeEngine()
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.schedule() == []
    engine.scheduler.update([], [])


def test_prefix_hit_skips_what_is_known():
    engine = FakeEngine()
    first = engine.add(prompt(20), 9)
    engine.run()
    second = engine.add([*first.prompt_token_ids, *first.output_token_ids, 5], 4)
    assert shape(engine.step()) == [(1, 24, 6, True)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
    engine.run()


def test_prefix_of_a_running_request_is_shared():
    engine = FakeEngine()
    engine.add(prompt(20), 9)
    engine.step()
    engine.add(prompt(20), 9)
    assert shape(engine.step()) == [(0, 20, 1, True), (1, 16, 4, True)]
    assert engine.kv.num_used == 4
    engine.run()


def test_admission_reserves_the_whole_prompt():
    engine = FakeEngine(num_blocks=8, budget=8)
    engine.add(prompt(40, 0), 1)
    engine.add(prompt(32, 1), 1)
    engine.step()
    assert engine.kv.num_used == 5
    while engine.unfinished.get(0):
        assert engine.scheduler.num_running == 1
        engine.step()
    engine.run()


def test_admission_leaves_headroom_to_those_running():
    engine = FakeEngine(num_blocks=200, max_model_len=2000, budget=4000)
    engine.add(prompt(8 * 100, 0), 20)
    second = engine.add(prompt(8 * 99, 1), 5)  # would leave one block, of the two (1 %) kept free
    third = engine.add(prompt(8, 2), 1)
    engine.step()
    assert second.status is third.status is RequestStatus.WAITING
    engine.run()
    assert second.num_preemptions == 0
    engine.add(prompt(8 * 200, 3), 1)  # alone, it may have all of them
    engine.run()


# ---- Preemption ----


def test_the_youngest_is_preempted_and_goes_first_again():
    engine = FakeEngine(num_blocks=6)
    a, b = engine.add(prompt(16, 0), 10), engine.add(prompt(15, 1), 10)
    c = engine.add(prompt(3, 2), 10)
    engine.step()
    engine.step()  # a takes the last block
    d = engine.add(prompt(3, 3), 10)
    assert [s.request for s in engine.step()] == [a, b]  # b takes c's
    assert (c.status, c.num_preemptions, c.num_computed_tokens) == (RequestStatus.WAITING, 1, 0)
    assert c.output_token_ids == expected_output(c.prompt_token_ids, 2)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)
    while c.status is RequestStatus.WAITING:
        engine.step()
        assert d.num_computed_tokens == 0 or c.num_computed_tokens > 0
    engine.run()
    assert a.num_preemptions == 0


def test_a_preempted_request_recomputes_prompt_and_output():
    engine = FakeEngine(num_blocks=4, caching=False)
    a, b = engine.add(prompt(14, 0), 12), engine.add(prompt(15, 1), 9)
    seen = []
    while engine.scheduler.has_unfinished:
        step = engine.step()
        seen += [s for s in shape(step) if s[0] == b.request_id]
    restart = [s for s in seen[1:] if s[1] == 0]
    assert b.num_preemptions == 1
    assert restart == [(1, 0, 15 + 2, True)]
    assert (a.num_preemptions, len(a.output_token_ids), len(b.output_token_ids)) == (0, 12, 9)


def test_a_preempted_request_finds_its_own_blocks_again():
    engine = FakeEngine(num_blocks=4)
    a, b = engine.add(prompt(8, 0), 9), engine.add(prompt(16, 1), 3)
    engine.step()
    engine.step()
    assert (b.num_preemptions, b.num_tokens) == (1, 17)
    while a.status is RequestStatus.RUNNING:
        assert [s.request for s in engine.step()] == [a]
    assert shape(engine.step()) == [(1, 16, 1, True)]
    assert b.num_cached_tokens == 16
    engine.run()


def test_several_are_preempted_in_one_step_and_keep_their_order():
    engine = FakeEngine(num_blocks=4)
    a, b, c, d = (engine.add(prompt(n, i), 9) for i, n in enumerate([8, 8, 3, 3]))
    assert len(engine.step()) == 4
    assert [s.request for s in engine.step()] == [a, b]
    assert [r.num_preemptions for r in (a, b, c, d)] == [0, 0, 1, 1]
    while c.status is RequestStatus.WAITING:
        assert d.status is RequestStatus.WAITING
        engine.step()
    engine.run()


def test_the_requester_itself_may_be_the_youngest():
    engine = FakeEngine(num_blocks=2)
    engine.add(prompt(3, 0), 6)
    b = engine.add(prompt(7, 1), 6)
    engine.step()
    engine.step()
    step = engine.step()
    assert [s.request.request_id for s in step] == [0]
    assert b.num_preemptions == 1
    engine.run()


# ---- Abort, finish, update ----


def test_abort_at_any_stage():
    engine = FakeEngine(max_num_seqs=2)
    running, chunked, waiting, last = (engine.add(prompt(40, i), 4) for i in range(4))
    engine.step()
    assert (running.num_computed_tokens, chunked.num_computed_tokens) == (40, 24)
    for request in (chunked, waiting, running):
        assert engine.abort(request.request_id) is request
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
        assert engine.scheduler.abort(request.request_id) is None
        engine.kv.check_integrity()
    assert len(running.output_token_ids) == 1
    assert engine.kv.num_used == 0
    engine.run()
    assert last.finish_reason == "length"
    assert engine.scheduler.abort(12345) is None


def test_abort_while_a_step_is_computed():
    engine = FakeEngine()
    a, b, c = (engine.add(prompt(9, i), 4) for i in range(3))
    engine.step()
    engine.step(lambda step: engine.abort(b.request_id))
    assert [len(r.output_token_ids) for r in (a, b, c)] == [2, 1, 2]
    engine.run()
    assert b.finish_reason == "abort"


def test_abort_of_a_preempted_request():
    engine = FakeEngine(num_blocks=2)
    engine.add(prompt(3, 0), 6)
    b = engine.add(prompt(7, 1), 6)
    while not b.num_preemptions:
        engine.step()
    engine.abort(b.request_id)
    engine.run()


def test_finish_needs_an_unfinished_request():
    engine = FakeEngine()
    request = engine.add(prompt(3), 1)
    engine.run()
    for stranger in (request, Request(7, [1], SamplingParams())):
        with pytest.raises(ValueError, match="expected an unfinished request"):
            engine.scheduler.finish(stranger, "stop")


def test_update_refuses_a_wrong_number_of_tokens_and_an_old_step():
    engine = FakeEngine()
    request = engine.add(prompt(3), 5)
    step = engine.scheduler.schedule()
    for tokens in ([], [1, 2]):
        with pytest.raises(ValueError, match=f"expected 1 tokens, .* got {len(tokens)}"):
            engine.scheduler.update(step, tokens)
    assert (request.num_computed_tokens, request.output_token_ids) == (0, [])
    engine.scheduler.update(step, [4])
    with pytest.raises(ValueError, match="expected the latest step, but request 0 is running at t"):
        engine.scheduler.update(step, [4])
    assert request.output_token_ids == [4]
    assert engine.kv.tokens(0) == [*prompt(3), 4]


def test_a_step_that_was_never_computed_is_scheduled_again():
    engine = FakeEngine(budget=7)
    engine.add(prompt(9, 0), 3)
    engine.add(prompt(9, 1), 3)
    for _ in range(20):
        if engine.scheduler.has_unfinished:
            lost = engine.scheduler.schedule()
            assert shape(engine.step())[: len(lost)] == shape(lost)
    assert not engine.scheduler.has_unfinished


def test_a_request_that_should_have_been_finished_is_noticed():
    engine = FakeEngine()
    engine.add(prompt(3), 1)
    engine.scheduler.update(engine.scheduler.schedule(), [1])
    with pytest.raises(RuntimeError, match="has all of its 1 output tokens"):
        engine.scheduler.schedule()


def test_blocks_taken_by_someone_else_are_an_error_not_a_hang():
    engine = FakeEngine(num_blocks=2)
    engine.kv.add(-1, [1])
    engine.kv.reserve(-1, 1)
    engine.add(prompt(9), 1)
    with pytest.raises(RuntimeError, match=r"no blocks for request 0, .* 1 of 2 belong to someone"):
        engine.scheduler.schedule()
    engine.kv.remove(-1)
    engine.run()


# ---- Everything at once ----


@pytest.mark.parametrize("caching", [False, True])
def test_pool_exhausted_in_mid_decode_ten_thousand_steps(caching):
    """R36: exhaust the pool, preempt, resume; nothing is lost and nobody is stuck."""
    engine = FakeEngine(num_blocks=6, caching=caching, max_num_seqs=4, budget=16, max_model_len=48)
    preemptions = finished = 0
    for i in range(10_000):
        while len(engine.unfinished) < 4:
            engine.add(prompt(2 + i % 11, i), 30)
        before = dict(engine.unfinished)
        engine.step()
        assert engine.kv.num_free + engine.kv.num_cached + engine.kv.num_used == 6
        for request_id, request in before.items():
            if request_id not in engine.unfinished:
                finished += 1
                preemptions += request.num_preemptions
    engine.run()
    assert preemptions > 500
    assert finished > 300


CONFIGS = {
    "tiny_pool": {"num_blocks": 12, "max_num_seqs": 8, "budget": 24},
    "one_block_of_slack": {"num_blocks": 13, "max_num_seqs": 16, "budget": 96},
    "chunks_of_one": {"num_blocks": 40, "max_num_seqs": 4, "budget": 1},
    "no_prefix_cache": {"num_blocks": 20, "max_num_seqs": 8, "budget": 40, "caching": False},
    "roomy": {"num_blocks": 120, "max_num_seqs": 12, "budget": 64},
}


class Traffic:
    """Random arrivals, most of which share a prefix with one another or go on from a result."""

    def __init__(self, rng: random.Random, longest: int):
        self.rng, self.longest = rng, longest
        self.stems = [[rng.randrange(40) for _ in range(longest)] for _ in range(4)]
        self.finished: list[list[int]] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        stem = rng.choice(self.finished or self.stems) if rng.random() < 0.3 else None
        stem = stem or rng.choice(self.stems)
        tokens = stem[: rng.randrange(self.longest)]
        tokens = tokens + [rng.randrange(40) for _ in range(rng.randrange(12))]
        return tokens[: self.longest] or [1]

    def remember(self, request: Request) -> None:
        self.finished.append([*request.prompt_token_ids, *request.output_token_ids])
        self.finished = self.finished[-8:]


@pytest.mark.parametrize("config", CONFIGS)
def test_one_hundred_thousand_random_steps(config):
    """20 000 steps in each of five configurations.

    Each step: the integrity of the blocks, the order and size of the step, and every key and value
    that it reads (FakeEngine). Each request: it ends, with the tokens that it would have produced
    alone. That nobody starves follows from two facts checked here: the oldest request is in every
    step, and it advances in every step, so that it is the oldest for a bounded number of them.
    """
    rng = random.Random(config)
    engine = FakeEngine(max_model_len=96, ignore_stop=False, max_requests=24, **CONFIGS[config])
    traffic = Traffic(rng, longest=72)
    load = 0.0
    added = aborted = preempted = hits = ended = longest_reign = 0
    watched: dict[int, Request] = {}
    oldest, reign = None, 0

    def abort_one(_step=None) -> None:
        nonlocal aborted
        if engine.unfinished:
            engine.abort(rng.choice(list(engine.unfinished)))
            aborted += 1

    for i in range(20_000):
        if i % 500 == 0:
            load = rng.choice([0.02, 0.1, 0.3, 0.8])
        while len(engine.unfinished) < 20 and rng.random() < load:
            request = engine.add(traffic.prompt(), rng.choice([1, 3, 10, 25, None]))
            watched[request.request_id] = request
            added += 1
        if rng.random() < 0.01:
            abort_one()
        if rng.random() < 0.01:
            engine.scheduler.schedule()  # a step that fails in the model

        first = next(iter(engine.unfinished.values()), None)
        reign = reign + 1 if first is oldest else 1
        oldest = first
        progress = (first.num_computed_tokens, first.num_preemptions) if first else None
        engine.step(abort_one if rng.random() < 0.01 else lambda step: None)
        if first and first.finish_reason != "abort":
            assert first.num_preemptions == progress[1]
            assert first.num_computed_tokens > progress[0]
            assert reign <= first.num_tokens
            longest_reign = max(longest_reign, reign)

        for request in [r for r in watched.values() if r.is_finished]:
            del watched[request.request_id]
            ended += 1
            preempted += request.num_preemptions
            hits += request.num_cached_tokens > 0
            traffic.remember(request)

    assert watched.keys() == engine.unfinished.keys()
    remaining = list(engine.unfinished.values())
    engine.run()
    assert all(r.finish_reason in ("stop", "length") for r in remaining)
    assert ended + len(remaining) == added
    engine.kv.check_integrity()
    # The run has been through what it is meant to go through.
    assert added > 1000
    assert aborted > 100
    assert longest_reign > 20
    assert (hits > 50) == engine.kv.enable_prefix_caching
    assert preempted > 200 or config in ("roomy", "chunks_of_one")

"""Static batching: slots, padding, order, ends; and the same tokens as continuous batching."""

from __future__ import annotations

import pytest
import torch

from fastinfer import LLM, SamplingParams
from fastinfer._host import BlockManager
from fastinfer.engine.request import Request, RequestStatus
from fastinfer.engine.static_scheduler import StaticScheduler
from tests.engine.test_graphs import on_rungs, random_work, serve

BS, CONTEXT = 8, 24  # a slot is 3 blocks


def make(num_blocks=12, seqs=8, budget=64) -> tuple[StaticScheduler, BlockManager]:
    kv = BlockManager(num_blocks, BS, False)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_model_len": CONTEXT}
    return StaticScheduler(kv, **limits), kv


def add(scheduler: StaticScheduler, *lengths: int, outputs: int = 4) -> list[Request]:
    made = []
    for length in lengths:
        request = Request(add.next_id, range(1, length + 1), SamplingParams(max_tokens=outputs))
        add.next_id += 1
        scheduler.add(request)
        made.append(request)
    return made


add.next_id = 0


def run_step(scheduler: StaticScheduler, kv: BlockManager) -> list[tuple[int, int, int, bool, int]]:
    """One step; returns its parts with the request's id in front."""
    step = scheduler.schedule()
    kv.check_integrity()
    again = scheduler.schedule()
    assert step == again, "a step that was not computed is the same again"
    scheduler.update(step, [7] * sum(part.samples for part in step))
    for part in step:
        request = part.request
        if not request.is_finished and len(request.output_token_ids) == request.max_output_tokens:
            scheduler.finish(request, "length")
    kv.check_integrity()
    return [(p.request.request_id, p.start, p.num_tokens, p.samples, p.padding) for p in step]


def test_prompts_are_padded_to_the_longest_and_then_all_decode():
    scheduler, kv = make()
    a, b, c = (r.request_id for r in add(scheduler, 3, 6, 1))
    assert run_step(scheduler, kv) == [
        (a, 0, 3, True, 3),
        (b, 0, 6, True, 0),
        (c, 0, 1, True, 5),
    ]
    assert kv.num_used == 9, "each has the blocks of the whole context"
    assert run_step(scheduler, kv) == [(a, 3, 1, True, 0), (b, 6, 1, True, 0), (c, 1, 1, True, 0)]
    assert run_step(scheduler, kv) == [(a, 4, 1, True, 0), (b, 7, 1, True, 0), (c, 2, 1, True, 0)]


def test_padded_prompts_are_chunked_under_the_budget():
    scheduler, kv = make(budget=4)
    a, b = (r.request_id for r in add(scheduler, 2, 9))
    assert run_step(scheduler, kv) == [(a, 0, 2, True, 2)]
    assert run_step(scheduler, kv) == [(a, 4, 0, False, 4)], "a chunk may be padding alone"
    assert run_step(scheduler, kv) == [(a, 8, 0, False, 1), (b, 0, 3, False, 0)]
    assert run_step(scheduler, kv) == [(b, 3, 4, False, 0)]
    assert run_step(scheduler, kv) == [(b, 7, 2, True, 0)]
    assert run_step(scheduler, kv) == [(a, 2, 1, True, 0), (b, 9, 1, True, 0)]


def test_the_batch_ends_with_its_slowest_and_the_next_begins_in_order():
    scheduler, kv = make(seqs=2)
    (slow,) = add(scheduler, 2, outputs=6)
    (fast,) = add(scheduler, 2, outputs=1)
    waiting = add(scheduler, 2, 2, outputs=1)
    run_step(scheduler, kv)
    assert fast.is_finished and not slow.is_finished
    while not slow.is_finished:
        assert kv.num_used == 6, "who has ended keeps its slot"
        assert [part[0] for part in run_step(scheduler, kv)] == [slow.request_id], (
            "and is not computed any more"
        )
        assert all(r.status is RequestStatus.WAITING for r in waiting if not slow.is_finished)
    assert kv.num_used == 0
    assert [part[0] for part in run_step(scheduler, kv)] == [r.request_id for r in waiting]
    assert not scheduler.has_unfinished and kv.num_used == kv.num_sequences == 0


def test_slots_limit_the_batch():
    scheduler, kv = make(num_blocks=11, seqs=8)  # 3 slots and 2 blocks
    ids = [r.request_id for r in add(scheduler, 1, 1, 1, 1, outputs=2)]
    assert [part[0] for part in run_step(scheduler, kv)] == ids[:3]
    assert scheduler.num_running == 3 and scheduler.num_waiting == 1
    run_step(scheduler, kv)
    assert [part[0] for part in run_step(scheduler, kv)] == ids[3:]


def test_a_pool_without_a_slot_is_refused():
    with pytest.raises(ValueError, match=r"a slot of .* 24 tokens takes 3 blocks, .* has 2"):
        make(num_blocks=2)


def test_abort_at_any_stage():
    scheduler, kv = make(budget=4)
    a, b, c = add(scheduler, 2, 9, 3)
    (d,) = add(scheduler, 3)
    assert scheduler.abort(d.request_id) is d and kv.num_sequences == 3
    run_step(scheduler, kv)
    scheduler.abort(a.request_id)  # within its padding
    assert [part[0] for part in run_step(scheduler, kv)] == [b.request_id]
    step = scheduler.schedule()
    scheduler.abort(b.request_id)  # while the step is computed
    scheduler.update(step, [7] * sum(part.samples for part in step))
    kv.check_integrity()
    assert kv.num_used == 9
    run_step(scheduler, kv)
    (late,) = add(scheduler, 1)
    scheduler.abort(c.request_id)
    assert kv.num_used == 0 and kv.num_sequences == 1
    run_step(scheduler, kv)
    assert late.output_token_ids == [7]
    assert scheduler.abort(a.request_id) is None
    scheduler.abort(late.request_id)
    assert scheduler.schedule() == [] and kv.num_sequences == 0
    kv.check_integrity()


def test_an_old_step_is_refused():
    scheduler, kv = make()
    add(scheduler, 2)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="expected 1 tokens"):
        scheduler.update(step, [])
    scheduler.update(step, [7])
    with pytest.raises(ValueError, match="expected the latest step"):
        scheduler.update(step, [7])
    kv.check_integrity()


@pytest.mark.parametrize("rungs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_continuous_batching(tiny_folder, shared_llm, seed, rungs):
    work = random_work(seed, 12)
    want = serve(shared_llm, work)
    llm = LLM(
        tiny_folder,
        batching="static",
        max_num_seqs=8,
        max_num_batched_tokens=50,
        max_model_len=128,
        kv_cache_memory_bytes=5 * 128 * 512,  # 5 slots
    )
    assert llm.blocks.num_blocks == 5 * 8 and not llm.blocks.enable_prefix_caching
    if rungs:
        llm, _ = on_rungs(llm, 8, 50)
    for keys_and_values in llm._core._runner.kv_caches:
        for pages in keys_and_values:
            pages.fill_(float("nan"))
    assert serve(llm, work) == want
    assert llm.blocks.num_used == 0


def test_stats(tiny_folder):
    llm = LLM(tiny_folder)
    before = llm.stats
    llm.generate([[5] * 4, [6] * 4], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    after = llm.stats
    assert before.steps == before.tokens == 0
    assert after.steps == 6 and after.tokens == 12
    assert 0 < after.device_seconds <= after.step_seconds
    assert 0 < after.host_seconds < after.step_seconds
    assert torch.tensor(after.wait_seconds).isfinite()

"""plan_attention: plans give the same bits, keep their size, and are refused when stale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Backend
from tests.helpers import assert_bit_equal, cumulative, dtype_name, guarded
from tests.ops.test_paged_attention import assert_same_results, check, step


def plan_arguments(
    args: list[Tensor], maxima: dict[str, int]
) -> tuple[list[Tensor], dict[str, int]]:
    sizes = {
        "total_q": args[0].shape[0], "num_heads": args[0].shape[1],
        "num_kv_heads": args[1].shape[1],
    }  # fmt: skip
    return [args[4], args[5]], {**sizes, **maxima}


PLANNED = [{}, {"window_left": 200}, {"causal": False}, {"batch_invariant": True}]


@pytest.mark.parametrize("options", PLANNED, ids=["default", "window", "not_causal", "invariant"])
@pytest.mark.parametrize(
    "steps",
    [([1, 1, 1], [1500, 30, 700]), ([1, 20, 4], [50, 20, 31]), ([], [])],
    ids=["decode", "mixed", "nothing"],
)
def test_a_plan_made_before_gives_the_same_bits(
    backend: Backend, options: dict[str, Any], steps: tuple[list[int], list[int]]
) -> None:
    args, _, maxima = step(backend, *steps, torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    plan = backend.ops.plan_attention(*tensors, **sizes, **options)
    assert plan.dtype == torch.int32 and plan.dim() == 2 and plan.shape[1] == 8
    unplanned = backend.ops.paged_attention(*args, **maxima, **options)
    planned = backend.ops.paged_attention(*args, **maxima, **options, plan=plan)
    assert_same_results(planned, unplanned)
    check(planned, args, {**maxima, **options})


def test_plan_overloads_are_equal_and_fill_out(backend: Backend) -> None:
    args, _, maxima = step(backend, [1, 3], [1500, 30], torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    plan = backend.ops.plan_attention(*tensors, **sizes)
    # One dimension is guarded, so that the plan itself stays contiguous between its canaries.
    out = guarded((plan.numel(),), torch.int32, backend.device)
    packet = backend.library.plan_attention
    assert packet.out(*tensors, **sizes, out=out.view.view(-1, 8)) is None
    assert_bit_equal(out.view.view(-1, 8), plan)
    out.assert_untouched_around()
    assert_bit_equal(packet.default(*tensors, **sizes), plan)


def test_plan_size_depends_on_shapes_and_maxima_only(backend: Backend) -> None:
    """R21: a captured step keeps its plan buffer when the lengths change."""
    shapes = set()
    for counts, lengths in (
        ([1, 1, 4], [9, 9, 9]),
        ([4, 1, 1], [4000, 1, 300]),
        ([0, 2, 4], [0, 2, 4]),
    ):
        shapes.add(
            backend.ops.plan_attention(
                cumulative(counts, backend.device),
                torch.tensor(lengths, dtype=torch.int32, device=backend.device),
                total_q=6, num_heads=4, num_kv_heads=2, max_seqlen_q=4, max_seqlen_k=4096,
            ).shape
        )  # fmt: skip
    assert len(shapes) == 1


def test_lengths_may_change_under_the_same_buffers(backend: Backend) -> None:
    """R21: one set of buffers, refilled for other lengths, gives what fresh tensors give."""
    maxima = {"max_seqlen_q": 1, "max_seqlen_k": 2048}
    args, pool, _ = step(backend, [1, 1], [2000, 1], torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    plan = backend.ops.plan_attention(*tensors, **sizes)
    out, lse = backend.ops.paged_attention(*args, **maxima, plan=plan)
    for lengths in ([40, 1], [1, 1], [2000, 0], [1999, 1]):
        pool.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        backend.ops.plan_attention(*tensors, **sizes, out=plan)
        backend.ops.paged_attention(*args, **maxima, plan=plan, out=out, lse=lse)
        check((out, lse), args, maxima)


STALE: dict[str, Any] = {
    "lengths": lambda t, s: t[1].copy_(torch.tensor([900, 31])),
    "counts": lambda t, s: t[0].copy_(torch.tensor([0, 2, 4])),
    "heads": lambda t, s: s.update(num_heads=8),
    "kv_heads": lambda t, s: s.update(num_kv_heads=4),
    "max_seqlen_k": lambda t, s: s.update(max_seqlen_k=4000),
    "max_seqlen_q": lambda t, s: s.update(max_seqlen_q=4),
    "batch_invariant": lambda t, s: s.update(batch_invariant=True),
}


@pytest.mark.parametrize("case", STALE)
def test_a_plan_for_another_problem_is_refused(backend: Backend, case: str) -> None:
    if not backend.reads_contents:
        pytest.skip("the plan is read on the device, unchecked")
    args, _, maxima = step(backend, [1, 3], [1500, 30], torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    tensors = [x.clone() for x in tensors]
    STALE[case](tensors, sizes)
    plan = backend.ops.plan_attention(*tensors, **sizes)
    with pytest.raises(ValueError, match=r"paged_attention.*plan"):
        backend.ops.paged_attention(*args, **maxima, plan=plan)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: torch.zeros_like(plan),
        lambda plan: torch.full_like(plan, 2**31 - 1),
        lambda plan: plan[:-1].contiguous(),
        lambda plan: plan[:, :7].contiguous(),
        lambda plan: plan.long(),
    ],
    ids=["zeros", "absurd", "short", "narrow", "int64"],
)
def test_something_that_is_no_plan_is_refused(backend: Backend, spoil: Any) -> None:
    args, _, maxima = step(backend, [1, 3], [1500, 30], torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    made = backend.ops.plan_attention(*tensors, **sizes)
    plan = spoil(made)
    if (plan.shape, plan.dtype) == (made.shape, made.dtype) and not backend.reads_contents:
        pytest.skip("the plan is read on the device, unchecked")
    with pytest.raises(ValueError, match=r"paged_attention.*plan"):
        backend.ops.paged_attention(*args, **maxima, plan=plan)


@pytest.mark.parametrize("max_seqlen_k", [1, 256, 257, 100_000])
def test_plan_size_function_tells_the_rows(backend: Backend, max_seqlen_k: int) -> None:
    for counts in ([], [0], [1, 1, 4], [70]):
        total = sum(counts)
        rows = backend.ops.attention_plan_size(len(counts), total, 8, 2, max_seqlen_k)
        plan = backend.ops.plan_attention(
            cumulative(counts, backend.device),
            torch.ones(len(counts), dtype=torch.int32, device=backend.device),
            total_q=total, num_heads=8, num_kv_heads=2, max_seqlen_q=100,
            max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        assert plan.shape == (rows, 8)


def test_a_plan_serves_every_layer_and_cache_format(backend: Backend) -> None:
    """One plan a step: it knows nothing of head sizes, dtypes or cache contents."""
    counts, lengths = [1, 3], [1500, 30]
    args, _, maxima = step(backend, counts, lengths, torch.float32)
    tensors, sizes = plan_arguments(args, maxima)
    plan = backend.ops.plan_attention(*tensors, **sizes)
    for options in ({"head_dim": 40, "k_storage": torch.int8}, {"head_dim": 64, "block_size": 64}):
        args, pool, _ = step(backend, counts, lengths, torch.bfloat16, **options)
        given = {**maxima, **pool.scales}
        planned = backend.ops.paged_attention(*args, **given, plan=plan)
        assert_same_results(planned, backend.ops.paged_attention(*args, **given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_a_plan_that_cuts_sequences_writes_where_it_may(
    backend: Backend, dtype: torch.dtype
) -> None:
    """Also where the call asks for batch_invariant and would need no room for pieces."""
    if backend.reads_contents:
        pytest.skip("refused: the plan is for other options")
    args, _, maxima = step(backend, [1, 1], [1500, 700], dtype)
    tensors, sizes = plan_arguments(args, maxima)
    plan = backend.ops.plan_attention(*tensors, **sizes)
    check(
        backend.ops.paged_attention(*args, **maxima, plan=plan, batch_invariant=True), args, maxima
    )


@pytest.mark.parametrize("count", [64, 200, 700, 2048])
def test_a_plan_loads_the_multiprocessors_evenly(backend: Backend, count: int) -> None:
    """The decode kernel takes units, which are an item for one KV head, in a fixed stride."""
    if backend.name != "cuda":
        pytest.skip("the plan is another backend's")
    kv_heads = 8
    lengths = torch.randint(200, 9000, (count,), dtype=torch.int32)
    plan = backend.ops.plan_attention(
        cumulative([1] * count, backend.device), lengths.to(backend.device), total_q=count,
        num_heads=4 * kv_heads, num_kv_heads=kv_heads, max_seqlen_q=1, max_seqlen_k=9000,
    ).cpu()  # fmt: skip
    items = plan[2 : 2 + int(plan[0, 1])]
    keys = items[:, 4] - items[:, 3]
    assert torch.equal(torch.zeros_like(lengths).index_add_(0, items[:, 0], keys), lengths)
    blocks = torch.cuda.get_device_properties(backend.device).multi_processor_count
    units = keys.repeat_interleave(kv_heads)
    block = torch.arange(len(units)) % blocks
    loads = torch.zeros(blocks, dtype=torch.int32).index_add_(0, block, units)
    assert loads.max() <= 1.15 * loads.float().mean()


# ------------------------------------------------------------------------------------- workspace


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_workspace_of_the_told_size_is_enough(backend: Backend, batch_invariant: bool) -> None:
    """Whatever it held before, and nothing past it is written."""
    args, _, maxima = step(backend, [1, 3, 1], [3000, 1025, 5], torch.float32, value_dim=17)
    maxima["max_seqlen_k"] = 4096
    size = backend.ops.paged_attention_workspace_size(5, 4, 17, 4096)
    workspace = guarded((size,), torch.float32, backend.device)  # holds NaN
    options = {**maxima, "batch_invariant": batch_invariant}
    ours = backend.ops.paged_attention(*args, **options, workspace=workspace.view)
    assert_same_results(ours, backend.ops.paged_attention(*args, **options))
    workspace.assert_untouched_around()


def test_a_workspace_that_is_too_small_is_refused(backend: Backend) -> None:
    args, _, maxima = step(backend, [1, 3], [3000, 1025], torch.float32)
    for bad in (torch.empty(0), torch.empty(1), torch.empty(10**6, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"paged_attention.*workspace"):
            backend.ops.paged_attention(
                *args, **maxima, batch_invariant=True, workspace=bad.to(backend.device)
            )


@pytest.mark.parametrize("heads", [(4, 8), (0, 1), (1, 0), (3, 2)])
def test_head_counts_that_do_not_divide(backend: Backend, heads: tuple[int, int]) -> None:
    cu, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match="plan_attention: num_heads, num_kv_heads: expected"):
        backend.ops.plan_attention(
            cu, lens, total_q=1, num_heads=heads[0], num_kv_heads=heads[1], max_seqlen_q=1,
            max_seqlen_k=4,
        )  # fmt: skip

"""Every op on a GPU where the Triton interpreter shows nothing: capture and replay, side streams,
another device, launches of nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastinfer.ops as ops
from tests.helpers import assert_bit_equal
from tests.ops.op_inputs import MUTATED, OPS, VARIANTS, Arguments, copied, make

BF16 = torch.bfloat16


def run(op: str, arguments: Arguments) -> list[Tensor]:
    """What the call returns, or for an in-place op what it leaves in its arguments."""
    returned = getattr(torch.ops.fastinfer, op).default(**arguments)
    if op in MUTATED:
        returned = [arguments[name] for name in MUTATED[op] if arguments.get(name) is not None]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def refill(static: Arguments, fresh: Arguments) -> None:
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            static[name].copy_(value)


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_capture_and_replay_with_other_inputs(op: str, variant: str) -> None:
    """R22: captured on a side stream, inputs changed, replayed."""
    static = make(op, variant, dtype=BF16, device="cuda")
    run(op, copied(static))  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        results = run(op, static)
    fresh = make(op, variant, dtype=BF16, device="cuda")
    refill(static, fresh)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(results, run(op, copied(fresh)), strict=True):
        assert_bit_equal(replayed.cpu(), eager.cpu(), op)


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_work_is_on_the_current_stream(op: str, variant: str) -> None:
    """Inputs that a side stream is still writing are seen when the op runs on that stream."""
    arguments = make(op, variant, dtype=BF16, device="cuda")
    expected = run(op, copied(arguments))
    late = {n: torch.zeros_like(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        refill(late, arguments)
        results = run(op, late)
    stream.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        assert_bit_equal(result.cpu(), wanted.cpu(), op)


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_another_device_than_the_current_one(op: str, variant: str) -> None:
    """R23."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = make(op, variant, dtype=BF16, device="cuda:0")
    there = {n: x.to("cuda:1") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    expected = run(op, arguments)
    with torch.cuda.device(0):
        results = run(op, there)
    torch.cuda.synchronize(1)
    for result, wanted in zip(results, expected, strict=True):
        assert result.device.index == 1
        assert_bit_equal(result.cpu(), wanted.cpu(), op)


ROWS_OF_PRODUCTS = ("x", "a", "a_scale", "a_zero", "residual")


def empty(arguments: Arguments, op: str) -> Arguments:
    """The call with no tokens: every dimension that counts them is 0."""
    tokens = 5
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        if op.endswith(("_gemm", "_scaled_mm")):
            kept = name not in ROWS_OF_PRODUCTS
        else:
            kept = name in ("weight", "bias", "cos_sin", "sinks")
            kept = kept or name.endswith(("cache", "scale"))
        if kept or not isinstance(value, Tensor):
            result[name] = value
        elif op == "merge_attention_states":
            result[name] = value.narrow(1 if name == "outs" else -1, 0, 0)
        else:
            dim = next((i for i, size in enumerate(value.shape) if size == tokens), 0)
            result[name] = value.narrow(dim, 0, 0)
    return result


@pytest.mark.parametrize("op", [op for op in OPS if "attention" not in op or "merge" in op])
def test_no_tokens_leave_no_error(op: str) -> None:
    """R24: an empty launch would leave an error that shows at the next call."""
    for result in run(op, empty(make(op, dtype=BF16, device="cuda"), op)):
        assert result.device.type == "cuda"
    torch.cuda.synchronize()


def decode_step(lengths: list[int], block_size: int = 16) -> dict[str, Any]:
    """One decode token for each sequence, over a pool of 64 blocks a sequence."""
    batch, blocks = len(lengths), 64
    shape = (batch * blocks, 2, block_size, 64)
    return {
        "q": torch.randn(batch, 8, 64, device="cuda", dtype=BF16),
        "k_cache": torch.randn(shape, device="cuda", dtype=BF16),
        "v_cache": torch.randn(shape, device="cuda", dtype=BF16),
        "block_table": torch.randperm(batch * blocks, dtype=torch.int32, device="cuda").view(
            batch, blocks
        ),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
        "max_seqlen_k": blocks * block_size,
    }


@pytest.mark.parametrize("planned", [True, False])
def test_replay_with_other_lengths(planned: bool) -> None:
    """R21: the plan is made on the device, so a captured step follows the lengths."""
    static = decode_step([1, 700, 33, 1024])
    sizes = {"total_q": 4, "num_heads": 8, "num_kv_heads": 2}
    names = ("cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k")

    def step() -> tuple[Tensor, Tensor]:
        plan = None
        if planned:
            plan = ops.plan_attention(**sizes, **{name: static[name] for name in names})
        return ops.paged_attention(**static, plan=plan)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ([1024, 1024, 1024, 1024], [5, 0, 1000, 17], [16, 15, 17, 1]):
        static["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        eager = ops.paged_attention(**static)
        assert_bit_equal(out, eager[0])
        assert_bit_equal(lse, eager[1])
        for row, length in enumerate(lengths):  # and each is what it is alone
            alone = dict(static)
            alone["q"] = static["q"][row : row + 1]
            alone["block_table"] = static["block_table"][row : row + 1]
            alone["cu_seqlens_q"] = static["cu_seqlens_q"][:2]
            alone["seq_lens"] = torch.tensor([length], dtype=torch.int32, device="cuda")
            difference = (ops.paged_attention(**alone)[0] - out[row : row + 1]).abs().max()
            assert difference <= 0.02, (row, length)

"""Every op under torch.compile: one graph, no recompile for token counts, mutated views (R32)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.conftest import Backend
from tests.helpers import assert_bit_equal, make_pages
from tests.ops.op_inputs import MUTATED, VARIANTS, Arguments, copied, make

TOKEN_COUNTS = [2, 3, 5, 9]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def results(op: str, call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    """What the call returns, or for an in-place op what it leaves in its arguments."""
    returned = call(**arguments)
    if op in MUTATED:
        assert returned is None
        changed = [arguments.get(name) for name in MUTATED[op]]
        return [x for x in changed if x is not None]
    return list(returned) if isinstance(returned, tuple) else [returned]


def assert_same(ours: list[Tensor], eager: list[Tensor]) -> None:
    for compiled, expected in zip(ours, eager, strict=True):
        assert_bit_equal(compiled, expected)


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_one_graph_serves_all_token_counts(backend: Backend, op: str, variant: str) -> None:
    """fullgraph, and one compilation for 2, 3, 5 and 9 tokens with other declared maxima too."""
    wrapper = getattr(backend.ops, op)
    compiled = torch.compile(wrapper, fullgraph=True, backend="aot_eager", dynamic=True)
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        # Two tokens and two KV heads are equal by chance; that is no reason to compile again.
        torch.fx.experimental._config.patch(use_duck_shape=False),
    ):
        for tokens in TOKEN_COUNTS:
            arguments = make(op, variant, tokens=tokens, device=backend.device)
            eager = results(op, wrapper, copied(arguments))
            assert_same(results(op, compiled, arguments), eager)


def test_recompiling_would_be_noticed() -> None:
    """The setting that the test above relies on."""

    @torch.compile(backend="eager", dynamic=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    with torch._dynamo.config.patch(error_on_recompile=True):
        double(torch.ones(2))
        with pytest.raises(torch._dynamo.exc.RecompileError):
            double(torch.ones(3))


@pytest.mark.parametrize(
    "op", ["rms_norm", "paged_attention", "quantize_fp8", "fp8_scaled_mm", "sample"]
)
def test_out_arguments(backend: Backend, op: str) -> None:
    """`out` is written, not replaced, when the wrapper is compiled."""
    wrapper = getattr(backend.ops, op)
    arguments = make(op, device=backend.device)
    eager = results(op, wrapper, arguments)
    names = {
        "rms_norm": ["out"],
        "paged_attention": ["out", "lse"],
        "quantize_fp8": ["out", "out_scale"],
        "fp8_scaled_mm": ["out"],
        "sample": ["token_ids", "valid"],
    }
    receivers = [torch.zeros_like(x) for x in eager]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(given: Arguments, outs: list[Tensor]) -> None:
        wrapper(**given, **dict(zip(names[op], outs, strict=True)))

    call(arguments, receivers)
    assert_same(receivers, eager)


@pytest.mark.parametrize(
    "op",
    [
        "rms_norm", "fused_add_rms_norm_", "rotary_embedding_", "qk_norm_rope_append_",
        "silu_and_mul", "paged_attention", "quantize_fp8", "fp8_scaled_mm", "int8_scaled_mm",
    ],
)  # fmt: skip
def test_inductor(backend: Backend, op: str) -> None:
    wrapper = getattr(backend.ops, op)
    compiled = torch.compile(wrapper, fullgraph=True, dynamic=True)
    for tokens in (3, 9):
        arguments = make(op, tokens=tokens, device=backend.device)
        eager = results(op, wrapper, copied(arguments))
        assert_same(results(op, compiled, arguments), eager)


def kv_pool(device: str, blocks: int) -> Tensor:
    return torch.zeros(2, blocks, 2, 16, 32, device=device)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_kv_write_through_views_of_one_pool(backend: Backend, compiler: str) -> None:
    """R32: write kv[0] and kv[1] and read them again, in one graph, without copying the pool."""

    def step(
        kv: Tensor, k: Tensor, v: Tensor, slots: Tensor, q: Tensor, pages: Arguments
    ) -> Tensor:
        backend.ops.append_paged_kv_cache_(k, v, kv[0], kv[1], slots)
        out, _ = backend.ops.paged_attention(q, kv[0], kv[1], **pages)
        return out + 1.0

    tokens, blocks = 5, 1024
    device = torch.device(backend.device)
    k, v, q = (torch.randn(tokens, heads, 32, device=device) for heads in (2, 2, 4))
    slots = torch.tensor([0, 1, 17, 1000, 16383], device=device)
    pages: Arguments = {
        "block_table": torch.tensor([[0, 1], [blocks - 1, 0]], dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([18, 16], dtype=torch.int32, device=device),
        "max_seqlen_q": 3,
        "max_seqlen_k": 18,
    }
    eager_kv, kv = kv_pool(backend.device, blocks), kv_pool(backend.device, blocks)
    expected = step(eager_kv, k, v, slots, q, pages)
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    address = kv.data_ptr()
    assert_bit_equal(compiled(kv, k, v, slots, q, pages), expected)
    assert_bit_equal(kv, eager_kv)
    assert kv.data_ptr() == address
    if compiler == "inductor":
        assert largest_allocation(lambda: compiled(kv, k, v, slots, q, pages)) < kv[0].nbytes / 8


def largest_allocation(call: Callable[[], object]) -> int:
    """Bytes of the largest single allocation that the call makes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_largest_allocation_sees_a_copy() -> None:
    """The measurement of the test above would notice a copied pool."""
    kv = kv_pool("cpu", 64)
    assert largest_allocation(lambda: kv[0].clone()) >= kv[0].nbytes


def test_quantized_kv_write_through_views(backend: Backend) -> None:
    """R32: int8 pages and their scales are views of larger tensors."""

    def step(kv: Tensor, scales: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        backend.ops.append_paged_kv_cache_(
            k, v, kv[0], kv[1], slots, k_scale=scales[0], v_scale=scales[1]
        )

    k, v = (torch.randn(6, 2, 32, device=backend.device) for _ in range(2))
    slots = torch.tensor([3, -1, 17, 40, 0, 63], device=backend.device)
    pools = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        kv = torch.zeros(2, 4, 2, 16, 32, dtype=torch.int8, device=backend.device)
        scales = torch.zeros(2, 4, 2, 16, device=backend.device)
        call(kv, scales, k, v, slots)
        pools.append((kv, scales))
    assert_same(list(pools[1]), list(pools[0]))
    assert pools[0][1].count_nonzero() == 2 * 5 * 2


def test_lengths_may_change_under_one_compiled_graph(backend: Backend) -> None:
    """R21: a graph compiled for one set of lengths stays right for others of the same shapes."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(backend.ops.paged_attention, fullgraph=True, backend=counter)
    pages = make_pages([900, 5, 40], device=backend.device)
    q = torch.randn(3, 4, 64, device=backend.device)
    cu_q = torch.arange(4, dtype=torch.int32, device=backend.device)
    args = (q, pages.k_cache, pages.v_cache, pages.block_table, cu_q)
    maxima = {"max_seqlen_q": 1, "max_seqlen_k": 1024}
    for lengths in ([900, 5, 40], [1, 1, 1], [0, 5, 33], [899, 4, 39]):
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
        ours = compiled(*args, seq_lens, **maxima)
        assert_same(list(ours), list(backend.ops.paged_attention(*args, seq_lens, **maxima)))
    assert counter.frame_count == 1

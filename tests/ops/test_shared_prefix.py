"""shared_prefix_attention against the reference over whole sequences, and paged_attention."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    Pages,
    assert_accurate,
    assert_bit_equal,
    cumulative,
    dtype_name,
    guarded,
    make_pages,
    random_tree_masks,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

INT8, FP8 = torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Groups:
    """Prefix lengths, and for each prefix the (queries, suffix length) of its sequences."""

    prefixes: list[int]
    sequences: list[list[tuple[int, int]]]


STEPS = {
    "decode": Groups([67], [[(1, 1), (1, 9), (1, 33), (1, 16)]]),
    "verify": Groups([48], [[(4, 4), (3, 20), (1, 5)]]),
    "chunks": Groups([21], [[(19, 19), (2, 40)]]),
    "groups": Groups([35, 0, 8], [[(1, 3), (2, 7)], [(1, 12)], [(3, 3), (1, 1)]]),
    "empties": Groups([16, 40, 5], [[(0, 4), (1, 1)], [], [(0, 0), (2, 6)]]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "not_causal": {"causal": False},
    "right": {"causal": False, "window_right": 1},
    "softcap": {"softcap": 2.0, "scale": 0.4},
    "sinks": {"sinks": True},
    "batch_invariant": {"batch_invariant": True, "sinks": True},
}
STORAGES: dict[str, dict[str, Any]] = {
    "int8": {"k_storage": INT8, "v_storage": INT8},
    "fp8_static": {"k_storage": FP8, "v_storage": FP8, "static_scale": True},
    "k_int8_v_float": {"k_storage": INT8},
}


@dataclass
class Step:
    """One call: its tensors, its declared maxima, and the pages behind it."""

    q: Tensor
    pool: Pages
    counts: list[int]
    group_counts: list[int]
    groups: Groups
    device: str

    @property
    def num_prefixes(self) -> int:
        return len(self.groups.prefixes)

    @property
    def args(self) -> list[Tensor]:
        pool, g = self.pool, self.num_prefixes
        return [
            self.q, pool.k_cache, pool.v_cache, pool.block_table[:g], pool.seq_lens[:g],
            pool.block_table[g:], cumulative(self.counts, self.device), pool.seq_lens[g:],
        ]  # fmt: skip

    @property
    def shape(self) -> dict[str, Any]:
        lengths = [n for group in self.groups.sequences for _, n in group]
        return {
            "prefix_cu_seqlens_q": cumulative(self.group_counts, self.device),
            "max_prefix_len": max(self.groups.prefixes),
            "max_prefix_seqlen_q": max(self.group_counts),
            "max_seqlen_q": max([*self.counts, 0]),
            "max_seqlen_k": max([*lengths, 0]),
        }

    def whole(self, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
        """The reference over each sequence's prefix and suffix, one after the other."""
        pool, scales = self.pool, {"k": self.pool.k_scale, "v": self.pool.v_scale}
        row = self.num_prefixes
        parts: dict[str, list[Tensor]] = {"k": [], "v": []}
        for g, group in enumerate(self.groups.sequences):
            for _, length in group:
                for name, cache in (("k", pool.k_cache), ("v", pool.v_cache)):
                    for at, n in ((g, self.groups.prefixes[g]), (row, length)):
                        blocks = pool.block_table[at]
                        parts[name].append(
                            reference.read_pages(cache, scales[name], blocks, n, dtype)
                        )
                row += 1
        lengths = [
            self.groups.prefixes[g] + n
            for g, group in enumerate(self.groups.sequences)
            for _, n in group
        ]
        k, v = (torch.cat(parts[name]) for name in ("k", "v"))
        bounds = cumulative(self.counts), cumulative(lengths)
        return reference.flash_attention_varlen(self.q, k, v, *bounds, dtype=dtype, **options)


def make(
    backend: Backend, groups: Groups, dtype: torch.dtype, *, heads: int = 4, **pages: Any
) -> Step:
    flat = [sequence for group in groups.sequences for sequence in group]
    lengths = [*groups.prefixes, *(n for _, n in flat)]
    pool = make_pages(lengths, dtype=dtype, device=backend.device, **{"head_dim": 24, **pages})
    counts = [n for n, _ in flat]
    group_counts = [sum(n for n, _ in group) for group in groups.sequences]
    q = torch.randn(sum(counts), heads, pool.k_cache.shape[-1], device=backend.device).to(dtype)
    return Step(q, pool, counts, group_counts, groups, backend.device)


def check(actual: tuple[Tensor, Tensor], step: Step, options: dict[str, Any]) -> None:
    options = {name: value for name, value in options.items() if name != "batch_invariant"}
    options.setdefault("causal", True)
    dtype = step.q.dtype
    out, lse = step.whole(torch.float64, **options)
    plain, _ = step.whole(dtype, **options)
    _, plain_lse = step.whole(torch.float32, **options)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_accurate(actual[0], out, plain, what="out")
    assert_accurate(actual[1], lse, plain_lse, what="lse")


def drawn(options: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    if "sinks" not in options:
        return dict(options)
    return {**options, "sinks": torch.randn(heads, device=device) * 2}


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", STEPS)
def test_options(backend: Backend, dtype: torch.dtype, option: str, name: str) -> None:
    step = make(backend, STEPS[name], dtype)
    options = drawn(OPTIONS[option], 4, backend.device)
    actual = backend.ops.shared_prefix_attention(*step.args, **step.shape, **options)
    check(actual, step, options)


@by_dtype
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["decode", "groups"])
def test_storage_formats(backend: Backend, dtype: torch.dtype, storage: str, name: str) -> None:
    step = make(backend, STEPS[name], dtype, **STORAGES[storage])
    actual = backend.ops.shared_prefix_attention(*step.args, **step.shape, **step.pool.scales)
    check(actual, step, {})


@pytest.mark.parametrize(("heads", "num_kv_heads"), [(1, 1), (6, 2), (8, 1), (3, 3)])
def test_grouped_heads(backend: Backend, heads: int, num_kv_heads: int) -> None:
    step = make(
        backend, STEPS["verify"], torch.bfloat16, heads=heads, num_kv_heads=num_kv_heads,
        head_dim=64, value_dim=40, layout="NHD",
    )  # fmt: skip
    check(backend.ops.shared_prefix_attention(*step.args, **step.shape), step, {})


@by_dtype
@pytest.mark.parametrize("option", ["default", "softcap", "sinks"])
def test_equals_paged_attention(backend: Backend, dtype: torch.dtype, option: str) -> None:
    """With whole blocks the prefix's blocks can stand in each sequence's table as well."""
    step = make(backend, Groups([64], [[(1, 1), (3, 21), (5, 16)]]), dtype)
    options = drawn(OPTIONS[option], 4, backend.device)
    shared = backend.ops.shared_prefix_attention(*step.args, **step.shape, **options)
    q, k_cache, v_cache, prefix, _, suffix, cu_q, seq_lens = step.args
    table = torch.cat([prefix[:, :4].expand(3, 4), suffix], 1)
    plain = backend.ops.paged_attention(
        q, k_cache, v_cache, table, cu_q, seq_lens + 64, max_seqlen_q=5, max_seqlen_k=85, **options
    )
    exact = step.whole(torch.float64, causal=True, **options)
    assert_accurate(shared[0], exact[0], plain[0], what="out")
    assert_accurate(shared[1], exact[1], plain[1], what="lse")


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_tree_mask(backend: Backend, dtype: torch.dtype) -> None:
    step = make(backend, Groups([37], [[(8, 8), (5, 12)]]), dtype)
    mask = torch.cat([random_tree_masks(8), random_tree_masks(5)]).to(backend.device)
    actual = backend.ops.shared_prefix_attention(*step.args, **step.shape, tree_mask=mask)
    check(actual, step, {"tree_mask": mask})


def test_one_group_needs_no_bounds(backend: Backend) -> None:
    step = make(backend, STEPS["verify"], torch.float32)
    expected = backend.ops.shared_prefix_attention(*step.args, **step.shape)
    shape = {name: step.shape[name] for name in ("max_prefix_len", "max_seqlen_q", "max_seqlen_k")}
    actual = backend.ops.shared_prefix_attention(*step.args, **shape)
    assert_bit_equal(actual[0], expected[0], "out")
    assert_bit_equal(actual[1], expected[1], "lse")


@pytest.mark.parametrize("option", ["default", "batch_invariant", "right"])
def test_plans_are_reused(backend: Backend, option: str) -> None:
    if backend.interpreted:
        pytest.skip("slow there, and about the composition alone")
    step = make(backend, Groups([900, 30], [[(1, 400), (2, 5)], [(1, 700)]]), torch.bfloat16)
    options = drawn(OPTIONS[option], 4, backend.device)
    planned = {name: value for name, value in options.items() if name != "sinks"}
    q, k_cache, _, _, prefix_lens, _, cu_q, seq_lens = step.args
    plans = backend.ops.plan_shared_prefix_attention(
        prefix_lens, cu_q, seq_lens, total_q=q.shape[0], num_heads=4,
        num_kv_heads=k_cache.shape[1], **step.shape, **planned,
    )  # fmt: skip
    expected = backend.ops.shared_prefix_attention(*step.args, **step.shape, **options)
    for _ in range(2):
        actual = backend.ops.shared_prefix_attention(
            *step.args, **step.shape, **options, plans=plans
        )
        assert_bit_equal(actual[0], expected[0], "out")
        assert_bit_equal(actual[1], expected[1], "lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_rows_do_not_depend_on_who_shares_the_prefix(backend: Backend, dtype: torch.dtype) -> None:
    """R31: each sequence alone, and with the others, bit for bit."""
    if backend.interpreted:
        pytest.skip("NumPy multiplies in the interpreter: a row's bits depend on its place there")
    prefix = 1500
    step = make(backend, Groups([prefix], [[(1, 3), (4, 30), (1, 600), (2, 2)] * 3]), dtype)
    options = {"batch_invariant": True}
    whole = backend.ops.shared_prefix_attention(*step.args, **step.shape, **options)
    q, k_cache, v_cache, prefix_table, prefix_lens, table, cu_q, seq_lens = step.args
    for b in (0, 1, 2, 7, 11):
        begin, end = int(cu_q[b]), int(cu_q[b + 1])
        part = backend.ops.shared_prefix_attention(
            q[begin:end], k_cache, v_cache, prefix_table, prefix_lens, table[b : b + 1],
            cumulative([end - begin], backend.device), seq_lens[b : b + 1].contiguous(),
            max_prefix_len=prefix, max_seqlen_q=end - begin, max_seqlen_k=600, **options,
        )  # fmt: skip
        assert_bit_equal(part[0], whole[0][begin:end], "out")
        assert_bit_equal(part[1], whole[1][:, begin:end].contiguous(), "lse")


def test_outputs_are_filled_and_nothing_else_is(backend: Backend) -> None:
    step = make(backend, STEPS["groups"], torch.float32)
    out = guarded((8, 4, 24), torch.float32, backend.device)
    lse = guarded((4, 8), torch.float32, backend.device)
    expected = backend.ops.shared_prefix_attention(*step.args, **step.shape)
    backend.ops.shared_prefix_attention(*step.args, **step.shape, out=out.view, lse=lse.view)
    for part, wanted in zip((out, lse), expected, strict=True):
        assert_bit_equal(part.view, wanted)
        part.assert_untouched_around()


def test_no_tokens(backend: Backend) -> None:
    """R24."""
    step = make(backend, Groups([16, 3], [[(0, 4)], []]), torch.float32)
    out, lse = backend.ops.shared_prefix_attention(*step.args, **step.shape)
    assert out.shape == (0, 4, 24) and lse.shape == (4, 0)


def test_no_keys_at_all(backend: Backend) -> None:
    """R03: an empty prefix and a suffix of which nothing is visible."""
    step = make(backend, Groups([0], [[(2, 2)]]), torch.float32)
    mask = torch.zeros(2, dtype=torch.int64, device=backend.device)
    out, lse = backend.ops.shared_prefix_attention(*step.args, **step.shape, tree_mask=mask)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_one_graph(backend: Backend) -> None:
    """torch.compile(fullgraph=True)."""
    if backend.interpreted:
        pytest.skip("slow there, and about the composition alone")
    torch._dynamo.reset()
    step = make(backend, STEPS["groups"], torch.float32)
    expected = backend.ops.shared_prefix_attention(*step.args, **step.shape)
    compiled = torch.compile(
        backend.ops.shared_prefix_attention, fullgraph=True, backend="aot_eager"
    )
    for ours, eager in zip(compiled(*step.args, **step.shape), expected, strict=True):
        assert_bit_equal(ours, eager)


def test_refusals(backend: Backend) -> None:
    step = make(backend, STEPS["groups"], torch.float32)
    call = backend.ops.shared_prefix_attention
    with pytest.raises(NotImplementedError, match="window_left: expected -1, got 7"):
        call(*step.args, **step.shape, window_left=7)
    with pytest.raises(ValueError, match="prefix_cu_seqlens_q: required unless there is one group"):
        call(*step.args, **{**step.shape, "prefix_cu_seqlens_q": None})
    with pytest.raises(NotImplementedError, match="q requires grad"):
        call(step.q.clone().requires_grad_(), *step.args[1:], **step.shape)
    with pytest.raises(ValueError, match="q, v_cache: expected 3 and 4 dimensions"):
        call(step.q[0], *step.args[1:], **step.shape)


def test_queries_in_the_prefix_are_refused(backend: Backend) -> None:
    if not backend.reads_contents and not backend.interpreted:
        pytest.skip("a GPU would have to wait for the lengths")
    step = make(backend, Groups([16], [[(1, 4), (3, 2)]]), torch.float32)
    with pytest.raises(ValueError, match="expected at least the 3 queries of sequence 1, got 2"):
        backend.ops.shared_prefix_attention(*step.args, **step.shape)

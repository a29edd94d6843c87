"""fastinfer.flash_attn: flash-attn's signatures, and its results against the float64 reference."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer import flash_attn
from tests import reference
from tests.conftest import Backend
from tests.helpers import DTYPES, assert_accurate, assert_bit_equal, cumulative, dtype_name

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    f"max_seqlen_k, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "left_only": {"window_size": (3, -1)},
    "causal_window": {"causal": True, "window_size": (4, 9)},
    "scale_and_softcap": {"softmax_scale": 0.3, "softcap": 1.5},
    "softcap_off": {"softcap": -1.0, "window_size": (-7, -7), "deterministic": True},
}


def draw(backend: Backend, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=backend.device).to(dtype)


def translated(options: dict[str, Any]) -> dict[str, Any]:
    """flash-attn's options as the reference's."""
    left, right = options.get("window_size", (-1, -1))
    return {
        "causal": options.get("causal", False),
        "scale": options.get("softmax_scale"),
        "softcap": max(options.get("softcap", 0.0), 0.0),
        "window_left": max(left, -1),
        "window_right": max(right, -1),
    }


def plus_infinity(lse: Tensor) -> Tensor:
    """flash-attn's lse of a query that sees nothing."""
    return torch.where(lse == -math.inf, math.inf, lse)


def check(
    out: Tensor, lse: Tensor | None, attend: Callable[[torch.dtype], tuple[Tensor, Tensor]]
) -> None:
    """Against the reference, `attend` at float64; the baseline is `attend` at out's dtype."""
    exact_out, exact_lse = attend(torch.float64)
    assert_accurate(out, exact_out, attend(out.dtype)[0], what="out")
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        plain = plus_infinity(attend(torch.float32)[1])
        assert_accurate(lse, plus_infinity(exact_lse), plain, what="lse")


# ------------------------------------------------------------------------------------ signatures


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    text = ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters
    )
    assert text == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def calls(backend: Backend) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments of a small call of each function."""
    q, k, v = (draw(backend, torch.float32, 2, 8, 2, 16) for _ in range(3))
    ragged, bounds = [x.flatten(0, 1) for x in (q, k, v)], cumulative([8, 8], backend.device)
    return {
        "flash_attn_func": ([q, k, v], {}),
        "flash_attn_kvpacked_func": ([q, torch.stack([k, v], 2)], {}),
        "flash_attn_qkvpacked_func": ([torch.stack([q, k, v], 2)], {}),
        "flash_attn_varlen_func": ([*ragged, bounds, bounds, 8, 8], {}),
        "flash_attn_varlen_kvpacked_func": (
            [ragged[0], torch.stack(ragged[1:], 1), bounds, bounds, 8, 8],
            {},
        ),
        "flash_attn_varlen_qkvpacked_func": ([torch.stack(ragged, 1), bounds, 8], {}),
        "flash_attn_with_kvcache": ([q, k, v], {}),
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_for_training_is_refused(backend: Backend, name: str) -> None:
    function = getattr(flash_attn, name)
    args, options = calls(backend)[name]
    refused = {"alibi_slopes": torch.ones(2)}
    if name == "flash_attn_with_kvcache":
        refused["cache_leftpad"] = torch.zeros(2, dtype=torch.int32)
    else:
        refused["dropout_p"] = 0.1
    for argument, value in refused.items():
        with pytest.raises(NotImplementedError, match=rf"{name}: {argument}"):
            function(*args, **options, **{argument: value})
    with pytest.raises(NotImplementedError, match=f"{name}: qk?v? requires grad"):
        function(args[0].clone().requires_grad_(), *args[1:], **options)
    with torch.no_grad():
        function(args[0].clone().requires_grad_(), *args[1:], **options)


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_returned(backend: Backend, name: str) -> None:
    function = getattr(flash_attn, name)
    args, options = calls(backend)[name]
    out = function(*args, **options)
    assert isinstance(out, Tensor)
    if name == "flash_attn_with_kvcache":
        more = function(*args, **options, return_softmax_lse=True, num_splits=3)
        assert len(more) == 2
    else:
        more = function(*args, **options, return_attn_probs=True)
        assert len(more) == 3 and more[2].numel() == 0 and more[2].dtype == out.dtype
    assert_bit_equal(more[0], out)
    assert more[1].shape == ((2, 16) if "varlen" in name else (2, 2, 8))


# ---------------------------------------------------------------------------------- without cache


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (5, 30), (12, 4), (1, 17)])
def test_dense(
    backend: Backend, dtype: torch.dtype, option: str, seqlen_q: int, seqlen_k: int
) -> None:
    """More queries than keys leave queries that see nothing when causal: out 0, lse +inf."""
    q = draw(backend, dtype, 2, seqlen_q, 4, 24)
    k, v = (draw(backend, dtype, 2, seqlen_k, 2, 24) for _ in range(2))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **OPTIONS[option], return_attn_probs=True)
    options = translated(OPTIONS[option])
    check(out, lse, lambda dtype: reference.flash_attention(q, k, v, dtype=dtype, **options))
    if seqlen_q > seqlen_k and options["causal"]:
        assert (lse[:, :, : seqlen_q - seqlen_k] == math.inf).all()
        assert (out[:, : seqlen_q - seqlen_k] == 0).all()


@by_dtype
def test_packed(backend: Backend, dtype: torch.dtype) -> None:
    """Packed tensors give what their parts give, bit for bit; ragged ones too."""
    q, k, v = (draw(backend, dtype, 2, 11, 3, 24) for _ in range(3))
    bounds, ragged = cumulative([9, 13], backend.device), [x.flatten(0, 1) for x in (q, k, v)]
    options = {"causal": True, "window_size": (6, 0)}
    expected = flash_attn.flash_attn_func(q, k, v, **options)
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    assert_bit_equal(flash_attn.flash_attn_kvpacked_func(q, kv, **options), expected)
    assert_bit_equal(flash_attn.flash_attn_qkvpacked_func(qkv, **options), expected)
    lengths = (bounds, bounds, 13, 13)
    expected = flash_attn.flash_attn_varlen_func(*ragged, *lengths, **options)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(
        ragged[0], kv.flatten(0, 1), *lengths, **options
    )
    assert_bit_equal(packed, expected)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), bounds, 13, **options)
    assert_bit_equal(packed, expected)


def test_a_last_dimension_that_is_not_dense(backend: Backend) -> None:
    q, k, v = (draw(backend, torch.float32, 2, 5, 16, 2) for _ in range(3))
    dense = [x.transpose(2, 3).contiguous() for x in (q, k, v)]
    expected = flash_attn.flash_attn_func(*dense)
    assert_bit_equal(flash_attn.flash_attn_func(*(x.transpose(2, 3) for x in (q, k, v))), expected)


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
def test_varlen(backend: Backend, dtype: torch.dtype, option: str) -> None:
    counts, lengths = [4, 0, 7, 3], [4, 6, 30, 1]
    bounds = cumulative(counts, backend.device), cumulative(lengths, backend.device)
    q = draw(backend, dtype, sum(counts), 4, 24)
    k, v = (draw(backend, dtype, sum(lengths), 2, 24) for _ in range(2))
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *bounds, 7, 30, **OPTIONS[option], return_attn_probs=True
    )
    options = translated(OPTIONS[option])

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return reference.flash_attention_varlen(q, k, v, *bounds, dtype=dtype, **options)

    check(out, lse, attend)


@by_dtype
@pytest.mark.parametrize("page_size", [8, 24, 256, 1024])
def test_varlen_with_pages(backend: Backend, dtype: torch.dtype, page_size: int) -> None:
    """flash-attn's layout, and pages of any multiple of 8, larger than a block of ours as well."""
    counts, lengths = [4, 1, 7], [4, 300, 30]
    bounds = cumulative(counts, backend.device), cumulative(lengths, backend.device)
    q = draw(backend, dtype, sum(counts), 4, 24)
    k, v = (draw(backend, dtype, sum(lengths), 2, 24) for _ in range(2))
    pages, table = paged([k, v], lengths, page_size, backend.device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, *pages, *bounds, 7, 300, causal=True, return_attn_probs=True, block_table=table
    )

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return reference.flash_attention_varlen(q, k, v, *bounds, dtype=dtype, causal=True)

    check(out, lse, attend)


def paged(
    tensors: list[Tensor], lengths: list[int], page_size: int, device: str
) -> tuple[list[Tensor], Tensor]:
    """Ragged tensors in shuffled pages [blocks, page_size, Hk, D], NaN where nothing is."""
    used = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(used) + 2)
    table = torch.full((len(lengths), max(used) + 1), 10**8, dtype=torch.int32)
    pages = [x.new_full((len(order), page_size, *x.shape[1:]), math.nan) for x in tensors]
    taken, first = 0, 0
    for b, (n, count) in enumerate(zip(lengths, used, strict=True)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        at = torch.arange(n)
        blocks = table[b].long()[at // page_size]
        for page, x in zip(pages, tensors, strict=True):
            page[blocks.to(device), (at % page_size).to(device)] = x[first : first + n]
        first += n
    return pages, table.to(device)


# ------------------------------------------------------------------------------------- with cache


def rotated(x: Tensor, positions: Tensor, tables: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """x [S, H, D] in `dtype`, turned at its positions."""
    cos_sin = torch.cat([tables["rotary_cos"], tables["rotary_sin"]], -1)
    return reference.rotary_embedding_(
        x, None, positions, cos_sin, interleaved=tables["rotary_interleaved"], dtype=dtype
    )[0]


CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "slice_of_a_longer_one": lambda x: torch.cat([x, x[:, :40] * math.nan], 1)[:, : x.shape[1]],
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@by_dtype
@pytest.mark.parametrize("layout", [*CACHES, "different"])
@pytest.mark.parametrize("capacity", [32, 45, 600])
@pytest.mark.parametrize("new", [0, 1, 6])
@pytest.mark.parametrize("rows", ["in_order", "by_index"])
def test_cache(
    backend: Backend, dtype: torch.dtype, layout: str, capacity: int, new: int, rows: str
) -> None:
    """Cached tokens and new ones, which are written; what lies behind the lengths is NaN."""
    lengths, seqlen_q = [capacity - 6, 0, 17], max(new, 1)
    index = [0, 1, 2] if rows == "in_order" else [3, 0, 2]
    q = draw(backend, dtype, 3, seqlen_q, 4, 24)
    k, v = (draw(backend, dtype, 3, new, 2, 24) for _ in range(2))
    caches = [draw(backend, dtype, 4, capacity, 2, 24) for _ in range(2)]
    for b, length in enumerate(lengths):
        for cache in caches:
            cache[index[b], length:] = math.nan
    wanted = [cache.clone() for cache in caches]
    for b, length in enumerate(lengths):
        for cache, x in zip(wanted, (k, v), strict=True):
            cache[index[b], length : length + new] = x[b]
    if layout == "different":
        caches = [caches[0], CACHES["slice_of_a_longer_one"](caches[1])]
    else:
        caches = [CACHES[layout](cache) for cache in caches]
    options: dict[str, Any] = {} if new == 0 else {"k": k, "v": v}
    if rows == "by_index":
        options["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=backend.device)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=backend.device),
        causal=True, return_softmax_lse=True, **options,
    )  # fmt: skip
    for cache, expected in zip(caches, wanted, strict=True):
        assert_bit_equal(cache, expected, "cache")

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        parts = [
            reference.flash_attention(
                q[b : b + 1],
                *(x[index[b], : n + new][None] for x in wanted),
                causal=True,
                dtype=dtype,
            )
            for b, n in enumerate(lengths)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    check(out, lse, attend)


@by_dtype
@pytest.mark.parametrize("page_size", [16, 40, 256, 768])
def test_paged_cache(backend: Backend, dtype: torch.dtype, page_size: int) -> None:
    lengths, new = [19, 5, 300], 2
    q = draw(backend, dtype, 3, new, 4, 24)
    k, v = (draw(backend, dtype, 3, new, 2, 24) for _ in range(2))
    tokens = [draw(backend, dtype, sum(lengths) + 3 * new, 2, 24) for _ in range(2)]
    full = [n + new for n in lengths]
    (k_cache, v_cache), table = paged(tokens, full, page_size, backend.device)
    ends = cumulative(full).tolist()[1:]
    for b, end in enumerate(ends):
        tokens[0][end - new : end], tokens[1][end - new : end] = k[b], v[b]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=backend.device),
        block_table=table, causal=True, window_size=(40, 0), return_softmax_lse=True,
    )  # fmt: skip

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        parts = [
            reference.flash_attention(
                q[b : b + 1],
                *(x[end - full[b] : end][None] for x in tokens),
                causal=True,
                window_left=40,
                dtype=dtype,
            )
            for b, end in enumerate(ends)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    check(out, lse, attend)


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("option", ["default", "causal", "left_only"])
def test_rotary(backend: Backend, dtype: torch.dtype, interleaved: bool, option: str) -> None:
    """Keys turn at their positions; queries too if causal or windowed, else all at the first."""
    lengths, new = [9, 30], 3
    q = draw(backend, dtype, 2, new, 4, 32)
    k, v = (draw(backend, dtype, 2, new, 2, 32) for _ in range(2))
    caches = [draw(backend, dtype, 2, 48, 2, 32) for _ in range(2)]
    cos_sin = reference.rotary_cos_sin(100.0 ** (-torch.arange(8) / 8), 48)
    cos, sin = (x.contiguous().to(backend.device, dtype) for x in cos_sin.chunk(2, -1))
    tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    before, unchanged = [x.clone() for x in caches], [q.clone(), k.clone()]
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, **tables, **OPTIONS[option],
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=backend.device),
    )  # fmt: skip
    assert_bit_equal(q, unchanged[0])
    assert_bit_equal(k, unchanged[1])
    steps = torch.arange(new, device=backend.device)

    def turned_keys(b: int, dtype: torch.dtype) -> Tensor:
        return rotated(k[b], lengths[b] + steps, tables, dtype)

    for b, n in enumerate(lengths):
        written = caches[0][b, n : n + new]
        assert_accurate(written, turned_keys(b, torch.float64), turned_keys(b, dtype), what="k")
        assert_bit_equal(caches[1][b, n : n + new].contiguous(), v[b], "v")

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        parts = []
        for b, n in enumerate(lengths):
            positions = n + (steps if option != "default" else 0 * steps)
            queries = rotated(q[b], positions, tables, dtype)
            keys = torch.cat([before[0][b, :n].to(dtype), turned_keys(b, dtype)])
            values = torch.cat([before[1][b, :n].to(dtype), v[b].to(dtype)])
            parts.append(
                reference.flash_attention(
                    queries[None],
                    keys[None],
                    values[None],
                    dtype=dtype,
                    **translated(OPTIONS[option]),
                )
            )
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    check(out, None, attend)


@pytest.mark.parametrize("length", [None, 0, 7, 24])
def test_one_length_for_all(backend: Backend, length: int | None) -> None:
    """A number, or None for a full cache."""
    q = draw(backend, torch.float32, 2, 2, 4, 24)
    k, v = (draw(backend, torch.float32, 2, 24, 2, 24) for _ in range(2))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=length, return_softmax_lse=True
    )
    used = 24 if length is None else length

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return reference.flash_attention(q, k[:, :used], v[:, :used], dtype=dtype)

    check(out, lse, attend)


@pytest.mark.parametrize(("batch", "seqlen_q", "capacity"), [(0, 2, 16), (2, 0, 16), (2, 3, 0)])
def test_nothing(backend: Backend, batch: int, seqlen_q: int, capacity: int) -> None:
    """R24, R02: no sequences, no queries, no room."""
    q = draw(backend, torch.float32, batch, seqlen_q, 4, 24)
    k, v = (draw(backend, torch.float32, max(batch, 1), capacity, 2, 24) for _ in range(2))
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, 4, seqlen_q)
    if capacity == 0:
        assert (out == 0).all() and (lse == math.inf).all()


def test_bad_caches_are_refused(backend: Backend) -> None:
    q, k, v = (draw(backend, torch.float32, 2, 8, 2, 16) for _ in range(3))
    new = k[:, :1]
    table = torch.zeros(2, 1, dtype=torch.int32, device=backend.device)
    call = flash_attn.flash_attn_with_kvcache
    for options, message in (
        ({"k": new}, "k, v: expected both or neither"),
        ({"k": new, "v": new}, "cache_seqlens: required with k and v"),
        ({"k": new, "v": new, "cache_seqlens": 8}, "cache_seqlens: expected 0 to 7, got 8"),
        ({"cache_seqlens": 9}, "cache_seqlens: expected 0 to 8, got 9"),
        ({"rotary_cos": new}, "rotary_cos, rotary_sin: expected both"),
        ({"rotary_cos": new, "rotary_sin": new}, "rotary_cos: expected k and v as well"),
        (
            {"block_table": table, "cache_batch_idx": table[:, 0]},
            "cache_batch_idx: expected None with block_table",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call(q, k, v, **options)
    with pytest.raises(ValueError, match="k_cache: expected at least 2 rows, got 1"):
        call(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="v_cache: expected"):
        call(q, k, v[:, :4])
    with pytest.raises(ValueError, match="expected pages of a multiple of 8 tokens, got 5"):
        call(q, k[:, :5], v[:, :5], block_table=table.expand(2, 2))


def test_one_graph(backend: Backend) -> None:
    """torch.compile(fullgraph=True), the cache written in place."""
    torch._dynamo.reset()
    q, k, v = (draw(backend, torch.float32, 2, 1, 2, 16) for _ in range(3))
    caches = [draw(backend, torch.float32, 2, 600, 2, 16) for _ in range(2)]
    lengths = torch.tensor([3, 40], dtype=torch.int32, device=backend.device)
    results = []
    for call in (
        flash_attn.flash_attn_with_kvcache,
        torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"),
    ):
        own = [cache.clone() for cache in caches]
        results.append([call(q, *own, k, v, cache_seqlens=lengths, causal=True), *own])
    for compiled, eager in zip(*results, strict=True):
        assert_bit_equal(compiled, eager)

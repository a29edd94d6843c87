"""qk_norm_rope_append_ against the reference, and bit for bit against the ops that it fuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    assert_accurate,
    assert_bit_equal,
    bits,
    column_slice,
    dtype_name,
    far_apart,
    guarded,
    misaligned,
    swapped,
)
from tests.ops.test_kv_cache import pool, scale_pool, slots

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
INT8, FP8 = torch.int8, torch.float8_e4m3fn
POSITIONS = 50


@dataclass(frozen=True)
class Model:
    """What a model's attention does between its projection and the pages."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    bias: bool = False
    norm: bool = False
    float_weight: bool = False
    weight_offset: float = 0.0
    rotary_dim: int = 64
    interleaved: bool = False


MODELS = {
    "llama": Model(),
    "qwen2": Model(heads=7, kv_heads=1, bias=True),
    "qwen3": Model(dim=128, value_dim=128, rotary_dim=128, norm=True),
    "gemma3": Model(dim=256, value_dim=256, rotary_dim=256, norm=True, weight_offset=1.0),
    "phi3": Model(heads=3, kv_heads=3, dim=96, value_dim=96, rotary_dim=48),
    "gpt2": Model(kv_heads=4, bias=True, rotary_dim=0),
    "gptj": Model(kv_heads=4, rotary_dim=32, interleaved=True),
    "all": Model(value_dim=96, bias=True, norm=True, float_weight=True, rotary_dim=32),
}
by_model = pytest.mark.parametrize("model", MODELS)


@dataclass
class Call:
    """The arguments of one call."""

    qkv: Tensor
    q_out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.qkv, self.q_out, self.k_cache, self.v_cache, self.slot_mapping)

    @property
    def results(self) -> dict[str, Tensor | None]:
        """What the op writes, by name."""
        scales = {name: self.options.get(name) for name in ("k_scale", "v_scale")}
        return {
            "q_out": self.q_out, "k_cache": self.k_cache, "v_cache": self.v_cache, **scales
        }  # fmt: skip

    def copied(self) -> Call:
        options = {n: x.clone() if isinstance(x, Tensor) else x for n, x in self.options.items()}
        return Call(*(x.clone() for x in self.tensors), options)

    def run(self, backend: Backend) -> Call:
        assert backend.ops.qk_norm_rope_append_(*self.tensors, **self.options) is None
        return self

    def run_in_turn(self, backend: Backend) -> Call:
        """The ops that this one fuses, one after the other."""
        ops, options = backend.ops, self.options
        heads, dim = self.q_out.shape[1:]
        kv_heads, value_dim = self.v_cache.shape[1], self.v_cache.shape[3]
        qkv = self.qkv if options["bias"] is None else self.qkv + options["bias"]
        sizes = (heads * dim, kv_heads * dim, kv_heads * value_dim)
        q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(
            qkv.split(sizes, dim=1), (heads, kv_heads, kv_heads), strict=True))  # fmt: skip
        norm = {"eps": options["eps"], "weight_offset": options["weight_offset"]}
        if options["q_weight"] is not None:
            q = ops.rms_norm(q, options["q_weight"], **norm)
        if options["k_weight"] is not None:
            k = ops.rms_norm(k, options["k_weight"], **norm)
        self.q_out.copy_(q)
        k = k.clone()
        if options["positions"] is not None:
            ops.rotary_embedding_(
                self.q_out, k, options["positions"], options["cos_sin"],
                interleaved=options["interleaved"],
            )  # fmt: skip
        scales = {n: options[n] for n in ("k_scale", "v_scale")}
        ops.append_paged_kv_cache_(k, v, self.k_cache, self.v_cache, self.slot_mapping, **scales)
        return self


def make(
    backend: Backend,
    model: Model,
    dtype: torch.dtype,
    *,
    count: int = 9,
    skipped: int = 2,
    k_storage: torch.dtype | None = None,
    v_storage: torch.dtype | None = None,
    static: bool = False,
    block_size: int = 16,
) -> Call:
    device, m = backend.device, model
    columns = m.heads * m.dim + m.kv_heads * (m.dim + m.value_dim)
    blocks = -(-count // block_size) + 2
    weight = torch.float32 if m.float_weight else dtype
    rope = m.rotary_dim > 0
    inv_freq = 1e4 ** (-torch.arange(0, m.rotary_dim, 2) / max(1, m.rotary_dim))

    def random(size: int, dtype: torch.dtype, wanted: bool = True) -> Tensor | None:
        return torch.randn(size, device=device).to(dtype) if wanted else None

    options: dict[str, Any] = {
        "positions": torch.randint(POSITIONS, (count,), device=device) if rope else None,
        "cos_sin": reference.rotary_cos_sin(inv_freq, POSITIONS).to(device) if rope else None,
        "bias": random(columns, dtype, m.bias),
        "q_weight": random(m.dim, weight, m.norm),
        "k_weight": random(m.dim, weight, m.norm),
        "eps": 1e-5,
        "weight_offset": m.weight_offset,
        "interleaved": m.interleaved,
        "k_scale": None,
        "v_scale": None,
    }
    caches = []
    storages = (("k_scale", k_storage, m.dim), ("v_scale", v_storage, m.value_dim))
    for name, storage, dim in storages:
        caches.append(pool(blocks, m.kv_heads, block_size, dim, storage or dtype, device=device))
        if storage is not None:
            options[name] = scale_pool(blocks, m.kv_heads, block_size, static, device)
    return Call(
        torch.randn(count, columns, device=device).to(dtype),
        torch.full((count, m.heads, m.dim), -77.0, device=device).to(dtype),
        *caches,
        slots(count, blocks * block_size, device, skipped=min(skipped, count)),
        options,
    )


def assert_same(ours: Call, wanted: Call) -> None:
    for name, expected in wanted.results.items():
        if expected is not None:
            assert_bit_equal(ours.results[name].contiguous(), expected.contiguous(), name)


def fused_by_the_same_kernels(backend: Backend, call: Call) -> bool:
    """Whether the ops in turn order their sums alike.

    The hand-written kernel takes vectors of 16 bytes, up to a warp of them. What it leaves to the
    portable one is normalised in that kernel's order, while `rms_norm` is a hand-written one.
    """
    if backend.name != "cuda" or call.options["q_weight"] is None:
        return True
    size = call.qkv.element_size()
    dims = (call.k_cache.shape[3], call.v_cache.shape[3])
    return all(d * size % 16 == 0 and d * size <= 512 for d in dims)


@by_dtype
@by_model
@pytest.mark.parametrize("storage", [None, INT8, FP8], ids=str)
def test_bit_equal_to_the_ops_in_turn(
    backend: Backend, dtype: torch.dtype, model: str, storage: torch.dtype | None
) -> None:
    call = make(backend, MODELS[model], dtype, k_storage=storage, v_storage=storage)
    if not fused_by_the_same_kernels(backend, call):
        pytest.skip("see test_accurate")
    wanted = call.copied().run_in_turn(backend)
    assert_same(call.run(backend), wanted)


@by_dtype
@by_model
def test_accurate(backend: Backend, dtype: torch.dtype, model: str) -> None:
    call = make(backend, MODELS[model], dtype)
    cpu = [x.cpu() for x in call.tensors]
    options = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in call.options.items()}
    expected = reference.qk_norm_rope_append_(*cpu, **options)
    baseline = reference.qk_norm_rope_append_(*cpu, **options, dtype=dtype)
    call.run(backend)
    for (name, ours), exact, plain in zip(call.results.items(), expected, baseline, strict=True):
        if ours is not None and exact is not None and plain is not None:
            assert_accurate(ours.cpu(), exact, plain, what=name)


@by_dtype
@pytest.mark.parametrize(
    ("k_storage", "v_storage", "static"),
    [(INT8, FP8, False), (FP8, INT8, True), (INT8, None, False), (None, FP8, True)],
)
def test_k_and_v_are_stored_independently(
    backend: Backend,
    dtype: torch.dtype,
    k_storage: torch.dtype | None,
    v_storage: torch.dtype | None,
    static: bool,
) -> None:
    call = make(
        backend, MODELS["qwen3"], dtype, k_storage=k_storage, v_storage=v_storage, static=static
    )
    wanted = call.copied().run_in_turn(backend)
    assert_same(call.run(backend), wanted)


@by_dtype
@pytest.mark.parametrize(
    ("dim", "value_dim", "rotary_dim"),
    [(1, 1, 0), (2, 5, 2), (7, 33, 6), (40, 40, 20), (80, 72, 80), (192, 128, 64), (512, 512, 512)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_sizes(
    backend: Backend,
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    model = Model(3, 1, dim, value_dim, bias=True, rotary_dim=rotary_dim, interleaved=interleaved)
    call = make(backend, model, dtype, k_storage=INT8, block_size=8)
    wanted = call.copied().run_in_turn(backend)
    assert_same(call.run(backend), wanted)


@pytest.mark.parametrize(("q_norm", "k_norm"), [(True, False), (False, True)])
def test_one_norm_alone(backend: Backend, q_norm: bool, k_norm: bool) -> None:
    call = make(backend, MODELS["qwen3"], torch.bfloat16)
    for name, wanted in (("q_weight", q_norm), ("k_weight", k_norm)):
        if not wanted:
            call.options[name] = None
    expected = call.copied().run_in_turn(backend)
    assert_same(call.run(backend), expected)


@by_dtype
@pytest.mark.parametrize("layout", [column_slice, misaligned, swapped])
def test_strided_equals_contiguous(backend: Backend, dtype: torch.dtype, layout: Any) -> None:
    call = make(backend, MODELS["llama"], dtype, k_storage=INT8)
    wanted = call.copied().run(backend)
    strided = call.copied()
    strided.qkv = layout(call.qkv) if layout is not swapped else column_slice(call.qkv)
    strided.q_out = layout(call.q_out)
    strided.v_cache = swapped(call.v_cache, 1, 2)  # NHD pages
    strided.options["k_scale"] = swapped(call.options["k_scale"])
    strided.options["cos_sin"] = column_slice(call.options["cos_sin"])
    assert_same(strided.run(backend), wanted)


@by_dtype
@by_model
def test_queries_over_their_own_columns(backend: Backend, dtype: torch.dtype, model: str) -> None:
    """q_out is a view of qkv; keys and values of qkv stay as they are."""
    call = make(backend, MODELS[model], dtype, count=40)
    wanted = call.copied().run(backend)
    heads, dim = call.q_out.shape[1:]
    rest = call.qkv[:, heads * dim :].clone()
    call.q_out = call.qkv[:, : heads * dim].unflatten(1, (heads, dim))
    assert_same(call.run(backend), wanted)
    assert_bit_equal(call.qkv[:, heads * dim :].clone(), rest)


@by_dtype
def test_writes_only_its_views(backend: Backend, dtype: torch.dtype) -> None:
    call = make(backend, MODELS["all"], dtype)
    wanted = call.copied().run(backend)
    out = guarded(tuple(call.q_out.shape), dtype, backend.device)
    before = call.qkv.clone()
    replace(call, q_out=out.view).run(backend)
    out.assert_untouched_around()
    assert_bit_equal(call.qkv, before)
    if fused_by_the_same_kernels(backend, call) and backend.name != "cuda":
        assert_bit_equal(out.view.clone(), wanted.q_out)


@pytest.mark.parametrize("storage", [None, INT8], ids=str)
def test_skipped_tokens_have_queries_and_no_slots(
    backend: Backend, storage: torch.dtype | None
) -> None:
    call = make(backend, MODELS["qwen3"], torch.float32, k_storage=storage, v_storage=storage)
    wanted = call.copied().run(backend)
    before = call.copied()
    call.slot_mapping = torch.tensor([-1, -(2**63), -5, -8, -1, -2, -3, -4, -9]).to(backend.device)
    call.run(backend)
    assert_bit_equal(call.q_out, wanted.q_out)
    call.q_out = before.q_out
    assert_same(call, before)


@pytest.mark.parametrize("storage", [None, FP8], ids=str)
def test_zero_tokens(backend: Backend, storage: torch.dtype | None) -> None:
    call = make(backend, MODELS["all"], torch.float32, count=0, k_storage=storage)
    before = call.copied()
    assert_same(call.run(backend), before)


@by_dtype
def test_tokens_do_not_see_each_other(backend: Backend, dtype: torch.dtype) -> None:
    """R31: a token alone, and beside one full of NaN, gives the same bits."""
    call = make(backend, MODELS["qwen3"], dtype, skipped=0, k_storage=INT8)
    wanted = call.copied().run(backend)
    call.qkv[3] = math.nan
    call.run(backend)
    others = [t for t in range(9) if t != 3]
    assert call.q_out[3].isnan().all()
    assert_bit_equal(call.q_out[others], wanted.q_out[others])
    alone = make(backend, MODELS["qwen3"], dtype, k_storage=INT8)
    options = {**call.options, "positions": call.options["positions"][5:6]}
    options["k_scale"] = alone.options["k_scale"]
    one = Call(
        call.qkv[5:6], alone.q_out[:1], alone.k_cache, alone.v_cache, call.slot_mapping[5:6],
        options,
    ).run(backend)  # fmt: skip
    assert_bit_equal(one.q_out.clone(), wanted.q_out[5:6].clone())
    slot = int(call.slot_mapping[5])
    at = (slot // 16, slice(None), slot % 16)
    assert_bit_equal(one.k_cache[at].clone(), wanted.k_cache[at].clone())
    assert_bit_equal(one.options["k_scale"][at].clone(), wanted.options["k_scale"][at].clone())


def test_offsets_beyond_32_bits(backend: Backend) -> None:
    """R04, R05: rows of qkv and of q_out that lie 2^30 elements apart."""
    call = make(backend, MODELS["llama"], torch.bfloat16, count=3, skipped=0)
    wanted = call.copied().run(backend)
    far = call.copied()
    far.qkv = far_apart(call.qkv, 2**30 + 8)
    far.q_out = far_apart(call.q_out, 2**30 + 16)
    far.run(backend)
    far.q_out = far.q_out.clone()
    assert_same(far, wanted)


def test_only_the_rows_of_its_positions_are_read(backend: Backend) -> None:
    call = make(backend, MODELS["llama"], torch.float32)
    wanted = call.copied().run(backend)
    unused = torch.ones(POSITIONS, dtype=torch.bool)
    unused[call.options["positions"].cpu()] = False
    call.options["cos_sin"][unused.to(backend.device)] = math.nan
    assert_same(call.run(backend), wanted)


@pytest.mark.parametrize("bad", [-1, POSITIONS, 2**40])
def test_position_outside_the_table(backend: Backend, bad: int) -> None:
    """Refused where it is read, before anything is written; else the token becomes NaN."""
    call = make(backend, MODELS["llama"], torch.float32, skipped=0)
    call.options["positions"][2] = bad
    before = call.copied()
    if backend.reads_contents:
        with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*positions"):
            call.run(backend)
        assert_same(call, before)
        return
    call.run(backend)
    assert call.q_out[2].isnan().all() and not call.q_out[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("bad", [3 * 16, 2**40])
def test_slot_past_the_pool(backend: Backend, bad: int) -> None:
    """Refused where it is read, before anything is written; else the token is not appended."""
    call = make(backend, MODELS["llama"], torch.float32, skipped=0)
    wanted = call.copied()
    wanted.slot_mapping[2] = -1
    call.slot_mapping[2] = bad
    before = call.copied()
    if backend.reads_contents:
        with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*slot_mapping"):
            call.run(backend)
        assert_same(call, before)
        return
    assert_same(call.run(backend), wanted.run(backend))


@pytest.mark.parametrize("name", ["positions", "cos_sin"])
def test_positions_and_table_come_together(backend: Backend, name: str) -> None:
    call = make(backend, MODELS["llama"], torch.float32)
    call.options[name] = None
    with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*positions, cos_sin"):
        call.run(backend)


@pytest.mark.parametrize("shift", [0, 1])
def test_queries_over_other_columns_are_refused(backend: Backend, shift: int) -> None:
    """Columns from the next head on, or heads that overlap each other."""
    call = make(backend, MODELS["llama"], torch.float32, count=1)
    flat = call.qkv.flatten()
    heads = flat[64 : 64 + 256].view(1, 4, 64)
    call.q_out = heads if shift else flat.as_strided((1, 4, 64), (512, 32, 1))
    with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*q_out.*overlap"):
        call.run(backend)


def test_rotary_size_odd_or_beyond_the_head_is_refused(backend: Backend) -> None:
    call = make(backend, MODELS["llama"], torch.float32)
    for columns in (63, 66):
        call.options["cos_sin"] = torch.zeros(POSITIONS, columns, device=backend.device)
        with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*cos_sin"):
            call.run(backend)


@pytest.mark.parametrize("columns", [511, 513])
def test_columns_that_do_not_fit_the_heads_are_refused(backend: Backend, columns: int) -> None:
    call = make(backend, MODELS["llama"], torch.float32)
    before = bits(call.k_cache).clone()
    call.qkv = torch.zeros(9, columns, device=backend.device)
    with pytest.raises(ValueError, match=r"qk_norm_rope_append_.*qkv.*512 columns"):
        call.run(backend)
    assert torch.equal(bits(call.k_cache), before)

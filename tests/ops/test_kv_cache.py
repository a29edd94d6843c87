"""append_paged_kv_cache_ against the reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    assert_bit_equal,
    bits,
    column_slice,
    dtype_name,
    far_pool,
    misaligned,
    swapped,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
INT8, FP8 = torch.int8, torch.float8_e4m3fn
QUANTIZED = pytest.mark.parametrize("storage", [INT8, FP8], ids=dtype_name)
CANARY = 85  # a byte


def pool(
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    dim: int,
    storage: torch.dtype,
    *,
    layout: str = "HND",
    device: str = "cpu",
) -> Tensor:
    """A cache in which every byte is the canary."""
    shape = (num_blocks, kv_heads, block_size, dim * storage.itemsize)
    if layout == "NHD":
        shape = (num_blocks, block_size, kv_heads, shape[-1])
    cache = torch.full(shape, CANARY, dtype=torch.uint8, device=device).view(storage)
    return cache.transpose(1, 2) if layout == "NHD" else cache


def scale_pool(
    num_blocks: int, kv_heads: int, block_size: int, static: bool, device: str = "cpu"
) -> Tensor:
    if static:
        return torch.rand(kv_heads, device=device) * 0.02 + 0.01
    return torch.full((num_blocks, kv_heads, block_size), -77.0, device=device)


def tokens(
    count: int, dtype: torch.dtype, device: str, *, kv_heads: int = 2, dim: int = 24,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k = torch.randn(count, kv_heads, dim, device=device).to(dtype)
    v = torch.randn(count, kv_heads, value_dim or dim, device=device).to(dtype)
    return k, v


def slots(count: int, capacity: int, device: str, skipped: int = 0) -> Tensor:
    """Distinct random slots, some of them replaced by -1."""
    mapping = torch.randperm(capacity)[:count]
    mapping[torch.randperm(count)[:skipped]] = -1
    return mapping.to(device)


def append_and_check(
    backend: Backend,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    **scales: Tensor,
) -> None:
    """The caches and scales hold, bit for bit and in every slot, what the reference says."""
    arguments = (k, v, k_cache, v_cache, slot_mapping)
    expected = reference.append_paged_kv_cache_(
        *(x.cpu() for x in arguments), **{name: x.cpu() for name, x in scales.items()}
    )
    result = backend.ops.append_paged_kv_cache_(k, v, k_cache, v_cache, slot_mapping, **scales)
    assert result is None
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    actual = (k_cache, v_cache, scales.get("k_scale"), scales.get("v_scale"))
    for name, ours, wanted in zip(names, actual, expected, strict=True):
        if ours is not None and wanted is not None:
            assert_bit_equal(ours.cpu().contiguous(), wanted.contiguous(), name)


@by_dtype
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(1, 1), (7, 33), (40, 40), (64, 64), (72, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
)  # fmt: skip
@pytest.mark.parametrize("block_size", [8, 24, 512])
def test_sizes(
    backend: Backend, dtype: torch.dtype, dim: int, value_dim: int, block_size: int
) -> None:
    k, v = tokens(9, dtype, backend.device, dim=dim, value_dim=value_dim)
    caches = [pool(3, 2, block_size, d, dtype, device=backend.device) for d in (dim, value_dim)]
    append_and_check(backend, k, v, *caches, slots(9, 3 * block_size, backend.device, skipped=2))


@by_dtype
@QUANTIZED
@pytest.mark.parametrize("static", [False, True], ids=["per_token", "static"])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(1, 1), (7, 33), (40, 40), (64, 96), (128, 128), (256, 192)]
)
def test_quantized_pages(
    backend: Backend,
    dtype: torch.dtype,
    storage: torch.dtype,
    static: bool,
    dim: int,
    value_dim: int,
) -> None:
    k, v = tokens(11, dtype, backend.device, dim=dim, value_dim=value_dim)
    caches = [pool(3, 2, 16, d, storage, device=backend.device) for d in (dim, value_dim)]
    scales = {name: scale_pool(3, 2, 16, static, backend.device) for name in ("k_scale", "v_scale")}
    before = {name: scale.clone() for name, scale in scales.items()}
    append_and_check(backend, k * 2, v, *caches, slots(11, 48, backend.device, skipped=3), **scales)
    if static:
        for name, scale in scales.items():
            assert_bit_equal(scale, before[name], name)


@by_dtype
@pytest.mark.parametrize(
    ("k_storage", "v_storage"), [(INT8, FP8), (FP8, INT8), (INT8, None), (None, FP8)]
)
def test_k_and_v_are_stored_independently(
    backend: Backend,
    dtype: torch.dtype,
    k_storage: torch.dtype | None,
    v_storage: torch.dtype | None,
) -> None:
    k, v = tokens(6, dtype, backend.device)
    caches = [pool(2, 2, 16, 24, s or dtype, device=backend.device) for s in (k_storage, v_storage)]
    scales = {}
    if k_storage:
        scales["k_scale"] = scale_pool(2, 2, 16, False, backend.device)
    if v_storage:
        scales["v_scale"] = scale_pool(2, 2, 16, v_storage == FP8, backend.device)
    append_and_check(backend, k, v, *caches, slots(6, 32, backend.device), **scales)


@by_dtype
@QUANTIZED
def test_quantization_error_is_half_a_step(
    backend: Backend, dtype: torch.dtype, storage: torch.dtype
) -> None:
    """What is read back differs from what was written by at most half a step of the storage."""
    k, v = tokens(64, dtype, backend.device, dim=80)
    caches = [pool(4, 2, 16, 80, storage, device=backend.device) for _ in range(2)]
    scales = {name: scale_pool(4, 2, 16, False, backend.device) for name in ("k_scale", "v_scale")}
    mapping = torch.arange(64, device=backend.device)
    backend.ops.append_paged_kv_cache_(k, v, *caches, mapping, **scales)
    for x, cache, scale in zip((k, v), caches, scales.values(), strict=True):
        x = x.cpu()
        read = reference.read_pages(cache.cpu(), scale.cpu(), torch.arange(4), 64, torch.float64)
        error = (read - x.double()).abs()
        amax = x.double().abs().amax(-1, keepdim=True)
        if storage == INT8:
            assert (error <= amax / 127 * 0.5001).all()
        else:  # three mantissa bits; below 2^-6 the steps of subnormals are 2^-9
            assert (
                error <= torch.maximum(x.double().abs() / 16, amax / 448 * 2**-10) * 1.0001
            ).all()


@QUANTIZED
def test_zero_rows_get_scale_one(backend: Backend, storage: torch.dtype) -> None:
    """R34: zero rows give zero, with a finite scale."""
    device = backend.device
    k, v = (torch.zeros(3, 2, 24, device=device) for _ in range(2))
    v[1, 1, 3] = -0.0
    caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
    scales = {name: scale_pool(1, 2, 8, False, device) for name in ("k_scale", "v_scale")}
    mapping = torch.tensor([0, 1, 2], device=device)
    backend.ops.append_paged_kv_cache_(k, v, *caches, mapping, **scales)
    for cache, scale in zip(caches, scales.values(), strict=True):
        assert (scale[0, :, :3] == 1).all()
        assert (cache[0, :, :3].float() == 0).all()


@QUANTIZED
@pytest.mark.parametrize("largest", [448.0, 449.0, 480.0, 1e30, 3e38])
@pytest.mark.parametrize("static", [False, True], ids=["per_token", "static"])
def test_large_values_saturate(
    backend: Backend, storage: torch.dtype, largest: float, static: bool
) -> None:
    """R34: nothing beyond 448 (or 127) turns into NaN or wraps around."""
    device = backend.device
    k, v = tokens(2, torch.float32, device)
    k[0, 0, 5], v[1, 1, 7] = largest, -largest
    caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
    scales = {name: scale_pool(1, 2, 8, static, device) for name in ("k_scale", "v_scale")}
    if static:
        for scale in scales.values():
            scale.fill_(1.0)
    append_and_check(backend, k, v, *caches, torch.tensor([3, 4], device=device), **scales)
    limit = 127.0 if storage == INT8 else 448.0
    assert caches[0][0, 0, 3, 5].float() == limit and caches[1][0, 1, 4, 7].float() == -limit


@QUANTIZED
def test_infinity_saturates_under_a_static_scale(backend: Backend, storage: torch.dtype) -> None:
    """R34."""
    device = backend.device
    k, v = tokens(2, torch.float32, device)
    k[0, 0, 5], v[1, 1, 7] = math.inf, -math.inf
    caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
    scales = {name: scale_pool(1, 2, 8, True, device) for name in ("k_scale", "v_scale")}
    append_and_check(backend, k, v, *caches, torch.tensor([3, 4], device=device), **scales)
    limit = 127.0 if storage == INT8 else 448.0
    assert caches[0][0, 0, 3, 5].float() == limit and caches[1][0, 1, 4, 7].float() == -limit


@pytest.mark.parametrize("source", [*HALF_DTYPES, torch.float32], ids=dtype_name)
def test_fp8_codes_of_every_value(backend: Backend, source: torch.dtype) -> None:
    """R19, R34: all 65536 bf16 and fp16 values, and as many float32 ones around codes and their
    midpoints, get the code that torch's conversion gives the clamped value.
    """
    if source == torch.float32:
        codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        edges = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
        near = edges.view(torch.int32)[:, None] + torch.arange(-16, 17)
        near = near.clamp(min=0).int().view(torch.float32).flatten()
        random = torch.randint(-(2**31), 2**31, (2**16 - 2 * near.numel(),)).int()
        values = torch.cat([near, -near, random.view(torch.float32)])
    else:
        values = torch.arange(-(2**15), 2**15).short().view(source)
    count = 128
    k = values.view(count, 1, 512).to(backend.device)
    caches = [pool(16, 1, 8, 512, FP8, device=backend.device) for _ in range(2)]
    scales = [torch.ones(1, device=backend.device) for _ in range(2)]
    backend.ops.append_paged_kv_cache_(
        k, -k, *caches, torch.arange(count, device=backend.device),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    for x, cache in ((values, caches[0]), (-values, caches[1])):
        expected = x.float().clamp(-448, 448).to(FP8)
        stored = cache.cpu().transpose(1, 2).flatten()
        nan = x.isnan()
        assert stored.float()[nan].isnan().all()
        assert_bit_equal(stored.view(torch.int8)[~nan], expected.view(torch.int8)[~nan])


UNUSUAL_SCALES = [0.0, math.inf, math.nan, -0.5, 1e-40, 1e38, 2.0**-80, 2.0**-126]
# Next to -50.5, -42.5, -99.5 and 2^-8 + 2^-10 times these, the last of the multiplications decides.
HARD_SCALES = [0.01806640811264515, 0.01025390438735485, 0.010375973768532276, 0.023437494412064552]


@QUANTIZED
@pytest.mark.parametrize("kind", ["common", "wide", "last_mantissas", "unusual"])
def test_quotients_are_rounded_like_ieee_division(
    backend: Backend, storage: torch.dtype, kind: str
) -> None:
    """Elements within 4 ulp of what lies between two codes, under static scales: kernels that
    multiply by a reciprocal must give the codes of a division.
    """
    heads = 16
    scale = {
        "common": torch.cat([torch.tensor(HARD_SCALES), torch.rand(heads - 4) * 0.02 + 0.01]),
        "wide": torch.exp2(torch.rand(heads) * 240 - 120),
        "last_mantissas": (torch.randint(0x7FFF00, 0x800000, (heads,)) | 0x3C000000)
        .int()
        .view(torch.float32),
        "unusual": torch.tensor(UNUSUAL_SCALES).repeat_interleave(heads // len(UNUSUAL_SCALES)),
    }[kind]
    if storage == INT8:
        middles = torch.arange(-128, 128) + 0.5
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        middles = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.zeros(2)])
    exact = (scale.double()[:, None] * middles.double()).float()
    near = exact.view(torch.int32) + torch.arange(-4, 5)[:, None, None]
    x = near.int().view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0).contiguous()
    slots = torch.arange(len(x))
    caches = [pool(2, heads, 8, len(middles), storage) for _ in range(2)]
    expected = reference.append_paged_kv_cache_(x, -x, *caches, slots, k_scale=scale, v_scale=scale)
    device = backend.device
    stored = [cache.to(device) for cache in caches]
    on_device = scale.to(device)
    backend.ops.append_paged_kv_cache_(
        x.to(device), -x.to(device), *stored, slots.to(device),
        k_scale=on_device, v_scale=on_device,
    )  # fmt: skip
    for got, want in zip(stored, expected[:2], strict=True):
        nan = want.float().isnan()
        assert got.cpu().float()[nan].isnan().all()
        assert_bit_equal(got.cpu().view(torch.int8)[~nan], want.view(torch.int8)[~nan])


@QUANTIZED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_visible_under_scales_per_token(
    backend: Backend, storage: torch.dtype, bad: float
) -> None:
    """R34: the element reads back as no finite number; other rows are as they would be."""
    device = backend.device
    k, v = tokens(3, torch.float32, device)
    clean = k.clone(), v.clone()
    k[1, 0, 5], v[2, 1, 0] = bad, bad
    results = []
    for pair in ((k, v), clean):
        caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
        scales = [scale_pool(1, 2, 8, False, device) for _ in range(2)]
        backend.ops.append_paged_kv_cache_(
            *pair,
            *caches,
            torch.tensor([0, 1, 2], device=device),
            k_scale=scales[0],
            v_scale=scales[1],
        )
        results.append(
            [
                reference.read_pages(c.cpu(), s.cpu(), torch.zeros(1), 3, torch.float64)
                for c, s in zip(caches, scales, strict=True)
            ]
        )
    for ours, wanted, (token, head, element) in zip(*results, ((1, 0, 5), (2, 1, 0)), strict=True):
        assert not ours[token, head, element].isfinite()
        rest = torch.ones(3, 2, dtype=torch.bool)
        rest[token, head] = False
        assert torch.equal(ours[rest], wanted[rest])


@QUANTIZED
@pytest.mark.parametrize("amax", [1e-45, 1e-43, 1e-40, 1e-38, 1e-36])
def test_denormal_rows_stay_finite(backend: Backend, storage: torch.dtype, amax: float) -> None:
    """R34: amax / 127 may be denormal or 0; what is read back is finite and no larger than amax."""
    device = backend.device
    k = torch.rand(2, 2, 24, device=device) * amax
    k[..., 3], k[..., 4] = amax, 0.0
    caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
    scales = [scale_pool(1, 2, 8, False, device) for _ in range(2)]
    backend.ops.append_paged_kv_cache_(
        k, -k, *caches, torch.tensor([0, 1], device=device), k_scale=scales[0], v_scale=scales[1]
    )
    for cache, scale in zip(caches, scales, strict=True):
        assert scale[0, :, :2].isfinite().all() and (scale[0, :, :2] >= 0).all()
        assert cache[0, :, :2].float().isfinite().all()
        read = reference.read_pages(cache.cpu(), scale.cpu(), torch.zeros(1), 2, torch.float64)
        assert (read.abs() <= k.cpu().double().amax() * 1.5).all() and (read[..., 4] == 0).all()


@by_dtype
@pytest.mark.parametrize("storage", [None, INT8, FP8], ids=str)
def test_nhd_pages_and_strided_tokens_equal_contiguous(
    backend: Backend, dtype: torch.dtype, storage: torch.dtype | None
) -> None:
    """R08: k and v from a fused projection, pages as a transposed view."""
    device = backend.device
    fused = torch.randn(9, (4 + 2 + 2) * 24, device=device).to(dtype)
    _, k, v = fused.view(9, 8, 24).split([4, 2, 2], 1)
    mapping = slots(9, 48, device, skipped=1)
    for make in (lambda x: x, column_slice, misaligned, swapped):
        caches = [
            pool(3, 2, 16, 24, storage or dtype, layout="NHD", device=device) for _ in range(2)
        ]
        scales = {}
        if storage:
            scales = {
                n: swapped(scale_pool(3, 2, 16, False, device)) for n in ("k_scale", "v_scale")
            }
        append_and_check(backend, make(k), make(v), *caches, mapping, **scales)


@by_dtype
def test_halves_of_one_pool(backend: Backend, dtype: torch.dtype) -> None:
    """R32: k_cache and v_cache are kv[0] and kv[1], or interleaved in each page."""
    device = backend.device
    k, v = tokens(7, dtype, device)
    mapping = slots(7, 48, device)
    for select in (
        lambda kv: (kv[0], kv[1]),
        lambda kv: (kv.transpose(0, 1)[:, 0], kv.transpose(0, 1)[:, 1]),
    ):
        kv = pool(6, 2, 16, 24, dtype, device=device).view(2, 3, 2, 16, 24)
        append_and_check(backend, k, v, *select(kv), mapping)
        touched = (bits(kv) != bits(pool(1, 1, 1, 1, dtype, device=device).flatten()[:1])).any(-1)
        assert touched.sum() <= 2 * 7 * 2


@by_dtype
def test_only_its_slots_are_written(backend: Backend, dtype: torch.dtype) -> None:
    """Canaries between the views' elements: caches narrower than the memory they lie in."""
    device = backend.device
    k, v = tokens(7, dtype, device)
    storages = [pool(3, 2, 16, 24 + 8, dtype, device=device) for _ in range(2)]
    before = [bits(storage).clone() for storage in storages]
    append_and_check(backend, k, v, *(x[..., 3:27] for x in storages), slots(7, 48, device))
    for storage, old in zip(storages, before, strict=True):
        changed = bits(storage) != old
        assert not changed[..., :3].any() and not changed[..., 27:].any()


@pytest.mark.parametrize("storage", [torch.bfloat16, INT8, FP8], ids=dtype_name)
@pytest.mark.parametrize("stride", [1_039_680, 2**28])
def test_last_pages_of_a_large_pool(backend: Backend, storage: torch.dtype, stride: int) -> None:
    """R04, R05: writes, and writes of scales, past 2^31 elements equal those into page 0."""
    device = backend.device
    k, v = tokens(5, torch.bfloat16, device)
    first = 2**31 // stride + 1
    near = [pool(2, 2, 16, 24, storage, device=device) for _ in range(2)]
    far = [far_pool((first + 2, 2, 16, 24), stride, storage, device) for _ in range(2)]
    mapping = torch.tensor([3, 31, 16, 0, 8], device=device)
    near_scales: dict[str, Tensor] = {}
    far_scales: dict[str, Tensor] = {}
    if storage != torch.bfloat16:
        for name in ("k_scale", "v_scale"):
            near_scales[name] = scale_pool(2, 2, 16, False, device)
            far_scales[name] = far_pool(
                (first + 2, 2, 16), 2**31 // first + 1, torch.float32, device
            )
    backend.ops.append_paged_kv_cache_(k, v, *near, mapping, **near_scales)
    backend.ops.append_paged_kv_cache_(k, v, *far, mapping + first * 16, **far_scales)
    block, offset = mapping // 16, mapping % 16
    for ours, wanted in zip(far, near, strict=True):
        assert_bit_equal(_slots(ours[first:], block, offset), _slots(wanted, block, offset))
    for name, scale in far_scales.items():
        wanted = near_scales[name]
        assert_bit_equal(scale[first:][block, :, offset], wanted[block, :, offset], name)


def _slots(cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """The tokens at these slots, as bytes where the dtype cannot be indexed."""
    return bits(cache)[block, :, offset]


@by_dtype
def test_what_was_appended_is_what_attention_reads(backend: Backend, dtype: torch.dtype) -> None:
    device = backend.device
    k, v = tokens(20, dtype, device)
    k_cache, v_cache = (pool(4, 2, 16, 24, dtype, device=device) for _ in range(2))
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    at = torch.arange(20, device=device)
    mapping = table[0, at // 16].long() * 16 + at % 16
    backend.ops.append_paged_kv_cache_(k, v, k_cache, v_cache, mapping)
    for cache, x in ((k_cache, k), (v_cache, v)):
        read = reference.read_pages(cache.cpu(), None, table[0].cpu(), 20, torch.float64)
        assert_bit_equal(read.to(dtype), x.cpu())


@pytest.mark.parametrize("storage", [torch.float32, INT8, FP8], ids=dtype_name)
def test_no_tokens_or_only_skipped_ones(backend: Backend, storage: torch.dtype) -> None:
    """R24: with every slot negative, and with no token at all, nothing is written."""
    device = backend.device
    for count in (0, 4):
        k, v = tokens(count, torch.float32, device)
        caches = [pool(1, 2, 8, 24, storage, device=device) for _ in range(2)]
        scales = {}
        if storage != torch.float32:
            scales = {n: scale_pool(1, 2, 8, False, device) for n in ("k_scale", "v_scale")}
        mapping = torch.tensor([-1, -(2**63), -5, -8], device=device)[:count]
        append_and_check(backend, k, v, *caches, mapping, **scales)
        for cache in caches:
            assert (cache.view(torch.uint8) == CANARY).all()
        for scale in scales.values():
            assert (scale == -77).all()


def test_tokens_do_not_see_each_other(backend: Backend) -> None:
    """R31: a token alone, and in a batch of 256, is stored alike."""
    device = backend.device
    k, v = tokens(256, torch.bfloat16, device)
    results = []
    for picked in (slice(0, 256), slice(7, 8)):
        caches = [pool(32, 2, 8, 24, INT8, device=device) for _ in range(2)]
        scales = {n: scale_pool(32, 2, 8, False, device) for n in ("k_scale", "v_scale")}
        mapping = torch.arange(256, device=device)[picked]
        backend.ops.append_paged_kv_cache_(k[picked], v[picked], *caches, mapping, **scales)
        results.append(
            [caches[0][0, :, 7], caches[1][0, :, 7], *(s[0, :, 7] for s in scales.values())]
        )
    for ours, wanted in zip(*results, strict=True):
        assert_bit_equal(ours.clone(), wanted.clone())


@pytest.mark.parametrize("storage", [torch.float32, INT8], ids=dtype_name)
@pytest.mark.parametrize("bad", [48, 2**31, 2**62])
def test_a_slot_past_the_pool_is_refused_before_anything_is_written(
    backend: Backend, storage: torch.dtype, bad: int
) -> None:
    if not backend.reads_contents:
        pytest.skip("slots are read on the device: see the next test")
    k, v = tokens(3, torch.float32, "cpu")
    caches = [pool(3, 2, 16, 24, storage) for _ in range(2)]
    scales = {}
    if storage == INT8:
        scales = {name: scale_pool(3, 2, 16, False) for name in ("k_scale", "v_scale")}
    with pytest.raises(ValueError, match=r"append_paged_kv_cache_.*slot_mapping"):
        backend.ops.append_paged_kv_cache_(k, v, *caches, torch.tensor([0, 1, bad]), **scales)
    for cache in caches:
        assert (cache.view(torch.uint8) == CANARY).all()
    for scale in scales.values():
        assert (scale == -77).all()


@pytest.mark.parametrize("storage", [torch.float32, INT8, FP8], ids=dtype_name)
@pytest.mark.parametrize("bad", [48, 2**31, 2**62])
def test_a_slot_past_the_pool_is_skipped_where_it_is_not_read(
    backend: Backend, storage: torch.dtype, bad: int
) -> None:
    """Where slots are not checked, nothing outside the pool is written."""
    if backend.reads_contents:
        pytest.skip("slots are checked: see the test before")
    device = backend.device
    k, v = tokens(3, torch.float32, device)
    caches = [pool(4, 2, 16, 24, storage, device=device) for _ in range(2)]
    scales = {}
    if storage != torch.float32:
        scales = {n: scale_pool(4, 2, 16, False, device) for n in ("k_scale", "v_scale")}
    results = []
    for slot in (bad, -1):
        pools = [x.clone() for x in (*caches, *scales.values())]
        views = [x[:3] for x in pools]  # a block of canaries follows
        given = dict(zip(scales, views[2:], strict=True))
        mapping = torch.tensor([0, slot, 17], device=device)
        backend.ops.append_paged_kv_cache_(k, v, *views[:2], mapping, **given)
        results.append(pools)
    for ours, skipped in zip(*results, strict=True):
        assert_bit_equal(ours, skipped)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_go_with_quantized_pages_only(backend: Backend, name: str) -> None:
    device = backend.device
    k, v = tokens(3, torch.float32, device)
    mapping = torch.arange(3, device=device)
    scales = {n: scale_pool(3, 2, 16, False, device) for n in ("k_scale", "v_scale")}
    quantized = [pool(3, 2, 16, 24, INT8, device=device) for _ in range(2)]
    missing: dict[str, Any] = {other: scale for other, scale in scales.items() if other != name}
    with pytest.raises(ValueError, match=rf"append_paged_kv_cache_.*{name}"):
        backend.ops.append_paged_kv_cache_(k, v, *quantized, mapping, **missing)
    plain = [pool(3, 2, 16, 24, torch.float32, device=device) for _ in range(2)]
    with pytest.raises(ValueError, match=rf"append_paged_kv_cache_.*{name}"):
        backend.ops.append_paged_kv_cache_(k, v, *plain, mapping, **{name: scales[name]})


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_float_pages_of_another_dtype_are_refused(backend: Backend, dtype: torch.dtype) -> None:
    k, v = tokens(3, dtype, backend.device)
    caches = [pool(3, 2, 16, 24, torch.float32, device=backend.device) for _ in range(2)]
    with pytest.raises(ValueError, match=r"append_paged_kv_cache_.*k_cache"):
        backend.ops.append_paged_kv_cache_(k, v, *caches, torch.arange(3, device=backend.device))

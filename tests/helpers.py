"""Tools of the op tests: the error-ratio check, and makers of awkward and of poisoned tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.threads import single_threaded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_DTYPES = [torch.bfloat16, torch.float16]


def dtype_name(dtype: torch.dtype) -> str:
    """A short parameter id, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------- comparing


@single_threaded
def assert_accurate(
    actual: Tensor, reference: Tensor, baseline: Tensor, *, multiple: float = 2.0, what: str = "out"
) -> None:
    """Ours may err from the float64 reference at most `multiple` times as much as the baseline.

    `baseline` is what plain PyTorch in the op's own dtype makes of the same inputs. Compared is the
    root-mean-square error; the largest one, which is a matter of luck, may be half as much again.
    Both have a floor of one rounding step of the values, since a baseline may be exact by chance.
    NaN and infinities must stand where the reference, rounded to the dtype, has them.
    """
    assert reference.dtype == torch.float64, f"{what}: the reference must be float64"
    assert actual.shape == reference.shape, f"{what}: {actual.shape} != {reference.shape}"
    assert baseline.shape == reference.shape, f"{what}: baseline {baseline.shape}"
    rounded = reference.to(actual.dtype)
    assert_same_nonfinite(actual, rounded, what)
    finite = rounded.isfinite() & baseline.isfinite()
    if not finite.any():
        return
    expected = reference[finite]
    error = actual.double()[finite] - expected
    allowed = baseline.double()[finite] - expected
    step = torch.finfo(actual.dtype).eps
    tiny = torch.finfo(actual.dtype).smallest_normal * step

    largest, limit = error.abs().max(), 1.5 * multiple * allowed.abs().max()
    floor = step * expected.abs().max() + tiny
    assert largest <= limit + floor, (
        f"{what}: largest error {largest:.3e}, allowed {1.5 * multiple} x"
        f" {allowed.abs().max():.3e} + {floor:.3e} ({dtype_name(actual.dtype)})"
    )
    rms, rms_limit = _rms(error), multiple * _rms(allowed)
    rms_floor = step * _rms(expected) + tiny
    assert rms <= rms_limit + rms_floor, (
        f"{what}: rms error {rms:.3e}, allowed {multiple} x {_rms(allowed):.3e}"
        f" + {rms_floor:.3e} ({dtype_name(actual.dtype)})"
    )


def assert_same_but_for_rounding(actual: Tensor, other: Tensor, what: str = "out") -> None:
    """Results of one product by two kernels, of which either may round weights to the dtype first.

    Rounding moves a result by one step at most between the two. A rounded weight errs by up to
    eps / 2, in the mean by eps / 12^0.5 at most; so does a sum of terms of either sign, relative to
    what such sums are like: their rms. The largest of many lies within six deviations, and the two
    kernels' differ by less than twice that.
    """
    assert actual.dtype == other.dtype, f"{what}: {actual.dtype} != {other.dtype}"
    assert actual.shape == other.shape, f"{what}: {actual.shape} != {other.shape}"
    assert_same_nonfinite(actual, other, what)
    finite = actual.isfinite()
    got, expected = actual.double()[finite], other.double()[finite]
    eps = torch.finfo(actual.dtype).eps
    allowed = eps * (expected.abs() + 12 * 12**-0.5 * _rms(expected))
    excess = (got - expected).abs() - allowed
    assert excess.numel() == 0 or excess.max() <= 0, (
        f"{what}: {excess.max():.3e} more than {allowed[excess.argmax()]:.3e} from the other"
        f" kernel's ({dtype_name(actual.dtype)})"
    )


def assert_lse_of_large_scores(actual: Tensor, reference: Tensor) -> None:
    """lse within what tensor cores lose of a score and of its terms: some of their last 24 bits."""
    torch.testing.assert_close(actual.double(), reference, rtol=4e-6, atol=2e-5)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def assert_same_nonfinite(actual: Tensor, expected: Tensor, what: str = "out") -> None:
    """NaN and the infinities of either sign stand at the same places."""
    for name, where in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        got, wanted = where(actual), where(expected)
        assert torch.equal(got, wanted), (
            f"{what}: {name} at {got.sum()} places, expected at {wanted.sum()};"
            f" first difference at {(got != wanted).nonzero()[0].tolist()}"
        )


def assert_rounded_once(actual: Tensor, reference: Tensor, *, what: str = "out") -> None:
    """Every element is within half a step of the true value, but for float32 noise before it.

    Holds for half-precision results that are computed in float32 and rounded at the end.
    """
    info = torch.finfo(actual.dtype)
    assert_same_nonfinite(actual, reference.to(actual.dtype), what)
    finite = actual.isfinite()
    expected = reference[finite]
    _, exponent = torch.frexp(expected.abs().clamp(min=info.smallest_normal))
    half_step = torch.ldexp(torch.full_like(expected, info.eps / 4), exponent)
    error = (actual.double()[finite] - expected).abs()
    noise = 1e-5 * expected.abs()
    worst = (error - noise) / half_step
    assert worst.numel() == 0 or worst.max() <= 1.0, (
        f"{what}: {worst.max():.3f} half steps from the true value"
    )


def assert_bit_equal(actual: Tensor, expected: Tensor, what: str = "out") -> None:
    """Same shape, dtype and bits; NaN equals NaN of the same payload."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    same = bits(actual) == bits(expected)
    assert same.all(), (
        f"{what}: {(~same).sum()} of {same.numel()} elements differ, first at"
        f" {(~same).nonzero()[0].tolist()}: {actual[~same][0]} != {expected[~same][0]}"
    )


def bits(x: Tensor) -> Tensor:
    """The elements as integers."""
    if not x.is_floating_point():
        return x
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# ------------------------------------------------------------------------------- awkward inputs


def poison(dtype: torch.dtype) -> float:
    """What an op must not read: NaN, or a large value where the dtype has no NaN."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def column_slice(x: Tensor) -> Tensor:
    """Equal to x, as columns of a wider, poisoned matrix (one part of a fused projection)."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 13), poison(x.dtype), device=x.device)
    view = wide.to(x.dtype)[..., 5 : 5 + x.shape[-1]]
    return view.copy_(x)


def misaligned(x: Tensor) -> Tensor:
    """Equal to x and contiguous, one element past an aligned address."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return storage[1:].view(x.shape).copy_(x)


def swapped(x: Tensor, first: int = 0, second: int = 1) -> Tensor:
    """Equal to x, stored with two dimensions exchanged (BHSD for BSHD, NHD pages for HND)."""
    if x.dim() < 3:
        return x.clone()
    return x.transpose(first, second).contiguous().transpose(first, second)


def reversed_storage_order(x: Tensor) -> Tensor:
    """Equal to x, with the leading dimensions stored in the opposite order."""
    order = [*range(x.dim() - 2, -1, -1), x.dim() - 1] if x.dim() > 1 else [0]
    return x.permute(order).contiguous().permute(order)  # the permutation is its own inverse


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "column_slice": column_slice,
    "misaligned": misaligned,
    "swapped": swapped,
    "reversed": reversed_storage_order,
}


def far_apart(x: Tensor, stride: int) -> Tensor:
    """Equal to x, with stride(0) = `stride` elements.

    The memory between is never touched, so it costs addresses only.
    """
    inner = x[0].numel() if x.shape[0] else 0
    assert stride >= inner
    storage = torch.empty((x.shape[0] - 1) * stride + inner, dtype=x.dtype, device=x.device)
    view = storage.as_strided(x.shape, (stride, *x[0].contiguous().stride()))
    return view.copy_(x)


def far_pool(
    shape: tuple[int, ...], stride: int, dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """Uninitialised pages [num_blocks, ...] with stride(0) = `stride`, touched by nobody yet."""
    inner = torch.empty(shape[1:], device="meta").stride()
    size = (shape[0] - 1) * stride + math.prod(shape[1:])
    return torch.empty(size, dtype=dtype, device=device).as_strided(shape, (stride, *inner))


# --------------------------------------------------------------------------------- awkward outputs


@dataclass(frozen=True)
class Guarded:
    """A strided output view inside a larger tensor, which is filled with canaries."""

    view: Tensor
    storage: Tensor
    before: Tensor

    def assert_untouched_around(self) -> None:
        """Nothing outside the view was written."""
        after = self.storage.clone()
        inside = torch.zeros_like(self.storage, dtype=torch.bool)
        inside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(
            True
        )
        changed = (bits(after) != bits(self.before)) & ~inside
        assert not changed.any(), f"wrote outside out: {changed.sum()} elements"


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Guarded:
    """An output of `shape` with canary rows before and after, canary columns beside, odd offset.

    The view itself starts as NaN (or a senseless integer), so an element left unwritten shows.
    """
    padded = [*shape]
    padded[0] += 2
    if len(shape) > 1:
        padded[-1] += 3
    storage = torch.empty(math.prod(padded) + 1, dtype=dtype, device=device)
    storage.fill_(-77 if dtype != torch.bool else 1)
    view = storage[1:].view(padded)[1:-1]
    if len(shape) > 1:
        view = view[..., 1:-2]
    if dtype.is_floating_point:
        view.fill_(math.nan)
    elif dtype != torch.bool:
        view.fill_(max(-(2**30), torch.iinfo(dtype).min))
    return Guarded(view, storage, storage.clone())


# ---------------------------------------------------------------------------------- paged caches


@dataclass
class Pages:
    """A pool holding some sequences, and what a paged op needs to read them."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor]:
        """The scale arguments that there are."""
        named = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in named.items() if scale is not None}


def random_stored(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random page contents in any storage dtype."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    if dtype == torch.float8_e4m3fn:
        return (torch.randn(shape) * 100).clamp(-448, 448).to(dtype)
    return torch.randn(shape).to(dtype)


def fill_pages(cache: Tensor, value: float) -> None:
    """Fill a cache of any storage dtype; fp8 by way of its one-value tensor."""
    if cache.dtype == torch.float8_e4m3fn:
        byte = torch.tensor([value]).to(cache.dtype).view(torch.uint8).item()
        cache.view(torch.uint8).fill_(byte)
    elif cache.dtype == torch.int8:
        cache.fill_(0 if value == 0 else 127)
    else:
        cache.fill_(value)


def make_pages(
    lengths: list[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    k_storage: torch.dtype | None = None,
    v_storage: torch.dtype | None = None,
    static_scale: bool = False,
    fill: float = math.nan,
    layout: str = "HND",
    device: str = "cpu",
) -> Pages:
    """Random sequences in shuffled blocks of a pool; everything they do not use is `fill`ed.

    Unused block-table entries hold absurd ids. `fill` also goes into the scales of unused slots.
    The contents depend on torch's seed alone, so two pools that differ in `fill` hold the same.
    """
    value_dim = head_dim if value_dim is None else value_dim
    used = [-(-length // block_size) for length in lengths]
    num_blocks = sum(used) + 3
    max_blocks = max([*used, 0]) + 2
    order = torch.randperm(num_blocks, dtype=torch.int32)
    block_table = torch.tensor([2**31 - 1, -(2**31), -1, 10**9], dtype=torch.int32)
    block_table = block_table.repeat(len(lengths), -(-max_blocks // 4))[:, :max_blocks].clone()
    taken = 0
    for b, count in enumerate(used):
        block_table[b, :count] = order[taken : taken + count]
        taken += count

    caches: list[Tensor] = []
    scales: list[Tensor | None] = []
    for storage, dim in ((k_storage, head_dim), (v_storage, value_dim)):
        stored = dtype if storage is None else storage
        shape = (num_blocks, num_kv_heads, block_size, dim)
        if layout == "NHD":
            shape = (num_blocks, block_size, num_kv_heads, dim)
        cache = torch.empty(shape, dtype=stored)
        cache = cache.transpose(1, 2) if layout == "NHD" else cache
        fill_pages(cache, fill)
        scale = None
        if storage is not None:
            limit = 127.0 if storage == torch.int8 else 448.0
            if static_scale:
                scale = (torch.rand(num_kv_heads) + 0.5) / limit
            else:
                scale = torch.full((num_blocks, num_kv_heads, block_size), fill)
        raw = cache.view(torch.uint8) if stored == torch.float8_e4m3fn else cache
        for b, length in enumerate(lengths):
            tokens = random_stored((length, num_kv_heads, dim), stored)
            if stored == torch.float8_e4m3fn:
                tokens = tokens.view(torch.uint8)
            at = torch.arange(length)
            blocks = block_table[b].long()[at // block_size]
            raw[blocks, :, at % block_size] = tokens
            if scale is not None and not static_scale:
                values = (torch.rand(length, num_kv_heads) + 0.5) / limit
                scale[blocks, :, at % block_size] = values
        caches.append(cache)
        scales.append(scale)

    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return Pages(
        caches[0].to(device),
        caches[1].to(device),
        block_table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        move(scales[0]),
        move(scales[1]),
    )


def cumulative(counts: list[int], device: str = "cpu") -> Tensor:
    """cu_seqlens of the counts: int32 [len + 1]."""
    sums = torch.tensor([0, *counts]).cumsum(0)
    return sums.to(device=device, dtype=torch.int32)


def random_tree_masks(count: int) -> Tensor:
    """A random draft tree: int64 [count], token i's bits are its own and its ancestors'."""
    masks: list[int] = []
    for i in range(count):
        parent = int(torch.randint(-1, i, ())) if i else -1
        masks.append((1 << i) | (masks[parent] if parent >= 0 else 0))
    signed = [mask - 2**64 if mask >= 2**63 else mask for mask in masks]
    return torch.tensor(signed, dtype=torch.int64)


# ------------------------------------------------------------------------------------ statistics


def chi_square_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """P(a statistic at least this large) if `counts` were drawn from `probabilities`.

    Outcomes expected fewer than five times are pooled; an impossible one that occurred gives 0.
    """
    counts, probabilities = counts.double(), probabilities.double()
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    present = wanted > 0
    statistic = ((observed - wanted)[present].square() / wanted[present]).sum()
    freedom = torch.tensor(max(int(present.sum()) - 1, 1), dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()

"""Low-bit weights in the layout that the GEMMs read: packing, unpacking, quantization.

A weight W [N, K] (N output features, K input features) has unsigned codes q of 2, 3, 4 or 8 bits
and, for each group of consecutive columns, a scale and a zero point:

    W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),    g = k // group_size

The codes stand in tiles of 64 x 64, and a tile holds the registers of one warp that multiplies by
mma.m16n8k16 or wgmma with the weight as operand A, in the order of 16-byte loads:
[load < bits][lane < 32][word < 4]. A lane's words are numbered W = 4 * load + word. Inside a tile

    n = 16 * row16 + 8 * (r % 2) + lane // 4            row16 < 4
    k = 16 * step + 8 * (r // 2) + 2 * (lane % 4) + h   step < 4, r < 4, h < 2

| bits | word W | first bit in the word |
|---|---|---|
| 4 | 4 * row16 + step | 4 * r + 16 * h |
| 2 | 2 * row16 + step // 2 | 2 * (r + 4 * (step % 2)) + 16 * h |
| 8 | 2 * (4 * row16 + step) + r // 2 | 8 * (r % 2) + 16 * h |
| 3, step < 3 | 3 * row16 + step | 3 * r + 16 * h |
| 3, step = 3, r < 3 | 3 * row16 + r | 12 + 16 * h |
| 3, step = r = 3, bit b | 3 * row16 + b | 15 + 16 * h |

(Fields of 3 bits side by side and not planes of bits: where two of them fit into the mantissa of
the kernels' floats, both become operands by a mask alone.)

Everything here is tensor arithmetic that runs on any device, a block of rows at a time: beside
the weight and the result, memory is needed for one block alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastinfer.ops._common import check, check_devices, refuse_grad
from fastinfer.ops._outliers import Outliers, concatenate_outliers, offsets_of

BITS = (2, 3, 4, 8)
GROUP_SIZES = (16, 32, 64, 128)  # or all of K
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_TILE = 64
_BLOCK_ELEMENTS = 1 << 22

# How codes are taken apart for the layout: bits of a field. The parts of a code of 3 bits are not
# neighbours everywhere.
_FIELD_BITS = {2: 2, 3: 1, 4: 4, 8: 8}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A low-bit weight: what a GEMM needs, and how it reads as a matrix.

    Args:
        qweight: int32 [ceil(N / 64), ceil(K / 64), bits * 128], contiguous; see `pack_codes`.
        scales: [ceil(K / group_size), N], fp16, bf16 or fp32.
        zeros: like scales, or None: 2^(bits - 1) everywhere.
        perm: int32 [K], or None. Packed column k multiplies x[:, perm[k]]: the columns of a weight
            quantized in order of activation, sorted so that groups are contiguous.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128 or K; the last group may be partial.
        shape: (N, K).
        outliers: weights that are added to what the codes stand for, or None.

    Raises:
        ValueError: anything does not fit the rest.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]
    outliers: Outliers | None = None

    def __post_init__(self) -> None:
        op, (n, k) = "PackedWeight", self.shape
        check_devices(
            op, qweight=self.qweight, scales=self.scales, zeros=self.zeros, perm=self.perm
        )
        check_tensor(op, "qweight", self.qweight, packed_shape(n, k, self.bits), torch.int32)
        group_size = checked_group_size(op, self.group_size, k)
        check(
            op,
            group_size == self.group_size,
            f"group_size: expected {group_size} for the whole, got {self.group_size}",
        )
        groups = (-(-k // group_size), n)
        check_tensor(op, "scales", self.scales, groups, *SCALE_DTYPES)
        if self.zeros is not None:
            check_tensor(op, "zeros", self.zeros, groups, self.scales.dtype)
        if self.outliers is not None:
            self.outliers.check(op, n, k, self.qweight)
        if self.perm is not None:
            check_tensor(op, "perm", self.perm, (k,), torch.int32)
        for name, tensor in (
            ("qweight", self.qweight), ("scales", self.scales), ("zeros", self.zeros),
            ("perm", self.perm),
        ):  # fmt: skip
            dense = tensor is None or tensor.is_contiguous()
            check(op, dense, f"{name}: expected a contiguous tensor, as the products read it")
        # On the meta device it has no entries that could be wrong.
        if self.perm is not None and not self.perm.is_meta:
            columns = torch.arange(k, dtype=torch.int32, device=self.perm.device)
            found = self.perm.sort().values
            check(op, torch.equal(found, columns), f"perm: expected each of 0 .. {k - 1} once")

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        return replace(
            self,
            qweight=self.qweight.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            perm=None if self.perm is None else self.perm.to(device),
            outliers=None if self.outliers is None else self.outliers.to(device),
        )

    def group_index(self) -> Tensor:
        """int64 [K]: the group of each column, in the original order of columns."""
        groups = torch.arange(self.shape[1], device=self.qweight.device) // self.group_size
        if self.perm is None:
            return groups
        return torch.empty_like(groups).index_copy_(0, self.perm.long(), groups)

    def codes(self, first: int = 0, last: int | None = None) -> Tensor:
        """uint8 [last - first, K]: the codes of some rows, in the original order of columns.

        Args:
            first: a multiple of 64.
            last: the row after the last one; None is N.
        """
        n, k = self.shape
        last = n if last is None else last
        in_order = first % _TILE == 0 and 0 <= first < last <= n
        check(
            "PackedWeight.codes",
            in_order,
            f"first, last: expected a multiple of 64 and a larger number up to {n}, "
            f"got {first} and {last}",
        )
        codes = _unpack(
            self.qweight[first // _TILE : -(-last // _TILE)], self.bits, last - first, k
        )
        if self.perm is None:
            return codes
        return torch.empty_like(codes).index_copy_(1, self.perm.long(), codes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K] in the original order of columns, computed in fp32 or wider and rounded once."""
        group = self.group_index()
        compute = torch.promote_types(dtype, torch.float32)
        weight = self.scales.new_empty(self.shape, dtype=dtype)
        for first, last in row_blocks(*self.shape):
            codes = self.codes(first, last).to(compute)
            if self.zeros is None:
                codes -= 2 ** (self.bits - 1)
            else:
                codes -= self.zeros[:, first:last].t().to(compute).index_select(1, group)
            codes *= self.scales[:, first:last].t().to(compute).index_select(1, group)
            if self.outliers is not None:
                self.outliers.add_to(codes, first, self.perm)
            weight[first:last] = codes
        return weight


def packed_shape(n: int, k: int, bits: int) -> tuple[int, int, int]:
    """The shape of `qweight`: [ceil(N / 64), ceil(K / 64), bits * 128].

    Raises:
        ValueError: bits is not 2, 3, 4 or 8, or a size is less than 1.
    """
    check("packed_shape", bits in BITS, f"bits: expected one of {BITS}, got {bits}")
    check("packed_shape", n >= 1 and k >= 1, f"n, k: expected at least 1, got {n} and {k}")
    return -(-n // _TILE), -(-k // _TILE), bits * 128


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes in the packed layout; N and K are padded to multiples of 64 with codes 0.

    Args:
        codes: uint8 [N, K], each less than 2^bits, any strides.
        bits: 2, 3, 4 or 8.

    Returns:
        qweight, int32 [ceil(N / 64), ceil(K / 64), bits * 128].

    Raises:
        ValueError: not uint8 [N, K] with N, K >= 1, a code too large, or another number of bits.
    """
    op = "pack_codes"
    check(op, codes.dtype == torch.uint8, f"codes: expected uint8, got {codes.dtype}")
    check(op, codes.dim() == 2, f"codes: expected shape [N, K], got {tuple(codes.shape)}")
    n, k = codes.shape
    packed_shape(n, k, bits)
    largest = int(codes.max())
    check(op, largest < 2**bits, f"codes: expected less than {2**bits}, got {largest}")
    return pack_rows(lambda first, last: codes[first:last], n, k, bits, codes.device)


def unpack_codes(qweight: Tensor, bits: int, n: int, k: int) -> Tensor:
    """The inverse of `pack_codes`.

    Args:
        qweight: int32 [ceil(n / 64), ceil(k / 64), bits * 128].
        bits: 2, 3, 4 or 8.
        n, k: the shape of the weight.

    Returns:
        uint8 [n, k], in packed order of columns.

    Raises:
        ValueError: qweight has another shape or dtype.
    """
    check_tensor("unpack_codes", "qweight", qweight, packed_shape(n, k, bits), torch.int32)
    codes = qweight.new_empty(n, k, dtype=torch.uint8)
    for first, last in row_blocks(n, k):
        tiles = qweight[first // _TILE : -(-last // _TILE)]
        codes[first:last] = _unpack(tiles, bits, last - first, k)
    return codes


def quantize_weight(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Round-to-nearest quantization of a weight, by the least and greatest of each group.

        low, high = min(group, 0), max(group, 0)
        scale = (high - low) / (2^bits - 1)                zero = round(-low / scale)
        scale = max(high, -low) / ((2^bits - 1) / 2)       zero = 2^(bits - 1)    symmetric
        q = clamp(round(w / scale) + zero, 0, 2^bits - 1)

    Weight 0 keeps the value 0. The symmetric scale is that of GPTQ and of compressed-tensors: its
    2^bits levels are all used, and a weight of the greatest magnitude lies half a step beyond the
    last level at most, no further than any other weight may lie from its own. (A scale of
    max / (2^(bits - 1) - 1), which other quantizers use, leaves the lowest level unused.)
    Codes are chosen for the scale as it is stored, rounded up to `scale_dtype`: with a smaller one
    the greatest weights would lie beyond the last level. Ties go to even. Where
    a scale would be 0, because all weights of its group are or are too small for `scale_dtype`, it
    is 1 and the group's weights read as 0.

    Args:
        weight: [N, K], a float dtype, any strides.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128, or K or -1: the whole row. The last group may be partial.
        symmetric: without zero points.
        scale_dtype: fp16, bf16 or fp32; None is weight's dtype, or fp32 for a wider one.

    Returns:
        The packed weight. `zeros` is None if symmetric.

    Raises:
        NotImplementedError: weight requires grad.
        ValueError: NaN or infinity in weight, a scale beyond the range of `scale_dtype`, or an
            argument that is not as above.
    """
    return _quantize("quantize_weight", weight, bits, group_size, symmetric, scale_dtype, 0)


def quantize_weight_with_outliers(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    fraction: float = 0.01,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> PackedWeight:
    """`quantize_weight`, with the greatest weights of each row kept as they are.

    The ceil(fraction * K) weights of greatest magnitude in a row are its outliers. For all else
    they are taken as 0: the ranges of groups are those of the other weights, and the codes of
    outliers stand for 0, so that what is kept is the weight itself, exactly. Since a group's range
    includes 0, the greatest magnitudes are what makes it wide.

    Every row has the same number, as suits a product that walks many rows' outliers side by side.
    (SpQR chooses over the whole matrix, by how much less the product errs on calibration data.)

    Args:
        weight, bits, group_size, symmetric, scale_dtype: as in `quantize_weight`.
        fraction: of the weights, in (0, 1]. An outlier takes 6 bytes, or 8 in fp32.

    Returns:
        The packed weight with `outliers`, columns ascending in each row, values in weight's dtype
        (fp32 for a wider one).

    Raises:
        NotImplementedError, ValueError: as in `quantize_weight`; ValueError for another fraction.

    Dettmers et al., "SpQR: A Sparse-Quantized Representation for Near-Lossless LLM Weight
    Compression", 2023; Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", 2023 (by
    magnitude).
    """
    op = "quantize_weight_with_outliers"
    check(op, 0 < fraction <= 1, f"fraction: expected a number in (0, 1], got {fraction}")
    return _quantize(op, weight, bits, group_size, symmetric, scale_dtype, fraction)


def _quantize(
    op: str,
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype | None,
    fraction: float,
) -> PackedWeight:
    """`fraction` of the weights as outliers; 0: without any."""
    refuse_grad(op, weight=weight)
    float_matrix = weight.is_floating_point() and weight.dim() == 2
    check(
        op,
        float_matrix,
        f"weight: expected a float tensor [N, K], got {weight.dtype} {tuple(weight.shape)}",
    )
    n, k = weight.shape
    packed_shape(n, k, bits)
    group_size = checked_group_size(op, group_size, k)
    if scale_dtype is None:
        scale_dtype = weight.dtype if weight.dtype in SCALE_DTYPES else torch.float32
    check(
        op,
        scale_dtype in SCALE_DTYPES,
        f"scale_dtype: expected one of {SCALE_DTYPES}, got {scale_dtype}",
    )
    groups = -(-k // group_size)
    scales = weight.new_empty(groups, n, dtype=scale_dtype)
    zeros = None if symmetric else torch.empty_like(scales)
    largest = 2**bits - 1
    count = math.ceil(fraction * k - 1e-9)  # of outliers in a row; 0.07 of 100 are 7
    value_dtype = weight.dtype if weight.dtype in SCALE_DTYPES else torch.float32
    columns = torch.empty(n, count, dtype=torch.int32, device=weight.device)
    values = torch.empty(n, count, dtype=value_dtype, device=weight.device)

    def quantize_rows(first: int, last: int) -> Tensor:
        rows = weight[first:last].float()
        check_finite(op, rows, first)
        if count:
            chosen = rows.abs().topk(count, sorted=False).indices.sort().values
            columns[first:last] = chosen
            values[first:last] = rows.gather(1, chosen)
            rows = rows.scatter(1, chosen, 0.0)
        # Zeros that fill up the last group change neither its least nor its greatest.
        grouped = pad(rows, (0, groups * group_size - k)).reshape(-1, groups, group_size)
        low = grouped.amin(2).clamp(max=0)
        high = grouped.amax(2).clamp(min=0)
        try:
            scale, zero = scales_of_ranges(low, high, bits, symmetric, scale_dtype)
        except ValueError as error:
            raise ValueError(f"fastinfer::{op}: {error}") from error
        scales[:, first:last] = scale.t()
        scale = scale.float()
        if zeros is not None:
            zeros[:, first:last] = zero.t()
        codes = (grouped / scale.unsqueeze(2)).round_() + zero.unsqueeze(2)
        return codes.clamp_(0, largest).to(torch.uint8).flatten(1)[:, :k]

    qweight = pack_rows(quantize_rows, n, k, bits, weight.device)
    outliers = None
    if count:
        counts = torch.full((n,), count, device=weight.device)
        outliers = Outliers(offsets_of(counts), columns.flatten(), values.flatten())
    return PackedWeight(qweight, scales, zeros, None, bits, group_size, (n, k), outliers)


def scales_of_ranges(
    low: Tensor, high: Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales, in `dtype`, and zero points for weights from low <= 0 to high >= 0: see
    `quantize_weight`.

    Raises:
        ValueError: a scale is beyond the range of `dtype`.
    """
    largest = 2**bits - 1
    if symmetric:
        scale = torch.maximum(high, -low) / (largest / 2)
    else:
        scale = high / largest - low / largest  # high - low might overflow
    stored = _rounded_up(scale, dtype)
    if not stored.isfinite().all():
        greatest = float(torch.maximum(high, -low).max())
        raise ValueError(
            f"scale_dtype: expected one that holds scales for weights up to {greatest:g}, "
            f"got {dtype}"
        )
    stored = torch.where(stored == 0, 1, stored)
    if symmetric:
        return stored, torch.full_like(low, 2 ** (bits - 1))
    return stored, (-low / stored.to(low.dtype)).round().clamp(0, largest)


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers >= 0 in `dtype`, none below what it was."""
    stored = scale.to(dtype)
    if dtype == torch.float32:
        return stored
    # The next number of a 16-bit type is the next integer.
    return (stored.view(torch.int16) + (stored.float() < scale)).view(dtype)


def concatenate_packed(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of the same input features as one, whose output features follow one another.

        y = [x W_0^T | x W_1^T | ...]

    All is copied and nothing is rounded: codes, scales, zero points and outliers stay what they
    are. Where a weight without zeros meets one that has them it gets 2^(bits - 1), and scales (or
    outliers) of several dtypes become the narrowest that holds all of them.

    Args:
        weights: at least one, of equal bits, group_size, K and perm, on one device.

    Raises:
        ValueError: they differ in one of these, or there are none.
    """
    op = "concatenate_packed"
    check(op, len(weights) > 0, "weights: expected at least one, got none")
    first = weights[0]
    (_, k), bits = first.shape, first.bits
    for i, weight in enumerate(weights):
        for name, expected, got in (
            ("device", first.qweight.device, weight.qweight.device),
            ("columns", k, weight.shape[1]),
            ("bits", bits, weight.bits),
            ("group_size", first.group_size, weight.group_size),
        ):
            check(op, got == expected, f"weights[{i}]: expected {name} {expected}, got {got}")
        check(
            op,
            same_order(weight.perm, first.perm),
            f"weights[{i}]: expected the perm of weights[0], since a product reads its columns in "
            "one order, got another one",
        )
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat(
            [torch.full_like(w.scales, 2 ** (bits - 1)) if w.zeros is None else w.zeros
             for w in weights], 1,
        )  # fmt: skip
    n = sum(weight.shape[0] for weight in weights)
    if all(weight.shape[0] % _TILE == 0 for weight in weights[:-1]):
        qweight = torch.cat([weight.qweight for weight in weights])
    else:
        qweight = pack_rows(
            lambda begin, end: _rows_of(weights, begin, end), n, k, bits, first.qweight.device
        )
    scales = torch.cat([weight.scales for weight in weights], 1)
    outliers = concatenate_outliers([(w.shape[0], w.outliers) for w in weights], qweight.device)
    perm = None if first.perm is None else first.perm.clone()
    return PackedWeight(qweight, scales, zeros, perm, bits, first.group_size, (n, k), outliers)


def same_order(perm: Tensor | None, other: Tensor | None) -> bool:
    """Whether two weights have their columns in the same order."""
    if perm is None or other is None:
        return perm is other
    # On the meta device they have no entries that could differ.
    return perm.is_meta or torch.equal(perm, other)


def _rows_of(weights: Sequence[PackedWeight], begin: int, end: int) -> Tensor:
    """uint8 [end - begin, K]: codes of the concatenated rows, in packed order of columns."""
    rows = []
    for weight in weights:
        n, k = weight.shape
        first, last = max(begin, 0), min(end, n)
        if first < last:
            tile = first // _TILE
            tiles = weight.qweight[tile : -(-last // _TILE)]
            rows.append(_unpack(tiles, weight.bits, last - tile * _TILE, k)[first - tile * _TILE :])
        begin, end = begin - n, end - n
    return torch.cat(rows)


# --------------------------- shared with the checkpoint formats (repack.py), and with fastinfer/nn


def check_finite(op: str, rows: Tensor, first: int = 0) -> None:
    """Rows of a weight, of which `rows` are those from `first` on, have no NaN and no infinity."""
    finite = rows.isfinite()
    if not finite.all():
        n, k = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"fastinfer::{op}: weight: expected finite values, got {float(rows[n, k])} at "
            f"[{first + n}, {k}]"
        )


def pack_rows(
    codes_of: Callable[[int, int], Tensor], n: int, k: int, bits: int, device: torch.device
) -> Tensor:
    """qweight of the rows of codes that `codes_of(first, last)` gives, uint8 [last - first, K]."""
    qweight = torch.empty(packed_shape(n, k, bits), dtype=torch.int32, device=device)
    for first, last in row_blocks(n, k):
        qweight[first // _TILE : -(-last // _TILE)] = _pack(codes_of(first, last), bits)
    return qweight


def row_blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover n, each of about four million elements and of whole tiles."""
    rows = max(1, _BLOCK_ELEMENTS // k // _TILE) * _TILE
    for first in range(0, n, rows):
        yield first, min(first + rows, n)


def checked_group_size(op: str, group_size: int, k: int) -> int:
    """group_size, with -1 as the checkpoints' word for all of K."""
    check(
        op,
        group_size in (*GROUP_SIZES, k, -1),
        f"group_size: expected one of {GROUP_SIZES}, or {k} or -1 for the whole, got {group_size}",
    )
    return k if group_size == -1 else group_size


def check_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    """`tensor` has this shape and one of these dtypes."""
    expected = " or ".join(str(dtype) for dtype in dtypes)
    check(op, tensor.dtype in dtypes, f"{name}: expected {expected}, got {tensor.dtype}")
    check(op, tensor.shape == shape, f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


# ------------------------------------------------------------------------------------- the layout


def _pack(codes: Tensor, bits: int) -> Tensor:
    n, k = codes.shape
    tiles_n, tiles_k, words = packed_shape(n, k, bits)
    codes = pad(codes, (0, tiles_k * _TILE - k, 0, tiles_n * _TILE - n))
    codes = codes.reshape(tiles_n, _TILE, tiles_k, _TILE).transpose(1, 2).reshape(-1, _TILE**2)
    width = _FIELD_BITS[bits]
    order, _ = _places(bits)
    parts = torch.cat([codes >> low for low in range(0, bits, width)], 1)
    fields = parts.index_select(1, order.to(codes.device)) & (2**width - 1)
    fields = fields.view(len(codes), -1, 8 // width)
    data = fields[..., 0].clone()
    for i in range(1, 8 // width):
        data |= fields[..., i] << (i * width)
    # The bytes of a word, lowest first, as on every machine that torch runs on here.
    return data.view(torch.int32).view(tiles_n, tiles_k, words)


def _unpack(qweight: Tensor, bits: int, n: int, k: int) -> Tensor:
    tiles_n, tiles_k, words = qweight.shape
    data = qweight.contiguous().view(-1, words).view(torch.uint8)
    width = _FIELD_BITS[bits]
    _, rank = _places(bits)
    fields = torch.stack([data >> (i * width) for i in range(8 // width)], 2).flatten(1)
    parts = (fields & (2**width - 1)).index_select(1, rank.to(fields.device))
    parts = parts.view(len(data), -1, _TILE**2)
    codes = parts[:, 0].clone()
    for i in range(1, bits // width):
        codes |= parts[:, i] << (i * width)
    codes = codes.view(tiles_n, tiles_k, _TILE, _TILE).transpose(1, 2)
    return codes.reshape(tiles_n * _TILE, tiles_k * _TILE)[:n, :k]


@functools.cache
def _places(bits: int) -> tuple[Tensor, Tensor]:
    """Where the fields of a tile stand: code 64 * n + k has the fields code, code + 4096, ...

    Fields follow one another without gaps, so a place is the rank of a field's address in bits.

    Returns:
        int64 [4096 * fields of a code]: the field at each place, and the place of each field.
    """
    field = torch.arange(_TILE**2 * (bits // _FIELD_BITS[bits]), device="cpu")
    part, code = field // _TILE**2, field % _TILE**2
    n, k = code // _TILE, code % _TILE
    row16, step, h = n // 16, k // 16, k % 2
    r = n // 8 % 2 + 2 * (k // 8 % 2)
    lane = 4 * (n % 8) + k // 2 % 4
    # Of 3 bits: the word of the step; the last step has no word, and its last code no field.
    word3 = torch.where(step < 3, step, torch.where(r < 3, r, part))
    bit3 = torch.where(step < 3, 3 * r + part, torch.where(r < 3, 12 + part, 15))
    word, bit = {
        4: (4 * row16 + step, 4 * r + 16 * h),
        2: (2 * row16 + step // 2, 2 * (r + 4 * (step % 2)) + 16 * h),
        8: (2 * (4 * row16 + step) + r // 2, 8 * (r % 2) + 16 * h),
        3: (3 * row16 + word3, bit3 + 16 * h),
    }[bits]
    address = ((word // 4 * 32 + lane) * 4 + word % 4) * 32 + bit
    order = address.argsort()
    return order, order.argsort()

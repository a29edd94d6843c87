"""Low-bit weights of checkpoints to `PackedWeight` and back, code by code: nothing is rounded.

All formats keep their codes as streams of bits in int32 words, value i of a stream in the bits
[i * bits, (i + 1) * bits), lowest first; with 3 bits, 32 values fill 3 words and some straddle two.
They differ in what a stream runs along, and in how zero points and groups are told:

| format | weight | zeros | scales | groups |
|---|---|---|---|---|
| AWQ gemm | [K, N/8], along N, shuffled | [G, N/8], likewise | [G, N] | k // group_size |
| AWQ gemv | [N, K/8], along K | [N, width], along G | [N, 8 * width] | k // group_size |
| GPTQ | [K*bits/32, N], along K | [G, N*bits/32], along N | [G, N] | g_idx[k] |
| compressed-tensors | [N, K*bits/32], along K | [N*bits/32, G], along N | [N, G] | either |

with G = ceil(K / group_size), sizes in words rounded up, and the last group partial where
group_size does not divide K (most other readers refuse that). group_size -1 is the whole row.
Scales keep their dtype. In every error the argument has the name it has in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastinfer.ops._common import check, check_devices
from fastinfer.ops.packed_weights import (
    BITS,
    SCALE_DTYPES,
    PackedWeight,
    check_tensor,
    checked_group_size,
    pack_rows,
    row_blocks,
)

GptqFormat = Literal["gptq", "gptq_v2"]

# Eight columns in a word of AWQ gemm: the one in the lowest four bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqTensors(NamedTuple):
    """A linear layer of an AWQ checkpoint, `version` gemm or gemv."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor


class GptqTensors(NamedTuple):
    """A linear layer of a GPTQ checkpoint."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor


class CompressedTensors(NamedTuple):
    """A linear layer of a compressed-tensors checkpoint, format pack-quantized."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    weight_zero_point: Tensor | None
    weight_g_idx: Tensor | None


# -------------------------------------------------------------------------------------------- AWQ


def repack_awq(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, *, group_size: int
) -> PackedWeight:
    """A weight of an AWQ checkpoint, `version` gemm (AutoAWQ's default), 4 bits.

    Args:
        qweight: int32 [K, N/8]. Bits 4 * i and up of a word are column (0, 2, 4, 6, 1, 3, 5, 7)[i]
            of its eight.
        qzeros: int32 [G, N/8], packed likewise; None: 8 everywhere.
        scales: [G, N], fp16, bf16 or fp32.
        group_size: 16, 32, 64, 128, or K or -1.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    op = "repack_awq"
    check_devices(op, qweight=qweight, qzeros=qzeros, scales=scales)
    _check_matrix(op, "qweight", qweight)
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    group_size = checked_group_size(op, group_size, k)
    groups = -(-k // group_size)
    check_tensor(op, "scales", scales, (groups, n), *SCALE_DTYPES)
    zeros = None
    if qzeros is not None:
        check_tensor(op, "qzeros", qzeros, (groups, n // 8), torch.int32)
        zeros = _unshuffled(_unpack_stream(qzeros, 4, n)).to(scales.dtype)

    def codes(first: int, last: int) -> Tensor:
        words = qweight[:, first // 8 : last // 8]
        return _unshuffled(_unpack_stream(words, 4, last - first)).t()

    packed = pack_rows(codes, n, k, 4, qweight.device)
    return PackedWeight(packed, scales.contiguous(), zeros, None, 4, group_size, (n, k))


def to_awq(weight: PackedWeight) -> AwqTensors:
    """The inverse of `repack_awq`; a weight without zeros gets them.

    Raises:
        ValueError: not 4 bits, N not a multiple of 8, a permutation, outliers, or a zero point that
            is not a code.
    """
    op, (n, k) = "to_awq", weight.shape
    _check_awq(op, weight)
    check(op, n % 8 == 0, f"weight: expected a multiple of 8 rows, got {n}")
    qweight = weight.qweight.new_empty(k, n // 8)
    for first, last in row_blocks(n, k):
        codes = weight.codes(first, last).t()
        qweight[:, first // 8 : last // 8] = _pack_stream(_shuffled(codes), 4)
    qzeros = _pack_stream(_shuffled(_zero_codes(op, weight)), 4)
    return AwqTensors(qweight, qzeros, weight.scales)


def repack_awq_gemv(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, *, group_size: int
) -> PackedWeight:
    """A weight of an AWQ checkpoint, `version` gemv, 4 bits.

    Args:
        qweight: int32 [N, K/8], columns in order.
        qzeros: int32 [N, width], groups in order; None: 8 everywhere. The width is ceil(G / 8), for
            groups of 64 rounded up to a multiple of 2, and for groups of 32 to one of 4.
        scales: [N, 8 * width], fp16, bf16 or fp32; what lies beyond G is ignored.
        group_size: 32, 64, 128, or K or -1 where K is one of these or more than 128.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    op = "repack_awq_gemv"
    check_devices(op, qweight=qweight, qzeros=qzeros, scales=scales)
    _check_matrix(op, "qweight", qweight)
    n, k = qweight.shape[0], 8 * qweight.shape[1]
    group_size = checked_group_size(op, group_size, k)
    groups, width = -(-k // group_size), _gemv_width(op, k, group_size)
    check_tensor(op, "scales", scales, (n, 8 * width), *SCALE_DTYPES)
    zeros = None
    if qzeros is not None:
        check_tensor(op, "qzeros", qzeros, (n, width), torch.int32)
        zeros = _unpack_stream(qzeros, 4, groups).t().to(scales.dtype).contiguous()

    def codes(first: int, last: int) -> Tensor:
        return _unpack_stream(qweight[first:last], 4, k)

    packed = pack_rows(codes, n, k, 4, qweight.device)
    scales = scales[:, :groups].t().contiguous()
    return PackedWeight(packed, scales, zeros, None, 4, group_size, (n, k))


def to_awq_gemv(weight: PackedWeight) -> AwqTensors:
    """The inverse of `repack_awq_gemv`; a weight without zeros gets them, padding is 0.

    Raises:
        ValueError: not 4 bits, K not a multiple of 8, groups that the format does not have, a
            permutation, outliers, or a zero point that is not a code.
    """
    op, (n, k) = "to_awq_gemv", weight.shape
    _check_awq(op, weight)
    check(op, k % 8 == 0, f"weight: expected a multiple of 8 columns, got {k}")
    width = _gemv_width(op, k, weight.group_size)
    more = 8 * width - len(weight.scales)
    qzeros = _pack_stream(pad(_zero_codes(op, weight).t(), (0, more)), 4)
    qweight = weight.qweight.new_empty(n, k // 8)
    for first, last in row_blocks(n, k):
        qweight[first:last] = _pack_stream(weight.codes(first, last), 4)
    return AwqTensors(qweight, qzeros, pad(weight.scales.t(), (0, more)).contiguous())


def _check_awq(op: str, weight: PackedWeight) -> None:
    check(op, weight.bits == 4, f"weight: expected 4 bits, got {weight.bits}")
    check(op, weight.perm is None, "weight: expected no perm, which AWQ has no place for, got one")
    _check_no_outliers(op, weight)


def _check_no_outliers(op: str, weight: PackedWeight) -> None:
    none = weight.outliers is None
    check(op, none, "weight: expected no outliers, which the format has no place for, got some")


def _gemv_width(op: str, k: int, group_size: int) -> int:
    """Words of zero points of a row: up to groups of 128, those of a multiple of 1024 columns."""
    has_width = group_size in (32, 64) or group_size >= 128
    check(op, has_width, f"group_size: expected 32, 64, or 128 and more, got {group_size}")
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return -(-k // (group_size * 8 * multiple)) * multiple


def _unshuffled(fields: Tensor) -> Tensor:
    """Columns in order, from the order in which AWQ gemm has them in words."""
    place = sorted(range(8), key=_AWQ_ORDER.__getitem__)
    return fields.unflatten(1, (-1, 8))[..., place].flatten(1)


def _shuffled(columns: Tensor) -> Tensor:
    return columns.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)


# ------------------------------------------------------------------------------------------- GPTQ


def repack_gptq(
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    checkpoint_format: GptqFormat = "gptq",
) -> PackedWeight:
    """A weight of a GPTQ checkpoint.

    Args:
        qweight: int32 [ceil(K * bits / 32), N].
        qzeros: int32 [G, ceil(N * bits / 32)]. Ignored if symmetric, when it may be None: there
            files disagree on what they store.
        scales: [G, N], fp16, bf16 or fp32.
        g_idx: int32 [K], the group of each column. Unless it is k // group_size ("act-order"),
            columns are sorted by group, and `perm` tells. None: k // group_size, and K is all that
            qweight's rows hold.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128, or K or -1.
        symmetric: `sym` of the checkpoint's configuration: zero points are 2^(bits - 1).
        checkpoint_format: "gptq" stores zero - 1 modulo 2^bits, "gptq_v2" the zero.

    Raises:
        ValueError: a shape, dtype or device does not fit, or g_idx does not have group_size columns
            of every group. That is so in a row-parallel shard of an act-order weight: its groups
            are scattered over the shards, so repack the whole, and split the sorted columns.
    """
    op = "repack_gptq"
    check_devices(op, qweight=qweight, qzeros=qzeros, scales=scales, g_idx=g_idx)
    _check_bits(op, bits)
    _check_matrix(op, "qweight", qweight)
    _check_gptq_format(op, checkpoint_format)
    rows, n = qweight.shape
    if g_idx is None:
        whole = rows * 32 % bits == 0
        check(op, whole, f"qweight: expected a multiple of {bits} rows without g_idx, got {rows}")
    k = rows * 32 // bits if g_idx is None else g_idx.numel()
    check_tensor(op, "qweight", qweight, (_words(k, bits), n), torch.int32)
    group_size = checked_group_size(op, group_size, k)
    groups = -(-k // group_size)
    check_tensor(op, "scales", scales, (groups, n), *SCALE_DTYPES)
    zeros = None
    if not symmetric:
        if qzeros is None:
            raise ValueError(f"fastinfer::{op}: qzeros: required unless symmetric, got None")
        check_tensor(op, "qzeros", qzeros, (groups, _words(n, bits)), torch.int32)
        stored = _unpack_stream(qzeros, bits, n)
        zeros = _next_code(stored, bits) if checkpoint_format == "gptq" else stored
        zeros = zeros.to(scales.dtype)
    perm = _sorted_columns(op, "g_idx", g_idx, k, group_size)

    def codes(first: int, last: int) -> Tensor:
        return _permuted(_unpack_stream(qweight[:, first:last].t(), bits, k), perm)

    packed = pack_rows(codes, n, k, bits, qweight.device)
    return PackedWeight(packed, scales.contiguous(), zeros, perm, bits, group_size, (n, k))


def to_gptq(weight: PackedWeight, checkpoint_format: GptqFormat = "gptq") -> GptqTensors:
    """The inverse of `repack_gptq`; a weight without zeros gets them.

    Raises:
        ValueError: outliers, or a zero point that is not a code.
    """
    op, (n, k), bits = "to_gptq", weight.shape, weight.bits
    _check_no_outliers(op, weight)
    _check_gptq_format(op, checkpoint_format)
    qweight = weight.qweight.new_empty(_words(k, bits), n)
    for first, last in row_blocks(n, k):
        qweight[:, first:last] = _pack_stream(weight.codes(first, last), bits).t()
    zeros = _zero_codes(op, weight)
    if checkpoint_format == "gptq":
        zeros = _previous_code(zeros, bits)
    return GptqTensors(
        qweight, _pack_stream(zeros, bits), weight.scales, weight.group_index().int()
    )


def _check_gptq_format(op: str, checkpoint_format: str) -> None:
    known = checkpoint_format in ("gptq", "gptq_v2")
    check(op, known, f"checkpoint_format: expected 'gptq' or 'gptq_v2', got {checkpoint_format!r}")


# ----------------------------------------------------------------------------- compressed-tensors


def repack_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor | Sequence[int],
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> PackedWeight:
    """A weight of a compressed-tensors checkpoint, format pack-quantized, by group or by channel.

    The format's values are signed and stored plus 2^(bits - 1), zero points as well; differences
    between them are those of our unsigned codes.

    Args:
        weight_packed: int32 [N, ceil(K * bits / 32)]. (With 3 bits, older versions of the format
            had ten values in a word; those are refused.)
        weight_scale: [N, G], fp16, bf16 or fp32.
        weight_shape: (N, K).
        weight_zero_point: int32 [ceil(N * bits / 32), G]. Ignored if symmetric, when it may be
            None.
        weight_g_idx: int32 [K], as `g_idx` in `repack_gptq`; None, or -1 everywhere, which is how
            the format says unset: k // group_size.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128, or K or -1 (by channel).
        symmetric: `symmetric` of the checkpoint's configuration.

    Raises:
        ValueError: as in `repack_gptq`.
    """
    op = "repack_compressed_tensors"
    check_devices(
        op,
        weight_packed=weight_packed,
        weight_scale=weight_scale,
        weight_zero_point=weight_zero_point,
        weight_g_idx=weight_g_idx,
    )
    _check_bits(op, bits)
    shape = weight_shape.tolist() if isinstance(weight_shape, Tensor) else list(weight_shape)
    matrix = len(shape) == 2 and min(shape) >= 1
    check(op, matrix, f"weight_shape: expected N and K of at least 1, got {shape}")
    n, k = shape
    check_tensor(op, "weight_packed", weight_packed, (n, _words(k, bits)), torch.int32)
    group_size = checked_group_size(op, group_size, k)
    groups = -(-k // group_size)
    check_tensor(op, "weight_scale", weight_scale, (n, groups), *SCALE_DTYPES)
    zeros = None
    if not symmetric:
        if weight_zero_point is None:
            raise ValueError(
                f"fastinfer::{op}: weight_zero_point: required unless symmetric, got None"
            )
        words = (_words(n, bits), groups)
        check_tensor(op, "weight_zero_point", weight_zero_point, words, torch.int32)
        zeros = _unpack_stream(weight_zero_point.t(), bits, n).to(weight_scale.dtype)
    if weight_g_idx is not None and bool((weight_g_idx == -1).all()):
        weight_g_idx = None
    perm = _sorted_columns(op, "weight_g_idx", weight_g_idx, k, group_size)

    def codes(first: int, last: int) -> Tensor:
        return _permuted(_unpack_stream(weight_packed[first:last], bits, k), perm)

    packed = pack_rows(codes, n, k, bits, weight_packed.device)
    scales = weight_scale.t().contiguous()
    return PackedWeight(packed, scales, zeros, perm, bits, group_size, (n, k))


def to_compressed_tensors(weight: PackedWeight) -> CompressedTensors:
    """The inverse of `repack_compressed_tensors`.

    Returns:
        The tensors; `weight_zero_point` is None without zeros, `weight_g_idx` without perm.

    Raises:
        ValueError: outliers, or a zero point that is not a code.
    """
    op, (n, k), bits = "to_compressed_tensors", weight.shape, weight.bits
    _check_no_outliers(op, weight)
    packed = weight.qweight.new_empty(n, _words(k, bits))
    for first, last in row_blocks(n, k):
        packed[first:last] = _pack_stream(weight.codes(first, last), bits)
    zero_point = None
    if weight.zeros is not None:
        zero_point = _pack_stream(_zero_codes(op, weight), bits).t().contiguous()
    return CompressedTensors(
        packed,
        weight.scales.t().contiguous(),
        torch.tensor([n, k], dtype=torch.int64),
        zero_point,
        None if weight.perm is None else weight.group_index().int(),
    )


# ------------------------------------------------------------------------- groups and zero points


def _sorted_columns(
    op: str, name: str, g_idx: Tensor | None, k: int, group_size: int
) -> Tensor | None:
    """The columns sorted by group, or None where they already are."""
    if g_idx is None:
        return None
    check_tensor(op, name, g_idx, (k,), torch.int32, torch.int64)
    regular = torch.arange(k, dtype=g_idx.dtype, device=g_idx.device) // group_size
    if torch.equal(g_idx, regular):
        return None
    found, perm = g_idx.sort(stable=True)
    if not torch.equal(found, regular):
        at = int((found != regular).nonzero()[0])
        group, other = int(regular[at]), int(found[at])
        size = min(group_size, k - group * group_size)
        raise ValueError(
            f"fastinfer::{op}: {name}: expected groups 0 .. {int(regular[-1])} with {group_size} "
            f"columns each (the last one with what is left), got {int((g_idx == group).sum())} "
            f"instead of {size} in group {group}, and {int((g_idx == other).sum())} in group "
            f"{other}; a row-parallel shard of an act-order weight is like that: repack the whole, "
            "then split the sorted columns"
        )
    return perm.int()


def _permuted(codes: Tensor, perm: Tensor | None) -> Tensor:
    return codes if perm is None else codes.index_select(1, perm)


def _next_code(codes: Tensor, bits: int) -> Tensor:
    return (codes + 1) & (2**bits - 1)


def _previous_code(codes: Tensor, bits: int) -> Tensor:
    return (codes - 1) & (2**bits - 1)


def _zero_codes(op: str, weight: PackedWeight) -> Tensor:
    """The zero points as codes, uint8 [G, N]."""
    if weight.zeros is None:
        return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)
    codes = weight.zeros.clamp(0, 2**weight.bits - 1).to(torch.uint8)
    check(
        op,
        torch.equal(codes.to(weight.zeros.dtype), weight.zeros),
        f"weight: expected zeros that are integers from 0 to {2**weight.bits - 1}",
    )
    return codes


# ----------------------------------------------------------------------------------- bit streams


def _check_matrix(op: str, name: str, tensor: Tensor) -> None:
    matrix = tensor.dim() == 2 and tensor.numel() > 0
    check(op, matrix, f"{name}: expected a matrix, got shape {tuple(tensor.shape)}")
    check(op, tensor.dtype == torch.int32, f"{name}: expected torch.int32, got {tensor.dtype}")


def _check_bits(op: str, bits: int) -> None:
    check(op, bits in BITS, f"bits: expected one of {BITS}, got {bits}")


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [R, count]: the first values of each row of words, int32 [R, >= count * bits / 32].

    Eight values fill `bits` bytes, and none straddles more than two.
    """
    mask, units = 2**bits - 1, -(-count // 8)
    # A copy, since what is contiguous because it has one column may still not be seen as bytes.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    data = pad(data, (0, units * bits - data.shape[1])).unflatten(1, (units, bits))
    values = data.new_empty(len(words), units, 8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        value = data[..., byte] >> shift
        if shift + bits > 8:
            value |= data[..., byte + 1] << (8 - shift)
        values[..., i] = value & mask
    return values.flatten(1)[:, :count]


def _pack_stream(values: Tensor, bits: int) -> Tensor:
    """int32 [R, ceil(count * bits / 32)] of uint8 [R, count]; bits left over are 0."""
    count = values.shape[1]
    units = -(-count // 8)
    values = pad(values, (0, 8 * units - count)).unflatten(1, (units, 8))
    data = values.new_zeros(len(values), units, bits)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        data[..., byte] |= values[..., i] << shift
        if shift + bits > 8:
            data[..., byte + 1] |= values[..., i] >> (8 - shift)
    data = pad(data.flatten(1), (0, 4 * _words(count, bits) - units * bits))
    # A copy in any case: of a single row, a slice of a longer one counts as contiguous.
    return data.clone(memory_format=torch.contiguous_format).view(torch.int32)

"""Weights of 2, 3, 4 and 8 bits: their packed layout, their values, and the product with them."""

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.reference.epilogue import epilogue
from tests.reference.norm import rms_norm
from tests.reference.threads import single_threaded

TILE = 64


def _words_of_tile(bits: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """Where the codes of a 64 x 64 tile are: for each part of a code (int32 in the tile [64, 64],
    first bit in it [64, 64], bits of the part, first bit of the part in the code).
    """
    n, k = torch.meshgrid(torch.arange(TILE), torch.arange(TILE), indexing="ij")
    row16, step = n // 16, k // 16
    r = n % 16 // 8 + 2 * (k % 16 // 8)
    lane = 4 * (n % 8) + k % 8 // 2
    h = k % 2

    def place(word: Tensor) -> Tensor:
        return word // 4 * 128 + lane * 4 + word % 4

    if bits == 4:
        return [(place(4 * row16 + step), 4 * r + 16 * h, 4, 0)]
    if bits == 8:
        return [(place(2 * (4 * row16 + step) + r // 2), 8 * (r % 2) + 16 * h, 8, 0)]
    if bits == 2:
        return [(place(2 * row16 + step // 2), 2 * (r + 4 * (step % 2)) + 16 * h, 2, 0)]
    # Of 3 bits, one at a time: steps 0 to 2 have a word each, the last step what these leave.
    last, corner = step == 3, (step == 3) & (r == 3)
    return [
        (
            place(3 * row16 + torch.where(corner, b, torch.where(last, r, step))),
            torch.where(corner, 15, torch.where(last, 12, 3 * r) + b) + 16 * h,
            1,
            b,
        )
        for b in range(3)
    ]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """qweight of codes [N, K] in 0 .. 2^bits - 1; padded codes are 0."""
    n_tiles, k_tiles = (-(-size // TILE) for size in codes.shape)
    padded = torch.zeros(n_tiles * TILE, k_tiles * TILE, dtype=torch.int64)
    padded[: codes.shape[0], : codes.shape[1]] = codes.cpu()
    tiles = padded.view(n_tiles, TILE, k_tiles, TILE).transpose(1, 2).flatten(2)
    words = torch.zeros(n_tiles, k_tiles, bits * 128, dtype=torch.int64)
    for word, first, width, begin in _words_of_tile(bits):
        part = ((tiles >> begin) & ((1 << width) - 1)) << first.flatten()
        words.index_add_(2, word.flatten(), part)  # bits do not meet: a sum is a union
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32).to(codes.device)


def unpack_codes(qweight: Tensor, bits: int, n: int, k: int) -> Tensor:
    """The codes [N, K] of a qweight."""
    n_tiles, k_tiles, _ = qweight.shape
    words = qweight.long()
    codes = torch.zeros(n_tiles, k_tiles, TILE * TILE, dtype=torch.int64, device=qweight.device)
    for word, first, width, begin in _words_of_tile(bits):
        at, shift = (x.flatten().to(qweight.device) for x in (word, first))
        codes |= ((words[:, :, at] >> shift) & ((1 << width) - 1)) << begin
    tiles = codes.view(n_tiles, k_tiles, TILE, TILE).transpose(1, 2)
    return tiles.reshape(n_tiles * TILE, k_tiles * TILE)[:n, :k]


def dequantized(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    k: int,
) -> Tensor:
    """W [N, K] in float64; column k multiplies x[:, perm[k]]."""
    codes = unpack_codes(qweight, bits, scales.shape[1], k).double()
    group = torch.arange(k, device=qweight.device) // group_size
    zero = 2.0 ** (bits - 1) if zeros is None else zeros.double()[group].T
    return scales.double()[group].T * (codes - zero)


@single_threaded
def low_bit_gemm(
    bits: int,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    outlier_offsets: Tensor | None = None,
    outlier_columns: Tensor | None = None,
    outlier_values: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    factors: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """x W^T + bias, and the `epilogue`. W is what the codes stand for and the outliers, rounded to
    `factors` and `dtype` first; x is normalised if there is a norm_weight.
    """
    weight = dequantized(qweight, scales, zeros, bits=bits, group_size=group_size, k=x.shape[1])
    if outlier_offsets is not None:
        for n, (begin, end) in enumerate(itertools.pairwise(outlier_offsets.tolist())):
            for column, value in zip(
                outlier_columns[begin:end].tolist(), outlier_values[begin:end], strict=True
            ):
                weight[n, column] += value.double()
    weight = weight.to(factors or dtype).to(dtype)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, weight_offset=norm_weight_offset, dtype=dtype)
    if perm is not None:
        x = x[:, perm.long()]
    out = x.to(dtype) @ weight.T
    return epilogue(out if bias is None else out + bias.to(dtype), **options)

"""Checkpoint formats of low-bit weights, written value by value as their packers store them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer.ops.repack import AwqTensors

Array = np.ndarray[Any, Any]


@dataclass
class Matrix:
    """Codes [N, K], zero points and scales [N, G], the group of each column; and what they say."""

    codes: Array
    zeros: Array
    scales: Tensor
    g_idx: Array
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups(self) -> int:
        return int(self.zeros.shape[1])

    def values(self) -> Tensor:
        """W [N, K] in fp32."""
        n, k = self.shape
        result = torch.empty(n, k)
        scales = self.scales.tolist()
        for row in range(n):
            for column in range(k):
                g = self.g_idx[column]
                code, zero = int(self.codes[row, column]), int(self.zeros[row, g])
                result[row, column] = scales[row][g] * (code - zero)
        return result


def random_matrix(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Matrix:
    rng = np.random.default_rng(n * 7919 + k * 31 + bits)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    zeros = rng.integers(0, 2**bits, (n, groups))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    g_idx = np.arange(k) // size
    if act_order:
        rng.shuffle(g_idx)
    codes = rng.integers(0, 2**bits, (n, k))
    return Matrix(codes, zeros, torch.rand(n, groups).to(dtype), g_idx, bits, group_size)


# --------------------------------------------------------------------- the formats, value by value


def words(values: list[int], bits: int) -> list[int]:
    """Values one after the other, lowest bits first, as 32-bit words: through one large integer."""
    stream = sum(int(value) << (bits * i) for i, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    return [signed((stream >> (32 * i)) & 0xFFFFFFFF) for i in range(count)]


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def awq_words(rows: Array) -> Tensor:
    """[R, N] to [R, N/8]: a word's nibbles, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7."""
    result = []
    for row in rows:
        line = []
        for at in range(0, len(row), 8):
            nibbles = [row[at + i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            line += words(nibbles, 4)
        result.append(line)
    return int32(result)


def awq_file(matrix: Matrix) -> AwqTensors:
    return AwqTensors(
        awq_words(matrix.codes.T), awq_words(matrix.zeros.T), matrix.scales.t().contiguous()
    )


def gemv_width(k: int, group_size: int) -> int:
    """The words of a row of zero points, as AutoAWQ counts them."""
    multiple = 1 if group_size >= 128 else {64: 2, 32: 4}[group_size]
    width = 0
    while 8 * width * group_size < k or width % multiple:
        width += 1
    return width


def gemv_file(matrix: Matrix) -> AwqTensors:
    n, k = matrix.shape
    width = gemv_width(k, k if matrix.group_size == -1 else matrix.group_size)
    scales = torch.zeros(n, 8 * width, dtype=matrix.scales.dtype)
    qzeros = torch.zeros(n, width, dtype=torch.int32)
    for row in range(n):
        line = words(list(matrix.zeros[row]), 4)
        qzeros[row, : len(line)] = int32([line])[0]
        scales[row, : matrix.groups] = matrix.scales[row]
    return AwqTensors(int32([words(list(row), 4) for row in matrix.codes]), qzeros, scales)


def gptq_file(matrix: Matrix, version: str) -> dict[str, Tensor]:
    less = 1 if version == "gptq" else 0
    bits = matrix.bits
    stored = (matrix.zeros.T - less) % 2**bits
    return {
        "qweight": int32([words(list(row), bits) for row in matrix.codes]).t().contiguous(),
        "qzeros": int32([words(list(row), bits) for row in stored]),
        "scales": matrix.scales.t().contiguous(),
        "g_idx": torch.tensor(matrix.g_idx, dtype=torch.int32),
    }


def compressed_file(matrix: Matrix) -> dict[str, Tensor]:
    """Signed values from -2^(bits - 1), which the format stores plus 2^(bits - 1)."""
    bits, half = matrix.bits, 2 ** (matrix.bits - 1)
    values, zero_points = matrix.codes - half, matrix.zeros - half
    return {
        "weight_packed": int32([words(list(row + half), bits) for row in values]),
        "weight_scale": matrix.scales.contiguous(),
        "weight_shape": torch.tensor(matrix.shape),
        "weight_zero_point": int32([words(list(column + half), bits) for column in zero_points.T])
        .t()
        .contiguous(),
        "weight_g_idx": torch.tensor(matrix.g_idx, dtype=torch.int32),
    }

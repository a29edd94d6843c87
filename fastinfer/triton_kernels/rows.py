"""The leading dimensions of tensors as rows that a kernel walks, whatever their strides.

A kernel walks two dimensions: row r is at (r // inner) * outer stride + (r % inner) * inner stride.
Nearly always the dimensions merge into one, and a row's offset is a plain product. Tensors with
more dimensions that do not merge are given to the kernel slab by slab.

Elements are converted to and from float32 here as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels import launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)
INT32_ROWS = 1 << 31  # rows that are divided by `inner` are 32-bit numbers


@dataclass(frozen=True)
class Rows:
    """Rows of some tensors of equal leading sizes; strides in elements."""

    count: int
    inner: int  # 1 where one dimension is enough
    outer_strides: tuple[int, ...]  # of each tensor
    inner_strides: tuple[int, ...]

    @property
    def nested(self) -> bool:
        return self.inner > 1


def merged_dims(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride in each tensor) of the fewest dimensions that walk all tensors alike.

    Args:
        sizes: the leading sizes, the same for every tensor.
        strides: for each tensor those of the leading dimensions.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if dims and all(last == size * step for last, step in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, tuple(steps))
        else:
            dims.append((size, tuple(steps)))
    return dims


def walk(*tensors: Tensor) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
    """The rows to launch for, with tensors whose data start at row 0; mostly one launch.

    Args:
        tensors: of equal leading sizes, [..., any]; dense in the last dimension.
    """
    first = tensors[0]
    leading = range(first.dim() - 1)
    dims = merged_dims(
        [first.shape[i] for i in leading], [[t.stride(i) for i in leading] for t in tensors]
    )
    zeros = (0,) * len(tensors)
    if len(dims) <= 1:
        size, strides = dims[0] if dims else (1, zeros)
        yield Rows(size, 1, strides, zeros), tensors
        return
    # Rows do not depend on each other, so the largest dimensions may be those of the kernel.
    by_size = sorted(range(len(dims)), key=lambda i: dims[i][0])
    two = dims[by_size[-1]][0] * dims[by_size[-2]][0] < INT32_ROWS
    around = [dims[i] for i in by_size[: -2 if two else -1]]
    outer, outer_strides = dims[min(by_size[-2:]) if two else by_size[-1]]
    inner, inner_strides = dims[max(by_size[-2:])] if two else (1, zeros)
    rows = Rows(outer * inner, inner, outer_strides, inner_strides)
    for index in itertools.product(*(range(size) for size, _ in around)):
        slab = tuple(
            t.as_strided(
                (1, t.shape[-1]),
                (t.shape[-1], 1),
                t.storage_offset()
                + sum(i * strides[n] for i, (_, strides) in zip(index, around, strict=True)),
            )
            for n, t in enumerate(tensors)
        )
        yield rows, slab if around else tensors


def walk_in_order(*tensors: Tensor) -> Rows | None:
    """All rows as one launch walks them, row r being the r-th; None where they take more than the
    two dimensions of a kernel.

    Args:
        tensors: as those of `walk`.
    """
    leading = range(tensors[0].dim() - 1)
    dims = merged_dims(
        [tensors[0].shape[i] for i in leading], [[t.stride(i) for i in leading] for t in tensors]
    )
    if len(dims) > 2:
        return None
    zeros = (0,) * len(tensors)
    if len(dims) <= 1:
        size, strides = dims[0] if dims else (1, zeros)
        return Rows(size, 1, strides, zeros)
    (outer, outer_strides), (inner, inner_strides) = dims
    return Rows(outer * inner, inner, outer_strides, inner_strides)


def vector_width(tensors: Sequence[Tensor], *, strides: Sequence[int], width: int) -> int:
    """Elements of an access of 16 bytes if all rows allow it, else 1.

    Args:
        tensors: whose data start at the rows' beginning; of one element size.
        strides: every stride between rows, in elements.
        width: the length of a row, or where else in it accesses begin.
    """
    full = full_width(tensors[0])
    if width % full or any(stride % full for stride in strides):
        return 1
    return 1 if any(t.data_ptr() % 16 for t in tensors) else full


def full_width(x: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // x.element_size()


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride, NESTED: tl.constexpr, VECTOR: tl.constexpr):
    """Where rows begin, in elements; multiples of VECTOR. `row` is 32-bit if NESTED."""
    if NESTED:
        outer = (row // inner).to(tl.int64)
        offset = outer * outer_stride + (row % inner).to(tl.int64) * inner_stride
    else:
        offset = row.to(tl.int64) * outer_stride
    return tl.multiple_of(offset, VECTOR)


@triton.jit
def to_float(x):
    """Elements as float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:  # the interpreter's own drops bits of subnormals
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def to_element(x, dtype: tl.constexpr):
    """float32 rounded to an element type, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter's own rounds down
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)

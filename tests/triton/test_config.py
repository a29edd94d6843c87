"""Which configuration a problem gets, and how its rows are walked; no kernel runs."""

import itertools

import pytest
import torch
from torch import Tensor

from fastinfer.triton_kernels.activation import activation_config
from fastinfer.triton_kernels.kv_cache import append_config
from fastinfer.triton_kernels.norm import NormConfig, norm_config
from fastinfer.triton_kernels.quantize import QuantizeConfig, passes_of, quantize_config
from fastinfer.triton_kernels.rotary import rotary_config
from fastinfer.triton_kernels.rows import Rows, merged_dims, vector_width, walk, walk_in_order
from fastinfer.triton_kernels.sampling import sample_config


def power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


# ----------------------------------------------------------------------------------------- rows


def offsets(rows: Rows, which: int) -> list[int]:
    """What a kernel computes."""
    return [
        row // rows.inner * rows.outer_strides[which] + row % rows.inner * rows.inner_strides[which]
        for row in range(rows.count)
    ]


def addresses(x: Tensor) -> list[int]:
    """Where the rows of a tensor begin, in its storage."""
    steps = list(itertools.product(*(range(size) for size in x.shape[:-1])))
    return [
        x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=False))
        for index in steps
    ]


def walked(*tensors: Tensor) -> list[tuple[int, ...]]:
    """The addresses of a row in every tensor, for all rows of all launches."""
    found: list[tuple[int, ...]] = []
    for rows, starts in walk(*tensors):
        assert power_of_two(rows.inner) or rows.nested
        parts = [
            [start.storage_offset() + o for o in offsets(rows, i)] for i, start in enumerate(starts)
        ]
        found += zip(*parts, strict=True)
    return found


SHAPES = {
    "vector": torch.empty(8),
    "matrix": torch.empty(5, 8),
    "columns": torch.empty(5, 32)[:, 3:11],
    "heads": torch.empty(5, 48, 8)[:, 4:12],
    "swapped": torch.empty(3, 4, 5, 8).transpose(0, 2),
    "expanded": torch.empty(1, 3, 1, 8).expand(2, 3, 4, 8),
    "ones": torch.empty(1, 1, 3, 1, 8),
    "many": torch.empty(2, 4, 3, 4, 2, 4, 3, 4, 8)[:, :2, :, 1:3, :, ::2, :, 3:],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_is_walked_once(name: str) -> None:
    x = SHAPES[name]
    out = torch.empty(x.shape)
    expected = sorted(zip(addresses(x), addresses(out), strict=True))
    assert sorted(walked(x, out)) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_walked_in_the_order_of_their_indices(name: str) -> None:
    x = SHAPES[name]
    out = torch.empty(x.shape)
    rows = walk_in_order(x, out)
    if rows is None:
        assert name in ("swapped", "expanded", "many")  # three dimensions or more
        return
    assert rows.count == len(addresses(x))
    for which, tensor in enumerate((x, out)):
        found = [tensor.storage_offset() + offset for offset in offsets(rows, which)]
        assert found == addresses(tensor)


def test_usual_rows_take_one_launch_and_one_product() -> None:
    for x in (torch.empty(8), torch.empty(5, 8), torch.empty(5, 32)[:, :8], torch.empty(3, 4, 8)):
        launches = list(walk(x, torch.empty(x.shape)))
        assert len(launches) == 1 and not launches[0][0].nested
    heads = torch.empty(5, 48, 8)[:, :32]
    [(rows, _)] = walk(heads, torch.empty(heads.shape))
    assert rows.nested and rows.count == 5 * 32


def test_dimensions_merge_only_where_all_tensors_allow_it() -> None:
    assert merged_dims([3, 4], [[32, 8], [32, 8]]) == [(12, (8, 8))]
    assert merged_dims([3, 4], [[32, 8], [64, 8]]) == [(3, (32, 64)), (4, (8, 8))]
    assert merged_dims([3, 1, 4], [[32, 5, 8], [32, 7, 8]]) == [(12, (8, 8))]
    assert merged_dims([1], [[77]]) == []


def test_row_numbers_that_are_divided_stay_below_32_bits() -> None:
    x = torch.empty_strided((2**30, 3, 1), (7, 5, 1), device="meta")
    launches = [rows for rows, _ in walk(x, x)]
    assert [rows.count for rows in launches] == [2**30] * 3
    assert not any(rows.nested for rows in launches)


@pytest.mark.parametrize(
    ("offset", "stride", "width", "expected"),
    [(0, 64, 64, 8), (8, 72, 64, 8), (1, 64, 64, 1), (0, 65, 64, 1), (0, 64, 63, 1)],
)
def test_vector_accesses_need_alignment(
    offset: int, stride: int, width: int, expected: int
) -> None:
    x = torch.empty(1000, dtype=torch.bfloat16)[offset:]
    assert vector_width([x], strides=[stride, 0], width=width) == expected


# -------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("hidden", [1, 2, 31, 128, 576, 4096, 8192, 16384, 28672, 32768, 32769])
def test_norm(hidden: int, itemsize: int, centre: bool) -> None:
    config = norm_config(hidden, itemsize, centre)
    assert power_of_two(config.rows) and power_of_two(config.block)
    assert config.looped == (config.block < hidden) == (hidden * itemsize > 65536)
    per_thread = config.rows * config.block / (32 * config.num_warps)
    assert per_thread <= (64 if centre else 32) and config.num_warps <= 32


def test_norm_choices() -> None:
    """One row of a model's hidden size has the threads of one vector load or two each."""
    assert norm_config(4096, 2, centre=False) == NormConfig(1, 4096, False, 8)
    assert norm_config(4096, 2, centre=True) == NormConfig(1, 4096, False, 4)
    assert norm_config(128, 2, centre=False).rows == 16


@pytest.mark.parametrize("width", [1, 33, 3584, 8192, 28672])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_activation(rows: int, width: int) -> None:
    config = activation_config(rows, width)
    assert config.rows * config.block in (1024, 2048)
    assert power_of_two(config.rows) and power_of_two(config.block)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 128, 129, 8192, 2**31])
@pytest.mark.parametrize("columns", [1, 100, 128, 4096, 28672, 40000, 2**31])
def test_quantize(rows: int, columns: int, itemsize: int, static: bool) -> None:
    """Pieces cover a block; a program has as many elements as its registers hold."""
    config = quantize_config(rows, columns, itemsize, static)
    assert all(power_of_two(n) for n in (config.pieces, config.rows, config.columns))
    tile = config.pieces * config.rows * config.columns
    assert tile * itemsize <= 65536 and tile <= 32 * 32 * config.num_warps
    whole = config.rows >= rows and config.columns >= columns
    assert whole or config.pieces == 1
    assert whole or config.rows * config.columns == 4096
    pieces = -(-rows // config.rows) * -(-columns // config.columns)
    for blocks in (1, 3, 1000):
        parts, steps = passes_of(blocks, pieces, 132)
        assert (parts - 1) * steps < pieces <= parts * steps
        assert parts == 1 or (parts - 1) * blocks <= 4 * 132


def test_quantize_choices() -> None:
    """A token of a model's hidden size has the threads of two vector loads each; groups share."""
    assert quantize_config(1, 4096, 2, False) == QuantizeConfig(1, 1, 4096, 8)
    assert quantize_config(1, 128, 2, False) == QuantizeConfig(16, 1, 128, 4)
    assert quantize_config(128, 128, 2, False) == QuantizeConfig(1, 128, 128, 32)
    assert passes_of(1, 16384, 132) == (512, 32)


@pytest.mark.parametrize("heads", [1, 2, 7, 32, 128])
@pytest.mark.parametrize("rotary_dim", [2, 20, 64, 128, 512])
def test_rotary(heads: int, rotary_dim: int) -> None:
    config = rotary_config(heads, rotary_dim)
    assert power_of_two(config.heads) and power_of_two(config.block)
    assert rotary_dim // 2 <= config.block and config.heads * config.block <= 512


@pytest.mark.parametrize("dims", [(1, 1), (7, 33), (128, 128), (192, 128), (512, 512)])
@pytest.mark.parametrize("rows", [1, 8, 65536])
def test_append(rows: int, dims: tuple[int, int]) -> None:
    config = append_config(rows, *dims)
    assert config.k_block >= dims[0] and config.v_block >= dims[1]
    assert power_of_two(config.rows) and config.rows * max(config.k_block, config.v_block) <= 2048


@pytest.mark.parametrize("vocab", [1, 100, 2048, 2049, 50257, 128256, 262144, 2**31 - 1])
@pytest.mark.parametrize("rows", [1, 3, 64, 256, 5000])
@pytest.mark.parametrize("draws", [True, False])
def test_sample(rows: int, vocab: int, draws: bool) -> None:
    config = sample_config(rows, vocab, 132, draws)
    assert (config.splits - 1) * config.chunk < vocab <= config.splits * config.chunk
    assert config.chunk % config.block == 0 and power_of_two(config.block)
    assert config.splits == 1 or rows * config.splits <= 2 * 8 * 132 + rows
    # The sums of a row are cut the same way whatever the batch and the GPU.
    alone = sample_config(1, vocab, 80)
    assert config.threshold_block == alone.threshold_block
    assert config.threshold_warps == alone.threshold_warps


def test_one_row_of_a_large_vocabulary_spreads_over_the_gpu() -> None:
    assert sample_config(1, 151936, 132).splits >= 64

"""How low-bit products are cut on Hopper: pure functions, run here without a GPU."""

from __future__ import annotations

import itertools

import pytest

SMS = 132  # of an H200

SIZES = [1, 40, 64, 100, 576, 1000, 4096, 6144, 8192, 10944, 14336, 28672, 151936]
FEW = list(itertools.product((2, 3, 4, 8), (0, 1), SIZES, SIZES, (78, 114, SMS)))
ROWS = (17, 32, 64, 65, 128, 256, 300, 512, 4096)
MANY = list(itertools.product(ROWS, SIZES, SIZES, (1, 2), (78, 114, SMS)))
# Few rows, 4 bits, groups of 64 and more: what was fastest of all shapes and clusters on one H200.
FASTEST = {
    (28672, 4096): (7, 8, 1),
    (8192, 28672): (8, 16, 2),
    (4096, 14336): (4, 16, 2),
    (6144, 4096): (6, 16, 2),
    (4096, 4096): (4, 16, 2),
}
# Many rows, groups of 128: rows of a block, warpgroups that cut K, whether blocks share x, and the
# blocks of a cluster or parts that cut K.
FASTEST_OF_MANY = {
    (128, 28672, 4096): (128, 1, True, 1),
    (128, 8192, 28672): (128, 1, True, 4),
    (256, 28672, 4096): (256, 1, True, 1),
    (256, 8192, 28672): (256, 1, True, 2),
    (256, 4096, 14336): (256, 1, True, 4),
    (512, 4096, 14336): (256, 1, True, 2),
    (512, 8192, 28672): (256, 1, True, 1),
}

Table = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def tables(program) -> tuple[Table, Table]:
    requests = [("few", *request) for request in FEW] + [("many", *request) for request in MANY]
    lines = program("low_bit_config")(*(" ".join(map(str, request)) for request in requests))
    answers = [tuple(map(int, line.split())) for line in lines]
    assert len(answers) == len(requests)
    return dict(zip(FEW, answers, strict=False)), dict(zip(MANY, answers[len(FEW) :], strict=True))


def tiles(size: int) -> int:
    return -(-size // 64)


def test_few_rows_have_a_configuration_whatever_the_shape(tables) -> None:
    for (bits, *_), (rows, warps, cluster) in tables[0].items():
        assert rows >= 1 and warps in (8, 16) and cluster in (1, 2, 4, 8)
        assert rows % {2: 2, 3: 4, 4: 1, 8: 1}[bits] == 0  # whole blocks of codes


def test_clusters_leave_work_to_every_block_and_fit_at_once(tables) -> None:
    for (_, _, n, k, sms), (rows, warps, cluster) in tables[0].items():
        if cluster > 1:
            assert -(-tiles(n) * 4 // rows) * cluster <= sms * (16 // warps)
            assert tiles(k) // cluster >= warps // 2
    for (m, n, k, _, sms), (tokens, warpgroups, splits, shared, cluster) in tables[1].items():
        if splits * cluster > 1:
            assert -(-tiles(k) // 2) // (splits * cluster) >= 2
        if cluster > 1 and not shared:
            features = warpgroups // splits
            assert -(-m // tokens) * -(-tiles(n) // features) * cluster <= sms


def test_tiles_of_many_rows_are_as_large_as_covers_them(tables) -> None:
    for (m, n, k, groups, sms), (tokens, *_) in tables[1].items():
        if (n, k) == (28672, 4096) and (groups, sms) == (1, SMS):
            assert tokens == (32 if m <= 32 else 64 if m <= 64 else tokens)
            assert m <= 64 or tokens >= 128


@pytest.mark.parametrize(("shape", "fastest"), FASTEST_OF_MANY.items())
def test_the_fastest_of_many_rows_is_chosen(tables, shape, fastest) -> None:
    tokens, _, splits, shared, cluster = tables[1][(*shape, 1, SMS)]
    assert (tokens, splits, bool(shared), cluster) == fastest


@pytest.mark.parametrize(("shape", "fastest"), FASTEST.items())
def test_the_fastest_is_chosen(tables, shape, fastest) -> None:
    assert tables[0][(4, 0, *shape, SMS)] == fastest

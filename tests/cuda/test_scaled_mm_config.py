"""How scaled products are cut on Hopper: a pure function, run here without a GPU."""

from __future__ import annotations

import itertools

import pytest

SMS = 132  # of an H200
WARPGROUPS = 4
FEATURES = (64, 96, 128, 160, 176, 192)  # of a tile with many rows
BLOCK_FEATURES = (64, 128, 192)  # where scales vary along K
SIZES = [1, 40, 64, 1000, 4096, 6144, 8192, 14336, 28672, 151936]
REQUESTS = list(
    itertools.product((1, 16, 17, 64, 128, 256, 1024, 4096), SIZES, SIZES, (78, 114, SMS), (0, 1))
)

Table = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def table(program) -> Table:
    lines = program("scaled_mm_config")(*(" ".join(map(str, request)) for request in REQUESTS))
    answers = [tuple(map(int, line.split())) for line in lines]
    return dict(zip(REQUESTS, answers, strict=True))


def test_every_shape_has_a_configuration(table) -> None:
    for (m, *_), (tokens, splits, cluster, features, of_blocks) in table.items():
        assert tokens == (16 if m <= 16 else 64)
        assert splits in (1, 2, 4) and cluster in (1, 2, 4, 8)
        assert features in FEATURES and of_blocks in BLOCK_FEATURES


def test_gates_share_a_block_with_what_they_multiply(table) -> None:
    for (*_, gated), (_, splits, *_) in table.items():
        assert not gated or WARPGROUPS // splits >= 2


def test_clusters_fit_at_once_and_leave_work_to_every_part(table) -> None:
    for (m, n, k, sms, _), (tokens, splits, cluster, *_) in table.items():
        if splits * cluster > 1:
            assert -(-k // 128) // (splits * cluster) >= 2
        if cluster > 1:
            features = 64 * WARPGROUPS // splits
            assert -(-m // tokens) * -(-n // features) * cluster <= sms


def test_weights_alone_fill_the_device(table) -> None:
    """Where bytes of the weight take the time, few multiprocessors are idle."""
    for n, k in ((28672, 4096), (8192, 28672), (4096, 14336), (4096, 4096)):
        _, splits, cluster, *_ = table[(1, n, k, SMS, 0)]
        features = 64 * WARPGROUPS // splits
        assert -(-n // features) * cluster >= 0.8 * SMS


def waves(m: int, n: int, features: int, sms: int) -> int:
    return -(-(-(-m // 256) * -(-n // features)) // (sms // 2))


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (256, 28672, 4096, (160, 192)),
        (4096, 28672, 4096, (192, 192)),
        (256, 8192, 28672, (128, 128)),
        (4096, 8192, 28672, (192, 192)),
        (256, 4096, 14336, (64, 64)),
        (1024, 4096, 14336, (128, 128)),
    ],
)
def test_tiles_divide_among_pairs_of_multiprocessors(table, m, n, k, expected) -> None:
    assert table[(m, n, k, SMS, 0)][3:] == expected


def test_no_other_width_of_tiles_takes_much_less_time(table) -> None:
    """Of all that one pair multiplies; 64 more features are what a stage takes besides."""
    for (m, n, _, sms, _), (*_, features, of_blocks) in table.items():
        if m < 256:
            continue
        for chosen, widths in ((features, FEATURES), (of_blocks, BLOCK_FEATURES)):
            time = {f: waves(m, n, f, sms) * (f + 64) for f in widths}
            assert time[chosen] <= 1.25 * min(time.values())

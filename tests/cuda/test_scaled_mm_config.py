"""How scaled products with few rows are cut on Hopper: a pure function, run here without a GPU."""

from __future__ import annotations

import itertools

import pytest

SMS = 132  # of an H200
WARPGROUPS = 4
SIZES = [1, 40, 64, 1000, 4096, 6144, 8192, 14336, 28672, 151936]
REQUESTS = list(itertools.product((1, 16, 17, 64, 128), SIZES, SIZES, (78, 114, SMS), (0, 1)))

Table = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def table(program) -> Table:
    lines = program("scaled_mm_config")(*(" ".join(map(str, request)) for request in REQUESTS))
    answers = [tuple(map(int, line.split())) for line in lines]
    return dict(zip(REQUESTS, answers, strict=True))


def test_every_shape_has_a_configuration(table) -> None:
    for (m, *_), (tokens, splits, cluster) in table.items():
        assert tokens == (16 if m <= 16 else 64)
        assert splits in (1, 2, 4) and cluster in (1, 2, 4, 8)


def test_gates_share_a_block_with_what_they_multiply(table) -> None:
    for (*_, gated), (_, splits, _) in table.items():
        assert not gated or WARPGROUPS // splits >= 2


def test_clusters_fit_at_once_and_leave_work_to_every_part(table) -> None:
    for (m, n, k, sms, _), (tokens, splits, cluster) in table.items():
        if splits * cluster > 1:
            assert -(-k // 128) // (splits * cluster) >= 2
        if cluster > 1:
            features = 64 * WARPGROUPS // splits
            assert -(-m // tokens) * -(-n // features) * cluster <= sms


def test_weights_alone_fill_the_device(table) -> None:
    """Where bytes of the weight take the time, few multiprocessors are idle."""
    for n, k in ((28672, 4096), (8192, 28672), (4096, 14336), (4096, 4096)):
        _, splits, cluster = table[(1, n, k, SMS, 0)]
        features = 64 * WARPGROUPS // splits
        assert -(-n // features) * cluster >= 0.8 * SMS

"""Tables of measured configurations of low-bit products, run here without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

SMS = 132  # of an H200

Numbers = tuple[int, ...]
Ask = Callable[..., list[str]]

FEW = (4, 8, 28672, 4096, 128)  # bits, M, N, K, group size
MANY = (4, 256, 28672, 4096, 128)
FEW_CONFIG, OTHER_FEW_CONFIG = (0, 4, 16, 2, 0), (0, 8, 8, 1, 0)
MANY_CONFIG = (1, 64, 2, 0, 2)


@pytest.fixture(scope="module")
def ask(program) -> Ask:
    """Runs requests in one process; an answer each."""
    run = program("tuned_configs", "gemm/tuned_configs.cpp")

    def one_each(*requests: str) -> list[str]:
        answers: list[str] = run(*requests)
        assert len(answers) == len(requests)
        return answers

    return one_each


def words(*parts: object) -> str:
    """A request; tuples are written as their items."""
    items = (part if isinstance(part, tuple) else (part,) for part in parts)
    return " ".join(map(str, itertools.chain.from_iterable(items)))


def setting(name: str, *entries: tuple[Numbers, Numbers]) -> str:
    return words("set", name, len(entries), *itertools.chain.from_iterable(entries))


def usable(ask: Ask, shapes: Iterable[Numbers], sms: int = SMS) -> list[list[Numbers]]:
    """Of each shape the default and then all; or nothing."""
    answers = ask(*(words("usable", shape, sms) for shape in shapes))
    numbers = [tuple(map(int, answer.split())) for answer in answers]
    return [[row[i : i + 5] for i in range(0, len(row), 5)] for row in numbers]


@pytest.mark.parametrize(
    ("bucket", "rows"),
    [
        (8, (1, 2, 8)),
        (16, (9, 16)),
        (32, (17, 32)),
        (64, (33, 63, 64)),
        (256, (129, 256)),
        (4096, (2049, 4096)),
        (8192, (4097, 8192, 8193, 1 << 40)),
    ],
)
def test_buckets_of_rows(ask, bucket, rows) -> None:
    assert ask(*(words("bucket", m) for m in rows)) == [str(bucket)] * len(rows)


def test_a_bucket_is_its_own_and_ends_where_the_kernel_does(ask) -> None:
    buckets = [int(answer) for answer in ask(*(words("bucket", m) for m in range(1, 9000)))]
    assert buckets == sorted(buckets)
    ends = sorted(set(buckets))
    assert [int(answer) for answer in ask(*(words("bucket", m) for m in ends))] == ends
    assert all((bucket <= 16) == (m <= 16) for m, bucket in enumerate(buckets, 1))


def test_the_default_is_usable_and_nothing_is_twice(ask) -> None:
    shapes = list(
        itertools.product((2, 3, 4, 8), (1, 9, 17, 300), (40, 28672), (1, 576, 4096), (64, 128))
    )
    for shape, (default, *all_configs) in zip(shapes, usable(ask, shapes), strict=True):
        assert default in all_configs and len(set(all_configs)) == len(all_configs), shape
        assert {config[0] for config in all_configs} == {int(shape[1] > 16)}


def test_short_k_is_not_cut_too_often(ask) -> None:
    few, many = usable(ask, [(4, 8, 4096, 512, 128), (4, 256, 4096, 512, 128)])
    assert {(warps, cluster) for _, _, warps, cluster, _ in few} == {(16, 1), (8, 1), (8, 2)}
    assert max(splits * cluster for _, _, splits, _, cluster in many) == 2


@pytest.mark.parametrize(
    "shape",
    [(5, 8, 64, 64, 64), (4, 0, 64, 64, 64), (4, 8, 0, 64, 64), (4, 8, 64, -1, 64),
     (4, 8, 64, 64, 0), (4, 32, 64, 256, 32), (4, 8, 2**31, 64, 64), (4, 8, 64, 2**63 - 1, 64),
     (4, 2**63 - 1, 64, 64, 64)],
)  # fmt: skip
def test_products_that_the_kernels_do_not_take(ask, shape) -> None:
    assert usable(ask, [shape]) == [[]]
    assert ask(setting("gpu", (shape, FEW_CONFIG)), setting("gpu", (shape, MANY_CONFIG))) == [
        "0",
        "0",
    ]


def test_entries_are_found_by_device_and_by_what_they_share(ask) -> None:
    few, many = words(FEW_CONFIG), words(MANY_CONFIG)
    answers = {
        words("find", "gpu", FEW): few,
        words("find", "gpu", 4, 1, 28672, 4096, 128): few,
        words("find", "gpu", 4, 1, 28671, 4033, 64): few,  # the same tiles, groups as large
        words("find", "gpu", 4, 9, 28672, 4096, 128): "none",
        words("find", "gpu", 8, 8, 28672, 4096, 128): "none",
        words("find", "gpu", 4, 8, 28672, 4096, 32): "none",
        words("find", "gpu", 4, 8, 28672, 4160, 128): "none",
        words("find", "gpu", MANY): many,
        words("find", "gpu", 4, 129, 28672, 4096, 256): many,
        words("find", "gpu", 4, 257, 28672, 4096, 128): "none",
        words("find", "gpu", 4, 256, 28672, 4096, 64): "none",
        words("find", "another", FEW): "none",
    }
    filled = setting("gpu", (FEW, FEW_CONFIG), (MANY, MANY_CONFIG))
    assert ask(filled, *answers) == ["2", *answers.values()]


def test_of_entries_for_the_same_products_the_last_holds(ask) -> None:
    """And all of them are counted."""
    same = (4, 1, 28671, 4033, 64)
    find, few, other = words("find", "gpu", FEW), words(FEW_CONFIG), words(OTHER_FEW_CONFIG)
    unusable = (FEW, (0, 5, 16, 1, 0))
    answers = ask(
        setting("gpu", (FEW, FEW_CONFIG), (same, OTHER_FEW_CONFIG), unusable),
        find,
        setting("gpu", (same, OTHER_FEW_CONFIG), (FEW, FEW_CONFIG), (FEW, FEW_CONFIG)),
        find,
    )
    assert answers == ["2", other, "3", few]


def test_groups_as_long_as_k_are_one_kind(ask) -> None:
    long = 1 << 40
    entry = ((4, 32, 4096, 4096, long), MANY_CONFIG)
    found = [words("find", "gpu", 4, 32, 4096, 4096, group) for group in (128, 4096, 4160, long)]
    assert ask(setting("gpu", entry), *found) == ["1", *[words(MANY_CONFIG)] * 4]


def test_a_table_replaces_the_one_before(ask) -> None:
    find = words("find", "gpu", FEW)
    answers = ask(
        find,
        setting("gpu", (FEW, FEW_CONFIG)),
        setting("another", (FEW, OTHER_FEW_CONFIG)),
        find,
        setting("gpu", (MANY, MANY_CONFIG)),
        find,
        setting("gpu"),
        words("find", "gpu", MANY),
        words("find", "another", FEW),
    )
    few, other = words(FEW_CONFIG), words(OTHER_FEW_CONFIG)
    assert answers == ["none", "1", "1", few, "1", "none", "0", "none", other]


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (FEW, (0, 5, 16, 1, 0)),  # no such shape
        (FEW, (0, 4, 8, 1, 0)),  # not for 4 bits
        (FEW, (0, 4, 16, 3, 0)),
        (FEW, (0, 4, 16, 16, 0)),
        (FEW, (0, 4, 16, 0, 0)),
        (FEW, (0, 4, 16, -1, 0)),
        (FEW, (0, 4, 16, 1, 7)),
        (FEW, MANY_CONFIG),
        ((4, 8, 28672, 256, 128), FEW_CONFIG),  # too large for K
        (MANY, FEW_CONFIG),
        (MANY, (1, 48, 1, 0, 1)),
        (MANY, (1, 64, 1, 2, 1)),
        (MANY, (1, 128, 1, 1, 3)),  # parts of K come in powers of two
        ((4, 256, 28672, 4096, 64), (1, 128, 2, 0, 1)),  # not for groups of 64
        ((4, 256, 28672, 512, 128), (1, 64, 4, 0, 1)),
        (FEW, (2, 4, 16, 2, 0)),
    ],
)
def test_what_the_kernels_do_not_have_is_left_out(ask, shape, config) -> None:
    good = (4, 8, 64, 4096, 128)
    answers = ask(
        setting("gpu", (shape, config), (good, FEW_CONFIG)),
        words("find", "gpu", shape),
        words("find", "gpu", good),
    )
    assert answers == ["1", "none", words(FEW_CONFIG)]


def test_tables_may_be_replaced_while_they_are_read(ask) -> None:
    assert ask(words("race", FEW, FEW_CONFIG, OTHER_FEW_CONFIG)) == ["1 0"]

"""BlockManager: each rule by itself, and every refusal."""

import pytest

from fastinfer._host import BlockManager

BS = 8


def manager(num_blocks: int = 8, **options) -> BlockManager:
    return BlockManager(num_blocks, BS, **options)


def run(kv: BlockManager, seq_id: int, tokens: list[int]) -> int:
    """Adds a sequence and computes all of its tokens; returns how many came from the cache."""
    kv.add(seq_id, tokens)
    cached = kv.match_prefix(seq_id)
    assert kv.reserve(seq_id, len(tokens))
    kv.commit(seq_id, len(tokens))
    kv.check_integrity()
    return cached


def counts(kv: BlockManager) -> tuple[int, int, int]:
    kv.check_integrity()
    assert kv.num_free + kv.num_cached == kv.num_available
    return kv.num_free, kv.num_cached, kv.num_used


def test_new_manager_is_all_free():
    kv = BlockManager(5, 16)
    assert (kv.num_blocks, kv.block_size, kv.enable_prefix_caching) == (5, 16, True)
    assert counts(kv) == (5, 0, 0)
    assert kv.num_sequences == 0


def test_blocks_are_taken_for_started_blocks_only():
    kv = manager()
    kv.add(1, list(range(30)))
    for num_tokens, used in [(0, 0), (1, 1), (8, 1), (9, 2), (3, 2), (30, 4)]:
        assert kv.reserve(1, num_tokens)
        assert counts(kv) == (8 - used, 0, used)
        assert len(kv.block_table(1)) == used
    assert len(set(kv.block_table(1))) == 4


def test_reserve_beyond_the_known_tokens():
    kv = manager()
    kv.add(1, [5])
    assert kv.reserve(1, 20)
    assert len(kv.block_table(1)) == 3


def test_failed_reserve_changes_nothing():
    kv = manager(4)
    run(kv, 1, list(range(16)))
    kv.release(1)  # two cached blocks
    kv.add(2, list(range(100, 200)))
    assert kv.reserve(2, 8)
    before = counts(kv), kv.block_table(2), kv.tokens(2), kv.num_computed(2)
    assert not kv.reserve(2, 33)
    assert not kv.reserve(2, 2**62)
    assert before == (counts(kv), kv.block_table(2), kv.tokens(2), kv.num_computed(2))
    assert kv.match_prefix(1) == 8  # the cache was not evicted for nothing


def test_prefix_hit_shares_full_committed_blocks():
    kv = manager()
    run(kv, 1, list(range(20)))  # two full blocks and four tokens
    assert run(kv, 2, [*range(16), 99]) == 16
    assert kv.block_table(2)[:2] == kv.block_table(1)[:2]
    assert kv.block_table(2)[2] != kv.block_table(1)[2]
    assert [kv.ref_count(b) for b in kv.block_table(1)] == [2, 2, 1]
    assert kv.num_computed(2) == 17
    assert counts(kv) == (4, 0, 4)


def test_prefix_hit_leaves_a_token_to_compute():
    kv = manager()
    run(kv, 1, list(range(16)))
    kv.add(2, list(range(16)))
    assert kv.match_prefix(2) == 8
    kv.add(3, list(range(17)))
    assert kv.match_prefix(3) == 16
    kv.add(4, list(range(8)))
    assert kv.match_prefix(4) == 0


def test_blocks_reserved_but_not_committed_do_not_match():
    kv = manager()
    kv.add(1, list(range(24)))
    kv.reserve(1, 24)
    kv.add(2, list(range(24)))
    assert kv.match_prefix(2) == 0
    kv.commit(1, 15)
    assert kv.match_prefix(2) == 8
    kv.release(2)
    kv.commit(1, 16)
    assert kv.match_prefix(2) == 16


def test_appended_tokens_are_published_too():
    kv = manager()
    run(kv, 1, list(range(6)))
    for token in (6, 7):
        kv.append(1, token)
    assert kv.tokens(1) == list(range(8))
    assert kv.num_tokens(1) == 8
    kv.commit(1, 8)
    kv.add(2, [*range(8), 50])
    assert kv.match_prefix(2) == 8


def test_same_block_behind_another_prefix_is_another_block():
    kv = manager()
    same = [7] * 8
    run(kv, 1, [*range(8), *same])
    assert run(kv, 2, [*range(8, 16), *same, 0]) == 0
    kv.add(3, [*same, 0])
    assert kv.match_prefix(3) == 0


def test_repeated_block_within_one_sequence():
    kv = manager()
    assert run(kv, 1, [7] * 25) == 0
    assert run(kv, 2, [7] * 25) == 24
    assert kv.block_table(1)[:3] == kv.block_table(2)[:3]
    assert len(set(kv.block_table(1))) == 4


@pytest.mark.parametrize("hash_bits", [0, 1, 64])
def test_collisions_are_never_hits(hash_bits):
    kv = manager(64, hash_bits=hash_bits)
    for i in range(12):
        assert run(kv, i, [i] * 8 + [100 + i] * 8 + [0]) == 0
    for i in range(12):
        kv.add(100 + i, [i] * 8 + [100 + i] * 8 + [1])
        assert kv.match_prefix(100 + i) == 16
        assert kv.block_table(100 + i) == kv.block_table(i)[:2]
        kv.add(200 + i, [i] * 8 + [101 + i] * 8 + [1])
        assert kv.match_prefix(200 + i) == 8
    for i in range(12):
        kv.remove(i)  # erased from the middle of the chains when they are evicted below
        kv.remove(100 + i)
        kv.remove(200 + i)
    kv.add(999, [1000 + i for i in range(8 * 60)])
    assert kv.reserve(999, 8 * 60)
    kv.check_integrity()


def test_content_computed_twice_stays_private():
    kv = manager(6)
    tokens = list(range(8))
    for seq_id in (1, 2):  # side by side: neither could know of the other
        kv.add(seq_id, [*tokens, *tokens, 0])
        assert kv.match_prefix(seq_id) == 0
        assert kv.reserve(seq_id, 17)
    kv.commit(1, 17)
    kv.commit(2, 17)
    first = kv.block_table(1)
    assert not set(first) & set(kv.block_table(2))
    kv.remove(2)
    assert counts(kv) == (3, 0, 3)  # the copy is worth nothing
    kv.remove(1)
    assert counts(kv) == (4, 2, 0)
    kv.add(3, [*tokens, *tokens, 0])
    assert kv.match_prefix(3) == 16
    assert kv.block_table(3) == first[:2]


def test_what_follows_a_private_copy_continues_the_first_ones_chain():
    kv = manager()
    for seq_id in (1, 2):
        kv.add(seq_id, [*range(8), seq_id, *range(10, 20)])
        kv.reserve(seq_id, 19)
    kv.commit(1, 19)
    kv.commit(2, 19)
    kv.add(3, [*range(8), 2, *range(10, 20)])
    assert kv.match_prefix(3) == 16
    assert kv.block_table(3) == [kv.block_table(1)[0], kv.block_table(2)[1]]


def test_child_of_an_evicted_parent_is_not_found_under_its_successor():
    kv = manager(5)
    for seq_id in (1, 2):  # 2's first block is a private copy of 1's; its second hangs on 1's first
        kv.add(seq_id, [*range(16), 0])
        kv.reserve(seq_id, 8)
        kv.commit(seq_id, 8)
    parent = kv.block_table(1)[0]
    kv.reserve(2, 16)
    kv.commit(2, 16)
    child = kv.block_table(2)[1]
    kv.remove(1)
    kv.add(3, list(range(100, 124)))
    assert kv.reserve(3, 24)
    assert kv.block_table(3)[2] == parent
    kv.commit(3, 24)
    kv.remove(2)
    assert kv.num_cached == 1  # the orphan, which ages out
    kv.add(4, [*range(100, 124), *range(8, 16), 0])
    assert kv.match_prefix(4) == 24
    assert child not in kv.block_table(4)
    kv.check_integrity()


def test_release_keeps_the_tokens_and_the_cache():
    kv = manager()
    run(kv, 1, list(range(20)))
    kv.release(1)
    assert counts(kv) == (6, 2, 0)
    assert kv.contains(1)
    assert (kv.tokens(1), kv.block_table(1), kv.num_computed(1)) == (list(range(20)), [], 0)
    kv.release(1)  # again: nothing to give back
    assert kv.match_prefix(1) == 16
    assert counts(kv) == (6, 0, 2)


def test_remove_forgets():
    kv = manager()
    run(kv, 1, list(range(20)))
    kv.remove(1)
    assert not kv.contains(1)
    assert counts(kv) == (6, 2, 0)
    assert run(kv, 1, list(range(20))) == 16


def test_shared_blocks_stay_until_the_last_holder_leaves():
    kv = manager()
    run(kv, 1, [*range(8), 1])
    run(kv, 2, [*range(8), 2])
    kv.remove(1)
    assert counts(kv) == (6, 0, 2)
    kv.remove(2)
    assert counts(kv) == (7, 1, 0)


def test_free_blocks_are_reused_before_cached_ones():
    kv = manager(4)
    run(kv, 1, list(range(16)))
    kv.remove(1)
    kv.add(2, list(range(50, 66)))
    kv.reserve(2, 16)
    assert counts(kv) == (0, 2, 2)


def test_least_recently_used_is_evicted_first():
    kv = manager(3)
    for i in range(3):
        run(kv, i, [i] * 8)
        kv.remove(i)
    kv.add(10, [0] * 8 + [1])  # touches the oldest
    assert kv.match_prefix(10) == 8
    kv.release(10)
    kv.add(11, [50] * 8)
    kv.reserve(11, 8)
    hits = []
    for i in range(3):
        kv.add(20 + i, [i] * 8 + [1])
        hits.append(kv.match_prefix(20 + i))
        kv.release(20 + i)
    assert hits == [8, 0, 8]


def test_the_tail_is_evicted_before_the_head():
    kv = manager(4)
    run(kv, 1, list(range(32)))
    kv.remove(1)
    for evicted, left in [(1, 24), (2, 16), (3, 8)]:
        kv.add(2, list(range(100, 124)))
        assert kv.reserve(2, 8 * evicted)
        kv.add(3, list(range(33)))
        assert kv.match_prefix(3) == left
        kv.remove(3)
        kv.remove(2)


def test_without_prefix_caching():
    kv = manager(enable_prefix_caching=False)
    assert run(kv, 1, list(range(24))) == 0
    assert run(kv, 2, list(range(24))) == 0
    kv.remove(1)
    assert counts(kv) == (5, 0, 3)
    kv.release(2)
    assert counts(kv) == (8, 0, 0)


def test_negative_and_large_sequence_ids():
    kv = manager()
    for seq_id in (-1, 2**63 - 1, -(2**63)):
        kv.add(seq_id, [1])
    assert kv.num_sequences == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, r"num_blocks: expected 1\.\.\d+, got 0"),
        ({"num_blocks": -3}, r"num_blocks: expected 1\.\.\d+, got -3"),
        ({"num_blocks": 2**31}, r"num_blocks: expected 1\.\.\d+, got 2147483648"),
        *(
            ({"block_size": size}, rf"block_size: expected a multiple of 8 in 8\.\.512, got {size}")
            for size in (-8, 0, 4, 12, 513, 520)
        ),
        ({"hash_bits": 65}, r"hash_bits: expected 0\.\.64, got 65"),
    ],
)
def test_constructor_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        BlockManager(**{"num_blocks": 4, "block_size": 16, **options})


@pytest.mark.parametrize("block_size", [8, 16, 24, 512])
def test_block_sizes(block_size):
    kv = BlockManager(2, block_size)
    kv.add(1, [1] * (block_size + 1))
    assert kv.reserve(1, block_size + 1)
    assert len(kv.block_table(1)) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.add(1, [1]), r"add: seq_id: expected an id that is not in use, got 1"),
        (lambda kv: kv.add(2, []), r"add: tokens: expected at least one token, got none"),
        (lambda kv: kv.add(2, [4, -7]), r"add: tokens\[1\]: expected a token id >= 0, got -7"),
        (lambda kv: kv.append(1, -1), r"append: token: expected a token id >= 0, got -1"),
        (lambda kv: kv.reserve(1, -1), r"reserve: num_tokens: expected >= 0, got -1"),
        (lambda kv: kv.match_prefix(1), r"match_prefix: .* without blocks, got sequence 1 with 2"),
        (lambda kv: kv.commit(1, 8), r"commit: num_computed: expected 9\.\.10 .*, got 8"),
        (lambda kv: kv.commit(1, 11), r"commit: num_computed: expected 9\.\.10 .*, got 11"),
        (
            lambda kv: kv.record([1], [11], [5]),
            r"record: num_computed: expected 9\.\.10 .*, got 11",
        ),
        (lambda kv: kv.record([1, 404], [10, 1], [5, 5]), r"record: seq_id: expected .*, got 404"),
        (lambda kv: kv.record([1, 1], [10, 10], [5, 5]), r"record: seq_ids: .* once, got 1 twice"),
        (lambda kv: kv.record([1], [10], []), r"record: tokens: expected one entry .* 1 seq_ids"),
        (lambda kv: kv.record([1], [], [5]), r"record: num_computed: expected one entry .* got 0"),
        (lambda kv: kv.reserve_each([1], []), r"reserve_each: num_tokens: .* 1 seq_ids, got 0"),
        (lambda kv: kv.reserve_each([1, 404], [30, 1]), r"reserve_each: seq_id: .*, got 404"),
        (
            lambda kv: kv.reserve_each([1, 1], [30, -1]),
            r"reserve_each: num_tokens: .* >= 0, got -1",
        ),
        (lambda kv: kv.ref_count(-1), r"ref_count: block: expected 0\.\.7, got -1"),
        (lambda kv: kv.ref_count(8), r"ref_count: block: expected 0\.\.7, got 8"),
        *(
            (
                lambda kv, name=name, args=args: getattr(kv, name)(404, *args),
                rf"{name}: seq_id: expected a sequence that was added, got 404",
            )
            for name, args in [
                ("append", [1]),
                ("match_prefix", []),
                ("reserve", [1]),
                ("commit", [1]),
                ("release", []),
                ("remove", []),
                ("num_tokens", []),
                ("num_computed", []),
                ("tokens", []),
                ("block_table", []),
            ]
        ),
    ],
)
def test_refused_calls_change_nothing(call, message):
    kv = manager()
    kv.add(1, list(range(10)))
    kv.reserve(1, 10)
    kv.commit(1, 9)
    before = counts(kv), kv.tokens(1), kv.block_table(1), kv.num_computed(1), kv.num_sequences
    with pytest.raises(ValueError, match=message):
        call(kv)
    assert before == (
        (counts(kv), kv.tokens(1), kv.block_table(1), kv.num_computed(1), kv.num_sequences)
    )


def test_reserve_each_stops_at_the_first_that_fails():
    kv = manager(4)
    for i in range(3):
        kv.add(i, list(range(8)))
    assert kv.reserve_each([2, 0, 1], [8, 24, 8]) == 2
    assert [len(kv.block_table(i)) for i in range(3)] == [3, 0, 1]
    assert kv.reserve_each([0, 2, 1], [1, 16, 1]) == 1, "what comes behind it gets nothing"
    assert counts(kv) == (0, 0, 4)
    assert kv.reserve_each([], []) == 0


def test_record_is_commit_and_append_for_each():
    kv = manager()
    kv.add(1, list(range(10)))
    kv.add(2, list(range(8)))
    kv.reserve_each([1, 2], [10, 8])
    kv.record([2, 1], [8, 9], [70, -1])
    assert (kv.num_computed(1), kv.num_computed(2)) == (9, 8)
    assert (kv.tokens(1), kv.tokens(2)) == (list(range(10)), [*range(8), 70])
    kv.check_integrity()
    kv.add(3, [*range(8), 9])
    assert kv.match_prefix(3) == 8
    assert kv.block_table(3) == kv.block_table(2), "the one that was recorded first is found"


def test_commit_needs_slots():
    kv = manager()
    kv.add(1, list(range(20)))
    kv.reserve(1, 8)
    with pytest.raises(ValueError, match=r"expected 0\.\.8 .*, got 9"):
        kv.commit(1, 9)


@pytest.mark.parametrize("bad", [1.5, "1", None, 2**63])
def test_wrong_types_are_refused(bad):
    kv = manager()
    kv.add(1, [1])
    with pytest.raises(TypeError):
        kv.append(1, bad)
    with pytest.raises(TypeError):
        kv.add(2, [bad])

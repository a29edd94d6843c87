"""check_integrity notices whatever is broken (only C++ can break it, see integrity_test.cpp)."""

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HOST = HERE.parents[1] / "csrc" / "host"

EXPECTED = {
    "nothing": r"sound",
    "ref_count": r"block 1 is in 1 block tables, but its reference count is 2",
    "table": r"sequence 1 has more computed tokens than tokens or slots",
    "table_range": r"sequence 1 holds block 8, which does not exist",
    "table_twice": r"sequence 1 holds a block twice",
    "lost_block": r"block 6 is neither held nor on the free list",
    "held_and_listed": r"block 2 is held and on the free list",
    "num_free": r"counted 3 free and 2 cached blocks, but the counters say 4 and 2",
    "num_cached": r"counted 3 free and 2 cached blocks, but the counters say 3 and 1",
    "link": r"the free list's links contradict each other",
    "ring": r"the free list's links contradict each other",
    "order": r"free block 6 is behind a cached one on the free list",
    "computed": r"sequence 1 has more computed tokens than tokens or slots",
    "indexed": r"sequence 1 has offered 1 blocks to the index with 20 tokens computed",
    "index_token": r"prefix index: block 1 does not match its hash",
    "index_parent": r"prefix index: block 1 does not match its hash",
    "index_bucket": r"prefix index: block \d is in the wrong bucket",
    "index_serial": r"prefix index: block 1 is chained but not indexed",
    "index_lost": r"prefix index: 4 blocks are indexed, but 0 can be found",
    "index_ring": r"prefix index: the chain of bucket \d is a ring",
    "index_twin": r"prefix index: block 0 has the same parent and tokens as another indexed block",
}
# With all hashes equal, changed content still has the right hash: the same fault is not one there.
ALL_COLLIDE = {**EXPECTED, "index_token": "sound", "index_parent": "sound"}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[tuple[int, str], str]:
    program = tmp_path_factory.mktemp("integrity") / "integrity_test"
    sources = [HERE / "integrity_test.cpp", HOST / "block_manager.cpp", HOST / "prefix_index.cpp"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++20", "-O0", f"-I{HOST}", *map(str, sources), "-o", str(program)],
        check=True,
    )
    run = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    return {(int(bits), name): verdict for bits, name, verdict in lines}


@pytest.mark.parametrize("hash_bits", [64, 0])
@pytest.mark.parametrize("fault", EXPECTED)
def test_fault_is_named(verdicts, fault, hash_bits):
    expected = (EXPECTED if hash_bits else ALL_COLLIDE)[fault]
    assert re.search(expected, verdicts[hash_bits, fault])


def test_every_fault_is_expected(verdicts):
    assert {name for _, name in verdicts} == set(EXPECTED)

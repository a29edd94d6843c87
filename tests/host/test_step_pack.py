"""step_layout and BlockManager.pack: what the model reads in a step."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fastinfer._host import BlockManager, step_layout

BS = 8
DTYPES = {
    "input_ids": np.int64,
    "positions": np.int64,
    "slot_mapping": np.int64,
    "logits_indices": np.int64,
    "seeds": np.int64,
    "draw_positions": np.int64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int32,
    "cu_seqlens_q": np.int32,
    "seq_lens": np.int32,
    "block_table": np.int32,
}
SAMPLING = ("seeds", "draw_positions", "temperature", "top_p", "min_p", "top_k")
POISON = 0x7B


def elements(layout) -> dict[str, int]:
    return {
        "input_ids": layout.num_tokens,
        "positions": layout.num_tokens,
        "slot_mapping": layout.num_tokens,
        "logits_indices": layout.num_logits,
        **dict.fromkeys(SAMPLING, layout.num_logits),
        "cu_seqlens_q": layout.num_seqs + 1,
        "seq_lens": layout.num_seqs,
        "block_table": layout.num_seqs * layout.max_blocks,
    }


def poisoned(nbytes: int) -> np.ndarray:
    """A byte buffer, 64-byte aligned, filled with what no array may hold."""
    memory = np.full(nbytes + 64, POISON, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def arrays(buffer: np.ndarray, layout) -> dict[str, np.ndarray]:
    out = {}
    for name, size in elements(layout).items():
        dtype = np.dtype(DTYPES[name])
        offset = getattr(layout, name)
        out[name] = buffer[offset : offset + size * dtype.itemsize].view(dtype)
    out["block_table"] = out["block_table"].reshape(layout.num_seqs, layout.max_blocks)
    return out


sizes = st.integers(0, 300)


@given(sizes, sizes, sizes, sizes)
@settings(deadline=None)
def test_layout_regions_are_aligned_in_order_and_disjoint(tokens, seqs, blocks, logits):
    layout = step_layout(tokens, seqs, blocks, logits)
    assert (layout.num_tokens, layout.num_seqs) == (tokens, seqs)
    assert (layout.max_blocks, layout.num_logits) == (blocks, logits)
    end = 0
    for name, size in elements(layout).items():
        offset = getattr(layout, name)
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + size * np.dtype(DTYPES[name]).itemsize
    assert end <= layout.nbytes < end + 64
    assert layout.nbytes % 64 == 0


@pytest.mark.parametrize("name", ["num_tokens", "num_seqs", "max_blocks", "num_logits"])
@pytest.mark.parametrize("value", [-1, 2**31])
def test_layout_refuses(name, value):
    arguments = dict.fromkeys(["num_tokens", "num_seqs", "max_blocks", "num_logits"], 1)
    with pytest.raises(ValueError, match=rf"step_layout: {name}: expected 0\.\.\d+, got {value}"):
        step_layout(**{**arguments, name: value})


def test_layout_beyond_two_to_the_63_bytes_is_refused():
    with pytest.raises(ValueError, match=r"2\^63"):
        step_layout(1, 2**31 - 1, 2**31 - 1, 1)


def make_manager() -> BlockManager:
    """Sequence 1: 20 tokens, 2: 5 tokens, 3: shares 16 tokens with 1; blocks are not in order."""
    kv = BlockManager(16, BS)
    kv.add(0, [9])
    kv.reserve(0, 8)
    kv.add(1, list(range(100, 120)))
    kv.reserve(1, 8)
    kv.add(2, list(range(200, 205)))
    kv.reserve(2, 5)
    kv.reserve(1, 20)
    kv.commit(1, 20)
    kv.add(3, [*range(100, 116), 7, 8])
    kv.match_prefix(3)
    kv.reserve(3, 18)
    return kv


def test_mixed_step():
    kv = make_manager()
    layout = step_layout(2 + 5 + 1, 3, 3, 3)
    buffer = poisoned(layout.nbytes)
    kv.pack(buffer, layout, [3, 2, 1], [16, 0, 19], [2, 5, 1], [2, 0, 1])
    got = arrays(buffer, layout)
    t1, t2, t3 = (kv.block_table(i) for i in (1, 2, 3))
    assert got["input_ids"].tolist() == [7, 8, 200, 201, 202, 203, 204, 119]
    assert got["positions"].tolist() == [16, 17, 0, 1, 2, 3, 4, 19]
    assert got["slot_mapping"].tolist() == [
        *(t3[2] * BS + i for i in range(2)),
        *(t2[0] * BS + i for i in range(5)),
        t1[2] * BS + 3,
    ]
    assert got["cu_seqlens_q"].tolist() == [0, 2, 7, 8]
    assert got["seq_lens"].tolist() == [18, 5, 20]
    assert got["logits_indices"].tolist() == [0, 1, 7]
    table = got["block_table"]
    assert table[0].tolist() == t3
    assert table[1, 0] == t2[0]
    assert table[2].tolist() == t1


def test_chunk_covers_its_own_blocks_only():
    kv = make_manager()
    layout = step_layout(4, 1, 2, 0)
    buffer = poisoned(layout.nbytes)
    kv.pack(buffer, layout, [1], [6], [4], [0])
    got = arrays(buffer, layout)
    table = kv.block_table(1)
    assert got["seq_lens"].tolist() == [10]
    assert got["block_table"].tolist() == [table[:2]]
    assert got["slot_mapping"].tolist() == [
        table[0] * BS + 6,
        table[0] * BS + 7,
        table[1] * BS,
        table[1] * BS + 1,
    ]


def test_filler_and_canaries():
    kv = make_manager()
    layout = step_layout(16, 5, 4, 4)
    memory = poisoned(layout.nbytes + 128)
    kv.pack(memory[64:-64], layout, [2, 1], [3, 19], [2, 1], [1, 1])
    got = arrays(memory[64:-64], layout)
    assert got["input_ids"].tolist() == [203, 204, 119] + [0] * 13
    assert got["positions"].tolist() == [3, 4, 19] + [0] * 13
    assert got["slot_mapping"].tolist()[3:] == [-1] * 13
    # Sequences without keys take one filler token each, and the last one the rest.
    assert got["cu_seqlens_q"].tolist() == [0, 2, 3, 4, 5, 16]
    assert got["seq_lens"].tolist() == [5, 20, 0, 0, 0]
    assert got["logits_indices"].tolist() == [1, 2, 0, 0]
    assert (memory[:64] == POISON).all() and (memory[-64:] == POISON).all()
    unwritten = np.int32(int.from_bytes(bytes([POISON] * 4), "little"))
    table = got["block_table"]
    assert (table[0, 1:] == unwritten).all()
    assert table[1, :3].tolist() == kv.block_table(1)
    assert table[1, 3] == unwritten
    assert (table[2:] == unwritten).all()


def test_filler_is_one_token_for_each_sequence_of_a_decode_step():
    kv = make_manager()
    layout = step_layout(6, 6, 3, 6)
    buffer = poisoned(layout.nbytes)
    kv.pack(buffer, layout, [2, 1], [4, 19], [1, 1], [1, 1])
    got = arrays(buffer, layout)
    assert got["cu_seqlens_q"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert got["seq_lens"].tolist() == [5, 20, 0, 0, 0, 0]


def test_a_step_of_filler_alone():
    kv = make_manager()
    layout = step_layout(9, 3, 1, 2)
    buffer = poisoned(layout.nbytes)
    assert kv.pack(buffer, layout, [], [], [], []) == 0
    got = arrays(buffer, layout)
    assert got["cu_seqlens_q"].tolist() == [0, 1, 2, 9]
    assert got["seq_lens"].tolist() == [0, 0, 0]
    assert got["slot_mapping"].tolist() == [-1] * 9


def test_padding_behind_a_prompt():
    kv = make_manager()
    layout = step_layout(3 + 4 + 2 + 1, 3, 3, 2)
    buffer = poisoned(layout.nbytes)
    # Real tokens, then padding; padding alone; nothing unusual.
    kv.pack(buffer, layout, [2, 3, 1], [2, 18, 19], [3, 0, 1], [1, 0, 1], [3, 3, 0])
    got = arrays(buffer, layout)
    t1, t2, t3 = (kv.block_table(i) for i in (1, 2, 3))
    assert got["input_ids"].tolist() == [202, 203, 204, 0, 0, 0, 0, 0, 0, 119]
    assert got["positions"].tolist() == [2, 3, 4, 5, 6, 7, 18, 19, 20, 19]
    assert got["slot_mapping"].tolist() == [
        *(t2[0] * BS + i for i in range(2, 8)),
        *(t3[2] * BS + i for i in range(2, 5)),
        t1[2] * BS + 3,
    ]
    assert got["cu_seqlens_q"].tolist() == [0, 6, 9, 10]
    assert got["seq_lens"].tolist() == [8, 21, 20]
    assert got["logits_indices"].tolist() == [2, 9]
    assert got["draw_positions"].tolist() == [5, 20]
    assert got["block_table"][1].tolist() == t3


def test_sampling_parameters():
    kv = make_manager()
    kv.set_sampling(1, 0.5, 7, 0.75, 0.25, -(2**63))
    kv.set_sampling(2, 1e300, -1, 1e-300, 0.0, 2**63 - 1)
    layout = step_layout(5, 4, 3, 5)
    buffer = poisoned(layout.nbytes)
    use = kv.pack(buffer, layout, [1, 3, 2], [18, 17, 4], [2, 1, 1], [2, 1, 1])
    assert use == 1 + 2 + 4 + 8
    got = {name: arrays(buffer, layout)[name].tolist() for name in SAMPLING}
    tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    assert got["temperature"] == [0.5, 0.5, 0.0, largest, 0.0]
    assert got["top_k"] == [7, 7, 0, 0, 0]
    assert got["top_p"] == [0.75, 0.75, 1.0, tiny, 1.0]
    assert got["min_p"] == [0.25, 0.25, 0.0, 0.0, 0.0]
    assert got["seeds"] == [-(2**63), -(2**63), 0, 2**63 - 1, 0]
    assert got["draw_positions"] == [19, 20, 18, 5, 0]


@pytest.mark.parametrize(
    ("parameters", "use"),
    [
        ((0.0, 5, 0.5, 0.5), 0),
        ((1.0, 0, 1.0, 0.0), 1),
        ((1.0, 5, 1.0, 0.0), 3),
        ((1.0, 0, 0.5, 0.0), 5),
        ((1.0, 0, 1.0, 0.5), 9),
    ],
)
def test_which_sampling_parameters_make_a_difference(parameters, use):
    kv = make_manager()
    kv.set_sampling(1, *parameters, 0)
    layout = step_layout(2, 2, 3, 2)
    buffer = poisoned(layout.nbytes)
    assert kv.pack(buffer, layout, [1, 2], [19, 4], [1, 1], [1, 1]) == use
    assert kv.pack(buffer, layout, [1, 2], [19, 4], [1, 1], [0, 1]) == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((-1.0, 0, 1.0, 0.0), "temperature: expected >= 0, got -1"),
        ((float("nan"), 0, 1.0, 0.0), "temperature: expected >= 0, got "),
        ((1.0, 0, 0.0, 0.0), "top_p: expected > 0, got 0"),
        ((1.0, 0, 1.0, 1.5), r"min_p: expected in \[0, 1\], got 1.5"),
    ],
)
def test_sampling_parameters_out_of_range(parameters, message):
    with pytest.raises(ValueError, match=f"BlockManager.set_sampling: {message}"):
        make_manager().set_sampling(1, *parameters, 0)


def test_empty_step():
    kv = make_manager()
    layout = step_layout(0, 0, 0, 0)
    buffer = poisoned(layout.nbytes)
    kv.pack(buffer, layout, [], [], [], [])
    assert arrays(buffer, layout)["cu_seqlens_q"].tolist() == [0]


@st.composite
def steps(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    parts = []
    for length in lengths:
        start = draw(st.integers(0, length - 1))
        count = draw(st.integers(1, length - start))
        parts.append((length, start, count, draw(st.integers(0, count))))
    return parts, draw(st.integers(0, 3))


@given(steps(), st.sampled_from([8, 24]))
@settings(max_examples=200, deadline=None)
def test_against_a_plain_loop(step, block_size):
    parts, slack = step
    kv = BlockManager(64, block_size)
    for i, (length, *_) in enumerate(parts):
        kv.add(i, [1000 * i + j for j in range(length)])
    for i, (length, *_) in reversed(list(enumerate(parts))):
        kv.reserve(i, (length + 1) // 2)
    for i, (length, *_) in enumerate(parts):
        kv.reserve(i, length)

    want = {name: [] for name in DTYPES if name not in SAMPLING}
    want["cu_seqlens_q"].append(0)
    for i, (_, start, count, num_logits) in enumerate(parts):
        table = kv.block_table(i)
        for position in range(start, start + count):
            want["input_ids"].append(1000 * i + position)
            want["positions"].append(position)
            slot = table[position // block_size] * block_size + position % block_size
            want["slot_mapping"].append(slot)
        rows = len(want["input_ids"])
        want["logits_indices"] += range(rows - num_logits, rows)
        want["cu_seqlens_q"].append(rows)
        want["seq_lens"].append(start + count)
        want["block_table"].append(table[: -(-(start + count) // block_size)])

    layout = step_layout(
        len(want["input_ids"]) + slack,
        len(parts) + (slack > 0),
        max(map(len, want["block_table"])) + slack,
        len(want["logits_indices"]) + slack,
    )
    buffer = poisoned(layout.nbytes)
    seq_ids, (_, *columns) = range(len(parts)), zip(*parts, strict=True)
    kv.pack(buffer, layout, list(seq_ids), *(list(column) for column in columns))
    got = arrays(buffer, layout)
    for name in want.keys() - {"block_table"}:
        assert got[name][: len(want[name])].tolist() == want[name], name
    for row, blocks in zip(got["block_table"], want["block_table"], strict=False):
        assert row[: len(blocks)].tolist() == blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([404], [0], [1], [1]), r"seq_id: expected a sequence that was added, got 404"),
        (([1, 2], [0], [1, 1], [1, 1]), r"starts: expected one entry for each of the 2 .*, got 1"),
        (([1], [0], [], [1]), r"counts: expected one entry for each of the 1 seq_ids, got 0"),
        (([1], [0], [1], [1, 1]), r"num_logits: expected one entry for each of the 1 .*, got 2"),
        (([1], [-1], [1], [1]), r"starts\[0\]: expected .* 0\.\.19, got -1"),
        (([2, 1], [0, 20], [1, 1], [1, 1]), r"starts\[1\]: expected .* 0\.\.19, got 20"),
        (([1], [0], [0], [0]), r"counts\[0\]: expected 1\.\.20 .*, got 0"),
        (([1], [18], [3], [0]), r"counts\[0\]: expected 1\.\.2 .*, got 3"),
        (([1], [18], [2**62], [0]), r"counts\[0\]: expected 1\.\.2 .*, got \d+"),
        (([1], [0], [2], [3]), r"num_logits\[0\]: expected 0\.\.2, got 3"),
        (([1], [0], [2], [-1]), r"num_logits\[0\]: expected 0\.\.2, got -1"),
        (([2, 1, 2], [0] * 3, [1] * 3, [1] * 3), r"seq_ids: expected each sequence once, got 2 t"),
        (([4], [0], [1], [1]), r"seq_ids\[0\]: expected a sequence with reserved blocks, got 4"),
        (([1], [0], [11], [0]), r"layout\.num_tokens: expected at least 11, got 10"),
        (([0, 1, 2, 3], [0] * 4, [1] * 4, [0] * 4), r"layout\.num_seqs: expected .* 5, got 3"),
        (([0, 1, 2], [0] * 3, [1] * 3, [0] * 3), r"layout\.num_seqs: expected .* 4, got 3"),
        (([1], [0], [1], [1], [1, 1]), r"padding: expected one entry for each of the 1 .*, got 2"),
        (([1], [0], [1], [1], [-1]), r"padding\[0\]: expected >= 0, got -1"),
        (([1], [19], [1], [1], [5]), r"padding\[0\]: expected .* 0\.\.4, got 5"),
        (([1], [24], [0], [0], [1]), r"starts\[0\]: expected .* has a slot, 0\.\.23, got 24"),
        (([1], [20], [0], [1], [1]), r"num_logits\[0\]: expected 0\.\.0, got 1"),
        (([1], [20], [0], [0], [0]), r"starts\[0\]: expected .* 0\.\.19, got 20"),
        (([1], [10], [6], [5]), r"layout\.num_logits: expected at least 5, got 4"),
        (([1], [19], [1], [1]), r"layout\.max_blocks: expected at least 3, got 2"),
    ],
)
def test_refused_before_anything_is_written(arguments, message):
    kv = make_manager()
    kv.add(4, [1, 2, 3])  # no blocks
    layout = step_layout(10, 3, 2, 4)
    buffer = poisoned(layout.nbytes)
    with pytest.raises(ValueError, match=message):
        kv.pack(buffer, layout, *arguments)
    assert (buffer == POISON).all()


def test_buffer_is_checked():
    kv = make_manager()
    layout = step_layout(1, 1, 1, 1)
    step = [1], [0], [1], [1]
    with pytest.raises(ValueError, match=rf"buffer: expected at least .* {layout.nbytes} bytes"):
        kv.pack(poisoned(layout.nbytes - 1), layout, *step)
    with pytest.raises(ValueError, match="buffer: expected an address that is a multiple of 8"):
        kv.pack(poisoned(layout.nbytes + 4)[4:], layout, *step)
    with pytest.raises(ValueError, match="buffer: expected C-contiguous memory"):
        kv.pack(poisoned(2 * layout.nbytes)[::2], layout, *step)
    with pytest.raises(BufferError):
        kv.pack(bytes(layout.nbytes), layout, *step)
    with pytest.raises(TypeError):
        kv.pack([0] * layout.nbytes, layout, *step)


def test_any_contiguous_buffer_does():
    kv = make_manager()
    layout = step_layout(1, 1, 1, 1)
    buffer = np.zeros((layout.nbytes // 64, 8), dtype=np.int64)
    kv.pack(memoryview(buffer), layout, [2], [4], [1], [1])
    assert buffer.reshape(-1)[0] == 204


def test_threads_share_a_manager():
    kv = BlockManager(4096, BS)
    kv.add(0, list(range(16000)))
    kv.reserve(0, 16000)
    layout = step_layout(16000, 1, 2000, 1)
    faults = []

    def pack():
        buffer = poisoned(layout.nbytes)
        for _ in range(100):
            kv.pack(buffer, layout, [0], [0], [16000], [1])
            if arrays(buffer, layout)["input_ids"].tolist() != list(range(16000)):
                faults.append("torn")

    def churn():
        for i in range(1, 20000):  # many ids, so that the table of sequences is rehashed
            kv.add(i, [1])
            if i % 2:
                kv.remove(i)

    threads = [threading.Thread(target=target) for target in (pack, pack, churn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not faults
    kv.check_integrity()

"""KV block allocation, the prefix cache, and the packing of a step (C++, pybind11).

It knows neither torch nor the model. A sequence is named by an integer id that the caller chooses.
A block holds `block_size` consecutive tokens of one sequence; slot = block * block_size + offset.

Errors: ValueError for a bad argument (it says what was expected and what came), TypeError for a
wrong Python type, RuntimeError from `check_integrity`. A call that raises has changed nothing.
Calls are serialised by a lock, so several threads may share one manager.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

class BlockManager:
    """The blocks of a KV pool, and for each sequence its tokens and its block table.

    A block is in exactly one state, and `num_free + num_cached + num_used == num_blocks`:

    - free: nobody holds it and its content is worthless;
    - cached: nobody holds it, but it still holds the keys and values of a known prefix. It is
      reused for other tokens when no free block is left, least recently used first, and of blocks
      released together the end of the sequence before its beginning;
    - used: one or more sequences hold it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        hash_bits: int = 64,
    ) -> None:
        """num_blocks >= 1; block_size a multiple of 8 in 8..512.

        Prefixes are found by hash and then compared token by token, so a hash collision is never a
        hit. `hash_bits` (0..64) keeps fewer bits of the hash; only tests want that.
        """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can hand out: free + cached."""

    @property
    def num_sequences(self) -> int: ...
    def add(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Starts a sequence with the given tokens (at least one, none negative) and no blocks."""

    def append(self, seq_id: int, token: int) -> None:
        """Adds one token at the end. It needs no block until it is to be computed (`reserve`)."""

    def set_sampling(
        self, seq_id: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> None:
        """How the sequence's tokens are drawn (at first: temperature 0), for `pack` to write.

        temperature >= 0, top_p > 0, min_p in [0, 1]; what float32 would round to infinity or to
        zero becomes the nearest number that is neither. top_k <= 0: off.
        """

    def match_prefix(self, seq_id: int) -> int:
        """Takes the longest known prefix from the cache; returns how many tokens it covers.

        Only full blocks match, and at least one token is always left to compute. The sequence
        then holds those blocks and counts their tokens as computed. It must hold no blocks yet.
        """

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Makes the block table cover the first `num_tokens` tokens: all of it, or nothing.

        Returns False, having changed nothing, when too few blocks are available. A table that is
        long enough already stays as it is. `num_tokens` may exceed the tokens known so far.
        """

    def commit(self, seq_id: int, num_computed: int) -> None:
        """States that the keys and values of the first `num_computed` tokens are in their slots.

        Blocks that are full thereby become findable by `match_prefix`. `num_computed` never
        decreases, and exceeds neither the tokens known nor those the block table covers.
        """

    def reserve_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        """`reserve` for one after the other, until one fails; returns how many got theirs."""

    def record(
        self, seq_ids: Sequence[int], num_computed: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """`commit`, then `append` (tokens >= 0 only), for many sequences, each of them once."""

    def release(self, seq_id: int) -> None:
        """Gives all blocks back and keeps the tokens, of which none is computed any more."""

    def remove(self, seq_id: int) -> None:
        """Gives all blocks back and forgets the sequence."""

    def contains(self, seq_id: int) -> bool: ...
    def num_tokens(self, seq_id: int) -> int: ...
    def num_computed(self, seq_id: int) -> int: ...
    def tokens(self, seq_id: int) -> list[int]: ...
    def block_table(self, seq_id: int) -> list[int]: ...
    def ref_count(self, block: int) -> int:
        """How many sequences hold the block."""

    def pack(
        self,
        buffer: Buffer,
        layout: StepLayout,
        seq_ids: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        num_logits: Sequence[int],
        padding: Sequence[int] = (),
    ) -> int:
        """Writes the arrays of a step into `buffer` (see `StepLayout` for where and what).

        Sequence `seq_ids[i]` takes part with its tokens `starts[i] .. starts[i] + counts[i] - 1`
        and wants logits for the last `num_logits[i]` (0..counts[i]) of them. counts[i] >= 1; the
        tokens must be known and their blocks reserved; an id occurs once. With `padding`,
        `padding[i]` tokens of id 0 follow at the next positions, for which blocks must be reserved;
        counts[i] may then be 0. Returns which sampling parameters make a difference in this step:
        the sum of 1 (a temperature above 0) and, in such rows, 2 (top_k), 4 (top_p), 8 (min_p).

        buffer: writable, C-contiguous, at least `layout.nbytes` bytes, 8-byte aligned: a numpy
        array, or `tensor.numpy()` of a (pinned) CPU tensor. Everything is checked before the first
        byte is written. The interpreter lock is not held while writing.
        """

    def check_integrity(self) -> None:
        """Compares all internal state with what the block tables say; RuntimeError on a fault.

        free + cached + used = total; reference counts equal the tables' counts; the list of
        reusable blocks is sound and holds exactly the unreferenced blocks; each indexed block is
        found under its hash; counters are right. Cost: O(blocks + tokens).
        """

class StepLayout:
    """Where each array of a step lies in one buffer. Made by `step_layout`; immutable.

    The attributes named like arrays are byte offsets from the buffer's start, all multiples of
    64. With T = num_tokens, B = num_seqs, M = max_blocks, R = num_logits the arrays are

    ==================  =======  ==========  ====================================================
    attribute           dtype    shape       content
    ==================  =======  ==========  ====================================================
    input_ids           int64    [T]         token ids, sequence after sequence
    positions           int64    [T]         position of each token in its sequence
    slot_mapping        int64    [T]         block * block_size + offset of each token
    logits_indices      int64    [R]         rows (0..T-1) whose logits are wanted, ascending
    seeds               int64    [R]         see `set_sampling`
    draw_positions      int64    [R]         position of the token that the row of logits gives
    temperature         float32  [R]
    top_p               float32  [R]
    min_p               float32  [R]
    top_k               int32    [R]         0: off
    cu_seqlens_q        int32    [B + 1]     first row of each sequence; the last entry is the end
    seq_lens            int32    [B]         starts[i] + counts[i] + padding[i]
    block_table         int32    [B, M]      row-major; row i covers seq_lens[i] tokens
    ==================  =======  ==========  ====================================================

    They lie in this order and fill `nbytes` bytes (a multiple of 64). A layout may be larger than
    the step packed into it (captured graphs run at fixed sizes). The rest is then filler: tokens
    with input_ids 0, positions 0 and slot_mapping -1 (no slot); sequences with seq_lens 0, so that
    their tokens see nothing, of which each takes one of the filler tokens and the last one all that
    remain (where there are such tokens there must be such a sequence); logits_indices 0,
    temperature 0, and the other parameters off. Entries of block_table beyond a sequence's last
    block, and filler rows of it, are not written: they hold what was there before.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def input_ids(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def slot_mapping(self) -> int: ...
    @property
    def logits_indices(self) -> int: ...
    @property
    def seeds(self) -> int: ...
    @property
    def draw_positions(self) -> int: ...
    @property
    def temperature(self) -> int: ...
    @property
    def top_p(self) -> int: ...
    @property
    def min_p(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def cu_seqlens_q(self) -> int: ...
    @property
    def seq_lens(self) -> int: ...
    @property
    def block_table(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def step_layout(num_tokens: int, num_seqs: int, max_blocks: int, num_logits: int) -> StepLayout:
    """The layout for at most so many tokens, sequences, blocks a sequence, and logits rows.

    A pure function of its arguments, none of which may be negative. max_blocks is usually
    ceil(max(starts + counts) / block_size).
    """

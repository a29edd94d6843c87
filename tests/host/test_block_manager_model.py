"""BlockManager against a model in plain Python, by random calls (hypothesis).

The model is slow and obvious: lists, dictionaries and whole prefixes compared token by token. It
predicts every result and every block table exactly, so it also fixes the order of eviction.
"""

from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastinfer._host import BlockManager

BS = 8


class Model:
    """What BlockManager promises, with a list for the unused blocks: front = reused next."""

    def __init__(self, num_blocks: int, caching: bool):
        self.caching = caching
        self.unused = list(range(num_blocks))
        self.holders = dict.fromkeys(range(num_blocks), 0)
        # Block -> (identity, identity of the block before it or None, tokens). An identity is
        # never used again, so nothing hangs on a block whose content has been replaced.
        self.known: dict[int, tuple] = {}
        self.identities = count()
        self.sequences: dict[int, dict] = {}

    def add(self, seq_id, tokens):
        self.sequences[seq_id] = {"tokens": list(tokens), "blocks": [], "computed": 0, "chain": []}

    def find(self, parent, tokens):
        for block, (_, known_parent, known_tokens) in self.known.items():
            if (known_parent, known_tokens) == (parent, tokens):
                return block
        return None

    def match_prefix(self, seq_id):
        seq = self.sequences[seq_id]
        while self.caching and len(seq["blocks"]) * BS + BS < len(seq["tokens"]):
            at = len(seq["blocks"]) * BS
            parent = seq["chain"][-1] if seq["chain"] else None
            block = self.find(parent, tuple(seq["tokens"][at : at + BS]))
            if block is None:
                break
            if block in self.unused:
                self.unused.remove(block)
            self.holders[block] += 1
            seq["blocks"].append(block)
            seq["chain"].append(self.known[block][0])
        seq["computed"] = len(seq["blocks"]) * BS
        return seq["computed"]

    def reserve(self, seq_id, num_tokens):
        seq = self.sequences[seq_id]
        missing = max(0, -(-num_tokens // BS) - len(seq["blocks"]))
        if missing > len(self.unused):
            return False
        for _ in range(missing):
            block = self.unused.pop(0)
            self.known.pop(block, None)
            self.holders[block] = 1
            seq["blocks"].append(block)
        return True

    def commit(self, seq_id, num_computed):
        seq = self.sequences[seq_id]
        seq["computed"] = num_computed
        while self.caching and len(seq["chain"]) * BS + BS <= num_computed:
            i = len(seq["chain"])
            tokens = tuple(seq["tokens"][i * BS : i * BS + BS])
            parent = seq["chain"][-1] if seq["chain"] else None
            twin = self.find(parent, tokens)
            if twin is None:
                twin = seq["blocks"][i]
                self.known[twin] = (next(self.identities), parent, tokens)
            seq["chain"].append(self.known[twin][0])

    def release(self, seq_id):
        seq = self.sequences[seq_id]
        for block in reversed(seq["blocks"]):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.known:
                    self.unused.append(block)
                else:
                    self.unused.insert(0, block)
        seq.update(blocks=[], computed=0, chain=[])


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12), caching=st.booleans(), hash_bits=st.sampled_from([0, 2, 64])
    )
    def start(self, num_blocks, caching, hash_bits):
        self.kv = BlockManager(num_blocks, BS, caching, hash_bits=hash_bits)
        self.model = Model(num_blocks, caching)
        self.ids = count()

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.model.sequences)))

    # Few distinct tokens, in runs as long as blocks, so that prefixes often coincide.
    @rule(
        runs=st.lists(st.integers(0, 1), max_size=5), tail=st.lists(st.integers(0, 1), max_size=9)
    )
    def add(self, runs, tail):
        tokens = [token for token in runs for _ in range(BS)] + [*tail, 0]
        seq_id = next(self.ids)
        self.kv.add(seq_id, tokens)
        self.model.add(seq_id, tokens)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BS))
    def append(self, data, tokens):
        if self.model.sequences:
            seq_id = self.pick(data)
            for token in tokens:
                self.kv.append(seq_id, token)
            self.model.sequences[seq_id]["tokens"] += tokens

    @rule(data=st.data())
    def match_prefix(self, data):
        if self.model.sequences:
            seq_id = self.pick(data)
            if self.model.sequences[seq_id]["blocks"]:
                with pytest.raises(ValueError, match="without blocks"):
                    self.kv.match_prefix(seq_id)
            else:
                assert self.kv.match_prefix(seq_id) == self.model.match_prefix(seq_id)

    @rule(data=st.data(), extra=st.integers(-9, 20))
    def reserve(self, data, extra):
        if self.model.sequences:
            seq_id = self.pick(data)
            num_tokens = max(0, len(self.model.sequences[seq_id]["tokens"]) + extra)
            assert self.kv.reserve(seq_id, num_tokens) == self.model.reserve(seq_id, num_tokens)

    @rule(data=st.data(), wanted=st.integers(0, 60))
    def commit(self, data, wanted):
        if self.model.sequences:
            seq_id = self.pick(data)
            seq = self.model.sequences[seq_id]
            limit = min(len(seq["tokens"]), len(seq["blocks"]) * BS)
            if not seq["computed"] <= wanted <= limit:
                with pytest.raises(ValueError, match="num_computed"):
                    self.kv.commit(seq_id, wanted)
                wanted = limit
            self.kv.commit(seq_id, wanted)
            self.model.commit(seq_id, wanted)

    @rule(data=st.data())
    def compute_all(self, data):
        """The usual course of a sequence, which random single calls rarely complete."""
        if self.model.sequences:
            seq_id = self.pick(data)
            seq = self.model.sequences[seq_id]
            if not seq["blocks"]:
                assert self.kv.match_prefix(seq_id) == self.model.match_prefix(seq_id)
            num_tokens = len(seq["tokens"])
            reserved = self.kv.reserve(seq_id, num_tokens)
            assert reserved == self.model.reserve(seq_id, num_tokens)
            if reserved:
                self.kv.commit(seq_id, num_tokens)
                self.model.commit(seq_id, num_tokens)

    @rule(data=st.data())
    def release(self, data):
        if self.model.sequences:
            seq_id = self.pick(data)
            self.kv.release(seq_id)
            self.model.release(seq_id)

    @rule(data=st.data())
    def remove(self, data):
        if self.model.sequences:
            seq_id = self.pick(data)
            self.kv.remove(seq_id)
            self.model.release(seq_id)
            del self.model.sequences[seq_id]

    @invariant()
    def agrees(self):
        if not hasattr(self, "kv"):
            return
        kv, model = self.kv, self.model
        kv.check_integrity()
        cached = sum(block in model.known for block in model.unused)
        assert (kv.num_cached, kv.num_free) == (cached, len(model.unused) - cached)
        assert kv.num_used == sum(holders > 0 for holders in model.holders.values())
        assert {b: kv.ref_count(b) for b in range(kv.num_blocks)} == model.holders
        assert kv.num_sequences == len(model.sequences)
        for seq_id, seq in model.sequences.items():
            assert kv.block_table(seq_id) == seq["blocks"]
            assert kv.tokens(seq_id) == seq["tokens"]
            assert kv.num_tokens(seq_id) == len(seq["tokens"])
            assert kv.num_computed(seq_id) == seq["computed"]


TestBlockManagerModel = BlockManagerMachine.TestCase
TestBlockManagerModel.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)

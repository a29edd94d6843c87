"""An engine without a model: it proves that each step reads the right keys and values.

The key and value of a token depend on all tokens up to it, so a slot here holds a hash of exactly
that prefix. A step writes the hashes of its tokens through the packed slot mapping, then reads back
every position of every sequence through the packed block table. A block shared wrongly, reused too
early, or not recomputed after a preemption shows up as a wrong hash. The next token is a function
of the hash read back, so the output of a request is known in advance.
"""

import numpy as np

from fastinfer._host import BlockManager, step_layout
from fastinfer.engine.request import Request, RequestStatus
from fastinfer.engine.sampling_params import SamplingParams
from fastinfer.engine.scheduler import ScheduledSequence, Scheduler

VOCAB = 40
STOP_TOKEN = 0
_MODULUS = 2**61 - 1


def prefix_hash(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % _MODULUS


def next_token(prefix: int) -> int:
    return (prefix >> 9) % VOCAB


def expected_output(prompt, max_tokens: int, ignore_stop: bool = True) -> list[int]:
    """What a request must produce, whatever else happens in the engine."""
    prefix = 0
    for token in prompt:
        prefix = prefix_hash(prefix, token)
    output: list[int] = []
    while len(output) < max_tokens and (ignore_stop or output[-1:] != [STOP_TOKEN]):
        output.append(next_token(prefix))
        prefix = prefix_hash(prefix, output[-1])
    return output


class FakeEngine:
    """Scheduler, blocks, and the simulated cache; `step` checks all that can be checked."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        caching: bool = True,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 64,
        ignore_stop: bool = True,
        max_requests: int = 64,
    ):
        self.kv = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        self.block_size, self.budget, self.max_num_seqs = block_size, budget, max_num_seqs
        self.ignore_stop = ignore_stop
        self.slots = np.full(num_blocks * block_size, -1, dtype=np.int64)
        width = -(-max_model_len // block_size) * block_size
        self.tokens = np.full((max_requests, width), -1, dtype=np.int64)
        self.hashes = np.full((max_requests, width), -2, dtype=np.int64)
        self.free_rows = list(range(max_requests))
        self.rows: dict[int, int] = {}
        self.unfinished: dict[int, Request] = {}  # oldest first
        self.next_id = 0

    def add(self, prompt, max_tokens: int | None = 16) -> Request:
        request = Request(self.next_id, prompt, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(request)
        self.next_id += 1
        row = self.rows[request.request_id] = self.free_rows.pop()
        self.unfinished[request.request_id] = request
        prefix = 0
        for position, token in enumerate(prompt):
            prefix = prefix_hash(prefix, token)
            self.tokens[row, position], self.hashes[row, position] = token, prefix
        return request

    def abort(self, request_id: int) -> Request | None:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._forget(request)
        return request

    def step(self, between=lambda step: None) -> list[ScheduledSequence]:
        """One step; ``between`` is called after the computation and before `update`."""
        step = self.scheduler.schedule()
        self.kv.check_integrity()
        self.check_step(step)
        tokens = self.compute(step)
        between(step)
        self.scheduler.update(step, tokens)
        self.take(step, tokens)
        return step

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                assert self.kv.num_used == self.kv.num_sequences == 0
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def check_step(self, step: list[ScheduledSequence]) -> None:
        ids = [s.request.request_id for s in step]
        assert bool(step) == bool(self.unfinished)
        # The oldest request is always served, and the order is that of arrival.
        assert ids == sorted(set(ids))
        assert ids[:1] == list(self.unfinished)[:1]
        running = [r.status is RequestStatus.RUNNING for r in self.unfinished.values()]
        assert running == sorted(running, reverse=True)
        assert sum(s.num_tokens for s in step) <= self.budget
        assert self.scheduler.num_running <= self.max_num_seqs
        for s in step:
            assert s.num_tokens >= 1
            assert s.start == s.request.num_computed_tokens
            end = s.start + s.num_tokens
            assert end <= s.request.num_tokens
            assert s.samples == (end == s.request.num_tokens)

    def compute(self, step: list[ScheduledSequence]) -> list[int]:
        """Writes and reads the simulated cache; returns the tokens of those that sample."""
        if not step:
            return []
        ids = [s.request.request_id for s in step]
        starts = [s.start for s in step]
        counts = [s.num_tokens for s in step]
        num_logits = [int(s.samples) for s in step]
        bs, seqs, num_tokens = self.block_size, len(step), sum(counts)
        width = -(-max(a + n for a, n in zip(starts, counts, strict=True)) // bs)
        layout = step_layout(num_tokens, seqs, width, sum(num_logits))
        buffer = np.full(layout.nbytes, 0x7B, dtype=np.uint8)
        self.kv.pack(buffer, layout, ids, starts, counts, num_logits)

        def view(offset, size, dtype):
            return buffer[offset : offset + size * dtype().itemsize].view(dtype)

        input_ids = view(layout.input_ids, num_tokens, np.int64)
        positions = view(layout.positions, num_tokens, np.int64)
        slot_mapping = view(layout.slot_mapping, num_tokens, np.int64)
        logits_indices = view(layout.logits_indices, layout.num_logits, np.int64)
        seq_lens = view(layout.seq_lens, seqs, np.int32)
        table = view(layout.block_table, seqs * width, np.int32).reshape(seqs, width)

        rows = np.array([self.rows[i] for i in ids])
        row_of_token = np.repeat(rows, counts)
        assert (input_ids == self.tokens[row_of_token, positions]).all()
        self.slots[slot_mapping] = self.hashes[row_of_token, positions]

        slots = (table[:, :, None].astype(np.int64) * bs + np.arange(bs)).reshape(seqs, -1)
        visible = np.arange(width * bs) < seq_lens[:, None]
        read = self.slots[np.where(visible, slots, 0)]
        wrong = visible & (read != self.hashes[rows, : width * bs])
        assert not wrong.any(), (
            f"wrong keys and values at (sequence, position) {np.argwhere(wrong)}"
        )
        return [next_token(int(h)) for h in self.slots[slot_mapping[logits_indices]]]

    def take(self, step: list[ScheduledSequence], tokens: list[int]) -> None:
        """Finishes the requests that have come to their end."""
        sampled = iter(tokens)
        for s in step:
            token = next(sampled) if s.samples else None
            request = s.request
            if token is None or request.is_finished:
                continue
            assert request.output_token_ids[-1] == token
            stopped = token == STOP_TOKEN and not self.ignore_stop
            if stopped or len(request.output_token_ids) == request.max_output_tokens:
                want = expected_output(
                    request.prompt_token_ids, request.max_output_tokens, self.ignore_stop
                )
                assert request.output_token_ids == want
                self.scheduler.finish(request, "stop" if stopped else "length")
                self._forget(request)
            else:
                row, position = self.rows[request.request_id], request.num_tokens - 1
                self.tokens[row, position] = token
                before = int(self.hashes[row, position - 1])
                self.hashes[row, position] = prefix_hash(before, token)

    def _forget(self, request: Request) -> None:
        row = self.rows.pop(request.request_id)
        self.tokens[row], self.hashes[row] = -1, -2
        self.free_rows.append(row)
        del self.unfinished[request.request_id]

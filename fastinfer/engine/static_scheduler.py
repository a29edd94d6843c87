"""Static batching: the baseline that continuous batching is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from fastinfer._host import BlockManager
from fastinfer.engine.request import Request, RequestStatus
from fastinfer.engine.scheduler import ScheduledSequence, Scheduler


class StaticScheduler(Scheduler):
    """One batch after another, each as long as its slowest request.

    A batch takes up to ``max_num_seqs`` requests, first come, first served, when the one before has
    ended. Each gets a slot, the blocks of ``max_model_len`` tokens, so memory limits the batch too.
    Prompts are padded to the longest of the batch: the padding is computed, and its keys and values
    are in slots that later tokens overwrite before any of them is allowed to see them. Then all
    decode together, and who has ended keeps its slot until the last one has.

    It is a kind baseline: who has ended is not computed any more, and it runs on the same kernels,
    in chunks under the same budget of tokens. It makes no use of a prefix cache.

    Raises:
        ValueError: a limit is too small, or the pool does not hold one slot.
    """

    def __init__(
        self,
        kv: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        super().__init__(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        slot = -(-max_model_len // kv.block_size)
        if kv.num_blocks < slot:
            raise ValueError(
                f"StaticScheduler: a slot of max_model_len = {max_model_len} tokens takes {slot} "
                f"blocks, and the KV cache has {kv.num_blocks}; use a smaller max_model_len or "
                "more memory for the cache"
            )
        self._batch: list[Request] = []  # all that hold a slot
        self._longest = 0  # prompt of the batch
        self._filled: dict[int, int] = {}  # tokens of each padded prompt that have been computed

    def schedule(self) -> list[ScheduledSequence]:
        """The next step: of the running batch, or of a new one if there is none."""
        if not self._running:
            self._start_batch()
        budget = self._max_num_batched_tokens
        padded = [r for r in self._running if self._filled[r.request_id] < self._longest]
        step: list[ScheduledSequence] = []
        for request in padded:
            if budget == 0:
                break
            step.append(self._prompt_part(request, budget))
            budget -= step[-1].num_tokens + step[-1].padding
        if not padded:
            for request in self._running[:budget]:
                start = request.num_computed_tokens
                step.append(ScheduledSequence(request, start, 1, True))
        return step

    def update(self, step: Sequence[ScheduledSequence], tokens: Sequence[int]) -> None:
        """As `Scheduler.update`."""
        super().update([part for part in step if part.num_tokens], tokens)
        for part in step:
            request_id = part.request.request_id
            if request_id in self._filled:
                self._filled[request_id] += part.num_tokens + part.padding

    def _start_batch(self) -> None:
        while (
            self._waiting
            and len(self._running) < self._max_num_seqs
            and self._kv.reserve(self._waiting[0].request_id, self._max_model_len)
        ):
            request = self._waiting.popleft()
            request.status = RequestStatus.RUNNING
            self._running.append(request)
        if self._waiting and not self._running:
            raise RuntimeError(
                f"StaticScheduler.schedule: no slot for request {self._waiting[0].request_id}: "
                f"{self._kv.num_used} of {self._kv.num_blocks} blocks belong to someone else"
            )
        self._batch = list(self._running)
        self._filled = {request.request_id: 0 for request in self._batch}
        self._longest = max((len(r.prompt_token_ids) for r in self._batch), default=0)

    def _prompt_part(self, request: Request, budget: int) -> ScheduledSequence:
        """A chunk of a padded prompt; what follows its last real token comes from that."""
        start, prompt = self._filled[request.request_id], len(request.prompt_token_ids)
        size = min(self._longest - start, budget)
        real = max(0, min(prompt - start, size))
        samples = real > 0 and start + real == prompt
        return ScheduledSequence(request, start, real, samples, size - real)

    def _give_back(self, request: Request) -> None:
        """The blocks of a batch are given back when all of it has ended."""
        if request not in self._batch:
            super()._give_back(request)
        elif not self._running:
            for member in self._batch:
                super()._give_back(member)
            self._batch, self._filled = [], {}

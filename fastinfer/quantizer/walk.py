"""`Walk`: a decoder of which one layer at a time has weights, and what goes into that layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastinfer.models.architectures import HEAD, architecture
from fastinfer.models.decoder import Decoder
from fastinfer.models.layer import DecoderLayer
from fastinfer.models.linear import Linear
from fastinfer.models.loader import Checkpoint, check_tied_head, check_weights, is_tied_head
from fastinfer.quant import InputStatistics
from fastinfer.quantizer.windows import window_batch, window_cache


@dataclass(frozen=True)
class Projection:
    """A projection as a checkpoint has it: some rows of one of the decoder's."""

    name: str
    linear: Linear
    first: int
    count: int

    @property
    def weight(self) -> Tensor:
        """A view [count, in_features]."""
        return self.linear.plain_weight()[self.first : self.first + self.count]


class _Enough(Exception):
    """Ends a layer's forward: what was wanted of it is known."""


class Walk:
    """Takes windows of tokens through a checkpoint's layers, each in memory while it is needed.

    Weights are in fp32 with the values that they have in the checkpoint's dtype, and so are
    activations. In memory are the embedding, the norms, one layer, and an activation for every
    token.

    Args:
        checkpoint: of a plain model.
        ids: int64 [windows, T].
        device: where all is computed.

    Raises:
        ValueError: a window longer than the model's context, tokens that it has not, NaN or
            infinity in a weight (also when a layer is loaded), or as `fastinfer.models.load` for
            the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, ids: Tensor, device: torch.device) -> None:
        self.config, self.device = checkpoint.config, device
        length = ids.shape[1]
        if length > self.config.max_context:
            raise ValueError(
                f"calibration: seq_len: expected up to the model's context of "
                f"{self.config.max_context} tokens, got {length}"
            )
        if int(ids.max()) >= self.config.vocab_size:
            raise ValueError(
                f"calibration: expected token ids below {self.config.vocab_size}, got "
                f"{int(ids.max())}: the tokenizer is that of another model"
            )
        self._checkpoint = checkpoint
        self.dtype = self.config.dtype
        """Of the checkpoint, and of what is saved."""
        self.decoder = Decoder(
            self.config, dtype=torch.float32, device=device, max_model_len=length, deferred=True
        )
        slots = self.decoder.weight_slots()
        check_weights(checkpoint, slots, self.decoder.embed_tokens.data)
        names = architecture(self.config.architecture).names
        self._transposed = names.transposed
        in_layers = {n for i in range(self.config.num_layers) for n in self.decoder.layer_slots(i)}
        self.rest = [name for name in slots if name not in in_layers]
        """Weights outside of layers."""
        self._read({name: slots[name] for name in self.rest if name != HEAD})
        for tensor in checkpoint.tensors():
            if is_tied_head(tensor, slots):
                head = torch.empty_like(self.decoder.embed_tokens)
                tensor.copy_to(head)
                rounded = head.to(self.dtype).to(head.dtype)
                check_tied_head(checkpoint, rounded, self.decoder.embed_tokens)
        batch = window_batch(torch.zeros(length, dtype=torch.int64, device=device))
        self._batch, self._steps = batch, self.decoder.layer_steps(batch)
        self._cache = window_cache(self.config, length, torch.float32, device)
        embed = self.decoder.embed
        self.states = torch.stack([embed(window_batch(window)) for window in ids.to(device)])
        """fp32 [windows, T, hidden_size]: what goes into the next layer."""

    def projections(self, i: int) -> list[Projection]:
        """Those of a layer, by the names that their modules have in checkpoints."""
        slots = self.decoder.layer_slots(i)
        found = []
        for name, (linear, first) in self.decoder.layer_projections(i).items():
            count = slots[name].shape[1 if self._transposed else 0]
            found.append(Projection(name.removesuffix(".weight"), linear, first, count))
        return found

    def load(self, i: int) -> DecoderLayer:
        """Gives a layer its weights."""
        for projection in self.projections(i):
            projection.linear.allocate()
        self._read(self.decoder.layer_slots(i))
        return self.decoder.layer(i)

    def release(self, i: int) -> None:
        """Drops the weights of a layer's projections."""
        for projection in self.projections(i):
            projection.linear.release()

    def rest_tensors(self) -> dict[str, Tensor]:
        """The weights outside of layers, by name, in the dtype of the checkpoint."""
        if HEAD in self.rest:
            self.decoder.lm_head.allocate()
            self._read({HEAD: self.decoder.lm_head.plain_weight()})
        slots = self.decoder.weight_slots()
        tensors = {name: slots[name].to(self.dtype, copy=True).cpu() for name in self.rest}
        if HEAD in self.rest:
            self.decoder.lm_head.release()
        return tensors

    def plain_tensors(self, i: int, quantized: Mapping[str, object]) -> dict[str, Tensor]:
        """A layer's weights that are not those of quantized projections."""
        return {
            name: slot.to(self.dtype, copy=True).cpu().contiguous()
            for name, slot in self.decoder.layer_slots(i).items()
            if name.removesuffix(".weight") not in quantized
        }

    @torch.no_grad()
    def observe(self, i: int, linears: Sequence[Linear]) -> dict[Linear, InputStatistics]:
        """Statistics of the inputs of some of a loaded layer's projections, as it is now."""
        found = {
            linear: InputStatistics(linear.plain_weight().shape[1], self.device)
            for linear in linears
        }
        last = linears[-1]

        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(module, Linear)
            found[module].add(inputs[0])
            if module is last:
                raise _Enough

        handles = [linear.register_forward_pre_hook(hook) for linear in linears]
        try:
            for state in self.states:
                try:
                    self._run(i, state)
                except _Enough:
                    continue
        finally:
            for handle in handles:
                handle.remove()
        return found

    @torch.no_grad()
    def advance(self, i: int) -> None:
        """What a loaded layer makes of the states becomes the states."""
        for state in self.states:
            state.copy_(self._run(i, state))

    def _run(self, i: int, state: Tensor) -> Tensor:
        residual = state.clone()
        out: Tensor = self.decoder.layer(i)(
            None, residual, *self._cache, self._batch, self._steps[i]
        )
        return residual.add_(out)

    def _read(self, slots: Mapping[str, Tensor]) -> None:
        for tensor in self._checkpoint.tensors():
            if tensor.slot is not None and tensor.slot in slots:
                tensor.copy_to(slots[tensor.slot])
        for name, slot in slots.items():
            slot.copy_(slot.to(self.dtype))
            _check_finite(name, slot)


def _check_finite(name: str, weight: Tensor) -> None:
    finite = weight.isfinite()
    if not finite.all():
        place = (~finite).nonzero()[0].tolist()
        module, _, kind = name.rpartition(".")
        got = float(weight[tuple(place)])
        raise ValueError(f"{module}: {kind}: expected finite values, got {got} at {place}")

"""What the modules share that take the place of `torch.nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fastinfer.ops._common import check


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with a weight of codes and scales: what all such layers have in common.

    Codes, scales and `bias` [N] are buffers, all in the state_dict, None where there are none.
    Results are NaN until they are loaded: no scale is 1 because it is missing. They may come by
    several calls of `load_state_dict(strict=False)`, as from the files of a checkpoint; until the
    last one has come the layer would mix two weights, and refuses to compute. What is no part of
    the weight, such as `bias`, may be replaced alone.

    The dtypes of buffers never change: `half()`, `bfloat16()`, `to(dtype)` and the like move the
    module at most, and a state_dict that would have to be rounded is refused. x may be of any
    dtype whatever theirs are, so nothing is gained by rounding them; and bias is fp32 because this
    is what the products take beside an x of every dtype.
    """

    in_features: int
    out_features: int
    bias: Tensor | None

    _apart: ClassVar[tuple[str, ...]] = ("bias",)  # buffers that are no part of the weight
    _arrived: frozenset[str]  # buffers that were loaded, while others of a new weight are not yet
    _refused: frozenset[str]  # those whose contents were, until they are loaded again
    _awaited: tuple[str, ...]  # what is lacking by these, as the state_dict has it

    def _register(
        self, shape: tuple[int, int], buffers: Mapping[str, Tensor | None], bias: Tensor | None
    ) -> None:
        """Makes the buffers those of this module, in their order, for a weight [N, K]."""
        self._arrived, self._refused, self._awaited = frozenset(), frozenset(), ()
        self.out_features, self.in_features = shape
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        if bias is not None:
            op, expected = type(self).__name__, shape[:1]
            check(
                op,
                bias.is_floating_point() and bias.shape == expected,
                f"bias: expected floats of shape {expected}, got {bias.dtype} {tuple(bias.shape)}",
            )
            device = next(self.buffers()).device
            check(op, bias.device == device, f"bias: expected on {device}, got {bias.device}")
            bias = bias.detach().float().contiguous()
        self.register_buffer("bias", bias)

    def _product(self, rows: Tensor) -> Tensor:
        """y [M, N] of x [M, K], which is dense in its rows."""
        raise NotImplementedError

    def _adopt(self) -> None:
        """Brings buffers that were assigned into the form that the product takes."""
        if self.bias is not None:
            self.bias = self.bias.float().contiguous()

    def _check_whole(self) -> None:
        """ValueError if only some buffers are those of the weight that was loaded last."""
        if self._awaited:
            raise ValueError(
                f"{type(self).__name__}: expected all of its tensors to be loaded, got some; "
                f"missing: {', '.join(self._awaited)}"
            )

    def _check_buffers(self) -> None:
        """ValueError if buffers do not fit together, or hold what no weight has."""
        raise NotImplementedError

    def _check_apart(self, loaded: set[str]) -> None:
        """ValueError if a buffer that was loaded, and that is no part of the weight, holds what
        `_check_buffers` refuses.
        """

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] in x's dtype.

        Args:
            x: [..., K], fp32, bf16 or fp16. Rows a constant distance apart, each dense, are read
                where they are (a part of a fused projection); others are copied first.

        Raises:
            NotImplementedError: x requires grad, outside of `torch.no_grad()`.
            ValueError: another width, dtype or device; or only some of the layer's tensors were
                loaded.
        """
        self._check_whole()
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: x: expected shape [..., {self.in_features}], "
                f"got {tuple(x.shape)}"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = self._product(rows)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """What `to`, `cuda`, `half` … come down to: only the device may change."""

        def move(buffer: Tensor) -> Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        others = len(error_msgs)  # of other layers: the list is one for the whole call
        buffers = dict(self.named_buffers(recurse=False))
        given = {
            name: state_dict[prefix + name]
            for name in buffers
            if isinstance(state_dict.get(prefix + name), Tensor)
        }
        rounded = [
            f"{prefix}{name}: expected {buffers[name].dtype}, or a dtype that it holds, got "
            f"{tensor.dtype}"
            for name, tensor in given.items()
            if not _holds(buffers[name].dtype, tensor.dtype)
        ]
        error_msgs.extend(rounded)
        if rounded:
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # With assign=True the buffers are the tensors given, whatever these are.
        self._adopt()
        # torch reports a copy that failed, and goes on.
        failed = " ".join(error_msgs[others:])
        fitting = {
            name
            for name, tensor in given.items()
            if tensor.shape == buffers[name].shape and f'"{prefix}{name}"' not in failed
        }
        self._note(fitting, [*buffers], prefix)
        if fitting:
            try:
                if self._arrived or len(error_msgs) > others:
                    self._check_apart(fitting)
                else:
                    self._check_buffers()
            except ValueError as error:
                error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
                self._refused |= fitting
                self._await([*buffers], prefix)

    def _note(self, loaded: set[str], names: list[str], prefix: str) -> None:
        """Keeps account of the buffers, of all these names, that a load has brought."""
        arrived = self._arrived | loaded
        if arrived.issuperset(names):
            arrived = frozenset()  # a whole weight: the next load begins another one
        self._arrived, self._refused = arrived, self._refused - loaded
        self._await(names, prefix)

    def _await(self, names: list[str], prefix: str) -> None:
        in_part = not self._arrived.issubset(self._apart)
        self._awaited = tuple(
            prefix + name
            for name in names
            if name in self._refused or (in_part and name not in self._arrived)
        )


def is_plain_linear(module: object) -> bool:
    """Whether a module computes x W^T + b and nothing else.

    Subclasses of `nn.Linear` may compute something else (adapters, other packages' quantized
    layers), which replacing them would silently leave out. So may parametrised ones.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not is_parametrized(module)
    )


def plain_weight(kind: str, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and a copy of the bias, without gradient; TypeError if this is no plain layer."""
    if not is_plain_linear(linear):
        raise TypeError(f"{kind}.from_linear: expected a torch.nn.Linear, got {type(linear)}")
    if linear.weight.is_meta:
        raise ValueError(
            f"{kind}.from_linear: expected a layer with memory, got one on the meta device; "
            f'make the quantized layer by {kind}(..., device="meta")'
        )
    bias = None if linear.bias is None else linear.bias.detach().clone()
    return linear.weight.detach(), bias


def check_features(kind: str, in_features: int, out_features: int) -> None:
    """A weight has at least one row and one column."""
    check(kind, in_features >= 1, f"in_features: expected at least 1, got {in_features}")
    check(kind, out_features >= 1, f"out_features: expected at least 1, got {out_features}")


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every number of the other dtype is one of this dtype."""
    # torch promotes no fp8, and promotes integers to floats that may round them.
    if dtype == other or dtype.itemsize == 1 or dtype.is_floating_point != other.is_floating_point:
        return dtype == other
    return other.itemsize > 1 and torch.promote_types(dtype, other) == dtype

"""What `fastinfer.optimize` changed in a model, and what it left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Swapped:
    """One module that was replaced."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Left:
    """One module that was considered and stayed as it is."""

    path: str
    kind: str
    reason: str


@dataclass
class Report:
    """What was done to a model; print() shows a summary.

    swapped: modules that were replaced, by their paths in the model.
    left: modules of a kind that is replaced where it can be, and why these could not.
    attention: (before, after) of the model's attention implementation, or why it stayed.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    attention: tuple[str, str] | str = "not asked for"

    def __repr__(self) -> str:
        lines = ["fastinfer.optimize:"]
        kinds = Counter((s.before, s.after) for s in self.swapped)
        lines += [f"  {n:4} x {old} -> {new}" for (old, new), n in kinds.items()]
        if isinstance(self.attention, str):
            lines.append(f"  attention left: {self.attention}")
        else:
            lines.append("  attention: {} -> {}".format(*self.attention))
        reasons = Counter((x.kind, x.reason) for x in self.left)
        lines += [f"  left {n} x {kind}: {reason}" for (kind, reason), n in reasons.items()]
        return "\n".join(lines)

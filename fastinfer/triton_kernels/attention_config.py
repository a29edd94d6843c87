"""Which configuration of the attention kernel a problem gets: a pure function, in bytes and shapes.

A configuration is listed once with what it was tuned for; the first of its table that fits into the
device's shared memory is taken. The last one of each table fits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastinfer.triton_kernels.launch import Device


@dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes and launch options; printable, and all that tuning may change."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # of a persistent launch

    def shared_memory(self, head_dim: int, value_dim: int, itemsize: int, kv_itemsize: int) -> int:
        """Bytes of shared memory that the pipeline and the query tile take at most."""
        stage = self.block_n * (head_dim + value_dim) * kv_itemsize
        # wgmma (64 rows and more) still reads the oldest stage while the next one arrives.
        stages = self.num_stages - (self.block_m < 64)
        converted = 0
        if kv_itemsize != itemsize:  # decoded tiles go through shared memory once more
            converted = self.block_n * (head_dim + value_dim) * itemsize
        tile = self.block_m * max(head_dim, value_dim) * itemsize
        # Small tiles hand their probabilities over through shared memory.
        probabilities = self.block_m * self.block_n * itemsize * (self.block_m < 64)
        return stage * max(stages, 1) + converted + tile + probabilities


C = AttentionConfig
_WIDE = (
    C(128, 128, 8, 3),
    C(128, 64, 8, 3),
    C(128, 64, 8, 2),
    C(128, 32, 8, 3),
    C(64, 64, 4, 2),
    C(64, 32, 4, 2),
    C(32, 32, 4, 2),
    C(16, 16, 4, 1),
)
_NARROW = {
    16: (C(16, 64, 4, 3, 2), C(16, 64, 4, 2, 2), C(16, 32, 4, 2, 2),
         C(16, 16, 4, 1, 2)),
    32: (C(32, 64, 4, 3, 2), C(32, 64, 4, 2, 2), C(32, 32, 4, 2, 2),
         C(16, 16, 4, 1, 2)),
    64: (C(64, 64, 4, 3, 2), C(64, 64, 4, 2, 2), C(64, 32, 4, 2, 2), C(32, 32, 4, 2, 2),
         C(16, 16, 4, 1, 2)),
}  # fmt: skip
# fp32 has no tensor cores that keep its precision: small tiles, so that registers suffice.
_FULL_PRECISION = (C(32, 32, 4, 2), C(16, 32, 4, 2), C(16, 16, 4, 1))


def choose_config(
    device: Device,
    *,
    rows: int,
    narrow: bool,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    kv_itemsize: int,
) -> AttentionConfig:
    """The configuration for tiles of ``rows`` rows; dims are those padded to powers of 2.

    itemsize is that of q and of the arithmetic, kv_itemsize the smallest of the stored K and V.
    """
    table: tuple[AttentionConfig, ...]
    if itemsize == 4:
        table = _FULL_PRECISION
    elif narrow:
        table = _NARROW[rows]
    else:
        table = _WIDE
    for config in table:
        # Wide accumulators do not fit into the registers of a large tile.
        if config.block_m * value_dim > 128 * 256 and config is not table[-1]:
            continue
        programs = config.programs_per_sm if narrow else 1
        need = config.shared_memory(head_dim, value_dim, itemsize, kv_itemsize)
        if need * programs <= device.shared_memory:
            return config
    return table[-1]

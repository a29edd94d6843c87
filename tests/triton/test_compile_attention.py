"""The attention kernels compile into what each kind of GPU has: sm_90 and sm_80, and the smaller
shared memory of others (R33).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.triton_kernels import attention, attention_merge, attention_plan
from fastinfer.triton_kernels.attention_config import choose_config
from fastinfer.triton_kernels.launch import INTERPRETED, Device
from tests.triton.recording import BF16, FP16, FP32, Launch, recorded, resources

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="TRITON_INTERPRET=1 makes kernels that cannot be compiled"
)

KB = 1 << 10
DEVICES = {
    "227KB": Device(132, 227 * KB),
    "163KB": Device(108, 163 * KB),
    "99KB": Device(84, 99 * KB),
    "64KB": Device(40, 64 * KB),
}
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def paged(
    dim: int,
    queries: int,
    *,
    dtype: torch.dtype = BF16,
    stored: torch.dtype | None = None,
    block: int = 16,
    group: int = 4,
    tree: bool = False,
    **options: Any,
) -> list[Any]:
    """Arguments of `attention.paged_attention`: 3 sequences with so many queries."""
    q = torch.empty(3 * queries, 2 * group, dim, dtype=dtype)
    cache = torch.empty(8, 2, block, dim, dtype=stored or dtype)
    scale = None if stored is None else torch.empty(8, 2, block)
    table = torch.empty(3, 64, dtype=torch.int32)
    cu, lens = torch.empty(4, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    rows = attention_plan.plan_rows(3, 3 * queries, group, 8192)
    plan = torch.empty(rows, 8, dtype=torch.int32)
    mask = torch.empty(3 * queries, dtype=torch.int64) if tree else None
    right = -1 if tree else 0
    return [
        q, cache, cache.clone(), table, cu, lens, queries, 8192, 0.1, options.get("left", -1),
        right, options.get("softcap", 0.0), options.get("sinks"), mask,
        options.get("invariant", False), scale, scale,
        plan, None, torch.empty_like(q), torch.empty(2 * group, 3 * queries),
    ]  # fmt: skip


def dense(
    dim: int,
    value_dim: int,
    dtype: torch.dtype = BF16,
    *,
    left: int = -1,
    softcap: float = 0.0,
) -> list[Any]:
    """Arguments of `attention.flash_attention` with enough tiles to fill a device."""
    q = torch.empty(4, 1024, 8, dim, dtype=dtype)
    k, v = (torch.empty(4, 1024, 8, d, dtype=dtype) for d in (dim, value_dim))
    out_dtype = BF16 if dtype == FP8 else dtype
    out, lse = torch.empty(4, 1024, 8, value_dim, dtype=out_dtype), torch.empty(4, 8, 1024)
    scale = torch.empty(8) if dtype == FP8 else None
    return [q, k, v, 0.1, left, 0, softcap, None, None, False, scale, scale, scale, out, lse]


def launches(function: str, arguments: list[Any], device: Device) -> list[Launch]:
    with recorded(attention, device) as found:
        getattr(attention, function)(*arguments)
    return found


FULL = [  # on the large GPU: every form of the kernel
    ("flash_attention", lambda: dense(128, 128)),
    ("flash_attention", lambda: dense(192, 128, FP16, left=100)),
    ("flash_attention", lambda: dense(64, 64, FP32)),
    ("flash_attention", lambda: dense(128, 128, FP8)),
    ("flash_attention", lambda: dense(96, 96, FP8, left=100, softcap=30.0)),
    ("paged_attention", lambda: paged(128, 1)),
    ("paged_attention", lambda: paged(64, 5, invariant=True)),
    ("paged_attention", lambda: paged(128, 1, stored=INT8, block=128)),
    ("paged_attention", lambda: paged(128, 8, stored=FP8, tree=True, left=64)),
    ("paged_attention", lambda: paged(64, 300, group=3, softcap=30.0, sinks=torch.empty(6))),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(FULL)))
def test_every_form_compiles_for_a_large_gpu(index: int, tmp_path: Path) -> None:
    function, make = FULL[index]
    for launch in launches(function, make(), DEVICES["227KB"]):
        compiled = launch.compile(90)
        assert compiled.metadata.shared <= 227 * KB
        assert resources(compiled, tmp_path)["STACK"] <= 1024


SMALLER = [
    ("163KB", lambda: dense(128, 128)),
    ("99KB", lambda: dense(128, 128)),
    ("64KB", lambda: dense(256, 256)),
    ("163KB", lambda: dense(128, 128, FP8)),
    ("99KB", lambda: dense(192, 128, FP8)),
    ("163KB", lambda: paged(128, 1)),
    ("99KB", lambda: paged(128, 16, stored=INT8)),
    ("64KB", lambda: paged(256, 1, stored=FP8)),
]


@pytest.mark.parametrize("index", range(len(SMALLER)))
def test_a_configuration_that_fits_is_chosen(index: int) -> None:
    """Compiled for sm_80, whose instructions all these have; decode must fit twice."""
    name, make = SMALLER[index]
    arguments = make()
    function = "flash_attention" if arguments[0].dim() == 4 else "paged_attention"
    for launch in launches(function, arguments, DEVICES[name]):
        assert launch.compile(80).metadata.shared <= DEVICES[name].shared_memory


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sequences", [1, 300])
@pytest.mark.parametrize("capability", [90, 80])
def test_the_planner_compiles(sequences: int, invariant: bool, capability: int) -> None:
    lens = torch.empty(sequences, dtype=torch.int32)
    cu = torch.empty(sequences + 1, dtype=torch.int32)
    plan = torch.empty(attention_plan.plan_rows(sequences, sequences, 4, 4096), 8)
    with recorded(attention_plan, DEVICES["227KB"]) as found:
        attention_plan.plan_attention(
            cu, lens, sequences, 8, 2, 1, 4096, -1, 0, invariant, plan.int()
        )
    assert [launch.compile(capability).metadata.shared <= 48 * KB for launch in found] == [True]


@pytest.mark.parametrize("capability", [90, 80])
def test_merging_compiles(capability: int) -> None:
    outs, lses = torch.empty(3, 5, 8, 96, dtype=BF16), torch.empty(3, 8, 5)
    with recorded(attention_merge, DEVICES["227KB"]) as found:
        attention_merge.merge_attention_states(
            outs, lses, torch.empty(8), torch.empty_like(outs[0]), torch.empty_like(lses[0])
        )
    for launch in found:
        assert launch.compile(capability).metadata.shared <= 48 * KB


def test_configurations_fit_by_their_own_account() -> None:
    """Also the last one of each table, which is taken where nothing else fits."""
    for device in DEVICES.values():
        for narrow, rows in ((True, 16), (True, 32), (True, 64), (False, 0)):
            for dim in (16, 64, 128, 256):
                for itemsize, stored in ((2, 2), (2, 1), (4, 4)):
                    config = choose_config(
                        device, rows=rows, narrow=narrow, head_dim=dim, value_dim=dim,
                        itemsize=itemsize, kv_itemsize=stored,
                    )  # fmt: skip
                    need = config.shared_memory(dim, dim, itemsize, stored)
                    assert need <= device.shared_memory


def test_narrow_tiles_cover_what_is_narrow() -> None:
    for group in (1, 3, 4, 7, 16, 71):
        for queries in (1, 2, 8, 16, 64, 1000):
            for invariant in (False, True):
                tiles = attention_plan.choose_tiles(queries, group, invariant)
                assert tiles.narrow_rows in attention_plan.NARROW_ROWS
                if tiles.wide == 0:
                    assert queries * group <= tiles.narrow_rows
                    assert queries <= tiles.narrow
                if group <= tiles.narrow_rows:
                    assert tiles.narrow * group <= tiles.narrow_rows


def test_a_row_finds_the_same_tiles_in_every_batch() -> None:
    """batch_invariant: the border between narrow and wide does not move with the longest."""
    limits = {attention_plan.choose_tiles(q, 4, True).narrow_rows for q in (1, 4, 17, 500)}
    assert limits == {16}

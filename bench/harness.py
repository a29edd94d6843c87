"""The one timing function of the benchmarks, and the record of what was measured.

Every candidate of a case (ours and its peers) runs in this process on the same inputs. Rounds are
interleaved, so that a machine that drifts or is shared drifts for all of them; inputs rotate
through enough copies that none is found in the last-level cache; the median over rounds is reported
with its interquartile range. A ratio is peer time over ours: above 1 we are faster, and within 2 %
is a tie. On a GPU the device is timed (calls are captured in a CUDA graph), and what a call costs
the host is measured apart.
"""

from __future__ import annotations

import datetime
import gc
import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

Run = Callable[..., object]
RESULTS = Path(__file__).parent / "results"


@dataclass
class Case:
    """One row of a suite: `name` reads op/variant/shape, `make()` draws one set of inputs, every
    run takes such a set.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    run: Run
    peers: dict[str, Run] = field(default_factory=dict)
    bytes_moved: int | None = None
    flops: int | None = None
    # What the leanest run reads of a set, where runs read different parts of it.
    read_bytes: int | None = None


@dataclass(frozen=True)
class Timing:
    us: float
    us_iqr: float


def cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KM]?)\n?", index.read_text()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20}[unit])
    return max(sizes) or 32 << 20


def _tensor_bytes(values: Iterable[Any]) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _once(
    run: Run, inputs: list[tuple[Any, ...]], first: int, calls: int, device: torch.device
) -> float:
    """Seconds per call over `calls` calls, the inputs rotating."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(calls):
            run(*inputs[(first + i) % len(inputs)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls
    start = time.perf_counter()
    for i in range(calls):
        run(*inputs[(first + i) % len(inputs)])
    return (time.perf_counter() - start) / calls


def captured(run: Run, inputs: list[tuple[Any, ...]], calls: int) -> Run | None:
    """A CUDA graph of `calls` calls, so that the device is timed and not the launches; None where
    the run cannot be captured (it waits for the device, say).
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(*inputs[i % len(inputs)])
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return lambda *_: graph.replay()


def host_microseconds(run: Run, inputs: list[tuple[Any, ...]], calls: int = 30) -> float:
    """What a call costs the host, in microseconds: the device is kept busy meanwhile."""
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        for i in range(calls):
            run(*inputs[i % len(inputs)])
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def time_interleaved(
    runs: dict[str, Run],
    inputs: list[tuple[Any, ...]],
    device: torch.device,
    *,
    rounds: int = 15,
    round_seconds: float = 0.02,
    graphs: bool = True,
) -> dict[str, Timing]:
    """Median and interquartile range of each run, in microseconds a call.

    ``graphs``: capture the calls on a GPU, where a run can be captured.
    """
    calls: dict[str, int] = {}
    scale = dict.fromkeys(runs, 1)  # calls inside one call of a run
    runs = dict(runs)
    for name, run in list(runs.items()):
        _once(run, inputs, 0, 2, device)  # warm-up: compilation, allocation, thread pools
        seconds = _once(run, inputs, 0, 2, device)
        calls[name] = max(1, min(1000, int(round_seconds / max(seconds, 1e-7))))
        if device.type == "cuda" and graphs:
            count = max(len(inputs), min(calls[name], 100))
            graph = captured(run, inputs, count)
            if graph is not None:
                runs[name], scale[name], calls[name] = graph, count, 1
    samples: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for name, run in runs.items():
                us = _once(run, inputs, index, calls[name], device) * 1e6 / scale[name]
                samples[name].append(us)
    finally:
        gc.enable()
    result = {}
    for name, values in samples.items():
        quartiles = statistics.quantiles(values, n=4)
        result[name] = Timing(statistics.median(values), quartiles[2] - quartiles[0])
    return result


@cache
def ceilings(device_name: str) -> dict[str, float]:
    """What this device does at best, measured in this run: a large copy and the best of a few large
    GEMMs.
    """
    device = torch.device(device_name)
    count = (64 << 20) if device.type == "cpu" else (2 << 30)
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    # In a graph the copy would be the copy engine's, which is slower than the kernel.
    copy = time_interleaved(
        {"copy": lambda: target.copy_(source)}, [()], device, rounds=7, graphs=False
    )["copy"]
    found = {"copy_tbps": 2 * count / copy.us / 1e6}
    dtypes = {"fp32": torch.float32} if device.type == "cpu" else {"bf16": torch.bfloat16}
    for label, dtype in dtypes.items():
        best = 0.0
        for n in (1024, 2048) if device.type == "cpu" else (4096, 8192):
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            timing = time_interleaved({"mm": lambda a=a, b=b: a @ b}, [()], device, rounds=5)["mm"]
            best = max(best, 2 * n**3 / timing.us / 1e6)
        found[f"{label}_gemm_tflops"] = best
    return found


def device_label(device: torch.device) -> str:
    """The device's name as results carry it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip() or "unknown"


class Suite:
    """Measures cases and writes bench/results/<device>/<suite>.json, one row at a time so that a
    crash loses nothing.
    """

    def __init__(self, name: str, device: str = "cpu", results: Path = RESULTS) -> None:
        self.device = torch.device(device)
        label = device_label(self.device)
        folder = (
            "cpu" if self.device.type == "cpu" else re.sub(r"\W+", "-", label.lower()).strip("-")
        )
        self.path = results / folder / f"{name}.json"
        import triton

        self.record: dict[str, Any] = {
            "cpu" if self.device.type == "cpu" else "gpu": label,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": _commit(),
            "date": datetime.date.today().isoformat(),
            "ceilings": {k: round(v, 4) for k, v in ceilings(str(self.device)).items()},
            "results": [],
        }

    def measure(self, case: Case) -> dict[str, Any]:
        """Time a case, append its row to the results file and return it."""
        first = case.make()
        size = case.read_bytes or max(1, _tensor_bytes(first))
        copies = 1 + min(31, 2 * cache_bytes(self.device) // size)
        inputs = [first, *(case.make() for _ in range(copies - 1))]
        runs = {"fastinfer": case.run}
        failed = {}
        with torch.inference_mode():
            for name, peer in case.peers.items():
                try:
                    peer(*first)
                except Exception as error:  # a peer's fault costs its column, and is named
                    failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                else:
                    runs[name] = peer
            times = time_interleaved(runs, inputs, self.device)
            host = {}
            if self.device.type == "cuda":
                host = {
                    name: round(host_microseconds(run, inputs), 1) for name, run in runs.items()
                }
        ours = times["fastinfer"]
        tbps = case.bytes_moved / ours.us / 1e6 if case.bytes_moved else None
        tflops = case.flops / ours.us / 1e6 if case.flops else None
        row = {
            "name": case.name,
            "backend": self._backend(case.name.partition("/")[0]),
            "us": round(ours.us, 2),
            "us_iqr": round(ours.us_iqr, 2),
            "tflops": tflops and round(tflops, 4),
            "tbps": tbps and round(tbps, 4),
            "ceiling_share": self._share(tbps, tflops),
            "peers": {
                name: {"us": round(t.us, 2), "ratio": round(t.us / ours.us, 3)}
                for name, t in times.items()
                if name != "fastinfer"
            },
        }
        if host:
            row["host_us"] = host
        if failed:
            row["could_not_run"] = failed
        self.record["results"].append(row)
        self.write()
        return row

    def _backend(self, op: str) -> str:
        from fastinfer.ops import backends

        return backends(self.device).get(op, (self.device.type, ""))[0]

    def _share(self, tbps: float | None, tflops: float | None) -> float | None:
        shares = [tbps / self.record["ceilings"]["copy_tbps"]] if tbps else []
        if tflops:
            shares.append(
                tflops
                / max(v for k, v in self.record["ceilings"].items() if k.endswith("_gemm_tflops"))
            )
        return round(max(shares), 3) if shares else None

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.path.with_suffix(".json.new")
        staged.write_text(json.dumps(self.record, indent=1) + "\n")
        staged.replace(self.path)

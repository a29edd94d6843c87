"""`fastinfer tune`: measures how low-bit products are best cut on this machine's GPU.

Every configuration that the kernels have for a product is timed beside the default one. The best
is kept if it is faster by more than 3 %, is so again when both are measured once more, and gives
the default's result but for rounding. Row counts of one bucket (csrc/cuda/gemm/low_bit_config.h)
share a configuration, which must be faster for each that is measured. So do all of up to 16 rows:
there a row's bits do not depend on how many others there are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fastinfer import _library, tuning
from fastinfer.doctor import print_table
from fastinfer.tuning import Config, Entry, Problem

if TYPE_CHECKING:
    from fastinfer.models.config import ModelConfig

GAIN = 1.03
"""The least that a configuration must gain over the default one."""
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
FEW_ROWS = (8, 16)
"""The buckets of the kernel for few rows."""
_TRIES = 3  # configurations that are measured again, the best first

Shape = tuple[int, int]  # of a weight: N, K


@dataclass(frozen=True)
class Device:
    """A GPU that products are measured on."""

    name: str
    sms: int


class Bench(Protocol):
    """Runs one product; None stands for the default configuration."""

    def microseconds(self, configs: Sequence[Config | None]) -> list[float]:
        """The time of each, all measured together; infinity for what cannot be launched."""
        ...

    def agrees(self, config: Config) -> bool:
        """Whether its result is the default's but for rounding."""
        ...


@dataclass(frozen=True)
class Decision:
    """What was found for the row counts that share a configuration."""

    problems: tuple[Problem, ...]
    default: Config
    """That of the most rows, of which the times are as well."""
    default_us: float
    config: Config | None
    """None: the default one remains."""
    us: float
    wrong: tuple[Config, ...] = ()
    """Faster configurations whose results are not the default's: faults of a kernel."""

    @property
    def buckets(self) -> list[Problem]:
        """The problems whose entries this decides."""
        last = self.problems[-1]
        rows = {_library.rows_bucket(problem.m) for problem in self.problems}
        return [replace(last, m=m) for m in sorted(rows)]


def groups(
    shapes: Iterable[Shape], rows: Iterable[int], bits: int, group_size: int
) -> list[tuple[Problem, ...]]:
    """The products to measure; those that share a configuration are together."""
    counts = sorted(set(rows))
    few = [m for m in counts if _library.rows_bucket(m) in FEW_ROWS]
    if few:
        measured = {_library.rows_bucket(m) for m in few}
        counts += [m for m in FEW_ROWS if m not in measured]
    shared: dict[int, list[int]] = {}
    for m in sorted(counts):
        bucket = _library.rows_bucket(m)
        shared.setdefault(FEW_ROWS[-1] if bucket in FEW_ROWS else bucket, []).append(m)
    return [
        tuple(Problem(bits, m, n, k, group_size) for m in together)
        for n, k in dict.fromkeys(shapes)
        for together in shared.values()
    ]


def decide(
    problems: Sequence[Problem], sms: int, open_bench: Callable[[Problem], Bench]
) -> Decision | None:
    """Measures the products that share a configuration; None if the kernels do not take them."""
    usable = [tuning.configs(problem, sms) for problem in problems]
    if not usable[0]:
        return None
    defaults = {configs[0] for configs in usable}
    candidates = [config for config in usable[0] if defaults != {config}]
    benches = [open_bench(problem) for problem in problems]
    first = _measure(benches, candidates)
    default_us = us = first.default_us
    wrong: list[Config] = []
    kept: Config | None = None
    best = sorted(candidates, key=first.gain, reverse=True)[:_TRIES]
    for config in best:
        if first.gain(config) <= GAIN:
            break
        if not all(bench.agrees(config) for bench in benches):
            wrong.append(config)
            continue
        again = _measure(benches, [config])
        if again.gain(config) > GAIN:
            kept, us, default_us = config, again.us(config), again.default_us
            break
    return Decision(tuple(problems), usable[-1][0], default_us, kept, us, tuple(wrong))


@dataclass(frozen=True)
class _Measurement:
    """Of every product: the time of the default configuration, then of each other."""

    times: list[list[float]]
    configs: list[Config]

    @property
    def default_us(self) -> float:
        return self.times[-1][0]

    def us(self, config: Config) -> float:
        return self.times[-1][1 + self.configs.index(config)]

    def gain(self, config: Config) -> float:
        """Over the default one, of the product that gains least."""
        column = 1 + self.configs.index(config)
        return min(times[0] / times[column] for times in self.times)


def _measure(benches: Sequence[Bench], configs: list[Config]) -> _Measurement:
    return _Measurement([bench.microseconds([None, *configs]) for bench in benches], configs)


def entries(decisions: Iterable[Decision], before: Iterable[Entry] = ()) -> list[Entry]:
    """What a file holds after these decisions, if it held `before`; they replace what was there."""
    result = {entry.problem: entry for entry in before}
    for decision in decisions:
        for problem in decision.buckets:
            result.pop(problem, None)
            if decision.config is not None:
                result[problem] = Entry(problem, decision.config, decision.us, decision.default_us)
    order = sorted(result, key=lambda p: (p.bits, p.n, p.k, p.group_size, p.m))
    return [result[problem] for problem in order]


# ------------------------------------------------------------------------------ what is asked for


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of weights, such as "28672x4096,4096×14336": N × K."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*[xX×]\s*([1-9]\d{0,8})\s*", part)
        if match is None:
            raise ValueError(
                f"fastinfer tune: --shapes: expected N×K,… such as 28672x4096, got {part!r}"
            )
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def parse_rows(text: str) -> list[int]:
    """Row counts, such as "1,8,16"."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if re.fullmatch(r"[1-9]\d{0,6}", part) is None:
            raise ValueError(
                f"fastinfer tune: --rows: expected numbers of rows such as 1,8,16, got {part!r}"
            )
    return [int(part) for part in parts]


def model_shapes(model: str) -> list[Shape]:
    """The weights of a model's layers, merged as the engine has them.

    Args:
        model: as for the engine, or a config.json; weights are not read, and may be quantized.
    """
    import torch

    from fastinfer.models.layer import DecoderLayer
    from fastinfer.models.linear import Linear

    layer = DecoderLayer(_model_config(model), dtype=torch.bfloat16, device=torch.device("meta"))
    weights = [m.plain_weight() for m in layer.modules() if isinstance(m, Linear)]
    return list(dict.fromkeys((weight.shape[0], weight.shape[1]) for weight in weights))


def _model_config(model: str) -> ModelConfig:
    from fastinfer.models.config import ModelConfig
    from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
    from fastinfer.models.hf_checkpoint import read_json
    from fastinfer.models.source import resolve

    path = Path(model)
    if path.suffix != ".json":
        path = resolve(model, weights=False)
        if path.is_file():
            return GGUFCheckpoint(path).config
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"fastinfer tune: --model: there is no file {path}")
    return ModelConfig.from_hf(read_json(path))


def _check_format(bits: int, group_size: int) -> None:
    if bits not in tuning.BITS:
        raise ValueError(f"fastinfer tune: --bits: expected one of {tuning.BITS}, got {bits}")
    if group_size < 1 or group_size % 16:
        raise ValueError(
            f"fastinfer tune: --group-size: expected a positive multiple of 16, got {group_size}"
        )


# ----------------------------------------------------------------------------------- the command


def find_device(op: str) -> Device:
    """The current GPU; RuntimeError where the op's hand-written kernel does not run on it."""
    import torch

    from fastinfer.ops import backends

    backend, reason = backends("cuda")[op]
    if op not in _library.cuda_ops():
        raise RuntimeError(
            "fastinfer tune: expected an ops library with CUDA kernels, got one without (it is "
            "built with them where a CUDA compiler is found; FASTINFER_CUDA=1 demands that)"
        )
    if backend != "cuda":
        raise RuntimeError(
            "fastinfer tune: expected a GPU on which the hand-written kernels run, got none: "
            f"{reason}"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(properties.name, properties.multi_processor_count)


def open_gpu_bench(problem: Problem, device: Device) -> Bench:
    """Times products on the current GPU."""
    from fastinfer.tuner_gpu import GpuBench

    return GpuBench(problem, device.name)


def main(
    *,
    shapes: str | None = None,
    model: str | None = None,
    rows: str | None = None,
    bits: int = 4,
    group_size: int = 128,
    output: str | None = None,
    dry_run: bool = False,
) -> int:
    """The command: measures, prints a table and writes the file of the device.

    Args:
        shapes: of weights, "N×K,…".
        model: whose layers' weights are measured; shapes or model is needed.
        rows: row counts, "1,8,…"; None: `ROWS`.
        bits: of the codes.
        group_size: columns that share a scale.
        output: the folder of the file; None: where it is found when fastinfer is imported.
        dry_run: measure, but write nothing.

    Raises:
        ValueError: an argument that is none of these.
        OSError: the folder cannot be written, or the model is not found.
        RuntimeError: there is no GPU to tune for.
    """
    wanted = parse_shapes(shapes) if shapes is not None else []
    counts = parse_rows(rows) if rows is not None else list(ROWS)
    _check_format(bits, group_size)
    if model is not None:
        wanted += model_shapes(model)
    if not wanted:
        raise ValueError("fastinfer tune: expected --shapes or --model, got neither")
    device = find_device(f"int{bits}_gemm")
    where = tuning.folder() if output is None else Path(output)
    path = tuning.path_of(device.name, where)
    before = [] if dry_run else _prepare(path, device)
    decisions = []
    try:
        for decision in _decisions(groups(wanted, counts, bits, group_size), device):
            decisions.append(decision)
            if not dry_run:  # as far as it has got, should it be interrupted
                tuning.write(path, device.name, entries(decisions, before))
    finally:
        tuning.set_table(device.name, ())  # what was measured last
        tuning.load()
    _report(decisions)
    if not dry_run:
        print(f"{path}: {len(entries(decisions, before))} entries")
        if where != tuning.folder():
            print(f"FASTINFER_TUNED={where} puts it to use")
    return 1 if any(decision.wrong for decision in decisions) else 0


def _prepare(path: Path, device: Device) -> list[Entry]:
    """The entries that the file has already. Writes it at once, so that a folder that cannot be
    written is known before hours of measuring.
    """
    before: list[Entry] = []
    try:
        if path.is_file():
            table = tuning.read(path)
            if table.device != device.name:  # names that differ in spaces and case share a file
                raise ValueError(f"device: expected {device.name!r}, got {table.device!r}")
            before = list(table.entries)
    except ValueError as error:
        print(f"{path} is written anew: {error}", file=sys.stderr)
    try:
        tuning.write(path, device.name, before)
    except OSError as error:
        raise OSError(
            f"fastinfer tune: --output: expected a folder that can be written, got {path.parent}: "
            f"{error}"
        ) from error
    return before


def _decisions(wanted: Sequence[tuple[Problem, ...]], device: Device) -> Iterator[Decision]:
    from fastinfer.models.checkpoint import extra

    tqdm = extra("tqdm", "fastinfer tune").tqdm
    bar = tqdm(wanted, desc="tuning", unit="group", disable=not sys.stderr.isatty())
    for problems in bar:
        last = problems[-1]
        bar.set_postfix_str(f"{last.n}x{last.k}, {_rows(problems)} rows")
        decision = decide(problems, device.sms, lambda problem: open_gpu_bench(problem, device))
        if decision is None:
            bar.write(
                f"{last.op} {last.n}x{last.k}, {_rows(problems)} rows: no hand-written kernel "
                f"takes groups of {last.group_size}",
                file=sys.stderr,
            )
        else:
            yield decision


def _rows(problems: Sequence[Problem]) -> str:
    return "/".join(str(problem.m) for problem in problems)


def _report(decisions: Sequence[Decision]) -> None:
    if not decisions:
        return
    table = [("op", "N x K", "rows", "default us", "best us", "gain", "configuration")]
    for decision in decisions:
        last, kept = decision.problems[-1], decision.config
        table.append(
            (
                last.op,
                f"{last.n}x{last.k}",
                _rows(decision.problems),
                f"{decision.default_us:.1f}",
                f"{decision.us:.1f}",
                f"{decision.default_us / decision.us:.2f}x" if kept is not None else "",
                str(kept) if kept is not None else f"default ({decision.default})",
            )
        )
    print_table(table)
    for decision in decisions:
        for config in decision.wrong:
            last = decision.problems[-1]
            print(
                f"{last.op} {last.n}x{last.k}, {_rows(decision.problems)} rows: the result with "
                f"{config} is not that of the default configuration; please report this",
                file=sys.stderr,
            )

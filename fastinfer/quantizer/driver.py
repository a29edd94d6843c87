"""`quantize_model`: from a checkpoint to a smaller one, a layer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.models.hf_checkpoint import read_json
from fastinfer.models.loader import open_checkpoint
from fastinfer.models.quantized_checkpoint import QuantizedFormat
from fastinfer.models.source import resolve
from fastinfer.models.tokenizer import load_tokenizer
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer.calibration import calibration_windows
from fastinfer.quantizer.folder import (
    hf_fields,
    read_tensors,
    write_folder,
    write_json,
    write_tensors,
)
from fastinfer.quantizer.formats import FORMATS, Format
from fastinfer.quantizer.layer import quantize_layer, round_plain, set_codes
from fastinfer.quantizer.walk import Walk

_LOCK = "lock"  # held by a run, and by nothing when it has ended in any way
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProjectionReport:
    """How well a projection was quantized."""

    name: str
    method: str
    bits: int
    relative_error: float
    """Mean squared error of its outputs on the calibration data, over their mean square."""


@dataclass(frozen=True)
class _Job:
    """What all layers have in common."""

    schemes: Mapping[str, Scheme | None]
    format: Format
    config: dict[str, Any]
    scale_dtype: torch.dtype
    sequential: bool


def quantize_model(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    texts: Sequence[str],
    *,
    samples: int = 128,
    seq_len: int = 512,
    format: str = "compressed-tensors",
    device: str | torch.device = "cpu",
    sequential: bool = True,
) -> list[ProjectionReport]:
    """Quantizes the projections of a model's layers and saves it as a Hugging Face folder.

    The checkpoint is read a layer at a time; in memory are its embedding, one layer in fp32, the
    second moments of that layer's inputs, and the activations of the calibration data. A layer sees
    what the quantized layers before it make of the data. Finished layers are kept in the folder
    ``<out>.work``; after an interruption the same call goes on from there, with the same result.
    The result gets its name when it is complete; the source is only read.

    Args:
        model: a folder with safetensors, a GGUF file (dequantized), a hub id, or "smollm2".
        out: a folder that does not exist yet.
        recipe: schemes by the names of projections, such as "model.layers.0.mlp.down_proj".
        texts: calibration data.
        samples: windows of it.
        seq_len: tokens of each.
        format: "compressed-tensors" (pack-quantized), "gptq" or "awq" (version gemm).
        device: where layers are computed.
        sequential: see `fastinfer.quantizer.layer.quantize_layer`.

    Returns:
        A row for each quantized projection.

    Raises:
        FileNotFoundError: the model is missing.
        FileExistsError: there is something at ``out``.
        ValueError: ``out`` in the model's folder, a model that is quantized already or otherwise
            refused by `fastinfer.models.load`, a recipe that names what the model has not or the
            format has no place for, too little text, NaN or infinity in weights or activations, or
            a work folder of another run, or one that is going on.
    """
    path, out = resolve(model), Path(out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"quantize: {out}: expected a folder that does not exist yet")
    if path.is_dir() and path.resolve() in out.resolve().parents:
        raise ValueError(f"quantize: {out}: expected a folder outside of the model's, {path}")
    if format not in FORMATS:
        raise ValueError(f"quantize: format: expected one of {[*FORMATS]}, got {format!r}")
    device = _device(device)
    checkpoint = open_checkpoint(path)
    if checkpoint.quantization is not None:
        raise ValueError(
            f"quantize: {path}: expected a plain model, got one that is quantized already "
            f"({checkpoint.quantization})"
        )
    if path.is_file():
        hf_fields(checkpoint.config)
    tokenizer = load_tokenizer(path)
    ids = calibration_windows(texts, tokenizer, samples=samples, length=seq_len)
    walk = Walk(checkpoint, ids, device)
    layers = range(checkpoint.config.num_layers)
    shapes = {p.name: tuple(p.weight.shape) for i in layers for p in walk.projections(i)}
    recipe.check_names(list(shapes))
    job = _job(recipe, shapes, format, walk, sequential)

    work = out.with_name(out.name + ".work")
    with _opened_work(work, _fingerprint(path, ids, recipe, format, sequential)):
        # First, since what is wrong with the output projection is better known before the layers.
        rest = work / "rest.safetensors"
        write_tensors(rest, walk.rest_tensors())
        reports: list[ProjectionReport] = []
        files = []
        for i in layers:
            files.append(work / f"layer-{i:05d}.safetensors")
            reports += _layer(walk, i, job, files[-1])
        files.append(rest)
        report = {"recipe": recipe.to_dict(), "projections": [vars(r) for r in reports]}
        write_folder(
            out, work / "folder", path, tokenizer, checkpoint.config, job.config, files, report
        )
        shutil.rmtree(work)
    return reports


def _device(device: str | torch.device) -> torch.device:
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"quantize: device: expected one that is usable here, got {str(device)!r} ({error})"
        ) from error
    return torch.device(device)


def _job(
    recipe: Recipe,
    shapes: Mapping[str, tuple[int, ...]],
    format: str,
    walk: Walk,
    sequential: bool,
) -> _Job:
    chosen = FORMATS[format]
    schemes = {name: chosen.complete(recipe.scheme(name)) for name in shapes}
    multiple = chosen.row_multiple
    partial = []
    for name, (n, k) in shapes.items():
        scheme = schemes[name]
        if scheme is not None and n % multiple:
            raise ValueError(
                f"{name}: format {format!r}: expected a multiple of {multiple} output features, "
                f"got {n}"
            )
        if scheme is not None and scheme.group_size != -1 and k % scheme.group_size:
            size = scheme.group_size
            partial.append(f"{name}: {k} inputs are not a multiple of group_size {size}")
    if partial:
        _log.warning(
            "%s (and %d more like it): fastinfer loads a last group that is partial, the package "
            "compressed-tensors 0.20 refuses it",
            partial[0],
            len(partial) - 1,
        )
    scale_dtype = chosen.scale_dtype or walk.dtype
    return _Job(schemes, chosen, chosen.config(schemes), scale_dtype, sequential)


def _layer(walk: Walk, i: int, job: _Job, file: Path) -> list[ProjectionReport]:
    """Quantizes a layer, or takes it from its file, and goes through it."""
    start = time.perf_counter()
    walk.load(i)
    known = file.exists()
    if not known:
        _quantize(walk, i, job, file)
    # Also of a layer just quantized: what is saved is what the next layer sees.
    tensors, metadata = read_tensors(file)
    _restore(walk, i, job, tensors)
    walk.advance(i)
    walk.release(i)
    reports = [ProjectionReport(**row) for row in json.loads(metadata["report"])]
    errors = ", ".join(f"{r.name.rpartition('.')[2]} {r.relative_error:.2e}" for r in reports)
    seconds = "from the work folder" if known else f"{time.perf_counter() - start:.1f} s"
    _log.info("layer %d/%d (%s): %s", i + 1, walk.config.num_layers, seconds, errors or "plain")
    return reports


def _quantize(walk: Walk, i: int, job: _Job, file: Path) -> None:
    found = quantize_layer(walk, i, job.schemes, job.scale_dtype, sequential=job.sequential)
    tensors: dict[str, Tensor] = walk.plain_tensors(i, found)
    rows = []
    for name, result in found.items():
        scheme = job.schemes[name]
        assert scheme is not None
        for suffix, tensor in job.format.tensors(result.weight, scheme, job.config).items():
            if tensor is not None:
                tensors[f"{name}.{suffix}"] = tensor.cpu()
        rows.append(vars(ProjectionReport(name, scheme.method, scheme.bits, result.relative_error)))
    write_tensors(file, tensors, report=json.dumps(rows))


def _restore(walk: Walk, i: int, job: _Job, tensors: Mapping[str, Tensor]) -> None:
    """Gives a loaded layer the weights of its file."""
    reader = QuantizedFormat(job.config)
    slots = walk.decoder.layer_slots(i)
    codes: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        split = reader.split(name)
        if split is None:
            slots[name].copy_(tensor)
        else:
            codes.setdefault(split[0], {})[split[1]] = tensor
    for projection in walk.projections(i):
        if projection.name in codes:
            set_codes(projection, reader.pack(projection.name, codes[projection.name]))
    round_plain(walk, i, codes)


@contextlib.contextmanager
def _opened_work(work: Path, fingerprint: Mapping[str, Any]) -> Iterator[None]:
    """Makes the work folder, or goes on with one of the same run; no other run has it meanwhile."""
    state = work / "run.json"
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        raise ValueError(f"quantize: {work}: expected a work folder, got a file or a link")
    if not state.exists():
        # A run that ended before it had its run.json leaves a part of that.
        if work.exists() and {p.name for p in work.iterdir()} - {_LOCK, "run.json.part"}:
            raise ValueError(f"quantize: {work}: expected a work folder with run.json, got another")
        work.mkdir(parents=True, exist_ok=True)
    with (work / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"quantize: {work}: expected no other run in this folder, got one that is going on"
            ) from None
        _check_run(work, state, fingerprint)
        yield


def _check_run(work: Path, state: Path, fingerprint: Mapping[str, Any]) -> None:
    """The work folder is of this run, or of none yet."""
    if not state.exists():
        write_json(state, fingerprint)
        return
    before = json.loads(state.read_text(encoding="utf-8"))
    differing = [key for key in fingerprint if before.get(key) != fingerprint[key]]
    if differing:
        raise ValueError(
            f"quantize: {work} is of an interrupted run with another {', '.join(differing)}; "
            "expected the same as then, or that the folder is removed"
        )
    _log.info("going on with the layers in %s", work)


def _fingerprint(
    path: Path, ids: Tensor, recipe: Recipe, format: str, sequential: bool
) -> dict[str, Any]:
    """What a layer's result depends on, as far as a file can say it."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    config = read_json(path / "config.json") if path.is_dir() else None
    return {
        "model": hashlib.sha256(json.dumps([stats, config]).encode()).hexdigest(),
        "calibration": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "recipe": recipe.to_dict(),
        "format": format,
        "sequential": sequential,
    }

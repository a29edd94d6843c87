"""Files of measured configurations, and the tuner that writes them, without a GPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastinfer
from fastinfer import _library, cli, doctor, ops, tuner, tuning
from fastinfer.tuning import Config, Entry, Problem

DEVICE = "NVIDIA H200"
SMS = 132
FEW = Problem(4, 8, 4096, 4096, 128)
MANY = Problem(4, 256, 28672, 4096, 128)
ENTRIES = (
    Entry(FEW, Config.of("few_rows", {"rows": 8, "warps": 16, "cluster": 2}), 5.5, 6.25),
    Entry(
        MANY,
        Config.of("many_rows", {"tokens": 256, "splits": 1, "shared": 1, "cluster": 1}),
        50.0,
        60.0,
    ),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where tuned files are looked for in a test."""
    where = tmp_path / "tuned"
    monkeypatch.setenv("FASTINFER_TUNED", str(where))
    yield where
    monkeypatch.undo()
    tuning.load()


def write_fields(folder: Path, **changes: Any) -> Path:
    """The file of `ENTRIES` with some of its fields changed; None removes one."""
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return path


# ------------------------------------------------------------------------------------- the files


def test_what_is_written_is_read(folder: Path) -> None:
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    table = tuning.read(path)
    assert path.name == "nvidia-h200.json"
    assert table == tuning.Table(DEVICE, fastinfer.__version__, torch.__version__, ENTRIES)
    assert os.listdir(folder) == [path.name]


def test_a_file_is_small_and_readable(folder: Path) -> None:
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    lines = path.read_text().splitlines()
    assert len(lines) == 7 + len(ENTRIES)
    assert json.loads(lines[6].strip()) == {
        "op": "int4_gemm",
        "kernel": "many_rows",
        "n": 28672,
        "k": 4096,
        "group_size": 128,
        "m": 256,
        "config": {"tokens": 256, "splits": 1, "shared": True, "cluster": 1},
        "us": 50.0,
        "default_us": 60.0,
    }


def test_a_failed_write_leaves_the_file_as_it_was(folder, monkeypatch) -> None:
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    before = path.read_text()

    def full(self: Path, text: str, **options: Any) -> None:
        self.write_bytes(text.encode()[:20])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        tuning.write(path, DEVICE, ())
    assert path.read_text() == before and os.listdir(folder) == [path.name]


def test_the_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FASTINFER_TUNED", "/some/folder")
    assert tuning.folder() == Path("/some/folder")
    monkeypatch.setenv("FASTINFER_TUNED", "")
    assert tuning.folder() == tmp_path / "fastinfer" / "tuned"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning.folder() == Path("/home/somebody/.cache/fastinfer/tuned")


def test_a_file_is_put_to_use_and_what_is_unusable_is_counted(folder: Path) -> None:
    unusable = replace(ENTRIES[0], config=Config((0, 5, 16, 1, 0)), problem=replace(FEW, n=64))
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, [*ENTRIES, unusable])
    tuning.load()
    assert tuning.in_use == {DEVICE: tuning.InUse(path, 2, 1)}
    path.unlink()
    tuning.load()
    assert tuning.in_use == {}


def test_of_entries_for_the_same_products_the_fastest_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tiles, bucket and kind of groups, although written otherwise. All are counted."""
    slow, fast, slower = tuning.configs(MANY, SMS)[1:4]
    entries = [
        Entry(replace(MANY, m=256), slow, 50.0, 60.0),
        Entry(replace(MANY, m=129, group_size=256), fast, 20.0, 30.0),
        Entry(replace(MANY, n=28671, k=4090), slower, 49.0, 50.0),
    ]
    handed: list[list[int]] = []
    library = torch.ops.fastinfer._set_gemm_configs.default

    def keep(device: str, rows: torch.Tensor) -> int:
        handed.extend(rows.tolist())
        return int(library(device, rows))

    path = tuning.path_of(DEVICE, folder)
    for order in (entries, entries[::-1], [entries[1], entries[2], entries[0]]):
        tuning.write(path, DEVICE, order)
        tuning.load()
        assert tuning.in_use == {DEVICE: tuning.InUse(path, 3, 0)}
        with monkeypatch.context() as patched:
            patched.setattr(torch.ops.fastinfer._set_gemm_configs, "default", keep)
            assert tuning.set_table(DEVICE, order) == 3
        assert tuple(handed[-1][-5:]) == fast.numbers  # the last one holds (tests/cuda)


def test_the_largest_sizes_are_read(folder: Path) -> None:
    most = 2**31 - 1
    entry = replace(ENTRIES[1], problem=Problem(4, most, most, most, 2**63 - 1))
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, [entry])
    tuning.load()
    assert tuning.in_use == {DEVICE: tuning.InUse(path, 1, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"device": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("[]", "the file: expected a JSON object, got list"),
        ("{}", "'device' is missing"),
    ],
)
def test_a_damaged_file_is_one_warning(folder: Path, text: str, message: str) -> None:
    folder.mkdir()
    path = folder / "nvidia-h200.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning) as caught:
        tuning.load()
    assert len(caught) == 1 and tuning.in_use == {}
    assert str(path) in str(caught[0].message) and message in str(caught[0].message)


ENTRY = json.loads(json.dumps(tuning._json(ENTRIES[1])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": "0.0.1"},
            f"expected that of this fastinfer, {fastinfer.__version__}, got 0.0.1",
        ),
        ({"version": None}, "'version' is missing"),
        ({"device": 7}, "device: expected str, got 7"),
        ({"device": "A\ud800"}, "device: expected a printable name"),
        ({"device": "NVIDIA H100"}, "expected the name nvidia-h100.json"),
        ({"entries": {}}, "entries: expected list"),
        ({"entries": [3]}, "entry 0: expected a JSON object, got int"),
        ({"entries": [ENTRY, ENTRY | {"op": "int5_gemm"}]}, "entry 1: op: expected one of"),
        ({"entries": [ENTRY | {"kernel": "some_rows"}]}, "kernel: expected one of"),
        ({"entries": [ENTRY | {"n": 1.5}]}, "n: expected int, got 1.5"),
        ({"entries": [ENTRY | {"n": True}]}, "n: expected int, got True"),
        (
            {"entries": [ENTRY | {"k": 1 << 70}]},
            f"entry 0: k: expected a number of 1..{2**31 - 1}, got {1 << 70}",
        ),
        ({"entries": [ENTRY | {"n": 2**63 - 1}]}, "n: expected a number of 1..2147483647, got 922"),
        ({"entries": [ENTRY | {"m": 0}]}, "m: expected a number of 1..2147483647, got 0"),
        ({"entries": [ENTRY | {"m": -1}]}, "m: expected a number of"),
        ({"entries": [ENTRY | {"group_size": 2**63}]}, "group_size: expected a number of"),
        ({"entries": [ENTRY | {"config": ENTRY["config"] | {"tokens": -1}}]}, "config: tokens: ex"),
        ({"entries": [ENTRY | {"us": 10**400}]}, "us: expected microseconds"),
        ({"entries": [ENTRY | {"us": math.nan}]}, "us: expected microseconds"),
        ({"entries": [ENTRY | {"us": 0}]}, "us: expected microseconds, got 0"),
        ({"entries": [ENTRY | {"config": {"tokens": 1}}]}, "'splits' is missing"),
        (
            {"entries": [ENTRY | {"config": ENTRY["config"] | {"shared": 2}}]},
            "shared: expected bool, got 2",
        ),
    ],
)
def test_wrong_contents_are_one_warning(folder, changes, message) -> None:
    path = write_fields(folder, **changes)
    with pytest.warns(RuntimeWarning) as caught:
        tuning.load()
    assert len(caught) == 1 and tuning.in_use == {}
    assert str(path) in str(caught[0].message) and message in str(caught[0].message)


def test_a_file_for_the_folder_is_one_warning(folder: Path) -> None:
    folder.write_text("no folder")
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(folder))} is ignored"):
        tuning.load()


@pytest.mark.parametrize("damaged", [False, True])
def test_import_uses_the_file_and_survives_a_damaged_one(folder: Path, damaged: bool) -> None:
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    if damaged:
        path.write_text("{")
    code = (
        "import torch, fastinfer.ops, fastinfer.tuning\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([(d, f.entries) for d, f in fastinfer.tuning.in_use.items()])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ("[]" if damaged else f"[({DEVICE!r}, 2)]")
    assert run.stderr.count(str(path)) == damaged


def test_doctor_shows_the_file(folder: Path, capsys) -> None:
    doctor.main()
    assert f"none in {folder}" in capsys.readouterr().out
    path = tuning.path_of(DEVICE, folder)
    tuning.write(path, DEVICE, ENTRIES)
    tuning.load()
    doctor.main()
    assert re.search(rf"{DEVICE} +2 entries +{re.escape(str(path))}", capsys.readouterr().out)


# ------------------------------------------------------------------------------------- the tuner


def test_the_library_has_the_default_first() -> None:
    default, *others = tuning.configs(FEW, SMS)
    assert default.settings == {"rows": 4, "warps": 16, "cluster": 2}
    assert default not in others and {config.kernel for config in others} == {"few_rows"}
    assert {config.kernel for config in tuning.configs(MANY, SMS)} == {"many_rows"}
    assert tuning.configs(replace(MANY, group_size=32), SMS) == []


def test_few_rows_share_a_configuration() -> None:
    """Else a row's bits would depend on how many others there are."""
    assert {_library.rows_bucket(m) for m in range(1, 17)} == set(tuner.FEW_ROWS)
    for m in range(1, 18):
        few = tuning.configs(replace(FEW, m=m), SMS)[0].kernel == "few_rows"
        assert few == (_library.rows_bucket(m) in tuner.FEW_ROWS)
    for rows, measured in (([1], [1, 16]), ([9, 3], [3, 9]), ([16, 8, 8], [8, 16])):
        (together,) = tuner.groups([(64, 64)], rows, 4, 128)
        assert [problem.m for problem in together] == measured


def test_products_of_a_bucket_are_together() -> None:
    rows = [24, 32, 33, 1024, 600]
    found = tuner.groups([(64, 128), (64, 128), (256, 128)], rows, 2, 64)
    expected = [[24, 32], [33], [600, 1024]]
    assert [[p.m for p in together] for together in found] == expected * 2
    assert found[0][0] == Problem(2, 24, 64, 128, 64) and found[3][0].n == 256


class FakeBench:
    """Times that are made up: `gains` over the default one, in one measurement after the other."""

    def __init__(self, problem: Problem, gains: dict[Config, Sequence[float]]) -> None:
        self.problem, self.gains = problem, gains
        self.measured: list[Sequence[Config | None]] = []
        self.checked: list[Config] = []
        self.wrong: set[Config] = set()

    def microseconds(self, configs: Sequence[Config | None]) -> list[float]:
        at = len(self.measured)
        self.measured.append(configs)
        assert configs[0] is None
        gains = [self.gains.get(c, (0.5,)) if c is not None else (1.0,) for c in configs]
        return [100.0 / gain[min(at, len(gain) - 1)] for gain in gains]

    def agrees(self, config: Config) -> bool:
        self.checked.append(config)
        return config not in self.wrong


def decide(bench: FakeBench, *problems: Problem) -> tuner.Decision:
    decision = tuner.decide(problems or (bench.problem,), SMS, lambda problem: bench)
    assert decision is not None
    return decision


DEFAULT, FIRST, SECOND, THIRD = tuning.configs(MANY, SMS)[:4]


def test_every_configuration_is_measured_beside_the_default() -> None:
    bench = FakeBench(MANY, {})
    decision = decide(bench)
    assert decision.config is None and decision.default == DEFAULT
    assert decision.us == decision.default_us == 100.0
    (measured,) = bench.measured
    assert {DEFAULT, *measured[1:]} == set(tuning.configs(MANY, SMS)) and DEFAULT not in measured


def test_the_best_is_kept() -> None:
    bench = FakeBench(MANY, {FIRST: [1.1], SECOND: [1.25], THIRD: [1e-9]})
    decision = decide(bench)
    assert decision.config == SECOND and decision.us == 80.0 and decision.default_us == 100.0
    assert bench.checked == [SECOND] and bench.measured[1] == [None, SECOND]


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ({FIRST: [1.029]}, None),
        ({FIRST: [1.031]}, FIRST),
        ({FIRST: [1.2, 1.02]}, None),  # not so again
        ({FIRST: [1.2, 1.02], SECOND: [1.1]}, SECOND),
        ({FIRST: [1.02, 1.2]}, None),
    ],
)
def test_a_gain_must_show_twice(gains, kept) -> None:
    assert decide(FakeBench(MANY, gains)).config == kept


def test_a_wrong_result_is_not_kept_and_is_told() -> None:
    bench = FakeBench(MANY, {FIRST: [1.5], SECOND: [1.2]})
    bench.wrong = {FIRST}
    decision = decide(bench)
    assert decision.config == SECOND and decision.wrong == (FIRST,)


def test_what_cannot_be_launched_is_not_kept() -> None:
    class Failing(FakeBench):
        def microseconds(self, configs: Sequence[Config | None]) -> list[float]:
            return [100.0 if config is None else math.inf for config in configs]

    assert decide(Failing(MANY, {})).config is None


def test_a_gain_must_show_for_every_row_count() -> None:
    few, more = (replace(MANY, m=m) for m in (130, 256))
    benches = {
        few: FakeBench(few, {FIRST: [0.9], SECOND: [1.1]}),
        more: FakeBench(more, {FIRST: [1.5], SECOND: [1.2]}),
    }
    decision = tuner.decide((few, more), SMS, benches.__getitem__)
    assert decision is not None and decision.config == SECOND
    assert decision.us == pytest.approx(100 / 1.2) and benches[few].checked == [SECOND]
    assert [problem.m for problem in decision.buckets] == [256]


def test_products_that_no_kernel_takes() -> None:
    problem = replace(MANY, group_size=32)
    assert tuner.decide((problem,), SMS, lambda problem: FakeBench(problem, {})) is None


def test_decisions_replace_what_the_file_had() -> None:
    others = tuple(replace(entry, problem=replace(entry.problem, n=64)) for entry in ENTRIES)
    kept = tuner.Decision((replace(FEW, m=1), replace(FEW, m=16)), DEFAULT, 6.0, FIRST, 5.0)
    default = tuner.Decision((MANY,), DEFAULT, 6.0, None, 6.0)
    found = tuner.entries([kept, default], [*ENTRIES, *others])
    assert [entry for entry in found if entry.problem.n == 64] == list(others)
    rest = [entry for entry in found if entry.problem.n != 64]
    assert rest == [Entry(replace(FEW, m=m), FIRST, 5.0, 6.0) for m in tuner.FEW_ROWS]


# ----------------------------------------------------------------------------------- the command


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["tune", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.fixture
def gpu(monkeypatch) -> dict[Config, Sequence[float]]:
    """A GPU on which these gains are measured; nothing else is faster than the default."""
    gains: dict[Config, Sequence[float]] = {}
    monkeypatch.setattr(tuner, "find_device", lambda op: tuner.Device(DEVICE, SMS))
    monkeypatch.setattr(tuner, "open_gpu_bench", lambda problem, device: FakeBench(problem, gains))
    return gains


def test_tune_writes_a_file_and_puts_it_to_use(capsys, gpu, folder: Path) -> None:
    gpu |= {FIRST: [1.25], ENTRIES[0].config: [2.0]}
    code, out, err = run(capsys, "--shapes", "28672x4096,4096×14336", "--rows", "8,256")
    path = tuning.path_of(DEVICE, folder)
    found = tuning.read(path).entries
    assert code == 0 and err == "" and f"{path}: 6 entries" in out
    assert {(e.problem.n, e.problem.m, e.config) for e in found} == {
        (n, m, FIRST if m == 256 else ENTRIES[0].config)
        for n in (28672, 4096)
        for m in (8, 16, 256)
    }
    assert re.search(r"int4_gemm +28672x4096 +256 +100.0 +80.0 +1.25x +tokens \d+", out)
    assert tuning.in_use[DEVICE].entries == 6
    gpu.clear()
    code, out, _ = run(capsys, "--shapes", "28672x4096", "--rows", "200")
    assert code == 0 and re.search(r"28672x4096 +200 +100.0 +100.0 +default", out)
    assert len(tuning.read(path).entries) == 5  # the default is faster now


def test_dry_run_writes_nothing(capsys, gpu, folder: Path) -> None:
    gpu[FIRST] = [1.25]
    code, out, _ = run(capsys, "--shapes", "28672x4096", "--rows", "256", "--dry-run")
    assert code == 0 and "1.25x" in out and not folder.exists()


def test_output_elsewhere_says_how_it_is_used(capsys, gpu, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "folder"
    code, out, _ = run(capsys, "--shapes", "64x64", "--rows", "1", "--output", str(other))
    assert code == 0 and f"FASTINFER_TUNED={other}" in out and not folder.exists()
    assert tuning.read(tuning.path_of(DEVICE, other)).entries == ()


def test_a_file_of_another_version_is_written_anew(capsys, gpu, folder: Path) -> None:
    path = write_fields(folder, version="0.0.1")
    code, _, err = run(capsys, "--shapes", "64x64", "--rows", "1")
    assert code == 0 and f"{path} is written anew: version" in err
    assert tuning.read(path).entries == ()


def test_a_file_of_another_device_is_written_anew(capsys, gpu, folder: Path) -> None:
    """Whose name makes the same name of a file."""
    path = write_fields(folder, device="nvidia h200")
    code, _, err = run(capsys, "--shapes", "64x64", "--rows", "1")
    message = f"{path} is written anew: device: expected '{DEVICE}', got 'nvidia h200'"
    assert code == 0 and message in err
    table = tuning.read(path)
    assert (table.device, table.entries) == (DEVICE, ())


def test_a_wrong_result_fails_loudly(capsys, gpu, monkeypatch) -> None:
    gpu[FIRST] = [1.25]
    monkeypatch.setattr(FakeBench, "agrees", lambda self, config: False)
    code, out, err = run(capsys, "--shapes", "28672x4096", "--rows", "256")
    assert code == 1 and "please report this" in err and str(FIRST) in err
    assert "0 entries" in out


def test_groups_without_kernel_are_told(capsys, gpu) -> None:
    arguments = ["--shapes", "64x4096", "--rows", "16,256", "--group-size", "32"]
    code, out, err = run(capsys, *arguments)
    assert code == 0 and "256 rows: no hand-written kernel takes groups of 32" in err
    assert re.search(r"64x4096 +8/16 ", out)


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "quantization_config": {"quant_method": "awq"},
}


def test_shapes_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    expected = [(512, 256), (256, 256), (768, 256), (256, 384)]
    assert tuner.model_shapes(str(path)) == tuner.model_shapes(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --shapes or --model, got neither"),
        (["--shapes", "4096"], "--shapes: expected N×K,… such as 28672x4096, got '4096'"),
        (["--shapes", "64x64,"], "got ''"),
        (["--shapes", "0x64"], "got '0x64'"),
        (["--shapes", "64x64", "--rows", "8;9"], "--rows: expected numbers of rows"),
        (["--shapes", "64x64", "--rows", "0"], "got '0'"),
        (["--shapes", "64x64", "--bits", "5"], "--bits: expected one of (2, 3, 4, 8), got 5"),
        (["--shapes", "64x64", "--group-size", "24"], "--group-size: expected a positive mul"),
        (["--model", "no/such/model.json"], "there is no file no/such/model.json"),
        (["--model", "no such model"], "no such file or folder"),
    ],
)
def test_bad_arguments(capsys, gpu, arguments, message) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err


def test_a_folder_that_cannot_be_written(capsys, gpu, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = run(capsys, "--shapes", "64x64", "--output", str(blocked / "folder"))
    assert code == 2 and f"expected a folder that can be written, got {blocked}" in err


def test_without_cuda_kernels(capsys, monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(_library, "cuda_ops", lambda: [])
    code, _, err = run(capsys, "--shapes", "64x64")
    assert code == 1 and "expected an ops library with CUDA kernels, got one without" in err
    assert not folder.exists()


@pytest.mark.parametrize("reason", ["torch finds no usable CUDA GPU", "needs capability 9.0"])
def test_without_a_gpu_for_them(capsys, monkeypatch, folder: Path, reason: str) -> None:
    monkeypatch.setattr(_library, "cuda_ops", lambda: ["int4_gemm"])
    monkeypatch.setattr(ops, "backends", lambda device: {"int4_gemm": ("triton", reason)})
    code, _, err = run(capsys, "--shapes", "64x64")
    assert code == 1 and f"on which the hand-written kernels run, got none: {reason}" in err
    assert not folder.exists()


def test_nothing_of_the_measuring_is_left(capsys, gpu, folder: Path, monkeypatch) -> None:
    """A bench leaves in the library what it measured last."""
    left: list[tuple[str, int]] = []
    monkeypatch.setattr(
        tuning, "set_table", lambda device, found: left.append((device, len(found)))
    )
    monkeypatch.setattr(tuning, "load", lambda: left.append(("loaded", 0)))
    run(capsys, "--shapes", "64x64", "--rows", "1", "--dry-run")
    assert left == [(DEVICE, 0), ("loaded", 0)]

"""Writes the README's benchmark tables and its plots from bench/results: `python -m bench.report`
(`--check` only compares the tables). Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.harness import RESULTS

README = Path(__file__).parent.parent / "README.md"
PLOTS = Path(__file__).parent / "plots"
# Peers that did not run beside ours: microseconds by row, where the GPU is the same.
RECORDED = json.loads((Path(__file__).parent / "recorded" / "kernels-h200.json").read_text())
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def load(results: Path) -> list[dict[str, Any]]:
    """Every committed results file, in the order of its path."""
    return [
        json.loads(path.read_text()) | {"suite": path.stem}
        for path in sorted(results.glob("*/*.json"))
    ]


def table(record: dict[str, Any]) -> str:
    """One suite as a Markdown table. On a CPU only ratios are shown: absolute times hold on the
    measured GPU alone.
    """
    on_gpu = "gpu" in record
    device = record["gpu"] if on_gpu else record["cpu"]
    peers = sorted({name for row in record["results"] for name in row["peers"]})
    known = RECORDED["us"] if device == RECORDED["gpu"] else {}
    recorded = sorted({name for row in record["results"] for name in known.get(row["name"], {})})
    # An engine with weights of several formats: no ceiling of one op, but what they take and give.
    formats = on_gpu and all("weights_gb" in row for row in record["results"])
    columns = ["kernel", "us", "share of ceiling"]
    if formats:
        columns = ["weights, GB", "output tokens/s", "us per token"]
    head = [
        "benchmark",
        *(columns if on_gpu else []),
        *(f"vs {p}" for p in peers),
        *(f"vs {p} (recorded)" for p in recorded),
    ]
    summary = f"{record['suite']} — {device}, torch {record['torch']}, {record['date']}"
    lines = [
        "<details>",
        f"<summary>{summary}</summary>",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in record["results"]:
        cells = [f"`{row['name']}`"]
        if formats:
            cells += [
                f"{row['weights_gb']:.1f}",
                f"{row['output_tokens_per_s']:.0f}",
                f"{row['us']:.1f}",
            ]
        elif on_gpu:
            cells += [
                row["backend"],
                f"{row['us']:.1f}",
                f"{row['ceiling_share']:.2f}" if row["ceiling_share"] else "",
            ]
        mark = " (recorded)" if row.get("peers_recorded") else ""
        cells += [
            f"{row['peers'][p]['ratio']:.2f}×{mark}" if p in row["peers"] else "" for p in peers
        ]
        others = known.get(row["name"], {})
        cells += [f"{others[p] / row['us']:.2f}×" if p in others else "" for p in recorded]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "</details>"])


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # The same file from the same numbers, and text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "fastinfer", "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot


def plot_engine(record: dict[str, Any], path: Path) -> None:
    """Output tokens a second of each workload, beside the recorded engines."""
    pyplot = _pyplot()
    rows = [row for row in record["results"] if "output_tokens_per_s" in row]
    names = [row["name"].rpartition("/")[0] for row in rows]
    engines = ["fastinfer", *sorted({peer for row in rows for peer in row["peers"]})]
    figure, axis = pyplot.subplots(figsize=(9, 3.2))
    for i, engine in enumerate(engines):
        ours = engine == "fastinfer"
        shares = [1.0 if ours else 1.0 / row["peers"][engine]["ratio"] for row in rows]
        at = [k + (i - (len(engines) - 1) / 2) * 0.26 for k in range(len(rows))]
        label = engine if ours else f"{engine} (recorded)"
        axis.bar(at, shares, 0.24, label=label)
    axis.set_xticks(range(len(rows)), names, fontsize=8)
    axis.set_ylabel("tokens/s, fastinfer = 1")
    axis.set_title(
        f"{record['gpu']}, {rows[0]['name'].rpartition('/')[2]} shape, bf16, {record['date']}"
    )
    axis.set_ylim(0, 1.35)
    axis.legend(fontsize=8, loc="upper center", ncols=len(engines))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


KERNELS = {"triton": "Triton", "cuda": "Hopper"}


def plot_shares(records: list[dict[str, Any]], backend: str, path: Path) -> None:
    """How much of the measured copy bandwidth memory-bound kernels reach at their largest sizes."""
    pyplot = _pyplot()
    bars = [
        (row["name"], row["ceiling_share"])
        for record in records
        for row in record["results"]
        if row["backend"] == backend and row["tbps"] and row["us"] > 15 and row["ceiling_share"]
    ]
    bars.sort(key=lambda bar: bar[1])
    figure, axis = pyplot.subplots(figsize=(9, 0.24 * len(bars) + 0.8))
    axis.barh([name for name, _ in bars], [share for _, share in bars])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("share of the copy bandwidth (reading alone can exceed it)")
    axis.set_title(f"{KERNELS[backend]} kernels, one NVIDIA H200")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plot_prefill(records: list[dict[str, Any]], path: Path) -> None:
    """Dense attention of long queries beside cuDNN, in one process."""
    pyplot = _pyplot()
    rows = [
        row
        for record in records
        for row in record["results"]
        if row["backend"] == "cuda" and "cudnn" in row["peers"]
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.24 * len(rows) + 0.8))
    axis.barh(
        [row["name"].removeprefix("flash_attention/") for row in rows],
        [row["peers"]["cudnn"]["ratio"] for row in rows],
    )
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("cuDNN's time over ours: above 1 we are faster")
    axis.set_title("flash_attention on one NVIDIA H200")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def render(readme: str, records: list[dict[str, Any]]) -> str:
    """The README with everything between the markers replaced."""
    body = "\n\n".join(table(record) for record in records)
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"README: expected the markers {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{body}\n{END}", readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the README is not up to date")
    args = parser.parse_args()
    current = README.read_text()
    wanted = render(current, load(RESULTS))
    if args.check:
        return 0 if current == wanted else 1
    README.write_text(wanted)
    PLOTS.mkdir(exist_ok=True)
    gpu = [record for record in load(RESULTS) if "gpu" in record]
    plot_shares(gpu, "triton", PLOTS / "h200-bandwidth.svg")
    plot_shares(gpu, "cuda", PLOTS / "h200-hopper.svg")
    plot_prefill(gpu, PLOTS / "h200-prefill.svg")
    for record in gpu:
        if record["suite"] == "engine":
            plot_engine(record, PLOTS / "h200-engine.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

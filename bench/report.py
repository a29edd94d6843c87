"""Writes the README's benchmark tables from bench/results: `python -m bench.report` (`--check` only
compares).
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
    head = [
        "benchmark",
        *(["us", "share of ceiling"] if on_gpu else []),
        *(f"vs {p}" for p in peers),
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
        if on_gpu:
            cells += [
                f"{row['us']:.1f}",
                f"{row['ceiling_share']:.2f}" if row["ceiling_share"] else "",
            ]
        cells += [f"{row['peers'][p]['ratio']:.2f}×" if p in row["peers"] else "" for p in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "</details>"])


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
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs nvcc; of what ptxas reports (-Xptxas -v) only kernels that spill registers are shown."""

from __future__ import annotations

import re
import subprocess
import sys


def main() -> int:
    run = subprocess.run(sys.argv[1:], capture_output=True, text=True)
    kernel = "?"
    for line in (run.stdout + run.stderr).splitlines():
        entry = re.search(r"Compiling entry function '(\S+)'|Function properties for (\S+)", line)
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        )
        if entry:
            kernel = entry.group(1) or entry.group(2)
        elif frame:
            if any(int(n) for n in frame.groups()):
                print(f"warning: ptxas: {kernel}: {line.strip()}")
        elif not re.match(r"ptxas info|\s*$", line) and "bytes gmem" not in line:
            print(line)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())

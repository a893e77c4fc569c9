"""Makes the package's table of public GPU times from two CSV files.

    python benchmarks/accuracy/gpu_times.py COLLECTIVES.csv MATMULS.csv

The files are extracts of ai-dynamo/aiconfigurator (Apache-2.0), `systems/data`. The columns are
`gpu, nccl, op, gpus, bytes, us` (bytes as nccl-tests count them), and `gpu, vllm, m, k, n, us`.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

from jaxpar.tools.timeline import gpu_times

OUT = Path(gpu_times.__file__).with_name("gpu_times.json")
ABOUT = {
    "source": "ai-dynamo/aiconfigurator systems/data @095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "license": "Apache-2.0",
    "collectives": "microseconds by GPU, NCCL, operation, devices; of 512 bytes, of 1 KiB, ...",
    "matmuls": "microseconds by GPU, of [m, k, n], bfloat16, m by m",
}
KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


def collectives(path: str) -> dict[str, dict[str, list[float | None]]]:
    """Returns series by GPU, and by NCCL, operation and devices."""
    rows = defaultdict[tuple[str, str], dict[int, float]](dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            series = f"{row['nccl']} {KINDS[row['op']]} {row['gpus']}"
            rows[row["gpu"], series][int(row["bytes"])] = float(row["us"])
    made = defaultdict[str, dict[str, list[float | None]]](dict)
    for (gpu, series), times in sorted(rows.items()):
        sizes = [gpu_times.LEAST << number for number in range(gpu_times.SIZES)]
        if strange := set(times) - set(sizes):
            raise ValueError(f"{path}: {gpu} {series} has {min(strange)} bytes, no power of two")
        made[gpu][series] = [times.get(size) for size in sizes]
    return made


def matmuls(path: str) -> dict[str, list[list[float]]]:
    """Returns columns m, k, n and microseconds by GPU."""
    made = defaultdict[str, list[list[float]]](list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            sizes = [int(row[name]) for name in ("m", "k", "n")]
            made[row["gpu"]].append([*sizes, float(row["us"])])
    return {gpu: list(map(list, zip(*sorted(rows), strict=True))) for gpu, rows in made.items()}


def main(paths: list[str]) -> int:
    """Writes the table."""
    if len(paths) != 2:
        print(__doc__)
        return 2
    parts = {"collectives": collectives(paths[0]), "matmuls": matmuls(paths[1])}
    lines = [f'"about": {json.dumps(ABOUT)}']
    for part, by_gpu in parts.items():
        rows = ",\n".join(f'"{gpu}": {_short(rows)}' for gpu, rows in by_gpu.items())
        lines.append(f'"{part}": {{\n{rows}\n}}')
    OUT.write_text("{" + ",\n".join(lines) + "}\n")
    print(f"{OUT.name}: {OUT.stat().st_size / 1024:.0f} KiB")
    return 0


def _short(rows: object) -> str:
    return json.dumps(rows, separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

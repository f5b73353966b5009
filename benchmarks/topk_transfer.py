"""Bytes of a teacher's top-k for distillation: one id list a position against all positions' ids at every position.

A teacher that is asked for one set of ids must be asked for the union of all positions' lists and answers it at every
position: R * |union|. Here each position has its own list, R * k. Both are encoded as they go on the wire. Ids are
drawn as in text: k different ones a position, by the Zipf-Mandelbrot law. Run: python benchmarks/topk_transfer.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from provenance import commit, hardware
from rich.console import Console
from rich.table import Table

from paceline import arrays

GOAL = 20.0
SHIFT = 2.7  # of the Zipf-Mandelbrot law, which flattens its head as text does
VOCABULARIES = (32_000, 151_936)
EXPONENTS = (1.0, 1.1, 1.3)
RESULT = Path(__file__).parent / "results" / "topk_transfer.json"


@dataclass
class Row:
    """One case. `sparse` and `dense` are bytes on the wire, ids and log-probabilities together."""

    positions: int
    k: int
    vocabulary: int
    exponent: float
    union: int
    sparse: int
    dense: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes the sparse form has."""
        return self.dense / self.sparse


def draw_ids(positions: int, k: int, vocabulary: int, exponent: float, random: np.random.Generator) -> np.ndarray:
    """int32 [positions, k]: different ids at each position, frequent ones at many (draws without replacement)."""
    popularity = -exponent * np.log(np.arange(vocabulary) + SHIFT)
    ids = np.empty((positions, k), np.int32)
    for position in range(positions):
        keys = popularity + random.gumbel(size=vocabulary)
        ids[position] = np.argpartition(-keys, k)[:k]
    return ids


def measure(positions: int, k: int, vocabulary: int, exponent: float, seed: int = 0) -> Row:
    """Encode both forms of the same answer."""
    random = np.random.default_rng(seed)
    ids = draw_ids(positions, k, vocabulary, exponent, random)
    union, place = np.unique(ids, return_inverse=True)
    full = random.standard_normal((positions, len(union)), dtype=np.float32)
    chosen = np.take_along_axis(full, place.reshape(ids.shape), axis=1)
    sparse = sum(arrays.to_wire(item).ByteSize() for item in (ids, chosen))
    dense = sum(arrays.to_wire(item).ByteSize() for item in (union.astype(np.int32), full))
    return Row(positions, k, vocabulary, exponent, len(union), sparse, dense)


def save(rows: list[Row]) -> None:
    """Write the figures with what is needed to take them again."""
    result = {
        "command": "python " + " ".join(["benchmarks/topk_transfer.py", *sys.argv[1:]]), "commit": commit(),
        "hardware": hardware(), "floor": "the same values, dense over the union of ids",
        "goal": f"ratio >= {GOAL:g} at 1024 positions, k = 16",
        "rows": [{**asdict(row), "ratio": round(row.ratio, 1)} for row in rows],
    }  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--k", type=int, default=16)
    arguments = parser.parse_args()
    rows = [measure(arguments.positions, arguments.k, size, a) for size in VOCABULARIES for a in EXPONENTS]
    table = Table(title=f"top-{arguments.k} at {arguments.positions} positions")
    for column in ("vocabulary", "Zipf exponent", "|union|", "sparse KB", "dense KB", "x"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (f"{row.union:,}", f"{row.sparse / 1e3:,.0f}", f"{row.dense / 1e3:,.0f}", f"{row.ratio:.0f}")
        table.add_row(f"{row.vocabulary:,}", str(row.exponent), *sizes)
    Console(width=100).print(table)
    save(rows)
    return 0 if min(row.ratio for row in rows) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

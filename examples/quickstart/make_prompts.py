"""Write prompts.jsonl: one-digit additions, each after three solved ones, as lines that end at the newline."""

from __future__ import annotations

import json
import random
from pathlib import Path

SHOTS = 3


def line(rng: random.Random) -> tuple[str, str]:
    """An addition and its sum."""
    left, right = rng.randrange(10), rng.randrange(10)
    return f"{left}+{right}=", str(left + right)


def record(rng: random.Random) -> dict[str, str]:
    """One prompt with its label."""
    shots = "".join(question + answer + "\n" for question, answer in (line(rng) for _ in range(SHOTS)))
    question, label = line(rng)
    return {"prompt": shots + question, "label": label}


def main() -> None:
    folder = Path(__file__).parent
    for name, seed, count in (("prompts.jsonl", 0, 640), ("evaluation.jsonl", 1, 64)):
        rng = random.Random(seed)
        (folder / name).write_text("".join(json.dumps(record(rng)) + "\n" for _ in range(count)))


if __name__ == "__main__":
    main()

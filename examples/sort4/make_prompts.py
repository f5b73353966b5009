"""Write prompts.jsonl: four letters to be sorted, the only task of the tiny model in tests/assets/sort4."""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS = "abcdefghij"


def main() -> None:
    folder = Path(__file__).parent
    for name, seed, count in (("prompts.jsonl", 0, 1280), ("evaluation.jsonl", 1, 128)):
        rng = random.Random(seed)
        words = ["".join(rng.choice(LETTERS) for _ in range(4)) for _ in range(count)]
        records = ({"prompt": word + "=", "label": "".join(sorted(word))} for word in words)
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()

"""Write the labelled data of examples/sft and examples/dpo: four letters in order, and in another order."""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS = "abcdefghij"
COUNT = 1280


def pair(rng: random.Random) -> tuple[str, str, str]:
    """A word of letters that are not all alike, the letters in order, and in a third or in the word's order."""
    while True:
        word = rng.choices(LETTERS, k=4)
        other = rng.sample(word, k=4)
        if other != sorted(word):
            return "".join(word), "".join(sorted(word)), "".join(other)


def main() -> None:
    folder = Path(__file__).parent
    rng = random.Random(2)
    pairs = [pair(rng) for _ in range(COUNT)]
    preferences = [{"prompt": f"{word}=", "chosen": right, "rejected": wrong} for word, right, wrong in pairs]
    examples = [{"prompt": f"{word}=", "completion": right} for word, right, _ in pairs]
    for path, records in (
        (folder / "preferences.jsonl", preferences), (folder.parent / "sft" / "examples.jsonl", examples),
    ):  # fmt: skip
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()

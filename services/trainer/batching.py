"""Micro-batches of whole groups under a token budget, the same for the same input."""

from __future__ import annotations

from collections.abc import Sequence


def plan_micro_batches(shapes: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Group indices of each micro-batch. `shapes` are (rows, width) of each group; budget is in tokens with padding.

    First-fit decreasing by width: a micro-batch of several groups has at most `budget` tokens (all rows padded to the
    widest), a group over the budget goes alone, every group is in exactly one. Ties keep the order of the input.
    """
    order = sorted(range(len(shapes)), key=lambda index: (-shapes[index][1], index))
    bins: list[list[int]] = []
    rows: list[int] = []
    for index in order:
        count, _ = shapes[index]
        for number, members in enumerate(bins):
            if (rows[number] + count) * shapes[members[0]][1] <= budget:
                members.append(index)
                rows[number] += count
                break
        else:
            bins.append([index])
            rows.append(count)
    return [sorted(members) for members in bins]

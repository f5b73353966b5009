"""Micro-batches of whole groups under a token budget, and their balance over ranks: the same for the same input.

Sources: first-fit decreasing, Johnson 1973; the largest differencing method, Karmarkar and Karp 1982, in its balanced
form for equal counts, Michiels et al. 2003; longest processing time first, Graham 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(shapes: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Group indices of each micro-batch. `shapes` are (rows, width) of each group; budget is in tokens with padding.

    First-fit decreasing by width: a micro-batch of several groups has at most `budget` tokens (all rows padded to the
    widest), a group over the budget goes alone, every group is in exactly one. Ties keep the order of the input.
    """
    widths = [width for _, width in shapes]
    return _first_fit([rows for rows, _ in shapes], widths, widths, budget)


def plan_streams(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """As plan_micro_batches for rows without padding: `sizes` are the tokens of each group, which simply add up."""
    return _first_fit(sizes, [1] * len(sizes), sizes, budget)


def _first_fit(amounts: Sequence[int], widths: Sequence[int], keys: Sequence[int], budget: int) -> list[list[int]]:
    """Bins whose amounts, added up and times the width of the first member, keep to the budget. Large `keys` first."""
    bins: list[list[int]] = []
    totals: list[int] = []
    for index in sorted(range(len(keys)), key=lambda item: (-keys[item], item)):
        for number, members in enumerate(bins):
            if (totals[number] + amounts[index]) * widths[members[0]] <= budget:
                members.append(index)
                totals[number] += amounts[index]
                break
        else:
            bins.append([index])
            totals.append(amounts[index])
    return [sorted(members) for members in bins]


def plan_ranks(bins: Sequence[Sequence[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """The micro-batches of each rank, equally many on all, from those planned for one; `costs` of groups are balanced.

    Where the number of micro-batches is no multiple of `ranks`, the costliest of several groups are halved; with too
    few groups for that, some ranks get empty micro-batches, at the end.
    """
    bins = [list(members) for members in bins]
    while len(bins) % ranks:
        divisible = [index for index, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda index: (sum(costs[item] for item in bins[index]), -index))
        members = bins.pop(largest)
        bins += [[members[place] for place in half] for half in _halves([costs[item] for item in members])]
    bins += [[] for _ in range(-len(bins) % ranks)]
    parts = balance([sum(costs[item] for item in members) for members in bins], ranks)
    return [sorted((bins[index] for index in part), key=lambda members: (not members, members)) for part in parts]


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `costs` in each of `parts` equally large parts whose sums differ little; len(costs) % parts == 0.

    The better of differencing and of greedy assignment, by the largest sum.
    """
    if len(costs) % parts:
        raise ValueError(f"{len(costs)} items cannot be split into {parts} equal parts")
    candidates = [_differencing(costs, parts), _greedy(costs, parts)]
    best = min(candidates, key=lambda found: max((sum(costs[i] for i in part) for part in found), default=0.0))
    return [sorted(part) for part in best]


def _halves(costs: Sequence[float]) -> list[list[int]]:
    """Two parts of at least one item each, the next costliest always to the cheaper."""
    halves: list[list[int]] = [[], []]
    sums = [0.0, 0.0]
    for index in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        empty = [number for number in (0, 1) if not halves[number]]
        target = empty[0] if empty else int(sums[1] < sums[0])
        halves[target].append(index)
        sums[target] += costs[index]
    return [sorted(half) for half in halves]


def _greedy(costs: Sequence[float], parts: int) -> list[list[int]]:
    """The next costliest always to the part of the smallest sum that has room."""
    room = len(costs) // parts
    found: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, number) for number in range(parts)]
    for index in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        total, number = heapq.heappop(heap)
        found[number].append(index)
        if len(found[number]) < room:
            heapq.heappush(heap, (total + costs[index], number))
    return found


def _differencing(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Balanced differencing: tuples of `parts` items, the two of the largest spread merged, large sums with small."""
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for first in range(0, len(order), parts):
        state = [(float(costs[index]), [index]) for index in order[first : first + parts]]
        heap.append((state[-1][0] - state[0][0], first, state))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda item: (-item[0], item[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]

"""What each built-in grader counts as right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.plugins import registry
from services.reward.graders.base import GradeItem


def grade(name: str, options: dict[str, Any], response: str, **metadata: Any) -> float:
    kind = registry("grader").load(name)
    return kind(kind.Options(**options)).grade(GradeItem(response, "", metadata))


@pytest.mark.parametrize(
    ("options", "response", "label", "expected"),
    [
        ({}, " 1234\n", "1234", 1),
        ({"strip": False}, " 1234", "1234", 0),
        ({}, "Yes", "yes", 0),
        ({"ignore_case": True}, "Yes", "yes", 1),
        ({}, "42", 42, 1),
        ({}, "42\nand more", "42", 0),
        ({"first_line": True}, "\n 42 \nand more", "42", 1),
        ({}, "", "42", 0),
    ],
)
def test_exact_match(options: dict[str, Any], response: str, label: Any, expected: float) -> None:
    assert grade("exact_match", options, response, label=label) == expected


def test_a_label_that_is_not_text_is_an_error_and_another_field_may_hold_it() -> None:
    with pytest.raises(TypeError, match="'label' must be a string or a number"):
        grade("exact_match", {}, "x", label=["x"])
    assert grade("exact_match", {"label_field": "answer"}, "x", answer="x") == 1


@pytest.mark.parametrize(
    ("options", "response", "label", "expected"),
    [
        ({"pattern": r"<answer>.*</answer>"}, "so <answer>4</answer>", "", 1),
        ({"pattern": r"<answer>.*</answer>"}, "so 4", "", 0),
        ({"pattern": r"<answer>(.*?)</answer>", "group": 1}, "<answer>3</answer> <answer> 4 </answer>", 4, 1),
        ({"pattern": r"<answer>(.*?)</answer>", "group": 1}, "<answer>4</answer> <answer>3</answer>", 4, 0),
        ({"pattern": r"is (?P<word>\w+)", "group": "word"}, "it is Blue", "blue", 0),
        ({"pattern": r"is (?P<word>\w+)", "group": "word", "ignore_case": True}, "it IS Blue", "blue", 1),
        ({"pattern": r"a(b)?", "group": 1}, "a", "b", 0),
        ({"pattern": r"\d+", "group": 0}, "1 22", "22", 1),
    ],
)
def test_regex(options: dict[str, Any], response: str, label: Any, expected: float) -> None:
    assert grade("regex", options, response, label=label) == expected


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("1/2", "0.5", 1),
        ("0.5", "1/2", 1),
        (0.5, r"The answer is \boxed{\frac{1}{2}}.", 1),
        (r"\frac{1}{2}", "so it is 0.5", 1),
        (r"$\frac{1}{2}$", r"\boxed{0.5}", 1),
        ("1/3", "0.5", 0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        (r"\{1,2\}", r"\boxed{\{1,3\}}", 0),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        ("1,000", "1000", 1),
        ("50%", "0.5", 1),
        (12, "First 7. No, 12.", 1),
        (12, "12, or rather 7", 0),
        (12, "2 + 3 = 12", 1),
        (5, r"\boxed{5} wait \boxed{6}", 0),
        (12, "no idea", 0),
        (12, "", 0),
    ],
)
def test_math(label: Any, response: str, expected: float) -> None:
    assert grade("math", {}, response, label=label) == expected


def test_math_counts_only_boxed_answers_when_told() -> None:
    assert grade("math", {"require_boxed": True}, "12", label=12) == 0
    assert grade("math", {"require_boxed": True}, r"\boxed{12}", label=12) == 1


def test_math_does_not_make_zeros_of_labels_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        grade("math", {}, "12", label="")


@pytest.mark.parametrize(
    ("extract", "response", "expected"),
    [
        ("whole", " {} ", 1.0),
        ("last_number", "3 and 4 make {}.", 1.0),
        ("first_line", "\n{}\nor 7", 1.0),
        ("last_number", "I do not know", 0.0),
    ],
)
def test_reasoning_gym(extract: str, response: str, expected: float) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=7, min_terms=2, max_terms=2)[0]
    entry = json.loads(json.dumps(entry))
    answer = response.replace("{}", entry["answer"])
    assert grade("reasoning_gym", {"extract": extract}, answer, task="chain_sum", entry=entry) == expected

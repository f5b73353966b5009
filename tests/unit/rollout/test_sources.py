"""Sources: each record is named when it is wrong, slices are Python's, and the order of the data never changes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import ConfigError, PluginTable
from paceline.config.data import DataConfig
from paceline.ids import GroupId
from paceline.prompts.opening import check_enough, open_source
from services.rollout.datasets import DataOrder, Dataset, permutation
from services.rollout.sources.base import Source


def table(**options: object) -> PluginTable:
    return PluginTable.model_validate(options)


def jsonl(path: Path, lines: list[str], max_malformed: int = 0, **options: object) -> Source:
    path.write_text("\n".join(lines) + "\n")
    return open_source(table(name="jsonl", path=str(path), **options), "data.source", max_malformed)


def test_jsonl_fields_beside_the_prompt_become_metadata(tmp_path: Path) -> None:
    lines = ['{"prompt": "7+9=", "label": "16"}', "", '{"prompt": [{"role": "user", "content": "h\u00e9"}]}']
    source = jsonl(tmp_path / "a.jsonl", lines)
    assert len(source) == 2
    assert (source[0].text, source[0].metadata, source[0].prompt_id) == ("7+9=", {"label": "16"}, "a.jsonl:1")
    assert source[1].messages[0]["content"] == source[1].shown == "h\u00e9"
    assert source[1].prompt_id == "a.jsonl:3"


def test_jsonl_names_file_line_and_fault(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": ', '{"question": "b"}', '["c"]', '{"prompt": 7}', '{"prompt": "d"}']
    with pytest.raises(ConfigError) as error:
        jsonl(tmp_path / "bad.jsonl", lines, max_malformed=3)
    text = str(error.value)
    assert "4 malformed records; data.max_malformed = 3" in text
    assert f"{tmp_path}/bad.jsonl:2: is not valid JSON" in text
    assert "bad.jsonl:3: has no field 'prompt'; its fields are question" in text
    assert "bad.jsonl:4: holds a list" in text
    assert "bad.jsonl:5: 'prompt' is 7" in text


def test_jsonl_counts_what_it_skips(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ['{"prompt": "a"}', "{", '{"prompt": "b"}'], max_malformed=1)
    assert (source.malformed, [source[i].text for i in range(len(source))]) == (1, ["a", "b"])


@pytest.mark.parametrize(("start", "stop"), [(None, None), (2, None), (-3, None), (None, -2), (1, 4), (-100, 100)])
def test_slices_are_those_of_python_in_both_formats(tmp_path: Path, start: int | None, stop: int | None) -> None:
    texts = [f"p{i}" for i in range(6)]
    chosen = {key: value for key, value in (("start", start), ("stop", stop)) if value is not None}
    lines = jsonl(tmp_path / "a.jsonl", [json.dumps({"prompt": text}) for text in texts], **chosen)
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    rows = open_source(table(name="parquet", path=str(tmp_path / "a.parquet"), **chosen), "data.source")
    for source in (lines, rows):
        assert [source[i].text for i in range(len(source))] == texts[start:stop]


def test_parquet_rows_with_nested_values_and_ids(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"q": ["a", "b"], "key": [5, 6], "extra": [{"x": [1]}, {"x": [2]}]}), tmp_path / "a.parquet"
    )
    options = {"path": str(tmp_path / "a.parquet"), "prompt_field": "q", "id_field": "key"}
    source = open_source(table(name="parquet", **options), "data.source")
    assert (source[1].text, source[1].prompt_id, source[1].metadata) == ("b", "6", {"extra": {"x": [2]}})
    with pytest.raises(ConfigError, match="no column 'prompt'; its columns are"):
        open_source(table(name="parquet", path=options["path"]), "data.source")


def test_reasoning_gym_carries_its_whole_entry() -> None:
    config = {"min_terms": 2, "max_terms": 2}
    options = table(name="reasoning_gym", task="chain_sum", size=5, seed=3, config=config)
    source = open_source(options, "data.source")
    assert len(source) == 5
    assert source[4].metadata["task"] == "chain_sum"
    assert source[4].metadata["entry"]["question"] == source[4].text
    assert json.loads(json.dumps(source[4].metadata)) == open_source(options, "data.source")[4].metadata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "jsonl", "path": "/no/such/file"}, "does not exist"),
        ({"name": "jsonl", "paht": "x"}, r"unknown key 'data\.source\.paht'; did you mean 'path'"),
        ({"name": "jsnol", "path": "x"}, "did you mean 'jsonl'"),
        ({"name": "reasoning_gym", "task": "chain_sun"}, "no task 'chain_sun'"),
        ({"name": "reasoning_gym", "task": "chain_sum", "config": {"min_tersm": 2}}, "refuses its config"),
        ({"name": "no.such:thing"}, r"data\.source\.name: source 'no\.such:thing'"),
    ],
)
def test_a_wrong_source_table_says_what_to_change(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(table(**options), "data.source")


def test_a_function_of_ones_own_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_prompts.py").write_text(
        "def sums(count):\n    return [{'prompt': f'{i}+1=', 'label': str(i + 1)} for i in range(count)]\n"
        "def texts():\n    return ['a', 'b']\ndef wrong():\n    return 'abc'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source(table(name="own_prompts:sums", count=3), "data.source")
    assert (len(source), source[2].text, source[2].metadata) == (3, "2+1=", {"label": "3"})
    assert open_source(table(name="own_prompts:texts"), "data.source")[1].text == "b"
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        open_source(table(name="own_prompts:texts", size=3), "data.source")
    with pytest.raises(ConfigError, match="must return a list"):
        open_source(table(name="own_prompts:wrong"), "data.source")


def test_the_order_is_a_permutation_that_is_the_same_everywhere() -> None:
    assert permutation(8, 7) == [0, 2, 5, 7, 4, 3, 1, 6]
    assert sorted(permutation(1000, 1)) == list(range(1000))
    assert permutation(1000, 1) != permutation(1000, 2)


def test_every_epoch_has_an_order_of_its_own() -> None:
    order = DataOrder(50, seed=3, shuffle=True)
    first = [order.source_index(GroupId(0, i)) for i in range(50)]
    second = [order.source_index(GroupId(1, i)) for i in range(50)]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert order.source_index(GroupId(0, 7)) == first[7]
    plain = DataOrder(50, seed=3, shuffle=False)
    assert [plain.source_index(GroupId(4, i)) for i in range(50)] == list(range(50))
    with pytest.raises(IndexError, match=r"e0\.50"):
        plain.source_index(GroupId(0, 50))


def test_a_group_is_the_same_prompt_in_every_process(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{i}"}) for i in range(20)]
    path = tmp_path / "a.jsonl"
    config = DataConfig(source=table(name="jsonl", path=str(path)))
    first = Dataset(jsonl(path, lines), config, seed=5)
    again = Dataset(jsonl(path, lines), config, seed=5)
    ids = [f"e0.{i}" for i in range(20)]
    assert [first.prompt(name).text for name in ids] == [again.prompt(name).text for name in reversed(ids)][::-1]


def test_too_little_data_is_refused_with_both_numbers_and_the_fix() -> None:
    check_enough(10, 2, steps=5, groups_per_step=4)
    with pytest.raises(ConfigError) as error:
        check_enough(10, 2, steps=6, groups_per_step=4)
    assert "needs 24 groups" in str(error.value)
    assert "has 20 " in str(error.value)
    assert "data.epochs = 3 or run.steps = 5" in str(error.value)

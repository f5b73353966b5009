"""What the pages say can be done: run files parse, commands and targets exist, links resolve, code blocks run."""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.main import COMMANDS
from paceline.config import PluginTable, RunFile, load_run_file, parse
from paceline.config.check import check, plugin_tables
from paceline.config.place import SERVICES, Place
from paceline.plugins import registry
from paceline.testing.groups import make_group
from paceline.weights.manifest import Manifest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
RUN_FILES = sorted(ROOT.glob("examples/*/run.toml"))
PLANS = ("docs/architecture.md", "CHANGELOG.md")
"""Pages that name what is not there yet, or no longer."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def lines(page: Path) -> list[str]:
    """Commands of the page's shell blocks, continued lines joined."""
    return [line.strip() for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RUN_FILES, ids=name)
def test_every_run_file_is_valid(path: Path) -> None:
    config = load_run_file(path)
    overrides = [] if Path(config.model.path).exists() else ["model.path=tests/assets/sort4"]
    check(load_run_file(path, overrides))
    for table in (table for kind, table, _ in plugin_tables(config) if kind == "source"):
        if "path" in table.options():
            assert Path(table.options()["path"]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_a_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines(page):
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if not words:
            continue
        if Path(words[0]).name == "paceline":
            check_paceline(words[1:])
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[:2] == ["python", "-m"] and words[2].startswith("services."):
            check_service(words[2].removeprefix("services."), words[3:])


def check_paceline(words: list[str]) -> None:
    command, *rest = words
    assert command in COMMANDS, f"there is no `paceline {command}`"
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"paceline.cli.{command}_command").add_arguments(parser)
    arguments, extra = parser.parse_known_args(rest)
    assert all("=" in word and not word.startswith("-") for word in extra), f"paceline {command} takes no {extra}"
    run_file = getattr(arguments, "run_file", None)
    if run_file is not None and run_file.exists():
        load_run_file(run_file, [*arguments.overrides, *extra])


def check_service(service: str, words: list[str]) -> None:
    assert service in SERVICES
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    Place.add_arguments(parser)
    arguments = parser.parse_args(words)
    if arguments.run_file.exists():
        load_run_file(arguments.run_file, arguments.overrides)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in PLANS], ids=name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    for path in re.findall(
        r"`((?:src|services|tests|examples|docs|deploy|scripts|protos|benchmarks)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{name(page)} names {path}"


BASE: dict[str, Any] = {
    "run": {"name": "own"}, "model": {"path": "tests/assets/sort4"}, "rollout": {"sampling": {"max_new_tokens": 4}},
    "data": {"source": {"name": "jsonl", "path": "examples/sort4/prompts.jsonl"}},
    "reward": {"graders": [{"name": "exact_match"}]},
}  # fmt: skip
EXTENDING = ROOT / "docs/extending.md"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """The files of docs/extending.md in a folder on the path, and a run file that names them all."""
    for code in blocks(EXTENDING, "python"):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    raw = copy.deepcopy(BASE)
    raw["reward"]["graders"] = []
    for block in blocks(EXTENDING, "toml"):
        merge(raw, tomllib.loads(block))
    raw["weights"]["transport"]["root"] = str(tmp_path / "weights")
    return parse(raw)


def merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Add tables to tables and lists to lists; `name` tables replace."""
    for key, value in more.items():
        if isinstance(value, dict) and "name" not in value:
            merge(into.setdefault(key, {}), value)
        elif isinstance(value, list):
            into[key] = [*into.get(key, []), *value]
        else:
            into[key] = value


def test_the_plug_ins_of_the_extending_page_are_valid(own: RunFile) -> None:
    check(own)
    kinds = {kind for kind, table, _ in plugin_tables(own) if ":" in table.name}
    assert kinds == {"source", "filter", "grader", "estimator", "loss", "correction", "policy", "transport"}


def make(kind: str, table: Any, *arguments: Any) -> Any:
    plugin = registry(kind).load(table.name)
    return plugin(plugin.Options.model_validate(table.options()), *arguments)


def test_the_plug_ins_of_the_extending_page_do_what_they_say(own: RunFile, tmp_path: Path) -> None:
    from services.reward.graders.base import GradeItem
    from services.trainer.algorithms.base import TrajectoryTokens

    reward, grader = own.reward.graders
    assert registry("grader").load(reward.name)(response="ab") == 0.5
    assert make("grader", grader).grade(GradeItem("xabcd", "", {"label": "abcd"})) == 1.0

    source = make("source", own.data.source, 0)
    assert len(source) == 200 and source[7] == source[7] and source[7].text.endswith("=")
    group = make_group("own", "e0.0")
    assert make("filter", own.rollout.filters[0]).keep(group) == "all_wrong"
    group.samples[0].reward.value = 1.0
    assert make("filter", own.rollout.filters[0]).keep(group) is None

    estimate = make("estimator", own.trainer.estimator).advantages([[1.0, 0.0, None], [2.0, 2.0]])
    np.testing.assert_allclose(estimate.values[0], [0.5, -0.5, np.nan])
    assert estimate.missing == 1 and estimate.zero_variance == [False, True]
    fading = make("estimator", PluginTable.model_validate({"name": "my_estimator:Fading", "fade": 0.5}))
    tokens = fading.token_advantages([[TrajectoryTokens(2.0, 3), TrajectoryTokens(None, 1)]])
    np.testing.assert_allclose(np.concatenate(tokens.values[0]), [0.5, 1.0, 2.0, np.nan])

    transport = make("transport", own.weights.transport, tmp_path, "own")
    stage = transport.stage(1)
    Manifest.describe(stage, 1, 0, "full").write(stage)
    uri = transport.publish(stage, 1)
    assert Path(uri).parts[-3:] == ("letters", "own", "v00000001") and transport.open(uri) == Path(uri)
    assert transport.collect(set()) == [1]


def test_the_loss_of_the_extending_page_gives_masked_tokens_nothing(own: RunFile) -> None:
    torch = pytest.importorskip("torch")
    from services.trainer.losses.base import TokenBatch

    policy = torch.tensor([-1.0, float("nan")], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    weights, advantages = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    total = make("loss", own.trainer.loss)(TokenBatch(policy, weights, advantages, other, other)).total
    total.backward()
    assert total.item() == -1.0
    assert policy.grad is not None and policy.grad.tolist() == [-1.0, 0.0]
    batch = TokenBatch(policy, weights, advantages, other - 1, other.masked_fill(weights == 0, float("nan")))
    assert make("correction", own.trainer.corrections[0])(batch).tolist() == pytest.approx([math.exp(-1), 1.0])


async def test_the_engine_backend_of_the_extending_page_serves_what_was_published(own: RunFile, tmp_path: Path) -> None:
    from services.engine.generation import Request, Sampling

    backend = make("engine_backend", own.engine.backend, own.engine, own.model.path)
    await backend.load()
    Manifest.describe(tmp_path, 3, 2, "full").write(tmp_path)
    applied = await backend.apply(tmp_path, 3, "in_place")
    assert (await backend.probe(), applied.digest) == (3, Manifest.read(tmp_path).digest)
    request = Request("r", np.array([5, 6], np.int32), (1, 2), Sampling(max_new_tokens=2))
    pieces = [piece for batch in [item async for item in backend.submit(request)] for piece in batch]
    assert [(piece.index, piece.token_ids, piece.weight_versions) for piece in pieces] == [
        (0, [6, 6], [3, 3]), (1, [6, 6], [3, 3])
    ]  # fmt: skip


def test_the_configuration_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "scripts/generate_config_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/configuration.md").read_text() == module.page()

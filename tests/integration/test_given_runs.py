"""Runs whose samples are given: labelled text, preferences and recorded groups train once, and without an engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.observe import Observer
from paceline.config import load_run_file
from paceline.launcher.launcher import Launcher

STEPS = 9
GROUPS = 8
SHORT = [f"run.steps={STEPS}", f"rollout.groups_per_step={GROUPS}", "dashboard.enabled=false"]


def paceline(*words: str, code: int = 0) -> str:
    """Run the command from the repository's root; returns stdout and stderr, in that order."""
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *words], capture_output=True, text=True, timeout=250,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def model(directory: Path) -> bytes:
    return (directory / "export" / "model.safetensors").read_bytes()


def labelled_run(directory: Path, data: Path) -> list[str]:
    """Overrides of examples/sft: every third example is too long, and is replaced by the next."""
    lines = Path("examples/sft/examples.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines[: 2 * STEPS * GROUPS]]
    for item in items[::3]:
        item["completion"] *= 10
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    return [*SHORT, f"run.directory={directory}", f"data.source.path={data}", "trainer.checkpoint_every=3"]


async def disturbed(overrides: list[str], victims: list[str]) -> Launcher:
    """Run to the end, killing one victim after each recorded step. Training stands still until it is back."""
    config = load_run_file(Path("examples/sft/run.toml"), overrides)
    news: asyncio.Queue[str] = asyncio.Queue()
    launcher = Launcher(config, news.put_nowait)

    async def kill_in_turn(observer: Observer) -> None:
        highest = 0
        async for record in observer.follow_steps():
            if record.step > highest and victims:
                highest, victim = record.step, victims.pop(0)
                trainer, pid = launcher.children["trainer-0"].pid, launcher.children[victim].pid
                assert trainer is not None and pid is not None
                os.kill(trainer, signal.SIGSTOP)
                os.kill(pid, signal.SIGKILL)
                while await news.get() != f"{victim} is back":
                    pass
                if pid != trainer:
                    os.kill(trainer, signal.SIGCONT)

    try:
        await launcher.start()
        observer = Observer(launcher.addresses["coordinator-0"], config.run.name)
        killer = asyncio.create_task(kill_in_turn(observer))
        async with asyncio.timeout(200):
            assert await launcher.watch(), launcher.failure
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        await observer.close()
        return launcher
    finally:
        await launcher.stop()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """An undisturbed run of labelled text: its folder, its data and what it printed."""
    folder = tmp_path_factory.mktemp("calm")
    overrides = labelled_run(folder / "run", folder / "data.jsonl")
    return folder / "run", folder / "data.jsonl", paceline("run", "examples/sft/run.toml", *overrides)


@pytest.mark.timeout(300)
def test_labelled_text_is_trained_once_and_without_engines(calm: tuple[Path, Path, str]) -> None:
    directory, _, output = calm
    started = {path.stem for path in (directory / "logs").iterdir()}
    assert started == {"redis", "coordinator-0", "rollout-0", "trainer-0"}
    found = records(directory)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert not {"reward_mean", "reward_missing", "staleness_max", "logprob_gap_mean"} & set(found[0])
    trained = [group for record in found for group in record["group_ids"]]
    assert len(set(trained)) == len(trained) == STEPS * GROUPS
    numbers = [int(group.partition(".")[2]) for group in trained]
    assert numbers == sorted(numbers), "the examples come in the order of the data"
    assert "reward" not in output.partition("Result")[0]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["ledger_balanced"] and summary["prompts_dropped"] > 0
    assert summary["loss_first"] == pytest.approx((found[0]["loss"] + found[1]["loss"]) / 2)
    assert "example_too_long" in paceline("audit", str(directory))


def test_the_loss_is_the_mean_over_the_completions_tokens(calm: tuple[Path, Path, str]) -> None:
    """Against transformers in float64, on the examples that the first step names."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from services.rollout.datasets import permutation

    directory, data, _ = calm
    items = [json.loads(line) for line in data.read_text().splitlines()]
    order = permutation(len(items), 0)
    policy = transformers.AutoModelForCausalLM.from_pretrained("tests/assets/sort4", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained("tests/assets/sort4")
    first = records(directory)[0]
    total, count = 0.0, 0
    for group in first["group_ids"]:
        item = items[order[int(group.partition(".")[2])]]
        prompt = tokenizer.encode(item["prompt"], add_special_tokens=False)
        completion = [*tokenizer.encode(item["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + completion])).logits[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])
        total, count = total - chosen.sum().item(), count + len(completion)
    assert first["tokens_trained"] == count
    assert first["loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.timeout(300)
def test_killed_trainer_and_rollout_change_nothing(calm: tuple[Path, Path, str], tmp_path: Path) -> None:
    directory, data, _ = calm
    overrides = labelled_run(tmp_path / "run", data)
    victims = ["trainer-0", "rollout-0", "trainer-0", "rollout-0", "trainer-0"]
    launcher = asyncio.run(disturbed(overrides, victims))
    restarts = {name: child.restarts for name, child in launcher.children.items() if child.restarts}
    assert restarts == {"trainer-0": 3, "rollout-0": 2}
    assert model(tmp_path / "run") == model(directory)
    same = ("step", "group_ids", "loss", "learning_rate", "grad_norm")
    ours, theirs = records(tmp_path / "run"), records(directory)
    assert [[item[key] for key in same] for item in ours] == [[item[key] for key in same] for item in theirs]
    assert "balances" in paceline("audit", str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_is_evaluated_on_engines_of_its_own(tmp_path: Path) -> None:
    """The example as it stands, and then the evaluator of runs by reward on what it learned."""
    run = tmp_path / "run"
    output = paceline("run", "examples/sft/run.toml", f"run.directory={run}", "run.steps=25")
    assert "paceline eval" in output
    before = (run / "metrics.jsonl").read_bytes()
    table = paceline("eval", str(run))
    assert "sort4" in table
    (result,) = (json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines())
    assert (result["step"], result["evaluation_prompts"], result["reward_missing"]) == (25, 128, 0)
    assert result["reward_mean"] > 0.5, "a third is right before the training"
    assert (run / "metrics.jsonl").read_bytes() == before
    assert "balances" in paceline("audit", str(run))
    assert "step-000007" in paceline("eval", str(run), "--step", "7", code=2)


@pytest.mark.timeout(300)
def test_preferences_are_learned_without_engines(tmp_path: Path) -> None:
    output = paceline("run", "examples/dpo/run.toml", f"run.directory={tmp_path / 'run'}", "run.steps=12")
    found = records(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "policy and reference are the same at first"
    assert found[0]["preference_margin"] == pytest.approx(0.0, abs=1e-5)
    assert found[-1]["loss"] < 0.6 and found[-1]["preference_accuracy"] > 0.7
    assert found[0]["samples_trained"] == 64
    assert "accuracy" in output and "rated right" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recorded_groups_train_the_same_policy_without_engines(tmp_path: Path) -> None:
    """What a run by reward dumped gives the same weights, bit for bit, when it is trained on again."""
    small = ["run.steps=3", "rollout.groups_per_step=6", "evaluation=[]", "dashboard.enabled=false"]
    first, again = tmp_path / "first", tmp_path / "again"
    paceline(
        "run", "examples/sort4/run.toml", *small, f"run.directory={first}", "rollout.samples_per_group=4",
        "rollout.dump=true", "gateway.enabled=false",
    )  # fmt: skip
    assert sorted(path.name for path in (first / "rollouts").iterdir()) == [
        "step-000001.jsonl", "step-000002.jsonl", "step-000003.jsonl",
    ]  # fmt: skip
    run_file = tmp_path / "again.toml"
    run_file.write_text(
        f"""
        run = {{ name = "again", directory = "{again}", steps = 3 }}
        model = {{ path = "tests/assets/sort4" }}
        data = {{ source = {{ name = "recorded", path = "{first / "rollouts"}" }} }}
        rollout = {{ groups_per_step = 6 }}
        dashboard = {{ enabled = false }}
        [trainer]
        updates_per_step = 2
        checkpoint_every = 5
        optimizer = {{ learning_rate = 5e-4, warmup_steps = 10 }}
        """
    )
    paceline("run", str(run_file))
    assert model(again) == model(first)
    same = ("reward_mean", "loss", "grad_norm", "logprob_gap_mean")
    for ours, theirs in zip(records(again), records(first), strict=True):
        assert [ours[key] for key in same] == [theirs[key] for key in same]
    assert not {path.stem for path in (again / "logs").iterdir()} & {"engine-0", "router-0", "reward-0", "gateway-0"}


@pytest.mark.timeout(120)
def test_data_that_are_no_examples_end_the_start(tmp_path: Path) -> None:
    text = paceline(
        "run", "examples/sft/run.toml", f"run.directory={tmp_path / 'run'}", "dashboard.enabled=false",
        "data.source.prompt_field=completion", code=2,
    )  # fmt: skip
    assert "has no field 'completion'" in text

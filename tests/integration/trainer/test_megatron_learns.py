"""A whole run whose trainer is two megatron ranks learns what the run of one torch process learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

STEPS = 24
SMALLER = [
    f"run.steps={STEPS}", "rollout.groups_per_step=16", "evaluation=[]", "gateway.enabled=false",
    "dashboard.enabled=false", "trainer.checkpoint_every=12",
]  # fmt: skip
MEGATRON = ["trainer.backend=megatron", "trainer.parallel.ranks=2", "trainer.parallel.tensor=2"]


def steps_of(folder: Path, overrides: list[str]) -> list[dict]:
    """Records of the steps of a run of examples/sort4."""
    command = [sys.executable, "-m", "paceline.cli.main", "run", "examples/sort4/run.toml", f"run.directory={folder}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, *SMALLER, *overrides], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_megatron_ranks_learn_as_torch_does(tmp_path: Path) -> None:
    plain = steps_of(tmp_path / "torch", [])
    ranks = steps_of(tmp_path / "megatron", MEGATRON)
    assert len(ranks) == len(plain) == STEPS
    # The first step is trained on the same samples, later ones on what hardly different weights sampled.
    for name in ("reward_mean", "loss", "grad_norm", "entropy"):
        assert ranks[0][name] == pytest.approx(plain[0][name], rel=1e-4, abs=1e-6), name
    before, after, other = (
        sum(item["reward_mean"] for item in part) / 4 for part in (ranks[:4], ranks[-4:], plain[-4:])
    )
    assert after > before + 0.2
    assert after == pytest.approx(other, abs=0.1)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "megatron" / "export")

"""PPO with its critic sorts four letters: the reward comes at the end, and the critic sees a wrong letter before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer_step_passes import Trainer

from paceline.api.common.v1 import reward_pb2
from paceline.samples import COMPLETED, Sample, SampleGroup

MODEL = Path(__file__).parents[1] / "assets/sort4"
GROUPS, SIBLINGS, LETTERS = 16, 8, 4
EQUALS = 42
PROMPT = LETTERS + 1


@torch.no_grad()
def roll_out(trainer: Trainer, step: int, random: np.random.Generator) -> list[SampleGroup]:
    """Groups of sampled completions of four random letters; the reward is 1 for the sorted letters."""
    prompts = np.append(random.integers(2, 12, (GROUPS, LETTERS)), np.full((GROUPS, 1), EQUALS), axis=1)
    ids = torch.from_numpy(np.repeat(prompts, SIBLINGS, axis=0))
    logprobs = torch.zeros(ids.shape)
    generator = torch.Generator().manual_seed(step)
    for _ in range(LETTERS):
        scores = trainer.policy.policy.model(input_ids=ids).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs = torch.cat([logprobs, scores.gather(1, chosen)], 1)
        ids = torch.cat([ids, chosen], 1)
    mask = np.array([0] * PROMPT + [1] * LETTERS, np.uint8)
    groups = []
    for number in range(GROUPS):
        name = f"e0.{step * GROUPS + number}"
        groups.append(SampleGroup("run", name, 1, []))
        for place in range(number * SIBLINGS, (number + 1) * SIBLINGS):
            row, known = ids[place].numpy().astype(np.int32), logprobs[place].numpy()
            reward = reward_pb2.Reward(value=float((row[PROMPT:] == np.sort(row[:LETTERS])).all()))
            key, spans = f"{name}/{place}", [(1, LETTERS)]
            groups[-1].samples.append(Sample(key, key, row, mask, known, spans, COMPLETED, 1.0, reward=reward))
    return groups


@pytest.mark.slow
def test_policy_and_critic_learn_together() -> None:
    trainer = Trainer(
        MODEL, total_steps=30, estimator={"name": "ppo", "gae_lambda": 0.95}, epochs_per_step=2, updates_per_step=2,
        optimizer={"learning_rate": 3e-4},
        critic={"optimizer": {"learning_rate": 3e-4}, "epochs": 4, "updates_per_epoch": 2, "warmup_steps": 8},
    )  # fmt: skip
    random = np.random.default_rng(0)
    seen = [trainer.train(*roll_out(trainer, step, random), step=step).values for step in range(1, 31)]
    rewards = [values["reward_mean"] for values in seen]
    explained = [values["explained_variance"] for values in seen]
    assert np.mean(rewards[:8]) < 0.45, "the warm-up trains no policy"
    assert np.mean(rewards[-5:]) > 0.7
    assert explained[0] == 0 and np.mean(explained[8:16]) > 0.05, (explained, rewards)
    assert max(values["logprob_gap_max"] for values in seen) < 1e-3, "the samples are the policy's own"

"""Small sample groups that hold together, for tests of whatever carries or consumes them."""

from __future__ import annotations

import numpy as np

from paceline.samples import COMPLETED, Sample, SampleGroup


def make_group(
    run_id: str, group_id: str, attempt: int = 1, weight_version: int = 1, num_samples: int = 2, num_tokens: int = 3
) -> SampleGroup:
    """A group of completed samples without reward: one prompt token, then tokens sampled by one weight version.

    The token ids depend on the group id only.
    """
    samples = []
    for sibling in range(num_samples):
        name = f"{group_id}/{sibling}"
        random = np.random.default_rng(list(name.encode()))
        mask = np.ones(num_tokens, np.uint8)
        mask[0] = 0
        samples.append(
            Sample(
                sample_id=name,
                trajectory_id=name,
                token_ids=random.integers(0, 1000, num_tokens, np.int32),
                loss_mask=mask,
                sampler_logprobs=(-random.random(num_tokens) * mask).astype(np.float32),
                version_spans=[(weight_version, num_tokens - 1)],
                status=COMPLETED,
                temperature=1.0,
            )
        )
    return SampleGroup(run_id, group_id, attempt, samples)

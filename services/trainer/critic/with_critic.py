"""Policy and critic as one backend: whoever saves or loads the policy's state does so with the critic's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from services.trainer.backends.base import PassResult, StepOutcome, TrainBackend
from services.trainer.critic.critic import Critic
from services.trainer.datum import Group
from services.trainer.objective import Objective


def with_critic(policy: TrainBackend, critic: Critic | None) -> TrainBackend:
    """The policy's backend, with the critic's state where there is a critic."""
    # A cast, as it is not built from a path as backends are.
    return policy if critic is None else cast(TrainBackend, WithCritic(policy, critic))


class WithCritic:
    """A TrainBackend that is the policy's in everything but its state, which has a folder `critic` besides."""

    def __init__(self, policy: TrainBackend, critic: Critic) -> None:
        self._policy = policy
        self.critic = critic
        self.kind = policy.kind
        self.vocabulary = policy.vocabulary

    @property
    def updates(self) -> int:
        """Of the policy."""
        return self._policy.updates

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        return self._policy.forward(groups, reference)

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        return self._policy.forward_backward(groups, objective, reference, every_token)

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        return self._policy.optim_step(denominator, learning_rate)

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """See TrainBackend.save_state."""
        self._policy.save_state(directory, optimizer, background)
        self.critic.save_state(directory, optimizer, background)

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self._policy.finish_save()
        self.critic.finish_save()

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        self._policy.load_state(directory, optimizer)
        self.critic.load_state(directory, optimizer)

    def weights(self) -> dict[str, Any]:
        """Of the policy: the critic is not published."""
        return self._policy.weights()

    def adapter_config(self) -> dict[str, Any] | None:
        """See TrainBackend.adapter_config."""
        return self._policy.adapter_config()

    def export(self, directory: Path) -> None:
        """Of the policy."""
        self._policy.export(directory)

    def sleep(self) -> None:
        """The policy leaves the device."""
        self._policy.sleep()  # type: ignore[attr-defined]

    def wake(self) -> None:
        """The policy comes back to the device."""
        self._policy.wake()  # type: ignore[attr-defined]

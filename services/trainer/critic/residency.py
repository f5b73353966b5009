"""Who is on the device: policy and critic at once, or by turns. The plan is the step's, the moves are theirs."""

from __future__ import annotations

from typing import Protocol


class Resident(Protocol):
    """Something that can leave the device and come back. Both calls are idempotent."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Residency:
    """The plan. With `by_turns` one of them sleeps while the other works; without, and without a critic, none does."""

    def __init__(self, policy: object, critic: Resident | None, by_turns: bool) -> None:
        self._policy: Resident | None = None
        self._critic = critic if by_turns else None
        if self._critic is not None:
            if not (hasattr(policy, "sleep") and hasattr(policy, "wake")):
                raise ValueError(
                    f"trainer.critic.offload: {type(policy).__name__} cannot leave the device; set it false"
                )
            self._policy = policy  # type: ignore[assignment]
            self._critic.sleep()

    def turn_to_policy(self) -> None:
        """The critic leaves, then the policy comes back: never are both on the device."""
        if self._policy is not None and self._critic is not None:
            self._critic.sleep()
            self._policy.wake()

    def turn_to_critic(self) -> None:
        """The policy leaves, then the critic comes back."""
        if self._policy is not None and self._critic is not None:
            self._policy.sleep()
            self._critic.wake()

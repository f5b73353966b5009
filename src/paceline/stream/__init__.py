"""The sample plane: finished groups travel from rollout to the trainer through a Redis stream."""

from paceline.stream.samples import Claim, NotReady, SampleStream

__all__ = ["Claim", "NotReady", "SampleStream"]

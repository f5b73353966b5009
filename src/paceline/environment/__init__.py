"""The SDK for what a user brings: reward functions."""

from paceline.environment.reward import reward

__all__ = ["reward"]

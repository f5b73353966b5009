"""Weights for the gap between the engine that sampled and the policy that is trained: one plug-in a file."""

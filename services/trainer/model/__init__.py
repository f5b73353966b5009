"""The torch side of a policy: loading, log-probabilities, float32 masters, export."""

"""One training step: groups in, updated policy and numbers out. No network, no storage."""

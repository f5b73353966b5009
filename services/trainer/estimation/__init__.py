"""Runs estimators, and what they share: rewards of groups, whitening, discounted sums."""

"""Prompts of a run: what a source is, how one is opened, and whether a run has enough of them."""

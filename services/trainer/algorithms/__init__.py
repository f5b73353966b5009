"""Advantage estimators: one plug-in a file."""

"""Runs all services of a run on one machine: in order, supervised, with nothing left behind."""

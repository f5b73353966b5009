"""The trainer's part in a run: claims, publications, checkpoints, records, recovery and the end."""

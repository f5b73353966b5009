"""`paceline export [RUN] [--step N] [--out DIR]`: a Hugging Face model folder from a checkpoint of any run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from paceline.cli.runs import add_run_argument, find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--step", type=int, default=0, help="step of the checkpoint; default: the newest whole one")
    parser.add_argument("--out", type=Path, help="folder to write; default: <run>/exports/step-<n> or newest")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    name = f"step-{arguments.step}" if arguments.step else "newest"
    out = arguments.out or known.directory / "exports" / name
    # A process of its own: the command line itself runs where torch is not installed.
    command = [sys.executable, "-m", "services.trainer.export", str(known.directory / "config.json"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*command, "--step", str(arguments.step)], env=environment, check=False).returncode

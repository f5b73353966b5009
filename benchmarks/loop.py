"""Seconds per GRPO step against TRL's GRPOTrainer, with the engine's and the stream's own benchmarks in the same run.

Run: make bench. TRL needs an environment of its own, which this makes in .venv-trl on first use. One table, and
benchmarks/results/loop.json. Both sides train SmolLM2-135M-Instruct with LoRA of rank 16 on the prompts of
examples/quickstart, 16 prompts of 8 samples of at most 3 tokens a step, in bfloat16, on two threads in all: two for
TRL's one process, one each for our engine and our trainer. A step is timed from one optimizer step to the next,
generation included; the first two steps of each side are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from provenance import ROOT, commit, hardware
from rich.console import Console
from rich.table import Table

from paceline.telemetry import names

RESULTS = ROOT / "benchmarks" / "results"
MODEL = "models/smollm2-135m-instruct"
PROMPTS = "examples/quickstart/prompts.jsonl"
TRL_PACKAGES = ["torch", "transformers", "trl==1.16.0", "peft", "datasets"]
SKIP = 2
PHASES = {
    "waiting for groups": names.SECONDS_WAIT_GROUPS,
    "forward and backward": names.SECONDS_FORWARD_BACKWARD,
    "optimizer": names.SECONDS_OPTIMIZER,
    "publication": names.SECONDS_PUBLISH,
    "checkpoint": names.SECONDS_CHECKPOINT,
}


def run(command: list[str], threads: int) -> str:
    """Run a command from the repository's root and return its stdout; its stderr is shown only when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trl_python() -> Path:
    """The interpreter of an environment with TRL, made on first use."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", ".venv-trl"], 1)
        run([str(python), "-m", "pip", "install", "-q", "--no-compile", "-c", "constraints.txt", *TRL_PACKAGES], 1)
    return python


def time_trl(steps: int, micro_batch: int) -> list[float]:
    """Seconds of each of TRL's steps."""
    command = [str(trl_python()), "benchmarks/trl_grpo.py", "--model", MODEL, "--prompts", PROMPTS]
    command += ["--steps", str(steps), "--micro-batch", str(micro_batch), "--threads", "2"]
    return json.loads(run(command, 2).splitlines()[-1])["seconds"]


def time_paceline(steps: int, staleness: int) -> tuple[list[float], dict[str, float]]:
    """Seconds from record to record of each step, and the mean seconds of each phase of the trainer."""
    directory = ROOT / "build" / "benchmark-loop"
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "paceline.cli.main", "run", "examples/quickstart/run.toml", f"run.steps={steps}"]
    command += [f"run.directory={directory}", "evaluation=[]", f"rollout.max_staleness={staleness}"]
    run(command, 1)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    seconds = [record[names.SECONDS_STEP] for record in records]
    kept = records[SKIP:]
    phases = {label: statistics.mean(record.get(key, 0.0) for record in kept) for label, key in PHASES.items()}
    phases["the rest of the trainer's step"] = max(0.0, statistics.mean(seconds[SKIP:]) - sum(phases.values()))
    return seconds, phases


def part(script: str, result: str, words: list[str]) -> dict[str, Any]:
    """Run one of the other benchmarks and return what it wrote."""
    run([sys.executable, f"benchmarks/{script}", *words], 1)
    return json.loads((RESULTS / result).read_text())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns, so that a change of the machine's load meets both."""
    result: dict[str, Any] = {
        "command": "python benchmarks/loop.py", "commit": commit(), "hardware": hardware(),
        "setting": "SmolLM2-135M-Instruct, LoRA r16, bfloat16, 16 prompts x 8 samples, 3 new tokens, 2 threads",
        "floor": "the trainer's own forward, backward and optimizer: a step cannot be shorter than the longer of that "
        "and of generation",
    }  # fmt: skip
    ours, phases = time_paceline(arguments.steps, 1)
    theirs = time_trl(arguments.trl_steps, arguments.micro_batch)
    sync, _ = time_paceline(arguments.steps, 0)
    result["seconds_per_step"] = {
        "paceline": statistics.median(ours[SKIP:]), "paceline, synchronous": statistics.median(sync[SKIP:]),
        "trl": statistics.median(theirs[1:]),
    }  # fmt: skip
    result["all_seconds"] = {"paceline": ours, "paceline, synchronous": sync, "trl": theirs}
    step = result["seconds_per_step"]
    result["speed_over_trl"] = {key: step["trl"] / step[key] for key in ("paceline", "paceline, synchronous")}
    result["seconds_by_phase"] = phases
    return result


def show(result: dict[str, Any]) -> None:
    table = Table("a GRPO step", "seconds", "TRL's time over it", title=result["setting"])
    for name, seconds in result["seconds_per_step"].items():
        ratio = result["speed_over_trl"].get(name)
        table.add_row(name, f"{seconds:.2f}", f"{ratio:.2f}" if ratio else "1")
    console = Console()
    console.print(table)
    parts = Table("where the trainer's step goes (asynchronous)", "seconds")
    for name, seconds in result["seconds_by_phase"].items():
        parts.add_row(name, f"{seconds:.3f}")
    console.print(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--trl-steps", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's samples a forward pass")
    parser.add_argument("--only-loop", action="store_true", help="leave out the engine's and the stream's benchmarks")
    arguments = parser.parse_args()
    run([sys.executable, "scripts/fetch_smollm2.py"], 1)
    began = time.time()
    result = measure(arguments)
    if not arguments.only_loop:
        result["engine"] = part("engine.py", "engine.json", [])
        result["stream"] = part("stream.py", "stream.json", [])
    result["total_seconds"] = time.time() - began
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "loop.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)


if __name__ == "__main__":
    main()

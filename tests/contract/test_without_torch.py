"""Every service but trainer and engine, and the whole library, loads where torch and transformers are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = ("torch", "transformers", "peft", "safetensors", "accelerate", "megatron")
MODULES = [
    *(f"services.{name}.__main__" for name in ("coordinator", "router", "rollout", "reward", "gateway", "dashboard")),
    "paceline.cli.run_command", "paceline.cli.up_command", "paceline.cli.status_command", "paceline.config.check",
    "paceline.environment", "paceline.testing.scripted_engine", "paceline.tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_loads_without_torch(module: str) -> None:
    # A None in sys.modules makes every import of that name fail as if it were not installed.
    blocks = "".join(f"sys.modules[{name!r}] = None; " for name in BLOCKED)
    code = f"import sys, importlib; {blocks}importlib.import_module({module!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

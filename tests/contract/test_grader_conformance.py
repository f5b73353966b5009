"""Every grader keeps the Protocol and can be listed and checked without its heavy dependencies."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from paceline.config import StrictModel
from paceline.plugins import registry

NAMES = registry("grader").available()
REQUIRED = {"regex": {"pattern": "a"}}


@pytest.mark.parametrize("name", NAMES)
def test_a_grader_keeps_the_protocol(name: str) -> None:
    kind = registry("grader").load(name)
    assert issubclass(kind.Options, StrictModel)
    assert kind.__doc__
    with pytest.raises(ValidationError, match="no_such_option"):
        kind.Options(**REQUIRED.get(name, {}), no_such_option=1)
    fields = kind(kind.Options(**REQUIRED.get(name, {}))).required_metadata()
    assert isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def test_the_service_and_all_option_models_load_without_torch_and_without_the_graders_packages() -> None:
    code = f"""
import sys
for name in ("torch", "transformers", "math_verify", "reasoning_gym", "sympy"):
    sys.modules[name] = None
import services.reward.__main__, services.reward.worker
from paceline.plugins import registry
for name in {NAMES}:
    registry("grader").load(name).Options.model_json_schema()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

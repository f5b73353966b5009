"""`paceline config show|check FILE [key=value ...]`: what each service will be told, and whether it can be done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.config import load_run_file
from paceline.config.check import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["show", "check"], help="show the resolved run file, or check it and read the data it names"
    )
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--json", action="store_true", help="as JSON, the form that services read")


def run(arguments: argparse.Namespace) -> int:
    config = load_run_file(arguments.run_file, arguments.overrides)
    # A run file can be shown where its data is not.
    check(config, data=arguments.action == "check")
    if arguments.action == "check":
        print(f"{arguments.run_file} is valid; digest {config.digest()[:12]}")
    elif arguments.json:
        print(config.model_dump_json(indent=2))
    else:
        print("\n".join(_toml(config.model_dump(mode="json"), "")))
    return 0


def _toml(table: dict[str, Any], prefix: str) -> list[str]:
    """A nested dictionary as TOML; None, which TOML lacks, is left out."""
    lines: list[str] = []
    simple = {key: value for key, value in table.items() if not _is_table(value) and value is not None}
    if simple and prefix:
        lines.append(f"[{prefix}]")
    lines += [f"{key} = {_value(value)}" for key, value in simple.items()]
    if simple:
        lines.append("")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            lines += _toml(value, name)
        elif _is_table(value):
            for item in value:
                body = _toml(item, name)
                lines += [f"[[{name}]]", *(body[1:] if body and body[0] == f"[{name}]" else body)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)

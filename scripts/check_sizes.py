"""Keeps files and functions small enough to read at once; prints each offender and exits 1. There is no allow-list."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_BASE_LINES = 80
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers"}
ROOTS = ("src", "services", "scripts", "tests", "examples", "benchmarks", "protos", "deploy")
GENERATED = ("src/paceline/api",)


def check(root: Path) -> list[str]:
    """One line for each offender under the repository `root`, sorted by path."""
    return [line for path in _sources(root) for line in _check_file(path, path.relative_to(root).as_posix())]


def _sources(root: Path) -> Iterator[Path]:
    for top in ROOTS:
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in {".py", ".proto"} and not name.startswith(tuple(f"{item}/" for item in GENERATED)):
                yield path


def _check_file(path: Path, name: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    count = len(text.splitlines())
    if path.stem in FORBIDDEN_NAMES:
        yield f"{name}: a file is named after what it holds; {path.stem!r} says nothing"
    if count > MAX_FILE_LINES:
        yield f"{name}: {count} lines; at most {MAX_FILE_LINES}. Split it by subject"
    if path.name == "base.py" and count > MAX_BASE_LINES:
        yield f"{name}: {count} lines; a plug-in's Protocol takes at most {MAX_BASE_LINES}"
    if path.suffix == ".py":
        yield from _check_functions(text, name)


def _check_functions(text: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text, filename=name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: function {node.name!r} has {length} lines; at most {MAX_FUNCTION_LINES}"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    offenders = check(root)
    for line in offenders:
        print(line)
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())

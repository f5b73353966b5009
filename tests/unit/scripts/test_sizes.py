"""The size rule finds what it should, and this repository keeps it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("check_sizes", ROOT / "scripts" / "check_sizes.py")
assert _SPEC is not None and _SPEC.loader is not None
check_sizes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_sizes)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_rule_names_its_offender(tmp_path: Path) -> None:
    write(tmp_path, "services/a/long.py", "x = 1\n" * 501)
    write(tmp_path, "services/a/utils.py", "x = 1\n")
    write(tmp_path, "services/a/base.py", "x = 1\n" * 81)
    write(tmp_path, "services/a/big.py", "def ok():\n    pass\n\n\nasync def big():\n" + "    x = 1\n" * 60)
    write(tmp_path, "protos/p/long.proto", "//\n" * 501)
    found = check_sizes.check(tmp_path)
    assert [line.split(":")[0] for line in found] == [
        "services/a/base.py", "services/a/big.py", "services/a/long.py", "services/a/utils.py", "protos/p/long.proto",
    ]  # fmt: skip
    assert "'big' has 61 lines" in found[1]


def test_limits_themselves_pass_and_generated_code_is_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path, "src/paceline/ok.py", "x = 1\n" * 500)
    write(tmp_path, "src/paceline/api/common/generated.py", "x = 1\n" * 900)
    write(tmp_path, "services/a/base.py", "def f():\n" + "    x = 1\n" * 59)
    assert check_sizes.check(tmp_path) == []


def test_the_repository_keeps_the_rule() -> None:
    assert check_sizes.check(ROOT) == []

"""Tiny random models on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policies import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama (grouped-query attention, untied head) with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("tiny"), tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head tied to the embedding."""
    return save_model(tmp_path_factory.mktemp("tied"), tied=True)

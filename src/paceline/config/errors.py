"""One exception for everything that can be wrong with what a user wrote."""

from __future__ import annotations

EXIT_CONFIG = 2
"""Exit code of a process that refuses its configuration: starting it again would not help."""


class ConfigError(ValueError):
    """A run file, override or setting is wrong; the text has one line for each fault, with the key and the fix."""

"""How long a handler may take: a little less than its caller waits, so that the caller reads why."""

from __future__ import annotations

MAX_SECONDS = 24 * 3600.0
"""No call lasts longer."""
_MARGIN_SECONDS = 0.5
_MARGIN_SHARE = 0.2


def own_seconds(remaining: float | None, otherwise: float = MAX_SECONDS) -> float:
    """Seconds after which a handler answers with what it has; `otherwise` for a caller that waits for ever.

    `remaining` is `context.time_remaining()`.
    """
    if remaining is None:
        return otherwise
    remaining = max(0.0, min(remaining, MAX_SECONDS))
    return remaining - min(_MARGIN_SECONDS, _MARGIN_SHARE * remaining)

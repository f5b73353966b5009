"""Who may change the policy slot: the training loop while it runs, else clients of the service."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rpc import errors

SLOT = "policy"


@dataclass
class Slot:
    """The one policy slot of this trainer."""

    owner: str = ""
    """What changes the slot now; empty lets clients change it."""

    def check_name(self, name: str) -> None:
        """NotFound unless `name` is the slot (or empty)."""
        if name not in ("", SLOT):
            raise errors.NotFound(f"no policy slot {name!r}; this trainer has {SLOT!r}")

    def check_free(self, call: str) -> None:
        """FailedPrecondition while somebody owns the slot."""
        if self.owner:
            raise errors.FailedPrecondition(
                f"{call} is refused: slot {SLOT!r} is trained by {self.owner}; Forward is allowed"
            )

"""The ledger: what became of every prompt. Redis holds it, so it outlives every process of a run."""

from paceline.ledger.account import STATES, Account, Event, GroupRecord, Issue
from paceline.ledger.ledger import Ledger

__all__ = ["STATES", "Account", "Event", "GroupRecord", "Issue", "Ledger"]

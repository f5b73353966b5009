"""The live view of a run in a terminal, or one line a step where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import RunView
from paceline.cli.sparkline import sparkline
from paceline.telemetry import names

MESSAGES_SHOWN = 4


class Progress:
    """Shows a RunView. `message` adds a line of news; `update` redraws; `step` reports a new record.

    `began` is when the run was started this time, in seconds since the epoch: of earlier steps one line is printed.
    """

    def __init__(
        self, console: Console, view: RunView, name: str, total: int, links: Callable[[], list[str]], began: float
    ) -> None:
        self._console = console
        self._view = view
        self._name = name
        self._total = total
        self._links = links
        self._began = began
        self._earlier: pb.StepRecord | None = None
        self._at_last_update: pb.StepRecord | None = None
        self._messages: list[str] = []
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """Something happened: a start, a restart."""
        if self._live is None:
            self._print_earlier()
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            self._messages = [*self._messages, text][-MESSAGES_SHOWN:]
            self.update()

    def step(self, record: pb.StepRecord) -> None:
        """A record arrived."""
        if self._live is not None:
            return
        if record.time.seconds < int(self._began):
            if record.kind == pb.RECORD_KIND_TRAIN:
                self._earlier = record
            return
        self._print_earlier()
        self._console.print(_line(record, self._total), highlight=False, soft_wrap=True)

    def _print_earlier(self) -> None:
        if self._earlier is not None:
            text = f"trained before, the newest: {_line(self._earlier, self._total)}"
            self._console.print(text, highlight=False, soft_wrap=True)
            self._earlier = None

    def update(self) -> None:
        if self._live is not None:
            self._live.update(self._render())
            return
        if self._earlier is self._at_last_update:
            # No earlier record came since: that was the last of them.
            self._print_earlier()
        self._at_last_update = self._earlier

    def _render(self) -> RenderableType:
        view, newest = self._view, self._view.newest()
        step = newest.step if newest is not None else 0
        head = Table.grid(padding=(0, 1))
        elapsed = time.time() - self._began
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=self._total, completed=step, width=30),
            Text(f"step {step}/{self._total}"),
            Text(f"{elapsed:.0f} s", style="dim"),
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim")
        body.add_column(no_wrap=True, overflow="ellipsis")
        if newest is not None:
            rewards, losses = view.values(names.REWARD_MEAN), view.values(names.LOSS)
            if rewards or names.REWARD_MISSING in newest.values:
                body.add_row("reward", f"[green]{sparkline(rewards)}[/] {rewards[-1]:.3f}" if rewards else "none yet")
            elif losses:
                body.add_row("loss", f"[green]{sparkline(losses)}[/] {losses[-1]:.4f}")
            body.add_row("this step", _figures(newest))
        for (name, at), record in sorted(view.evaluations.items())[-2:]:
            body.add_row("evaluation", f"{name} at step {at}: {record.values.get(names.REWARD_MEAN, float('nan')):.3f}")
        for member, part, cause, seconds in view.waits()[:4]:
            body.add_row("waits", f"{member} {part}: {escape(cause)} [dim]({seconds:.0f} s)[/]")
        for link in self._links():
            body.add_row("", link)
        for text in self._messages:
            body.add_row("", f"[dim]{escape(text)}[/]")
        return Group(head, body)


def _figures(record: pb.StepRecord) -> str:
    values = record.values
    parts = []
    for label, key, form in (
        ("loss", names.LOSS, ".4f"), ("accuracy", names.PREFERENCE_ACCURACY, ".3f"),
        ("margin", names.PREFERENCE_MARGIN, ".3f"), ("entropy", names.ENTROPY, ".3f"), ("grad", names.GRAD_NORM, ".2f"),
        ("gap", names.LOGPROB_GAP_MEAN, ".4f"), ("stale", names.STALENESS_MAX, ".0f"),
    ):  # fmt: skip
        if key in values:
            parts.append(f"{label} {values[key]:{form}}")
    if names.SECONDS_STEP in values:
        parts.append(f"{values[names.SECONDS_STEP]:.2f} s")
    return "  ".join(parts)


def _line(record: pb.StepRecord, total: int) -> str:
    missing = int(record.values.get(names.REWARD_MISSING, 0))
    reward = f"reward {record.values[names.REWARD_MEAN]:.3f}" if names.REWARD_MEAN in record.values else "reward none"
    if record.kind == pb.RECORD_KIND_TRAIN and names.REWARD_MISSING not in record.values:
        # Labelled examples and preferences have no reward, and no engine waits for a version of the weights.
        tokens = int(record.values.get(names.TOKENS_TRAINED, 0))
        rate = record.values.get(names.LEARNING_RATE, 0.0)
        return f"step {record.step}/{total}  {_figures(record)}  {tokens} tokens  rate {rate:.2g}"
    if record.kind == pb.RECORD_KIND_EVALUATION:
        return f"step {record.step}/{total}  evaluation {record.name}: {reward}"
    if missing:
        reward += f" ({missing} samples without one)"
    if not record.values.get(names.OPTIMIZER_UPDATES, 1):
        reward += "  nothing to learn from"
    version = f"  version {record.weight_version}" if record.weight_version else ""
    return f"step {record.step}/{total}  {reward}  {_figures(record)}{version}"

"""What a person sees while the bench runs: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Screen:
    """Results stay on the screen, what is being worked at is shown below them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        start = time.monotonic()
        self.console.rule(title, align="left", style="dim")
        with self._live:
            yield
        self.console.print(f"{title}: {time.monotonic() - start:.0f} s", style="dim")

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        task = self._live.add_task(what)
        try:
            yield
        finally:
            self._live.remove_task(task)

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

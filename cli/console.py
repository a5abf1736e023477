"""The terminal. Without one (a pipe, a file) lines are plain and wide enough not to be cut."""

import sys

from rich.console import Console

_PIPE_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)

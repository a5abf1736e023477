"""Structured logs: one JSON object a line for machines, columns for people. No colour in a pipe."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def configure_logs(service: str, level: str, json: bool) -> None:
    def add_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # Not a context variable: those do not reach background threads.
        return {"service": service, **event}

    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            add_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def get_logger(name: str) -> Any:
    """A logger whose lines carry `part=name`."""
    return structlog.get_logger(part=name)

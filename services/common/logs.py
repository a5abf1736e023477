"""Structured logs: one JSON object a line for machines, columns for people. No colour in a pipe."""

import logging
import sys
from typing import Any

import structlog


def configure_logs(service: str, level: str, json: bool) -> None:
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(name: str) -> Any:
    """A logger whose lines carry `part=name`."""
    return structlog.get_logger(part=name)

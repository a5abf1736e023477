"""`python -m services.matcher`: the matcher service."""

import sys

from services.common.config import load_settings
from services.common.lifecycle import run_service
from services.matcher.server import build
from services.matcher.settings import MatcherSettings


def main() -> None:
    settings = load_settings(MatcherSettings, sys.argv[1:])
    run_service(settings, lambda stack: build(settings, stack))


if __name__ == "__main__":
    main()

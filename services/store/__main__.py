"""`python -m services.store`: runs the store until SIGTERM or SIGINT."""

import sys

from services.common.config import load_settings
from services.common.lifecycle import run_service
from services.store.server import build
from services.store.settings import StoreSettings


def main() -> None:
    settings = load_settings(StoreSettings, sys.argv[1:])
    run_service(settings, lambda stack: build(settings, stack))


if __name__ == "__main__":
    main()

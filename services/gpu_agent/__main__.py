"""python -m services.gpu_agent: runs one agent until SIGTERM."""

import sys

from services.common.config import load_settings
from services.common.lifecycle import run_service
from services.gpu_agent.server import build_server
from services.gpu_agent.settings import AgentSettings


def main() -> None:
    settings = load_settings(AgentSettings, sys.argv[1:])
    run_service(settings, lambda stack: build_server(settings, stack))


if __name__ == "__main__":
    main()

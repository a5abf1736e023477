"""The command as users meet it: quick help, plain output in a pipe, exit codes."""

import subprocess
import sys

import pytest

from cli.targets import AGENT_LISTEN, MATCHER_LISTEN, STORE_LISTEN, is_exposed, is_free, target_of

HEAVY = (
    "grpc",
    "torch",
    "numpy",
    "numba",
    "transformers",
    "services",
    "kvblend",
    "rich.table",
    "psutil",
    "pydantic_settings",
)
HELP = """
import sys
from cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as error:
    assert not error.code, error.code
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["status", "--help"], ["demo", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", HELP.format(heavy=HEAVY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


def test_every_command_is_listed_with_what_it_is_for() -> None:
    done = kvblend("--help")
    for command in ("up", "demo", "explain", "status", "ping", "doctor"):
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith(command + " "))
        assert len(line.split()) > 4
        assert not line.endswith("...")


@pytest.mark.parametrize("arguments", [["ping"], ["status"], ["doctor"]])
def test_output_in_a_pipe_has_no_colour(arguments: list[str]) -> None:
    assert "\x1b" not in kvblend(*arguments).stdout


def test_an_unknown_option_is_refused_without_a_traceback() -> None:
    done = kvblend("ping", "--agnet", "x")
    assert done.returncode == 2
    assert "--agnet" in done.stderr
    assert "Traceback" not in done.stderr


def test_addresses() -> None:
    assert target_of("0.0.0.0:50051") == "127.0.0.1:50051"
    assert target_of("unix:/run/a.sock,0.0.0.0:1") == "unix:/run/a.sock"
    assert is_exposed("unix:/run/a.sock,0.0.0.0:50052")
    assert not is_exposed("127.0.0.1:50051,unix:/run/a.sock,localhost:2")
    assert not is_free("192.0.2.1:50051")
    assert not is_free("127.0.0.1:port")


def test_defaults_are_the_services_own() -> None:
    from services.gpu_agent.settings import AgentSettings
    from services.matcher.settings import MatcherSettings
    from services.store.settings import StoreSettings

    for settings, listen in (
        (MatcherSettings, MATCHER_LISTEN),
        (StoreSettings, STORE_LISTEN),
        (AgentSettings, AGENT_LISTEN),
    ):
        assert settings.model_fields["listen"].default == listen


def kvblend(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

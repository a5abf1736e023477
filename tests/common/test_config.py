"""Settings: refused in one line when wrong; flags over environment over file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from typing import ClassVar
from pydantic import Field
from services.common.config import ServiceSettings, load_settings

class Settings(ServiceSettings):
    "A service for tests."
    service: ClassVar[str] = "sample"
    listen: str = Field("127.0.0.1:50051", description="Address.")

settings = load_settings(Settings, sys.argv[1:])
print(settings.threads, settings.listen)
"""


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *flags],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--threads", "0"], ["threads", "'0'", "greater than or equal to 2"]),
        (["--threads", "many"], ["threads", "'many'", "integer"]),
        (["--listen", "nowhere"], ["listen", "'nowhere'", "host:port"]),
        (["--log-level", "loud"], ["log_level", "'loud'", "debug, info, warning or error"]),
        (["--config", "/does/not/exist.toml"], ["config", "/does/not/exist.toml"]),
    ],
)
def test_case_73_a_wrong_setting_is_refused_in_one_line(flags: list[str], names: list[str]) -> None:
    result = run(*flags)
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1
    for name in names:
        assert name in result.stderr


def test_case_73_unknown_settings_are_refused_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "kvblend.toml"
    file.write_text("[sample]\nthreadz = 3\n")
    for result in (run("--config", str(file)), run(KVBLEND_SAMPLE_THREADZ="3"), run("--threadz", "3")):
        assert result.returncode != 0
        assert "threadz" in result.stderr.lower()
        assert "Traceback" not in result.stderr


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvblend.toml"
    file.write_text('[sample]\nthreads = 3\nlisten = "127.0.0.1:1"\n[other]\nthreads = 99\n')
    assert run("--config", str(file)).stdout.split() == ["3", "127.0.0.1:1"]
    assert run("--config", str(file), KVBLEND_SAMPLE_THREADS="4").stdout.split() == ["4", "127.0.0.1:1"]
    both = run("--config", str(file), "--threads", "5", KVBLEND_SAMPLE_THREADS="4")
    assert both.stdout.split() == ["5", "127.0.0.1:1"]

"""What every test may use."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
MODEL = ROOT / "build" / "model" / "smollm2"


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty folder in shared memory with a short path (unix socket paths are limited)."""
    path = Path(tempfile.mkdtemp(prefix="kvb-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The converted SmolLM2 model; `make model` makes it."""
    if not (MODEL / "config.json").exists():
        if os.environ.get("KVBLEND_REQUIRE_MODEL") == "1":
            pytest.fail("build/model/smollm2 is missing: run `make model`")
        pytest.skip("build/model/smollm2 is missing: run `make model`")
    return MODEL


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """A test that sets up logging as a service does leaves the next one what it expects."""
    yield
    structlog.reset_defaults()

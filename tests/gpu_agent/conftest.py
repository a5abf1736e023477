"""An agent in this process with a store that answers as the test says."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent_rig import Rig, running_agent
from fake_store import FakeStore


@pytest.fixture
def fake(shm_dir: Path) -> Iterator[FakeStore]:
    store = FakeStore(shm_dir)
    store.start()
    yield store
    store.stop()


@pytest.fixture
def rig(fake: FakeStore) -> Iterator[Rig]:
    """A running agent with one registered engine; its rope is proven."""
    with ExitStack() as stack:
        yield stack.enter_context(running_agent(fake))

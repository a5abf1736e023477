"""Where a device cannot be had, one line says why."""

import sys
from contextlib import ExitStack

import pytest

from services.gpu_agent.devices.choice import make_device
from services.gpu_agent.settings import AgentSettings


def test_without_triton_one_line_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.gpu_agent.devices.cuda.device", None)
    with ExitStack() as stack, pytest.raises(SystemExit) as caught:
        make_device(AgentSettings(device="cuda"), stack, lambda _: None)
    (line,) = str(caught.value).splitlines()
    assert "device = cuda cannot be used" in line
    assert "torch for CUDA" in line

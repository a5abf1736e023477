"""The manifests and Dockerfiles pass every check, and the services accept what they set."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from cli.local import MODULES
from tools import check_manifests
from tools import manifest_rules as rules

Document = dict[str, Any]
SETTINGS = {
    "KVBLEND_MATCHER_": "from services.matcher.settings import MatcherSettings as S; load_settings(S, [])",
    "KVBLEND_STORE_": "from services.store.settings import StoreSettings as S; load_settings(S, [])",
    "KVBLEND_GPU_AGENT_": "from services.gpu_agent.settings import AgentSettings as S; load_settings(S, [])",
}
OVERLAYS = {folder.name: folder for folder in check_manifests.overlays()}


def documents(overlay: str) -> list[Document]:
    return check_manifests.documents_of(check_manifests.render(OVERLAYS[overlay]))


def test_everything_in_deploy_passes(tmp_path: Path) -> None:
    """As `make check-manifests` calls it, from any folder."""
    command = [sys.executable, check_manifests.__file__]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert {"base", "small", "with-redis"} <= set(OVERLAYS)


@pytest.mark.parametrize(("found", "code"), [([], 0), (["deploy/k8s/base: a fault", "another"], 1)])
def test_findings_are_lines_and_the_exit_code(
    found: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_manifests, "findings", lambda: iter(found))
    assert check_manifests.main() == code
    assert capsys.readouterr().out.splitlines()[: len(found)] == found


@pytest.mark.parametrize("service", sorted(MODULES))
def test_images_run_the_commands_that_kvblend_up_runs(service: str) -> None:
    module = MODULES[service]
    name = module.rpartition(".")[2]
    lines = (check_manifests.DEPLOY / "docker" / f"{name}.Dockerfile").read_text().splitlines()
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry) == ["python", "-m", module]
    # Neither an overlay nor a patch may start something else.
    for overlay in OVERLAYS:
        for document in documents(overlay):
            if document["kind"] in rules.WORKLOADS:
                for container in rules.containers(document["spec"]["template"]):
                    if container["image"].startswith("kvblend-"):
                        assert "command" not in container


@pytest.mark.parametrize("overlay", sorted(OVERLAYS))
def test_what_the_manifests_set_is_accepted_by_the_services(overlay: str, tmp_path: Path) -> None:
    """Values too, not only names: the services' own check, with every other variable absent."""
    checked = 0
    for _, template in rules.workloads(documents(overlay)):
        for container in rules.containers(template):
            values = {entry["name"]: entry.get("value", "a-name") for entry in container.get("env", [])}
            for prefix, settings_class in SETTINGS.items():
                given = {name: value for name, value in values.items() if name.startswith(prefix)}
                if given:
                    code = f"from services.common.config import load_settings; {settings_class}"
                    done = subprocess.run(
                        [sys.executable, "-c", code],
                        env=given,
                        cwd=tmp_path,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    assert done.returncode == 0, f"{container['name']}: {done.stderr}"
                    checked += 1
    assert checked >= 3


def test_a_tool_that_fails_without_a_word_is_a_finding() -> None:
    assert check_manifests._lint("hadolint", "/no/such/file")
    assert check_manifests._lint("yamllint", "--no-such-option")


# file, line, what replaces it ({line}, and what follows on a line of its own), what the finding says
SOURCE_FAULTS = {
    "field that does not exist": (
        "k8s/base/matcher.yaml",
        "          image: kvblend-matcher",
        "{line}\n          imagePulPolicy: Always",
        "imagePulPolicy",
    ),
    "key twice": (
        "k8s/base/matcher.yaml",
        "          image: kvblend-matcher",
        "{line}\n          image: other",
        "key-duplicates",
    ),
    "patch of nothing": ("k8s/overlays/small/matcher.yaml", "  name: matcher", "  name: matchre", "kustomize"),
    "kind without a schema": ("k8s/base/matcher.yaml", "kind: PodDisruptionBudget", "kind: PodDisruption", "kind"),
    "own rule": ("k8s/base/matcher.yaml", "      enableServiceLinks: false", "", "enableServiceLinks"),
    "rule for matchers": (
        "k8s/base/matcher-log.yaml",
        "            - noeviction",
        "            - allkeys-lfu",
        "evicts",
    ),
    "careless Dockerfile": (
        "docker/store.Dockerfile",
        "COPY --from=build /app /app",
        "{line}\nRUN apt-get install curl",
        "DL3",
    ),
}


@pytest.mark.parametrize("fault", sorted(SOURCE_FAULTS))
def test_a_fault_in_the_sources_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are called such that they see it."""
    path, line, replaced, told = SOURCE_FAULTS[fault]
    shutil.copytree(check_manifests.DEPLOY, tmp_path / "deploy")
    file = tmp_path / "deploy" / path
    text = file.read_text()
    assert line in text
    file.write_text(text.replace(line, replaced.format(line=line), 1))
    monkeypatch.setattr(check_manifests, "ROOT", tmp_path)
    monkeypatch.setattr(check_manifests, "DEPLOY", tmp_path / "deploy")
    found = list(check_manifests.findings())
    assert any(told in finding for finding in found), found
    assert not any("\n" in finding for finding in found)


@pytest.mark.parametrize("extra", ["services", "agent"])
def test_the_lock_names_everything_that_the_images_install(extra: str) -> None:
    """Their installs take the lock as a constraint: a package outside it would come in any version, unverified."""
    root = check_manifests.ROOT
    locked = {line.split("==")[0] for line in (root / "requirements.lock").read_text().splitlines() if "==" in line}
    apart = {line.split("==")[0] for line in (root / "requirements-torch.txt").read_text().splitlines() if line}
    seen: set[str] = set()
    waiting = [("kvblend", extra)]
    while waiting:
        name, wanted = waiting.pop()
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                plain = canonicalize_name(requirement.name)
                # Torch's own packages differ with its build; they come with it.
                if plain not in {"kvblend", *seen, *apart}:
                    waiting.append((plain, ""))
                waiting += [(plain, more) for more in requirement.extras]
                seen.add(plain)
    assert {"grpcio", "pydantic-settings", "blake3"} <= seen
    assert seen - {"kvblend", *apart} <= locked

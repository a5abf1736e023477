"""The manifests pass every check, and each check of our own sees the fault it is for."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def find(every: list[Document], kind: str, name: str) -> Document:
    return next(d for d in every if (d["kind"], d["metadata"]["name"]) == (kind, name))


def pod(every: list[Document], name: str) -> Document:
    spec: Document = find(every, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def test_everything_in_deploy_passes() -> None:
    assert list(check_manifests.findings()) == []
    assert {"base", "small", "with-redis"} <= set(OVERLAYS)


def env(container: Document, name: str, value: str) -> None:
    container["env"] = [entry for entry in container["env"] if entry["name"] != name]
    container["env"].append({"name": name, "value": value})


def add_memory_volume(spec: Document, size: str) -> None:
    spec["volumes"].append({"name": "more", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    spec["initContainers"][0]["volumeMounts"].append({"name": "more", "mountPath": "/more"})


MUTATIONS: dict[str, tuple[Any, Callable[[list[Document]], object]]] = {
    "unknown kind": (
        rules.known_kinds,
        lambda every: every.append({"kind": "Deploymnet", "metadata": {"name": "x"}}),
    ),
    "selector": (
        rules.selectors_match,
        lambda every: find(every, "Deployment", "matcher")["spec"]["selector"]["matchLabels"].update(a="b"),
    ),
    "service selector": (
        rules.services_reach_pods,
        lambda every: find(every, "Service", "matcher")["spec"]["selector"].update(a="b"),
    ),
    "service port": (
        rules.services_reach_pods,
        lambda every: find(every, "Service", "matcher")["spec"]["ports"][0].update(targetPort="http"),
    ),
    "probe port": (
        rules.probes_reach_ports,
        lambda every: pod(every, "matcher")["containers"][0]["livenessProbe"]["grpc"].update(port=50059),
    ),
    "quantity": (
        rules.quantities_parse,
        lambda every: pod(every, "matcher")["containers"][0]["resources"]["limits"].update(memory="4GB"),
    ),
    "no limit": (
        rules.quantities_parse,
        lambda every: pod(every, "matcher")["containers"][0]["resources"].pop("limits"),
    ),
    "request above the limit": (
        rules.requests_are_within_limits,
        lambda every: pod(every, "matcher")["containers"][0]["resources"]["requests"].update(memory="5Gi"),
    ),
    "mount of nothing": (
        rules.mounts_exist,
        lambda every: pod(every, "matcher")["volumes"].clear(),
    ),
    "budget for nothing": (
        rules.policies_select_pods,
        lambda every: find(every, "PodDisruptionBudget", "matcher")["spec"]["selector"]["matchLabels"].update(a="b"),
    ),
    "policy for nothing": (
        rules.policies_select_pods,
        lambda every: find(every, "NetworkPolicy", "engine")["spec"]["podSelector"]["matchLabels"].update(a="b"),
    ),
    "policy that lets nobody in": (
        rules.policies_select_pods,
        lambda every: find(every, "NetworkPolicy", "matcher")["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update(a="b"),
    ),
    "service links": (rules.service_links_are_off, lambda every: pod(every, "engine").pop("enableServiceLinks")),
    "two volumes larger than the limit together": (
        rules.memory_volumes_fit,
        lambda every: add_memory_volume(pod(every, "engine"), "4Gi"),
    ),
    "volume larger than the limit": (
        rules.memory_volumes_fit,
        lambda every: pod(every, "engine")["initContainers"][0]["resources"]["limits"].update(memory="1Gi"),
    ),
    "volume without a limit": (
        rules.memory_volumes_fit,
        lambda every: next(v for v in pod(every, "engine")["volumes"] if v["name"] == "arena")["emptyDir"].pop(
            "sizeLimit"
        ),
    ),
    "arena larger than its volume": (
        rules.arenas_fit,
        lambda every: env(pod(every, "engine")["initContainers"][0], "KVBLEND_STORE_ARENA_BYTES", str(1 << 40)),
    ),
    "drain": (
        rules.drains_end_in_time,
        lambda every: pod(every, "matcher").update(terminationGracePeriodSeconds=5),
    ),
    "root": (rules.pods_are_locked, lambda every: pod(every, "matcher")["securityContext"].pop("runAsNonRoot")),
    "token": (rules.pods_are_locked, lambda every: pod(every, "matcher").pop("automountServiceAccountToken")),
    "host ipc": (rules.pods_are_locked, lambda every: pod(every, "engine").update(hostIPC=True)),
    "capabilities": (
        rules.pods_are_locked,
        lambda every: pod(every, "matcher")["containers"][0]["securityContext"].pop("capabilities"),
    ),
    "setting": (
        rules.settings_exist(check_manifests.KNOWN_SETTINGS),
        lambda every: env(pod(every, "matcher")["containers"][0], "KVBLEND_MATCHER_LISTNE", "x"),
    ),
}


@pytest.mark.parametrize("fault", sorted(MUTATIONS))
def test_each_rule_sees_the_fault_it_is_for(fault: str) -> None:
    rule, mutate = MUTATIONS[fault]
    every = documents("base")
    assert list(rule(every)) == []
    broken = copy.deepcopy(every)
    mutate(broken)
    assert list(rule(broken))


@pytest.mark.parametrize(("text", "value"), [("1Gi", 2**30), ("200m", 0.2), ("1.5", 1.5), ("4GB", None), ("", None)])
def test_quantities(text: str, value: float | None) -> None:
    assert rules.parse_quantity(text) == value


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


SOURCE_FAULTS = {
    "field that does not exist": ("k8s/base/matcher.yaml", "image: kvblend-matcher", "imagePulPolicy: Always"),
    "key twice": ("k8s/base/matcher.yaml", "image: kvblend-matcher", "image: other"),
    "patch of nothing": ("k8s/overlays/small/matcher.yaml", "name: matcher", "name: matchre"),
    "careless Dockerfile": ("docker/store.Dockerfile", "COPY --from=build /app /app", "RUN apt-get install curl"),
}


@pytest.mark.parametrize("fault", sorted(SOURCE_FAULTS))
def test_a_fault_in_the_sources_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are called such that they see it."""
    path, line, added = SOURCE_FAULTS[fault]
    shutil.copytree(check_manifests.DEPLOY, tmp_path / "deploy")
    file = tmp_path / "deploy" / path
    text = file.read_text()
    assert line in text
    indent = " " * (text.split(line, 1)[0].rsplit("\n", 1)[-1].count(" "))
    replaced = added if fault == "patch of nothing" else f"{line}\n{indent}{added}"
    file.write_text(text.replace(line, replaced, 1))
    monkeypatch.setattr(check_manifests, "ROOT", tmp_path)
    monkeypatch.setattr(check_manifests, "DEPLOY", tmp_path / "deploy")
    assert list(check_manifests.findings())

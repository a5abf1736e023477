"""The manifests pass every check, and each check of our own sees the fault it is for."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools import check_manifests
from tools import manifest_rules as rules

Document = dict[str, Any]
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

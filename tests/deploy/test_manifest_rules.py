"""Each rule of our own sees the fault that it is for, and none where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
from manifest_kit import Document, documents, env, find, first, pod

from tools import manifest_rules as rules


def secure(every: list[Document], **values: Any) -> None:
    """Sets the matcher's container's securityContext apart from the pod's."""
    first(every, "matcher")["securityContext"].update(values)


def claim(every: list[Document]) -> Document:
    found: Document = find(every, "StatefulSet", "matcher-log")["spec"]["volumeClaimTemplates"][0]
    return found


def scaler(every: list[Document]) -> Document:
    spec: Document = find(every, "HorizontalPodAutoscaler", "matcher")["spec"]
    return spec


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
    "service of no selector": (
        rules.services_reach_pods,
        lambda every: find(every, "Service", "matcher")["spec"].pop("selector"),
    ),
    "service port": (
        rules.services_reach_pods,
        lambda every: find(every, "Service", "matcher")["spec"]["ports"][0].update(targetPort="http"),
    ),
    "spread of other pods": (
        rules.selectors_match,
        lambda every: pod(every, "matcher")["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            a="b"
        ),
    ),
    "pods without labels": (
        rules.selectors_match,
        lambda every: find(every, "Deployment", "matcher")["spec"]["template"].pop("metadata"),
    ),
    "probe on a named port": (
        rules.probes_reach_ports,
        lambda every: first(every, "engine")["readinessProbe"]["httpGet"].update(port="htpp"),
    ),
    "probe port": (
        rules.probes_reach_ports,
        lambda every: first(every, "matcher")["livenessProbe"]["grpc"].update(port=50059),
    ),
    "quantity": (
        rules.quantities_parse,
        lambda every: first(every, "matcher")["resources"]["limits"].update(memory="4GB"),
    ),
    "quantity of a volume": (
        rules.quantities_parse,
        lambda every: pod(every, "matcher")["volumes"][0]["emptyDir"].update(sizeLimit="256MB"),
    ),
    "quantity of a claim": (
        rules.quantities_parse,
        lambda every: claim(every)["spec"]["resources"]["requests"].update(storage="20GB"),
    ),
    "no limit": (
        rules.resources_are_given,
        lambda every: first(every, "matcher")["resources"].pop("limits"),
    ),
    "request above the limit": (
        rules.requests_are_within_limits,
        lambda every: first(every, "matcher")["resources"]["requests"].update(memory="5Gi"),
    ),
    "mount of nothing": (
        rules.mounts_exist,
        lambda every: pod(every, "matcher")["volumes"].clear(),
    ),
    "mount of another claim": (
        rules.mounts_exist,
        lambda every: claim(every)["metadata"].update(name="other"),
    ),
    "budget for nothing": (
        rules.policies_select_pods,
        lambda every: find(every, "PodDisruptionBudget", "matcher")["spec"]["selector"]["matchLabels"].update(a="b"),
    ),
    "policy for nothing": (
        rules.policies_select_pods,
        lambda every: find(every, "NetworkPolicy", "engine")["spec"]["podSelector"]["matchLabels"].update(a="b"),
    ),
    "policy that lets nothing out": (
        rules.policies_select_pods,
        lambda every: find(every, "NetworkPolicy", "matcher")["spec"]["egress"][0]["to"][0]["podSelector"][
            "matchLabels"
        ].update(a="b"),
    ),
    "policy that lets nobody in": (
        rules.policies_select_pods,
        lambda every: find(every, "NetworkPolicy", "matcher")["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update(a="b"),
    ),
    "stateful set of no service": (
        rules.stateful_sets_have_a_service,
        lambda every: find(every, "StatefulSet", "matcher-log")["spec"].update(serviceName="matcher-lgo"),
    ),
    "autoscaler of nothing": (
        rules.autoscalers_fit,
        lambda every: scaler(every)["scaleTargetRef"].update(name="matchre"),
    ),
    "autoscaler that every apply overrules": (
        rules.autoscalers_fit,
        lambda every: find(every, "Deployment", "matcher")["spec"].update(replicas=2),
    ),
    "autoscaler from more to fewer": (
        rules.autoscalers_fit,
        lambda every: scaler(every).update(minReplicas=9),
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
    "arena on no memory volume": (
        rules.arenas_fit,
        lambda every: env(pod(every, "engine")["initContainers"][0], "KVBLEND_STORE_ARENA_DIR", "/tmp"),
    ),
    "drain by the defaults": (
        rules.drains_end_in_time,
        lambda every: (
            first(every, "matcher").pop("env"),
            pod(every, "matcher").update(terminationGracePeriodSeconds=7),
        ),
    ),
    "drains one after the other": (
        rules.drains_end_in_time,
        lambda every: pod(every, "engine").update(terminationGracePeriodSeconds=10),
    ),
    "drain of no number": (
        rules.drains_end_in_time,
        lambda every: env(first(every, "matcher"), "KVBLEND_MATCHER_DRAIN_SECONDS", "soon"),
    ),
    "drain": (
        rules.drains_end_in_time,
        lambda every: pod(every, "matcher").update(terminationGracePeriodSeconds=5),
    ),
    "root": (rules.pods_are_locked, lambda every: pod(every, "matcher")["securityContext"].pop("runAsNonRoot")),
    "root in one container": (rules.pods_are_locked, lambda every: secure(every, runAsUser=0)),
    "root allowed in one container": (rules.pods_are_locked, lambda every: secure(every, runAsNonRoot=False)),
    "no seccomp": (rules.pods_are_locked, lambda every: pod(every, "matcher")["securityContext"].pop("seccompProfile")),
    "no seccomp in one container": (
        rules.pods_are_locked,
        lambda every: secure(every, seccompProfile={"type": "Unconfined"}),
    ),
    "writable root": (rules.pods_are_locked, lambda every: secure(every, readOnlyRootFilesystem=False)),
    "escalation": (rules.pods_are_locked, lambda every: secure(every, allowPrivilegeEscalation=True)),
    "privileged": (rules.pods_are_locked, lambda every: secure(every, privileged=True)),
    "capabilities": (rules.pods_are_locked, lambda every: secure(every, capabilities={})),
    "capability added": (
        rules.pods_are_locked,
        lambda every: secure(every, capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    ),
    "token": (rules.pods_are_locked, lambda every: pod(every, "matcher").pop("automountServiceAccountToken")),
    "host ipc": (rules.pods_are_locked, lambda every: pod(every, "engine").update(hostIPC=True)),
    "setting": (rules.settings_exist, lambda every: env(first(every, "matcher"), "KVBLEND_MATCHER_LISTNE", "x")),
    "setting of another service": (
        rules.settings_exist,
        lambda every: env(first(every, "matcher"), "KVBLEND_STORE_LISTEN", "x"),
    ),
    "setting of no service": (
        rules.settings_exist,
        lambda every: env(first(every, "matcher"), "KVBLEND_MATCHR_LISTEN", "x"),
    ),
}


@pytest.mark.parametrize("fault", sorted(MUTATIONS))
def test_each_rule_sees_the_fault_it_is_for(fault: str) -> None:
    rule, mutate = MUTATIONS[fault]
    assert list(rule(documents())) == []
    broken = documents()
    mutate(broken)
    found = list(rule(broken))
    assert found
    assert not any("\n" in finding for finding in found)


def test_no_rule_is_without_a_fault() -> None:
    assert {rule for rule, _ in MUTATIONS.values()} == {rules.known_kinds, *rules.RULES}


@pytest.mark.parametrize(
    ("image", "service"),
    [
        ("kvblend-store", "store"),
        ("registry.example:5000/team/kvblend-store:1.2", "store"),
        ("registry.example/kvblend-gpu-agent@sha256:00", "gpu_agent"),
        ("valkey/valkey:8.1-alpine", None),
        ("other-kvblend-store:1", None),
    ],
)
def test_a_container_is_known_by_its_image(image: str, service: str | None) -> None:
    found = rules.service_of({"image": image})
    assert (found.service if found else None) == service


QUANTITIES = [
    *[("1Gi", 2**30), ("200m", 0.2), ("1.5", 1.5), ("2Pi", 2**51), ("1e9", 1e9), ("1E", 1e18), ("1G", 1e9), (3, 3.0)],
    *[(wrong, None) for wrong in ("4GB", "", "-1", "1 Gi", "1Gi\n", "Gi", "1gi", ".", None)],
]


@pytest.mark.parametrize(("text", "value"), QUANTITIES)
def test_quantities(text: object, value: float | None) -> None:
    assert rules.parse_quantity(text) == pytest.approx(value)

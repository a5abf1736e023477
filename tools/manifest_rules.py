"""Our own rules for rendered manifests: what schema checks do not see.

A rule takes all documents and yields findings, one line each.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

Document = dict[str, Any]
Rule = Callable[[list[Document]], Iterator[str]]

KINDS = {"Deployment", "StatefulSet", "DaemonSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"}
WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet"}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")
_FACTORS = {"m": 1e-3, "k": 1e3, "Ki": 2**10, "M": 1e6, "Mi": 2**20, "G": 1e9, "Gi": 2**30, "T": 1e12, "Ti": 2**40}
# Services of ours by the prefix of their settings in the environment.
PREFIXES = ("KVBLEND_MATCHER_", "KVBLEND_STORE_", "KVBLEND_GPU_AGENT_")


def name_of(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def parse_quantity(text: object) -> float | None:
    """Bytes or cores; None if it is no quantity."""
    match = _QUANTITY.match(str(text))
    return float(match[1]) * _FACTORS.get(match[2] or "", 1.0) if match else None


def workloads(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod template) of everything that runs pods."""
    for document in documents:
        if document["kind"] in WORKLOADS:
            yield name_of(document), document["spec"]["template"]


def containers(template: Document) -> list[Document]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


def known_kinds(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] not in KINDS:
            yield f"{name_of(document)}: this kind is not known here; add it to KINDS if it is meant"


def selectors_match(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] in WORKLOADS:
            labels = document["spec"]["template"]["metadata"]["labels"]
            wanted = document["spec"]["selector"]["matchLabels"]
            if not wanted.items() <= labels.items():
                yield f"{name_of(document)}: selector {wanted} does not match the pods' labels {labels}"


def services_reach_pods(documents: list[Document]) -> Iterator[str]:
    pods = [template for _, template in workloads(documents)]
    for document in documents:
        if document["kind"] != "Service":
            continue
        selector = document["spec"]["selector"]
        matching = [pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
        if not matching:
            yield f"{name_of(document)}: selector {selector} matches no pod"
        for port in document["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if matching and not any(_has_port(container, target) for pod in matching for container in containers(pod)):
                yield f"{name_of(document)}: no container has the port {target}"


def _has_port(container: Document, port: object) -> bool:
    return any(port in (entry.get("name"), entry["containerPort"]) for entry in container.get("ports", []))


def probes_reach_ports(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        for container in containers(template):
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                for how in ("grpc", "httpGet", "tcpSocket"):
                    port = container.get(kind, {}).get(how, {}).get("port")
                    if port is not None and not _has_port(container, port):
                        yield f"{name}: {container['name']} has a {kind} on port {port}, which it does not serve"


def quantities_parse(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        for container in containers(template):
            resources = container.get("resources", {})
            if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
                yield f"{name}: {container['name']} needs a CPU request and a memory limit"
            for values in resources.values():
                for key, value in values.items():
                    if parse_quantity(value) is None:
                        yield f"{name}: {container['name']} has {key} = {value}, which is no quantity"


def requests_are_within_limits(documents: list[Document]) -> Iterator[str]:
    """The API server refuses them; no schema does."""
    for name, template in workloads(documents):
        for container in containers(template):
            resources = container.get("resources", {})
            for key, limit in resources.get("limits", {}).items():
                request = resources.get("requests", {}).get(key)
                if request is not None and (parse_quantity(request) or 0.0) > (parse_quantity(limit) or 0.0):
                    yield f"{name}: {container['name']} requests {key} = {request}, above its limit {limit}"


def memory_volumes_fit(documents: list[Document]) -> Iterator[str]:
    """Pages of a memory volume count against the container that touched them: all its volumes must fit together."""
    for name, template in workloads(documents):
        sizes: dict[str, float] = {}
        for volume in template["spec"].get("volumes", []):
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = parse_quantity(volume["emptyDir"].get("sizeLimit"))
                if size is None:
                    yield f"{name}: memory volume {volume['name']} needs a sizeLimit"
                sizes[volume["name"]] = size or 0.0
        for container in containers(template):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])} & sizes.keys()
            limit = parse_quantity(container.get("resources", {}).get("limits", {}).get("memory")) or 0.0
            if mounted and limit < sum(sizes[volume] for volume in mounted):
                what = ", ".join(sorted(mounted))
                yield f"{name}: {container['name']} may use less memory than its volumes hold: {what}"


def mounts_exist(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        for container in containers(template):
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{name}: {container['name']} mounts {mount['name']}, which is no volume of the pod"


def policies_select_pods(documents: list[Document]) -> Iterator[str]:
    """A budget or a network policy whose selector matches nothing protects nothing, silently."""
    pods = [template["metadata"]["labels"] for _, template in workloads(documents)]
    for document in documents:
        selectors = []
        if document["kind"] == "PodDisruptionBudget":
            selectors = [document["spec"]["selector"]]
        if document["kind"] == "NetworkPolicy":
            peers = [peer for rule in document["spec"].get("ingress", []) for peer in rule.get("from", [])]
            selectors = [document["spec"]["podSelector"], *(p["podSelector"] for p in peers if "podSelector" in p)]
        for selector in selectors:
            wanted = selector.get("matchLabels", {})
            if not any(wanted.items() <= labels.items() for labels in pods):
                yield f"{name_of(document)}: {wanted} matches no pod"


def service_links_are_off(documents: list[Document]) -> Iterator[str]:
    """A Service named kvblend-matcher would add KVBLEND_MATCHER_PORT to every pod: an unknown setting, refused."""
    for name, template in workloads(documents):
        if template["spec"].get("enableServiceLinks") is not False:
            yield f"{name}: enableServiceLinks must be false"


def arenas_fit(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        for container in containers(template):
            values = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
            arena = values.get("KVBLEND_STORE_ARENA_BYTES")
            if arena is None:
                continue
            place = values.get("KVBLEND_STORE_ARENA_DIR")
            mounts = [m["name"] for m in container.get("volumeMounts", []) if m["mountPath"] == place]
            sizes = [parse_quantity(volumes[mount]["emptyDir"].get("sizeLimit")) for mount in mounts]
            if not sizes or (sizes[0] or 0) <= float(arena):
                yield f"{name}: an arena of {arena} bytes does not fit into the volume at {place}"


def drains_end_in_time(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        for container in containers(template):
            values = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
            for prefix in PREFIXES:
                needed = float(values.get(f"{prefix}DRAIN_SECONDS", 2)) + float(values.get(f"{prefix}GRACE_SECONDS", 5))
                if f"{prefix}LISTEN" in values and grace <= needed:
                    yield f"{name}: {container['name']} drains for {needed:.0f} s, but is killed after {grace} s"


def pods_are_locked(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        spec = template["spec"]
        pod = spec.get("securityContext", {})
        if pod.get("runAsNonRoot") is not True or pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name}: the pod must run as non-root under the RuntimeDefault seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{name}: automountServiceAccountToken must be false"
        if spec.get("hostIPC") or spec.get("hostPID") or spec.get("hostNetwork"):
            yield f"{name}: no host namespaces"
        for container in containers(template):
            locked = container.get("securityContext", {})
            tight = locked.get("readOnlyRootFilesystem") is True and locked.get("allowPrivilegeEscalation") is False
            if not tight or locked.get("capabilities", {}).get("drop") != ["ALL"] or locked.get("privileged"):
                yield f"{name}: {container['name']} must have a read-only root, no escalation, no capabilities"


def settings_exist(known: dict[str, set[str]]) -> Rule:
    """`known`: prefix -> names of settings, upper case."""

    def rule(documents: list[Document]) -> Iterator[str]:
        for name, template in workloads(documents):
            for container in containers(template):
                for entry in container.get("env", []):
                    for prefix, settings in known.items():
                        if entry["name"].startswith(prefix) and entry["name"].removeprefix(prefix) not in settings:
                            yield f"{name}: {container['name']} sets {entry['name']}, which is no setting"

    return rule


RULES: list[Rule] = [
    known_kinds,
    selectors_match,
    services_reach_pods,
    probes_reach_ports,
    quantities_parse,
    requests_are_within_limits,
    memory_volumes_fit,
    mounts_exist,
    policies_select_pods,
    service_links_are_off,
    arenas_fit,
    drains_end_in_time,
    pods_are_locked,
]

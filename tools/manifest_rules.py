"""Our own rules for rendered manifests: what schema checks do not see.

A rule takes all documents, which the schemas have passed, and yields findings, one line each.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from services.common.config import ServiceSettings
from services.gpu_agent.settings import AgentSettings
from services.matcher.settings import MatcherSettings
from services.store.settings import StoreSettings

Document = dict[str, Any]
Rule = Callable[[list[Document]], Iterator[str]]

WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet"}
KINDS = WORKLOADS | {"Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "HorizontalPodAutoscaler"}
# Whose settings a container takes, by its image. An engine's container may run an agent beside the engine.
IMAGES: dict[str, type[ServiceSettings]] = {
    "kvblend-matcher": MatcherSettings,
    "kvblend-store": StoreSettings,
    "kvblend-gpu-agent": AgentSettings,
    "kvblend-engine": AgentSettings,
}
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d+))?")
_FACTORS = {
    **{unit: 10.0 ** (3 * power) for power, unit in enumerate(["n", "u", "m", "", "k", "M", "G", "T", "P", "E"], -3)},
    **{unit: 2.0 ** (10 * power) for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], 1)},
}


def name_of(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def parse_quantity(text: object) -> float | None:
    """Bytes or cores; None if it is no quantity."""
    match = _QUANTITY.fullmatch(str(text))
    return float(match[1]) * _FACTORS[match[2] or ""] * 10.0 ** int(match[3] or 0) if match else None


def workloads(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod template) of everything that runs pods."""
    for document in documents:
        if document["kind"] in WORKLOADS:
            yield name_of(document), document["spec"]["template"]


def containers(template: Document) -> list[Document]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


def every_container(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """("Kind/name: container", container)"""
    for name, template in workloads(documents):
        for container in containers(template):
            yield f"{name}: {container['name']}", container


def claims(document: Document) -> list[Document]:
    """Volumes that each pod of a StatefulSet has to itself."""
    found: list[Document] = (
        document["spec"].get("volumeClaimTemplates", []) if document["kind"] == "StatefulSet" else []
    )
    return found


def scaled_by(autoscaler: Document) -> str:
    """Name of the workload whose replicas it decides."""
    target = autoscaler["spec"]["scaleTargetRef"]
    return f"{target['kind']}/{target['name']}"


def labels_of(template: Document) -> dict[str, str]:
    labels: dict[str, str] = template.get("metadata", {}).get("labels", {})
    return labels


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Expressions count as no match: no manifest here needs them, and a finding is better than a guess."""
    wanted = selector.get("matchLabels") or {}
    return not selector.get("matchExpressions") and wanted.items() <= labels.items()


def memory_volumes(template: Document) -> dict[str, float | None]:
    """Size in bytes by name of volume; None: no limit, or none that parses."""
    volumes = {volume["name"]: volume.get("emptyDir") or {} for volume in template["spec"].get("volumes", [])}
    return {name: parse_quantity(v.get("sizeLimit")) for name, v in volumes.items() if v.get("medium") == "Memory"}


def service_of(container: Document) -> type[ServiceSettings] | None:
    """Wherever the image comes from and whatever its tag or digest is."""
    return IMAGES.get(re.split("[:@]", container["image"].rpartition("/")[2])[0])


def setting(container: Document, service: type[ServiceSettings], field: str) -> object:
    """What the container sets in its environment, else the service's default."""
    values = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    return values.get(f"KVBLEND_{service.service.upper()}_{field.upper()}", service.model_fields[field].default)


def known_kinds(documents: list[Document]) -> Iterator[str]:
    """The schema check passes what it has no schema for."""
    for document in documents:
        if document.get("kind") not in KINDS:
            yield f"{document.get('kind')}: this kind is not known here; add it to KINDS if it is meant"


def selectors_match(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] in WORKLOADS:
            labels, selector = labels_of(document["spec"]["template"]), document["spec"]["selector"]
            spreads = document["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
            for wanted in (selector, *(spread.get("labelSelector", {}) for spread in spreads)):
                if not selects(wanted, labels):
                    yield f"{name_of(document)}: selector {wanted} does not match the pods' labels {labels}"


def services_reach_pods(documents: list[Document]) -> Iterator[str]:
    pods = [template for _, template in workloads(documents)]
    for document in documents:
        if document["kind"] != "Service":
            continue
        selector = document["spec"].get("selector")
        matching = [pod for pod in pods if selector and selector.items() <= labels_of(pod).items()]
        if not matching:
            yield f"{name_of(document)}: selector {selector} matches no pod"
        for port in document["spec"].get("ports", []):
            target = port.get("targetPort", port["port"])
            if matching and not any(_has_port(container, target) for pod in matching for container in containers(pod)):
                yield f"{name_of(document)}: no container has the port {target}"


def _has_port(container: Document, port: object) -> bool:
    return any(port in (entry.get("name"), entry["containerPort"]) for entry in container.get("ports", []))


def probes_reach_ports(documents: list[Document]) -> Iterator[str]:
    for name, container in every_container(documents):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("grpc", "httpGet", "tcpSocket"):
                port = container.get(kind, {}).get(how, {}).get("port")
                if port is not None and not _has_port(container, port):
                    yield f"{name} has a {kind} on port {port}, which it does not declare"


def quantities_parse(documents: list[Document]) -> Iterator[str]:
    for name, container in every_container(documents):
        for what, values in container.get("resources", {}).items():
            for key, value in values.items():
                if parse_quantity(value) is None:
                    yield f"{name} has {what} {key} = {value}, which is no quantity"
    for name, template in workloads(documents):
        for volume in template["spec"].get("volumes", []):
            size = (volume.get("emptyDir") or {}).get("sizeLimit")
            if size is not None and parse_quantity(size) is None:
                yield f"{name}: volume {volume['name']} has sizeLimit = {size}, which is no quantity"
    for document in documents:
        for claim in claims(document):
            size = claim["spec"]["resources"]["requests"]["storage"]
            if parse_quantity(size) is None:
                yield f"{name_of(document)}: claim {claim['metadata']['name']} of {size}, which is no quantity"


def resources_are_given(documents: list[Document]) -> Iterator[str]:
    for name, container in every_container(documents):
        resources = container.get("resources", {})
        if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
            yield f"{name} needs a CPU request and a memory limit"


def requests_are_within_limits(documents: list[Document]) -> Iterator[str]:
    """The API server refuses them; no schema does."""
    for name, container in every_container(documents):
        resources = container.get("resources", {})
        for key, limit in resources.get("limits", {}).items():
            request = resources.get("requests", {}).get(key)
            if request is not None and (parse_quantity(request) or 0.0) > (parse_quantity(limit) or 0.0):
                yield f"{name} requests {key} = {request}, above its limit {limit}"


def memory_volumes_fit(documents: list[Document]) -> Iterator[str]:
    """Pages of a memory volume count against the container that touched them: all its volumes must fit together."""
    for name, template in workloads(documents):
        sizes = memory_volumes(template)
        yield from (f"{name}: memory volume {volume} needs a sizeLimit" for volume, size in sizes.items() if not size)
        for container in containers(template):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])} & sizes.keys()
            limit = parse_quantity(container.get("resources", {}).get("limits", {}).get("memory")) or 0.0
            if mounted and limit < sum(sizes[volume] or 0.0 for volume in mounted):
                what = ", ".join(sorted(mounted))
                yield f"{name}: {container['name']} may use less memory than its volumes hold: {what}"


def mounts_exist(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] not in WORKLOADS:
            continue
        template = document["spec"]["template"]
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in claims(document)}
        for container in containers(template):
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{name_of(document)}: {container['name']} mounts {mount['name']}, no volume of the pod"


def policies_select_pods(documents: list[Document]) -> Iterator[str]:
    """A budget or a network policy whose selector matches nothing protects nothing, silently."""
    pods = [labels_of(template) for _, template in workloads(documents)]
    for document in documents:
        selectors = []
        if document["kind"] == "PodDisruptionBudget":
            selectors = [document["spec"].get("selector", {})]
        if document["kind"] == "NetworkPolicy":
            spec = document["spec"]
            peers = [peer for rule in spec.get("ingress", []) for peer in rule.get("from", [])]
            peers += [peer for rule in spec.get("egress", []) for peer in rule.get("to", [])]
            selectors = [spec["podSelector"], *(p["podSelector"] for p in peers if "podSelector" in p)]
        for selector in selectors:
            if not any(selects(selector, labels) for labels in pods):
                yield f"{name_of(document)}: {selector} matches no pod"


def stateful_sets_have_a_service(documents: list[Document]) -> Iterator[str]:
    services = {document["metadata"]["name"] for document in documents if document["kind"] == "Service"}
    for document in documents:
        if document["kind"] == "StatefulSet" and document["spec"].get("serviceName") not in services:
            yield f"{name_of(document)}: serviceName {document['spec'].get('serviceName')} is no Service"


def autoscalers_fit(documents: list[Document]) -> Iterator[str]:
    found = {name_of(document): document for document in documents if document["kind"] in WORKLOADS}
    for document in documents:
        if document["kind"] != "HorizontalPodAutoscaler":
            continue
        spec, target = document["spec"], scaled_by(document)
        if target not in found:
            yield f"{name_of(document)}: there is no {target}"
        elif "replicas" in found[target]["spec"]:
            yield f"{target} sets replicas, which {name_of(document)} decides: every apply would undo its choice"
        if spec.get("minReplicas", 1) > spec["maxReplicas"]:
            yield f"{name_of(document)}: minReplicas is above maxReplicas"


def service_links_are_off(documents: list[Document]) -> Iterator[str]:
    """A Service named kvblend-matcher would add KVBLEND_MATCHER_PORT to every pod: an unknown setting, refused."""
    for name, template in workloads(documents):
        if template["spec"].get("enableServiceLinks") is not False:
            yield f"{name}: enableServiceLinks must be false"


def settings_exist(documents: list[Document]) -> Iterator[str]:
    """Of the service that the container runs, not of any: it refuses or ignores the others'."""
    for name, container in every_container(documents):
        service = service_of(container)
        prefix = f"KVBLEND_{service.service.upper()}_" if service else ""
        known = {prefix + field.upper() for field in service.model_fields} if service else set()
        for entry in container.get("env", []):
            if entry["name"].startswith("KVBLEND_") and entry["name"] not in known:
                yield f"{name} sets {entry['name']}, which is no setting of {service.service if service else 'it'}"


def arenas_fit(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        sizes = memory_volumes(template)
        for container in containers(template):
            if service_of(container) is not StoreSettings:
                continue
            arena, place = (setting(container, StoreSettings, field) for field in ("arena_bytes", "arena_dir"))
            mounts = [m["name"] for m in container.get("volumeMounts", []) if m["mountPath"] == place]
            # More, not as much: the volume holds the catalog too.
            if not any((sizes.get(mount) or 0.0) > (parse_quantity(arena) or 0.0) for mount in mounts):
                yield f"{name}: an arena of {arena} bytes does not fit into a memory volume at {place or '(default)'}"


def drains_end_in_time(documents: list[Document]) -> Iterator[str]:
    """Sidecars stop one after the other once the others have; the pod's grace period runs meanwhile."""
    for name, template in workloads(documents):
        total = max(map(_seconds_to_stop, template["spec"]["containers"]))
        total += sum(map(_seconds_to_stop, template["spec"].get("initContainers", [])))
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        if grace <= total:
            yield f"{name}: drain and grace take {total:g} s in all, but it is killed after {grace} s"


def _seconds_to_stop(container: Document) -> float:
    """A value that is no number is never in time; an engine's own time is its own affair."""
    service = service_of(container)
    values = [setting(container, service, f) for f in ("drain_seconds", "grace_seconds")] if service else []
    seconds = [parse_quantity(value) for value in values]
    return sum(float("inf") if value is None else value for value in seconds)


def pods_are_locked(documents: list[Document]) -> Iterator[str]:
    for name, template in workloads(documents):
        spec = template["spec"]
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{name}: automountServiceAccountToken must be false"
        if spec.get("hostIPC") or spec.get("hostPID") or spec.get("hostNetwork"):
            yield f"{name}: no host namespaces"
        for container in containers(template):
            own = container.get("securityContext", {})
            # A container's setting replaces the pod's.
            both = {**spec.get("securityContext", {}), **own}
            if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
                yield f"{name}: {container['name']} must have runAsNonRoot: true, and no runAsUser: 0"
            if both.get("seccompProfile", {}).get("type") != "RuntimeDefault":
                yield f"{name}: {container['name']} must have the seccompProfile RuntimeDefault"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{name}: {container['name']} must have readOnlyRootFilesystem: true"
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{name}: {container['name']} must have allowPrivilegeEscalation: false, and not be privileged"
            if own.get("capabilities", {}) != {"drop": ["ALL"]}:
                yield f"{name}: {container['name']} must drop ALL capabilities, and add none"


RULES: list[Rule] = [
    selectors_match,
    services_reach_pods,
    probes_reach_ports,
    quantities_parse,
    resources_are_given,
    requests_are_within_limits,
    memory_volumes_fit,
    mounts_exist,
    policies_select_pods,
    stateful_sets_have_a_service,
    autoscalers_fit,
    service_links_are_off,
    settings_exist,
    arenas_fit,
    drains_end_in_time,
    pods_are_locked,
]

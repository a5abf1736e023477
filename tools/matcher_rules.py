"""Rules for how matchers are deployed: where their log is, who writes to it, and what they take of memory."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from services.common.config import ServiceSettings
from services.matcher.settings import MatcherSettings
from services.store.settings import StoreSettings
from tools.manifest_rules import (
    WORKLOADS,
    Document,
    Rule,
    containers,
    labels_of,
    name_of,
    parse_quantity,
    scaled_by,
    service_of,
    setting,
    workloads,
)

# Of the process without a table: a quarter of it for the interpreter and compiled kernels, the rest for messages of
# calls in flight, pages of the log and parts of snapshots.
_BESIDE_TABLES = 2.0**30
_POLICY = re.compile(r"--maxmemory-policy[ =]+(\S+)")


def logs_are_kept(documents: list[Document]) -> Iterator[str]:
    """A log server must not evict. So it cannot be the server of L2 either, which must."""
    tiers = {
        name
        for _, container in _running(documents, StoreSettings)
        for host in _hosts(setting(container, StoreSettings, "redis_url"))
        for name in _servers(documents, host)
    }
    for document, container in _running(documents, MatcherSettings):
        for host in _hosts(setting(container, MatcherSettings, "log")):
            servers = _servers(documents, host)
            if not servers:
                yield f"{name_of(document)}: its log is at {host}, which is no Service with pods"
            for name, template in servers.items():
                policy = _policy(template)
                if policy.startswith("allkeys-"):
                    yield f"{name_of(document)}: its log is in {name}, which evicts ({policy})"
                if name in tiers:
                    yield f"{name_of(document)}: its log is in {name}, which is L2"


def own_logs_serve_one(documents: list[Document]) -> Iterator[str]:
    """Two matchers with a log each, even for the time of a rollout, would tear stores' streams between them."""
    scaled = {scaled_by(document) for document in documents if document["kind"] == "HorizontalPodAutoscaler"}
    for document, container in _running(documents, MatcherSettings):
        log = str(setting(container, MatcherSettings, "log"))
        if not log.startswith(("memory:", "sqlite:")):
            continue
        spec, name = document["spec"], name_of(document)
        if spec.get("replicas", 1) != 1 or name in scaled:
            yield f"{name}: {log} is a log for one replica"
        if spec.get("strategy", {}).get("type") != "Recreate":
            yield f"{name}: {log} is a log for one replica, so its strategy must be Recreate"


def log_files_have_a_volume(documents: list[Document]) -> Iterator[str]:
    """The root file system is read-only, and gone with the container."""
    for document, container in _running(documents, MatcherSettings):
        scheme, _, path = str(setting(container, MatcherSettings, "log")).partition(":")
        places = [m["mountPath"] for m in container.get("volumeMounts", []) if not m.get("readOnly")]
        if scheme == "sqlite" and not any(path.startswith(f"{place}/") for place in places):
            yield f"{name_of(document)}: the log {path} is in no volume that {container['name']} can write to"


def store_names_come_again(documents: list[Document]) -> Iterator[str]:
    """What a store had is void when one of its name starts anew; a log would keep names that never come again."""
    variable = f"KVBLEND_{StoreSettings.service.upper()}_NAME"
    for document, container in _running(documents, StoreSettings):
        for entry in container.get("env", []):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if entry["name"] == variable and field == "metadata.name" and document["kind"] != "StatefulSet":
                yield f"{name_of(document)}: {container['name']} takes a name that each new pod has anew"


def tables_fit(documents: list[Document]) -> Iterator[str]:
    """Twice: a replica that must load a snapshot answers from the old table until the new one is there."""
    for document, container in _running(documents, MatcherSettings):
        table = parse_quantity(setting(container, MatcherSettings, "memory_limit_bytes")) or float("inf")
        limit = parse_quantity(container.get("resources", {}).get("limits", {}).get("memory")) or 0.0
        if limit < 2 * table + _BESIDE_TABLES:
            what = f"{2 * table + _BESIDE_TABLES:.0f} bytes, two tables and what is beside them"
            yield f"{name_of(document)}: {container['name']} may use {limit:.0f} bytes of memory, less than {what}"


def _running(documents: list[Document], service: type[ServiceSettings]) -> Iterator[tuple[Document, Document]]:
    """(workload, container)"""
    for document in documents:
        if document["kind"] in WORKLOADS:
            for container in containers(document["spec"]["template"]):
                if service_of(container) is service:
                    yield document, container


def _hosts(url: object) -> list[str]:
    """First labels of the hosts that a Redis URL names; none for a file or a socket."""
    addresses = urlsplit(str(url)).netloc.rpartition("@")[2]
    return [address.partition(":")[0].partition(".")[0] for address in addresses.split(",") if address]


def _servers(documents: list[Document], service: str) -> dict[str, Document]:
    """Pod templates behind a Service, by workload."""
    selectors = [
        d["spec"].get("selector") for d in documents if (d["kind"], d["metadata"]["name"]) == ("Service", service)
    ]
    return {
        name: template
        for name, template in workloads(documents)
        if any(selector and selector.items() <= labels_of(template).items() for selector in selectors)
    }


def _policy(template: Document) -> str:
    """Of eviction, as its containers' command lines have it; empty: the server's default, which is not to evict."""
    lines = [" ".join([*c.get("command", []), *c.get("args", [])]) for c in containers(template)]
    found = [match[1] for line in lines for match in _POLICY.finditer(line)]
    return found[-1] if found else ""


MATCHER_RULES: list[Rule] = [
    logs_are_kept,
    own_logs_serve_one,
    log_files_have_a_volume,
    store_names_come_again,
    tables_fit,
]

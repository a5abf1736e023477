"""Rendered manifests, and how tests spoil them."""

import copy
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools import check_manifests, manifest_rules

Document = dict[str, Any]


@functools.cache
def _rendered(folder: str) -> list[Document]:
    return check_manifests.documents_of(check_manifests.render(check_manifests.DEPLOY / "k8s" / folder))


def documents(folder: str = "base") -> list[Document]:
    """A copy of one's own of what deploy/k8s/<folder> renders to."""
    return copy.deepcopy(_rendered(folder))


def find(every: list[Document], kind: str, name: str) -> Document:
    return next(d for d in every if (d["kind"], d["metadata"]["name"]) == (kind, name))


def pod(every: list[Document], name: str) -> Document:
    """Its spec, whatever workload runs it."""
    templates = {n.partition("/")[2]: template for n, template in manifest_rules.workloads(every)}
    spec: Document = templates[name]["spec"]
    return spec


def first(every: list[Document], name: str) -> Document:
    """A pod's first main container."""
    container: Document = pod(every, name)["containers"][0]
    return container


def env(container: Document, name: str, value: str) -> None:
    container["env"] = [entry for entry in container["env"] if entry["name"] != name]
    container["env"].append({"name": name, "value": value})

"""Checks Dockerfiles and Kubernetes manifests, as far as that goes without a cluster.

Renders deploy/k8s with kustomize, validates against the schemas of KUBERNETES, lints YAML and Dockerfiles, and applies
the rules of tools/manifest_rules.py and tools/matcher_rules.py. Prints one line a finding; exits 1 if there is any.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.manifest_rules import RULES, Document, known_kinds
from tools.matcher_rules import MATCHER_RULES

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.33"
YAMLLINT = "{rules: {key-duplicates: enable, trailing-spaces: enable, anchors: enable}}"


def overlays() -> list[Path]:
    return sorted(path.parent for path in (DEPLOY / "k8s").rglob("kustomization.yaml"))


def render(folder: Path) -> str:
    """The YAML that `kubectl apply -k` would send."""
    return _run("kubectl", "kustomize", str(folder)).stdout


def documents_of(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def _run(tool: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """A tool that is installed beside this interpreter."""
    path = Path(sys.executable).parent / tool
    if not path.exists():
        sys.exit(f"{tool} is not installed beside {sys.executable}: run `make setup`")
    command = [str(path), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)


def _lint(tool: str, *arguments: str) -> list[str]:
    """Its findings; also that it failed without any, which must not look like a pass."""
    done = _run(tool, *arguments)
    lines = (done.stdout + done.stderr).strip().splitlines() if done.returncode else []
    return lines or ([f"{tool} exited with {done.returncode}"] if done.returncode else [])


def check_rendered(text: str) -> Iterator[str]:
    """Schemas first: our own rules take for granted what they promise."""
    checked = _run("kubernetes-validate", "--strict", "-k", KUBERNETES, "-", text=text)
    documents = documents_of(text)
    unsound = [*known_kinds(documents)]
    if checked.returncode:
        said = (checked.stdout + checked.stderr).strip().splitlines()
        unsound += said or [f"kubernetes-validate exited with {checked.returncode}"]
    yield from unsound or (finding for rule in (*RULES, *MATCHER_RULES) for finding in rule(documents))


def findings() -> Iterator[str]:
    for folder in overlays():
        name = folder.relative_to(ROOT)
        rendered = _run("kubectl", "kustomize", str(folder))
        # It warns of what it will not understand any more, and still exits with 0.
        said = rendered.stderr.strip().splitlines()
        if rendered.returncode or said or not rendered.stdout:
            yield from (f"{name}: kustomize: {line}" for line in said or ["renders nothing"])
        else:
            yield from (f"{name}: {finding}" for finding in check_rendered(rendered.stdout))
    yield from _lint("yamllint", "-f", "parsable", "--strict", "-d", YAMLLINT, str(DEPLOY))
    for dockerfile in sorted(DEPLOY.rglob("*.Dockerfile")):
        yield from _lint("hadolint", "--no-color", str(dockerfile))


def main() -> int:
    found = list(findings())
    print("\n".join(found) or f"{len(overlays())} manifests and every Dockerfile pass")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

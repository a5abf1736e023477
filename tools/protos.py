"""Generates kvblend/v1 from protos/, or checks that it is fresh.

Usage: python tools/protos.py [--check]

grpcio-tools 1.76.0 is kept in an environment of its own: its output imports under protobuf 6.33,
which engine images pin, and under 7.x; newer generators write code that only the newest runtime
takes (docs/decisions/0002-generated-code.md).
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = "grpcio-tools==1.76.0"
NAMES = ("common", "object", "matcher", "store", "agent", "host_calls")


def generator_python() -> Path:
    """Interpreter of the generator's environment under build/, made on first use."""
    home = ROOT / "build" / "protoc"
    python = home / "bin" / "python"
    marker = home / GENERATOR
    if not marker.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", GENERATOR], check=True)
        marker.touch()
    return python


def generate(out: Path) -> None:
    files = [f"kvblend/v1/{name}.proto" for name in NAMES]
    subprocess.run(
        [
            generator_python(),
            *("-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"),
            *(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"),
            *files,
        ],
        check=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is stale")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "kvblend" / "v1"
        names = sorted(path.name for path in fresh.iterdir())
        _, changed, missing = filecmp.cmpfiles(fresh, ROOT / "kvblend" / "v1", names, shallow=False)
    stale = sorted(changed + missing)
    if stale:
        print(f"stale generated code: {', '.join(stale)}; run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

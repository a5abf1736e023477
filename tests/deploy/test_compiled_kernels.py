"""What an image brings compiled is used where its own files cannot be written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# One small kernel stands for all. Prints how often compiled code was found, and how often not.
CALL = """
import numpy as np
from services.matcher.kernels.compare import agreeing
tokens = np.arange(8, dtype=np.uint32)
assert agreeing(tokens, 0, tokens, 0, 8) == 8
print(sum(agreeing.stats.cache_hits.values()), sum(agreeing.stats.cache_misses.values()))
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with the services, as an image has them, without anything compiled."""
    shutil.copytree(ROOT / "services", tmp_path / "image" / "services", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "image"


def call(image: Path, **environment: str) -> tuple[int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        cwd=image,
        env={**clean, "PYTHONPATH": str(image), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, missed = map(int, done.stdout.split())
    return found, missed


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_what_was_compiled_beside_the_files_is_used_from_another_folder(image: Path, tmp_path: Path) -> None:
    assert call(image) == (0, 1)
    built = files(image)
    other = str(tmp_path / "tmp" / "numba")
    assert call(image, NUMBA_CACHE_DIR=other) == (1, 0)
    assert files(image) == built
    # A restarted container finds what it left.
    assert call(image, NUMBA_CACHE_DIR=other) == (1, 0)


def test_a_copy_that_was_cut_short_is_not_used(image: Path, tmp_path: Path) -> None:
    call(image)
    (beside,) = (path for path in image.glob("services/matcher/kernels/__pycache__/*") if path.is_dir())
    shutil.copytree(beside, tmp_path / "numba" / "tmpkilled" / beside.name)
    for path in (tmp_path / "numba").rglob("*.nb*"):
        path.write_bytes(path.read_bytes()[:10])
    assert call(image, NUMBA_CACHE_DIR=str(tmp_path / "numba")) == (1, 0)


def test_code_for_another_processor_is_compiled_again(image: Path, tmp_path: Path) -> None:
    call(image)
    other = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "NUMBA_CPU_NAME": "generic"}
    assert call(image, **other) == (0, 1)
    assert call(image, **other) == (1, 0)


def test_without_a_folder_that_can_be_written_it_is_compiled_all_the_same(image: Path, tmp_path: Path) -> None:
    call(image)
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "home")
    assert call(image, NUMBA_CACHE_DIR=str(tmp_path / "file" / "numba"), HOME=home, XDG_CACHE_HOME=home) != (0, 0)

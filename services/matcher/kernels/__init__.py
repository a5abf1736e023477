"""Compiled loops of the matcher. None holds the GIL.

Numba keeps compiled code by the caller's file and would not notice that a callee in another file has changed. So the
code is kept under a digest of all files of this package: beside them, or in NUMBA_CACHE_DIR where that is set.
"""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from numba import config

_HERE = Path(__file__).parent


def _keep_code_by_digest() -> None:
    sources = b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.py")))
    digest = hashlib.sha256(sources).hexdigest()[:16]
    beside = _HERE / "__pycache__" / digest
    if config.CACHE_DIR:
        kept = Path(config.CACHE_DIR) / digest
        if beside.is_dir() and not kept.exists():
            _copy(beside, kept)
        config.CACHE_DIR = str(kept)
    elif os.access(_HERE, os.W_OK):
        config.CACHE_DIR = str(beside)


def _copy(beside: Path, kept: Path) -> None:
    """For an image that brings its code compiled: Numba does not even read from a folder that it cannot write to.

    As a whole or not at all: this process may be killed, and others may do the same. Where it fails, Numba compiles.
    """
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            shutil.copytree(beside, Path(folder) / kept.name).rename(kept)


_keep_code_by_digest()

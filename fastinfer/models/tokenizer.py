"""`Tokenizer`: text to token ids and back, and chat messages to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastinfer.models.checkpoint import extra
from fastinfer.models.fields import token_ids
from fastinfer.models.gguf_tokenizer import from_gguf
from fastinfer.models.hf_checkpoint import read_json
from fastinfer.models.source import resolve


class Tokenizer:
    """A thin face over a transformers tokenizer.

    Args:
        tokenizer: a `transformers.PreTrainedTokenizerBase`.
        eos_token_ids: the tokens that end a text, most usual first.
        source: where it came from, for messages.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.vocab_size = len(tokenizer)
        """Tokens it knows; the model's vocabulary may be padded beyond it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with ``add_special_tokens`` the bos or eos the model expects too."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, folder: Path) -> None:
        """Writes the files that `load_tokenizer` reads."""
        self._tokenizer.save_pretrained(folder)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; arguments and errors as `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation as the model was trained on it, special tokens included.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's turn.

        Raises:
            ValueError: no messages, one without a role, no template, or what the template refuses.
        """
        if not messages:
            raise ValueError("chat template: at least one message expected, got none")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f"chat template: messages with 'role' and 'content' expected, got {message!r}"
                )
        if not self._tokenizer.chat_template:
            raise ValueError(f"chat template: the tokenizer of {self._source} has none")
        jinja2 = extra("jinja2", "applying a chat template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"chat template of {self._source}: {error}") from error
        return text


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a model, named as for `load`.

    Raises:
        FileNotFoundError: the model or its tokenizer files are missing.
        ValueError: damaged files, or a kind of tokenizer that is not known.
    """
    path = resolve(model, weights=False)
    if path.is_file():
        tokenizer, eos = from_gguf(path)
        return Tokenizer(tokenizer, eos, str(path))
    return _from_folder(path)


def _from_folder(path: Path) -> Tokenizer:
    if not any(
        (path / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        raise FileNotFoundError(f"model folder {path}: there is no tokenizer (tokenizer.json)")
    transformers = extra("transformers", "loading a tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged file surfaces as whatever its parser raises
        raise ValueError(f"tokenizer of {path}: {type(error).__name__}: {error}") from error
    eos: tuple[int, ...] = ()
    for name in ("generation_config.json", "config.json"):
        if not eos and (path / name).is_file():
            eos = token_ids(read_json(path / name).get("eos_token_id"), "eos_token_id")
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Tokenizer(tokenizer, (*eos, *own), str(path))

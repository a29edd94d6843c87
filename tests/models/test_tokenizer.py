"""Tokenizers from GGUF metadata and from folders.

The reference is a byte-level BPE written from its definition: split the text by the rule that the
model was trained with, map bytes to characters, then merge the best-ranked pair until none is left.
The rules are those of the models' own tokenizer.json: SmolLM2's splits off every digit and then
applies GPT-2's pattern; Qwen2's normalises to NFC and applies the pattern below.
"""

import itertools
import json
import random
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
import transformers

from fastinfer.models import load_tokenizer
from fastinfer.models.gguf_file import GGUFFile
from fastinfer.models.source import resolve
from tests.models.gguf_tools import TOKENS, TYPES, tokenizer_fields, write_gguf
from tests.models.tools import tiny_model

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello world",
    " leading and  double   spaces \t tabs\n\n\nlines  \r\n",
    "1234567890 3.14 12ab34 a1 1 2  3 -5 1,000,000 2024-01-31",
    "x = foo(bar[0], 'baz')  # isn't it? WE'LL I'm they've",
    "naïve café ÅÄÖ — “quotes” … €5",
    "e\u0301 (decomposed) versus \u00e9",
    "日本語のテキスト 中文测试 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧‍👦🇩🇪 emoji ٣٤ Ⅷ ½ ²",
    "\u00a0\u2003\u200b\ufeff odd spaces\x00\x07",
    "    def f(x):\n        return x ** 2\n",
    "<|not_special|> <|im_start <b>",
    "a" * 300,
    "",
]


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins: printable Latin-1 for itself, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class ReferenceBPE:
    """See the module's docstring."""

    def __init__(self, metadata: dict[str, Any], pattern: str, digits: bool, nfc: bool) -> None:
        self.vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self.pattern, self.digits, self.nfc = regex.compile(pattern), digits, nfc
        self.bytes = byte_characters()
        self.merge = lru_cache(None)(self._merge)

    def encode(self, text: str) -> list[int]:
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        # Any numeric character (Nd, Nl, No) counts as a digit.
        pieces = regex.findall(r"\p{N}|[^\p{N}]+", text) if self.digits else [text]
        words = [word for piece in pieces for word in self.pattern.findall(piece)]
        return [i for word in words for i in self.merge(word)]

    def _merge(self, word: str) -> list[int]:
        parts = [self.bytes[b] for b in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda p: self.ranks.get(p, 1 << 60))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.vocab[p] for p in parts]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """(ours, the reference)."""
    path = resolve("smollm2")
    reference = ReferenceBPE(GGUFFile(path).metadata, GPT2, digits=True, nfc=False)
    return load_tokenizer(path), reference


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_smollm2_equals_the_definition(smollm2: Any, text: str) -> None:
    tokenizer, reference = smollm2
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


def test_smollm2_random_texts(smollm2: Any) -> None:
    tokenizer, reference = smollm2
    rng = random.Random(11)
    alphabet = "  \n\tab cd'ts.,;-()0123456789éß中文語の😀٣½\u00a0\u0301"
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        assert tokenizer.encode(text) == reference.encode(text), repr(text)


def test_smollm2_special_tokens(smollm2: Any) -> None:
    tokenizer, reference = smollm2
    hi = reference.vocab["hi"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, hi, 2]
    assert tokenizer.encode("hi") == [hi]  # add_bos_token is false
    assert tokenizer.decode([1, hi, 2]) == "hi"
    assert tokenizer.decode([1, hi, 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_smollm2_chat(smollm2: Any) -> None:
    tokenizer, _ = smollm2
    messages = [{"role": "user", "content": "Hi 12"}]
    text = tokenizer.render_chat(messages)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text)
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.render_chat(system, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 12<|im_end|>\n"
    )


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}], ["hi"], [None]])
def test_bad_messages(smollm2: Any, messages: Any) -> None:
    with pytest.raises(ValueError, match="chat template"):
        smollm2[0].apply_chat_template(messages)


# Tiny vocabularies.


def tiny(path: Path, pre: str = "smollm", **changes: Any) -> Path:
    return write_gguf(
        path / "t.gguf", tiny_model("llama"), metadata=tokenizer_fields(pre, **changes)
    )


def byte_vocab(**changes: Any) -> dict[str, Any]:
    """All bytes and some merges, so that any text can be encoded."""
    tokens = [
        "<|end|>",
        *byte_characters().values(),
        "ab",
        "abc",
        "12",
        "123",
        "\u0120a",
        "\u00c3\u00a9",
    ]
    merges = ["a b", "ab c", "1 2", "12 3", "\u0120 a", "\u00c3 \u00a9"]
    types = [3, *[1] * (len(tokens) - 1)]
    base = {"tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 0}
    return {**base, "eos_token_id": 0, **changes}


def test_qwen2_equals_the_definition(tmp_path: Path) -> None:
    path = tiny(tmp_path, "qwen2", **byte_vocab())
    tokenizer = load_tokenizer(path)
    reference = ReferenceBPE(GGUFFile(path).metadata, QWEN2, digits=False, nfc=True)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    own = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    ours = tokenizer._tokenizer.backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == own.pre_tokenize_str(text)


def test_digit_rules_differ(tmp_path: Path) -> None:
    """smollm and qwen2 split "123" into digits; Llama 3 keeps up to three together."""
    split = {}
    for pre in ("smollm", "qwen2", "llama-bpe"):
        tokenizer = load_tokenizer(tiny(tmp_path, pre, **byte_vocab(add_bos_token=False)))
        split[pre] = [tokenizer.decode([i]) for i in tokenizer.encode("1234 12")]
    assert split["smollm"] == split["qwen2"] == ["1", "2", "3", "4", " ", "1", "2"]
    assert split["llama-bpe"] == ["123", "4", " ", "12"]


def test_bos(tmp_path: Path) -> None:
    """As the file says; where it does not, Llama 3 begins with bos."""
    for pre, says, expected in (
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        changes = {} if says is None else {"add_bos_token": says}
        tokenizer = load_tokenizer(tiny(tmp_path, pre, **byte_vocab(**changes)))
        assert (tokenizer.encode("a")[0] == 0) == expected
        assert tokenizer.encode("a", add_special_tokens=False)[0] != 0


def test_token_types(tmp_path: Path) -> None:
    """Control and user-defined tokens are matched whole; only control tokens are skipped."""
    tokenizer = load_tokenizer(tiny(tmp_path))
    ids = tokenizer.encode("abc<|call|>12<|end|>")
    assert [TOKENS[i] for i in ids] == ["abc", "<|call|>", "1", "2", "<|end|>"]
    assert tokenizer.decode(ids) == "abc<|call|>12"
    assert tokenizer.vocab_size == len(TOKENS)


def test_end_of_turn_ends_the_text_too(tmp_path: Path) -> None:
    assert load_tokenizer(tiny(tmp_path, eot_token_id=2)).eos_token_ids == (0, 2)


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t.gguf has none"):
        load_tokenizer(tiny(tmp_path)).render_chat([{"role": "user", "content": "a"}])


def test_a_template_that_refuses(tmp_path: Path) -> None:
    for template in ("{{ raise_exception('no system turn') }}", "{% for %}"):
        path = tiny(tmp_path, **{"chat_template": None})
        path = write_gguf(path, tiny_model("llama"), metadata={"tokenizer.chat_template": template})
        with pytest.raises(ValueError, match=r"chat template of .*t.gguf: "):
            load_tokenizer(path).render_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, r"unknown pre-tokenizer 'tekken' .*smollm, qwen2"),
        ({"pre": None}, r"unknown pre-tokenizer None"),
        ({"model": "llama"}, r"tokenizer model 'llama' is not supported"),
        ({"model": None}, r"tokenizer model None is not supported"),
        ({"tokens": None}, r"tokenizer.ggml.tokens: a list of str expected"),
        ({"merges": None}, r"tokenizer.ggml.merges: a list of str expected"),
        ({"merges": ["a b", "zz q"]}, r"the merges do not fit the tokens"),
        ({"merges": ["a b c"]}, r"the merges do not fit the tokens"),
        ({"merges": ["a"]}, r"the merges do not fit the tokens"),
        ({"token_type": TYPES[:-1]}, r"different tokens, each with its type, expected"),
        ({"tokens": [*TOKENS[:-1], "a"]}, r"different tokens, each with its type, expected"),
        ({"eos_token_id": 999}, r"eos_token_id must be in \[0, 27\), got 999"),
    ],
)
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tiny(tmp_path, **changes))
    assert "t.gguf" in str(error.value)


# Folders.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, as transformers saves it."""
    vocab = {"<|end|>": 0} | {c: i + 1 for i, c in enumerate(byte_characters().values())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}<|end|>",
    )
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    return tmp_path


def test_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "Héllo , 12 !"  # clean-up of spaces would change it
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == (5, 0)
    assert tokenizer.bos_token_id is None
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "a<|end|>"


def test_generation_config_goes_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert load_tokenizer(folder).eos_token_ids == (7, 0)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_damaged_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"^tokenizer of "):
        load_tokenizer(folder)


def test_remote_code_is_not_run(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    fields = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"^tokenizer of "):
        load_tokenizer(folder)

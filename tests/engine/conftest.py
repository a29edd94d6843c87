"""A tiny random Llama with a byte-level tokenizer, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastinfer import LLM

SPECIAL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, two special tokens, a few merges; beyond ASCII a character is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the quick brown fox jumps over the lazy dog and then the other one again"] * 20
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """The folder of a random Llama of two layers; its greedy texts are varied, not loops."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder) -> LlamaForCausalLM:
    """The same model in transformers."""
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def shared_llm(tiny_folder) -> LLM:
    return LLM(tiny_folder, kv_cache_memory_bytes=1 << 22)


@pytest.fixture
def llm(shared_llm) -> LLM:
    """An idle engine; the test must leave it idle, with every block given back."""
    assert not shared_llm.has_unfinished
    yield shared_llm
    assert not shared_llm.has_unfinished
    shared_llm.blocks.check_integrity()
    assert shared_llm.blocks.num_used == 0 and shared_llm.blocks.num_sequences == 0

"""Tools of the model tests: tiny checkpoints, float64 models, and runs through paged KV."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastinfer.models import Batch, Decoder, ModelConfig

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


GPT2 = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_inner": 83,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, TINY),
    "mistral": (transformers.MistralConfig, {**TINY, "sliding_window": 7}),
    "qwen2": (transformers.Qwen2Config, TINY),
    "qwen3": (transformers.Qwen3Config, TINY),
    "phi3": (
        transformers.Phi3Config,
        {**{k: v for k, v in TINY.items() if k != "head_dim"}, "pad_token_id": 0},
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {
            **TINY,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gpt2": (transformers.GPT2Config, GPT2),
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """A random transformers model in fp32, whose every parameter matters to its result."""
    config_class, settings = CONFIGS[kind]
    config = config_class(**{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if name.endswith("weight") and ("norm" in name or "ln_" in name):
                parameter.add_(1.0)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2)
    return model


def save(model: Any, path: Path, **options: Any) -> Path:
    """Saves a model as a folder; returns the folder."""
    model.save_pretrained(path, **options)
    return path


@torch.no_grad()
def float64_logits(weights: dict[str, Tensor], config: ModelConfig, ids: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of the model in float64, from the formulas."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    # Models were trained with fp32 frequencies, so these are what the formula means.
    exponents = torch.arange(0, dim, 2).float() / dim
    frequencies = (1.0 / (config.rope_theta**exponents)).double()
    angles = torch.arange(len(ids)).double()[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        y = norm(x, w[p + "input_layernorm.weight"])
        q = rotate(linear(y, p + "self_attn.q_proj").view(-1, heads, dim))
        k = rotate(linear(y, p + "self_attn.k_proj").view(-1, kv_heads, dim))
        v = linear(y, p + "self_attn.v_proj").view(-1, kv_heads, dim)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
        weights_ = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights_, v).flatten(1)
        x = x + linear(attended, p + "self_attn.o_proj")
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        y = F.silu(linear(y, p + "mlp.gate_proj")) * linear(y, p + "mlp.up_proj")
        x = x + linear(y, p + "mlp.down_proj")
    x = norm(x, w["model.norm.weight"])
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(x, head)


class _InFloat64(TorchFunctionMode):
    """What a model computes in fp32 whatever its own type, such as norms, is float64 instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(widened, args), **named)


@torch.no_grad()
def transformers_float64_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of a transformers model, every step of it in float64."""
    double = copy.deepcopy(model).double()
    with _InFloat64():
        logits: Tensor = double(torch.tensor([ids])).logits[0]
    return logits


@torch.no_grad()
def transformers_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of a transformers model as it is."""
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


class PagedRun:
    """Sequences in scattered pages of a pool of NaN; unused block-table entries are absurd.

    Args:
        decoder: the model.
        lengths: how long each sequence may become.
        block_size: tokens of a page.
    """

    def __init__(self, decoder: Decoder, lengths: Sequence[int], block_size: int = 8) -> None:
        config, dtype = decoder.config, decoder.embed_tokens.dtype
        self._decoder = decoder
        self._block_size = block_size
        blocks = [-(-n // block_size) for n in lengths]
        pool = sum(blocks) + 3
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(pool)).tolist()
        self._tables = [[order.pop() for _ in range(n)] for n in blocks]
        shape = (pool, config.num_kv_heads, block_size, config.head_dim)
        self._caches = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(config.num_layers)
        ]

    @torch.inference_mode()
    def step(self, pieces: dict[int, tuple[int, Sequence[int]]]) -> dict[int, Tensor]:
        """Runs one ragged batch.

        Args:
            pieces: for each sequence in it, where its tokens begin, and the tokens.

        Returns:
            The logits [tokens, vocab] of each.
        """
        size = self._block_size
        places = [(i, start + n) for i, (start, ids) in pieces.items() for n in range(len(ids))]
        counts = torch.tensor([len(ids) for _, ids in pieces.values()])
        ends = [start + len(ids) for start, ids in pieces.values()]
        table = torch.full((len(pieces), max(map(len, self._tables))), -(2**31)).int()
        for row, i in enumerate(pieces):
            table[row, : len(self._tables[i])] = torch.tensor(self._tables[i])
        batch = Batch(
            input_ids=torch.tensor([token for _, ids in pieces.values() for token in ids]),
            positions=torch.tensor([t for _, t in places]),
            slot_mapping=torch.tensor(
                [self._tables[i][t // size] * size + t % size for i, t in places]
            ),
            block_table=table,
            cu_seqlens_q=F.pad(counts.cumsum(0), (1, 0)).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            logits_indices=torch.arange(len(places)),
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=max(ends),
        )
        hidden = self._decoder(batch, self._caches)[batch.logits_indices]
        logits = self._decoder.compute_logits(hidden).split(counts.tolist())
        return dict(zip(pieces, logits, strict=True))


def paged_logits(
    decoder: Decoder, prompts: Sequence[Sequence[int]], chunk: int, block_size: int = 8
) -> list[Tensor]:
    """Logits [T, vocab] of each prompt, all run as one ragged batch, ``chunk`` tokens a step."""
    run = PagedRun(decoder, [len(p) for p in prompts], block_size)
    out: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = {i: (start, p[start : start + chunk]) for i, p in enumerate(prompts) if p[start:]}
        for i, rows in run.step(live).items():
            out[i].append(rows)
    return [torch.cat(rows) for rows in out]


def paged_greedy(
    decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, chunk: int
) -> list[list[int]]:
    """The ``count`` likeliest tokens after each prompt; some sequences decode while others prefill.

    Prompts are taken in ``chunk`` tokens a step, so longer ones start to decode later.
    """
    run = PagedRun(decoder, [len(p) + count for p in prompts])
    texts = [list(p) for p in prompts]
    done = [0] * len(prompts)
    while any(len(t) < len(p) + count for t, p in zip(texts, prompts, strict=True)):
        live = {
            i: (done[i], text[done[i] : done[i] + chunk])
            for i, text in enumerate(texts)
            if len(text) < len(prompts[i]) + count
        }
        for i, logits in run.step(live).items():
            done[i] += len(logits)
            if done[i] == len(texts[i]):
                texts[i].append(int(logits[-1].argmax()))
    return [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]


def transformers_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The same from transformers' `generate`."""
    config = transformers.GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=10**6,  # never
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens

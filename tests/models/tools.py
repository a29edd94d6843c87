"""Tools of the model tests: tiny checkpoints, a float64 model, and runs through paged KV."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

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


def tiny_model(kind: str, **changes: Any) -> Any:
    """A random transformers model in fp32, whose every parameter matters to its result."""
    config_class = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
    config = config_class(**{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if "norm" in name:
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


@torch.inference_mode()
def paged_logits(
    decoder: Decoder, prompts: Sequence[Sequence[int]], chunk: int, block_size: int = 8
) -> list[Tensor]:
    """Logits [T, vocab] of each prompt, all run as one ragged batch, ``chunk`` tokens a step each.

    The pages lie scattered in a pool of NaN; unused entries of the block table are absurd.
    """
    config = decoder.config
    dtype = decoder.norm.dtype
    blocks = [-(-len(p) // block_size) for p in prompts]
    pool = sum(blocks) + 3
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(pool)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in blocks]
    shape = (pool, config.num_kv_heads, block_size, config.head_dim)
    caches = [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in range(config.num_layers)
    ]
    out: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, p in enumerate(prompts) if start < len(p)]
        ends = [min(start + chunk, len(prompts[i])) for i in live]
        places = [(i, t) for i, end in zip(live, ends, strict=True) for t in range(start, end)]
        counts = torch.tensor([end - start for end in ends])
        table = torch.full((len(live), max(blocks)), -(2**31), dtype=torch.int32)
        for row, i in enumerate(live):
            table[row, : blocks[i]] = torch.tensor(tables[i])
        batch = Batch(
            input_ids=torch.tensor([prompts[i][t] for i, t in places]),
            positions=torch.tensor([t for _, t in places]),
            slot_mapping=torch.tensor(
                [tables[i][t // block_size] * block_size + t % block_size for i, t in places]
            ),
            block_table=table,
            cu_seqlens_q=F.pad(counts.cumsum(0), (1, 0)).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            logits_indices=torch.arange(len(places)),
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=max(ends),
        )
        logits = decoder.compute_logits(decoder(batch, caches)[batch.logits_indices])
        for i, rows in zip(live, logits.split(counts.tolist()), strict=True):
            out[i].append(rows)
    return [torch.cat(rows) for rows in out]

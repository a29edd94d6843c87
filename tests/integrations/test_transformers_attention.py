"""`attn_implementation="fastinfer"` against transformers' own attention."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from fastinfer.integrations.transformers import attention, make_mask
from tests.helpers import assert_accurate
from tests.integrations.tools import (
    FAMILIES,
    GENERATION,
    assert_same_logits,
    count_calls,
    float64_logits,
    forbid_torchs_attention,
    generated,
    left_padding,
    logits,
    token_ids,
)
from tests.models.tools import CONFIGS, TINY, _InFloat64, tiny_model

by_family = pytest.mark.parametrize("family", FAMILIES)

# What else the formula has: softcap and windows, and sinks.
OTHERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "gemma2": (transformers.Gemma2Config, {**TINY, "sliding_window": 6}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {**TINY, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def both(family: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Any]:
    """A model with fastinfer's attention, where torch's is forbidden, and the untouched one."""
    for name, config in OTHERS.items():
        monkeypatch.setitem(CONFIGS, name, config)
    plain = tiny_model(family, **changes)
    plain.set_attn_implementation("eager")
    if family == "gpt_oss":
        plain.set_experts_implementation("eager")  # the others have no float64
    model = copy.deepcopy(plain)
    model.set_attn_implementation("fastinfer")
    forbid_torchs_attention(monkeypatch)
    return model, plain


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(family, monkeypatch)
    ids = token_ids()
    assert_same_logits(model, plain, ids)
    mask = left_padding(ids)
    assert_same_logits(model, plain, ids, mask, attention_mask=mask)
    assert_same_logits(model, plain, ids, mask.flip(1), attention_mask=mask.flip(1))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_logits_in_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = (m.bfloat16() for m in both(family, monkeypatch))
    ids = token_ids()
    mask = left_padding(ids)
    assert_same_logits(model, plain, ids, mask, attention_mask=mask)


@by_family
@pytest.mark.parametrize("kind", GENERATION)
def test_generation(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(family, monkeypatch)
    ids = token_ids()
    mask = left_padding(ids)
    expected = generated(plain, ids, mask, **GENERATION[kind])
    assert torch.equal(generated(model, ids, mask, **GENERATION[kind]), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_packed_sequences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(family, monkeypatch)
    ids = token_ids(2, 20)
    positions = torch.stack(
        (torch.cat((torch.arange(7), torch.arange(13))), torch.cat([torch.arange(10)] * 2))
    )
    packed = {"position_ids": positions, "use_cache": False}
    calls = count_calls(monkeypatch, "flash_attention_varlen")
    assert_same_logits(model, plain, ids, **packed)
    assert calls["flash_attention_varlen"] == model.config.num_hidden_layers
    alone = logits(model, ids[:1, 7:], use_cache=False)
    expected = float64_logits(plain, ids[:1, 7:], use_cache=False)
    assert_accurate(logits(model, ids, **packed)[:1, 7:], expected, alone)


def test_sequences_between_given_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both("llama", monkeypatch)
    ids = token_ids(1, 12)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    expected = float64_logits(plain, ids, position_ids=positions, use_cache=False)
    before = logits(plain, ids, position_ids=positions, use_cache=False)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "use_cache": False}
    # Rotary embedding looks at distances, so positions that go on are as good.
    assert_accurate(logits(model, ids, **given), expected, before)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_in_pieces(family: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(family, monkeypatch)
    ids = token_ids()
    mask = left_padding(ids) if padded else torch.ones_like(ids)
    expected = float64_logits(plain, ids, attention_mask=mask)
    before = logits(plain, ids, attention_mask=mask)
    cache = transformers.DynamicCache(config=model.config)
    for start, end in ((0, 8), (8, 15), (15, 16), (16, 19)):
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
        rows = mask[:, start:end].bool()
        piece = slice(start, end)
        assert_accurate(out.logits[rows], expected[:, piece][rows], before[:, piece][rows])


def without_torch_forbidden(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Any]:
    models = both("llama", monkeypatch, **changes)
    monkeypatch.undo()
    return models


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask,
        lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
    ],
    ids=["bool", "float"],
)
def test_masks_of_ones_own(change: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    model, plain = without_torch_forbidden(monkeypatch)
    ids = token_ids(2, 9)
    mask = (torch.rand(2, 1, 9, 9) < 0.5) | torch.eye(9).bool()
    float_mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = float64_logits(plain, ids, attention_mask=float_mask)
    before = logits(plain, ids, attention_mask=float_mask)
    assert_accurate(logits(model, ids, attention_mask=change(mask)), expected, before)


def test_padding_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = without_torch_forbidden(monkeypatch)
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 3:5] = 0
    assert_same_logits(model, plain, ids, mask, attention_mask=mask)


def test_an_overlay_is_not_taken_for_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = without_torch_forbidden(monkeypatch)
    embeds = torch.zeros(2, 6, 48)

    def mask(implementation: str, **overlay: Any) -> Any:
        config = copy.deepcopy(model.config)
        config._attn_implementation = implementation
        return transformers.masking_utils.create_causal_mask(
            config, embeds, None, None, None, **overlay
        )

    def even(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key % 2 == 0

    assert mask("fastinfer") is None
    for overlay in ({"and_mask_function": even}, {"or_mask_function": even}):
        assert torch.equal(mask("fastinfer", **overlay), mask("sdpa", **overlay))
    wanted = mask("fastinfer", allow_is_causal_skip=False)
    assert torch.equal(wanted, mask("sdpa", allow_is_causal_skip=False))


NO_LEFT_PADDING = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.chunked_causal_mask_function(3, NO_LEFT_PADDING),
        masking_utils.sliding_window_overlay(2),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda batch, head, query, key: key % 2 == 0
        ),
        masking_utils.or_masks(
            masking_utils.causal_mask_function, lambda batch, head, query, key: key % 2 == 0
        ),
    ],
    ids=["bidirectional", "window around", "chunks", "window alone", "and", "or"],
)
def test_what_is_not_causal_alone_stays_a_mask(function: Any) -> None:
    size = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    for padding in (None, torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()):
        got = make_mask(**size, attention_mask=padding)
        expected = masking_utils.sdpa_mask(
            **size, attention_mask=padding, allow_is_causal_skip=False
        )
        assert got is not None and expected is not None and torch.equal(got, expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("rows", [1, 2])
def test_static_cache_without_padding(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = both(family, monkeypatch)
    ids = token_ids(rows, 10)
    options = {"cache_implementation": "static", "max_length": 30, "max_new_tokens": None}
    mask = torch.ones_like(ids)
    expected = generated(plain, ids, mask, **options)
    assert torch.equal(generated(model, ids, mask, **options), expected)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = without_torch_forbidden(monkeypatch)
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # padding would have to predict it
    exact = copy.deepcopy(plain).double()
    with _InFloat64():
        exact(ids, attention_mask=mask, labels=labels).loss.backward()
    for m in (model, plain):
        m(ids, attention_mask=mask, labels=labels).loss.backward()
    names = [name for name, _ in plain.named_parameters() if "proj" in name]
    for name in names:
        got, before, expected = (m.get_parameter(name).grad for m in (model, plain, exact))
        assert_accurate(got, expected, before, what=name)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attention_weights(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(family, monkeypatch)
    seen: list[dict[str, Any]] = []
    layer = model.model.layers[1].self_attn
    hook = layer.register_forward_pre_hook(
        lambda module, args, options: seen.append(options), with_kwargs=True
    )
    logits(model, token_ids(2, 9), use_cache=False)
    hook.remove()
    monkeypatch.undo()
    causal = torch.ones(9, 9).tril()[None, None].log()
    with torch.no_grad():
        out, weights = layer(**{**seen[0], "attention_mask": None}, output_attentions=True)
        expected, wanted = plain.model.layers[1].self_attn(**{**seen[0], "attention_mask": causal})
    torch.testing.assert_close(weights, wanted)
    torch.testing.assert_close(out, expected)


def test_dropout_is_not_left_out() -> None:
    layer = nn.Module().train()
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    kept, _ = attention(layer, q, k, v, None, dropout=0.0)
    dropped, _ = attention(layer, q, k, v, None, dropout=0.5)
    assert not torch.allclose(kept, dropped)
    sinks, _ = attention(layer, q, k, v, None, dropout=0.5, s_aux=torch.full((2,), -torch.inf))
    assert not torch.allclose(kept, sinks)


def test_what_is_no_mask_is_refused() -> None:
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    for mask in (torch.ones(2, 5).bool(), torch.ones(2, 1, 5, 6).int()):
        with pytest.raises(ValueError, match="attention_mask: expected None"):
            attention(nn.Module(), q, k, v, mask)


def test_bounds_of_several_rows_are_refused() -> None:
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    bounds = torch.tensor([0, 5, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected sequences packed into one row, got 2 rows"):
        attention(nn.Module(), q, k, v, None, cu_seq_lens_q=bounds)


@pytest.mark.parametrize("shape", [(1, 600), (2, 8)], ids=["head size", "float64"])
def test_what_the_ops_do_not_take_is_torchs(shape: tuple[int, int]) -> None:
    heads, size = shape
    dtype = torch.float32 if size > 512 else torch.float64
    q, k, v = (torch.randn(1, heads, 5, size, dtype=dtype) for _ in range(3))
    out, _ = attention(nn.Module(), q, k, v, None, softcap=0.0)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("padded", [False, True])
def test_compiles_as_one_graph(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = without_torch_forbidden(monkeypatch, num_hidden_layers=1)
    ids = token_ids(2, 9)
    mask = left_padding(ids) if padded else torch.ones_like(ids)
    inputs = {"attention_mask": mask} if padded else {}
    calls = count_calls(monkeypatch, "flash_attention")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, **inputs).logits
    assert bool(calls["flash_attention"]) is not padded
    expected, before = float64_logits(plain, ids, **inputs), logits(plain, ids, **inputs)
    assert_accurate(got[mask.bool()], expected[mask.bool()], before[mask.bool()])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_autocast(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    model.set_attn_implementation("fastinfer")
    ids = token_ids()
    mask = left_padding(ids)
    exact = float64_logits(plain, ids, attention_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(plain, ids, attention_mask=mask)
        forbid_torchs_attention(monkeypatch)
        after = logits(model, ids, attention_mask=mask)
    rows = mask.bool()
    assert_accurate(after[rows], exact[rows], before[rows], what="logits")


def test_fastinfer_does_not_import_transformers() -> None:
    code = "import sys, fastinfer.nn, fastinfer.ops; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

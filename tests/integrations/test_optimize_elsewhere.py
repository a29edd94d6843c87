"""`fastinfer.optimize` on models and modules that it was not made for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fastinfer
from fastinfer.integrations.report import Report
from fastinfer.nn import SwiGLU
from tests.helpers import assert_bit_equal
from tests.integrations.tools import logits, token_ids
from tests.models.tools import TINY, tiny_model


def reasons(report: Report, kind: str) -> set[str]:
    """Why modules of this class were left."""
    return {x.reason for x in report.left if x.kind == kind}


class GatedNorm(nn.Module):
    """A norm as Mamba's, which may be given a gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """The norm of x, times the gate's activation."""
        y = x if gate is None else x * F.silu(gate)
        return F.rms_norm(y, y.shape[-1:], self.weight, self.eps)


class IndexedMLP(nn.Module):
    """A gated MLP as Zamba's, which may be told the layer."""

    def __init__(self, hidden: int = 8, between: int = 12) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, between, False) for _ in range(2))
        self.down_proj = nn.Linear(between, hidden, False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, layer: int | None = None) -> Tensor:
        """y of x, other for each layer."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * (1 + (layer or 0))


class PlainMLP(IndexedMLP):
    """One that is what its weights say."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """y of x."""
        return super().forward(x)


def test_modules_with_further_inputs_are_left() -> None:
    model = nn.ModuleDict({"norm": GatedNorm(8), "mlp": IndexedMLP()})
    report = fastinfer.optimize(model)
    assert not report.swapped
    reason = "takes more than one input"
    assert {(x.path, x.reason) for x in report.left} == {("norm", reason), ("mlp", reason)}


def test_modules_that_fail_are_left() -> None:
    class MLP(IndexedMLP):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return {"known": x}["unknown"]

    report = fastinfer.optimize(nn.Sequential(MLP()))
    assert not report.swapped
    assert "'unknown'" in reasons(report, "MLP").pop()


@pytest.mark.parametrize("clip", [None, 8.0])
def test_clipped_projections_are_not_lost(clip: float | None) -> None:
    settings = {k: v for k, v in TINY.items() if k not in ("head_dim", "rms_norm_eps")}
    config = transformers.OlmoConfig(**settings, clip_qkv=clip, pad_token_id=0)
    plain = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model = copy.deepcopy(plain)
    report = fastinfer.optimize(model)
    assert reasons(report, "OlmoAttention") == (set() if clip is None else {"clips projections"})
    state = {k: v * 300.0 if "v_proj" in k else v for k, v in plain.state_dict().items()}
    for each in (model, plain):
        each.load_state_dict(state)  # now values are clipped
    ids = token_ids()
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_restored_linears_have_the_dtype_that_the_model_has(family: str) -> None:
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    fastinfer.optimize(model, quantization="int8")
    model.bfloat16()
    fastinfer.restore(model)
    expected = plain.bfloat16().state_dict()
    for name, tensor in model.state_dict().items():
        assert_bit_equal(tensor, expected[name], name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_part_and_then_the_whole_is_refused(family: str) -> None:
    model = tiny_model(family)
    ids = token_ids()
    expected = logits(model, ids)
    fastinfer.optimize(model.base_model)
    with pytest.raises(ValueError, match=f"got one whose part '{model.base_model_prefix}' is"):
        fastinfer.optimize(model)
    fastinfer.restore(model.base_model)
    fastinfer.optimize(model)
    fastinfer.restore(model)
    assert_bit_equal(logits(model, ids), expected)


def replace_forward(module: Any) -> None:
    """As packages do that move inputs to a layer's device."""
    before = module.forward
    module.forward = lambda *args, **options: before(*args, **options) * 1.0


def hook(module: Any) -> None:
    """The usual way."""
    module.register_forward_hook(lambda module, args, y: y * 1.0)


@pytest.mark.parametrize("change", [replace_forward, hook])
@pytest.mark.parametrize("name", ["norm", "layers.0.mlp", "layers.0.mlp.gate_proj",
                                  "layers.0.self_attn.k_proj"])  # fmt: skip
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_hooks_stay(change: Callable[[Any], None], name: str, quantization: str | None) -> None:
    model = tiny_model("llama")
    module = model.model.get_submodule(name)
    change(module)
    fastinfer.optimize(model, quantization=quantization)
    assert model.model.get_submodule(name) is module


def test_a_parametrised_projection_stays() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    nn.utils.parametrizations.weight_norm(attention.k_proj)
    names = set(model.state_dict())
    report = fastinfer.optimize(model, quantization="int8")
    left = {x.path for x in report.left}
    assert {"model.layers.1.self_attn", "model.layers.1.self_attn.k_proj"} & left
    assert model.model.layers[1].self_attn is attention
    assert {n for n in names if "parametrizations" in n} <= set(model.state_dict())


def test_frozen_projections_stay_frozen() -> None:
    model = nn.Sequential(PlainMLP(), PlainMLP().requires_grad_(False))
    model[0].up_proj.requires_grad_(False)
    report = fastinfer.optimize(model)
    assert {x.path for x in report.swapped} == {"1"}
    assert {x.reason for x in report.left} == {"has projections of which only some are trained"}
    assert not any(p.requires_grad for p in model[1].parameters())


def test_restore_keeps_what_was_frozen_in_between() -> None:
    model = tiny_model("llama")
    fastinfer.optimize(model)
    model.requires_grad_(False)
    fastinfer.restore(model)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("function", [False, True])
def test_dropout_is_not_left_out(function: bool) -> None:
    class MLP(IndexedMLP):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.residual_dropout = p if function else 0.0  # as in Seed-OSS
            self.dropout = nn.Dropout(0.0 if function else p)

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            y = self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
            return F.dropout(y, self.residual_dropout, self.training)

    report = fastinfer.optimize(nn.Sequential(MLP(0.0), MLP(0.5)))
    assert [x.path for x in report.swapped] == ["0"]
    assert reasons(report, "MLP") == {"has dropout"}


def test_skip_is_no_string() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="skip: expected names, got one string 'lm_head'"):
        fastinfer.optimize(model, quantization="int8", skip="lm_head")
    fastinfer.optimize(model)


def test_a_module_in_two_places_stays_one() -> None:
    mlp = PlainMLP()
    model = nn.ModuleDict({"a": nn.Sequential(mlp), "b": nn.Sequential(mlp)})
    fastinfer.optimize(model)
    assert isinstance(model["a"][0], SwiGLU) and model["b"][0] is model["a"][0]
    fastinfer.restore(model)
    assert model["a"][0] is mlp and model["b"][0] is mlp


def test_weights_that_others_use_too_stay_tied() -> None:
    model = nn.Sequential(PlainMLP(), PlainMLP())
    model[1].up_proj.weight = model[0].up_proj.weight
    report = fastinfer.optimize(model)
    assert not report.swapped
    assert reasons(report, "PlainMLP") == {"its weights are another module's, too"}


def test_outputs_of_layers_before_and_after() -> None:
    model, ids = tiny_model("llama"), token_ids()
    model.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        before = model(ids, **wanted)
        report = fastinfer.optimize(model)
        between = model(ids, **wanted)
        fastinfer.restore(model)
        after = model(ids, **wanted)
    assert not report.left
    assert len(between.hidden_states) == len(before.hidden_states)
    for a, b in zip(after.hidden_states, before.hidden_states, strict=True):
        assert_bit_equal(a, b)
    for a, b in zip(after.attentions, before.attentions, strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize(("family", "name"), [("phi3", "qkv_proj"), ("qwen3", "q_norm")])
def test_what_hooks_have_seen_stays(family: str, name: str) -> None:
    model = tiny_model(family)
    fastinfer.optimize(model)
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, y: Tensor) -> None:
        seen.extend((y, y.clone()))

    model.model.layers[1].self_attn.get_submodule(name).register_forward_hook(keep)
    logits(model, token_ids())
    assert_bit_equal(seen[0], seen[1])


def test_attention_without_positions() -> None:
    config = transformers.GraniteMoeHybridConfig(
        **TINY, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=40,
        layer_types=["attention"] * 3, mamba_n_heads=6, position_embedding_type=None,
        pad_token_id=0,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model = copy.deepcopy(plain)
    fastinfer.optimize(model)
    ids = token_ids()
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))

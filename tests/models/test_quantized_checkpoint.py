"""Checkpoints that others quantized: they compute what their dequantized weights compute, and what
is wrong with one is said before it is read.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastinfer.models import Decoder, load
from fastinfer.models.linear import Linear
from fastinfer.models.quantized_checkpoint import quantized_format
from fastinfer.nn import LowBitLinear
from fastinfer.ops.packed_weights import PackedWeight
from tests.helpers import assert_accurate
from tests.models.quantized_tools import (
    Pack,
    Tensors,
    awq,
    awq_gemv,
    compressed,
    compressed_config,
    gptq,
    is_projection,
    quantized,
    save_quantized,
)
from tests.models.test_decoder import PROMPTS
from tests.models.tools import (
    paged_greedy,
    paged_logits,
    save,
    tiny_model,
    transformers_float64_logits,
    transformers_logits,
)
from tests.reference.checkpoints import Matrix

# 64 and 96 inputs: a group of 64 leaves a partial one.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 24,
}


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        **more,
    }


def awq_config(group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **more,
    }


# Per case: the config, the format, whether it is symmetric, whether columns are ordered.
CASES: dict[str, tuple[dict[str, Any], Pack, bool, bool]] = {
    **{
        f"gptq-{bits}": (gptq_config(bits, 32, sym=False), gptq(), False, False)
        for bits in (2, 3, 4, 8)
    },
    "gptq-sym": (gptq_config(4, 64), gptq(), True, False),
    "gptq-row": (gptq_config(4, -1), gptq(), True, False),
    "gptq-act-order": (gptq_config(4, 16, desc_act=True), gptq(), True, True),
    "gptq-3-act-order": (gptq_config(3, 32, desc_act=True, sym=False), gptq(), False, True),
    "gptq-v2": (
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), gptq("gptq_v2"), False, False,
    ),
    "gptq-v2-sym": (
        gptq_config(8, 32, checkpoint_format="gptq_v2"), gptq("gptq_v2"), True, False,
    ),
    "awq-gemm": (awq_config(32), awq, False, False),
    "awq-gemm-row": (awq_config(-1), awq, False, False),
    "awq-gemm-sym": (awq_config(16, zero_point=False), awq, True, False),
    "awq-gemv": (awq_config(32, version="GEMV"), awq_gemv, False, False),
    "compressed-group": (
        compressed_config(4, 32, True), compressed(symmetric=True, act_order=False), True, False,
    ),
    "compressed-channel": (
        compressed_config(8, -1, True), compressed(symmetric=True, act_order=False), True, False,
    ),
    "compressed-zeros": (
        compressed_config(4, 64, False), compressed(symmetric=False, act_order=False), False, False,
    ),
    "compressed-3": (
        compressed_config(3, 32, False), compressed(symmetric=False, act_order=False), False, False,
    ),
    "compressed-2-by-group": (
        compressed_config(2, 16, True, "group"), compressed(symmetric=True, act_order=True),
        True, True,
    ),
    "compressed-by-weight": (
        compressed_config(4, 32, True, "weight"), compressed(symmetric=True, act_order=False),
        True, False,
    ),
    "compressed-by-group": (
        compressed_config(4, 32, False, "group"), compressed(symmetric=False, act_order=True),
        False, True,
    ),
    "compressed-by-group-8": (
        compressed_config(8, 32, True, actorder=True), compressed(symmetric=True, act_order=True),
        True, True,
    ),
}  # fmt: skip


def options_of(config: dict[str, Any]) -> tuple[int, int]:
    if "bits" in config:
        return config["bits"], config["group_size"]
    weights = config["config_groups"]["group_0"]["weights"]
    return weights["num_bits"], weights["group_size"] or -1


def written(
    path: Path, case: str, kind: str = "llama", *, order: Callable[[str], int] | None = None,
    changes: dict[str, Any] | None = None, **options: Any,
) -> tuple[Any, Path]:  # fmt: skip
    """The model with the weights of the folder, and the folder."""
    config, pack, symmetric, ordered = CASES[case]
    bits, group_size = options_of(config)
    hf = tiny_model(kind, **{**SIZES, **(changes or {})})
    seed = order or (lambda name: 1)

    def quantize(name: str, weight: Tensor) -> Matrix:
        return quantized(
            weight, bits, group_size, symmetric=symmetric, order=seed(name) if ordered else None
        )

    config = {**config, **options.pop("config", {})}
    return hf, save_quantized(hf, path / case, config, quantize, pack, **options)


def assert_same_model(decoder: Decoder, hf: Any, multiple: float = 4.0) -> None:
    prompts = PROMPTS[1:]
    for ids, logits in zip(prompts, paged_logits(decoder, prompts, 7), strict=True):
        reference = transformers_float64_logits(hf.float(), ids)
        baseline = transformers_logits(hf.to(logits.dtype), ids)
        assert_accurate(logits, reference, baseline, multiple=multiple)


def projections(decoder: Decoder) -> list[Any]:
    """What the projections of layers have become."""
    layers = [decoder.layer(i) for i in range(decoder.config.num_layers)]
    return [m._packed for layer in layers for m in layer.children() if isinstance(m, Linear)]


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    hf, folder = written(tmp_path, case)
    decoder = load(folder).decoder
    layers = projections(decoder)
    assert [type(layer) for layer in layers] == [LowBitLinear] * 4 * 2  # q, k and v are one
    assert {layer.scales.dtype for layer in layers} == {torch.float16}  # as in the file
    assert not any(t.is_meta for t in (*decoder.buffers(), *decoder.parameters()))
    assert_same_model(decoder, hf)


@pytest.mark.parametrize("case", ["gptq-act-order", "awq-gemm", "compressed-zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    hf, folder = written(tmp_path, case)
    decoder = load(folder, dtype=dtype).decoder
    assert {layer.scales.dtype for layer in projections(decoder)} == {torch.float16}
    hf = hf.to(dtype).float()  # norms and embeddings
    reference = transformers_float64_logits(hf, PROMPTS[0])
    baseline = transformers_logits(hf.to(dtype), PROMPTS[0])
    assert_accurate(paged_logits(decoder, PROMPTS[:1], 7)[0], reference, baseline, multiple=2.0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("case", ["gptq-4", "awq-gemm", "compressed-group"])
def test_families(tmp_path: Path, case: str, kind: str) -> None:
    """With biases (qwen2), tied embeddings, and projections that are merged in the file (phi3)."""
    hf, folder = written(tmp_path, case, kind, changes={"tie_word_embeddings": kind == "qwen2"})
    decoder = load(folder).decoder
    assert_same_model(decoder, hf)
    plain = load(save(hf, tmp_path / "plain")).decoder
    assert paged_greedy(decoder, PROMPTS[1:], 8, 7) == paged_greedy(plain, PROMPTS[1:], 8, 7)


def test_transposed_projections(tmp_path: Path) -> None:
    """GPT-2's are plain [K, N]; quantized they are as in any other model."""
    hf = tiny_model("gpt2", n_embd=64, n_inner=96, n_head=4, n_layer=2)
    folder = save_quantized(
        hf, tmp_path / "model", gptq_config(4, 32, sym=False),
        lambda name, weight: quantized(weight.t(), 4, 32, symmetric=False), gptq(),
        wanted=lambda name: ".h." in name and ".c_" in name and name.endswith("weight"),
    )  # fmt: skip
    decoder = load(folder).decoder
    assert [type(layer) for layer in projections(decoder)] == [LowBitLinear] * 4 * 2
    assert_same_model(decoder, hf)


@pytest.mark.parametrize("case", ["gptq-4", "awq-gemm", "compressed-group"])
def test_projections_that_are_plain_in_the_file(tmp_path: Path, case: str) -> None:
    """Whole ones, a part of a merged one, and a whole layer."""

    def wanted(name: str) -> bool:
        plain = ("down_proj", "k_proj", "0.mlp.up_proj", "1.self_attn.q_proj", "1.mlp.gate_proj")
        return is_projection(name) and not any(part in name for part in plain)

    hf, folder = written(tmp_path, case, wanted=wanted)
    assert_same_model(load(folder).decoder, hf)


@pytest.mark.parametrize("case", ["gptq-4", "compressed-group"])
def test_output_projection(tmp_path: Path, case: str) -> None:
    hf, folder = written(
        tmp_path, case, wanted=lambda name: is_projection(name) or name == "lm_head.weight"
    )
    decoder = load(folder).decoder
    assert isinstance(decoder.lm_head._packed, LowBitLinear)
    assert_same_model(decoder, hf)


def test_parts_in_orders_of_their_own(tmp_path: Path) -> None:
    """No product reads its inputs in two orders: q is one, k and v are another."""
    hf, folder = written(
        tmp_path, "gptq-act-order", order=lambda name: 2 if "q_proj" in name else 1
    )
    decoder = load(folder).decoder
    pieces = projections(decoder)[0].pieces
    assert [piece.out_features for piece in pieces] == [96, 96]
    assert_same_model(decoder, hf)


def test_parts_of_other_bits(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`, which also says what is not quantized."""
    config = gptq_config(
        4, 32, sym=False, dynamic={"+:.*v_proj": {"bits": 8, "group_size": 16}, "-:.*o_proj": {}}
    )

    def quantize(name: str, weight: Tensor) -> Matrix | None:
        if "o_proj" in name:
            return None
        bits, group_size = (8, 16) if "v_proj" in name else (4, 32)
        return quantized(weight, bits, group_size, symmetric=False)

    hf = tiny_model("llama", **SIZES)
    folder = save_quantized(hf, tmp_path / "model", config, quantize, gptq())
    assert_same_model(load(folder).decoder, hf)


def test_groups_of_compressed_tensors(tmp_path: Path) -> None:
    """Projections named one by one, by a pattern, and all others."""
    config = compressed_config(4, 32, True)
    groups = config["config_groups"]
    name = "model.layers.0.self_attn.o_proj"
    for i, targets in enumerate((["re:.*down_proj$"], [name])):
        scheme = {**groups["group_0"]["weights"], "num_bits": 8, "group_size": 16 * (i + 1)}
        groups[f"group_{i + 1}"] = {"targets": targets, "weights": scheme}

    def quantize(weight_name: str, weight: Tensor) -> Matrix:
        eight = "down_proj" in weight_name
        bits, group_size = (8, 16) if eight else (8 if name in weight_name else 4, 32)
        return quantized(weight, bits, group_size, symmetric=True)

    hf = tiny_model("llama", **SIZES)
    pack = compressed(symmetric=True, act_order=False)
    folder = save_quantized(hf, tmp_path / "model", config, quantize, pack)
    assert_same_model(load(folder).decoder, hf)


def test_tensors_of_a_projection_in_two_files(tmp_path: Path) -> None:
    hf, folder = written(tmp_path, "gptq-act-order")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["a.safetensors" if name.endswith("qweight") else "b.safetensors"][name] = tensor
    for shard, held in shards.items():
        save_file(held, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_model(load(folder).decoder, hf)


@pytest.mark.parametrize("junk", [0, -1, 0x12345678])
def test_zero_points_of_symmetric_files_are_not_read(tmp_path: Path, junk: int) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor.fill_(junk)

    hf, folder = written(tmp_path, "gptq-sym", change=change)
    assert_same_model(load(folder).decoder, hf)


def test_biases_of_zeros_that_the_model_lacks(tmp_path: Path) -> None:
    def change(tensors: Tensors, value: float = 0.0) -> None:
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.full((96,), value)

    hf, folder = written(tmp_path, "gptq-4", change=change)
    assert_same_model(load(folder).decoder, hf)
    _, folder = written(tmp_path, "gptq-4", change=lambda tensors: change(tensors, 1.0))
    with pytest.raises(ValueError, match=r"up_proj.bias: the model has no such weight"):
        load(folder)


def test_g_idx_may_be_missing_or_unset(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [*tensors]:
            if name.endswith("up_proj.g_idx"):
                del tensors[name]
            elif name.endswith("g_idx"):
                tensors[name].zero_()

    hf, folder = written(tmp_path, "gptq-4", change=change)
    assert_same_model(load(folder).decoder, hf)


def test_a_label_that_the_zero_points_contradict(tmp_path: Path) -> None:
    config, _, _, _ = CASES["gptq-4"]
    hf = tiny_model("llama", **SIZES)
    folder = save_quantized(
        hf, tmp_path / "model", config,
        lambda name, weight: quantized(weight, 4, 32, symmetric=True), gptq("gptq_v2"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"_proj: qzeros: the checkpoint_format 'gptq' would"):
        load(folder)


def test_codes_need_no_plain_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weights, plain ones alone are allocated; layers are packed one after the other."""
    allocated: list[Linear] = []
    waiting: list[int] = []
    allocate, set_codes = Linear.allocate, Linear.set_codes

    def spy_on_allocate(linear: Linear) -> None:
        allocated.append(linear)
        allocate(linear)

    def spy_on_codes(linear: Linear, first: int, weight: PackedWeight) -> None:
        set_codes(linear, first, weight)
        layers = {id(place[0]): i for i in range(12) for place in places(i)}
        waiting.append(len({layers[id(m)] for m in decoders[0].modules() if codes(m)}))

    def places(i: int) -> list[tuple[Linear, int]]:
        return [*decoders[0].layer_projections(i).values()]

    def codes(module: nn.Module) -> bool:
        return isinstance(module, Linear) and bool(module._codes)

    decoders: list[Decoder] = []
    init = Decoder.__init__

    def spy_on_init(decoder: Decoder, *args: Any, **options: Any) -> None:
        decoders.append(decoder)
        init(decoder, *args, **options)

    monkeypatch.setattr(Decoder, "__init__", spy_on_init)
    monkeypatch.setattr(Linear, "allocate", spy_on_allocate)
    monkeypatch.setattr(Linear, "set_codes", spy_on_codes)
    _, folder = written(
        tmp_path, "gptq-4", wanted=lambda name: is_projection(name) and "o_proj" not in name,
        changes={"num_hidden_layers": 12, "intermediate_size": 32},
    )  # fmt: skip
    decoder = load(folder).decoder
    plain = [decoder.lm_head, *(decoder.layer(i).attention_out for i in range(12))]
    assert {*allocated} == {*plain}
    assert {*waiting} == {1}


def test_no_second_quantization(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "awq-gemm")
    with pytest.raises(ValueError, match=r"quantization='int4' is for plain .* already \(awq\)"):
        load(folder, quantization="int4")
    with pytest.raises(ValueError, match=r"dummy weights can only be rounded .* quantization="):
        load(folder, load_format="dummy")
    assert load(folder, load_format="dummy", quantization="int4").decoder.quantization == "int4"


Q = "model.layers.1.self_attn.q_proj."


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def shorten(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq-4", drop(Q + "scales"), Q + r"scales of shape \(2, 96\) is missing"),
        ("gptq-4", drop(Q + "qweight"), Q + r"qweight is missing"),
        ("gptq-4", drop(Q + "qzeros"), Q + r"qzeros of shape \(2, 12\) is missing"),
        ("gptq-act-order", drop(Q + "g_idx"), Q + r"g_idx of shape \(64,\) is missing"),
        ("gptq-4", shorten(Q + "scales"), Q + r"scales: shape \(2, 96\) expected, got \(1, 96\)"),
        ("gptq-3", lambda t: t.update({Q + "g_idx": torch.zeros(7, dtype=torch.int32)}),
         Q + r"g_idx: shape \(64,\) expected, got \(7,\)"),
        ("gptq-4", shorten(Q + "qweight"), Q + r"qweight: shape|" + Q + "g_idx: shape"),
        ("gptq-4", lambda t: t[Q + "g_idx"].fill_(1), Q[:-1] + r": .*g_idx: expected groups 0 "),
        ("gptq-4", lambda t: t.update({Q + "scales": t[Q + "scales"].int()}),
         Q + "scales: F16 or BF16 or F32 expected, got I32"),
        ("awq-gemm", drop(Q + "qzeros"), Q + r"qzeros of shape \(2, 12\) is missing"),
        ("awq-gemm", shorten(Q + "qweight"),
         Q + r"qweight: codes of a weight of shape \(96, 64\) expected, got those of \(96, 63\)"),
        ("awq-gemm", lambda t: t.update({Q + "qweight": torch.zeros(64).int()}),
         Q + r"qweight: a matrix expected, got shape \(64,\)"),
        ("compressed-group", drop(Q + "weight_shape"), Q + "weight_shape is missing"),
        ("compressed-group", shorten(Q + "weight_packed"),
         Q + r"weight_packed: shape \(96, 8\) expected, got \(95, 8\)"),
        ("compressed-by-group", drop(Q + "weight_g_idx"), Q + "weight_g_idx of shape"),
        ("compressed-zeros", drop(Q + "weight_zero_point"), Q + "weight_zero_point of shape"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(
    tmp_path: Path, case: str, change: Callable[[Tensors], object], message: str
) -> None:
    _, folder = written(tmp_path, case, change=change)
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_a_config_without_quantized_tensors(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "gptq-4", wanted=lambda name: False)
    with pytest.raises(ValueError, match=r"config.json says 'gptq', but there is no tensor .*\.qw"):
        load(folder)


COMPRESSED = compressed_config(4, 32, True)


def with_group(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return {**COMPRESSED, "config_groups": {"group_0": {**group, **changes}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (7, "must be an object, got 7"),
        ({}, None),
        ({"bits": 4}, "quant_method None is not supported; expected one of 'gptq', 'awq', 'comp"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; expected one of"),
        ({"quant_method": "fp8"}, "'fp8' is not supported"),
        ({"quant_method": ["gptq"]}, r"\['gptq'\] is not supported"),
        (gptq_config(5, 32), r"\(gptq\): bits = 5 is not supported; expected 2 or 3 or 4 or 8"),
        (gptq_config(4, 0), "group_size = 0 is not supported"),
        (gptq_config(4, 32, sym=1), "sym = 1 is not supported; expected True or False"),
        (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format = 'marlin' is not"),
        (gptq_config(4, 32, is_marlin_format=True), "checkpoint_format = 'marlin' is not"),
        (gptq_config(4, 32, pack_dtype="int16"), "pack_dtype = 'int16' is not"),
        (gptq_config(4, 32, dynamic={"a": {"bits": 6}}), "bits = 6 is not"),
        (awq_config(32, bits=8), r"\(awq\): bits = 8 is not supported; expected 4"),
        (awq_config(32, version="gemv_fast"), "version = 'gemv_fast' is not supported"),
        (awq_config(32, backend="llm-awq"), "backend = 'llm-awq' is not supported"),
        ({**COMPRESSED, "format": "int-quantized"}, r"format = 'int-quantized' is not supported"),
        ({**COMPRESSED, "config_groups": None}, "config_groups: an object expected, got None"),
        ({**COMPRESSED, "config_groups": {"a": 1}}, r"tensors\): a: an object expected"),
        (with_group(targets=["re:("]), r"no regular expression: '\('"),
        (gptq_config(4, 32, dynamic={"+:(": {}}), r"no regular expression: '\('"),
        (gptq_config(4, 32, dynamic={"+:a": 8}), r"dynamic: \+:a: an object expected, got 8"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .* is not supp"),
        (with_group(input_activations={"num_bits": 8}), "input_activations = .* is not supported"),
        (with_group(weights=None), "weights: an object expected"),
        *(
            (compressed_config(4, 32, True, **{key: value}), rf"{key} = {value!r} is not supported")
            for key, value in (
                ("num_bits", 6), ("type", "float"), ("strategy", "tensor"), ("actorder", "all"),
            )
        ),
    ],
)  # fmt: skip
def test_configs(config: Any, message: str | None) -> None:
    if message is None:
        assert quantized_format({"quantization_config": config}) is None
        return
    with pytest.raises(ValueError, match=message):
        quantized_format({"quantization_config": config})


def test_unsupported_methods_are_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "awq-gemm", config={"quant_method": "eetq"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"quant_method 'eetq' is not supported") as raised:
        load(folder)
    assert re.search(re.escape(str(folder / "config.json")), str(raised.value))


def test_groups_of_a_size_that_no_product_has(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "awq-gemm", config={"group_size": 48})
    with pytest.raises(ValueError, match=r"_proj: group_size 48 is not supported; expected one of"):
        load(folder)

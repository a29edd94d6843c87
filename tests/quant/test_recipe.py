"""Recipes: which scheme a projection has, and what is refused by name."""

import json
from typing import Any

import pytest

from fastinfer.quant import Recipe, Scheme

NAMES = [f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q_proj", "mlp.down_proj")]


def test_first_pattern_holds_and_null_is_plain() -> None:
    plain, eight = None, Scheme(method="rtn", bits=8)
    overrides = {"model.layers.0.mlp.down_proj": plain, "*.down_proj": eight}
    recipe = Recipe(Scheme(bits=3, group_size=64), overrides)
    recipe.check_names(NAMES)
    assert [recipe.scheme(name) for name in NAMES] == [recipe.default, None, recipe.default, eight]
    assert recipe.scheme("MODEL.DOWN_PROJ") == recipe.default  # case matters


def test_json_round_trip_and_partial_overrides() -> None:
    text = '{"bits": 3, "group_size": 64, "overrides": {"*.q_proj": {"bits": 8}, "*.down*": null}}'
    recipe = Recipe.from_dict(json.loads(text))
    assert recipe.scheme(NAMES[0]) == Scheme(bits=8, group_size=64)
    assert recipe.scheme(NAMES[1]) is None
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bitz": 4}, "unknown name 'bitz'; expected one of method, bits"),
        ({"overrides": {"*": {"groupsize": 4}}}, r"\*: unknown name 'groupsize'"),
        ({"overrides": {"*": 4}}, r"\*: expected an object, got 4"),
        ({"overrides": [1]}, "overrides: expected an object"),
        ([], "expected an object"),
        ({"method": "obq"}, "method: expected one of .*'rtn', 'gptq', 'awq'.*, got 'obq'"),
        ({"bits": 5}, "bits of 'gptq': expected one of"),
        ({"bits": True}, "bits of 'gptq'"),
        ({"method": "awq", "bits": 8}, r"bits of 'awq': expected one of \(3, 4\), got 8"),
        ({"group_size": 100}, "group_size: expected one of"),
        ({"symmetric": 1}, "symmetric: expected one of"),
        ({"order": "random"}, "order: expected one of"),
        ({"method": "rtn", "order": "act"}, "order: expected 'none' with method 'rtn', got 'act'"),
        ({"overrides": {"*.q": {"bits": 7}}}, r"^recipe: \*\.q: bits of 'gptq': expected one of"),
        (
            {"order": "act", "overrides": {"*.q": {"method": "rtn"}}},
            r"\*\.q: order: expected 'none' with method 'rtn', got 'act'",
        ),
        ({"damping": -1}, "damping: expected a number >= 0"),
        ({"damping": float("nan")}, "damping: expected a number >= 0"),
    ],
)
def test_refused_by_name(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(values)


def test_pattern_without_projection_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\*\.k_proj' matches no projection.*layers\.0"):
        Recipe(Scheme(), {"*.k_proj": None}).check_names(NAMES)


def test_pattern_that_never_decides_is_refused() -> None:
    eight = Scheme(bits=8)
    with pytest.raises(ValueError, match=r"'\*\.q_proj' .* before it: expected the particular"):
        Recipe(Scheme(), {"model.*": eight, "*.q_proj": None}).check_names(NAMES)
    Recipe(Scheme(), {"*.0.*": eight, "*.q_proj": None, "*": eight}).check_names(NAMES)


def test_what_is_no_scheme_is_refused() -> None:
    with pytest.raises(TypeError, match="default: expected a Scheme"):
        Recipe({"bits": 4})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\*: expected a Scheme or None"):
        Recipe(Scheme(), {"*": 4})  # type: ignore[dict-item]

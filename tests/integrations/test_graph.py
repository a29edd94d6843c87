"""`fastinfer.graph` without a GPU: what is recorded, what is copied, and when."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastinfer
from fastinfer.integrations.graph import GraphedModel, check_graphable
from tests.integrations.tools import generated, left_padding, logits, token_ids
from tests.models.tools import tiny_model


class Recorder:
    """Records as a GPU does: a step is rehearsed before, and replayed into the same result."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(
        self, step: Callable[[], Any], rehearse: Callable[[], None]
    ) -> tuple[Any, Callable[[], None]]:
        rehearse()
        rehearse()
        result = transformers.modeling_outputs.CausalLMOutputWithPast()

        def replay() -> None:
            self.replays += 1
            if result.logits is None:
                result.logits = step().logits
            else:
                result.logits.copy_(step().logits)

        return result, replay


Graphed = tuple[Any, GraphedModel, Recorder]


@pytest.fixture(params=["llama", "qwen3", "phi3", "gpt2"])
def graphed(request: pytest.FixtureRequest) -> Iterator[Graphed]:
    model, recorder = tiny_model(request.param), Recorder()
    fastinfer.optimize(model)
    with GraphedModel(model, recorder) as graphs:
        yield model, graphs, recorder


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
def test_generates_the_same(graphed: Graphed, options: dict[str, Any]) -> None:
    model, graphs, recorder = graphed
    ids = token_ids()
    mask = left_padding(ids)
    options = {**options, "cache_implementation": "static", "max_new_tokens": 7}
    tokens = generated(model, ids, mask, **options)
    assert (graphs.num_graphs, recorder.replays) == (1, 6)  # the prompt gave the first token
    graphs.close()
    assert torch.equal(generated(model, ids, mask, **options), tokens)
    assert recorder.replays == 6


def test_beam_search_moves_its_cache(graphed: Graphed) -> None:
    model, graphs, recorder = graphed
    ids = token_ids()
    options = {"cache_implementation": "static", "num_beams": 2}
    tokens = generated(model, ids, left_padding(ids), **options)
    assert recorder.replays < 3  # of 8 steps: those before it was seen to move
    graphs.close()
    assert torch.equal(generated(model, ids, left_padding(ids), **options), tokens)


def steps(model: Any, cache: Any, ids: Tensor) -> list[Tensor]:
    """The logits of each token of [B, S] after a prompt of 3, by calls of the model."""
    results = [logits(model, ids[:, :3], cache=cache)]
    for t in range(3, ids.shape[1]):
        with torch.no_grad():
            out = model(
                input_ids=ids[:, t : t + 1],
                position_ids=torch.full((len(ids), 1), t),
                cache=cache,
            )
        results.append(out.logits)
    return results


def test_results_of_a_step_stay(graphed: Graphed) -> None:
    model, graphs, _ = graphed
    ids = token_ids(2, 8)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    got = steps(model, cache, ids)
    assert graphs.num_graphs == 1
    graphs.close()
    expected = steps(model, transformers.StaticCache(config=model.config, max_cache_len=16), ids)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_each_cache_has_its_graphs(graphed: Graphed) -> None:
    model, graphs, _ = graphed
    for i in range(10):
        ids = token_ids(1, 5)
        cache = transformers.StaticCache(config=model.config, max_cache_len=16 + i)
        steps(model, cache, ids)
    assert graphs.num_graphs == 8


def test_other_calls_are_not_recorded(graphed: Graphed) -> None:
    model, graphs, recorder = graphed
    ids = token_ids(2, 1)
    logits(model, ids)  # no cache
    generated(model, token_ids(), torch.ones(3, 19).long())  # a dynamic one
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    logits(model, token_ids(2, 4), cache=cache)  # a prompt
    model(input_ids=ids, cache=copy.deepcopy(cache))  # with gradients
    logits(model, ids, cache=cache, output_hidden_states=True)
    assert (graphs.num_graphs, recorder.replays) == (0, 0)


def test_closing_gives_the_model_back() -> None:
    model = tiny_model("llama")
    before, ids = model.forward, token_ids(1, 4)
    expected = logits(model, ids)
    graphs = GraphedModel(model, Recorder())
    assert model.generation_config.disable_compile is True
    with pytest.raises(ValueError, match="got a replaced one"):
        check_graphable(model, transformers.StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(TypeError, match="close"):
        copy.deepcopy(graphs)
    graphs.close()
    graphs.close()
    assert model.forward == before and "forward" not in vars(model)
    assert model.generation_config.disable_compile is None
    assert torch.equal(logits(model, ids), expected)


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one CUDA device, got cpu"):
        fastinfer.graph(tiny_model("llama"))
    model = tiny_model("gemma3_text")
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer"):
        check_graphable(model, cache)

"""`LLM` used from several threads, and with prompts, options and models of a wrong kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fastinfer import LLM
from tests.engine.test_llm import PROMPTS, greedy


def test_threads_take_turns(tiny_folder, llm):
    shared = LLM(tiny_folder)
    alone = [llm.generate(p, greedy(20))[0].token_ids for p in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda p: shared.generate(p, greedy(20))[0].token_ids, PROMPTS * 4)
        )
    assert together == alone * 4
    shared.blocks.check_integrity()
    assert shared.blocks.num_used == 0


@pytest.mark.parametrize("prompt", ["\ud800", [{"role": "user", "content": "a\udfff"}]])
def test_text_that_is_not_unicode(llm, prompt):
    with pytest.raises(ValueError, match="not valid Unicode"):
        llm.generate(prompt, greedy(1))


def test_bytes_are_no_prompt(llm):
    with pytest.raises(TypeError, match="a prompt must be"):
        llm.generate(b"hi", greedy(1))


@pytest.mark.parametrize(
    "option", [{"seed": "x"}, {"seed": None}, {"enforce_eager": 3}, {"enable_prefix_caching": "no"}]
)
def test_options_of_the_wrong_type(tiny_folder, option):
    with pytest.raises(TypeError, match=next(iter(option))):
        LLM(tiny_folder, **option)


@pytest.mark.parametrize(("model", "error"), [("", FileNotFoundError), (5, TypeError)])
def test_what_is_no_model(model, error):
    with pytest.raises(error, match="model: expected a path or a name"):
        LLM(model)

"""The engine on a GPU: graphs, memory, batching, and transformers on the same GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastinfer import LLM, SamplingParams
from fastinfer.engine.graphs import Recorder, run_directly
from fastinfer.models import ModelConfig
from tests.engine.conftest import tiny_tokenizer  # noqa: F401
from tests.engine.test_graphs import on_rungs, random_work, serve

SEQS, TOKENS = 9, 70
PAGE_BYTES = 4 * 2 * 2 * 64 * 16 * 2  # a block of 16 tokens in bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):  # noqa: F811
    """A random Llama whose greedy texts are varied."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def make(folder, dtype="bfloat16", blocks=400, **options) -> LLM:
    size = PAGE_BYTES * (2 if dtype == "float32" else 1)
    options = {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, **options}
    return LLM(folder, device="cuda", dtype=dtype, kv_cache_memory_bytes=blocks * size, **options)


@pytest.mark.parametrize("blocks", [400, 20])  # with 20 there are preemptions
@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_equal_the_same_steps_launched_one_by_one(folder, seed, blocks):
    """bf16, bit for bit: the same sizes, so the same kernels; requests arrive in mid-run."""
    work = random_work(seed, 30)
    replayed = make(folder, blocks=blocks)
    assert replayed._core._runner._replays, "decode steps are recorded at the start"
    got = serve(replayed, work)
    launched, _ = on_rungs(make(folder, blocks=blocks, enforce_eager=True), SEQS, TOKENS)
    assert got == serve(launched, work)
    # Once more, now that every size has been recorded, with another history of the pages.
    assert serve(replayed, work[::-1]) == serve(launched, work[::-1])


@pytest.mark.parametrize("seed", range(3))
def test_graphs_give_the_tokens_of_eager_steps(folder, seed):
    """fp32, where the sizes that steps are filled up to make no difference that a token shows."""
    work = random_work(seed, 30)
    eager = make(folder, dtype="float32", enforce_eager=True)
    assert eager._core._runner._ladder is None
    assert serve(make(folder, dtype="float32"), work) == serve(eager, work)


def test_stale_and_poisoned_buffers_are_not_read(folder):
    work = random_work(5, 30)
    want = serve(make(folder), work)
    poisoned, seen = on_rungs(
        make(folder, enforce_eager=True), SEQS, TOKENS, Recorder(torch.device("cuda"))
    )
    assert serve(poisoned, work) == want
    assert {rung.max_seqlen_q > 1 for rung in seen} == {True, False}


def test_chunks_without_a_token_do_not_overtake_each_other(folder):
    """Many steps in a row that nobody waits for share two buffers on the host."""
    prompt = torch.randint(2, 320, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(**options):
        return make(folder, dtype="float32", **options).generate(prompt, params)[0].token_ids

    want = tokens(max_num_batched_tokens=512)
    for budget in (5, 16, 70):
        assert tokens(max_num_batched_tokens=budget) == want
        assert tokens(max_num_batched_tokens=budget, enforce_eager=True) == want


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_static_batching(folder, enforce_eager):
    work = random_work(7, 20)
    options = {"max_model_len": 128, "enforce_eager": enforce_eager}
    want = serve(make(folder, dtype="float32", **options), work)
    static = make(folder, dtype="float32", batching="static", blocks=40, **options)
    assert serve(static, work) == want
    assert static.blocks.num_used == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_results_do_not_depend_on_who_recorded(folder, sampled):
    """An engine that fills its pages and one that just began give the same tokens."""
    params = [
        SamplingParams(temperature=0.9 if sampled else 0, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(8)
    ]
    prompts = [[5 + i] * (3 + 7 * i) for i in range(8)]
    llm = make(folder, dtype="float32")
    first = [o.token_ids for o in llm.generate(prompts, params)]
    assert first == [o.token_ids for o in llm.generate(prompts, params)]
    assert first == [llm.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]


def dummy() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=1 << 20,
        norm_eps=1e-5,
        dtype=torch.bfloat16,
    )


def test_the_pool_takes_what_is_left_and_no_more():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # Twice what is in use already, or a tenth of the memory.
    share = max(0.1, 2 * (1 - free / total))
    if share > 0.9:
        pytest.skip("another program uses this GPU's memory")
    llm = LLM(
        dummy(),
        device="cuda",
        load_format="dummy",
        gpu_memory_utilization=share,
        max_model_len=1 << 18,
    )
    keys, values = llm._core._runner.kv_caches[0]
    pool = 8 * (keys.nbytes + values.nbytes)
    assert pool > 0.5 * (share * total - (total - free)), "most of what was allowed"
    prompts = [[7] * 2000] + [[9] * 5] * 255
    params = SamplingParams(
        temperature=0.8, max_tokens=4, ignore_eos=True, repetition_penalty=1.2, logprobs=1
    )
    llm.generate(prompts, params)
    now_free, _ = torch.cuda.mem_get_info()
    assert total - now_free <= share * total


def test_no_memory_for_the_pool_is_an_error():
    with pytest.raises(ValueError, match=r"no memory is left for the KV cache.*GiB"):
        LLM(dummy(), device="cuda", load_format="dummy", gpu_memory_utilization=1e-4)


def test_stats(folder):
    llm = make(folder)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([[5] * 8] * 4, params)
    before = llm.stats
    llm.generate([[6] * 8] * 4, params)
    after = llm.stats
    assert after.steps - before.steps == 40 and after.tokens - before.tokens == 160
    seconds = after.step_seconds - before.step_seconds
    assert 0 < after.device_seconds - before.device_seconds < seconds
    assert 0 < after.wait_seconds - before.wait_seconds < seconds


def test_run_directly_is_what_a_recorder_repeats():
    device, total = torch.device("cuda"), torch.zeros(1, device="cuda")

    def count() -> None:
        total.add_(1)

    for record in (run_directly, Recorder(device)):
        total.zero_()
        repeat = record(count)
        assert total.item() == 1
        repeat()
        repeat()
        assert total.item() == 3

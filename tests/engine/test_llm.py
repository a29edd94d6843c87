"""`LLM` on a tiny random Llama: results, streaming, ends, errors; nothing may be left behind."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastinfer import LLM, SamplingParams
from fastinfer.models import ModelConfig

PROMPTS = ["the quick brown fox", "over", "Grüße aus Köln, 你好", "jumps " * 12, "0123456789"]


def greedy(max_tokens=24, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def collect(stream) -> dict[tuple[int, int], dict]:
    """What a stream gave, put together per (prompt, completion)."""
    result: dict[tuple[int, int], dict] = {}
    for d in stream:
        entry = result.setdefault(
            (d.prompt_index, d.index), {"text": "", "token_ids": [], "logprobs": [], "reason": None}
        )
        assert entry["reason"] is None, "something came after the end"
        entry["text"] += d.text
        entry["token_ids"] += d.token_ids
        entry["logprobs"] += d.logprobs or []
        entry["reason"] = d.finish_reason
    return result


# Results


def test_greedy_equals_transformers(llm, tiny_reference):
    outputs = llm.generate(PROMPTS, greedy(40, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.inference_mode():
            logits = tiny_reference(ids).logits[0]
        start = len(output.prompt_token_ids) - 1
        assert output.token_ids == logits[start:-1].argmax(-1).tolist()
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length" and output.finished and output.error is None


@pytest.mark.parametrize("sampled", [False, True])
def test_batching_chunks_and_prefix_hits_change_nothing(tiny_folder, llm, sampled):
    def params(i):
        return SamplingParams(temperature=0.9 if sampled else 0, seed=i, max_tokens=30, logprobs=2)

    def run(engine, prompts=PROMPTS):
        outputs = engine.generate(prompts, [params(PROMPTS.index(p)) for p in prompts])
        return [o.token_ids for o in outputs]

    together = run(llm)
    assert together == run(llm), "with prefix hits"
    assert together == [run(llm, [p])[0] for p in PROMPTS], "alone"
    for budget in (1, 7, 64):
        assert together == run(LLM(tiny_folder, max_num_batched_tokens=budget)), budget
    # 512 bytes a token: 8 blocks of 16 tokens, too few for all five at once.
    small = LLM(tiny_folder, kv_cache_memory_bytes=8 * 16 * 512, enable_prefix_caching=False)
    assert small.blocks.num_blocks == 8
    preemptions = []
    original = small._core._scheduler._preempt_youngest
    small._core._scheduler._preempt_youngest = lambda: (
        preemptions.append(original()) or (preemptions[-1])
    )
    assert together == run(small)
    assert preemptions, "the pool was meant to be too small"
    small.blocks.check_integrity()
    if sampled:
        greedy_ids = [o.token_ids for o in llm.generate(PROMPTS, greedy(30))]
        assert together != greedy_ids


def test_the_three_kinds_of_prompt(llm):
    text = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": "hi"}]
    by_text, by_ids, by_chat = llm.generate([text, ids, messages], greedy(5))
    assert by_text.token_ids == by_ids.token_ids == by_chat.token_ids
    assert by_text.prompt == by_chat.prompt == text and by_ids.prompt is None
    assert by_ids.prompt_token_ids == ids
    assert llm.generate(ids, greedy(5))[0].token_ids == by_ids.token_ids
    assert llm.chat(messages, greedy(5))[0].token_ids == by_ids.token_ids
    assert [o.text for o in llm.chat([messages] * 2, greedy(5))] == [by_ids.text] * 2
    assert llm.generate(text, greedy(5))[0].text == by_ids.text
    assert llm.generate([], greedy(5)) == []


def test_one_params_for_each_prompt(llm):
    outputs = llm.generate(["the", "fox"], [greedy(3), greedy(5)])
    assert [len(o.token_ids) for o in outputs] == [3, 5]
    (default,) = llm.generate("the")
    assert len(default.token_ids) == 16 or default.finish_reason == "stop"


def test_a_huge_top_k_is_no_top_k(llm):
    params = [SamplingParams(seed=3, top_k=k, max_tokens=8, ignore_eos=True) for k in (0, 2**70)]
    plain, huge = llm.generate(["the", "the"], params)
    assert plain.token_ids == huge.token_ids


def test_n_completions_have_their_own_seeds(llm):
    params = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("the", params)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert output.token_ids == output.outputs[0].token_ids
    alone = llm.generate("the", SamplingParams(seed=5, max_tokens=12, ignore_eos=True))[0]
    assert alone.token_ids == output.token_ids
    again = llm.generate(["fox", "the"], params)[1]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    (same,) = llm.generate("the", greedy(8, n=3))
    assert len({tuple(c.token_ids) for c in same.outputs}) == 1


def test_seeds(tiny_folder, llm):
    def texts(engine, seed):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
        return [o.token_ids for o in engine.generate(["the", "the"], params)]

    first, second = texts(llm, 1)
    assert first == second
    assert texts(llm, 2)[0] != first
    # Without a seed each request draws its own from the engine's generator.
    one, other = LLM(tiny_folder, seed=3), LLM(tiny_folder, seed=3)
    drawn = texts(one, None)
    assert drawn[0] != drawn[1]
    assert drawn == texts(other, None)
    assert texts(one, None) != drawn
    assert texts(LLM(tiny_folder, seed=4), None) != drawn


def test_logprobs_are_log_softmax_of_the_reference(llm, tiny_reference):
    output = llm.generate("the quick", greedy(10, logprobs=3, repetition_penalty=1.3))[0]
    ids = torch.tensor([output.prompt_token_ids + output.token_ids])
    with torch.inference_mode():
        reference = tiny_reference.double()(ids).logits[0].log_softmax(-1)
    tiny_reference.float()
    start = len(output.prompt_token_ids) - 1
    assert len(output.logprobs) == len(output.token_ids) == 10
    for row, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert token in entry and 3 <= len(entry) <= 4
        assert list(entry.values()) == sorted(entry.values(), reverse=True)
        for i, value in entry.items():
            assert value == pytest.approx(float(reference[start + row, i]), abs=1e-4)
    assert llm.generate("the", greedy(2))[0].logprobs is None


def test_penalties_and_bias_act(llm):
    plain = llm.generate("the", greedy(12, ignore_eos=True))[0].token_ids
    forced = llm.generate("the", greedy(12, ignore_eos=True, logit_bias={70: math.inf}))[0]
    assert forced.token_ids == [70] * 12
    banned = dict.fromkeys(plain, -math.inf)
    other = llm.generate("the", greedy(12, ignore_eos=True, logit_bias=banned))[0].token_ids
    assert not set(other) & set(plain)
    bias = {70: 15.0, 71: 14.0}
    params = greedy(12, ignore_eos=True, logit_bias=bias, frequency_penalty=2.0)
    assert len(set(llm.generate("the", params)[0].token_ids)) > 1


# Streaming


@pytest.mark.parametrize(
    "params",
    [
        greedy(40, ignore_eos=True),
        greedy(40, logprobs=2, stop=["e", "qu"]),
        SamplingParams(seed=1, n=3, max_tokens=30, temperature=1.2),
        SamplingParams(seed=2, max_tokens=60, ignore_eos=True, temperature=2.0, logprobs=0),
    ],
    ids=["greedy", "stop", "n", "hot"],
)
def test_a_stream_put_together_is_the_result(llm, params):
    outputs = llm.generate(PROMPTS, params)
    parts = collect(llm.stream(PROMPTS, params))
    assert len(parts) == len(PROMPTS) * params.n
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            part = parts[i, completion.index]
            assert part["text"] == completion.text
            assert part["token_ids"] == completion.token_ids
            assert part["logprobs"] == (completion.logprobs or [])
            assert part["reason"] == completion.finish_reason


def test_a_stream_gives_whole_characters(llm):
    ids = llm.tokenizer.encode("€🙂", add_special_tokens=False)
    assert len(ids) == 7
    # Force the bytes one after the other: each position allows one token.
    engine_step = llm._core._sampler
    order = iter(ids)

    def forced(*args):
        sampled = engine_step(*args)
        sampled.token_ids[:] = [next(order)]
        return sampled

    llm._core._sampler = forced
    try:
        pieces = [d.text for d in llm.stream("the", greedy(7, ignore_eos=True))]
    finally:
        llm._core._sampler = engine_step
    text = "".join(pieces)
    assert text == "€🙂" and pieces == ["", "", "€", "", "", "", "🙂"]


def test_closing_a_stream_aborts_it(llm):
    stream = llm.stream(PROMPTS, greedy(100, ignore_eos=True))
    for _ in range(8):
        next(stream)
    assert llm.has_unfinished and llm.blocks.num_used > 0
    stream.close()
    assert not llm.has_unfinished and llm.blocks.num_used == 0


def test_a_stream_that_is_never_read_can_be_closed(llm):
    stream = llm.stream("the", greedy(100))
    assert llm.has_unfinished
    stream.close()
    assert not llm.has_unfinished


def test_calls_may_be_interleaved(llm):
    params = greedy(30, ignore_eos=True)
    alone = [o.token_ids for o in llm.generate(PROMPTS[:3], params)]
    request_id = llm.add_request(PROMPTS[0], params)
    stream = llm.stream(PROMPTS[1], params)
    tokens = next(stream).token_ids
    inner = llm.generate(PROMPTS[2], params)[0].token_ids
    tokens = tokens + list(itertools.chain.from_iterable(d.token_ids for d in stream))
    mine = []
    while llm.has_unfinished or not mine:
        mine += llm.step()
    assert {d.request_id for d in mine} == {request_id}
    assert [i for d in mine for i in d.token_ids] == alone[0]
    assert [tokens, inner] == alone[1:]


# Ends


def test_max_tokens_none_goes_to_the_end_of_the_context(llm):
    output = llm.generate("the", greedy(None, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) + len(output.token_ids) == llm.max_model_len == 512
    assert output.finish_reason == "length"
    capped = llm.generate("the", greedy(10**9, ignore_eos=True))[0]
    assert capped.token_ids == output.token_ids


def test_end_of_text(llm):
    eos = llm.tokenizer.eos_token_ids[0]
    ended = llm.generate("the", greedy(20, logit_bias={eos: math.inf}))[0]
    assert ended.token_ids == [eos] and ended.finish_reason == "stop" and ended.text == ""
    ignored = llm.generate("the", greedy(5, logit_bias={eos: math.inf}, ignore_eos=True))[0]
    assert ignored.token_ids == [eos] * 5 and ignored.finish_reason == "length"
    later = llm.generate("the", greedy(20, logit_bias={eos: 1e4}, min_tokens=6))[0]
    assert len(later.token_ids) == 7 and later.token_ids[-1] == eos
    assert eos not in later.token_ids[:6] and later.finish_reason == "stop"


def test_stop_tokens(llm):
    plain = llm.generate("the", greedy(20, ignore_eos=True))[0].token_ids
    stop = plain[5]
    first = plain.index(stop)
    output = llm.generate("the", greedy(20, stop_token_ids=[stop]))[0]
    assert output.token_ids == plain[: first + 1] and output.finish_reason == "stop"
    assert output.text == llm.tokenizer.decode(plain[:first])
    kept = greedy(20, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert llm.generate("the", kept)[0].text == llm.tokenizer.decode(plain[: first + 1])
    waiting = llm.generate("the", greedy(20, stop_token_ids=[stop], min_tokens=first + 3))[0]
    assert len(waiting.token_ids) > first + 3 - 1 and stop not in waiting.token_ids[: first + 3]


def ascii_bias(llm) -> dict[int, float]:
    """Leaves only tokens of one or more lower-case letters, so that texts are easy to cut."""
    allowed = {i for i in range(320) if (t := llm.tokenizer.decode([i])).isascii() and t.islower()}
    return {i: -math.inf for i in range(320) if i not in allowed}


def test_stop_strings_across_tokens(llm):
    bias = ascii_bias(llm)
    plain = llm.generate("the", greedy(40, logit_bias=bias))[0]
    lengths = [len(llm.tokenizer.decode([i])) for i in plain.token_ids]
    for start in range(3, 30, 3):
        stop = plain.text[start : start + 5]
        at = plain.text.index(stop)
        for include in (False, True):
            params = greedy(40, logit_bias=bias, stop=stop, include_stop_str_in_output=include)
            output = llm.generate("the", params)[0]
            assert output.text == plain.text[: at + (5 if include else 0)]
            assert output.finish_reason == "stop"
            # Generation ended with the token that completed the string.
            count = len(output.token_ids)
            assert output.token_ids == plain.token_ids[:count]
            assert sum(lengths[: count - 1]) < at + 5 <= sum(lengths[:count])
            sent = ""
            for delta in llm.stream("the", params):
                sent += delta.text
                assert output.text.startswith(sent)


def test_a_stop_string_that_never_comes_takes_nothing_away(llm):
    plain = llm.generate("the", greedy(20, ignore_eos=True))[0]
    end = plain.text[-1]
    output = llm.generate("the", greedy(20, ignore_eos=True, stop=[end + "\x00never"]))[0]
    assert output.text == plain.text and output.finish_reason == "length"


def test_min_tokens_delays_stop_strings(llm):
    bias = ascii_bias(llm)
    plain = llm.generate("the", greedy(40, logit_bias=bias))[0]
    letter = plain.text[0]
    now = llm.generate("the", greedy(40, logit_bias=bias, stop=letter))[0]
    assert now.text == "" and len(now.token_ids) == 1
    later = llm.generate("the", greedy(40, logit_bias=bias, stop=letter, min_tokens=10))[0]
    assert len(later.token_ids) >= 10 and plain.text.startswith(later.text)


def test_special_tokens_in_the_text(llm):
    bias = {0: math.inf}
    assert llm.generate("the", greedy(2, logit_bias=bias))[0].text == ""
    params = greedy(2, logit_bias=bias, skip_special_tokens=False)
    assert llm.generate("the", params)[0].text == "<|start|>" * 2


def test_abort(llm):
    params = greedy(30, ignore_eos=True)
    whole = llm.generate(PROMPTS[1], params)[0]
    gone = llm.add_request(PROMPTS[0], greedy(30, ignore_eos=True, n=2))
    stays = llm.add_request(PROMPTS[1], params)
    deltas = [d for _ in range(4) for d in llm.step()]
    assert llm.abort(gone) and not llm.abort(gone) and not llm.abort(10**6)
    while llm.has_unfinished:
        deltas += llm.step()
    ends = {(d.request_id, d.index): d.finish_reason for d in deltas if d.finish_reason}
    assert ends == {(gone, 0): "abort", (gone, 1): "abort", (stays, 0): "length"}
    assert [i for d in deltas if d.request_id == stays for i in d.token_ids] == whole.token_ids
    # A waiting request can be aborted as well as a running one.
    waiting = llm.add_request("the", params)
    assert llm.abort(waiting)
    assert [d.finish_reason for d in llm.step()] == ["abort"]


# What goes wrong


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ValueError, "the prompt is empty"),
        ([[]], ValueError, "the prompt is empty"),
        ([1, 320], ValueError, r"in \[0, 320\), got 320"),
        ([-1], ValueError, r"in \[0, 320\), got -1"),
        ([1, "a"], TypeError, "a prompt must be"),
        ([1, True], TypeError, "a prompt must be"),
        (5, TypeError, "a prompt must be"),
        ([5.0], TypeError, "a prompt must be"),
        (None, TypeError, "a prompt must be"),
        ([{"role": "user"}], ValueError, "'role' and 'content'"),
        ([1] * 512, ValueError, "at most 511 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_lost(llm, prompt, error, message):
    running = llm.add_request("the", greedy(6, ignore_eos=True))
    llm.step()
    with pytest.raises(error, match=message):
        llm.generate(prompt, greedy(4))
    with pytest.raises(error, match=message):
        llm.generate(["fox", *(prompt if prompt == [[]] else [prompt])], greedy(4))
    with pytest.raises(error, match=message):
        llm.stream(prompt, greedy(4))
    deltas = []
    while llm.has_unfinished:
        deltas += llm.step()
    assert {d.request_id for d in deltas} == {running} and deltas[-1].finish_reason == "length"


def test_bad_parameters_for_this_model(llm):
    for params, message in (
        (greedy(logit_bias={320: 1.0}), r"logit_bias token ids must be in \[0, 320\), got 320"),
        (greedy(stop_token_ids=[999]), r"stop token ids must be in \[0, 320\), got 999"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate("the", params)
    with pytest.raises(ValueError, match="one SamplingParams per prompt expected, got 3 for 2"):
        llm.generate(["the", "fox"], [greedy()] * 3)
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate("the", {"max_tokens": 3})
    for messages in ("hello", [], [[]], [1, 2], [{"role": "user", "content": "a"}, "b"]):
        with pytest.raises(TypeError, match="list of messages"):
            llm.chat(messages, greedy())
    with pytest.raises(TypeError, match="one prompt"):
        llm.add_request(["the", "fox"], greedy())


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(tiny_folder):
    engine = LLM(tiny_folder, kv_cache_memory_bytes=4 * 16 * 512)
    running = engine.add_request("the", greedy(20, ignore_eos=True))
    engine.step()
    with pytest.raises(ValueError, match="slots of the KV cache, which has 64"):
        engine.add_request([5] * 40, greedy(30))
    with pytest.raises(ValueError, match="slots of the KV cache, which has 64"):
        engine.generate(["fox", [5] * 40], greedy(30))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    assert {d.request_id for d in deltas} == {running} and deltas[-1].finish_reason == "length"
    engine.blocks.check_integrity()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seq": 3}, TypeError, "unknown option 'max_num_seq'.*max_num_seqs"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs must be an int"),
        ({"max_num_batched_tokens": -5}, ValueError, "max_num_batched_tokens must be >= 1"),
        ({"max_model_len": 0}, ValueError, "max_model_len"),
        ({"max_model_len": 513}, ValueError, "max_model_len.*512"),
        ({"block_size": 12}, ValueError, "block_size must be a multiple of 8"),
        ({"block_size": 1024}, ValueError, "block_size"),
        ({"gpu_memory_utilization": 0}, ValueError, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 100}, ValueError, "at least one block of 16 tokens"),
        ({"dtype": "int8"}, ValueError, "dtype"),
        ({"device": "tpu"}, ValueError, "device must be"),
        ({"device": "cuda"}, ValueError, "cannot run all ops.*paged_attention"),
        ({"load_format": "pickle"}, ValueError, "load_format"),
        ({"batching": "dynamic"}, ValueError, "batching must be one of 'continuous', 'static'"),
        (
            {"batching": "static", "kv_cache_memory_bytes": 31 * 16 * 512},
            ValueError,
            "a slot of max_model_len = 512 tokens takes 32 blocks, and the KV cache has 31",
        ),
    ],
)
def test_bad_engine_options(tiny_folder, options, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny_folder, **options)


def test_a_missing_model():
    with pytest.raises(FileNotFoundError, match="no/such/model"):
        LLM("no/such/model/anywhere")


def test_nan_logits_end_that_request_alone(llm, monkeypatch):
    params = greedy(10, ignore_eos=True)
    good = llm.generate("fox", params)[0]
    real = llm._core._runner.run
    steps = itertools.count()

    def poisoned(step):
        result = real(step)
        if next(steps) == 3:
            result.logits = result.logits.clone()
            result.logits[[s.samples and s.request.prompt_token_ids[0] == 9 for s in step]] = (
                math.nan
            )
        return result

    monkeypatch.setattr(llm._core._runner, "run", poisoned)
    bad, other = llm.generate([[9, 9], "fox"], params)
    assert bad.finish_reason == "error" and "NaN" in bad.error and len(bad.token_ids) == 3
    assert other.token_ids == good.token_ids and other.error is None


def test_a_failing_step_loses_nothing(llm, monkeypatch):
    params = greedy(12, ignore_eos=True)
    want = [o.token_ids for o in llm.generate(PROMPTS[:2], params)]
    served = llm.add_request(PROMPTS[0], params)
    deltas = llm.step()
    real = llm._core._runner.run
    fail = iter([False, False, True])

    def failing(step):
        logits = real(step)
        if next(fail, False):
            raise MemoryError("no memory for this step")
        return logits

    monkeypatch.setattr(llm._core._runner, "run", failing)
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS[1], params)
    llm.blocks.check_integrity()
    assert llm.generate(PROMPTS[1], params)[0].token_ids == want[1]
    while llm.has_unfinished:
        deltas += llm.step()
    deltas += llm.step()
    assert {d.request_id for d in deltas} == {served}
    assert [i for d in deltas for i in d.token_ids] == want[0]


@pytest.mark.parametrize("where", ["sampler", "collect"])
def test_an_interrupt_aborts_the_call_and_no_other(llm, monkeypatch, where):
    params = greedy(12, ignore_eos=True)
    want = llm.generate(PROMPTS[0], params)[0].token_ids
    llm.add_request(PROMPTS[0], params)
    core = llm._core
    calls = itertools.count()
    real = {"sampler": core._sampler, "collect": core._collect}[where]

    def interrupted(*args):
        # In `collect`, the tokens of the step have been recorded, but nobody has seen them.
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(core, f"_{where}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:], params)
    llm.blocks.check_integrity()
    deltas = []
    while llm.has_unfinished:
        deltas += llm.step()
    deltas += llm.step()
    assert [i for d in deltas for i in d.token_ids] == want


def test_a_failing_tokenizer_ends_that_request_alone(llm, monkeypatch):
    params = greedy(10, ignore_eos=True)
    good = llm.generate("fox", params)[0]
    other = llm.generate("the", params)[0]
    bad_ids = set(other.token_ids) - {*good.token_ids, *good.prompt_token_ids}
    bad_ids -= set(other.prompt_token_ids)
    assert bad_ids
    real = llm.tokenizer.decode

    def decode(ids, skip_special_tokens=True):
        if bad_ids & set(ids):
            raise UnicodeError("this token has no text")
        return real(ids, skip_special_tokens)

    monkeypatch.setattr(llm.tokenizer, "decode", decode)
    bad, other = llm.generate(["the", "fox"], params)
    assert bad.finish_reason == "error" and "this token has no text" in bad.error
    assert other.text == good.text and other.finish_reason == "length"


def test_random_weights_from_a_configuration():
    config = ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        norm_eps=1e-5,
    )
    engine = LLM(config, load_format="dummy", max_num_seqs=2)
    assert engine.tokenizer is None
    # No more blocks than two sequences of 64 tokens need.
    assert engine.blocks.num_blocks == 8
    output = engine.generate([1, 2, 3], greedy(5))[0]
    assert len(output.token_ids) == 5 and output.text == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate("text", greedy())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.generate([1], greedy(stop="a"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny_folder, dtype):
    output = LLM(tiny_folder, dtype=dtype).generate("the", greedy(8, ignore_eos=True))[0]
    assert len(output.token_ids) == 8


def test_a_progress_bar_only_when_asked(llm, capsys):
    llm.generate(["the", "fox"], greedy(2))
    assert capsys.readouterr().err == ""
    llm.generate(["the", "fox"], greedy(2), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err

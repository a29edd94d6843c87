"""The command line on a tiny random Llama."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from fastinfer import LLM, SamplingParams, cli


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(arguments))
    except SystemExit as end:  # argparse's own errors
        code = int(end.code)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def model(tiny_folder) -> tuple[str, str]:
    return "--model", str(tiny_folder)


def test_generate_prints_the_text_then_what_it_took(capsys, model, llm):
    code, out, err = run(capsys, "generate", *model, "--prompt", "the", "--max-tokens", "9")
    want = llm.generate("the", SamplingParams(temperature=0, max_tokens=9))[0]
    assert code == 0 and out == want.text + "\n"
    assert re.search(r"^\d+ tokens, [\d.]+ tokens/s", err, re.M)
    assert re.search(r"^peak memory: \d+ MiB", err, re.M)
    families = re.search(r"^backends: (.*)$", err, re.M).group(1).split(", ")
    assert {f.split()[0] for f in families} >= {"attention", "kv_cache", "norm", "sampling"}
    assert {f.split()[1] for f in families} == {"cpu"}


def test_every_option_arrives(capsys, model, monkeypatch):
    seen = {}

    class Fake:
        def __init__(self, path, **options):
            seen["engine"] = options

        def stream(self, prompt, params):
            seen["prompt"], seen["params"] = prompt, params
            raise ValueError("enough")

    monkeypatch.setattr("fastinfer.engine.llm.LLM", Fake)
    options = [
        "--tokenizer",
        "t",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "16",
        "--gpu-memory-utilization",
        "0.5",
        "--kv-cache-memory-bytes",
        "1000000",
        "--block-size",
        "8",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--load-format",
        "dummy",
        "--quantization",
        "int4",
        "--n",
        "2",
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.2",
        "--frequency-penalty",
        "0.3",
        "--logit-bias",
        "5:-1.5,6:2",
        "--seed",
        "9",
        "--max-tokens",
        "none",
        "--min-tokens",
        "2",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "7",
        "8",
        "--ignore-eos",
        "--include-stop-str-in-output",
        "--no-skip-special-tokens",
    ]
    code, _, err = run(
        capsys, "generate", *model, "--prompt", "hi", "--system", "be brief", *options
    )
    assert code == 2 and "enough" in err
    assert seen["engine"] == {
        "tokenizer": "t",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1000000,
        "block_size": 8,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "load_format": "dummy",
        "quantization": "int4",
    }
    assert seen["params"] == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -1.5, 6: 2.0},
        seed=9,
        max_tokens=None,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert [m["role"] for m in seen["prompt"]] == ["system", "user"]


def test_the_options_are_those_of_the_library():
    from dataclasses import fields

    from fastinfer.engine.llm import engine_options

    # The command's --seed is the request's; log-probabilities have no place in a text, and static
    # batching is there to be measured against.
    assert {*cli._ENGINE_OPTIONS, "seed", "batching"} == set(engine_options())
    assert {*cli._SAMPLING_OPTIONS, "logprobs"} == {f.name for f in fields(SamplingParams)}


def test_prompts_from_stdin_and_from_a_file(capsys, model, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text("the quick")
    _, direct, _ = run(capsys, "generate", *model, "--prompt", "the quick", "--max-tokens", "5")
    path = str(tmp_path / "prompt")
    _, from_file, _ = run(capsys, "generate", *model, "--prompt-file", path, "--max-tokens", "5")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick"))
    _, piped, _ = run(capsys, "generate", *model, "--prompt", "-", "--max-tokens", "5")
    assert direct == from_file == piped != ""


def test_several_completions_come_one_after_the_other(capsys, model, llm):
    arguments = ("--n", "3", "--temperature", "1", "--seed", "4", "--max-tokens", "6")
    code, out, _ = run(capsys, "generate", *model, "--prompt", "the", *arguments)
    want = llm.generate("the", SamplingParams(n=3, seed=4, max_tokens=6))[0]
    assert code == 0
    assert out == "".join(f"[{c.index}] {c.text}\n" for c in want.outputs)


def test_chat_keeps_the_conversation(capsys, model, monkeypatch, llm):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then?\n"))
    code, out, err = run(capsys, "chat", *model, "--system", "be brief", "--max-tokens", "7")
    assert code == 0
    params = SamplingParams(temperature=0, max_tokens=7)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    first = llm.chat(messages, params)[0].text
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then?"},
    ]
    second = llm.chat(messages, params)[0].text
    assert out == f"{first}\n{second}\n"
    assert "tokens/s" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--model", "no/such/model/here"], "no such file or folder"),
        (["generate", "--prompt", "a"], "--model"),
        (["generate", "--model", "m"], "--prompt"),
        (["generate", "--model", "m", "--prompt", "a", "--best-of", "3"], "--best-of"),
        (["generate", "--model", "m", "--prompt", "a", "--top", "3"], "--top"),
        (["generate", "--model", "m", "--prompt", "a", "--top-p", "2"], r"top_p must be in \(0, 1"),
        (["generate", "--model", "m", "--prompt", "a", "--top-k", "x"], "--top-k"),
        (["generate", "--model", "m", "--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["generate", "--model", "m", "--prompt", "a", "--logit-bias", "5"], "--logit-bias"),
        (["generate", "--model", "m", "--prompt-file", "/no/such"], "No such file"),
        (["chat", "--model", "m", "--n", "2"], "--n must be 1"),
        (["serve"], "invalid choice: 'serve'"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_gives_a_message_and_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert re.search(message, err) and "Traceback" not in err


def test_bad_input_for_the_model(capsys, model):
    for arguments, message in (
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--block-size", "7"], "block_size must be a multiple of 8"),
        (["--prompt", "a", "--device", "cuda"], "cannot run all ops"),
    ):
        code, out, err = run(capsys, "generate", *model, *arguments)
        assert code == 2 and out == "" and message in err and "Traceback" not in err


def test_a_failure_is_one_line_or_with_debug_a_traceback(capsys, model, monkeypatch):
    def broken(self, prompts, params):
        raise RuntimeError("it broke")

    monkeypatch.setattr(LLM, "stream", broken)
    code, _, err = run(capsys, "generate", *model, "--prompt", "a")
    assert code == 1 and "fastinfer: error: RuntimeError: it broke" in err
    with pytest.raises(RuntimeError, match="it broke"):
        cli.main(["generate", *model, "--prompt", "a", "--debug"])


def test_doctor(capsys, monkeypatch):
    from fastinfer import doctor

    monkeypatch.setattr(doctor, "main", lambda: 1)
    assert run(capsys, "doctor")[0] == 1


def test_python_m_fastinfer():
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "fastinfer",
            "generate",
            "--model",
            "no/such/model/here",
            "--prompt",
            "a",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "no such file or folder" in result.stderr


def test_a_reader_that_goes_away_ends_it_quietly(tiny_folder):
    command = f"{sys.executable} -m fastinfer generate --model {tiny_folder} --prompt the --n 9"
    command = f"{command} --ignore-eos --max-tokens 40 2> {tiny_folder}/stderr | head -c 1"
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=120)
    assert "Traceback" not in (text := (tiny_folder / "stderr").read_text())
    assert "BrokenPipe" not in text


def test_chat_goes_on_after_a_turn_that_does_not_fit(capsys, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("long " * 200 + "\nhello\n"))
    code, out, err = run(capsys, "chat", *model, "--max-model-len", "96", "--max-tokens", "4")
    assert code == 1
    assert "expected a prompt of at most 95 tokens" in err and "tokens/s" in err and out.strip()

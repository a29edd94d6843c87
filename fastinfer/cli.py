"""The command line: `fastinfer generate`, `chat`, `quantize`, `eval`, `doctor` and `tune`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastinfer.engine.llm import LLM
    from fastinfer.engine.outputs import StreamOutput
    from fastinfer.engine.sampling_params import SamplingParams

# Exit codes: bad input, and what else can go wrong.
_BAD_INPUT, _FAILED, _INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done; 2: bad input (an unknown option, a missing file, a value out of range); 1: any other
    failure; 130: interrupted. An error is one message on stderr, or with --debug a traceback.
    """
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. What is still in stdout's buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:
        if args.debug:
            raise
        print(f"fastinfer: error: {_message(error)}", file=sys.stderr)
        return _BAD_INPUT if isinstance(error, ValueError | TypeError | OSError) else _FAILED


def _message(error: Exception) -> str:
    if isinstance(error, ValueError | TypeError | OSError | ImportError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _generate(args: argparse.Namespace) -> int:
    """Completes one prompt: its text to stdout as it comes, then what it took to stderr."""
    prompt = _prompt(args)
    params = _sampling_params(args)
    llm = _load(args)
    statistics = _Statistics(llm)
    messages: list[dict[str, str]] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    messages.append({"role": "user", "content": prompt})
    stream = llm.stream(messages if args.chat or args.system is not None else prompt, params)
    _print_completions(statistics.watch(stream), params.n)
    statistics.report()
    return _FAILED if statistics.failed else 0


def _chat(args: argparse.Namespace) -> int:
    """A conversation: a line of stdin is a turn; an empty one is skipped; ends with the input."""
    params = _sampling_params(args)
    if params.n != 1:
        raise ValueError("chat: --n must be 1")
    llm = _load(args)
    statistics = _Statistics(llm)
    interactive = sys.stdin.isatty()
    if interactive:
        print("An empty line is skipped; Ctrl-D ends.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            reply = _print_completions(statistics.watch(llm.stream(messages, params)), 1)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(interrupted)", file=sys.stderr)
            messages.pop()
            continue
        except ValueError as error:  # such as a conversation that has outgrown the context
            print(f"fastinfer: error: {error}", file=sys.stderr)
            statistics.failed = True
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})
    if interactive:
        print(file=sys.stderr)
    statistics.report()
    return _FAILED if statistics.failed else 0


def _doctor(args: argparse.Namespace) -> int:
    from fastinfer import doctor

    return int(doctor.main() or 0)


def _tune(args: argparse.Namespace) -> int:
    from fastinfer import tuner

    options = {name: getattr(args, name) for name in _TUNE_OPTIONS if hasattr(args, name)}
    return tuner.main(**options)


def _quantize(args: argparse.Namespace) -> int:
    from fastinfer.quantizer import commands

    options = {name: getattr(args, name) for name in _QUANTIZE_OPTIONS if hasattr(args, name)}
    return commands.quantize(args.model, args.out, **options)


def _eval(args: argparse.Namespace) -> int:
    from fastinfer.quantizer import commands

    options = {name: getattr(args, name) for name in _EVAL_OPTIONS if hasattr(args, name)}
    return commands.evaluate(args.model, **options)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is not None:
        return str(Path(args.prompt_file).read_text(encoding="utf-8"))
    return sys.stdin.read() if args.prompt == "-" else str(args.prompt)


def _print_completions(stream: Iterable[StreamOutput], n: int) -> str:
    """Prints the text of a stream as it comes; with n > 1, one completion after the other."""
    texts = [""] * n
    printing = 0  # this one is printed as it comes, the next ones wait for it

    def put(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    done = [False] * n
    if n > 1:
        put("[0] ")
    for delta in stream:
        texts[delta.index] += delta.text
        done[delta.index] = delta.finish_reason is not None
        if delta.index == printing:
            put(delta.text)
        if delta.error is not None:
            print(f"\nfastinfer: error: {delta.error}", file=sys.stderr)
        while printing < n and done[printing]:
            put("\n")
            printing += 1
            if printing < n:
                put(f"[{printing}] {texts[printing]}")
    return texts[0]


class _Statistics:
    """Counts tokens and time of one or several streams."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._tokens = 0
        self._later_tokens = 0  # without the first one of each stream, which waits for the prompt
        self._first_seconds = 0.0
        self._later_seconds = 0.0
        self.failed = False

    def watch(self, stream: Iterable[StreamOutput]) -> Iterable[StreamOutput]:
        start = time.perf_counter()
        first: float | None = None
        for delta in stream:
            now = time.perf_counter()
            if delta.token_ids:
                if first is None:
                    first = now
                    self._first_seconds += now - start
                else:
                    self._later_tokens += len(delta.token_ids)
                self._tokens += len(delta.token_ids)
            self.failed |= delta.error is not None
            yield delta
        if first is not None:
            self._later_seconds += time.perf_counter() - first

    def report(self) -> None:
        rate = self._later_tokens / self._later_seconds if self._later_seconds > 0 else 0.0
        lines = [
            f"{self._tokens} tokens, {rate:.1f} tokens/s after the first, "
            f"which took {self._first_seconds:.2f} s",
            f"peak memory: {_peak_memory(self._llm)}",
            "backends: " + ", ".join(f"{k} {v}" for k, v in _family_backends(self._llm).items()),
        ]
        print("\n".join(lines), file=sys.stderr)


def _peak_memory(llm: LLM) -> str:
    import resource

    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB (process)"
    if llm.device.type == "cuda":
        import torch

        text += f", {torch.cuda.max_memory_allocated(llm.device) / 2**20:.0f} MiB (GPU)"
    return text


def _family_backends(llm: LLM) -> dict[str, str]:
    """Op family -> the backends that its ops use."""
    from fastinfer import ops

    backends = ops.backends(llm.device)
    return {
        family: "/".join(sorted({backends[name][0] for name in names}))
        for family, names in ops.op_families().items()
    }


def _load(args: argparse.Namespace) -> LLM:
    from fastinfer.engine.llm import LLM

    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS if hasattr(args, name)}
    start = time.perf_counter()
    llm = LLM(args.model, **options)
    print(f"loaded {args.model} in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return llm


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from fastinfer.engine.sampling_params import SamplingParams

    options = {name: getattr(args, name) for name in _SAMPLING_OPTIONS if hasattr(args, name)}
    return SamplingParams(**options)


def _max_tokens(text: str) -> int | None:
    return None if text == "none" else int(text)


def _logit_bias(text: str) -> dict[int, float]:
    pairs = (entry.split(":") for entry in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


_Option = dict[str, Any]

_ENGINE_OPTIONS: dict[str, _Option] = {
    "tokenizer": {"help": "where the tokenizer is, if not with the model"},
    "dtype": {"help": "auto, float32, bfloat16 or float16"},
    "device": {"help": "auto, cpu or cuda"},
    "max_model_len": {"type": int, "help": "the longest sequence, in tokens"},
    "max_num_seqs": {"type": int, "help": "sequences a step"},
    "max_num_batched_tokens": {"type": int, "help": "tokens a step"},
    "gpu_memory_utilization": {"type": float, "help": "share of the GPU's memory to use"},
    "kv_cache_memory_bytes": {"type": int, "help": "size of the KV pool"},
    "block_size": {"type": int, "help": "tokens a KV block, a multiple of 8 in 8..512"},
    "enable_prefix_caching": {"action": argparse.BooleanOptionalAction, "help": "default: yes"},
    "enforce_eager": {"action": "store_true", "help": "no CUDA graphs"},
    "load_format": {"help": "auto, or dummy for random weights"},
    "quantization": {
        "help": "int2, int3, int4 or int8: round the layers' weights at load; "
        "fp8 or int8_w8a8: activations too"
    },
}

_SAMPLING_OPTIONS: dict[str, _Option] = {
    "n": {"type": int, "help": "completions of the prompt"},
    "temperature": {"type": float, "default": 0.0, "help": "default: 0, greedy"},
    "top_k": {"type": int, "help": "keep the k likeliest tokens"},
    "top_p": {"type": float, "help": "keep the likeliest tokens up to this mass"},
    "min_p": {"type": float, "help": "keep tokens with this share of the largest probability"},
    "repetition_penalty": {"type": float, "help": "1 is off"},
    "presence_penalty": {"type": float, "help": "-2..2, 0 is off"},
    "frequency_penalty": {"type": float, "help": "-2..2, 0 is off"},
    "logit_bias": {"type": _logit_bias, "metavar": "ID:BIAS,…", "help": "added to logits"},
    "seed": {"type": int, "help": "of the random numbers"},
    "max_tokens": {"type": _max_tokens, "default": 128, "help": "a number or none; default: 128"},
    "min_tokens": {"type": int, "help": "no end before that many tokens"},
    "stop": {"action": "append", "help": "a string that ends the text; may be given again"},
    "stop_token_ids": {"type": int, "nargs": "+", "help": "tokens that end the text"},
    "ignore_eos": {"action": "store_true", "help": "go on after the end of the text"},
    "include_stop_str_in_output": {"action": "store_true", "help": "keep the stop string"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction, "help": "default: yes"},
}


_TUNE_OPTIONS: dict[str, _Option] = {
    "shapes": {"metavar": "NxK,…", "help": "of weights, such as 28672x4096"},
    "model": {"help": "the weights of its layers: as for generate, or a config.json"},
    "rows": {"metavar": "M,…", "help": "row counts; default: a ladder from 1 to 4096"},
    "bits": {"type": int, "help": "of the codes: 2, 3, 4 or 8; default: 4"},
    "group_size": {"type": int, "help": "columns that share a scale; default: 128"},
    "output": {"metavar": "DIR", "help": "where the file goes, if not where it is looked for"},
    "dry_run": {"action": "store_true", "help": "measure, but write nothing"},
}

_TEXT: _Option = {"nargs": "+", "required": True, "metavar": "FILE"}

_QUANTIZE_OPTIONS: dict[str, _Option] = {
    "text": {**_TEXT, "help": 'to calibrate on: text, or .jsonl with a "text" in each line'},
    "method": {"help": "rtn, gptq or awq; default: gptq"},
    "bits": {"type": int, "help": "of the codes: 2, 3, 4 or 8; default: 4"},
    "group_size": {"type": int, "help": "inputs that share a scale, -1 for all; default: 128"},
    "symmetric": {
        "action": argparse.BooleanOptionalAction,
        "help": "no zero points; default: yes, but for format awq",
    },
    "order": {"help": "of columns in GPTQ: none, act, static or group; default: none"},
    "damping": {"type": float, "help": "of GPTQ's Hessian; default: 0.01"},
    "recipe": {"metavar": "FILE", "help": "JSON with these options, and overrides by module name"},
    "samples": {"type": int, "help": "windows of the text; default: 128"},
    "seq_len": {"type": int, "help": "tokens of each; default: 512"},
    "format": {"help": "compressed-tensors (the default), gptq or awq"},
    "device": {"help": "where layers are computed; default: cpu"},
    "sequential": {
        "action": argparse.BooleanOptionalAction,
        "help": "projections see what the quantized ones before them give; default: yes",
    },
}

_EVAL_OPTIONS: dict[str, _Option] = {
    "text": {**_TEXT, "help": "to predict"},
    "window": {"type": int, "help": "tokens that are seen at once; default: 1024"},
    "windows": {"type": int, "help": "at most so many of each file; default: all"},
    **{name: _ENGINE_OPTIONS[name] for name in ("dtype", "quantization", "max_model_len")},
    "device": {"help": "cpu or cuda; default: cpu"},
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastinfer", description="LLM inference on the CPU and the GPU.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--debug", action="store_true", help="a traceback for each error")
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", _generate, "complete a prompt")
    chat = command("chat", _chat, "talk with the model, a line of input a turn")
    command("doctor", _doctor, "what was built, what was found, and which backend each op uses")

    tune = command("tune", _tune, "measure how low-bit products are best cut on this GPU")
    _add_options(tune, _TUNE_OPTIONS)

    quantize = command("quantize", _quantize, "save a model with weights of few bits")
    evaluate = command("eval", _eval, "measure a model's perplexity on texts")
    for sub in (quantize, evaluate):
        sub.add_argument("model", help="a folder, a GGUF file, a hub id, or smollm2")
    quantize.add_argument("out", help="a folder that does not exist yet")
    _add_options(quantize, _QUANTIZE_OPTIONS)
    _add_options(evaluate, _EVAL_OPTIONS)

    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to complete; - reads it from stdin")
    source.add_argument("--prompt-file", help="a file that holds it")
    generate.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, not text to go on with"
    )
    for sub in (generate, chat):
        sub.add_argument(
            "--model", required=True, help="a folder, a GGUF file, a hub id, or smollm2"
        )
        sub.add_argument("--system", help="the system's message (implies --chat)")
        for title, options in (("engine", _ENGINE_OPTIONS), ("sampling", _SAMPLING_OPTIONS)):
            _add_options(sub.add_argument_group(title), options)
    return parser


def _add_options(group: Any, options: dict[str, _Option]) -> None:
    for name, option in options.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, **{"default": argparse.SUPPRESS, **option})

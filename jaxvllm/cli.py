"""The `jaxvllm` command: generate, inspect, convert, replay, trace.

Owns argument parsing and printing. Every import of another room happens inside the command that needs it, so
that `jaxvllm --help` answers at once.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxvllm import __version__

EXAMPLES = """examples:
  jaxvllm generate examples/tiny-kjv --prompt "In the beginning" --max-tokens 64 --seed 1
  jaxvllm generate Qwen3-0.6B --chat --prompt "Why is the sky blue?" --temperature 0.6 --max-tokens 512
  jaxvllm generate Qwen3-8B --tensor-parallel-size 2 --prompt "Once" --prompt "Twice" --json
  jaxvllm inspect Qwen3-0.6B
  jaxvllm inspect Llama-3.1-8B --device-gb 80 --tensor-parallel-size 2
  jaxvllm convert Qwen3-0.6B qwen3-0.6b
  jaxvllm replay tests/traces/*.json
  jaxvllm trace tests/traces/five_requests_eleven_blocks.json -o trace.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 with the reason on stderr, or 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["convert"]:  # these two have parsers of their own: python -m jaxvllm.NAME
        from jaxvllm.convert.__main__ import main as convert

        return convert(arguments[1:], prog="jaxvllm convert")
    if arguments[:1] == ["replay"]:
        from jaxvllm.replay import main as replay

        return replay(arguments[1:], prog="jaxvllm replay")
    args = make_parser().parse_args(arguments)
    try:
        return args.run(args)
    except OSError as error:
        named = error.filename and error.strerror
        print(f"error: {error.filename}: {error.strerror}" if named else f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxvllm",
        description="LLM inference in JAX and Pallas.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxvllm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="text from a model", description="Text from a model."))
    _add_inspect(
        commands.add_parser(
            "inspect",
            help="shape and bytes of a model and what fits, without loading it",
            description="What a model is, whether its files are whole, and what fits here.",
        )
    )
    trace = commands.add_parser("trace", help="a recorded schedule as a page to step through, or as a picture")
    trace.add_argument("file", metavar="FILE", help="a recording: Engine(record=FILE), jaxvllm.record, tests/traces")
    trace.add_argument("-o", "--output", required=True, metavar="OUT", help="OUT.html or OUT.png (needs matplotlib)")
    trace.set_defaults(run=run_trace)
    commands.add_parser("convert", help="Hugging Face checkpoint -> ours, and back (jaxvllm convert --help)")
    commands.add_parser("replay", help="recorded schedules through the scheduler (jaxvllm replay --help)")
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="Hugging Face directory, or one made by jaxvllm convert")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share the model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the checkpoint's")
    parser.add_argument("--max-model-len", type=int, help="tokens of a request at most (default: the model's)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a KV block (default: 64)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of each device (default: 0.9)")
    parser.add_argument("--device-gb", type=float, help="memory of a device that isn't here, in 10^9 bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_inspect)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="Hugging Face directory, or one made by jaxvllm convert")
    parser.add_argument("--prompt", action="append", default=[], help="text; may be given several times")
    parser.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        metavar="IDS",
        help="token ids, like 1,2,3 (no tokenizer needed)",
    )
    parser.add_argument("--chat", action="store_true", help="each --prompt is a user message in the chat template")
    about = "what isn't given here is the checkpoint's generation_config.json's, else vLLM's default"
    sampling = parser.add_argument_group("sampling", about)
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, help="nucleus sampling; 1.0: all tokens")
    sampling.add_argument("--top-k", type=int, help="sample from the K most probable; 0: all")
    sampling.add_argument("--min-p", type=float, help="least share of the top token's probability")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end where this text comes up")
    sampling.add_argument("--max-tokens", type=int, default=64, help="new tokens at most (default: 64)")
    sampling.add_argument(
        "--seed",
        type=int,
        help="prompt n (from 0) uses SEED + n (default: from engine seed 0, the same in every run)",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share the model")
    engine.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the checkpoint's")
    engine.add_argument("--max-model-len", type=int, help="tokens of a request at most (default: the model's)")
    engine.add_argument("--num-blocks", type=int, help="KV cache blocks (default: what fits)")
    engine.add_argument("--scheduling-policy", default="prefill_first", help="prefill_first or running_first")
    engine.add_argument("--record", metavar="FILE", help="write the schedule to FILE; see jaxvllm trace")
    engine.add_argument(
        "--generation-config", default="auto", metavar="auto|none",
        help="where defaults of sampling come from: PATH's generation_config.json (auto), or vLLM's own (none)",
    )  # fmt: skip
    engine.add_argument("--attention-backend", default="auto", help="auto, triton, mosaic, xla or reference")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Completes the prompts with an engine whose steps are compiled as they come up (a start in seconds)."""
    prompts: list[Any] = [*args.prompt, *map(_parse_ids, args.prompt_ids)]
    if not prompts:
        raise ValueError('nothing to do: give --prompt "text" or --prompt-ids 1,2,3')
    from jaxvllm.config import ModelConfig
    from jaxvllm.inputs import parse_prompt
    from jaxvllm.sampling_params import SamplingParams

    given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    given = {name: value for name, value in given.items() if value is not None}

    def sampling_params(defaults: SamplingParams) -> list[SamplingParams]:
        seeds = [None if args.seed is None else args.seed + number for number in range(len(prompts))]
        common = dict(given, stop=args.stop, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
        return [replace(defaults, seed=seed, **common) for seed in seeds]

    sampling_params(SamplingParams())
    vocab_size = ModelConfig.from_dir(args.path).vocab_size  # as wrong values above: refused before jax is imported
    for text, ids in zip(args.prompt_ids, prompts[len(args.prompt) :], strict=True):
        parse_prompt(ids, None, vocab_size, f"--prompt-ids {text!r}")
    from jaxvllm.engine import Engine

    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # on stderr
    logging.getLogger("jaxvllm").setLevel(logging.INFO)  # what the start does
    options = {
        name: getattr(args, name)
        for name in ("tensor_parallel_size", "dtype", "max_model_len", "num_blocks", "attention_backend",
                     "scheduling_policy", "record", "generation_config")
    }  # fmt: skip
    if args.chat:
        prompts[: len(args.prompt)] = _as_chats(args.path, args.prompt)
    with Engine(args.path, warmup=False, **options) as engine:
        sampling = sampling_params(engine.get_default_sampling_params())
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
    shown = [*args.prompt, *args.prompt_ids]
    for text, output in zip(shown, outputs, strict=True):
        print(_as_json(output) if args.json else f"> {text}\n{output.text or output.token_ids}\n")
    tokens = sum(len(output.token_ids) for output in outputs)
    print(f"{tokens} tokens in {seconds:.1f} s (compilation included)", file=sys.stderr)
    return 0


def _as_chats(path: str, texts: Sequence[str]) -> list[list[int]]:
    """Each as a user's message; before the engine starts, so that a missing template is said at once."""
    from jaxvllm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(path)
    if tokenizer is None:
        raise ValueError(f"--chat needs a tokenizer, and {path} has none")
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} must be token ids, like 1,2,3") from None


def _as_json(output: Any) -> str:
    completion = output.outputs[0]
    return json.dumps(
        {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_cached_tokens": output.num_cached_tokens,
        },
        ensure_ascii=False,
    )


def run_trace(args: argparse.Namespace) -> int:
    """Draws a recording."""
    from pathlib import Path

    from jaxvllm.drawing import draw

    draw(Path(args.file), Path(args.output))
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Prints what the model is and what fits; nothing is loaded. Status 1 when the weights wouldn't load."""
    from jaxvllm.config import EngineConfig
    from jaxvllm.inspection import as_text, inspect_model

    names = ("tensor_parallel_size", "dtype", "max_model_len", "block_size", "gpu_memory_utilization")
    engine = EngineConfig(**{name: getattr(args, name) for name in names})
    device_bytes = None if args.device_gb is None else int(args.device_gb * 1e9)
    facts = inspect_model(args.path, engine, device_bytes=device_bytes)
    print(json.dumps(facts) if args.json else as_text(facts))
    return 1 if facts["checkpoint"]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

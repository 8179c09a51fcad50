"""python -m jaxvllm.convert SRC DST: a Hugging Face folder -> our checkpoint (or back with --to hf)."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Sequence

from jaxvllm.config import DTYPE_BYTES

PROG = "jaxvllm convert"
EXAMPLES = """examples:
  jaxvllm convert Qwen3-0.6B qwen3-0.6b                    weights keep their dtype, bit for bit
  jaxvllm convert Qwen3-0.6B qwen3-0.6b --verify           read back and compared when it is written
  jaxvllm convert qwen3-0.6b --verify                      later: every byte against the checksums in manifest.json
  jaxvllm convert Llama-3.1-8B llama-f32 --dtype float32   cast on the way
  jaxvllm convert qwen3-0.6b Qwen3-again --to hf           the way back, one model.safetensors
  jaxvllm inspect Qwen3-0.6B                               first: can it be run here, and what fits?

A killed conversion leaves DST.partial; the same command goes on where it stopped. Any other error leaves nothing.
Neither torch nor a GPU is used, and memory stays within the largest tensor and 1 GB.
"""


def make_parser(prog: str = PROG) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Convert a checkpoint. Every tensor is checked first; DST appears when it is complete.",
        epilog=EXAMPLES.replace(PROG, prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors (--to hf: one of ours)")
    parser.add_argument(
        "dst",
        metavar="DST",
        nargs="?",
        help="folder to write; must not exist, except with --force. None, with --verify: check SRC",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), help="cast the weights (default: as they are)")
    parser.add_argument("--to", choices=("jaxvllm", "hf"), default="jaxvllm", help="format to write")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint in DST")
    parser.add_argument("--verify", action="store_true", help="read what is there again and compare its checksums")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """0 when DST was written (and found right), 1 with the reason on stderr when it wasn't."""
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    if args.dst is None and not args.verify:
        parser.error("give DST, or --verify to check SRC")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    _hush_orbax()

    import jax  # after --help

    jax.config.update("jax_platforms", "cpu")  # orbax starts a backend; a GPU's memory isn't ours to take here
    try:
        if args.dst is None:
            _verify(args.src, None)
            return 0
        from jaxvllm.convert import convert_checkpoint, export_hf

        start = time.perf_counter()
        write = export_hf if args.to == "hf" else convert_checkpoint
        done = write(args.src, args.dst, dtype=args.dtype, force=args.force)
        print(f"{done.path}: {done.num_tensors} {'tensors' if args.to == 'hf' else 'parameter arrays'}, "
              f"{done.num_params:,} parameters, {_size(done.num_bytes, time.perf_counter() - start)}")  # fmt: skip
        if args.verify:
            _verify(args.dst, done.checksums)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _hush_orbax() -> None:
    """When a disk fails, orbax's threads print tracebacks of what is reported here in one line anyway."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    threading.excepthook = lambda args: None
    sys.unraisablehook = lambda args: None


def _verify(path: str, checksums: dict[str, str] | None) -> None:
    from jaxvllm.convert.verify import verify_checkpoint

    start = time.perf_counter()
    num_bytes = verify_checkpoint(path, checksums)
    print(f"{path}: verified, {_size(num_bytes, time.perf_counter() - start)}")


def _size(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({num_bytes / 1e9 / seconds:.2f} GB/s)"


if __name__ == "__main__":
    sys.exit(main())

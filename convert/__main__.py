"""python -m jaxvllm.convert SRC DST: a Hugging Face folder -> our checkpoint (or back with --to hf)."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from jaxvllm.config import DTYPE_BYTES

PROG = "python -m jaxvllm.convert"
EXAMPLES = """examples:
  python -m jaxvllm.convert Qwen3-0.6B qwen3-0.6b                    weights keep their dtype, bit for bit
  python -m jaxvllm.convert Qwen3-0.6B qwen3-f32 --dtype float32     cast on the way
  python -m jaxvllm.convert qwen3-0.6b Qwen3-again --to hf           the way back
"""


def make_parser(prog: str = PROG) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Convert a checkpoint. Every tensor is checked first; DST appears when it is complete.",
        epilog=EXAMPLES.replace(PROG, prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors (--to hf: one of ours)")
    parser.add_argument("dst", metavar="DST", help="folder to write; must not exist, except with --force")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), help="cast the weights (default: as they are)")
    parser.add_argument("--to", choices=("jaxvllm", "hf"), default="jaxvllm", help="format to write")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint in DST")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """0 when DST was written, 1 with the reason on stderr when it wasn't."""
    args = make_parser(prog).parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")

    import jax  # after --help

    jax.config.update("jax_platforms", "cpu")  # orbax starts a backend; a GPU's memory isn't ours to take here
    from jaxvllm.convert import build

    start = time.perf_counter()
    try:
        write = build.export_hf if args.to == "hf" else build.convert_checkpoint
        done = write(args.src, args.dst, dtype=args.dtype, force=args.force)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    print(
        f"{done.path}: {done.num_tensors} tensors, {done.num_params:,} parameters, "
        f"{done.num_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({done.num_bytes / 1e9 / seconds:.2f} GB/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

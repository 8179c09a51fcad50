"""Trains examples/tiny-kjv: a Qwen3-architecture model of 3.5 million parameters, in minutes on one GPU.

    python examples/prepare_kjv.py .corpus/kjv.txt      (needs Debian's package bible-kjv)
    python examples/train_tiny.py --text .corpus/kjv.txt --out examples/tiny-kjv

    python examples/train_tiny.py --text .corpus/kjv.txt --out /tmp/smoke --device cpu --smoke --epochs 4

4 MB are little text: the model sees them for many epochs and would learn them by heart. What holds it back is
variational dropout on the weights (tiny_training.drop_features), weight decay, and the choice of the
checkpoint by the validation chapters. Several dropout rates are tried one after another (the compiled step is
the same) and the best is kept; the number of epochs is what fits into --time-limit, at most --epochs.

float32 master weights; forward and backward in bfloat16 on a GPU, float32 on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kjv_corpus import Documents, encode_documents, load_chapters, split_chapters
from kneser_ney import bits_per_byte as kneser_ney_bits_per_byte
from tiny_export import README, train_tokenizer, write_json, write_model
from tiny_training import Params, Recipe, epoch_windows, init_params, make_total_nats, make_train_epoch

from jaxvllm.config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    vocab_size=3072,
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope=RopeConfig(theta=10000.0),
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    dtype="bfloat16",
    eos_token_ids=(0,),  # train_tokenizer gives <|endoftext|> the id 0
)
DEFAULTS = Recipe(context=MODEL.max_position_embeddings)
SMOKE_MODEL = replace(
    MODEL, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
)  # fmt: skip


EVALUATE_EVERY = 4  # epochs


@dataclass(slots=True)
class Trial:
    """The best checkpoint (float32, on the host) of one dropout rate, and how it came about."""

    dropout: float
    validation: float  # bits per byte
    params: dict[str, np.ndarray]
    history: list[dict[str, float]]


class Trainer:
    """Compiled step and evaluation, shared by all trials."""

    def __init__(self, config: ModelConfig, recipe: Recipe, train: Documents, validation: Documents) -> None:
        dtype = jnp.dtype(jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)
        self.config, self.recipe, self.train, self.validation = config, recipe, train, validation
        self.train_epoch, self.optimizer = make_train_epoch(config, recipe, dtype)
        self.total_nats = make_total_nats(config, recipe.context, recipe.batch, dtype)

    def epoch_seconds(self) -> float:
        """Compiles everything, then times one block of EVALUATE_EVERY epochs; the average of one."""
        self.run(0.1, 1, log=False)
        begun = time.monotonic()
        self.run(0.1, EVALUATE_EVERY, log=False)
        return (time.monotonic() - begun) / EVALUATE_EVERY

    def run(self, dropout: float, epochs: int, log: bool = True) -> Trial:
        """One schedule from fresh weights, whole epochs (all of one shape: one compilation)."""
        rng, key = np.random.default_rng(self.recipe.seed), jax.random.key(self.recipe.seed + 1)
        params = init_params(self.config, self.recipe.seed)
        state = self.optimizer.init(params)
        best = Trial(dropout, float("inf"), {}, [])
        for epoch in range(epochs):
            windows = epoch_windows(self.train.token_ids, self.recipe, rng)
            step, total = jnp.float32(epoch * len(windows)), jnp.float32(epochs * len(windows))
            params, state, loss = self.train_epoch(params, state, step, windows, key, jnp.float32(dropout), total)
            if (epoch + 1) % EVALUATE_EVERY == 0 or epoch + 1 == epochs:
                self._evaluate(params, epoch + 1, float(loss), best)
                if log:
                    print(f"dropout {dropout}: {best.history[-1]}", flush=True)
        return best

    def _evaluate(self, params: Params, epoch: int, loss: float, best: Trial) -> None:
        validation = self.validation.bits_per_byte(self.total_nats(params, self.validation.token_ids))
        bits = self.train.bits_per_byte(loss * self.train.num_predicted)
        best.history.append({
            "epoch": epoch,
            "train_bits_per_byte": round(bits, 4),
            "validation_bits_per_byte": round(validation, 4),
        })  # fmt: skip
        if validation < best.validation:
            best.validation = validation
            best.params = {path: np.asarray(weight) for path, weight in params.items()}


def run_trials(trainer: Trainer, rates: list[float], epochs: int, deadline: float) -> list[Trial]:
    """Trains once per dropout rate, all for the same number of epochs: what ends before the deadline
    (time.monotonic seconds), at most ``epochs``."""
    pace = trainer.epoch_seconds()
    fitting = int((deadline - time.monotonic()) / (pace * len(rates)))
    if fitting < epochs:
        print(f"{pace:.2f} s an epoch: {max(1, fitting)} epochs a trial instead of {epochs} fit the time limit")
    return [trainer.run(dropout, max(1, min(epochs, fitting))) for dropout in rates]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="what prepare_kjv.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, e.g. examples/tiny-kjv")
    parser.add_argument("--epochs", type=int, default=100, help="at most, per dropout rate")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.2, 0.3], help="rates to try")
    parser.add_argument("--learning-rate", type=float, default=DEFAULTS.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=DEFAULTS.weight_decay)
    parser.add_argument("--batch", type=int, default=DEFAULTS.batch, help="windows of 1024 tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--device", choices=["default", "cpu"], default="default")
    parser.add_argument("--smoke", action="store_true", help="a much smaller model for a few steps: a test of the code")
    return parser.parse_args()


def main() -> int:
    args, begun = parse_args(), time.monotonic()
    if args.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    config = MODEL
    recipe = replace(
        DEFAULTS,
        batch=args.batch,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        seed=args.seed,
    )
    chapters = load_chapters(args.text)
    if args.smoke:
        config, chapters = SMOKE_MODEL, chapters[:60]
        recipe = replace(recipe, context=SMOKE_MODEL.max_position_embeddings)
    split = split_chapters(chapters)
    tokenizer = train_tokenizer(split.train, config.vocab_size)
    train, validation, held_out = (
        encode_documents(tokenizer, part) for part in (split.train, split.validation, split.held_out)
    )
    print(f"{jax.devices()[0].device_kind}: {train.num_predicted} training tokens", flush=True)

    trainer = Trainer(config, recipe, train, validation)
    reserve = 0.0 if args.smoke else 25.0  # the baseline, the last evaluation and the writing
    trials = run_trials(trainer, args.dropout, args.epochs, begun + args.time_limit - reserve)
    best = min(trials, key=lambda trial: trial.validation)

    # The figure that counts is of the weights as they are stored, computed in float32.
    stored = {path: weight.astype(ml_dtypes.bfloat16).astype(np.float32) for path, weight in best.params.items()}
    exact_nats = make_total_nats(config, recipe.context, recipe.batch, jnp.dtype(jnp.float32))
    metrics: dict[str, Any] = {
        "held_out_bits_per_byte": round(held_out.bits_per_byte(exact_nats(stored, held_out.token_ids)), 4),
        "validation_bits_per_byte": round(
            validation.bits_per_byte(exact_nats(stored, validation.token_ids)), 4
        ),
        "kneser_ney_held_out_bits_per_byte": round(
            kneser_ney_bits_per_byte(train, held_out, config.vocab_size), 4
        ),
        "parameters": sum(weight.size for weight in stored.values()),
        "dropout": best.dropout,
        "epochs": best.history[-1]["epoch"],
        "recipe": asdict(recipe),
        "tokens": {"train": train.num_predicted, "validation": validation.num_predicted,
                   "held_out": held_out.num_predicted},
        "bytes": {"train": train.num_bytes, "validation": validation.num_bytes,
                  "held_out": held_out.num_bytes},
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "command": command_line(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "text_sha256": hashlib.sha256(args.text.read_bytes()).hexdigest(),
        "trials": [{"dropout": trial.dropout, "validation_bits_per_byte": round(trial.validation, 4),
                    "history": trial.history} for trial in trials],
    }  # fmt: skip
    metrics["seconds"] = round(time.monotonic() - begun, 1)
    write_model(args.out, config, stored, tokenizer)
    write_json(args.out / "metrics.json", metrics)
    (args.out / "README.md").write_text(readme(config, recipe, metrics), encoding="utf-8")
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(
        f"{args.out}: {size / 1e6:.2f} MB; held out {metrics['held_out_bits_per_byte']} bits per byte, "
        f"Kneser-Ney trigram {metrics['kneser_ney_held_out_bits_per_byte']}; {metrics['seconds']} s"
    )
    return 0


def command_line(argv: list[str]) -> str:
    """The command that makes this model again; where it put the folder doesn't matter and isn't kept."""
    words = list(argv)
    if "--out" in words:
        words[words.index("--out") + 1] = "examples/tiny-kjv"
    return shlex.join(["python", *words])


def readme(config: ModelConfig, recipe: Recipe, metrics: dict[str, Any]) -> str:
    """The folder's README.md with this run's figures."""
    return README.format(
        parameters=metrics["parameters"],
        text_sha256=metrics["text_sha256"],
        vocab_size=config.vocab_size,
        command=metrics["command"],
        date=metrics["date"],
        device=metrics["device"],
        jax_version=metrics["jax"],
        seconds=metrics["seconds"],
        epochs=metrics["epochs"],
        recipe=recipe,
        dropout=metrics["dropout"],
        tried=", ".join(str(trial["dropout"]) for trial in metrics["trials"]),
        held_out_bytes=metrics["bytes"]["held_out"],
        held_out=metrics["held_out_bits_per_byte"],
        kneser_ney=metrics["kneser_ney_held_out_bits_per_byte"],
        validation=metrics["validation_bits_per_byte"],
        half_context=recipe.context // 2,
    )


if __name__ == "__main__":
    sys.exit(main())

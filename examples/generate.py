"""Load a model, complete two prompts: the README's example with every step compiled at the start (warmup)."""

from pathlib import Path

from jaxvllm import Engine, SamplingParams

if __name__ == "__main__":
    model = Path(__file__).parent / "tiny-kjv"  # or any folder with a dense Qwen3 checkpoint
    with Engine(
        model, max_num_seqs=2, max_num_batched_tokens=64, block_size=16, num_blocks=64, max_model_len=128,
        decode_buckets=[2], token_buckets=[64],  # one size of each kind: two steps to compile
        enable_processors=False,  # nobody here filters or penalises: half as much to compile
    ) as engine:  # fmt: skip
        prompts = ["In the beginning", "And it came to pass"]
        params = SamplingParams(temperature=0.8, max_tokens=40, seed=1)
        for output in engine.generate(prompts, params, use_tqdm=False):
            print(f"{output.prompt}{output.text}\n")

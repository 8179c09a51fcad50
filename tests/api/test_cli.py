"""The command line, end to end on the recorded checkpoints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxvllm
from jaxvllm import cli
from tests.kept_programs import kept_programs

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden_data"
TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"


def test_help_answers_without_jax_and_has_examples() -> None:
    code = (
        "import sys; from jaxvllm import cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "jaxvllm generate examples/tiny-kjv" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", ["generate", "inspect", "convert", "replay"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: jaxvllm {command}" in out
    assert "python -m" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxvllm {jaxvllm.__version__}\n"


def test_a_path_that_is_not_there_is_refused_without_jax() -> None:
    code = "import sys; from jaxvllm import cli; cli.main(sys.argv[1:]); print('jax' in sys.modules)"
    command = [sys.executable, "-c", code, "generate", "Qwen/Qwen3-0.6B", "--prompt", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in done.stderr


def test_inspect_counts_what_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters and bytes against the header of the safetensors file itself (no head: it is tied)."""
    folder = GOLDEN / "yarn_factor_4"
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    header.pop("lm_head.weight", None)
    assert {tensor["dtype"] for tensor in header.values()} == {"F32"}
    num_bytes = sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values())

    assert cli.main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == [num_bytes // 4, num_bytes]
    assert facts["tokenizer"] is False
    config = json.loads((folder / "config.json").read_text())
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert facts["kv_bytes_per_token"] == kv

    assert facts["checkpoint"] == {"format": "hf", "bytes": len(raw), "problems": []}
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"{num_bytes // 4:,} parameters" in capsys.readouterr().out


def test_generate_gives_the_recorded_greedy_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    folder = GOLDEN / "yarn_factor_4"
    case = json.loads((folder / "expected.json").read_text())["cases"][0]
    ids = ",".join(map(str, case["prompt"]))
    options = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--num-blocks", "4", "--json"]
    with kept_programs():
        assert cli.main(["generate", str(folder), "--prompt-ids", ids, *options]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["token_ids"] == case["greedy"][:8]
    assert out["finish_reason"] == "length"
    assert out["text"] == ""


def test_generate_samples_as_the_checkpoint_wants_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "yarn_factor_4", folder)
    case = json.loads((folder / "expected.json").read_text())["cases"][0]
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 5.0, "top_k": 1}))
    ids = ",".join(map(str, case["prompt"]))
    tokens = []
    for options in ([], ["--top-k", "0"], ["--generation-config", "none", "--temperature", "0"]):
        command = [
            "generate",
            str(folder),
            "--prompt-ids",
            ids,
            "--max-tokens",
            "8",
            "--ignore-eos",
            "--num-blocks",
            "4",
        ]
        with kept_programs():
            assert cli.main([*command, "--json", *options]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert tokens[0] == case["greedy"][:8] != tokens[1]  # its top_k of 1; without it, its temperature
    assert tokens[2] == case["greedy"][:8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "--prompt", "x"], "nowhere"),
        (["generate", "nowhere"], "--prompt"),
        (["generate", "nowhere", "--prompt-ids", "1,a"], "1,a"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["generate", str(GOLDEN / "yarn_factor_4"), "--prompt-ids", "1,331"], "'1,331'[1]=331 is no token id"),
        (["generate", str(GOLDEN / "yarn_factor_4"), "--prompt-ids", ""], "--prompt-ids '' is empty"),
        (["generate", str(GOLDEN / "yarn_factor_4"), "--chat", "--prompt", "x"], "--chat needs a tokenizer"),
        (["generate", str(TINY_KJV), "--chat", "--prompt", "x"], "no chat template"),
        (["inspect", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_end_with_a_message_and_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxvllm.startup.make_executor", None)  # before anything is loaded
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_replay_and_convert_reach_their_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(ROOT / "tests" / "traces" / "random_00.json")]) == 0
    assert "agree" in capsys.readouterr().out
    assert cli.main(["convert", str(tmp_path / "absent"), str(tmp_path / "made")]) == 1
    assert not (tmp_path / "made").exists()


def inspected(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    status = cli.main(["inspect", *options, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert status == (1 if facts["checkpoint"]["problems"] else 0)
    return facts


def test_inspect_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand for a device of 10 MB: budget - weights - a step, 1 % for the allocator, in 1/128 of the budget."""
    folder = str(GOLDEN / "yarn_factor_4")
    fits = inspected(capsys, folder, "--device-gb", "0.1", "--block-size", "16")["fits"]
    assert fits["budget_bytes"] == 90_000_000
    assert fits["weight_bytes"] == 187_712 * 4
    assert fits["block_bytes"] == 2 * 3 * 2 * 16 * 32 * 4
    by_row = 2 * 331 + 15 + 128 * 16  # counts, bias, recent tokens, bad words
    logits = 331 * (1 + 2 + 4 + 8 + 16 + 32 + 64 + 96 + 128 + 192 + 256)  # of each bucket's sequences
    assert fits["processor_bytes"] == 4 * (256 * by_row + logits)
    free = 90_000_000 - fits["weight_bytes"] - fits["processor_bytes"] - fits["step_bytes"] - 900_000
    step = 90_000_000 // 128 // fits["block_bytes"]
    assert fits["blocks"] == free // fits["block_bytes"] // step * step
    assert fits["tokens"] == fits["blocks"] * 16 and fits["sequences"] == fits["blocks"] // 32
    two = inspected(capsys, folder, "--device-gb", "0.1", "--block-size", "16", "--tensor-parallel-size", "2")["fits"]
    assert two["block_bytes"] * 2 == fits["block_bytes"] and fits["weight_bytes"] / 2 < two["weight_bytes"]
    assert cli.main(["inspect", folder, "--device-gb", "0.02"]) == 0
    assert "fits                        no: use a larger" in capsys.readouterr().out
    here = inspected(capsys, folder)["fits"]
    assert here["budget_bytes"] is None and here["blocks"] > 0
    assert cli.main(["inspect", folder, "--tensor-parallel-size", "3"]) == 1
    assert "tensor_parallel_size=3" in capsys.readouterr().err


def test_inspect_says_what_is_wrong_with_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text((GOLDEN / "yarn_factor_4" / "config.json").read_text())
    assert "holds neither" in inspected(capsys, str(folder))["checkpoint"]["problems"][0]
    raw = (GOLDEN / "yarn_factor_4" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-1])
    assert cli.main(["inspect", str(folder)]) == 1
    assert "is truncated" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(folder)]) == 1
    error = capsys.readouterr().err
    assert "MistralForCausalLM" in error and "LlamaForCausalLM (Llama 2 and 3)" in error


def test_a_file_that_is_not_there_is_named_without_an_error_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "nowhere.json", "-o", "x.html"]) == 1
    assert capsys.readouterr().err == "error: nowhere.json: No such file or directory\n"


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "jaxvllm", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"jaxvllm {jaxvllm.__version__}\n"

"""A conversion that is killed at a random moment: nothing or a whole one under the name, and the next run ends it.

Each round starts from what the one before left: sometimes nothing, sometimes the folder of one or several killed runs.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxvllm.config import ModelConfig
from jaxvllm.convert import convert_checkpoint, export_hf, load_params, verify_checkpoint
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR, expected_params, golden_copy, hf_tensors, keep, same_bits

NAME = "untied_sharded_index"
SOURCE = GOLDEN_DIR / NAME
ROUNDS, SLOW_ROUNDS = 8, 200
PART_BYTES = 100_000  # nine parts


class Zygote:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "tests.convert.zygote"], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         cwd=Path(__file__).parents[2])  # fmt: skip
        self._answer()

    def run(self, src: Path, dst: Path, *, delay: float | None, to: str = "jaxvllm", force: bool = False) -> dict:
        task = {"src": str(src), "dst": str(dst), "delay": delay, "to": to, "force": force, "part_bytes": PART_BYTES}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def assert_whole(folder: Path, source: Path = SOURCE) -> None:
    config = ModelConfig.from_dir(source)
    oracle = expected_params(hf_tensors(source), config, 1)
    loaded = load_params(folder, param_table(config), dtype="float32", put=keep)
    assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(SLOW_ROUNDS, marks=pytest.mark.slow)])
def test_killed_at_random_moments(zygote: Zygote, tmp_path: Path, rounds: int) -> None:
    """Kills until a run gets through, again and again; counts that kills really hit conversions halfway."""
    whole = zygote.run(SOURCE, tmp_path / "first", delay=None)
    assert whole["status"] == 0
    chance = random.Random(rounds)
    halfway = resumed = kills = 0
    for number in range(rounds):
        target = tmp_path / str(number)
        partial = tmp_path / f"{number}.partial"
        while True:
            delay = chance.uniform(0, whole["seconds"] * 1.1)
            before = partial.is_dir()
            result = zygote.run(SOURCE, target, delay=delay)
            kills += result["killed"]
            if target.exists():  # whether it was killed or not: it is whole
                assert_whole(target)
                verify_checkpoint(target)
                assert names(tmp_path) <= {"first", target.name, partial.name}
                resumed += before
                break
            assert result["killed"], result
            halfway += (partial / "journal.jsonl").is_file()
            if chance.random() < 0.3:  # otherwise it's killed again
                assert zygote.run(SOURCE, target, delay=None)["status"] == 0
                assert_whole(target)
                verify_checkpoint(target)
                assert names(tmp_path) == {"first", target.name}
                resumed += 1
                break
        for left in (target, partial):
            subprocess.run(["rm", "-rf", str(left)], check=True)
    assert kills >= rounds // 4 and halfway >= rounds // 8 and resumed >= rounds // 8, (kills, halfway, resumed)
    print(f"{rounds} rounds: {kills} kills, {halfway} halfway, {resumed} finished by a later run")


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_while_replacing_another(zygote: Zygote, tmp_path: Path, rounds: int) -> None:
    """With --force there is the old checkpoint or the new one at every moment, never none and never a mixture."""
    other = golden_copy("yarn_factor_4", tmp_path / "other")
    seconds = zygote.run(SOURCE, tmp_path / "first", delay=None)["seconds"]
    chance = random.Random(rounds)
    target = tmp_path / "target"
    convert_checkpoint(other, target)
    for number in range(rounds):
        source, before = (SOURCE, other) if number % 2 == 0 else (other, SOURCE)
        # late moments: the exchange is at the end
        result = zygote.run(source, target, delay=chance.uniform(0.5, 1.1) * seconds, force=True)
        try:
            assert_whole(target, source)
        except ValueError:  # another model's: the old one
            assert result["killed"]
            assert_whole(target, before)
            assert zygote.run(source, target, delay=None, force=True)["status"] == 0
            assert_whole(target, source)
        verify_checkpoint(target)


def test_killed_exports(zygote: Zygote, tmp_path: Path) -> None:
    convert_checkpoint(SOURCE, tmp_path / "ours")
    seconds = zygote.run(tmp_path / "ours", tmp_path / "first", delay=None, to="hf")["seconds"]
    chance = random.Random(0)
    for number in range(6):
        target = tmp_path / str(number)
        zygote.run(tmp_path / "ours", target, delay=chance.uniform(0, seconds), to="hf")
        if not target.exists():
            assert zygote.run(tmp_path / "ours", target, delay=None, to="hf")["status"] == 0
        assert_whole(target)


def test_a_run_goes_on_only_with_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source, another dtype, a damaged part, a torn journal: what can't be trusted is written again."""
    monkeypatch.setattr("jaxvllm.convert.build.PART_BYTES", PART_BYTES)
    source = golden_copy(NAME, tmp_path / "src")

    def stop_after(parts: int) -> None:
        """Leaves what a kill after so many parts leaves."""
        partial = tmp_path / "ours.partial"

        class Killed(BaseException):
            pass

        def no_cleaning(*args: object, **options: object) -> None:
            return None

        from jaxvllm.convert.workfolder import WorkFolder

        noted = WorkFolder.part_done

        def note(self: WorkFolder, line: dict) -> None:
            noted(self, line)
            if line["part"] == f"part-{parts - 1:05d}":
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(WorkFolder, "part_done", note)
            patched.setattr("jaxvllm.convert.workfolder._remove", no_cleaning)
            with pytest.raises(Killed):
                convert_checkpoint(source, tmp_path / "ours")
        assert len((partial / "journal.jsonl").read_text().splitlines()) == parts + 1

    def written_now() -> list[str]:
        """The parts that the next run writes."""
        from jaxvllm.convert import parts

        written: list[str] = []
        save = parts.save_part

        def spy(saver: Any, folder: Path, params: Any) -> None:
            written.append(folder.name)
            save(saver, folder, params)

        with monkeypatch.context() as patched:
            patched.setattr("jaxvllm.convert.parts.save_part", spy)
            convert_checkpoint(source, tmp_path / "ours")
        assert_whole(tmp_path / "ours", source)
        verify_checkpoint(tmp_path / "ours")
        assert names(tmp_path) == {"src", "ours"}
        subprocess.run(["rm", "-rf", str(tmp_path / "ours")], check=True)
        return written

    every = written_now()
    assert len(every) > 5
    stop_after(3)
    assert written_now() == every[3:]

    stop_after(3)
    journal = tmp_path / "ours.partial" / "journal.jsonl"
    journal.write_text(journal.read_text()[:-20])  # the last line is torn: its part is written again
    assert written_now() == every[2:]

    stop_after(3)
    data = max((tmp_path / "ours.partial" / "checkpoint" / "params" / "part-00001").rglob("*"),
               key=lambda p: p.stat().st_size if p.is_file() else 0)  # fmt: skip
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert written_now() == every[1:]

    stop_after(3)
    shard = next(source.glob("model-00001*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)  # another source of the same sizes
    assert written_now() == every


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    import fcntl

    from jaxvllm.convert import CheckpointError

    (tmp_path / "ours.partial").mkdir()
    with (tmp_path / "ours.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            convert_checkpoint(SOURCE, tmp_path / "ours")
        assert (tmp_path / "ours.partial").is_dir()
    convert_checkpoint(SOURCE, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert names(tmp_path) == {"ours", "back"}

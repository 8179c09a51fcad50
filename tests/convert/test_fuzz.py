"""Hostile folders: whatever config.json, index, header and manifest hold, a named error (or a load that is right).

Never a crash, a hang or a large allocation: each example has a limit of memory, and the whole a limit of time.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxvllm.config import ConfigError, ModelConfig
from jaxvllm.convert import CheckpointError, convert_checkpoint, load_params, verify_checkpoint
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR, golden_copy, keep

MAX_BYTES, MAX_SECONDS = 64 << 20, 5.0
SHARDED, SINGLE = "untied_sharded_index", "yarn_factor_4"
TRAVERSAL = ["../x", "/etc/passwd", "a/../../x", "..", "", "a\0b", "\\\\host\\x", "x" * 5000, "params/../../x"]
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
    st.sampled_from([*TRAVERSAL, 2**31, 2**40, 2**62, 2**63, -1, 0, 10**30, "F32", "BF16", "I64", "float32", "bfloat16",
                     [], {}, [[]], {"a": {}}, [2**40, 2**40], [0, 2**62], [-1], [1.5], "e" * 10_000]),
    st.lists(st.integers(-(2**65), 2**65), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)  # fmt: skip
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def paths_in(value: Any, at: tuple = ()) -> list[tuple]:
    """Every place in a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [p for k, v in inside for p in paths_in(v, (*at, k))]


def damaged(document: Any, data: st.DataObject) -> Any:
    """The document with one to three places replaced, removed, or renamed."""
    document = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(paths_in(document)))
        if not place:
            continue
        parent = document
        for key in place[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
        if action == "replace" or isinstance(parent, list):
            parent[place[-1]] = copy.deepcopy(data.draw(junk))  # sampled_from hands out one object each time
        else:
            value = parent.pop(place[-1])
            if action == "rename":
                parent[data.draw(st.sampled_from([*TRAVERSAL, "other", "lm_head.weight"]))] = value
    return document


def attempt(action: Callable[[], object]) -> None:
    """Runs it: an error must be one of ours and name something; memory and time stay small."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        action()
    except (CheckpointError, ConfigError) as error:
        message = str(error)
    else:
        message = "it was right"
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(message) > 10 and peak < MAX_BYTES
    assert time.perf_counter() - started < MAX_SECONDS


def load(folder: Path) -> None:
    load_params(folder, param_table(ModelConfig.from_dir(folder)), dtype="float32", put=keep)


@pytest.mark.parametrize(("model", "name"), [(SINGLE, "config.json"), (SHARDED, "model.safetensors.index.json")])
@FUZZ
@given(data=st.data())
def test_configs_and_indices(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, model: str, name: str
) -> None:
    folder = golden_copy(model, tmp_path_factory.mktemp("fuzz") / "m")
    file = folder / name
    file.write_text(json.dumps(damaged(json.loads(file.read_text()), data)))
    attempt(lambda: load(folder))
    shutil.rmtree(folder)


@FUZZ
@given(data=st.data())
def test_headers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = golden_copy(SINGLE, tmp_path_factory.mktemp("fuzz") / "m")
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = json.dumps(damaged(json.loads(raw[8 : 8 + length]), data)).encode()
    claimed = data.draw(st.sampled_from([len(text)] * 6 + [0, len(text) - 1, 2**62, 99_999_999]))
    file.write_bytes(struct.pack("<Q", claimed) + text + raw[8 + length :])
    attempt(lambda: load(folder))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    convert_checkpoint(GOLDEN_DIR / SINGLE, tmp_path_factory.mktemp("fuzz") / "ours")
    return next(iter(tmp_path_factory.getbasetemp().glob("fuzz*/ours")))


@FUZZ
@given(data=st.data())
def test_manifests(ours: Path, data: st.DataObject) -> None:
    manifest = ours / "manifest.json"
    good = manifest.read_text()
    manifest.write_text(json.dumps(damaged(json.loads(good), data)))
    try:
        attempt(lambda: load(ours))
        attempt(lambda: verify_checkpoint(ours))
    finally:
        manifest.write_text(good)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "jaxvllm"', "\ud800", "1e999"])
def test_manifests_that_are_no_json(ours: Path, text: str) -> None:
    manifest = ours / "manifest.json"
    good = manifest.read_text()
    manifest.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            load(ours)
    finally:
        manifest.write_text(good)


def test_nothing_outside_is_read(ours: Path, tmp_path: Path) -> None:
    """A manifest whose file names lead out of the folder, to bytes that would fit."""
    folder = tmp_path / "a" / "ours"
    shutil.copytree(ours, folder)
    fields = json.loads((folder / "manifest.json").read_text())
    name = fields["params"]["embed"]["file"]
    (tmp_path / "a" / "secret").write_bytes((folder / name).read_bytes())
    for outside in ("../secret", str(tmp_path / "a" / "secret"), "params/../../secret"):
        changed = json.loads(json.dumps(fields))
        changed["files"][outside] = changed["files"][name]
        changed["params"]["embed"]["file"] = outside
        (folder / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="lies outside of the folder"):
            load(folder)

"""Settings of every test run: the platform is fixed here, before any test imports jax.

By default everything runs on the CPU with 8 fake devices. JAXVLLM_TEST_GPU=1 leaves the platform to jax, for
`make test-gpu`; tests marked `gpu` are skipped without it. Tests marked `slow` need `--slow`.

Compiling is most of the suite's time. So XLA runs at level 0 (the arithmetic is the same), and engines that are alike
share what is compiled, within a worker: tests/kept_programs.py. (jax's folder of compiled programs isn't used: writing
them costs more than the rare hits save.)
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from tests.xla_flags import QUICK

NUM_FAKE_DEVICES = 8
ON_GPU = os.environ.get("JAXVLLM_TEST_GPU", "") not in ("", "0")

if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flags = (os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={NUM_FAKE_DEVICES}", QUICK,
                 "--xla_cpu_multi_thread_eigen=false")  # fmt: skip
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a tenth of lowering goes into where each operation is from
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that started them
        os.environ["JAXVLLM_TESTS_DIR"] = tempfile.mkdtemp(prefix="jaxvllm-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_sessionstart(session: pytest.Session) -> None:
    if ON_GPU and not hasattr(session.config, "workerinput"):
        # in a process of its own: in this one it would fix the share of memory before an engine asks for it
        code = "import jax; print(jax.default_backend())"
        backend = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        if backend != "gpu":
            pytest.exit(f"no GPU is visible to jax (its backend is {backend or 'broken'!r})", 1)


def pytest_unconfigure() -> None:
    if not ON_GPU and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["JAXVLLM_TESTS_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gc.set_threshold(50_000, 20, 50)  # tracing makes few cycles: looking for them every 700 objects is 3 % of a run
    without_gpu = pytest.mark.skip(reason="needs a GPU: make test-gpu")
    too_slow = pytest.mark.skip(reason="slow: pass --slow")
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(without_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)

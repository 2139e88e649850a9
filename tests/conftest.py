"""Fixtures and settings of the whole test suite.

Environment:
    KVS_TEST_MODEL       path of SmolLM2-135M-Instruct.Q4_1.gguf; without it, models/ at the repository root
    KVS_TEST_CACHE       folder for derived models, kept between runs; without it, models/ at the repository root
    KVS_TEST_LONG        1: tests that take every case of theirs, for an hour, and SmolLM2 where small models would do
    HYPOTHESIS_PROFILE   ``default`` or ``ci`` (fewer examples, always the same); without it, ``ci`` where ``CI`` is set
    CI                   makes a missing model a failure instead of a skip
"""

from __future__ import annotations

import os

# Before NumPy is loaded, and for child processes: BLAS sums in another order with another number of threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.float_copy import write_float_copy

MODELS = Path(__file__).parents[1] / "models"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

# A machine shared with other work makes single examples slow, so neither profile looks at time.
hypothesis.settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("default"), derandomize=True, max_examples=20
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    """A command sets up logging for its process; the tests after it listen to the loggers as they were."""
    yield
    for name in ("kvs_core", "kvs_cli"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: a real model of 98 MB."""
    path = Path(os.environ.get("KVS_TEST_MODEL") or MODELS / SMOLLM2)
    if not path.is_file():
        message = f"{path} is missing: run  python benchmarks/fetch_smollm2.py  or set KVS_TEST_MODEL"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def smollm2_float_path(smollm2_path: Path) -> Path:
    """The same model with its weights dequantised to float32: 540 MB, written once and used again by later runs."""
    folder = Path(os.environ.get("KVS_TEST_CACHE") or MODELS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{smollm2_path.stem}.float32.gguf"
    if not path.is_file() or path.stat().st_mtime < smollm2_path.stat().st_mtime:
        write_float_copy(smollm2_path, path)
    return path

"""The tests of this folder need torch and pytorch-quantization; without them they skip and say so."""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

MISSING = [
    n for n in ("torch", "absl", "pytorch_quantization") if importlib.util.find_spec(n) is None
]


class _SkippedModule(pytest.Module):
    """A test file that is not even imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(
            f"needs {', '.join(MISSING)} (pip install 'qdqtool[qat]')", allow_module_level=True
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if MISSING and module_path.name != "test_without_torch.py":
        return _SkippedModule.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session", autouse=True)
def one_quiet_torch() -> Iterator[None]:
    """One thread each (tests run side by side), and without pytorch-quantization's notes on every quantizer."""
    if MISSING:
        yield
        return
    import torch
    from absl import logging

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.set_verbosity(logging.ERROR)
    yield
    torch.set_num_threads(before)

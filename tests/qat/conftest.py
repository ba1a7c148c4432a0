import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

MISSING = [
    n for n in ("torch", "absl", "pytorch_quantization") if importlib.util.find_spec(n) is None
]


class _SkippedModule(pytest.Module):
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
def limit_threads_and_logs() -> Iterator[None]:
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

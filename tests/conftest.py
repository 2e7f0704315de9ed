import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.poison import poison

ROOT = Path(__file__).parents[1]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Where the Triton kernels can run: on a GPU, or on CPU tensors under the interpreter.
KERNEL_DEVICE = "cpu" if INTERPRETED else "cuda" if torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("kernels") and KERNEL_DEVICE is None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1"))


@pytest.fixture
def kernel_device() -> str:
    assert KERNEL_DEVICE is not None
    return KERNEL_DEVICE


@pytest.fixture
def launched(kernel_device, monkeypatch):
    """Names of the kernels launched, in order; the direct path is open on ``kernel_device``."""
    from moe_custom_ops import op
    from moe_custom_ops.launch import Launch

    names = []
    launch = Launch.__call__

    def spy(self, *first):
        names.append(self.kernel.fn.__name__)
        return launch(self, *first)

    monkeypatch.setattr(Launch, "__call__", spy)
    monkeypatch.setattr(op, "CUDA", kernel_device == "cuda")
    monkeypatch.setattr(op, "PLANS", op.Plans())
    return names


@contextmanager
def dispatched() -> Iterator[None]:
    """Nothing inside goes past the dispatcher, and no gradient comes from a kernel."""
    from moe_custom_ops import op

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_is_plain_mode", lambda: False)
        yield


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    poison(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _reset_dynamo():
    yield
    torch._dynamo.reset()

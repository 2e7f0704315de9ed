import os
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
    from moe_custom_ops import direct
    from moe_custom_ops.aux_loss import direct as aux
    from moe_custom_ops.expert_permutation import direct as permutation
    from moe_custom_ops.sequence_aux_loss import direct as sequence
    from moe_custom_ops.triton_common import Launch
    from moe_custom_ops.weighted_restore import direct as restore

    names = []
    launch = Launch.__call__

    def spy(self, *first):
        names.append(self.kernel.fn.__name__)
        return launch(self, *first)

    monkeypatch.setattr(Launch, "__call__", spy)
    monkeypatch.setattr(direct, "CUDA", kernel_device == "cuda")
    for room in (aux, permutation, restore, sequence):
        monkeypatch.setattr(room, "_PLANS", direct.Plans())
    monkeypatch.setattr(restore, "_PERMUTE_PLANS", direct.Plans())
    monkeypatch.setattr(restore, "_INVERSIONS", direct.Plans())
    monkeypatch.setattr(restore, "_SCORES_PLANS", direct.Plans())
    monkeypatch.setattr(permutation, "_MAP_PLANS", direct.Plans())
    monkeypatch.setattr(permutation, "_COUNTS_PLANS", direct.Plans())
    return names


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

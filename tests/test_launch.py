"""A launch that was compiled once is repeated without Triton's look-up. This needs no GPU."""

import types

import pytest
import torch

from moe_custom_ops import launch as launches


class Kernel:
    """What a JIT function does for ``Launch``: it compiles, launches, and returns what it made."""

    arg_names = ("x_ptr", "y_ptr", "bits", "n", "BLOCK", "OVERLAP")

    def __init__(self):
        self.looked_up, self.repeated = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.looked_up.append((grid, arguments, options))
            return types.SimpleNamespace(
                run=lambda *arguments: self.repeated.append(arguments),
                function="function",
                packed_metadata="metadata",
            )

        return launch


@pytest.fixture
def gpu(monkeypatch):
    """The few questions that a launch asks of a GPU: what device and stream are current."""
    current = types.SimpleNamespace(device=0, entered=[], hooks=[])

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.entered.append(self.index)

        def __exit__(self, *error):
            pass

    stream = lambda index: f"stream {index}"  # noqa: E731
    monkeypatch.setattr(launches, "_get_device", lambda: current.device)
    monkeypatch.setattr(launches, "_get_stream", stream)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(launches, "_can_overlap", lambda device: True)
    hook = types.SimpleNamespace(calls=current.hooks)
    runtime = types.SimpleNamespace(launch_enter_hook=hook)
    monkeypatch.setattr(launches, "_runtime", lambda: runtime)
    return current


def make(kernel, programs=7):
    device = torch.device("cuda:0")
    return launches.Launch(kernel, programs, device, 33, BLOCK=16, num_warps=2, overlap=True)


def test_the_second_launch_repeats_the_first(gpu):
    kernel = Kernel()
    launch = make(kernel)
    x, y = torch.rand(3), torch.rand(3)
    launch(x, None, 5)
    options = {"BLOCK": 16, "num_warps": 2, "OVERLAP": True, "launch_pdl": True}
    options["enable_fp_fusion"] = False
    assert kernel.looked_up == [((7, 1, 1), (x, None, 5, 33), options)]
    launch(y, None, 6)
    launch(y, x, 2**40)
    assert len(kernel.looked_up) == 1
    common = (7, 1, 1, "stream 0", "function", "metadata", None, None, None)
    assert kernel.repeated == [
        (*common, y.data_ptr(), None, 6, 33, 16, True),
        (*common, y.data_ptr(), x.data_ptr(), 2**40, 33, 16, True),
    ]


def test_on_another_device_it_is_looked_up_under_its_own(gpu):
    kernel = Kernel()
    launch = make(kernel)
    launch(None, None, 5)
    gpu.device = 1
    launch(None, None, 6)
    assert gpu.entered == [0, 0] and len(kernel.looked_up) == 2 and not kernel.repeated
    gpu.device = 0
    launch(None, None, 7)
    assert len(kernel.repeated) == 1


def test_a_profiler_s_hook_is_called_by_triton(gpu):
    kernel = Kernel()
    launch = make(kernel)
    launch(None, None, 5)
    gpu.hooks.append(print)
    launch(None, None, 6)
    assert len(kernel.looked_up) == 2 and not kernel.repeated


def test_nothing_is_launched_for_no_programs(gpu):
    kernel = Kernel()
    launch = make(kernel, programs=0)
    launch(None, None, 5)
    launch(None, None, 5)
    assert not kernel.looked_up and not kernel.repeated

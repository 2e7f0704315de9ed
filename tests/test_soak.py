"""A short form of ``make soak``, and what it is there to find."""

import pytest
import torch

from moe_custom_ops.testing import soak

CPU = torch.device("cpu")


def test_a_short_soak(capsys):
    assert soak.main(["--compiled", "80", "--captured", "400"]) == 0
    out = capsys.readouterr().out
    assert "compiled: 80 steps" in out and "the same bits, memory and caches" in out
    if torch.cuda.is_available():
        assert "captured: 400 steps on cuda:0" in out
    else:
        assert "captured: 400 steps skipped, which need an NVIDIA GPU" in out


@pytest.fixture
def plain(monkeypatch):
    """A step that is neither compiled nor captured, over few inputs."""
    monkeypatch.setattr(soak, "TOKEN_COUNTS", (2, 5))
    monkeypatch.setattr(soak, "SEEDS", 2)
    return lambda key: soak.step(soak.forward, soak.with_lengths(soak.draw(*key), key[0]))


def test_nothing_is_wrong_with_a_plain_step(plain):
    assert soak.drive("plain", plain, 40, CPU) == 0


def test_one_bit_is_found(plain, capsys):
    def run(key):
        results = plain(key)
        if key == (5, 1):
            results[-1].view(torch.int32)[-1, -1] ^= 1
        return results

    assert soak.drive("flipped", run, 40, CPU) == 1
    assert "other bits than on the CPU for (5, 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "leak"),
    [
        ("host", lambda: torch.ones(2**19)),
        ("Python blocks", lambda: [[] for _ in range(200)]),
    ],
)
def test_a_leak_is_found(what, leak, plain, capsys):
    kept = []

    def run(key):
        kept.append(leak())
        return plain(key)

    assert soak.drive("leaking", run, 40, CPU) == 1
    assert f"{what} memory grew" in capsys.readouterr().out


def test_a_growing_cache_is_found(plain, capsys):
    sizes = iter(range(2, 100))
    with torch._dynamo.config.patch(recompile_limit=100):
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

        def run(key):
            compiled(torch.zeros(next(sizes)))
            return plain(key)

        assert soak.drive("recompiling", run, 3, CPU) == 1
    assert "caches grew from {'graphs': " in capsys.readouterr().out

"""What an adapter says of a framework that is missing, or in another version."""

import importlib.metadata
import warnings

import pytest

from moe_custom_ops.integrations.versions import numbers, require


def test_a_missing_framework_says_what_to_install():
    message = r"needs no-such-package for this.*pip install 'no-such-package>=1\.2,<2'"
    with pytest.raises(ImportError, match=message):
        require("no_such_module", "no-such-package", "1.2", "2")


def test_another_version_warns_once_and_a_tested_one_does_not():
    version = importlib.metadata.version("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require("torch", "torch", "2.0", "99")
    with pytest.warns(UserWarning, match=r"tested with torch>=98,<99, and this is") as seen:
        require("torch", "torch", "98", "99")
    assert len(seen) == 1 and version in str(seen[0].message)


def test_numbers_of_a_version():
    assert numbers("5.24.0.dev0+abc") == (5, 24, 0)
    assert numbers("5.9") < numbers("5.24") < numbers("5.24.1") < numbers("5.25")


def test_a_source_checkout_without_metadata(monkeypatch):
    def none(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require("torch", "torch", "2.0", "99")
    with pytest.warns(UserWarning, match="and this is of unknown version"):
        require("wave", "wave", "98", "99")


def test_a_name_that_a_version_lacks():
    message = r"needs no_such_name of torch\.nn, which torch .* has not; install a tested one: pip"
    with pytest.raises(ImportError, match=message):
        require("torch.nn", "torch", "2.0", "99", "Module", "no_such_name")

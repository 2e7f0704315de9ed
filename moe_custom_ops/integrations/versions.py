"""What every adapter asks first: is its framework there, and in a version that was tested."""

import importlib
import importlib.metadata
import re
import sys
import warnings


def require(module: str, package: str, lowest: str, beyond: str, *names: str) -> None:
    """Import ``module`` of ``package``; tested from ``lowest`` up to before ``beyond``.

    Raises:
        ImportError: it cannot be imported, or has not all of ``names``; says what to install.

    Another version than a tested one gives one warning.
    """
    wanted = f"{package}>={lowest},<{beyond}"
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"moe_custom_ops.integrations needs {package} for this, which cannot be imported "
            f"({error}); install it: pip install '{wanted}'"
        ) from error
    version = _version(module, package)
    missing = [name for name in names if not hasattr(imported, name)]
    if missing:
        raise ImportError(
            f"moe_custom_ops.integrations needs {', '.join(missing)} of {module}, which {package} "
            f"{version} has not; install a tested one: pip install '{wanted}'"
        )
    if not numbers(lowest) <= numbers(version) < numbers(beyond):
        warnings.warn(
            f"moe_custom_ops.integrations was tested with {wanted}, and this is {version}",
            stacklevel=2,
        )


def _version(module: str, package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A source checkout on the path.
        top = sys.modules[module.partition(".")[0]]
        return str(getattr(top, "__version__", "of unknown version"))


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: "5.24.0.dev0" as (5, 24, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()

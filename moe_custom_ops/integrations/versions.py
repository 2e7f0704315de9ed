"""What every adapter asks first: is its framework there, and in a version that was tested."""

import importlib
import importlib.metadata
import re
import warnings


def require(module: str, package: str, lowest: str, beyond: str) -> None:
    """Import ``module`` of ``package``; tested from ``lowest`` up to before ``beyond``.

    Raises:
        ImportError: it cannot be imported; says what to install.

    Another version than a tested one gives one warning.
    """
    wanted = f"{package}>={lowest},<{beyond}"
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"moe_custom_ops.integrations needs {package} for this, which cannot be imported "
            f"({error}); install it: pip install '{wanted}'"
        ) from error
    version = importlib.metadata.version(package)
    if not numbers(lowest) <= numbers(version) < numbers(beyond):
        warnings.warn(
            f"moe_custom_ops.integrations was tested with {wanted}, and this is {version}",
            stacklevel=2,
        )


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: "5.24.0.dev0" as (5, 24, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()

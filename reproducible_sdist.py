"""The command that makes an sdist of the same bytes from the same files.

That of setuptools writes into it who builds, when, and with which permissions.
"""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools.command.sdist import sdist

# The first time that a zip can hold, as of wheels.
EARLIEST = 315532800


class Sdist(sdist):
    def make_archive(self, *arguments: Any, **options: Any) -> str:
        path = Path(super().make_archive(*arguments, **options))
        path.write_bytes(normalised(path, int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST))))
        return str(path)


def normalised(path: Path, time: int) -> bytes:
    """The .tar.gz with its members in order, all of one ``time`` and of nobody."""
    archive = io.BytesIO()
    with (
        tarfile.open(path) as old,
        gzip.GzipFile("", "wb", mtime=time, fileobj=archive) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, time
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member))
    return archive.getvalue()

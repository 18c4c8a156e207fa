"""setuptools as build backend, with the same bytes in a wheel or sdist whenever and wherever it is built.

What an archive says of time, users and permissions is set here. The date is that of SOURCE_DATE_EPOCH where it is
given, and the first that a zip can hold where it is not.
"""

import gzip
import io
import os
import tarfile
import time
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

FIRST_DATE = 315_532_800  # 1980-01-01, in seconds since 1970
FILE, FOLDER = 0o644, 0o755


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """The name of the wheel, written to the folder."""
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as found:
        files = [(info.filename, found.read(info)) for info in found.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in files:
            info = zipfile.ZipInfo(file, time.gmtime(_date())[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix, whose permissions follow
            info.external_attr = (0o100000 | FILE) << 16
            wheel.writestr(info, content)
    return name


def build_sdist(sdist_directory, config_settings=None):
    """The name of the sdist, written to the folder: the project and its PKG-INFO."""
    name = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory, name)
    with tarfile.open(path) as found:
        members = sorted((member for member in found if not _is_made(member.name)), key=lambda member: member.name)
        contents = [found.extractfile(member).read() if member.isfile() else b"" for member in members]
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as sdist:
        for member, content in zip(members, contents, strict=True):
            info = tarfile.TarInfo(member.name)
            info.type, info.size, info.mtime = member.type, len(content), _date()
            info.mode = FILE if member.isfile() else FOLDER
            sdist.addfile(info, io.BytesIO(content))
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=_date()) as packed:
        packed.write(written.getvalue())
    return name


def _is_made(name):
    """Whether setuptools adds a file, and makes it again from what is beside it."""
    inside = name.split("/")[1:]
    return inside[:1] == ["setup.cfg"] or any(part.endswith(".egg-info") for part in inside)


def _date():
    return int(os.environ.get("SOURCE_DATE_EPOCH", FIRST_DATE))

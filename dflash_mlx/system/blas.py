"""Load an optimised BLAS before MLX on Linux, in place of the slow one that `mlx-cpu` bundles."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OPENBLAS_PACKAGE = "cmeel-openblas"
FORTRAN_PACKAGES = ("mlx-cpu", "numpy")  # wheels that bundle libgfortran, best choice first
FORTRAN_SONAME = b"libgfortran.so.5"


@dataclass(frozen=True)
class BlasStatus:
    """Which library now serves matrix products; None where it is MLX's own."""

    library: str | None

    @property
    def threads(self) -> int:
        """How many it uses; 0 without a library."""
        return ctypes.CDLL(self.library).openblas_get_num_threads() if self.library else 0


class _UnusableError(Exception):
    """Why OpenBLAS cannot serve MLX, and what the user can do about it."""


@functools.cache
def preload() -> BlasStatus:
    """Make OpenBLAS serve MLX's matrix products; call it before `mlx.core` is imported.

    Does nothing outside Linux. Never raises: when OpenBLAS cannot be used it warns once with
    `RuntimeWarning`, which says why and what to do.
    """
    if sys.platform != "linux":
        return BlasStatus(None)
    try:
        return BlasStatus(str(_load_openblas()))
    except _UnusableError as error:
        why, next_step = error.args
        slower = "matrix products will be about 50 times slower on this machine"
        warnings.warn(f"{slower}, because {why}; {next_step}", RuntimeWarning, stacklevel=2)
        return BlasStatus(None)


def _load_openblas() -> Path:
    if "mlx.core" in sys.modules:
        raise _UnusableError(
            "mlx.core was imported before OpenBLAS could be loaded", "import dflash_mlx first"
        )
    found = _files_of(OPENBLAS_PACKAGE, lambda name: name == "libopenblas.so")
    if not found:
        raise _UnusableError(
            f"the package {OPENBLAS_PACKAGE} is not installed", f"pip install {OPENBLAS_PACKAGE}"
        )
    library = found[0]
    try:
        _load_globally(library)
    except OSError:  # a bare machine lacks the libgfortran.so.5 that this OpenBLAS asks for
        _load_bundled_fortran()
        try:
            _load_globally(library)
        except OSError as error:
            raise _UnusableError(
                f"OpenBLAS does not load ({error})", "install your system's libgfortran5 package"
            ) from error
    return library


def _load_globally(library: Path) -> None:
    # Global symbols are searched before those of a library's own dependencies, so MLX's calls
    # to cblas_* end up here.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_bundled_fortran() -> None:
    """Load the libgfortran of an installed wheel under the name that OpenBLAS asks for."""
    why = f"neither the system nor {' nor '.join(FORTRAN_PACKAGES)} has libgfortran"
    for package in FORTRAN_PACKAGES:
        for fortran in _files_of(package, lambda name: name.startswith("libgfortran")):
            try:
                for quadmath in _files_of(package, lambda name: name.startswith("libquadmath")):
                    ctypes.CDLL(str(quadmath))
                return _load_renamed(fortran)
            except (OSError, ValueError) as error:
                why = f"the libgfortran of {package} does not load ({error})"
    raise _UnusableError(why, "install your system's libgfortran5 package")


def _load_renamed(fortran: Path) -> None:
    """Load a copy of `fortran`, in memory, whose SONAME is `FORTRAN_SONAME`."""
    if sys.platform != "linux":  # for the type checker there
        raise OSError("memory files are a feature of Linux")
    mangled = os.fsencode(fortran.name)
    contents = fortran.read_bytes()
    if contents.count(mangled) != 1 or len(mangled) < len(FORTRAN_SONAME):
        raise ValueError(f"cannot rename {fortran.name}")
    descriptor = os.memfd_create("libgfortran")
    with open(descriptor, "wb") as copy:
        copy.write(contents.replace(mangled, FORTRAN_SONAME.ljust(len(mangled), b"\0")))
        copy.flush()
        ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _files_of(package: str, wanted: Callable[[str], bool]) -> list[Path]:
    """The installed files of a package whose base names are wanted; none if it is missing."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    located = [Path(str(file.locate())) for file in files if wanted(file.name)]
    return [path for path in located if path.is_file()]

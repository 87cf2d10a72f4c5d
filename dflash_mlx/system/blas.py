"""Load an optimised BLAS before MLX on Linux, in place of the slow one that `mlx-cpu` bundles."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OPENBLAS_PACKAGE = "cmeel-openblas"
_VERSION = "<0.3.30"  # 0.3.31 is built for AVX-512 alone, and ends the process elsewhere
FORTRAN_PACKAGE = "mlx-cpu"  # whose wheel bundles libgfortran
FORTRAN_SONAME = b"libgfortran.so.5"
_INSTALL_FORTRAN = "install your system's libgfortran5 package"


@dataclass(frozen=True)
class BlasStatus:
    """What serves matrix products now."""

    library: str | None  # None where it is MLX's own
    threads: int = 0  # that it uses where it has the machine to itself; 0 without a library


class Threads:
    """Leaves OpenBLAS the cores that no other process uses; `tick` it before every pass.

    Its threads share every product evenly and wait for each other: with one of two cores busy, two
    threads are several times slower than one.
    """

    _PERIOD = 0.4  # seconds
    _SLACK = 0.3  # of a core that others may use: there are always some

    def __init__(
        self,
        most: int,  # threads where nothing else runs
        use: Callable[[int], object],  # sets their number
        busy: Callable[[], tuple[float, float]],  # seconds of all on our cores, and our own
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = self._now = most
        self._use, self._busy, self._clock = use, busy, clock
        self._last = (clock(), *busy()) if most > 1 else (0.0, 0.0, 0.0)

    def tick(self) -> None:
        if self._most < 2 or (now := self._clock()) - self._last[0] < self._PERIOD:
            return
        (before, all_before, own_before), (everybody, own) = self._last, self._busy()
        self._last = now, everybody, own
        others = ((everybody - all_before) - (own - own_before)) / (now - before)
        wanted = max(1, self._most - math.ceil(max(others - self._SLACK, 0.0)))
        if wanted != self._now:
            self._use(wanted)
            self._now = wanted


def threads() -> Threads:
    """For the library that `preload` has loaded, on the cores that this process may use."""
    served = preload()

    def use(count: int) -> None:
        ctypes.CDLL(served.library).openblas_set_num_threads(count)

    return Threads(served.threads, use, _busy_seconds)


def _busy_seconds() -> tuple[float, float]:
    """Of all processes on our cores, and of our own, since they began."""
    own = os.times()
    if sys.platform != "linux":  # for the type checker there
        return 0.0, own.user + own.system
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *counts = line.split()
            if name in cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError):  # hidden or of another shape: as if we were alone
        return own.user + own.system, own.user + own.system
    return ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system


class _UnusableError(Exception):
    """Why OpenBLAS cannot serve MLX, and what the user can do about it."""


@functools.cache
def preload() -> BlasStatus:
    """Make OpenBLAS serve MLX's matrix products; call it before `mlx.core` is imported.

    Does nothing outside Linux. Where OpenBLAS cannot be used, one RuntimeWarning says why.
    """
    if sys.platform != "linux":
        return BlasStatus(None)
    try:
        library = str(_load_openblas())
        return BlasStatus(library, ctypes.CDLL(library).openblas_get_num_threads())
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
    found = _files_of(OPENBLAS_PACKAGE, "libopenblas.so")
    if not found:
        raise _UnusableError(
            f"the package {OPENBLAS_PACKAGE} is not installed",
            f"pip install '{OPENBLAS_PACKAGE}{_VERSION}'",
        )
    library = min(found)
    try:
        _load_globally(library)
    except OSError:  # a bare machine lacks the libgfortran.so.5 that this OpenBLAS asks for
        _load_bundled_fortran()
        try:
            _load_globally(library)
        except OSError as error:
            raise _UnusableError(f"OpenBLAS does not load ({error})", _INSTALL_FORTRAN) from error
    return library


def _load_globally(library: Path) -> None:
    # Global symbols are searched before those of a library's own dependencies, so MLX's calls
    # to cblas_* end up here.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_bundled_fortran() -> None:
    """Load the libgfortran of an installed wheel under the name that OpenBLAS asks for."""
    why = f"neither the system nor {FORTRAN_PACKAGE} has libgfortran"
    try:
        for quadmath in _files_of(FORTRAN_PACKAGE, "libquadmath"):
            ctypes.CDLL(str(quadmath))
        for fortran in _files_of(FORTRAN_PACKAGE, "libgfortran"):
            return _load_renamed(fortran)
    except (OSError, ValueError) as error:
        why = f"the libgfortran of {FORTRAN_PACKAGE} does not load ({error})"
    raise _UnusableError(why, _INSTALL_FORTRAN)


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


def _files_of(package: str, start: str) -> list[Path]:
    """The installed files of a package whose names begin so; none if it is missing."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    located = [Path(str(file.locate())) for file in files if file.name.startswith(start)]
    return [path for path in located if path.is_file()]

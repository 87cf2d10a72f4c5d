"""What counts say of an Apple GPU's speed, to compare geometries and inner loops; not a time.

Cycles that a SIMD-group's instruction takes of its scheduler, of which a core has four, as measured
by others on an M1 and M2 (philipturner/metal-benchmarks); a multiply-add takes one.
"""

from __future__ import annotations

import math

from kernels_metal.emulator.launcher import Counters
from kernels_metal.factory import Launch

PRODUCT = 20.1  # of 8x8 matrices in float32, which are 16 multiply-adds of each lane
UNPACK = 5.0  # of an integer to a number: an `and`, and 4 for the conversion
ACCESS = 4.0  # to memory, where it is in a cache; assumed
SATURATED = 24  # SIMD-groups in flight that keep the arithmetic of a core busy


def share_of_peak(counters: Counters, multiply_adds: int, unpacked: int) -> float:
    """How much of the arithmetic peak a launch can reach: its useful work over all of its work.

    multiply_adds: that the result takes. unpacked: integers that become numbers. Bandwidth, launch
    gaps and what the compiler makes of indices are left out, so it is an upper bound.
    """
    accesses = counters.device_accesses + counters.threadgroup_accesses
    alone = max(multiply_adds - 512 * counters.matrix_products, 0)  # by single lanes
    by_lanes = alone + UNPACK * unpacked + ACCESS * accesses
    return multiply_adds / (32 * PRODUCT * counters.matrix_products + by_lanes)


def busy_share(plan: Launch, cores: int) -> float:
    """How much of a GPU of so many cores a launch keeps busy, if all its threadgroups take as long.

    Some cores idle while the others do their last threadgroup, and where a core has few SIMD-groups
    nothing hides the time that loads take.
    """
    pairs = zip(plan.grid, plan.threadgroup, strict=True)
    each = math.prod(-(-grid // size) for grid, size in pairs) / cores
    groups = math.prod(plan.threadgroup) / 32
    return each / math.ceil(each) * min(1.0, each * groups / SATURATED)

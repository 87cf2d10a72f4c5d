"""DFlash 2's grouped dynamic convolution over the rows of a block.

out[t, c] = sum_j (base[j, c] + delta[t, j, group(c)]) x[t - j, c], with zeros before a block's
first row. Two of them stand around each sub-layer. Both deltas are one projection of what goes
into the first: [before | after], in each tap by tap, in each tap group by group.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class ConvolutionConfig:
    """kernel_size: taps. group_size: neighbouring channels that share a delta."""

    kernel_size: int
    group_size: int


class DynamicConvolution(nn.Module):
    """The convolutions before and after a sub-layer of width d.

    base_kernel: [2, taps, d], before and after. kernel_projection: d -> 2 * taps * groups.
    """

    def __init__(self, d: int, config: ConvolutionConfig) -> None:
        super().__init__()
        self._kernel = 2, config.kernel_size, d // config.group_size
        self.base_kernel = mx.zeros((2, config.kernel_size, d))
        self.kernel_projection = nn.Linear(d, 2 * config.kernel_size * self._kernel[2], bias=False)

    @property
    def is_identity(self) -> bool:
        """Whether what comes out is what goes in, whatever that is."""
        now, earlier = self.base_kernel[:, 0], self.base_kernel[:, 1:]
        if (mx.any(now != 1) | mx.any(earlier != 0)).item():
            return False
        deltas = self.kernel_projection(mx.eye(self.base_kernel.shape[-1]))  # packed or not
        return not mx.any(deltas != 0).item()

    def before(self, x: mx.array, branches: int) -> tuple[mx.array, mx.array]:
        """The sub-layer's input from x [1, n, d], and the deltas of the convolution after it.

        branches: how many blocks of n / branches rows x holds, side by side.
        """
        deltas = mx.unflatten(self.kernel_projection(x), -1, self._kernel)
        first, second = deltas[..., 0, :, :], deltas[..., 1, :, :]
        return convolve(x, first, self.base_kernel[0], branches), second

    def after(self, x: mx.array, deltas: mx.array, branches: int) -> mx.array:
        """The sub-layer's output x [1, n, d], convolved."""
        return convolve(x, deltas, self.base_kernel[1], branches)


def convolve(x: mx.array, deltas: mx.array, base: mx.array, branches: int = 1) -> mx.array:
    """The sum above of x [1, n, d], deltas [1, n, taps, groups] and base [taps, d]."""
    taps, groups = deltas.shape[-2:]
    channels = (groups, x.shape[-1] // groups)
    blocks = mx.unflatten(mx.unflatten(x, -1, channels), 1, (branches, -1))
    deltas = mx.unflatten(deltas, 1, (branches, -1))[..., None]
    kernel = mx.unflatten(base, -1, channels).astype(x.dtype)
    rows = blocks.shape[2]
    out = mx.zeros_like(blocks)
    for j in range(min(taps, rows)):
        shifted = mx.pad(blocks[:, :, : rows - j], [(0, 0), (0, 0), (j, 0), (0, 0), (0, 0)])
        out = out + (kernel[j] + deltas[:, :, :, j]) * shifted
    return out.reshape(x.shape)

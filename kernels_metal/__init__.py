"""Metal kernels, each beside a pure-MLX reference: arrays in, arrays out.

    factory      launches kernels, on Metal or by another executor
    operations   attention, draft head, tree walk, cache commit, quantised product
    dispatch     kernel or reference, decided on each machine and why
    emulator     runs the kernels' source on a CPU and checks it

This package knows nothing of decoding and imports nothing from `dflash_mlx`.
"""

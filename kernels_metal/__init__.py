"""Metal kernels, each beside a pure-MLX reference: arrays in, arrays out.

    catalog      the table of operations: begin here, then read one, as norm_rope
    operation    what an operation is, and random calls of it
    factory      launches kernels, on Metal or by another executor
    dispatch     kernel or reference, decided on each machine and why
    watchdog     kernels are tried in a process of their own (trial) first
    sweep        kernels against references at random shapes
    mac          what the report from a Mac measures, and its words
    emulator     runs the kernels' source on a CPU and checks it; nothing else imports it

This package knows nothing of decoding and imports nothing from `dflash_mlx`.
"""

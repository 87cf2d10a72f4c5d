"""The text of every variant of every kernel in a folder, as MLX would give it to Apple's compiler.

MLX puts its own `utils.h` before each: scripts/compile_metal.py does so too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernels_metal.emulator.lint import check
from kernels_metal.emulator.signature import signature
from kernels_metal.factory import settled
from kernels_metal.variants import calls, launches


def write_texts(folder: Path) -> list[Path]:
    """The files, each named for its kernel and constants. EmulatorError for what the lint refuses.

    OSError where they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for call in calls():
        for kernel, inputs, plan in launches(call):
            check(kernel, plan)
            text = signature(kernel, inputs, plan)
            name = settled(kernel, plan.template)[0]
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]  # inputs differ, too
            files[folder / f"{name}-{digest}.metal"] = text
    for file, text in files.items():
        file.write_text(text, encoding="ascii")
    return [*files]

"""Settings of the chat itself; its help texts are those of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from dflash_mlx.cli.options import option
from dflash_mlx.client import DFlashError, FaceConfig


@dataclass(frozen=True)
class ChatConfig(FaceConfig):
    """How the chat starts; DFlashError for a theme that is not known."""

    resume: bool = option(False, "open the newest conversation", action="store_true")
    conversations: Path | None = option(
        None, "folder of the conversations (default: the user's data folder)", type=Path
    )

    @property
    def folder(self) -> Path:
        """Where conversations are kept; DFlashError below the home of a user who does not exist."""
        if self.conversations is not None:
            try:
                return self.conversations.expanduser()
            except RuntimeError:
                what = f"there is no home folder for {self.conversations}"
                raise DFlashError(what, "name another folder with --conversations") from None
        return platformdirs.user_data_path("dflash-chat") / "conversations"

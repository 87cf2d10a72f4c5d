"""The one exception users see: what went wrong, with which value, and what to do next."""

from collections.abc import Callable


class DFlashError(Exception):
    """A problem the user can act on; `str()` is one sentence for the screen.

    `what` names the problem and the offending value; `next_step` says what to do about it.
    `setting` is the field of a settings class that `what` begins with, "" where it does not.
    Command lines print it and exit with code 2; the chat shows it and stays usable.
    """

    def __init__(self, what: str, next_step: str, setting: str = "") -> None:
        super().__init__(f"{what}; {next_step}")
        self.what = what
        self.next_step = next_step
        self.setting = setting

    def told(self, name: Callable[[str], str]) -> str:
        """The sentence, with what its reader knows the setting by: an option, a label on screen."""
        if not self.setting:
            return str(self)
        return f"{name(self.setting)}{self.what.removeprefix(self.setting)}; {self.next_step}"

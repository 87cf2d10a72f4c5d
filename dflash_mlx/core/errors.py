"""The one exception users see: what went wrong, with which value, and what to do next."""


class DFlashError(Exception):
    """A problem the user can act on; `str()` is one sentence for the screen.

    `what` names the problem and the offending value; `next_step` says what to do about it.
    Command lines print it and exit with code 2; the chat shows it and stays usable.
    """

    def __init__(self, what: str, next_step: str) -> None:
        super().__init__(f"{what}; {next_step}")
        self.what = what
        self.next_step = next_step

"""The ways in which a command can fail; the codes are part of the interface."""


class OverlayError(Exception):
    """Ends the command with its text; never a traceback."""

    code = 1


class WrongTarget(OverlayError):
    code = 2


class Refused(OverlayError):
    """Going on would lose something that is not ours. Nothing has changed."""

    code = 3

"""The ways in which a command can end; the codes are part of the interface."""

FAILED, WRONG, REFUSED = 1, 2, 3
INTERRUPTED = 130  # 128 and the signal's number, as in a shell


class OverlayError(Exception):
    """Ends the command with its text; never a traceback."""

    code = FAILED


class WorkFailed(OverlayError):
    """A build, an installation, a write."""


class WrongTarget(OverlayError):
    code = WRONG


class Refused(OverlayError):
    """Going on would lose something that is not ours."""

    code = REFUSED

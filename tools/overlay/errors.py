"""The ways in which a command can end; the codes are part of the interface."""

FAILED = 1
WRONG = 2
REFUSED = 3
INTERRUPTED = 130  # 128 and the signal's number, as in a shell


class OverlayError(Exception):
    """Ends the command with its text; never a traceback."""

    code = FAILED


class WorkFailed(OverlayError):
    """The work itself failed: a build, an installation, a write."""

    code = FAILED


class WrongTarget(OverlayError):
    """Wrong usage, or a target that is not what it must be."""

    code = WRONG


class Refused(OverlayError):
    """Going on would lose something that is not ours."""

    code = REFUSED

"""The ways in which a command can end; the codes are part of the interface."""

DONE = 0
FAILED = 1
WRONG = 2
REFUSED = 3


# As shells count the signals that end a process.
INTERRUPTED = 130
TERMINATED = 143


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

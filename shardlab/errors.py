"""The error a user can mend, and the exit codes that scripts rely on."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `shardlab` returns to the shell."""

    DONE = 0
    FAILURE = 1  # a failure of the program or of a rank
    USER = 2  # the user can mend it; one line says how
    STOPPED = 75  # saved and stopped on a signal (EX_TEMPFAIL: what schedulers take for "run it again")


class UserError(Exception):
    """What the user can mend: one line says what is wrong, where, and what to do. Ends the program with code 2."""

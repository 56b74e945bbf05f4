"""Failures that a user can act on: one sentence each, with the exit code that tells a scheduler what to do.

The codes are the project's contract for every step and role: 0 done, 64 bad configuration, 65 bad data, 69 a service
is gone, 70 a defect, 75 told to leave with the work handed back. They follow BSD sysexits(3).
"""

from __future__ import annotations

DONE = 0
BAD_CONFIG = 64
BAD_DATA = 65
SERVICE_GONE = 69
DEFECT = 70
TOLD_TO_LEAVE = 75


class Failure(Exception):
    """A failure with one sentence for the user: what is wrong, where, and the mend."""

    exit_code = DEFECT

    @property
    def sentence(self) -> str:
        """The message on one line, as it is printed and stored in a step's marker."""
        return " ".join(str(self).split())


class BadConfig(Failure):
    """The configuration, the command line or this machine cannot carry the run as asked."""

    exit_code = BAD_CONFIG


class BadData(Failure):
    """A dataset, a checkpoint or another input holds something the run cannot use."""

    exit_code = BAD_DATA


class ServiceGone(Failure):
    """Redis, the tracking server, the object store or a role stopped answering."""

    exit_code = SERVICE_GONE


class ToldToLeave(Failure):
    """A signal asked this process to go; its unfinished work was handed back."""

    exit_code = TOLD_TO_LEAVE


def failure_of(exit_code: int, sentence: str) -> Failure:
    """Rebuild the failure that another process reported.

    Args:
        exit_code: Its exit status; one this contract does not name counts as a defect.
        sentence: What it printed or stored.
    """
    for kind in (BadConfig, BadData, ServiceGone, ToldToLeave):
        if kind.exit_code == exit_code:
            return kind(sentence)
    return Failure(sentence)

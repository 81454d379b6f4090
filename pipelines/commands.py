"""How a command ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from trainer.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, TrainerError
from trainer.signals import ended_by_sigterm


def exit_code(command: Callable[[], object], *, debug: bool = False, interrupted: str = "interrupted") -> int:
    """Run a command; an error that the user can mend ends in one message.

    Args:
        command: what is to be done.
        debug: whether to show the traceback of such an error.
        interrupted: what to say after Ctrl-C or SIGTERM.
    """
    try:
        with ended_by_sigterm():
            command()
    except TrainerError as error:
        sys.stdout.flush()
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0

"""How a command about a cluster ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainer.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, TrainerError
from trainer.signals import ended_by_sigterm


def exit_code(command: Callable[[], None]) -> int:
    """Run a command; an error that the user can mend ends in one message."""
    try:
        with ended_by_sigterm():
            command()
    except TrainerError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0

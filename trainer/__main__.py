"""`python -m trainer`, and the script `vit-distill`, which an installation brings."""

import logging
import multiprocessing
import os
import sys
import threading
from typing import NoReturn

from trainer.cli import main


def leave(code: int) -> NoReturn:
    """End this process, also where a failure has left a thread to itself, such as one that asks a store which does not answer.

    Python ends such a thread in the middle of torch's native code. That code answers with SIGABRT, and the exit code would be lost.
    """
    if code and any(thread.daemon for thread in threading.enumerate()):
        for process in multiprocessing.active_children():
            process.terminate()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def console() -> NoReturn:
    """Run the command line and end this process."""
    leave(main())


if __name__ == "__main__":
    console()

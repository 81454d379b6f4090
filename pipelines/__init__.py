"""The pipeline: its definition, its compiled form, and its run on this machine."""

import sys

from components.launch import missing_extra
from trainer.io.errors import EXIT_CODE

if message := missing_extra("the package `pipelines`"):
    # `python -m pipelines.deploy` is being located: this is a command, which ends in one message.
    if sys.argv[:1] == ["-m"]:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    raise ModuleNotFoundError(message)

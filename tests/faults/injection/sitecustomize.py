"""Python imports this at its start where PYTHONPATH leads here: `tests/faults/jobs.py` does that to the jobs that it starts."""

from tests.faults.inside import install_from_environment

install_from_environment()

"""One of two training processes hangs: the other one does not wait for ever, and the message names it.

`make test-faults` has the others: every signal, SIGTERM, NaN, a hung loader, slow processes, clocks, and that the job then goes on.
"""

import pytest

from tests.faults.bench import Bench
from tests.faults.inside import Fault
from tests.faults.promises import stops
from trainer.io.errors import EXIT_CODE


@pytest.mark.long
def test_a_process_that_hangs_is_named(digits, teacher, tmp_path):
    job = Bench(tmp_path, dataset=digits, teacher=teacher).pair()
    job.environment = {"TRAINER_WAIT_S": "30"}
    message = "process 0 of 2: rank 1 did not come to .* within 30 s"
    kept = stops(job, Fault(does="SIGSTOP", rank=1, step=5), code=EXIT_CODE, message=message)
    assert kept.seconds > 25

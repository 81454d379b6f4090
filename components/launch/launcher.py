"""Running a stage as a job on a node pool: submitted, followed to its end, and recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from components.launch.api_errors import (
    ApiRetry,
    ApiUnavailableError,
    ClusterError,
    KindNotInstalledError,
    format_duration,
)
from components.launch.backends import BACKENDS
from components.launch.client import Cluster
from components.launch.diagnosis import explain_failure, fails_again
from components.launch.following import Follower
from components.launch.identity import Identity
from components.launch.job_progress import JobLimits, JobOutcome, JobProgress
from components.launch.pools import Pool
from components.launch.record import JobRecord
from components.launch.submitting import TaskJob
from trainer import storage
from trainer.errors import LaunchError
from trainer.launch import JobSpec

logger = logging.getLogger(__name__)

MINUTE_S = 60.0
AWAY_LIMIT_S = 900.0
"""How long the API server may be away before the launcher gives up; the job then goes on."""
DELETE_LIMIT_S, GONE_LIMIT_S = 5.0, 15.0
"""How long a deletion is tried, and its end waited for, after Ctrl-C."""
ATTEMPTS = 3
"""How many jobs a task may have in a run, one after the other, as long as they fail in a way that need not come again."""
PAUSE_S = 10.0
"""How long the next one is held back, for what has failed to be over."""


class _JobFailedError(LaunchError):
    """A job failed in a way that need not come again."""


class ClusterLauncher:
    """Runs jobs on a node pool."""

    def __init__(
        self,
        pool: Pool,
        identity: Identity,
        *,
        cluster: Cluster | None = None,
        record: str | None = None,
        attempts: int = ATTEMPTS,
        away_limit_s: float = AWAY_LIMIT_S,
    ) -> None:
        """Choose where.

        Args:
            pool: the node pool.
            identity: whose job it is; its attempt is counted here.
            cluster: where the pool is; None: found when a job is run.
            record: URI below which job.json, status.json, events.json and logs/REPLICA.log are written, however the job ends; those
                of further attempts go to attempt-2, attempt-3 below it.
            attempts: how many jobs the task may have in its run.
            away_limit_s: how long the API server may be away.
        """
        self._pool, self._identity, self._cluster = pool, identity, cluster
        self._record, self._attempts, self._away_limit_s = record, attempts, away_limit_s

    def run(self, spec: JobSpec) -> None:
        """Run a job to its end. One of the same run, task and specification that goes on already is followed further.

        One that fails by what need not come again, such as a lost machine or a crash, is made again.

        Raises:
            LaunchError: naming the replica that failed, why, and the next move; or the limit that was reached; or what the
                cluster refuses.
            ApiUnavailableError: the API server was away for too long, and the job goes on.
            KeyboardInterrupt: Ctrl-C; the job was deleted.
        """
        if self._cluster:
            self._run(spec, self._cluster)
        else:
            with Cluster.connect(self._identity.namespace) as cluster:
                self._run(spec, cluster)

    def _run(self, spec: JobSpec, cluster: Cluster) -> None:
        if doubt := self._pool.price.doubt() if self._pool.price else "":
            logger.warning("pool %s: %s", self._pool.name, doubt)
        record, attempt = self._record, 0
        while True:
            job = TaskJob(cluster, BACKENDS[self._pool.backend], spec, self._pool, self._identity)
            try:
                return self._follow(job, spec, cluster, record)
            except _JobFailedError as failure:
                attempt = max(
                    attempt + 1, job.attempt
                )  # a job that was ended here is deleted, and no longer counted there
                if attempt >= self._attempts:
                    raise
                logger.warning("%s", failure)
                logger.warning("made again in %g s: attempt %d of %d", PAUSE_S, attempt + 1, self._attempts)
                record = self._record and storage.join(self._record, f"attempt-{attempt + 1}")
                time.sleep(PAUSE_S)

    def _follow(self, job: TaskJob, spec: JobSpec, cluster: Cluster, record_uri: str | None) -> None:
        tell, progress, retry = _teller(job), self._progress(spec), ApiRetry(self._away_limit_s)
        with (
            JobRecord(record_uri) as record,
            Follower(cluster, job, progress, retry, record=record, tell=tell) as follower,
        ):
            with _abandoned_in_order(job, follower, tell):
                made = job.submit(retry)
                tell(
                    f"made for {spec.nodes} nodes of pool {self._pool.name}"
                    if made
                    else "goes on already; followed further"
                )
                ending = follower.follow()
                if ending.kind == "limit":
                    raise (_JobFailedError if ending.retryable else LaunchError)(f"job {job.name} {ending.message}")
            _conclude(ending, job, progress)

    def _progress(self, spec: JobSpec) -> JobProgress:
        pool = self._pool
        limits = JobLimits(
            queued_s=MINUTE_S * pool.queued_minutes,
            running_s=MINUTE_S * pool.running_minutes,
            silent_s=MINUTE_S * pool.silent_minutes,
            retries=pool.retries,
        )
        return JobProgress(nodes=pool.elastic_min_nodes or spec.nodes, limits=limits, now=time.monotonic())


def _teller(job: TaskJob) -> Callable[[str], None]:
    """Lines about a job, with the seconds since now."""
    start = time.monotonic()
    return lambda text: logger.info("[%6.1f s] job %s: %s", time.monotonic() - start, job.name, text)


@contextmanager
def _abandoned_in_order(job: TaskJob, follower: Follower, tell: Callable[[str], None]) -> Iterator[None]:
    """Delete a job that nobody follows any more, whatever ended the block; but leave it where the API server is away.

    Raises:
        ApiUnavailableError: the API server was away for too long.
    """
    try:
        yield
    except ApiUnavailableError as error:
        left = (
            f"; job {job.name} is left to itself: the same task, run again, follows it further" if job.may_exist else ""
        )
        raise type(error)(f"{error}{left}") from error
    except BaseException:  # Ctrl-C too
        _delete(job, follower, tell)
        raise


def _delete(job: TaskJob, follower: Follower, tell: Callable[[str], None]) -> None:
    try:
        if not ApiRetry(DELETE_LIMIT_S)(job.delete):
            return
        tell("being deleted")
        gone = follower.wait_until_gone(GONE_LIMIT_S)
    except ClusterError as error:
        logger.warning("job %s may be left running: %s; delete it with `%s`", job.name, error, job.kubectl("delete"))
        return
    tell(
        "deleted"
        if gone
        else f"still being deleted after {format_duration(GONE_LIMIT_S)}; the cluster goes on with that"
    )


def _conclude(ending: JobOutcome, job: TaskJob, progress: JobProgress) -> None:
    """Return if the job has succeeded.

    Raises:
        LaunchError: it has not; with the cause.
    """
    if ending.kind == "failed":
        message = explain_failure(job.name, job.kubectl("describe"), progress)
        if not fails_again(progress):
            raise _JobFailedError(message)
        _note_failure(job, message)
        raise LaunchError(message)
    if ending.kind == "deleted":
        raise LaunchError(
            f"job {job.name} was deleted by somebody else while it was {progress.state.phase}{_with_its_kind(job)}; "
            "run again, which resumes from the last checkpoint"
        )


def _note_failure(job: TaskJob, message: str) -> None:
    """So that a next attempt of the task, where KFP makes one all the same, does not pay for the same failure."""
    try:
        ApiRetry(DELETE_LIMIT_S)(lambda: job.note_failure(message))
    except ClusterError as error:
        logger.warning("job %s: that it would fail again is not noted: %s", job.name, error)


def _with_its_kind(job: TaskJob) -> str:
    """Whether the job was not meant, but all of its kind were."""
    try:
        ApiRetry(DELETE_LIMIT_S)(job.is_gone)
    except KindNotInstalledError as error:
        return f", as all jobs of its kind: {error}"
    return ""

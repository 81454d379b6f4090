"""Where a training stage runs: on this machine, or as a job on a node pool of a cluster.

A job reads and writes an object store. On a cluster KFP's artifacts lie there already. Where a laptop drives the pipeline
they lie on its disk, are copied below `TRAINER_ARTIFACTS` for the job, and the job's results are copied back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from components.launch import job_manifest, pools
from trainer import config
from trainer.config import DEVICE_VARIABLE, DistillSettings, TuneSettings, WeightsSettings
from trainer.data.dataset_schema import SplitName, needed_bytes
from trainer.graph import STAGES, JobSpec, Kind
from trainer.io import artifacts, notifications, storage
from trainer.io.base_models import Section
from trainer.io.costs import Machines, place_here
from trainer.io.errors import LaunchError, SettingsError
from trainer.io.formatting import size
from trainer.runner.launch import processes_here, run_here

ARTIFACTS = "TRAINER_ARTIFACTS"
"""Environment variable: the folder of an object store through which jobs exchange artifacts with this machine."""
JOB = "job.json"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Resources of a pod: its requests, and its limits."""

    cpu: str
    cpu_limit: str
    memory: str
    memory_limit: str
    disk: str = "80Gi"  # of its node, by which a run is planned from elsewhere; eksctl gives nodes that much (manifests/kfp asks for some)


SMALL = Size(cpu="200m", cpu_limit="1", memory="512Mi", memory_limit="2Gi")
"""For a task that only launches a job and follows it."""
WORK = Size(cpu="1", cpu_limit="4", memory="2Gi", memory_limit="16Gi")  # for a task that does its work itself


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a training, from the pipeline's parameters."""

    pool: str = ""  # name of a node pool; empty: this machine
    nodes: int = 1
    processes_per_node: int = 0  # 0: one for each device of a machine

    def check(self, *, warms_up: bool = False, notify: str = "") -> None:
        """Raise a `SettingsError` for an unknown pool, numbers that do not fit it, or what would be lost with its pods.

        That is a warm-up, and receivers of findings (`run.notify`) of which pods would not know.
        """
        if self.nodes < 1:
            raise SettingsError(f"nodes must be >= 1, got {self.nodes}")
        if self.processes_per_node < 0:
            raise SettingsError(
                f"processes_per_node must be >= 0 (0: one for each device), got {self.processes_per_node}"
            )
        known = os.environ.get(notifications.ADDRESSES) if "KFP_RUN_ID" in os.environ else ""  # to pods, by the Secret
        if (self.pool or "KFP_RUN_ID" in os.environ) and notify not in ("", known):
            raise SettingsError(
                f"run.notify={notify}: every pod of a cluster reads the receivers from its environment; put them into the Secret "
                f"vit-distillation-notify under {notifications.ADDRESSES}, and leave the setting out"
            )
        if self.pool:
            pool = pools.get(self.pool)
            pool.place(self.nodes, self.processes_per_node)
            if warms_up:
                job_manifest.check_compile_cache(pool, os.environ)
        elif os.environ.get("KFP_POD_NAME"):
            raise SettingsError(
                "pool is empty, but the tasks' own pods on this cluster are too small to train in; name a node pool, such as cpu"
            )
        elif self.nodes > 1:
            raise SettingsError(f"nodes = {self.nodes}, but this machine is one; name a node pool with pool")

    def check_cache(self, stage: str, section: Section, inputs: Mapping[str, str]) -> None:
        """Raise a `SettingsError` if the pods of a training lack room for what they fetch: a full volume would evict them amid their work.

        `section` may name further artifacts; `inputs` are those that exist already.
        """
        if not self.pool:
            return
        pool, sizes = pools.get(self.pool), dict(_fetched(stage, section, inputs))
        room = job_manifest.CACHE_FRACTION * pools.quantity(pool.cache)
        if sum(sizes.values()) <= room:
            return
        largest = max(sizes, key=sizes.__getitem__)
        smaller = (
            "record less (reinforce.views, reinforce.tokens)"
            if "record" in largest
            else "prepare smaller images (data.image_size)"
        )
        parts = ", ".join(f"{name} {size(count)}" for name, count in sizes.items())
        raise SettingsError(
            f"{stage}: each node would fetch {size(sum(sizes.values()))} ({parts}), but pool {pool.name} has room for {size(room)}, "
            f"{job_manifest.CACHE_FRACTION} of cache = {pool.cache}; give the pool a larger cache, for which its nodes need the disk, "
            f"take another pool, or {smaller}"
        )

    def machines(self) -> Machines | None:
        """Return the machines and their price, as far as known."""
        return pools.get(self.pool).place(self.nodes, self.processes_per_node) if self.pool else place_here()

    def processes(self, wanted: str) -> int:
        """Return the number of training processes on all machines, where `run.device` is as wanted."""
        if self.pool:
            return self.nodes * pools.get(self.pool).processes(self.processes_per_node)
        return self.processes_per_node or processes_here(wanted)

    def device(self, wanted: str) -> str:
        """Return the kind of the devices that trainings run on, where `run.device` is as wanted; a pool's own takes precedence."""
        if self.pool:
            return pools.get(self.pool).device
        if wanted != "auto":
            return wanted
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


def preparing(prepare_pool: str, prepare_nodes: int) -> Placement | None:
    """Return where the images are prepared; None: in its task's pod. A `SettingsError` as `Placement.check`, or for nodes of no pool."""
    if not prepare_pool:
        if prepare_nodes != 1:
            raise SettingsError(
                f"prepare_nodes = {prepare_nodes}, but the pod of prepare's own task is one; name a pool with prepare_pool"
            )
        return None
    place = Placement(pool=prepare_pool, nodes=prepare_nodes, processes_per_node=1)
    place.check()
    return place


def _fetched(stage: str, section: Section, inputs: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each artifact that a node of a training fetches, of a large data set those that it needs at once."""
    learns = section.distill or DistillSettings() if isinstance(section, TuneSettings) else section
    splits: Collection[SplitName] = getattr(section, "splits", ())
    for keyword, uri in inputs.items():
        if (
            stage == "distill"
            and keyword == "teacher"
            and isinstance(section, DistillSettings)
            and section.reads_recording
        ):
            continue  # of it the manifest alone is read
        kind = STAGES[stage].all_inputs[keyword]
        files = artifacts.manifest(uri, kind).files
        if kind == "dataset":
            yield keyword, sum(needed_bytes(files, split) for split in splits)
        else:
            yield (
                "recording" if kind == "teacher_outputs" else keyword,
                sum(one["size"] for one in files.values()),
            )
    given: list[tuple[str, str, Kind]] = []
    if isinstance(learns, WeightsSettings) and learns.weights and not learns.named_weights:
        given.append(("weights", learns.weights, "model"))
    if isinstance(learns, DistillSettings):
        given += [(f"teacher {number}", uri, "model") for number, uri in enumerate(learns.further_teachers, start=2)]
        given += [
            (f"recording {number}", uri, "teacher_outputs")
            for number, uri in enumerate(learns.further_recordings, start=2)
        ]
    for name, uri, kind in given:
        if storage.is_remote(uri):  # the job itself refuses others
            yield name, sum(one["size"] for one in artifacts.manifest(uri, kind).files.values())


def launch(spec: JobSpec, place: Placement, record: str, *, stop: threading.Event | None = None) -> None:
    """Run a training stage to its end, and keep a record of the launch; a `LaunchError` names the failure, its cause and the next move.

    Args:
        spec: what to run; `place` decides the numbers of its nodes and processes.
        record: URI of the launch's record; for a cluster's job also how it ended, its events and its logs.
        stop: interrupts what follows a cluster's job, where that is not the main thread.
    """
    name, stage = spec.stage, STAGES[spec.stage]
    spec = replace(spec, nodes=place.nodes)
    if not place.pool:
        spec = replace(spec, processes_per_node=place.processes(os.environ.get(DEVICE_VARIABLE) or "auto"))
        folder = storage.local_path(record)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB).write_text(json.dumps(asdict(spec), indent=2), encoding="utf-8")
        run_here(spec)
        return
    from components.launch.launcher import ClusterLauncher

    place.check_cache(name, config.validate_section(stage.section, spec.settings), spec.inputs)
    # The pipeline's task has the stage's name, or, where a pipeline of one's own has two of them, a name like `distill-2`.
    run = os.environ.get("KFP_RUN_ID")
    task_name = (record.partition(f"/{run}/")[2].partition("/")[0] if run else "") or name
    task_name = "-".join(filter(None, [task_name, spec.part]))
    pool, task = pools.get(place.pool), job_manifest.Identity.from_environment(task_name)
    reached = {
        key: uri if storage.is_remote(uri) else storage.join(exchange_folder(), "runs", task.run, task_name, key)
        for key, uri in spec.outputs.items()
    }
    shared = {key: _shared(uri, stage.all_inputs[key]) for key, uri in spec.inputs.items()}
    processes = pool.processes(place.processes_per_node)
    job = replace(spec, inputs=shared, outputs=reached, processes_per_node=processes)
    ClusterLauncher(pool, task, record=record, stop=stop).run(job)
    for key, uri in spec.outputs.items():
        if reached[key] != uri:
            artifacts.copy(reached[key], uri, stage.outputs[key])


def _shared(uri: str, kind: Kind) -> str:
    """Return where a job reads an input; one on this machine is copied to the store first, once for each content."""
    if storage.is_remote(uri):
        return uri
    copy = storage.join(exchange_folder(), "inputs", artifacts.manifest(uri, kind).fingerprint)
    artifacts.copy(uri, copy, kind)
    return copy


def exchange_folder() -> str:
    """Return the folder of `TRAINER_ARTIFACTS`; a `LaunchError` if it is not set, or no object store's."""
    folder = os.environ.get(ARTIFACTS, "")
    if not storage.is_remote(folder):
        raise LaunchError(
            f"{ARTIFACTS}={folder!r}: a cluster's job cannot read what lies on this machine; set it to a folder of an object "
            "store that both reach, such as s3://bucket/vit-distillation"
        )
    return folder

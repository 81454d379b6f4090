"""The manifest of a job, as it is sent: its identity, its pods, and the two kinds of job, PyTorchJob and TrainJob.

Everything is rendered by pure functions; `Backend.render` adds what this process forwards. `BACKENDS` is the one place where a kind is
chosen by name; it also says how a job of that kind is found and read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from components.launch import IMAGE, IMAGE_VARIABLE
from components.launch.pools import EFA, RESERVED, SECRET, Pool, merge_layers, quantity
from trainer.config import DEVICE_VARIABLE
from trainer.graph import STAGES, JobSpec
from trainer.io.artifacts import CHECKPOINTS_VARIABLE, digest
from trainer.io.base_models import holds_secret
from trainer.io.errors import EXIT_CODE, LaunchError, SettingsError
from trainer.io.host import SHUTDOWN_TIMEOUT_S
from trainer.io.storage.cache import CACHE_VARIABLE, LIMIT_VARIABLE
from trainer.report.tracking import is_server
from trainer.report.tracking.exporter import PORT_VARIABLE

RUN_LABEL = "vit-distillation/run"
TASK_LABEL = "vit-distillation/task"
STAGE_LABEL = "vit-distillation/stage"
ATTEMPT_LABEL = "vit-distillation/attempt"
HASH_ANNOTATION = "vit-distillation/spec-hash"
FAILURE_ANNOTATION = "vit-distillation/failure"  # of a failed job that would fail again: its message

NAMESPACE_VARIABLE = "TRAINER_NAMESPACE"
DEFAULT_NAMESPACE = "kubeflow"
POD_FILES = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod: its account's token, and its namespace


@dataclass(frozen=True)
class Resource:
    """A kind of object, as the API addresses it."""

    plural: str
    group: str = ""
    version: str = "v1"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource("pods")
EVENTS = Resource("events")
WORKFLOWS = Resource("workflows", "argoproj.io", "v1alpha1")
PYTORCHJOBS = Resource("pytorchjobs", "kubeflow.org", "v1")
TRAINJOBS = Resource("trainjobs", "trainer.kubeflow.org", "v1alpha1")
JOBS = Resource("jobs", "batch", "v1")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The pod of the task that launches; when it is deleted, so is the job."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A job of a run."""

    run: str  # name or id of the run, any text
    task: str  # the pipeline's task, which is the stage's name
    attempt: int = 1  # counts the jobs of one task in one run
    namespace: str = DEFAULT_NAMESPACE
    owner: Owner | None = None

    @classmethod
    def from_environment(cls, task: str) -> Self:
        """Return the identity of a task's first job, as Kubeflow Pipelines or a local run names it; a `LaunchError` if neither did."""
        run = os.environ.get("KFP_RUN_ID") or os.environ.get("TRAINER_RUN")
        if not run:
            raise LaunchError(f"{task}: nothing names the run, so its job can have no name; set TRAINER_RUN")
        pod, uid = os.environ.get("KFP_POD_NAME"), os.environ.get("KFP_POD_UID")
        owner = Owner(name=pod, uid=uid) if pod and uid else None
        return cls(run=run, task=task, namespace=default_namespace(), owner=owner)

    @property
    def name(self) -> str:
        """The job's name: a DNS-1035 label of at most 40 characters, the same for equal run, task and attempt."""
        # 40 characters, because the operator adds `-worker-31` and pods' names may have 63.
        distinct = digest([self.run, self.task, self.attempt])[:8]
        task, run = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (self.task, self.run))
        words = f"{task[:10].strip('-') or 'task'}-{run[:20].strip('-') or 'run'}"
        return f"{words if words[0].isalpha() else f'j{words[1:]}'}-{distinct}"

    def labels(self, stage: str) -> dict[str, str]:
        """Return the labels of the job and its pods, by which they are found."""
        return {RUN_LABEL: label_value(self.run), TASK_LABEL: label_value(self.task), STAGE_LABEL: label_value(stage)}


def default_namespace() -> str:
    """Return the namespace that jobs go to by default: `TRAINER_NAMESPACE`, or the pod's own, or kubeflow."""
    return os.environ.get(NAMESPACE_VARIABLE) or own_namespace() or DEFAULT_NAMESPACE


def own_namespace() -> str:
    """Return the namespace of the pod that this is; empty where it is none."""
    file = POD_FILES / "namespace"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def label_value(text: str) -> str:
    """Return a valid label value for any text: the text itself if it is one, otherwise a short form with a digest."""
    if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text):
        return text
    words = re.sub(r"[^-A-Za-z0-9_.]+", "-", text)[:50].strip("-_.")
    return f"{words}-{digest(text)[:8]}".lstrip("-")


def spec_hash(manifest: Mapping[str, Any]) -> str:
    """Return a digest of a job's kind and specification, but neither name, owner nor attempt."""
    return digest([manifest["apiVersion"], manifest["kind"], manifest["spec"]])[:16]


USER = 1000
"""The image's user. The pod names it because the operator's own init container has an image whose user is root."""
GRACE_PERIOD_S = SHUTDOWN_TIMEOUT_S + 30
"""How long a pod has to end: first its processes end, then its termination message and its logs have to get out."""

POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # with `CONTAINER_SECURITY`, what Pod Security requires of a pod at its level `restricted`
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

AUTOSCALER_ANNOTATION = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
KARPENTER_ANNOTATION = {"karpenter.sh/do-not-disrupt": "true"}
"""With these on a pod, neither the cluster autoscaler nor Karpenter empties its node to save a machine or to renew it."""

METRICS_PORT = 9402
"""Where the first replica answers Prometheus (manifests/components/monitoring)."""
CACHE = "/cache"  # where a pod keeps what it read from the object store
CACHE_FRACTION = 0.8
"""Share of the cache's volume that is filled. A pod whose volume exceeds its limit is evicted, and files in transit come on top."""

COMPILE_CACHE = "NEURON_COMPILE_CACHE_URL"
"""Where Neuron's compiler keeps graphs: a folder of the pod, or of an object store, where the next job finds them."""
TRACKING_URI = "MLFLOW_TRACKING_URI"
FORWARDED = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "TRAINER_RUN",
    "TRAINER_RUN_ID",
    "TRAINER_DEBUG",
)
"""Variables of a task that its job gets too, besides MLflow's. Other AWS variables name files and roles of the task's own pod."""
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes sets in a task's pod for each Service of its namespace, one called `mlflow` among them."""


def pod_template(spec: JobSpec, pool: Pool, identity: Identity, *, container: dict[str, Any]) -> dict[str, Any]:
    """Render a whole pod template; `container` is what the backend adds to the container, its name among them.

    A `LaunchError` if the image is not known, or the environment holds a secret or a reserved variable.
    """
    labels = identity.labels(spec.stage)
    same_zone = {
        "weight": 100,
        "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": labels}},
    }  # gradients between zones are slow, and billed by the gigabyte
    template: dict[str, Any] = {
        "metadata": {
            # A sidecar would outlive the training, and the pod would never end.
            "labels": labels | {"sidecar.istio.io/inject": "false"},
            # Moving a training pod to another node restarts the whole job. Karpenter evicts a pod with its annotation from no node, also
            # not from a reclaimed spot node, where the pod would then be killed before it has written a checkpoint.
            "annotations": AUTOSCALER_ANNOTATION | ({} if pool.spot else KARPENTER_ANNOTATION),
        },
        "spec": {
            # The API server is the launcher's business, not the training's.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": POD_SECURITY,
            "terminationGracePeriodSeconds": GRACE_PERIOD_S,
            **(
                {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [same_zone]}}}
                if spec.nodes > 1 and not STAGES[spec.stage].shared
                else {}
            ),
            "containers": [
                {
                    **container,
                    "image": pod_image(pool),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python"],
                    "args": _arguments(spec),
                    "env": pod_environment(spec, pool, identity),
                    # They are equal: accelerators require it, and a replica that is throttled or evicted holds up all others.
                    "resources": {"requests": pool.resources, "limits": pool.resources},
                    "securityContext": CONTAINER_SECURITY,
                    # A process that is killed leaves no termination message; its last lines take the place.
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                        {"name": "cache", "mountPath": CACHE},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            # Everything that a pod writes to, since its root file system is read-only.
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory}},
                {"name": "cache", "emptyDir": {"sizeLimit": pool.cache}},
                {"name": "tmp", "emptyDir": {"sizeLimit": pool.tmp}},
            ],
        },
    }
    return merge_layers(dict(pool.pod.items()), template)


def _arguments(spec: JobSpec) -> list[str]:
    share = ("--share", f"$({INDEX_VARIABLE})/{spec.nodes}") if STAGES[spec.stage].shared else ()
    return spec.arguments("--node", *share)


def pod_image(pool: Pool, task: str = IMAGE) -> str:
    """Return the pool's own image, or its task's; for Neuron with `-neuron` after its name, a `LaunchError` if a digest names that."""
    if pool.image or pool.device != "xla":
        return pool.image or task
    if "@" in task:
        raise LaunchError(
            f"pool {pool.name}: {task} names one image by its digest, not that for Neuron; set image of the pool"
        )
    folder, slash, name = task.rpartition("/")
    base, colon, tag = name.partition(":")
    return f"{folder}{slash}{base}-neuron{colon}{tag}"


def pod_environment(spec: JobSpec, pool: Pool, identity: Identity) -> list[dict[str, Any]]:
    """Render the container's `env`: values, and secrets by reference; raises as `pod_template`."""
    for name in spec.environment:
        secret = "it looks like a secret; name it under secrets of the pool" if SECRET.search(name) else ""
        if why := secret or ("it is set by the launcher" if RESERVED.fullmatch(name) else ""):
            raise LaunchError(f"{spec.stage}: {name} cannot be part of a job's environment: {why}")
    # A pod sees all cores of its node, but may use only those that it requested.
    threads = max(1, int(pool.cpus / pool.processes(spec.processes_per_node)))
    values = {
        "TRAINER_RUN": identity.run,
        "OMP_NUM_THREADS": str(threads),
        # The root file system is read-only, so these point to volumes.
        "HOME": "/tmp",
        "HF_HOME": f"{CACHE}/huggingface",
        PORT_VARIABLE: str(METRICS_PORT),
        **({"FI_PROVIDER": "efa"} if EFA in pool.resources else {}),
        **pool.environment,
        **spec.environment,
        **pool.place(spec.nodes, spec.processes_per_node).environment(),
        DEVICE_VARIABLE: pool.device,
        CACHE_VARIABLE: CACHE,
        LIMIT_VARIABLE: f"{CACHE_FRACTION * quantity(pool.cache) / 2**30:g}",
        # An autoscaler adds nodes one after the other; torch's own timeout is a quarter of an hour.
        "PET_RDZV_CONF": f"timeout={60 * pool.queued_minutes},join_timeout={60 * pool.queued_minutes}",
    }
    for name, value in values.items():
        if holds_secret(value):
            raise LaunchError(
                f"{spec.stage}: {name} holds a password or a token, which everybody could read in the job; leave it out of the address, "
                "and name a Secret and its key under secrets of the pool, such as for MLFLOW_TRACKING_PASSWORD"
            )
    references = [
        {"name": name, "valueFrom": {"secretKeyRef": secret.model_dump()}}
        for name, secret in sorted(pool.secrets.items())
    ]
    return [{"name": name, "value": values[name]} for name in sorted(values)] + references


def forwarded_environment(task: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a task forwards to its job: no secret's value, and no place on the task's own machine."""
    forwarded = {name: task[name] for name in FORWARDED if task.get(name)}
    forwarded |= {name: task[name] for name in (CHECKPOINTS_VARIABLE, COMPILE_CACHE) if "://" in task.get(name, "")}
    if not tracks_in_reach(task):
        return forwarded
    return forwarded | {
        name: value
        for name, value in task.items()
        if name.startswith("MLFLOW_") and not SECRET.search(name) and not _SERVICE_LINK.fullmatch(name)
    }


def tracks_in_reach(task: Mapping[str, str]) -> bool:
    """Return whether a task's MLflow has an address that the pods of its job reach as well."""
    return is_server(task.get(TRACKING_URI, ""))


def check_compile_cache(pool: Pool, task: Mapping[str, str]) -> None:
    """Check that the next job finds what is compiled on a pool (else a `SettingsError`); `task` is the environment that is handed on."""
    if pool.device != "xla":
        raise SettingsError(
            f"pool {pool.name}: what is compiled on it stays in the pods and is lost with them, so warm_up would warm nothing; it serves "
            "pools of Neuron devices, and a machine of your own; set warm_up.enabled=false"
        )
    cache = forwarded_environment(task).get(COMPILE_CACHE) or pool.environment.get(COMPILE_CACHE, "")
    if "://" not in cache:
        raise SettingsError(
            f"pool {pool.name}: {COMPILE_CACHE}={cache} lies in the pods, so what warm_up compiles would be lost with them; set it to a "
            "folder of an object store, such as s3://BUCKET/neuron-cache: in the ConfigMap vit-distillation, from a laptop in its "
            "environment, or in the pool's; or set warm_up.enabled=false"
        )


PYTORCHJOB_CONTAINER = "pytorch"  # the operator gives its variables to the container of this name
TRAINJOB_NODE = "node"  # the runtime's name for the job of the training pods, and for their container
RETRYING_RUNTIME = (
    "vit-distillation"  # of the namespace (manifests/components/trainer): a failed pod starts the whole JobSet again
)
INDEXED_CONTAINER = "share"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # environment variable that Kubernetes sets in each pod of an Indexed Job
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SHARE_RETRIES = 3  # failures of each share that a job survives, beside machines that are taken away
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

JobPhase = Literal["pending", "suspended", "running", "restarting", "succeeded", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job, in terms that all backends share."""

    phase: JobPhase
    reason: str = ""  # the operator's reason, such as PyTorchJobFailed
    message: str = ""  # the operator's message


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kind of job."""

    resource: Resource
    kind: str
    container: str  # the name of the training container in a job's pods
    renderer: Callable[[JobSpec, Pool, Identity], dict[str, Any]]
    """A pure function; `render` adds the launching process's environment and image."""
    phases: Mapping[str, JobPhase]
    """Type of a condition in a job's status -> phase; where several are true, the first one here decides."""
    pod_selector: Callable[[str], str]  # a job's name -> the label selector of its pods
    replica: Callable[[Mapping[str, str]], str]  # a pod's labels -> its replica's name, such as `worker-3`
    first_replica: Callable[[Mapping[str, Any]], str]  # a manifest -> the name of the replica whose log is followed
    independent: bool = False
    """Whether each pod works by itself: the job runs as soon as one does, and Kubernetes counts what fails, pod by pod."""

    def render(self, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
        """Render the manifest of a job as it is sent, with the environment and the image that this process forwards."""
        forwarded = forwarded_environment(os.environ)
        image = pod_image(pool, os.environ.get(IMAGE_VARIABLE) or IMAGE)
        spec = replace(spec, environment={**forwarded, **spec.environment})
        return self.renderer(spec, pool.model_copy(update={"image": image}), identity)

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Read the state of a job as the API server shows it."""
        status = job.get("status", {})
        true = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") == "True"}
        for kind, phase in self.phases.items():
            if kind in true:
                return JobState(phase=phase, reason=true[kind].get("reason", ""), message=true[kind].get("message", ""))
        # A TrainJob and a Job have no condition for running; pods that are ready show it.
        ready = status.get("ready") or any(part.get("ready") for part in status.get("jobsStatus") or [])
        return JobState(phase="running" if ready else "pending")


def render_pytorchjob(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """Render a PyTorchJob: a master, and a worker for each further node; an elastic job has workers only, since any node may leave."""
    if spec.nodes < pool.elastic_min_nodes:
        raise LaunchError(
            f"{spec.stage}: nodes = {spec.nodes}, but pool {pool.name} is elastic and needs {pool.elastic_min_nodes} at least "
            f"(elastic_min_nodes); ask for {pool.elastic_min_nodes} or more, or choose a pool that is not elastic"
        )
    elastic_policy = {
        "rdzvBackend": "c10d",
        "minReplicas": pool.elastic_min_nodes,
        "maxReplicas": spec.nodes,
        "maxRestarts": pool.retries,
    }
    run_policy = {
        # Workers would otherwise continue when the master has ended; those that ended are kept, with their exit codes. No `backoffLimit`:
        # at that the training operator 1.9 deletes all pods before it says that the job has failed, and may make them once more. It would
        # count restarts within a pod, which neither restart policy has; `JobProgress` counts instead.
        "cleanPodPolicy": "Running",
        # For when the launcher is gone. Its own limits are the exact ones: the operator's clock also runs while pods wait for nodes.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "ttlSecondsAfterFinished": 60 * pool.keep_minutes,
    }
    port = {"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}
    container = {"name": PYTORCHJOB_CONTAINER, "ports": [port]}
    replica = {
        # Exit codes below 128 fail the job: the trainer's own errors, which would come again. Others (preempted, killed, crashed) get a
        # new pod.
        "restartPolicy": "ExitCode" if pool.retries else "Never",
        "template": pod_template(spec, pool, identity, container=container),
    }
    masters = 0 if pool.elastic_min_nodes else 1
    job = {
        "nprocPerNode": str(pool.processes(spec.processes_per_node)),
        "runPolicy": run_policy,
        **({"elasticPolicy": elastic_policy} if pool.elastic_min_nodes else {}),
        "pytorchReplicaSpecs": {
            role: {"replicas": count, **replica}
            for role, count in {"Master": masters, "Worker": spec.nodes - masters}.items()
            if count
        },
    }
    return _manifest(PYTORCHJOBS, "PyTorchJob", job, spec, pool, identity)


def render_trainjob(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """Render a TrainJob on a runtime with torch's policy: `trainer` says what runs, a patch of the runtime what its pods are."""
    if pool.elastic_min_nodes:
        raise LaunchError(
            f"{spec.stage}: pool {pool.name}: elastic_min_nodes = {pool.elastic_min_nodes} is not supported by TrainJobs; "
            f'set it to 0, or backend = "pytorchjob"'
        )
    pod = pod_template(spec, pool, identity, container={"name": TRAINJOB_NODE})
    (container,) = pod["spec"]["containers"]
    job = {
        # Retries are the runtime's: a TrainJob cannot patch the failure policy of its JobSet.
        "runtimeRef": (
            {"name": RETRYING_RUNTIME, "kind": "TrainingRuntime"} if pool.retries else {"name": pool.runtime}
        ),
        # For when the launcher is gone: its own limits are the exact ones.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "trainer": {
            **{name: container[name] for name in ("image", "command", "args", "env")},
            "numNodes": spec.nodes,
            "numProcPerNode": pool.processes(spec.processes_per_node),
            "resourcesPerNode": container["resources"],
        },
        # The manager says whose patch it is: a path with a domain, as Trainer requires.
        "runtimePatches": [{"manager": "vit-distillation/launcher", "trainingRuntimeSpec": _runtime_patch(pod, pool)}],
    }
    return _manifest(TRAINJOBS, "TrainJob", job, spec, pool, identity)


def render_indexed_job(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """Render an Indexed Job: a pod for each share of the stage's work, of which the first one makes the result and ends the job."""
    container = INDEXED_CONTAINER
    template = pod_template(spec, pool, identity, container={"name": container})
    lost = {"type": "DisruptionTarget", "status": "True"}
    mistake = {"containerName": container, "operator": "In", "values": [EXIT_CODE]}
    job = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [lost]},  # a machine that was taken away
                {"action": "FailJob", "onExitCodes": mistake},  # the trainer's own error, which would come again
            ]
        },
        "backoffLimitPerIndex": max(pool.retries, SHARE_RETRIES),
        # For when the launcher is gone: its own limits are the exact ones.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "ttlSecondsAfterFinished": 60 * pool.keep_minutes,
        "template": template | {"spec": template["spec"] | {"restartPolicy": "Never"}},
    }
    return _manifest(JOBS, "Job", job, spec, pool, identity)


def _runtime_patch(pod: Mapping[str, Any], pool: Pool) -> dict[str, Any]:
    # A patch cannot set these: our runtime does. What else it cannot set, of the pool's part, the API server refuses by name.
    left_out = {"automountServiceAccountToken", "enableServiceLinks", "containers"}
    # Kueue 0.19 writes a TrainJob with the types of Trainer 2.2, which drops this field of 2.3 when it lets a job start; JobSet
    # then denies the change, and the job stays suspended.
    left_out |= {"terminationGracePeriodSeconds"} if pool.queue else set()
    (container,) = pod["spec"]["containers"]
    elsewhere = {"image", "command", "args", "env", "resources", "imagePullPolicy", "terminationMessagePolicy"}
    template = {
        "metadata": pod["metadata"],
        "spec": {
            **{name: value for name, value in pod["spec"].items() if name not in left_out},
            "containers": [{name: value for name, value in container.items() if name not in elsewhere}],
        },
    }
    return {
        "template": {
            "spec": {"replicatedJobs": [{"name": TRAINJOB_NODE, "template": {"spec": {"template": template}}}]}
        }
    }


def _manifest(
    resource: Resource, kind: str, job: dict[str, Any], spec: JobSpec, pool: Pool, identity: Identity
) -> dict[str, Any]:
    head = {"apiVersion": f"{resource.group}/{resource.version}", "kind": kind}
    metadata: dict[str, Any] = {
        "name": identity.name,
        "namespace": identity.namespace,
        "labels": {**identity.labels(spec.stage), ATTEMPT_LABEL: str(identity.attempt)},
        "annotations": {HASH_ANNOTATION: spec_hash({**head, "spec": job})},
    }
    if owner := identity.owner:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}]
    if pool.queue:
        metadata["labels"][QUEUE_LABEL] = pool.queue
    return {**head, "metadata": metadata, "spec": job}


BACKENDS: Mapping[str, Backend] = {
    "pytorchjob": Backend(
        resource=PYTORCHJOBS,
        kind="PyTorchJob",
        container=PYTORCHJOB_CONTAINER,
        renderer=render_pytorchjob,
        phases={
            "Failed": "failed",
            "Succeeded": "succeeded",
            "Suspended": "suspended",
            "Restarting": "restarting",
            "Running": "running",
        },
        pod_selector="training.kubeflow.org/job-name={}".format,
        replica="{0[training.kubeflow.org/replica-type]}-{0[training.kubeflow.org/replica-index]}".format,
        first_replica=lambda job: "master-0" if "Master" in job["spec"]["pytorchReplicaSpecs"] else "worker-0",
    ),
    "trainjob": Backend(
        resource=TRAINJOBS,
        kind="TrainJob",
        container=TRAINJOB_NODE,
        renderer=render_trainjob,
        phases={"Failed": "failed", "Complete": "succeeded", "Suspended": "suspended"},
        pod_selector=f"jobset.sigs.k8s.io/jobset-name={{}},jobset.sigs.k8s.io/replicatedjob-name={TRAINJOB_NODE}".format,
        replica=f"{TRAINJOB_NODE}-{{0[{INDEX_LABEL}]}}".format,
        first_replica=lambda _job: f"{TRAINJOB_NODE}-0",
    ),
    "job": Backend(
        resource=JOBS,
        kind="Job",
        container=INDEXED_CONTAINER,
        renderer=render_indexed_job,
        phases={"Failed": "failed", "Complete": "succeeded", "Suspended": "suspended"},
        pod_selector="batch.kubernetes.io/job-name={}".format,
        replica=f"share-{{0[{INDEX_LABEL}]}}".format,
        first_replica=lambda _job: "share-0",
        independent=True,
    ),
}  # name of a pool's backend -> the backend; `job` is that of stages whose work is shared, on any pool


def backend_of(spec: JobSpec, pool: Pool) -> Backend:
    """Return the kind of job that a stage becomes on a pool."""
    return BACKENDS["job" if STAGES[spec.stage].shared else pool.backend]

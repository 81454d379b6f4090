"""Serve a registered student on a cluster, or take it away: `manifests/serving` with the version that an alias of MLflow's registry names.

  python -m pipelines.deploy_student                                    what `champion` names of the digits, until it answers
  python -m pipelines.deploy_student --recipe grocery                   of another recipe's students
  python -m pipelines.deploy_student --alias challenger --replicas 1    beside it, behind the same Service: a canary
  python -m pipelines.deploy_student --model s3://bucket/served         an export that is in no registry
  python -m pipelines.deploy_student --kserve                           an InferenceService instead of a Deployment
  python -m pipelines.deploy_student --dry-run                          print what would be applied
  python -m pipelines.deploy_student --alias challenger --remove

Run again after the alias has moved, it replaces one pod after the other. A pod takes requests when its model has answered one, so a
version that cannot be served takes none, and the version before goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.launch import SERVING_IMAGE
from components.launch.job_manifest import DEFAULT_NAMESPACE
from trainer import config
from trainer.io import commands
from trainer.io.errors import DeployError, SettingsError
from trainer.report import tracking
from trainer.report.tracking import REGISTERED

MANIFESTS = Path(__file__).parents[1] / "manifests"
NAME = config.student_name()  # of the objects in `manifests/serving`, and of an export that is in no registry
ALIAS = "champion"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_NAMES = 63 - len("--predictor")  # most characters of name and alias together


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = commands.module_parser("pipelines.deploy_student", __doc__)
    commands.add_recipe(parser)
    parser.add_argument(
        "--model",
        help="name in MLflow's registry, or the URI of an export in a store that pods can read (default: the recipe's, as in "
        f"{config.student_name('digits')})",
    )
    parser.add_argument("--alias", default=ALIAS, metavar="NAME", help="of the version (default: %(default)s)")
    parser.add_argument("--name", help=f"of the Service and the model's (default: the model's; of a URI {NAME})")
    parser.add_argument(
        "--replicas", type=commands.positive, default=0, metavar="N", help="pods, instead of 2 to 8 by their load"
    )
    parser.add_argument(
        "--serve",
        default="",
        metavar="TEXT",
        help="further options of `vit-distill serve`, such as '--log - --log-share 0.1'",
    )
    parser.add_argument("--kserve", action="store_true", help="as an InferenceService; KServe is installed")
    parser.add_argument("--image", default="", help=f"of the server (default: {SERVING_IMAGE})")
    parser.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="default: %(default)s")
    parser.add_argument("--context", default="", help="of the kubeconfig (default: its current one)")
    parser.add_argument(
        "--timeout",
        type=commands.positive,
        default=300,
        metavar="S",
        help="seconds until it must answer (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="serve a version that did not pass its gate, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the objects and change nothing")
    what.add_argument(
        "--remove", action="store_true", help="take this alias's pods away, and the Service with the last one"
    )
    options = parser.parse_args(arguments)
    if options.model is None:
        options.model = config.student_name(options.recipe)
    if options.name is None:
        options.name = _registered_name(options.model) or NAME
    return commands.exit_code(lambda: remove(options) if options.remove else deploy(options))


def deploy(options: argparse.Namespace) -> None:
    """Apply the objects and wait until every pod has the model."""
    _check_names(options)
    model = options.model
    try:
        given = shlex.split(options.serve)
    except ValueError as error:
        raise SettingsError(f"--serve {options.serve!r}: {error}; close the quotation") from error
    if model.startswith("file://"):
        raise SettingsError(f"--model {model}: pods cannot reach it; give a URI in a store, such as s3://BUCKET/export")
    if "://" not in model:
        place = model if model.startswith(REGISTERED) else f"{REGISTERED}{model}@{options.alias}"
        model = pinned(place, force=options.force)
    objects = student_objects(
        rendered("serving/kserve" if options.kserve else "serving/base"),
        name=options.name,
        alias=options.alias,
        namespace=options.namespace,
        model=model,
        options=[*(["--force"] if options.force else []), *given],
        image=options.image or SERVING_IMAGE,
        replicas=options.replicas,
        timeout=options.timeout,
    )
    if options.dry_run:
        print(yaml.safe_dump_all(objects, sort_keys=False), end="")
        return
    kubectl = _cluster_of(options)
    name = f"{options.name}-{options.alias}"
    deployment = f"deployment/{name}{'-predictor' if options.kserve else ''}"
    if options.replicas and not options.kserve:  # first, or it may look once more and change the number again
        kubectl("delete", "horizontalpodautoscaler", name, "--ignore-not-found")
    elif not options.kserve:  # else Kubernetes would go on with one pod until the autoscaler looks
        now = kubectl("get", deployment, "--ignore-not-found", "--output=jsonpath={.spec.replicas}").strip()
        (least,) = (one["spec"]["minReplicas"] for one in objects if one["kind"] == "HorizontalPodAutoscaler")
        _pod_owner(objects)["spec"]["replicas"] = max(int(now or 0), least)
    applying = ("apply", "--server-side", "--field-manager=vit-distillation", "--force-conflicts", "--filename=-")
    print(kubectl(*applying, text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})), end="")
    limit = f"--timeout={options.timeout}s"
    try:
        if options.kserve:  # whose controller makes and changes the Deployment
            (server,) = _pod_owner(objects)["spec"]["predictor"]["containers"]
            _wait_for_kserve(kubectl, deployment, server, options.timeout)
        kubectl("rollout", "status", deployment, limit)
    except DeployError as error:
        pods = f"--selector=app.kubernetes.io/name={options.name},vit-distillation/alias={options.alias}"
        said = kubectl("logs", pods, "--tail=2", "--prefix", check=False)
        raise DeployError(
            f"{model} is not ready on every pod ({error}); pods of the version before, if any, go on answering.\n"
            f"{kubectl('get', 'pods', pods, check=False)}The pods say:\n{said}"
            "Mend that and deploy again; to go back, move the alias back and deploy."
        ) from error
    service = f"{name}-predictor" if options.kserve else options.name
    print(
        f"{model} answers at http://{service}.{options.namespace}.svc/predict; from here: "
        f"kubectl --namespace {options.namespace} port-forward service/{service} 8000:80, then http://localhost:8000"
    )


def remove(options: argparse.Namespace) -> None:
    """Delete an alias's objects, and with the last alias the shared ones; missing objects are no error."""
    _check_names(options)
    kubectl, name = _cluster_of(options), f"{options.name}-{options.alias}"
    kinds = "inferenceservice" if options.kserve else "deployment,horizontalpodautoscaler,poddisruptionbudget"
    print(kubectl("delete", kinds, name, "--ignore-not-found", "--cascade=foreground"), end="")
    left = f"app.kubernetes.io/name={options.name}"
    if not kubectl("get", "deployments", "--selector", left, "--output=name").strip():
        shared = "service,serviceaccount,networkpolicy"
        print(kubectl("delete", shared, options.name, "--ignore-not-found"), end="")


def rendered(folder: str) -> list[dict[str, Any]]:
    """Build a kustomization below `manifests`: its objects; raises as `run_kubectl`."""
    return list(yaml.load_all(run_kubectl("kustomize", str(MANIFESTS / folder)), Loader=yaml.CSafeLoader))


def student_objects(
    objects: Sequence[Mapping[str, Any]],
    *,
    name: str,
    alias: str,
    namespace: str,
    model: str,
    options: Sequence[str] = (),
    image: str,
    replicas: int,
    timeout: int = 0,
) -> list[dict[str, Any]]:
    """Make the objects of `manifests/serving`, which are those of `vit-student` and its alias `champion`, those of one student.

    Args:
        model: what the server is to serve.
        options: further ones of the server, before those of the manifest; a longer drain and slower requests extend the pod's grace period.
        replicas: number of pods; 0 lets the autoscaler choose.
        timeout: seconds in which a pod may become ready, if that is longer than the manifest says.
    """
    names = {NAME: name, ALIAS: alias, f"{NAME}-{ALIAS}": f"{name}-{alias}", f"--name={NAME}": f"--name={name}"}

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: renamed(part) for key, part in value.items()}
        if isinstance(value, list):
            return [renamed(part) for part in value]
        return names.get(value, value) if isinstance(value, str) else value

    made = [renamed(one) for one in objects if not (replicas and one["kind"] == "HorizontalPodAutoscaler")]
    for one in made:
        one["metadata"]["namespace"] = namespace
    specification = _pod_owner(made)["spec"]
    pod = specification["predictor"] if "predictor" in specification else specification["template"]["spec"]
    (server,) = pod["containers"]
    longer = _ending_s([*server["args"], *options]) - _ending_s(server["args"])
    pod["terminationGracePeriodSeconds"] += max(0, math.ceil(longer))
    probe = server["startupProbe"]  # else the kubelet ends a server that still fetches its model
    probe["failureThreshold"] = max(probe["failureThreshold"], math.ceil(timeout / probe["periodSeconds"]))
    if "progressDeadlineSeconds" in specification:  # kubectl waits no longer than this
        specification["progressDeadlineSeconds"] = max(specification["progressDeadlineSeconds"], timeout)
    server |= {"image": image, "args": [model, *server["args"][1:], *options]}  # of an option, the last one counts
    if replicas and "predictor" in specification:
        pod |= {"minReplicas": replicas, "maxReplicas": replicas}
    elif replicas:
        specification["replicas"] = replicas
    return made


def _ending_s(arguments: Sequence[str]) -> float:
    """Return the longest time in which a server with these arguments ends, in seconds: its drain, then its slowest request."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--drain", type=commands.seconds, default=0.0)
    parser.add_argument("--timeout", type=commands.positive, default=0)
    try:
        given = parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError as error:
        raise SettingsError(f"--serve: {error}; give the seconds, such as --drain 30 --timeout 20") from error
    return float(given.drain + given.timeout)


def run_kubectl(*arguments: str, text: str | None = None, check: bool = True) -> str:
    """Run this environment's kubectl or the system's; returns its output. A `DeployError` if it is missing or, with `check`, fails."""
    tool = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")
    if tool is None:
        raise DeployError("kubectl is not installed; run 'make setup', or install it (kubernetes.io/docs/tasks/tools)")
    result = subprocess.run(
        [tool, *arguments], capture_output=True, encoding="utf-8", errors="replace", input=text, check=False
    )
    if check and result.returncode:
        said = re.sub(r"^[EW]\d{4} .*\n", "", result.stderr, flags=re.MULTILINE)  # kubectl's own log
        command = next(word for word in arguments if not word.startswith("--"))
        raise DeployError(f"kubectl {command}: {said.strip() or result.stderr.strip()}")
    return result.stdout


def _registered_name(model: str) -> str:
    """Return the name in the registry of `NAME`, `models:/NAME@ALIAS` or `models:/NAME/VERSION`; empty of another URI."""
    return "" if "://" in model else re.split("[@/]", model.removeprefix(REGISTERED))[0]


def _cluster_of(options: argparse.Namespace) -> Callable[..., str]:
    """Return `run_kubectl` for the namespace and the context that are asked for."""
    context = [f"--context={options.context}"] if options.context else []
    return functools.partial(run_kubectl, f"--namespace={options.namespace}", *context)


def _check_names(options: argparse.Namespace) -> None:
    for option in ("name", "alias"):
        if not _NAME.fullmatch(value := getattr(options, option)):
            raise SettingsError(
                f"--{option} {value!r}: becomes part of names in Kubernetes; give --{option} at most 30 small letters, digits and '-', a "
                "letter first"
            )
    if len(options.name) + len(options.alias) > _NAMES:
        raise SettingsError(
            f"--name {options.name} --alias {options.alias}: too long together for a name in Kubernetes; give at most {_NAMES} characters"
        )


def pinned(place: str, *, force: bool) -> str:
    """Return the URI of the version that an alias names now, so that servers that start later take the same.

    A `DeployError` for a version that did not pass its gate, unless `force`.
    """
    if not os.environ.get(tracking.URI):
        raise SettingsError(
            f"{tracking.URI} is not set, so there is no registry to ask for {place}; set it to the cluster's MLflow: "
            f"kubectl --namespace kubeflow port-forward service/mlflow 5000 & export {tracking.URI}=http://localhost:5000"
        )
    version, passed = tracking.registered_version(place)
    if not passed and not force:
        raise DeployError(
            f"{place} is {version}, which did not pass its gate; move the alias, or take it all the same (--force; FORCE=1 of make)"
        )
    return version


def _pod_owner(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (owner,) = (one for one in objects if one["kind"] in ("Deployment", "InferenceService"))
    return owner


def _wait_for_kserve(kubectl: Callable[..., str], deployment: str, server: Mapping[str, Any], seconds: float) -> None:
    """Wait until the Deployment that KServe makes has this container; a `DeployError` if it does not come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if text := kubectl("get", deployment, "--ignore-not-found", "--output=json"):
            (found,) = json.loads(text)["spec"]["template"]["spec"]["containers"]
            if all(found[key] == server[key] for key in ("args", "image")):
                return
        time.sleep(1)
    raise DeployError(f"KServe has not made {deployment} within {seconds} s; read: kubectl describe inferenceservice")


if __name__ == "__main__":
    sys.exit(main())

"""What a pod's manifest says about its process, made true on this machine: variables, mounts, names of hosts."""

from __future__ import annotations

import base64
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stand_ins.kubernetes.containers import ROOT, inherited
from tests.stand_ins.kubernetes.resources import CONFIG_MAPS, SECRETS, Resource
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.kubernetes.store import Store

_REFERENCE = re.compile(r"\$\((\w+)\)")
_LABEL_PATH = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_KEPT_MOUNTS = ("/dev/shm", "/tmp")
"""Paths that are good as they are: the machine has them too, and a test's own files lie below the second."""
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
_ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_ENDPOINT = "PET_RDZV_ENDPOINT"


class ConfigError(Exception):
    """A container cannot be made from its manifest, as CreateContainerConfigError reports it."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A command and its environment, ready to be started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    message_file: Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def prepare(pod: Mapping[str, Any], store: Store, folder: Path, master_port: int) -> Process:
    """Work out the process of a pod's first container.

    Args:
        pod: its manifest.
        store: where its secrets and config maps are.
        folder: the pod's own, for its volumes, its home and its termination message.
        master_port: where the first pod of its job listens, instead of the port in the manifest.

    Raises:
        ConfigError: it names a secret, a config map or a key that is not there.
    """
    container = pod["spec"]["containers"][0]
    paths = _mount(pod, container, store, folder)
    message_file = folder / "termination-log"
    message_file.unlink(missing_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    declared = _localize(_variables(pod, container, store), paths, master_port)
    environment = {
        **inherited(),
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(ROOT),
        "TRAINER_TERMINATION_LOG": str(message_file),
        "HOSTNAME": pod["metadata"]["name"],
        **declared,
    }
    words = [_expand(word, declared) for word in [*container.get("command", []), *container.get("args", [])]]
    words = [_rewrite(word, paths) for word in words]
    if not words:
        raise ConfigError("no command specified")  # the image's own is not known here
    program = sys.executable if words[0] in {"python", "python3"} else words[0]
    return Process(command=[program, *words[1:]], environment=environment, message_file=message_file)


def _variables(pod: Mapping[str, Any], container: Mapping[str, Any], store: Store) -> dict[str, str]:
    values: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        values |= _all_keys(source, pod["metadata"]["namespace"], store)
    for variable in container.get("env") or []:
        if "valueFrom" in variable:
            value = _referenced(variable["valueFrom"], pod, store)
            if value is not None:
                values[variable["name"]] = value
        else:
            values[variable["name"]] = _expand(variable.get("value", ""), values)
    return values


def _referenced(source: Mapping[str, Any], pod: Mapping[str, Any], store: Store) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], pod)
    resource, key = (SECRETS, "secretKeyRef") if "secretKeyRef" in source else (CONFIG_MAPS, "configMapKeyRef")
    if key not in source:
        raise ConfigError(f"the stand-in has no {', '.join(source)}")
    reference = source[key]
    content = _content(resource, reference, pod["metadata"]["namespace"], store)
    if reference["key"] not in content and not reference.get("optional"):
        kind = {SECRETS: "Secret", CONFIG_MAPS: "ConfigMap"}[resource]
        raise ConfigError(
            f"couldn't find key {reference['key']} in {kind} {pod['metadata']['namespace']}/{reference['name']}"
        )
    return content.get(reference["key"])


def _all_keys(source: Mapping[str, Any], namespace: str, store: Store) -> dict[str, str]:
    resource, key = (SECRETS, "secretRef") if "secretRef" in source else (CONFIG_MAPS, "configMapRef")
    prefix = source.get("prefix", "")
    return {f"{prefix}{name}": value for name, value in _content(resource, source[key], namespace, store).items()}


def _content(resource: Resource, reference: Mapping[str, Any], namespace: str, store: Store) -> dict[str, str]:
    """The keys of a secret or config map, as text."""
    try:
        found = store.get(resource, namespace, reference["name"])
    except ApiError as refusal:
        if reference.get("optional"):
            return {}
        raise ConfigError(refusal.message.replace(f"{resource.plural} ", f"{resource.kind.lower()} ", 1)) from refusal
    data: dict[str, str] = found.get("data") or {}
    if resource == SECRETS:
        data = {name: base64.b64decode(value).decode() for name, value in data.items()}
    return {**data, **(found.get("stringData") or {})}


def _field(path: str, pod: Mapping[str, Any]) -> str:
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _LABEL_PATH.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    if path not in fields:
        raise ConfigError(f"field label not supported: {path}")
    return fields[path]


def _mount(pod: Mapping[str, Any], container: Mapping[str, Any], store: Store, folder: Path) -> dict[str, Path]:
    """Make the folders and files of a container's mounts; mount path -> folder."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    paths = {}
    for mount in container.get("volumeMounts") or []:
        path = folder / "volumes" / mount["name"]
        path.mkdir(parents=True, exist_ok=True)
        volume = volumes[mount["name"]]
        for resource, source, name in ((CONFIG_MAPS, "configMap", "name"), (SECRETS, "secret", "secretName")):
            if source in volume:
                reference = {"name": volume[source][name], "optional": volume[source].get("optional", False)}
                for key, text in _content(resource, reference, pod["metadata"]["namespace"], store).items():
                    (path / key).write_text(text)
        if mount["mountPath"] not in _KEPT_MOUNTS:
            paths[mount["mountPath"].rstrip("/")] = path / mount.get("subPath", "")
    return paths


def _localize(values: Mapping[str, str], paths: Mapping[str, Path], master_port: int) -> dict[str, str]:
    """Values that hold on one machine: every host is this one, and every job has a port of its own."""
    local = {name: _rewrite(value, paths) for name, value in values.items()}
    local |= {name: "127.0.0.1" for name in _ADDRESSES if name in values}
    local |= {name: str(master_port) for name in _PORTS if name in values}
    if _ENDPOINT in values:
        local[_ENDPOINT] = f"127.0.0.1:{master_port}"
    return local


def _rewrite(text: str, paths: Mapping[str, Path]) -> str:
    """Put the folders in the place of the mount paths, where these begin a path."""
    for mount_path in sorted(paths, key=len, reverse=True):
        begins = r"(?:(?<=file://)|(?<![\w/.:-]))"
        text = re.sub(rf"{begins}{re.escape(mount_path)}(?![\w.-])", str(paths[mount_path]), text)
    return text


def _expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` -> the variable's value, where there is one; `$$` keeps a dollar."""
    parts = text.split("$$")
    return "$".join(_REFERENCE.sub(lambda match: values.get(match[1], match[0]), part) for part in parts)

"""Node pools: where a job can run, what it gets there, and what that costs.

They are read from a TOML file, whose head explains every field: `TRAINER_POOLS`, or else the file that a cluster mounts, or else the
bundled one. `load` checks the whole file before anything is launched.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from trainer.io import limits, storage
from trainer.io.base_models import explain, merge, nearest
from trainer.io.costs import PLACE_VARIABLE, Machines, Price
from trainer.io.errors import SettingsError, StorageError

POOLS_VARIABLE = "TRAINER_POOLS"  # environment variable that names the file of pools
MOUNTED = Path("/etc/vit-distillation/pools.toml")  # where a cluster mounts its own pools from a ConfigMap
BUNDLED = Path(__file__).with_name("pools.toml")

ACCELERATORS: Mapping[str, str] = {"cuda": "nvidia.com/gpu", "xla": "aws.amazon.com/neuron"}
"""Device -> the resource that Kubernetes counts it by."""
EFA = "vpc.amazonaws.com/efa"
"""Elastic Fabric Adapters, the network cards for traffic between the devices of several nodes."""
PROCESSES_PER_ACCELERATOR: Mapping[str, int] = {"cuda": 1, "xla": 2}
"""Default of `processes_per_accelerator`: a Trainium device of the first generation has two cores."""
RESERVED = re.compile(
    r"PET_\w+|MASTER_(ADDR|PORT)|WORLD_SIZE|RANK|TRAINER_(DEVICE|CACHE|CACHE_GIB|FAILURES|LAUNCHED)|"
    r"NEURON_PJRT_\w+|NEURON_RT_(NUM_CORES|VISIBLE_CORES|ROOT_COMM_ID)|" + PLACE_VARIABLE
)  # environment variables that the operator, the launcher, or Neuron's runtime in torchrun's processes sets
SECRET = re.compile(r"(_|\b)(KEY|KEY_ID|SECRET\w*|TOKEN|PASSWORD|USERNAME)$")
"""Environment variables whose values belong in a Secret."""

_SUFFIXES = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SUFFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(m|k|[MGT]|[KMGT]i)?")


def quantity(text: str) -> float:
    """Return the number of a Kubernetes quantity: `500m` -> 0.5, `2Gi` -> 2147483648; a `ValueError` if it is none, or not above 0."""
    match = _QUANTITY.fullmatch(text)
    number = float(match[1]) * _SUFFIXES[match[2] or ""] if match else 0.0
    if number <= 0:
        raise ValueError(f"must be a quantity above 0, such as 8, 500m or 64Gi, got {text!r}")
    return number


def _checked_quantity(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        quantity(text)
    return text


Quantity = Annotated[str, BeforeValidator(_checked_quantity)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
ResourceName = Annotated[str, Field(pattern=r"^([-a-z0-9.]+/)?[-a-zA-Z0-9.]+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Minutes = Annotated[int, Field(ge=1, le=10**7)]


class _PoolTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SecretKey(_PoolTable):
    """Where the value of a secret variable is stored."""

    name: Name  # name of the Secret
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")]  # key in it
    optional: bool = False  # whether pods start if it is missing


class Pool(_PoolTable):
    """A node pool. The head of pools.toml says what each field means."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    instance: str = ""
    device: Literal["cpu", "cuda", "xla"]
    image: str = ""
    processes_per_node: Annotated[int, Field(ge=1)]
    processes_per_accelerator: Annotated[int, Field(ge=1, le=64)] | None = None
    resources: dict[ResourceName, Quantity]
    shared_memory: Quantity = "1Gi"
    cache: Quantity = "20Gi"
    tmp: Quantity = "10Gi"
    pod: dict[Literal["metadata", "spec"], dict[str, Any]] = {}
    environment: dict[Variable, str] = {}
    secrets: dict[Variable, SecretKey] = {}
    price: Price | None = None
    spot: bool = False
    backend: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    runtime: Name = "torch-distributed"
    queue: str = ""
    queued_minutes: Minutes = 60
    running_minutes: Minutes = 2880
    silent_minutes: Minutes = 30
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    keep_minutes: Annotated[int, Field(ge=1)] = 1440
    elastic_min_nodes: Annotated[int, Field(ge=0)] = 0

    @field_validator("environment")
    @classmethod
    def _holds_no_secret(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if RESERVED.fullmatch(name):
                raise ValueError(f"{name} is set by the launcher or the operator; leave it out")
            if SECRET.search(name):
                raise ValueError(f"{name} looks like a secret; name a Secret and its key under secrets.{name} instead")
        return environment

    @field_validator("pod")
    @classmethod
    def _has_one_container(cls, pod: dict[str, Any]) -> dict[str, Any]:
        containers = pod.get("spec", {}).get("containers", [{}])
        if not _is_one_table(containers):
            raise ValueError("spec.containers must have one table, of the container that trains")
        if "env" in containers[0]:
            raise ValueError("variables are given under environment and secrets; leave spec.containers.env out")
        return pod

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        missing = [name for name in ("cpu", "memory") if name not in self.resources]
        if missing:
            raise ValueError(f"resources must name {' and '.join(missing)}")
        for fields, resource in ((("shared_memory",), "memory"), (("cache", "tmp"), "ephemeral-storage")):
            given = self.resources.get(resource)
            if given and sum(quantity(getattr(self, field)) for field in fields) > quantity(given):
                sizes = " and ".join(f"{field} = {getattr(self, field)}" for field in fields)
                raise ValueError(f"{sizes} must be within resources.{resource} = {given}")
        for device, resource in ACCELERATORS.items():
            if device == self.device and self.accelerators < 1:
                raise ValueError(f'device = "{device}" needs resources."{resource}" = 1 or more')
            if device != self.device and resource in self.resources:
                raise ValueError(f'device = "{self.device}" cannot use resources."{resource}"; set device = "{device}"')
        limit = self.max_processes
        if limit and self.processes_per_node > limit:
            raise ValueError(
                f"processes_per_node must be 1 to {limit}, got {self.processes_per_node}: {self._devices_text()}"
            )
        if self.elastic_min_nodes and not self.retries:
            raise ValueError("elastic_min_nodes needs retries >= 1: a node that leaves restarts the others")
        if self.spot and self.price:
            raise ValueError("price: that of a spot node changes from hour to hour; leave it out")
        return self

    @property
    def accelerators(self) -> int:
        """GPUs or Neuron devices a node; 0 on processors."""
        count = self.resources.get(ACCELERATORS.get(self.device, ""))
        return int(quantity(count)) if count else 0

    @property
    def cpus(self) -> float:
        """Processor cores that a job gets on a node."""
        return quantity(self.resources["cpu"])

    @property
    def max_processes(self) -> int:
        """Processes that the devices of a node can take; 0: no limit."""
        return self.accelerators * (self.processes_per_accelerator or PROCESSES_PER_ACCELERATOR.get(self.device, 0))

    @property
    def joins_nodes(self) -> bool:
        """Whether several nodes can train together: Neuron devices reach those of other nodes through EFA only."""
        return self.device != "xla" or EFA in self.resources

    def processes(self, requested: int = 0) -> int:
        """Return the training processes on a node: as requested, or else the pool's own; a `SettingsError` if it has too few devices."""
        if self.max_processes and requested > self.max_processes:
            raise SettingsError(
                f"processes_per_node must be 0 (the pool's own number) to {self.max_processes} on pool {self.name}, got {requested}: "
                + self._devices_text()
            )
        return requested or self.processes_per_node

    def place(self, nodes: int, processes_per_node: int = 0) -> Machines:
        """Return the machines of a training here, with their price; a `SettingsError` if they lack devices or cannot train together."""
        if nodes > 1 and not self.joins_nodes:
            raise SettingsError(
                f"nodes = {nodes}, but the nodes of pool {self.name} have no EFA, without which Neuron devices of several nodes cannot "
                f'exchange gradients; set nodes=1, or name a pool with resources."{EFA}"'
            )
        return Machines(
            pool=self.name,
            instance=self.instance,
            nodes=nodes,
            processes_per_node=self.processes(processes_per_node),
            price=self.price,
        )

    def _devices_text(self) -> str:
        each = self.max_processes // self.accelerators
        return f'resources."{ACCELERATORS[self.device]}" = {self.accelerators}, processes_per_accelerator = {each}'


def load() -> dict[str, Pool]:
    """Return every pool by its name; a `SettingsError` names the pool, the field, its value and what is allowed."""
    path = _path()
    tables = _read(path)
    return {name: _pool(path, name, tables) for name in tables["pools"]}


def get(name: str) -> Pool:
    """Return a pool; a `SettingsError` if there is none of this name, or the file is wrong."""
    pools = load()
    if name not in pools:
        raise SettingsError(f"unknown pool {name!r}{nearest(name, pools)}; {_path()} has {', '.join(pools)}")
    return pools[name]


def _path() -> Path:
    named = os.environ.get(POOLS_VARIABLE)
    return Path(named) if named else MOUNTED if MOUNTED.is_file() else BUNDLED


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = limits.parse_toml(storage.read_limited(path, limits.TOML_BYTES).decode())
    except StorageError as error:
        raise SettingsError(f"pools {error}; {POOLS_VARIABLE} names the file") from error
    except ValueError as error:
        raise SettingsError(f"pools {path}: is not TOML: {error}") from error
    tables = {"defaults": {}, "spot": {}, "pools": {}} | content
    listed = tables["pools"].items() if isinstance(tables["pools"], dict) else ()
    for name, table in [*tables.items(), *listed]:
        if not isinstance(table, dict):
            raise SettingsError(f"pools {path}: {name} must be a table, got {table!r}")
    unknown = [name for name in tables if name not in ("defaults", "spot", "pools")]
    if unknown or not tables["pools"]:
        raise SettingsError(
            f"pools {path}: must have [pools.NAME] and may have [defaults] and [spot], got {', '.join(content) or 'nothing'}"
        )
    return tables


def merge_layers(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers of a pool or a pod: lists of tables are joined, and the one container is merged; else the upper layer wins."""
    return merge(below, above, _join)


def _join(key: str, lower: object, value: object) -> object:
    if key == "containers" and _is_one_table(lower) and _is_one_table(value):
        return [merge_layers(lower[0], value[0])]
    if isinstance(lower, list) and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [*lower, *value]
    return value


def _is_one_table(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)


def _pool(path: Path, name: str, tables: Mapping[str, dict[str, Any]]) -> Pool:
    own = tables["pools"][name]
    base: dict[str, Any] = {}
    if based_on := own.get("based_on"):
        plain = {known: table for known, table in tables["pools"].items() if "based_on" not in table}
        base = plain.get(str(based_on), {})
        if not base:
            raise SettingsError(
                f"pools {path}: pool {name}: based_on must be a pool without based_on of its own ({', '.join(plain)}), got {based_on!r}"
            )
    if own.get("spot") or "instance" in own:  # of another price, which changes where it is spot
        base = {key: value for key, value in base.items() if key != "price"}
    layers = [base, tables["spot"] if own.get("spot") else {}, own]
    values = functools.reduce(merge_layers, layers, tables["defaults"])
    values = {key: value for key, value in values.items() if key != "based_on"} | {"name": name}
    try:
        return Pool.model_validate(values)
    except ValidationError as error:
        fields = [known for known in Pool.model_fields if known != "name"]
        listed, missing = f"known: {', '.join([*fields, 'based_on'])}", "; give it here or under [defaults]"
        messages = explain(error, noun="field", known=fields, listed=listed, missing=missing)
        raise SettingsError("\n".join(f"pools {path}: pool {name}: {message}" for message in messages)) from error

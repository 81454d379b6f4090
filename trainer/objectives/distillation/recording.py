"""Recorded teacher outputs: for each view of each training image the largest logits and the sum of the rest, in records of fixed size.

Of a teacher without a head there are no logits, and a record is its embedding, its patch tokens, or both. In half precision each number is
kept to 2^-11 of itself; in int8 to half a step, which is 1/254 of the largest number of the record's features, or of the token.

The artifact holds `recording.json` (`RecordingDescription`), `keys.bin` (the samples' 64-bit keys, in the order of the splits), the
shards (`trainer.objectives.distillation.shards`) and `report.html`. What asks a store raises
`StorageError` where that does not answer or refuses.

Shapes: N samples, B samples in a batch, K logits a record, C classes, D features.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from trainer.config import DecodeOn, DistillSettings, FeatureFormat
from trainer.config.conflicts import KeptOutputs
from trainer.data.batch import Recorded
from trainer.data.dataset import PreparedDataset
from trainer.data.sampler import SHARD, WINDOW
from trainer.io import artifacts, storage
from trainer.io.base_models import NonNegative, Positive, what_is_wrong
from trainer.io.errors import ArtifactError
from trainer.objectives.distillation import shards

DESCRIPTION = "recording.json"
KEYS = "keys.bin"
REPORT = "report.html"

MOST_MAPS = 256  # shards that a process keeps open; each takes a file descriptor

Records = shards.Records
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RecordingDescription:
    """What `recording.json` says: what the outputs depend on, and the layout of a record."""

    samples: Positive  # images of the training split, and after them those without labels where these were recorded too
    views: Positive  # views of each
    block: Positive  # samples in a shard; the last one of a view may have fewer
    classes: NonNegative  # of the teacher's head; 0 where it has none
    top_k: NonNegative  # logits a record; at most `classes`, and 0 only where there are none
    features: NonNegative  # length of the pooled features; 0 where they were not asked for
    seed: NonNegative  # seed of the views
    view_size: Positive  # edge of the views, in pixels
    augmentation: Mapping[str, Any]  # the settings of the views
    decoder: str  # what decoded the stored images
    teacher: str  # the teacher's architecture
    precision: str  # of the teacher's forward pass, `bf16` or `fp32`
    dataset: Mapping[str, Any]  # the settings that made the data set
    unlabeled: NonNegative = 0  # how many of the images have no label
    feature_format: FeatureFormat = "fp16"  # of the features
    tokens: tuple[Positive, Positive, Positive] | None = None  # shape of the patch tokens: h, w, and numbers of each
    token_format: FeatureFormat = "int8"  # of the patch tokens
    window: NonNegative = 0  # samples among which views are paired; 0: all are one window

    def kept(self, place: str | Path = "") -> KeptOutputs:
        """Return what is kept of a teacher's outputs, to be compared with settings; `place` is empty before it is recorded."""
        return KeptOutputs(
            place=str(place),
            features=self.features > 0,
            tokens=self.tokens is not None,
            top_k=self.top_k,
            classes=self.classes,
            view_size=self.view_size,
        )

    def content(self) -> dict[str, Any]:
        """Return what `recording.json` holds; `feature_format` is left out where it is fp16, tokens where there are none, one window."""
        left_out = {"feature_format"} if self.feature_format == "fp16" else set()
        if self.tokens is None:
            left_out |= {"tokens", "token_format"}
        if not self.window:
            left_out.add("window")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def record(self) -> np.dtype[np.void]:
        """Layout of a record, without gaps, little endian."""
        index = "<u2" if self.classes <= 2**16 else "<u4"
        parts: list[tuple[str, str, tuple[int, ...]]] = []
        if self.classes:
            parts += [("indices", index, (self.top_k,)), ("logits", "<f2", (self.top_k,)), ("rest", "<f4", (2,))]
        if self.features and self.feature_format == "int8":
            parts += [("scale", "<f4", (1,)), ("features", "|i1", (self.features,))]
        elif self.features:
            parts += [("features", "<f2", (self.features,))]
        if self.tokens and self.token_format == "int8":
            parts += [("token_steps", "<f4", (*self.tokens[:2], 1)), ("tokens", "|i1", self.tokens)]
        elif self.tokens:
            parts += [("tokens", "<f2", self.tokens)]
        return np.dtype(parts)

    @property
    def gib(self) -> float:
        """GiB of all records."""
        return self.record.itemsize * self.views * self.samples / 2**30


_DESCRIPTION = TypeAdapter(RecordingDescription)


def decoder_name(data: PreparedDataset, decode_on: DecodeOn | None, *, decoded: bool) -> str:
    """Name what decodes the training images where `decode_on` says; those that are kept decoded are never left to a GPU."""
    if decode_on == "cuda" and not decoded:
        return f"nvJPEG of torchcodec {importlib.metadata.version('torchcodec')}"
    return data.decoder_name()


def write_description(directory: Path, description: RecordingDescription, keys: npt.NDArray[np.uint64]) -> None:
    """Write `recording.json` and `keys.bin` into an artifact in the making."""
    (directory / DESCRIPTION).write_text(
        json.dumps(description.content(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (directory / KEYS).write_bytes(keys.astype("<u8").tobytes())


def describe(uri: str | Path) -> RecordingDescription:
    """Read what recorded outputs say of themselves; their records are neither fetched nor checked.

    Raises:
        ArtifactError: there are no complete ones, or their description is not one.
    """
    artifacts.manifest(uri, "teacher_outputs")
    return _read_description(uri, storage.join(uri, DESCRIPTION))


def _read_description(uri: str | Path, file: str | Path) -> RecordingDescription:
    try:
        return _DESCRIPTION.validate_json(storage.read_bytes(file), strict=True)
    except ValueError as error:
        raise ArtifactError(
            f"teacher_outputs {uri}: {DESCRIPTION} does not describe recorded outputs ({what_is_wrong(error)}); record them again"
        ) from error


def open_recording(uri: str | Path, *further: str | Path) -> Recording:
    """Open and check recorded outputs, with those of further teachers on the same views (`check_joined`).

    Raises:
        ArtifactError: they are missing, damaged, of another kind or of another schema version.
    """
    artifact = artifacts.read(uri, "teacher_outputs")
    description = _read_description(uri, artifact.path / DESCRIPTION)
    return Recording(artifact.path, description, artifact.fingerprint, [open_recording(one) for one in further])


class Recording:
    """Recorded outputs, read by sample and view.

    Shards are mapped into memory when they are first read, in each process that reads them.
    """

    def __init__(
        self, path: Path, description: RecordingDescription, fingerprint: str, further: Sequence[Recording] = ()
    ) -> None:
        self.description, self.fingerprint, self.further = description, fingerprint, further
        self.view_seed, self.view_count = description.seed, description.views
        self._path = path
        self._blocks = math.ceil(description.samples / description.block)
        self._maps: dict[int, Records] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def read(self, indices: Indices, numbers: Indices) -> Recorded:
        """Read the outputs for these samples (indices into the training split) and views, [B] each; those of further teachers too."""
        blocks, rows = np.divmod(indices, self.description.block)
        files = numbers * self._blocks + blocks
        records = np.empty(len(indices), dtype=self.description.record)
        for file in np.unique(files).tolist():
            chosen = np.flatnonzero(files == file)
            records[chosen] = self._map(file)[rows[chosen]]
        return unpack(records)._replace(further=tuple(one.read(indices, numbers) for one in self.further))

    def _map(self, file: int) -> Records:
        if file not in self._maps:
            if len(self._maps) >= MOST_MAPS:
                self._maps.pop(next(iter(self._maps)))
            view, block = divmod(file, self._blocks)
            unit = shards.unit(view, block, samples=self.description.samples, size=self.description.block)
            self._maps[file] = np.memmap(
                self._path / unit.name,
                dtype=self.description.record,
                mode="r",
                offset=shards.HEADER_BYTES,
                shape=(unit.count,),
            )
        return self._maps[file]


def check_joined(uris: Sequence[str | Path], held: Sequence[RecordingDescription]) -> None:
    """Refuse recordings that have not the same views.

    Raises:
        ArtifactError: naming the setting of `reinforce` by which one differs from the first.
    """
    for uri, other in zip(uris[1:], held[1:], strict=True):
        for name, setting in (
            ("seed", "seed"),
            ("view_size", "view_size"),
            ("views", "views"),
            ("samples", "unlabeled"),
            ("decoder", "decode_on"),
        ):
            if (one := getattr(other, name)) != (first := getattr(held[0], name)):
                raise ArtifactError(
                    f"teacher_outputs {uri}: {name} is {one}, but {first} in {uris[0]}, and several teachers must have been asked about "
                    f"the same views; record it again with the same reinforce.{setting}"
                )


def unpack(records: Records) -> Recorded:
    """Return records [B] as tensors; where there are no logits they have no columns, and nothing is the sum of the rest."""
    names, count = records.dtype.names or (), len(records)
    beside: dict[str, Any] = {
        name: torch.from_numpy(records[name].copy()) for name in ("tokens", "token_steps") if name in names
    }
    if "features" in names:  # as they are used, float32 [B, D]
        scale = records["scale"] if "scale" in names else np.float32(1)
        beside["features"] = torch.from_numpy(records["features"].astype(np.float32) * scale)
    if "logits" not in names:
        return Recorded(
            indices=torch.empty(count, 0, dtype=torch.int64),
            logits=torch.empty(count, 0),
            rest=torch.full((count, 2), -torch.inf),
            **beside,
        )
    return Recorded(
        indices=torch.from_numpy(records["indices"].astype(np.int64)),
        logits=torch.from_numpy(records["logits"].astype(np.float32)),
        rest=torch.from_numpy(records["rest"].astype(np.float32)),
        **beside,
    )


def placeholder_recording(directory: Path, description: RecordingDescription) -> Recording:
    """Make outputs before anything was recorded, to measure how fast a student learns from them: one view of each sample, all the same.

    They are of a teacher that finds its first classes equally likely. All shards are one file under many names, so they take the room
    of one. `description` is that of what the stage reinforce would record.
    """
    one = replace(description, views=1)
    records = np.zeros(one.block, dtype=one.record)
    if one.classes:
        records["indices"] = np.arange(one.top_k)
    (directory / shards.FOLDER).mkdir(parents=True)
    first, *others = [directory / unit.name for unit in shards.units(one.views, samples=one.samples, size=one.block)]
    first.write_bytes(bytes(shards.HEADER_BYTES) + records.tobytes())
    for name in others:
        name.hardlink_to(first)
    return Recording(directory, one, fingerprint="")


# ---------------------------------------------------------------------------------------------------------------------
# Whether recorded outputs fit a distillation


def check_fits(
    uri: str | Path, settings: DistillSettings, *, data: PreparedDataset, dataset: str | Path, teacher: str | Path
) -> RecordingDescription:
    """Refuse outputs that were recorded of something else than of `teacher` on `data`, which lies at `dataset`; returns their description.

    Manifests and descriptions are compared, before any record or weight is read.

    Raises:
        ArtifactError: naming each difference and the next move.
    """
    description, manifest = describe(uri), artifacts.manifest(uri, "teacher_outputs")
    splits, differences = data.training_splits(unlabeled=settings.reads_unlabeled), []
    teacher_now, teacher_then = artifacts.manifest(teacher, "model"), manifest.parents.get("teacher", "unknown")
    if teacher_now.fingerprint != teacher_then:
        architecture = teacher_now.figures.get("architecture", "model")
        differences.append(
            f"they were recorded from another teacher ({description.teacher} {teacher_then[:12]}), but {teacher} is {architecture} "
            f"{teacher_now.fingerprint[:12]}; record again with the stage reinforce, or give the teacher that they are from"
        )
    dataset_then = manifest.parents.get("dataset", "unknown")
    if data.fingerprint != dataset_then:
        changes = _changes("data", description.dataset, artifacts.manifest(dataset, "dataset").settings)
        what = ", ".join([*changes, *_images_that_differ(uri, data, description)])
        differences.append(
            f"the data set has changed ({dataset_then[:12]}, now {data.fingerprint[:12]}): "
            f"{what or 'its settings and images are the same, but stored differently'}; record again with the stage reinforce, or give "
            "the data set that they were recorded on"
        )
    # Recorded outputs of more images than are learned from do fit: those with labels come first, and are mixed with one another.
    wanted = sum(len(split) for split in splits[1:])
    if wanted and not description.unlabeled:
        differences.append(
            f"they hold no outputs for the {wanted:,} images without labels, from which distill.unlabeled=true learns too; record again "
            "with reinforce.unlabeled=true, or set distill.unlabeled=false"
        )
    mixed = description.augmentation.get("mixup") or description.augmentation.get("cutmix")
    learned = sum(map(len, splits))
    if (
        mixed
        and description.samples > WINDOW * SHARD
        and (description.window, description.samples)
        != (
            WINDOW * SHARD,
            learned,
        )
    ):
        differences.append(
            f"their views are mixed within windows of {description.window or description.samples:,} of {description.samples:,} images, and "
            f"here of {WINDOW * SHARD:,} of {learned:,}, so other images are mixed; record again with the same images (reinforce.unlabeled)"
        )
    decoder = decoder_name(data, settings.decode_on, decoded=all(split.decoded for split in splits))
    if decoder != description.decoder:
        differences.append(
            f"the images were decoded by {description.decoder}, but here by {decoder}, which may give other pixels; record again with "
            "the stage reinforce, or decode with what they were recorded with (its version, and distill.decode_on)"
        )
    if changes := _changes("distill.views", description.augmentation, settings.views.model_dump(mode="json")):
        differences.append(
            f"the views are others: {', '.join(changes)}; record again with the stage reinforce, or set distill.views to what it was"
        )
    if differences:
        raise ArtifactError(f"teacher_outputs {uri}: do not fit this distillation: " + "; and ".join(differences))
    return description


def _changes(prefix: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List each setting that has another value now."""
    return [
        f"{prefix}.{name} was {then.get(name)} and is {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _images_that_differ(uri: str | Path, data: PreparedDataset, description: RecordingDescription) -> list[str]:
    then = np.frombuffer(storage.read_bytes(storage.join(uri, KEYS), 0, 8 * description.samples), dtype="<u8")
    now = np.concatenate([split.keys for split in data.training_splits(unlabeled=description.unlabeled > 0)])
    gone, new = len(np.setdiff1d(then, now)), len(np.setdiff1d(now, then))
    if gone or new:
        return [f"of {len(then):,} training images {gone:,} are gone and {new:,} are new"]
    return [] if np.array_equal(then, now) else ["the training images are the same, in another order"]

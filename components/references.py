"""How tasks name artifacts to one another: `s3://bucket/teacher#model=3f2a...`, a URI with kind and fingerprint as its fragment.

A text, not one of KFP's artifacts, whose identity in KFP's cache is the address alone. A task whose producer comes from the cache gets the
same text, and is in the cache too; one whose producer ran again gets another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from trainer.io import artifacts, limits, storage
from trainer.io.errors import ArtifactError

if TYPE_CHECKING:
    from trainer.graph import Kind

_PATTERN = re.compile(r"(?P<uri>.+)#(?P<kind>[a-z_]+)=(?P<fingerprint>[0-9a-f]{64})")


def to(uri: str, kind: Kind) -> str:
    """Make the reference to an artifact; an `ArtifactError` if it was not made."""
    return f"{uri}#{kind}={artifacts.manifest(uri, kind).fingerprint}"


def shared(uri: str, kind: Kind, run: str) -> str:
    """Make the reference to what a run made, or return that to the same content if another run made it before.

    Runs that start together each make the same data set. With two references to it, a later run would get one of them from KFP's cache,
    and train again what the cache has under the other. A fresh run shares none with earlier ones, or it would get their trainings from the
    cache. The artifact is in the run's folder of the pipeline's root, `ROOT/RUN/...`; `run` is empty where there is none, as in
    `kfp.local`.
    """
    reference = to(uri, kind)
    root, inside, _ = uri.partition(f"/{run}/")
    if not (run and inside):
        return reference
    name = f"{kind}-{_parts(reference)['fingerprint']}"
    entry = storage.join(root, "references", "-".join(filter(None, (name, generation(uri, run, fresh=False)))))
    if storage.create_bytes(entry, reference.encode()):
        return reference
    earlier = storage.read_limited(entry, limits.TOML_BYTES).decode(errors="replace")
    if _is_complete(earlier, kind, _parts(reference)["fingerprint"]):
        return earlier
    storage.write_bytes(entry, reference.encode())
    return reference


def generation(uri: str, run: str, *, fresh: bool) -> str:
    """Return the run since which results of KFP's cache count; empty where all do. `fresh` makes it this run.

    KFP can neither forget a cached result nor replace one, and what runs without its cache is not put there. So the first cached task of a
    run reads this text, which a store keeps beside the references of `shared`.

    Args:
        uri: of this run, in the pipeline's root.
        run: as for `shared`.
    """
    root, inside, _ = uri.partition(f"/{run}/")
    if not inside:  # no place that later runs share
        return run if fresh else ""
    entry = storage.join(root, "references", "generation")
    if fresh:
        storage.write_bytes(entry, run.encode())
    return storage.read_limited(entry, limits.TOML_BYTES).decode(errors="replace") if storage.exists(entry) else ""


def _is_complete(reference: str, kind: Kind, fingerprint: str) -> bool:
    """Check that a reference is to this content, and that every file of it is there. Their sizes are compared, and nothing is read."""
    parts = _PATTERN.fullmatch(reference)
    if parts is None or parts.group("kind", "fingerprint") != (kind, fingerprint):
        return False
    try:
        content = artifacts.manifest(parts["uri"], kind)
    except ArtifactError:  # removed since
        return False
    sizes = storage.files(parts["uri"])
    return content.fingerprint == fingerprint and all(
        sizes.get(name) == record["size"] for name, record in content.files.items()
    )


def uri_of(reference: str) -> str:
    """Return where the artifact is."""
    return _parts(reference)["uri"]


def uris(references: Mapping[str, str]) -> dict[str, str]:
    """Return where each given input is, by keyword; an `ArtifactError` if one is gone, or another one stands in its place."""
    found = {}
    for name, reference in references.items():
        if not reference:
            continue
        uri, kind, fingerprint = _parts(reference).group("uri", "kind", "fingerprint")
        if not artifacts.exists(uri):
            raise ArtifactError(
                f"{kind} {uri} is gone, though Kubeflow's cache has the task that made it as done (a rule of the store that removes old "
                "objects? another store?); make everything again, without the cache: make deploy-pipeline RUN=1 FRESH=1"
            )
        now = artifacts.manifest(uri, cast("Kind", kind)).fingerprint
        if now != fingerprint:
            raise ArtifactError(
                f"{kind} {uri} has the fingerprint {now[:12]}, but the task that made it left {fingerprint[:12]}: something else was "
                "written there; make everything again, without the cache: make deploy-pipeline RUN=1 FRESH=1"
            )
        found[name] = uri
    return found


def _parts(reference: str) -> re.Match[str]:
    found = _PATTERN.fullmatch(reference)
    if found is None:
        raise ArtifactError(f"{reference!r} is no reference to an artifact, URI#KIND=FINGERPRINT")
    return found

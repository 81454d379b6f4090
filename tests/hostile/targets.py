"""What the fuzzers aim at: everything that reads what others have made.

A target has seeds, valid inputs of its kind, and reads any bytes. It may only accept them or refuse them with a message: another
exception, a signal, more memory than the limit, or more time, is a finding.
"""

from __future__ import annotations

import functools
import io
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
from PIL import Image

from components.launch import pools
from trainer import config
from trainer.config import DataSettings, ModelSettings
from trainer.data.class_tables import read_tags
from trainer.data.sources import Columns, Item, SourceListing, list_source
from trainer.graph import Kind
from trainer.io import artifacts, limits, storage
from trainer.io.errors import TrainerError
from trainer.io.host import environment_variables
from trainer.models import networks
from trainer.models.served_student.preprocessing import BadImageError, decode

MAX_PIXELS = 1_000_000
SIZE = 16


@dataclass(frozen=True)
class Target:
    """Something that reads what others have made."""

    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    """Reads bytes; may write into a folder, where an earlier call has written."""
    refusals: tuple[type[Exception], ...] = (TrainerError,)


def try_out(target: Target, content: bytes, folder: Path) -> str:
    """How an input ends: empty where it was read, else the message.

    Raises:
        Exception: a finding.
    """
    try:
        target.read(content, folder)
    except target.refusals as error:
        return _checked(str(error))
    return ""


def _checked(message: str) -> str:
    assert message, "a refusal without a message"
    assert message == limits.printable(message), f"a message that steers a terminal: {message!r}"
    assert len(message) <= limits.MESSAGE_CHARACTERS + 100, f"a message of {len(message)} characters"
    return message


# ---------------------------------------------------------------------------------------------------------------------
# Images


@functools.cache
def _images() -> tuple[bytes, ...]:
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE + 3, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    return (
        _file(image, "JPEG", exif=exif),
        _file(image, "JPEG", progressive=True),
        _file(image.convert("CMYK"), "JPEG"),
        _file(image, "PNG"),
        _file(image.convert("P"), "PNG", transparency=1),
        _file(image.convert("RGBA"), "PNG"),
        _file(Image.fromarray(pixels[..., 0].astype(np.uint16) << 8), "PNG"),
        _file(image, "GIF", save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_180)]),
        _file(image, "BMP"),
        _file(image, "WEBP"),
        _file(image.convert("RGBA"), "WEBP", lossless=True),
        _file(image, "TIFF"),
        _file(image, "TIFF", compression="tiff_lzw"),
        _file(image, "TIFF", compression="jpeg"),
        _file(image, "PPM"),
        _file(image, "JPEG2000"),
        _file(image, "ICO", sizes=[(16, 16)]),
        _file(image, "AVIF"),
        _file(image, "MPO", save_all=True, append_images=[image]),
    )


def _file(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _read_image(content: bytes, folder: Path) -> None:
    decode(content, max_pixels=MAX_PIXELS, min_edge=4)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def _lists() -> tuple[bytes, ...]:
    return (
        b'path,label,split\na.jpg,Tea,train\nb/c.jpg,"Tea, green",val\nd.jpg,Tea,test\ne.jpg,,\n',
        b"\xef\xbb\xbflabel,path\r\nx,1.jpg\r\ny,2.jpg\r\n",
        b"path,label\n../out.jpg,x\n/etc/passwd,y\ns3://elsewhere/a.jpg,x\n",
    )


def _parquet_lists() -> tuple[bytes, ...]:
    columns = {
        "path": ["a.jpg", "b/ä.jpg", "c.jpg"],
        "label": ["Tea", None, "Milk"],
        "split": ["train", "", "val"],
        "id": [1, 2, 3],
    }
    made = []
    for options in ({}, {"use_dictionary": False, "compression": "zstd", "row_group_size": 2}):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink, **options)
        made.append(sink.getvalue().to_pybytes())
    return (*made,)


def _tars() -> tuple[bytes, ...]:
    files = {"1.jpg": b"x" * 600, "1.cls": b"Tea", "2.png": b"y", "2.json": b'{"label": 7}', f"{'ä' * 60}.gif": b"z"}
    made = []
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        made.append(buffer.getvalue())
    return (*made,)


def _read_tar(content: bytes, folder: Path) -> None:
    (folder / "0.tar").write_bytes(content)
    listing = list_source(f"tar:{folder}")
    for item in listing.items:
        assert len(listing.read(item.location)) <= len(content)
    shown = [*listing.classes, *(item.name for item in listing.items)]
    assert all(limits.printable_name(name) == name for name in shown)


def _read_list(content: bytes, folder: Path, file: str = "list.csv") -> None:
    (folder / file).write_bytes(content)
    listing = list_source(f"manifest:{folder / file}")
    inside = folder.resolve()
    assert all(Path(item.location).resolve().is_relative_to(inside) for item in listing.items)
    shown = [*listing.classes, *(item.name for item in listing.items)]
    assert all(limits.printable_name(name) == name for name in shown)


CLASSES = ("Tea", "Tea, green", "Milk")


def _tables() -> tuple[bytes, ...]:
    return (
        b'class,energy,allergens\nTea,1,\n"Tea, green",2.5,none\nMilk,61,milk\n',
        b'\xef\xbb\xbfname,note\r\nMilk,white\r\n\r\nTea,hot\r\n"Tea, green",hot\r\n',
        b'class,parent\nTea,Teas\n"Tea, green",Teas\nTeas,Drinks\nMilk,Drinks\n',
    )


def _read_tables(content: bytes, folder: Path) -> None:
    (folder / "table.csv").write_bytes(content)
    name = "hierarchy" if content.startswith(b"class,parent") else "attributes"
    settings = DataSettings.model_validate({name: str(folder / "table.csv")})
    tags = read_tags(settings, SourceListing(items=Columns.of(Item, ()), classes=CLASSES, read=bytes))
    assert tags is not None
    shown = [*tags.attributes, *(name for level in tags.levels for name in level.names)]
    assert all(limits.printable_name(name) == name for name in shown)
    tags.write(folder)


def _recipes() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(config.RECIPES.glob("*.toml")))


def _read_recipe(content: bytes, folder: Path) -> None:
    (folder / "own.toml").write_bytes(content)
    config.resolve(str(folder / "own.toml"))


def _overrides() -> tuple[bytes, ...]:
    return (
        b"distill.logit.temperature=2 data.source=imagefolder:/photos",
        b"distill.student.args='{img_size = 32, depth = 2}' evaluate.batch_size=64 distill.views.flip=false",
        b'reinforce.top_k=all distill.evidence.operators_at=[1,2] data.source="digits" run.seed=1',
    )


def _read_overrides(content: bytes, folder: Path) -> None:
    config.resolve("", content.decode("utf-8", "surrogateescape"))


def _pools() -> tuple[bytes, ...]:
    return (
        pools.BUNDLED.read_bytes(),
        b'[pools.a]\ndevice = "cpu"\nprocesses_per_node = 1\nresources = {cpu = 2, memory = "2Gi"}\n',
    )


def _read_pools(content: bytes, folder: Path) -> None:
    (folder / "pools.toml").write_bytes(content)
    with environment_variables({pools.POOLS_VARIABLE: str(folder / "pools.toml")}):
        for pool in pools.load().values():
            pool.place(2 if pool.joins_nodes else 1)


def _uris() -> tuple[bytes, ...]:
    return (
        *(
            b"/tmp/a/b",
            b"file:///tmp/a",
            b"s3://bucket/key/name.bin",
            b"minio://mlpipeline/v2/a",
            b"s3://user:password@host:9000/b/c",
        ),
        *(b"s3://bucket/../other/x", b"zip://a.zip::s3://b/c", b"file://host/share", b"memory://a/b", b"gs://bucket/x"),
    )


def _read_uri(content: bytes, folder: Path) -> None:
    uri = content.decode("utf-8", "surrogateescape")
    if not storage.is_remote(uri):
        storage.exists(uri)
        storage.read_bytes(uri, 0, 10)
    elif uri.partition("://")[0] not in ("hdfs", "webhdfs", "http", "https"):  # these ask other machines at once
        from trainer.io.storage import locate

        locate(uri)


# ---------------------------------------------------------------------------------------------------------------------
# Artifacts


def sign(folder: Path, kind: Kind) -> None:
    """Write the manifest that fits what is in a folder, as one could who wants it to be believed."""
    with artifacts.create(folder, kind, settings={}):
        pass


def _one_file(kind: Kind, file: str, make: Callable[[Path], object], open_: Callable[[Path], object]) -> Target:
    """A target that is one file of an artifact, whose other files are right and whose manifest fits."""

    def seeds() -> Sequence[bytes]:
        with tempfile.TemporaryDirectory() as name:
            make(Path(name))
            return (_find(Path(name), file).read_bytes(),)

    def read(content: bytes, folder: Path) -> None:
        if not (folder / artifacts.MANIFEST).exists():
            make(folder)
        _find(folder, file).write_bytes(content)
        sign(folder, kind)
        open_(folder)

    return Target(seeds, read)


def _find(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


def _make_model(folder: Path) -> None:
    args = {"img_size": SIZE, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}
    networks.save(networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"]), folder)
    sign(folder, "model")


def _tensors() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as name:
        _make_model(Path(name))
        return ((Path(name) / networks.WEIGHTS).read_bytes(),)


def _read_tensors(content: bytes, folder: Path) -> None:
    """A safetensors file by itself, which is faster than a whole model."""
    (folder / networks.WEIGHTS).write_bytes(content)
    networks._shapes(folder / networks.WEIGHTS)
    safetensors.torch.load_file(folder / networks.WEIGHTS)


TARGETS = {
    "image": Target(_images, _read_image, (BadImageError,)),
    "list of images": Target(_lists, _read_list),
    "Parquet list": Target(_parquet_lists, functools.partial(_read_list, file="list.parquet")),
    "tar file": Target(_tars, _read_tar),
    "table of classes": Target(_tables, _read_tables),
    "recipe": Target(_recipes, _read_recipe),
    "overrides": Target(_overrides, _read_overrides),
    "pools": Target(_pools, _read_pools),
    "URI": Target(_uris, _read_uri),
    "model's config": _one_file("model", networks.CONFIG, _make_model, networks.load),
    "weights": _one_file("model", networks.WEIGHTS, _make_model, networks.load),
    "safetensors": Target(_tensors, _read_tensors, (TrainerError, ValueError, OSError, safetensors.SafetensorError)),
}

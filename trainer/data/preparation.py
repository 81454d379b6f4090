"""From a source to a prepared data set: decode and store every image once, decide what is kept, write the splits and the data card.

Each image is decoded once, by one of several processes. Its square goes to a cache on disk (`decode_cache`), and what is known of it to a
file (`facts`). From these it is decided what is kept and in which split, and the splits are written from the cache. So of each image only
its name, label and place are held in memory, and the result depends neither on the number of processes nor on interruptions.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import PIL
import pyarrow as pa
import pyarrow.compute
from PIL import Image
from tqdm import tqdm

from trainer import __version__
from trainer.config import HOW_PREPARED, DataSettings, Encoding
from trainer.data import curation, facts, near_duplicates
from trainer.data.card import data_card
from trainer.data.class_tables import read_tags
from trainer.data.curation import ImageCandidate, Quarantined
from trainer.data.dataset_schema import (
    CARD,
    DROPPED,
    EXAMPLES,
    INDEXES,
    NEAR_DUPLICATES,
    QUARANTINE,
    ROWS_IN_FILE,
    SPLITS,
    TEST_EDGES,
    DatasetDescription,
    SplitName,
    features,
    index_file,
)
from trainer.data.decode_cache import DecodeCache, Outcome
from trainer.data.facts import ImageFacts
from trainer.data.near_duplicates import NearDuplicates
from trainer.data.sampler import SHARD, WINDOW
from trainer.data.sources import Item, SourceListing, list_source
from trainer.data.sources.columns import name_hash
from trainer.data.sources.s3_inventory import undated
from trainer.graph import ALONE, Share
from trainer.io import limits, storage
from trainer.io.artifacts import digest
from trainer.io.child_processes import SPAWNED
from trainer.io.errors import DataError, ObjectTooLargeError, make_directory, writing_to
from trainer.io.formatting import clipped, listed
from trainer.io.host import usable_cores
from trainer.io.storage.cache import draft
from trainer.models.served_student import preprocessing
from trainer.models.served_student.class_tags import TAGS, ClassTags
from trainer.models.served_student.preprocessing import DEEPEST, GRAY_PEAK, BadImageError, Square, is_jpeg

logger = logging.getLogger(__name__)

CHUNKS = 1000
"""Pieces that the work is cut into; each is a memory-mapped file of the decode cache, and a process cannot map a million files."""
SMALLEST_CHUNK = 128  # a smaller chunk does not repay sending it to a process and caching it
LASTING_BITS = 12  # of the hashes that chunks of a large set have in common, where more images are to leave the others where they were
LARGEST_CHUNK = 4096  # a larger chunk would take too much memory, since a process holds its squares
IMAGES_PER_PROCESS = 2000  # fewer images per process do not repay its start
SHARD_BYTES = 500 * 10**6  # a split's Arrow files hold about this much each
CHUNK_BYTES = 2**26  # squares in a chunk, where they are stored as their pixels
RAW_BYTES, REMOTE_RAW_BYTES = 20 * 2**30, 4 * 2**30
"""Decoded images that `data.encoding=auto` stores as they are, on a disk and in a store: ten times the bytes of a JPEG, which each stage
that reads them also checks, and fetches from a store."""
LOG_INTERVAL_S = 10.0  # seconds between two lines on the progress, where there is no terminal
_WORK = "spool"
"""Folder of the decode cache below the output, removed when the preparation ends; older versions left it under this name too."""
_FACTS, _LISTING = "facts.arrow", "listing.arrow"  # in it
_DECIDING = {
    *("val_fraction", "test_fraction", "test_from", "split_seed", "near_duplicates"),
    *("min_images_per_class", "max_bad_fraction", "attributes", "hierarchy", "multi_label"),
}  # settings about which decoded images are kept where, and what is known of classes; not about how images are decoded

_MISSING = "no such file"  # reason of an image that is not where the source says

T = TypeVar("T")
Read: TypeAlias = Callable[[str], bytes]
DecodedChunk: TypeAlias = tuple[list[Outcome], int]  # outcomes, and how many of them were decoded before


def prepare(
    settings: DataSettings,
    directory: Path,
    *,
    cache_uri: str | None = None,
    processes: int | None = None,
    remote: bool = False,
    share: Share = ALONE,
    given: tuple[SourceListing, ClassTags | None] | None = None,
) -> dict[str, int]:
    """Write the prepared data set of `settings.source` into a directory; `dataset_schema` describes its files.

    Args:
        directory: an existing one, whose data set is replaced.
        cache_uri: `decode_cache_uri`, where decoded images are kept for a preparation that is started again; the caller removes it when
            the result is complete. Without it they are decoded again.
        processes: decode and write, by default one for each usable core; the result does not depend on their number.
        remote: whether the data set goes to a store, from which each machine of a training fetches it.
        share: of the decoding, where other machines decode into the same cache with `decode_share`.
        given: what `list_images` has returned; by default it is called here.

    Returns:
        Numbers of images: train, val, test, unlabeled; quarantined; duplicates and leakage (left out because an equal one is kept);
        near_duplicates (alike to one of a held-out split); and classes.
    """
    listing, tags = given or list_images(settings)
    if tags is not None and tags.attributes:
        numbers = [name for name in tags.attributes if tags.is_number(name)]
        texts = [name for name in tags.attributes if name not in numbers]
        shown = (listed(names, 20) or "none" for names in (numbers, texts))
        logger.info("prepare: attributes that are numbers: %s; texts: %s", *shown)
    for remark in listing.remarks:
        logger.warning("prepare: %s", remark)
    settings = _with_encoding(settings, len(listing.items), directory, remote=remote)
    processes = processes or _processes(listing)
    with _open_cache(settings, directory, cache_uri) as cache:
        listing = _mapped(listing, cache.folder)
        if share.of > 1:
            _decode_missing(listing, settings, cache, processes, share, ended=_goes_on)
        with facts.writing_facts(cache.folder / _FACTS) as append:
            bad = _decode_all(listing, settings, cache, processes, append)
        decoded = ImageFacts.read(cache.folder / _FACTS)
        _check_grays(decoded, settings)
        kept, contradicting, dropped = facts.quarantine_and_drop(decoded, listing.label_names, cache.folder)
        quarantined = sorted(bad + contradicting, key=lambda one: one.name)
        _write_json(directory / QUARANTINE, map(asdict, quarantined))
        squares, ends = _open_squares(cache, chunks := [*_chunks(listing, settings)])
        card = partial(
            data_card,
            settings,
            listing,
            quarantined=quarantined,
            tags=tags,
            read=partial(_file, squares.with_format("arrow"), settings),
        )
        _write_json(directory / DROPPED, map(asdict, dropped))
        try:
            _check_quarantined(quarantined, listing, settings, directory / QUARANTINE)
            curation.check_classes(kept, listing.classes, settings, listing.members)
            kept, near = _split(kept, listing, settings, directory, cache.folder)
        except DataError as error:
            page = card(splits=_by_split(kept), dropped=dropped, failure=str(error))
            (directory / CARD).write_text(page, encoding="utf-8")
            raise
        splits = _by_split(kept)
        (directory / CARD).write_text(card(splits=splits, dropped=dropped, near=near), encoding="utf-8")
        edges = [min(one.width, one.height) for one in splits["test"]]
        (directory / TEST_EDGES).write_text(json.dumps(edges) + "\n", encoding="utf-8")
        for file in EXAMPLES:
            (directory / file).unlink(missing_ok=True)
        for candidate in splits["test"][:1]:
            encoded = _file(squares.with_format("arrow"), settings, candidate.row)
            (directory / EXAMPLES[0 if is_jpeg(encoded) else 1]).write_bytes(encoded)
        # Last, since it frees the squares.
        _write_splits(
            splits, squares, directory, processes, lambda row: cache.free(chunks[: bisect.bisect_right(ends, row)])
        )
        if cache.stays:
            cache.trim(chunks)
    for line in _summary(listing, splits):
        logger.info("prepare: %s", line)
    counts = {str(split): len(members) for split, members in splits.items()}
    DatasetDescription(
        classes=listing.classes,
        image_size=settings.image_size,
        images=counts,
        raw=settings.encoding == "raw",
        label_sets=listing.label_sets,
    ).write(directory)
    (directory / TAGS).unlink(missing_ok=True)
    if tags is not None:
        tags.write(directory)
    leakage = sum(drop.is_leakage for drop in dropped)
    return counts | {
        "classes": len(listing.classes),
        "quarantined": len(quarantined),
        "duplicates": len(dropped) - leakage,
        "leakage": leakage,
        "near_duplicates": len(near.pairs),
    }


def decode_share(
    settings: DataSettings,
    cache_uri: str,
    share: Share,
    *,
    ended: Callable[[], bool],
    processes: int | None = None,
    remote: bool = False,
) -> int:
    """Decode images into the cache of a preparation on another machine, its share first, until nothing is missing; returns how many.

    `ended` says whether the preparation has ended, and can be pickled; the others are as in `prepare`, and equal to those there.
    """
    if ended():  # before the images are listed
        logger.info("prepare: the data set is there already; nothing is left to decode")
        return 0
    listing = _listing(settings)
    with draft() as folder:
        settings = _with_encoding(settings, len(listing.items), folder, remote=remote)
        cache = DecodeCache(uri=cache_uri, folder=folder, way=_way(settings), stays=bool(settings.keep_decoded))
        listing = _mapped(listing, folder)
        return _decode_missing(listing, settings, cache, processes or _processes(listing), share, ended=ended)


def list_images(settings: DataSettings) -> tuple[SourceListing, ClassTags | None]:
    """List the images of the source, and read what is known of its classes; a `DataError` where either is wrong."""
    listing = _listing(settings)
    return listing, read_tags(settings, listing)


def _listing(settings: DataSettings) -> SourceListing:
    listing = list_source(settings.source, outside=settings.outside, multi_label=settings.multi_label)
    return _with_test(listing, settings) if settings.test_from == "val" else listing


def _mapped(listing: SourceListing, folder: Path) -> SourceListing:
    """Map the items into memory; those of a large source by a hash of their names, so that each window of a training has all classes."""
    items = listing.items
    order = items.hash_order() if _is_hashed(items) else None
    return replace(listing, items=items.mapped(folder / _LISTING, order))


def _processes(listing: SourceListing) -> int:
    return min(usable_cores(), math.ceil(len(listing.items) / IMAGES_PER_PROCESS))


def _by_split(kept: ImageFacts) -> dict[SplitName, ImageFacts]:
    return {split: kept.of(split) for split in SPLITS}


def _summary(listing: SourceListing, splits: Mapping[SplitName, Sequence[ImageCandidate]]) -> list[str]:
    """Write the lines of the log that let a user see whether the images were understood."""
    classes = [repr(clipped(name, 40)) for name in listing.classes]
    kept = (one for split in ("train", "val", "test") for one in splits[split])
    counts = curation.count_classes(kept, listing.members)
    smallest = min(range(len(classes)), key=lambda label: counts[label])
    given = {split for split, _ in listing.counts}
    sizes = [
        f"{len(members):,} {split}{' (taken from train)' if split in ('val', 'test') and split not in given else ''}"
        for split, members in splits.items()
        if members
    ]
    return [
        f"{len(classes):,} classes: {listed(classes, 10)}; the smallest is {classes[smallest]} with {counts[smallest]:,} images",
        f"images: {', '.join(sizes)}",
    ]


def _with_encoding(settings: DataSettings, images: int, directory: Path, *, remote: bool) -> DataSettings:
    return settings.model_copy(update={"encoding": choose_encoding(settings, images, directory, remote=remote)})


def choose_encoding(settings: DataSettings, images: int, directory: Path, *, remote: bool) -> Encoding:
    """Choose the encoding of so many images where that is `auto`, by their size and the free disk below `directory`."""
    if settings.encoding != "auto":
        return settings.encoding
    size, free = images * 3 * settings.image_size**2, shutil.disk_usage(directory).free
    # The squares of the decode cache and the written ones, and room for what else needs the disk.
    fits = size <= (REMOTE_RAW_BYTES if remote else RAW_BYTES) and 3 * size <= free
    chosen: Encoding = "raw" if fits else "fast-jpeg"
    text = "prepare: images are stored as %s: %.1f GB decoded, %.1f GB of disk free (data.encoding=auto)"
    logger.info(text, "their pixels" if fits else chosen, size / 1e9, free / 1e9)
    return chosen


def _file(squares: Any, settings: DataSettings, row: int) -> bytes:
    """Read the square of a row from `squares` in Arrow's format, as an image file."""
    stored: bytes = squares[row]["image"][0]["bytes"].as_py()
    if settings.encoding == "raw":
        edges = (settings.image_size, settings.image_size)
        return encode_square(Image.frombytes("RGB", edges, stored), "png", settings.jpeg_quality)
    return stored


def _with_test(listing: SourceListing, settings: DataSettings) -> SourceListing:
    """Make val the test split where the source has none."""
    splits = {split for split, _ in listing.counts}
    if "test" in splits:
        return listing
    if "val" not in splits:
        raise DataError(
            f"data.source={settings.source}: data.test_from is val, but the source has neither val nor test; "
            "set data.test_from=train"
        )
    numbers = listing.items.column("split")
    moved = np.where(numbers == SPLITS.index("val"), np.int8(SPLITS.index("test")), numbers)
    note = "The source's val is the test here (data.test_from), and val is taken from train."
    return replace(listing, items=listing.items.with_columns(Item, split=moved), notes=(*listing.notes, note))


def decode_cache_uri(settings: DataSettings, root: str) -> str:
    """Return the URI of the decode cache below `root`, named by the source and how its images are decoded."""
    kind, _, place = settings.source.partition(":")
    if not storage.is_remote(place) and Path(place).exists():  # under one name from wherever it is read
        place = str(Path(place).resolve())
    return storage.join(root, f"prepare-{digest([undated(f'{kind}:{place}'), _way(settings)])[:16]}")


@contextmanager
def _open_cache(settings: DataSettings, directory: Path, cache_uri: str | None) -> Iterator[DecodeCache]:
    """Open the decode cache. Its part in `directory` is removed at the end, and remains of an earlier preparation at the beginning."""
    folder = directory / _WORK
    for old in (folder, *(directory / name for name in (INDEXES, *SPLITS))):
        if old.exists():
            shutil.rmtree(old)
    folder.mkdir()
    try:
        place = cache_uri or str(folder / "kept")
        yield DecodeCache(uri=place, folder=folder, way=_way(settings), stays=bool(settings.keep_decoded))
    finally:
        shutil.rmtree(folder)


def _way(settings: DataSettings) -> str:
    """Return the SHA-256 of all settings and versions that decide the outcome of an image file, as hexadecimal text."""
    values = settings.model_dump(mode="json", exclude={"source", *HOW_PREPARED, *_DECIDING})
    pillow_heif = find_spec("pillow_heif") and importlib.metadata.version("pillow-heif")
    versions = {"version": __version__, "pillow": PIL.__version__, "pillow_heif": pillow_heif or ""}
    return digest({"settings": values, **versions})


def _gray_bits(settings: DataSettings) -> int:
    return DEEPEST if settings.gray_bits == "auto" else settings.gray_bits


# ---- Decoding


def _chunks(listing: SourceListing, settings: DataSettings) -> Mapping[str, Sequence[Item]]:
    """Cut the images into chunks: the name of each in the decode cache -> its images, in the listing's order."""
    items = listing.items
    most = LARGEST_CHUNK
    if settings.encoding == "raw":
        most = max(1, min(most, CHUNK_BYTES // (3 * settings.image_size**2)))
    size = min(max(len(items) // CHUNKS, SMALLEST_CHUNK), most)
    if settings.keep_decoded and not _is_hashed(items):
        # Of a size that does not depend on how many images there are, so that more of them leave the others where they were.
        return _lasting_chunks(items, max(1, min(SMALLEST_CHUNK, most // 4)))
    starts = [*range(0, len(items), size), len(items)]
    if _is_hashed(items):
        # A new image changes its own chunk alone: that of the names whose hashes begin with the same bits.
        bits = (len(starts) - 2).bit_length()
        if settings.keep_decoded:
            bits = max(bits, LASTING_BITS)
        starts = [0]
        for number in range(1, 2**bits):
            last, limit = starts[-1], number << (64 - bits)
            starts.append(bisect.bisect_left(items, limit, lo=last, key=lambda item: name_hash(item.name)))
        starts.append(len(items))
    return {f"{number:06d}": items[start:stop] for number, (start, stop) in enumerate(pairwise(starts))}


def _lasting_chunks(items: Sequence[Item], size: int) -> Mapping[str, Sequence[Item]]:
    """Cut images that are in the order of their names into chunks of about `size`, so that a new one changes its own chunk alone.

    A chunk begins where the hash of a name is small, as in content-defined chunking, and bears that hash, so neither its images nor its
    name depend on what comes before.
    """
    starts = {"first": 0}
    limit, last = 2**64 // size, 0
    for place, item in enumerate(items):
        hashed = name_hash(item.name)
        name = f"{hashed:016x}"
        if place and (hashed < limit or place - last >= 4 * size) and name not in starts:
            starts[name] = last = place
    return {
        name: items[start:stop]
        for name, (start, stop) in zip(starts, pairwise([*starts.values(), len(items)]), strict=True)
    }


def _is_hashed(items: Sequence[Item]) -> bool:
    return len(items) > SHARD * WINDOW


def _decode_all(
    listing: SourceListing,
    settings: DataSettings,
    cache: DecodeCache,
    processes: int,
    append: Callable[[Sequence[ImageCandidate]], object],
) -> list[Quarantined]:
    """Decode every image; good ones get the next rows of the decode cache, in the listing's order, and are appended; returns the others."""
    work = partial(_make_chunk, read=listing.read, settings=settings, schema=features().arrow_schema, cache=cache)
    bad: list[Quarantined] = []
    total, done, there, logged_s = len(listing.items), 0, 0, time.monotonic()
    with tqdm(total=total, desc="prepare", unit="image", disable=not sys.stderr.isatty()) as bar:
        chunks = _chunks(listing, settings)
        for decoded, were_there in _map(work, [*chunks], [*chunks.values()], processes):
            append([outcome for outcome in decoded if isinstance(outcome, ImageCandidate)])
            bad += [outcome for outcome in decoded if isinstance(outcome, Quarantined)]
            done += len(decoded)
            there += were_there
            bar.update(len(decoded))
            # Without a terminal, a line now and then.
            if bar.disable and (done == total or time.monotonic() - logged_s >= LOG_INTERVAL_S):
                logger.info("prepare: decoded %d of %d images", done, total)
                logged_s = time.monotonic()
    if there:
        logger.info("prepare: %d of %d images had been decoded before", there, total)
    return bad


def _decode_missing(
    listing: SourceListing,
    settings: DataSettings,
    cache: DecodeCache,
    processes: int,
    share: Share,
    *,
    ended: Callable[[], bool],
) -> int:
    """Decode chunks that are not kept, those of a share first; returns the number of their images."""
    work = partial(
        _keep_missing,
        read=listing.read,
        settings=settings,
        schema=features().arrow_schema,
        cache=cache,
        ended=ended,
        drop=share.number > 0,
    )
    chunks, done, logged_s = _chunks(listing, settings), 0, time.monotonic()
    names = [*chunks]
    order = [names[number] for number in _order_of(share, len(names))]
    for count in _map(work, order, [chunks[name] for name in order], processes):
        done += count
        if time.monotonic() - logged_s >= LOG_INTERVAL_S:
            logger.info("prepare: share %d of %d: decoded %d of %d images", *share, done, len(listing.items))
            logged_s = time.monotonic()
    why = "the data set is there" if ended() else "nothing is missing"
    logger.info("prepare: share %d of %d: decoded %d of %d images; %s", *share, done, len(listing.items), why)
    return done


def _order_of(share: Share, chunks: int) -> list[int]:
    """Return the chunks in the order in which a machine decodes what is missing: its own share, then that of each other from its end.

    So two machines rarely decode the same, which would do no harm.
    """
    number, of = share
    others = (reversed(range((number + step) % of, chunks, of)) for step in range(1, of))
    return [*range(number, chunks, of), *chain.from_iterable(others)]


def _goes_on() -> bool:
    return False


def _map(
    work: Callable[[str, Sequence[Item]], T], names: Sequence[str], chunks: Sequence[Sequence[Item]], processes: int
) -> Iterator[T]:
    if processes == 1:
        yield from map(work, names, chunks)
        return
    # Spawned, because a forked copy of a process with threads (Arrow's, fsspec's) can hang. Ctrl-C is for the parent to handle.
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(processes, SPAWNED, initializer=signal.signal, initargs=ignored) as pool:
        try:
            yield from pool.map(work, names, chunks)
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that decodes images died, probably for lack of memory; {processes} of them run at once, "
                "each needs a few bytes a pixel: lower data.max_pixels, or prepare on a machine with more memory"
            ) from error


def _keep_missing(
    name: str,
    items: Sequence[Item],
    *,
    read: Read,
    settings: DataSettings,
    schema: pa.Schema,
    cache: DecodeCache,
    ended: Callable[[], bool],
    drop: bool,
) -> int:
    """Decode a chunk that is not kept, unless the preparation has ended; `drop`: this machine does not need the squares."""
    if ended() or cache.has(name, items):
        return 0
    _make_chunk(name, items, read=read, settings=settings, schema=schema, cache=cache)
    if drop:
        cache.squares(name).unlink()
    if ended() and not cache.stays:  # meanwhile, and the cache was removed
        cache.remove(name)
    return len(items)


def _make_chunk(
    name: str, items: Sequence[Item], *, read: Read, settings: DataSettings, schema: pa.Schema, cache: DecodeCache
) -> DecodedChunk:
    """Decode those images of a chunk into the cache that were not decoded before."""
    kept, is_whole = cache.find(name, items, partial(_content, read=read))
    if is_whole:
        return [one.outcome for one in kept if one is not None], len(items)
    file = cache.squares(name)
    squares = _squares(file) if any(kept) else None
    outcomes, contents, rows = [], [], []
    for item, one in zip(items, kept, strict=True):
        if one is None:
            content, outcome, square = _decode(item, read, settings)
        else:
            content, outcome, square = one.content, one.outcome, b""
            if squares is not None and isinstance(outcome, ImageCandidate):
                square = squares[one.row].as_py()
        contents.append(content)
        outcomes.append(outcome)
        if isinstance(outcome, ImageCandidate):
            image = {"bytes": square, "path": None}
            rows.append({"image": image, "label": item.label, "key": outcome.key, "source": item.name})
    with writing_to(file):
        file.unlink(missing_ok=True)  # a new file, since one of an earlier attempt may still be mapped into memory
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    cache.keep(name, items, outcomes, contents)
    return outcomes, sum(one is not None for one in kept)


def _squares(file: Path) -> pa.ChunkedArray:
    """Map the encoded squares of a chunk, which may be replaced meanwhile."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as reader:
        return pa.compute.struct_field(reader.read_all().column("image"), "bytes")


def _decode(item: Item, read: Read, settings: DataSettings) -> tuple[str, Outcome, bytes]:
    """Decode an image: SHA-256 of its file, or why it cannot be read; its outcome; its encoded square if it is good."""
    content = ""
    try:
        file = _read(item, read)
        content = hashlib.sha256(file).hexdigest()
        try:
            image = preprocessing.decode(
                file, max_pixels=settings.max_pixels, min_edge=settings.min_edge, gray_bits=_gray_bits(settings)
            )
        except MemoryError as error:
            raise DataError(f"image {item.name}: not enough memory to decode it; lower data.max_pixels") from error
        how = Square(fit=settings.fit, size=settings.image_size, max_pixels=settings.max_pixels)  # decoded already
        picture = preprocessing.to_square(image, how)
        square = encode_square(picture, settings.encoding, settings.jpeg_quality)
        decoded = ImageCandidate(
            name=item.name,
            label=item.label,
            split=item.split,
            key=content_key(image),
            width=image.width,
            height=image.height,
            gray_peak=image.info.get(GRAY_PEAK, 0),
            appearance=near_duplicates.appearance(picture, min(image.size)),
        )
    except BadImageError as error:
        return content or str(error), Quarantined(name=item.name, reason=str(error)), b""
    return content, decoded, square


def content_key(image: Image.Image) -> str:
    """Return the SHA-256 of a decoded picture's size and RGB pixels, as hexadecimal text: equal for equal pictures in different files."""
    size = f"{image.width}x{image.height}:".encode()
    return hashlib.sha256(size + image.tobytes()).hexdigest()


def encode_square(image: Image.Image, encoding: Encoding, jpeg_quality: int) -> bytes:
    """Encode an RGB picture; `jpeg` keeps color at full resolution (4:4:4), which small pictures show, `fast-jpeg` at half (4:2:0)."""
    if encoding == "raw":
        return image.tobytes()
    buffer, options = io.BytesIO(), dict[str, int]()
    if encoding != "png":
        options = (
            {"quality": jpeg_quality, "subsampling": 0} if encoding == "jpeg" else {"quality": 90, "subsampling": 2}
        )
    image.save(buffer, "png" if encoding == "png" else "jpeg", **options)
    return buffer.getvalue()


def _content(item: Item, read: Read) -> str:
    """Return the SHA-256 of an image's file, or why it cannot be read."""
    try:
        return hashlib.sha256(_read(item, read)).hexdigest()
    except BadImageError as error:
        return str(error)


def _read(item: Item, read: Read) -> bytes:
    try:
        return read(item.location)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadImageError(_MISSING) from error
    except ObjectTooLargeError as error:
        raise BadImageError(f"too large: more than {limits.IMAGE_BYTES:,} bytes") from error
    except (PermissionError, IsADirectoryError) as error:
        raise BadImageError(f"cannot be read: {error.strerror}") from error
    except OSError as error:  # a network or a disk that fails says nothing about the image
        raise DataError(
            f"image {item.name}: reading it failed ({error}); see to the storage and prepare again"
        ) from error


# ---- Deciding


def _check_grays(decoded: ImageFacts, settings: DataSettings) -> None:
    """Refuse a set whose 16-bit grays leave their upper bits unused, since most of what they show would be lost."""
    peaks = decoded.column("gray_peak")
    deep = int(np.count_nonzero(peaks))
    if not deep:
        return
    deepest = decoded[int(peaks.argmax())]
    found = f"{deep:,} of {len(decoded):,} images have grays of 16 bits, up to {deepest.gray_peak} in {deepest.name}"
    needed = max(deepest.gray_peak.bit_length(), 8)
    if settings.gray_bits == "auto" and needed < DEEPEST:
        raise DataError(
            f"data.source={settings.source}: {found}, which is {needed} bits; set data.gray_bits={needed} to use these, or "
            f"data.gray_bits={DEEPEST} if they are of {DEEPEST} bits and dark. Photos that the student is asked about later are read alike"
        )
    logger.info("prepare: %s, read as %d bits (data.gray_bits)", found, _gray_bits(settings))


def _check_quarantined(
    quarantined: Sequence[Quarantined], listing: SourceListing, settings: DataSettings, file: Path
) -> None:
    if not quarantined:
        return
    kinds = Counter(one.reason.split(":")[0] for one in quarantined)
    examples = {one.reason.split(":")[0]: one for one in reversed(quarantined)}
    reasons = []
    for kind, images in kinds.most_common(5):
        name, detail = examples[kind].name, examples[kind].reason.partition(":")[2].strip()
        if kind == _MISSING:
            place = next(item.location for item in listing.items if item.name == name)
            if not storage.is_remote(place):
                place = str(storage.local_path(place).absolute())
            detail = f"looked for at {place}"
            if settings.source.startswith("manifest:"):
                detail += "; relative paths start at the folder of the list, with / between folders"
        reasons.append(f"{images} {kind}, such as {name}{f' ({limits.cut(detail, 300)})' if detail else ''}")
    total, share = len(listing.items), len(quarantined) / len(listing.items)
    found = f"{len(quarantined)} of {total} images are bad ({share:.1%})"
    if share > settings.max_bad_fraction:
        raise DataError(
            f"{found}, more than data.max_bad_fraction={settings.max_bad_fraction:g} allows: {'; '.join(reasons)}. All are listed in "
            f"{file}; mend or remove them, or raise the limit"
        )
    logger.warning("prepare: %s and left out: %s. All are listed in %s", found, "; ".join(reasons), file)


def _split(
    candidates: ImageFacts, listing: SourceListing, settings: DataSettings, directory: Path, folder: Path
) -> tuple[ImageFacts, NearDuplicates]:
    """Take missing splits from train, and handle near-duplicates in different splits as the settings say."""
    separates = settings.near_duplicates == "separate"
    given, members = {split for split, _ in listing.counts}, listing.members
    fractions = curation.missing_fractions(given, settings)
    if separates or any(len(of_label) != 1 for of_label in members):
        groups = near_duplicates.groups(candidates) if separates else None
        moved = curation.take_missing_splits(candidates, given, settings, members, groups)
        kept = ImageFacts(
            candidates.table, candidates.rows, np.array([SPLITS.index(one.split) for one in moved], dtype=np.int8)
        )
    elif any(fractions.values()):
        kept = facts.take_missing_splits(candidates, fractions, settings.split_seed, folder)
    else:
        kept = candidates
    near, file = near_duplicates.find(kept), directory / NEAR_DUPLICATES
    file.unlink(missing_ok=True)
    if near.pairs:
        _write_json(file, [pair.record(listing.label_names) for pair in near.pairs])
        first = near.pairs[0]
        found = (
            f"{len(near.pairs)} images look like one of a held-out split, first {first.image.name} of {first.image.split}, like "
            f"{first.twin.name} of {first.twin.split}"
        )
        if settings.near_duplicates == "refuse":
            raise DataError(f"{found}. All are listed in {file}; remove them, or set data.near_duplicates=separate")
        logger.warning("prepare: %s; %s", found, "they are left out" if separates else "the data card shows them")
    if separates:
        kept = kept.where(~np.isin(kept.rows, [pair.image.row for pair in near.pairs]))
    taught = {one for split, label in listing.counts if split == "train" for one in members[label]}
    try:
        curation.check_splits(kept, listing.classes, taught, members)
    except DataError as error:
        hint = (
            "; or set data.near_duplicates=show: images that look the same are kept together, or left out" * separates
        )
        raise DataError(f"{error}{hint}") from error
    return kept, near


# ---- Writing


def _write_json(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON list, indented, record by record."""
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        number = -1
        for number, record in enumerate(records):
            text = json.dumps(record, indent=2, ensure_ascii=False).replace("\n", "\n  ")
            file.write(f"{',' * bool(number)}\n  {text}")
        file.write("]\n" if number < 0 else "\n]\n")


def _open_squares(cache: DecodeCache, chunks: Iterable[str]) -> tuple[Any, list[int]]:
    """Map all chunks as one data set; the row at which each of them ends."""
    import datasets  # type: ignore[import-untyped]  # here, because decoding processes have no use for it, and it takes a second

    files = [datasets.Dataset.from_file(str(cache.squares(name))) for name in chunks]
    return datasets.concatenate_datasets(files), [*accumulate(map(len, files))]


def _write_splits(
    splits: Mapping[SplitName, ImageFacts],
    squares: Any,
    directory: Path,
    processes: int,
    free: Callable[[int], object],
) -> None:
    """Write the splits as `datasets.Dataset.save_to_disk` does, to the bit.

    The largest comes last, some shards at a time: `free` is then given the row before which none is read any more.
    """
    row_bytes = squares.data.nbytes / len(squares)
    ordered = sorted(splits, key=lambda split: len(splits[split]))
    for split in ordered:
        members, folder = splits[split], directory / split
        labels, keys = np.empty(len(members), dtype=np.int64), np.empty(len(members), dtype=np.uint64)
        # `datasets` would draw a fingerprint at random, and the files would differ from run to run.
        # That of the list [[key, label], ...] as JSON, which is never there as a whole.
        sha256 = hashlib.sha256(b"[")
        for number, member in enumerate(members):
            labels[number], keys[number] = member.label, int(member.key[:16], 16)
            sha256.update(f'{"," * bool(number)}["{member.key}",{member.label}]'.encode())
        sha256.update(b"]")
        chosen = squares.select(members.rows, new_fingerprint=sha256.hexdigest()[:16])
        if split in ("train", "unlabeled") and len(members) > SHARD * WINDOW:
            parts = np.split(members.rows, range(SHARD, len(members), SHARD))
            _write_index(directory / index_file(split), pa.table({"label": labels, "key": keys}))
        else:  # the first ones have one more, as those of `datasets`
            parts = np.array_split(members.rows, max(1, math.ceil(len(chosen) * row_bytes / SHARD_BYTES)))
        names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
        _write_description(chosen, folder, names)
        rows, together = _rows_together(chosen), min(processes, len(parts))
        with ExitStack() as stack:
            pool = stack.enter_context(ProcessPoolExecutor(together, SPAWNED)) if together > 1 else None
            for start in range(0, len(parts), together):
                now = range(start, min(start + together, len(parts)))
                work = [(_part(squares, parts[number]), folder / names[number], rows) for number in now]
                if pool is None:
                    _write_shard(*work[0])
                else:
                    [*pool.map(_write_shard, *zip(*work, strict=True))]
                if split == ordered[-1] and len(parts[now[-1]]):
                    free(int(parts[now[-1]][-1]) + 1)


def _write_index(file: Path, table: pa.Table) -> None:
    """Write the index of a split whose files have `SHARD` rows each."""
    make_directory(file.parent)
    schema = table.schema.with_metadata({ROWS_IN_FILE: str(SHARD)})
    with writing_to(file), pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table.cast(schema))


def _write_description(chosen: Any, folder: Path, names: Sequence[str]) -> None:
    """Write the two files by which `datasets` knows the folder."""
    from datasets.utils import py_utils  # type: ignore[import-untyped]  # the package ships no types

    kept = ("_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_output_all_columns")
    files = [{"filename": name} for name in names]
    state = {name: getattr(chosen, name) for name in kept} | {"_data_files": files, "_split": None}
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True), encoding="utf-8")
    info = dict(sorted(py_utils.asdict(chosen.info).items()))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")


def _rows_together(chosen: Any) -> int:
    """Return how many rows `datasets` reads at a time."""
    from datasets.arrow_writer import get_writer_batch_size_from_data_size  # type: ignore[import-untyped]  # as above
    from datasets.config import DEFAULT_MAX_BATCH_SIZE  # type: ignore[import-untyped]  # as above

    size, most = chosen._estimate_nbytes(), int(DEFAULT_MAX_BATCH_SIZE)
    return min(most, get_writer_batch_size_from_data_size(len(chosen), size)) if size else most


def _part(squares: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Choose rows, in ascending order, without mapping the files that have none of them."""
    if not len(rows):
        return squares.select([])
    return squares.select(range(rows[0], rows[-1] + 1)).select(rows - rows[0])


def _write_shard(shard: Any, file: Path, rows: int) -> None:
    """Write one file of a split, as `datasets.Dataset.save_to_disk` does of all."""
    with writing_to(file):
        for _ in shard._save_to_disk_single(0, shard, str(file), None, rows):  # its progress
            pass

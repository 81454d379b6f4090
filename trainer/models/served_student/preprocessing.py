"""From an image file or an array to the square from which a network's input is resized.

`prepare` stores these squares; the served student makes them of each photo. Imports nothing heavy, since every process that decodes
loads it.

Shapes: H x W pixels, C channels.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF", "HEIF")
"""Formats that are read: those of Pillow that have a signature and start no other program (as EPS would), and HEIC with pillow-heif."""

DEEPEST = 16  # bits of the deepest grays
GRAY_PEAK = "gray_peak"  # key in `info` of a decoded picture whose grays had 16 bits: the largest of them

JPEG_SCANS = 500  # most scans of a JPEG file: an ordinary one has up to ten, and each costs the time of a whole picture

LARGEST_SQUARE = 2048  # longest edge of a square, in pixels

Fit: TypeAlias = Literal["crop", "stretch"]
Interpolation: TypeAlias = Literal["bicubic"]

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # EXIF orientation -> what makes the picture upright

_JPEG_SCAN = b"\xff\xda"  # first bytes of a scan; they occur nowhere else in a JPEG file
_LONGEST_REASON = 200  # most characters of a decoder's message
_BAND_PIXELS = 2**20  # of a transparent picture are laid over white at a time
_DEEP = "32-bit pixels: their range is not known, so save the image with 8 or 16 bits"
_UNKNOWN_RANGE = "floating-point pixels: their range is not known, so save the image with 8 or 16 bits"

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # where the bits of a channel stand in a PNG file
_WITH_PIXELS = (b"tRNS", b"eXIf", b"acTL", b"fcTL", b"fdAT")
"""Chunks of a PNG file beside the critical ones that say something of its pixels; the others are notes."""
_HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"heif"})
_NO_IMAGE = "no image that can be read"
_OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/": "Git LFS pointer: the image was not fetched; run git lfs pull",
    b"/annex/objects/": "git-annex pointer: the image was not fetched; run git annex get",
    b"<!doctype html": "web page instead of an image: fetch the image again",
    b"<html": "web page instead of an image: fetch the image again",
    b"<svg": f"{_NO_IMAGE}: an SVG drawing",
    b"<?xml": f"{_NO_IMAGE}: XML, as a store's error is",
    b"%pdf": f"{_NO_IMAGE}: a PDF document",
    b"8bps": f"{_NO_IMAGE}: a Photoshop document",
    b"pk\x03\x04": f"{_NO_IMAGE}: a zip archive",
    b"\xff\x0a": f"{_NO_IMAGE}: JPEG XL",
    b"\0\0\0\x0cjxl ": f"{_NO_IMAGE}: JPEG XL",
}  # first bytes, in lower case -> why a file is no image that can be read


class BadImageError(ValueError):
    """An image that cannot be used; its text is the reason, which starts with a few words that many images share."""


@dataclass(frozen=True, kw_only=True)
class Square:
    """How an upright RGB picture becomes a square."""

    fit: Fit  # cut the longer side's ends off, or stretch
    size: int  # edge, in pixels
    interpolation: Interpolation = "bicubic"  # with antialiasing
    max_pixels: int  # a file with more pixels is not decoded
    gray_bits: int = DEEPEST  # how many of their 16 bits deep grays use, from the lowest one

    def __post_init__(self) -> None:
        """Check the members, since they may come from a file."""
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit must be one of {', '.join(get_args(Fit))}, got {self.fit!r}")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(f"interpolation must be {', '.join(get_args(Interpolation))}, got {self.interpolation!r}")
        if type(self.size) is not int or not 0 < self.size <= LARGEST_SQUARE:
            raise ValueError(f"size must be a whole number from 1 to {LARGEST_SQUARE}, got {self.size!r}")
        if type(self.max_pixels) is not int or self.max_pixels <= 0:
            raise ValueError(f"max_pixels must be a whole number above 0, got {self.max_pixels!r}")
        if type(self.gray_bits) is not int or not 8 <= self.gray_bits <= DEEPEST:
            raise ValueError(f"gray_bits must be a whole number from 8 to {DEEPEST}, got {self.gray_bits!r}")


def with_present_names(described: Any) -> Any:
    """Rename members of a square's description that earlier versions wrote."""
    if not isinstance(described, Mapping):
        return described
    return {"gray_bits" if name == "grey_bits" else name: value for name, value in described.items()}


def to_square(image: Image.Image, square: Square) -> Image.Image:
    """Resize an RGB picture to `square.size` x `square.size` pixels; one much larger is first averaged down to thrice that."""
    edge = min(image.size)
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    whole = (0.0, 0.0, float(image.width), float(image.height))
    box = (left, top, left + edge, top + edge) if square.fit == "crop" else whole
    resample = Image.Resampling[square.interpolation.upper()]
    return image.resize((square.size, square.size), resample, box=box, reducing_gap=3.0)


def to_pixels(content: bytes, square: Square) -> npt.NDArray[np.uint8]:
    """Make the square of an image file's bytes: uint8 [S, S, 3]; raises a `BadImageError` where it is no image."""
    picture = decode(content, max_pixels=square.max_pixels, gray_bits=square.gray_bits)
    return np.asarray(to_square(picture, square))


def decode(content: bytes, *, max_pixels: int, min_edge: int = 1, gray_bits: int = DEEPEST) -> Image.Image:
    """Decode the first frame of an image file into an upright 8-bit RGB picture.

    EXIF orientation is applied. Transparent pixels are laid over white, unless all are transparent. Of 16-bit grays, which use their lower
    `gray_bits`, the upper 8 of these are kept, and of 16-bit colors the upper 8. Color profiles are not applied; damage to what is not
    about pixels does not matter. A picture with more than `max_pixels` is refused before it is decoded, as is one with an edge shorter
    than `min_edge`.
    """
    if not content:
        raise BadImageError("empty file")
    if is_jpeg(content) and content.count(_JPEG_SCAN) > JPEG_SCANS:
        raise BadImageError(f"too many scans: more than {JPEG_SCANS}")
    if content.startswith(_PNG):
        content = _without_notes(content)
    Image.init()
    if _is_heic(content) and find_spec("pillow_heif"):
        importlib.import_module("pillow_heif").register_heif_opener()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with _PILLOW.at_most(max_pixels), Image.open(io.BytesIO(content), formats=known) as image:
            _check_size(image, max_pixels, min_edge)
            image.load()
            # refuse what Pillow's modes do not tell: 32 bits whose range is not known, and 16-bit
            # colors that would be nearly black
            bits = content[_PNG_DEPTH] if content.startswith(_PNG) else 0
            if isinstance(image, TiffImagePlugin.TiffImageFile):
                bits = int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))
            if bits == 32 and image.mode == "I":
                raise BadImageError(_DEEP)
            if bits == 16 and image.mode in ("RGB", "RGBA", "LA") and _is_nearly_black(image):
                raise BadImageError("16-bit colors of which the upper 4 bits are unused: save the image with 8 bits")
            turn = _TURNS.get(_orientation(image))
            return _to_rgb(image if turn is None else image.transpose(turn), gray_bits)
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadImageError(_what_it_is(content)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        found = re.search(r"\d+", str(error))  # Pillow does not give the edges
        raise BadImageError(
            f"too many pixels: {found[0] if found else str(error)}, more than data.max_pixels={max_pixels}"
        ) from error
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
        raise BadImageError(reason(error)) from error


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation; 1, upright, if unreadable. ImageOps.exif_transpose rewrites the other tags and fails on damaged ones."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001  # likewise nearly anything, and the pixels are whole
        return 1


def _without_notes(content: bytes) -> bytes:
    """Drop the chunks of a PNG file that are not about its pixels: Pillow refuses a picture for damage to them, or for their size."""
    kept, start = [_PNG], len(_PNG)
    while start + 12 <= len(content):
        (length,), name = struct.unpack_from(">I", content, start), content[start + 4 : start + 8]
        end = start + 12 + length
        is_whole = end <= len(content)
        is_note = name[:1].islower() and name not in _WITH_PIXELS
        if is_whole and name == b"eXIf":
            is_note = zlib.crc32(content[start + 4 : end - 4]) != struct.unpack_from(">I", content, end - 4)[0]
        if not (is_whole and is_note):
            kept.append(content[start:end])
        start = end
    return b"".join([*kept, content[start:]])


def _is_heic(content: bytes) -> bool:
    return content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS and b"avif" not in content[8:64]


def _what_it_is(content: bytes) -> str:
    """Explain why a file is not identified as an image."""
    if _is_heic(content):
        if find_spec("pillow_heif"):
            return "damaged: HEIC photo"
        return "HEIC photo: needs the package pillow-heif; pip install 'vit-distillation-pipeline[heic]', or convert it to JPEG"
    if content[4:8] == b"ftyp":
        is_avif = b"avif" in content[8:64]
        return f"{_NO_IMAGE}: {'AVIF, which Pillow reads from version 11.3 on' if is_avif else 'a video'}"
    start = content[:1000].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for first, what in _OTHER_FILES.items():
        if start.startswith(first):
            return what
    if not content.strip(b"\0"):
        return "empty file: only zeros, as an interrupted transfer leaves it"
    if content[:1000].isascii() and all(byte >= 32 or byte in b"\t\r\n\f" for byte in content[:1000]):
        return f"{_NO_IMAGE}: a text file"
    return _NO_IMAGE


def _check_size(image: Image.Image, max_pixels: int, min_edge: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise BadImageError(f"too many pixels: {width} x {height}, more than data.max_pixels={max_pixels}")
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # whose tiles may be larger than the picture
        tile = (int(image.tag_v2.get(tag, 0)) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
        if math.prod(tile) > max_pixels:  # its decoder would make room for a whole one
            raise BadImageError(f"too many pixels: in a tile, more than data.max_pixels={max_pixels}")
    if min(width, height) < min_edge:
        raise BadImageError(f"too small: {width} x {height} pixels, below data.min_edge={min_edge}")


def _is_nearly_black(image: Image.Image) -> bool:
    """Whether no channel but alpha exceeds 15 of 255."""
    colors = image.convert(image.mode.rstrip("A")) if image.mode.endswith("A") else image
    return bool(np.max(colors.getextrema()) < 16)


def is_jpeg(encoded: bytes | memoryview) -> bool:
    """Return whether these are the bytes of a JPEG file."""
    return bytes(encoded[:3]) == b"\xff\xd8\xff"


def reason(error: Exception) -> str:
    """Describe a decoder's exception in a line."""
    text = re.sub(r"0x[0-9a-f]+", "0x", str(error), flags=re.IGNORECASE)  # an address differs from run to run
    kind = "truncated" if re.search(r"truncated|unexpected end|broken png", text, re.IGNORECASE) else "damaged"
    cut = f"{text[:_LONGEST_REASON]}..." if len(text) > _LONGEST_REASON else text
    printable = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)
    return f"{kind}: {printable or type(error).__name__}"


class _PillowLimits:
    """Lets Pillow itself refuse larger pictures, wherever it reads a size, and hides its other warnings, which are not for users.

    Its limit and Python's warnings are global to the process, and a server decodes in several threads: those with one limit decode at the
    same time, and those with another one wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._max_pixels, self._users, self._waiting = 0, 0, 0
        self._undone = ExitStack()

    @contextmanager
    def at_most(self, max_pixels: int) -> Iterator[None]:
        with self._changed:
            # Who waits for another limit gets its turn before those who come later.
            if self._users and (self._waiting or self._max_pixels != max_pixels):
                self._waiting += 1
                self._changed.wait_for(lambda: not self._users)
                self._waiting -= 1
            if not self._users:
                self._undone.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                self._undone.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                self._max_pixels = Image.MAX_IMAGE_PIXELS = max_pixels
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._undone.close()
                    self._changed.notify_all()


_PILLOW = _PillowLimits()


def _to_rgb(image: Image.Image, gray_bits: int) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        grays = np.asarray(image)
        if grays.min() < 0:
            raise BadImageError(
                "negative pixels: their range is not known, so save the image with 8 or 16 bits from 0 on"
            )
        if grays.max() > 0xFFFF:
            raise BadImageError(_DEEP)
        return from_array(grays.astype(np.uint16), gray_bits=gray_bits)
    if image.mode == "F":
        raise BadImageError(_UNKNOWN_RANGE)
    if image.has_transparency_data:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """Lay a picture over white, or leave transparency out if all pixels have it: a channel that nobody filled would leave nothing."""
    seen = any(band.getchannel("A").getextrema() != (0, 0) for _, band in _bands(image))
    whole = Image.new("RGB", image.size)
    for top, band in _bands(image):
        laid = Image.alpha_composite(Image.new("RGBA", band.size, "white"), band) if seen else band
        whole.paste(laid.convert("RGB"), (0, top))
    return whole


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield a picture as RGBA, a band of rows at a time and its first row: each copy of the whole would take four bytes a pixel."""
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        yield top, image.crop((0, top, width, min(top + rows, height))).convert("RGBA")


def from_array(pixels: npt.NDArray[np.generic], *, gray_bits: int = DEEPEST) -> Image.Image:
    """Make the RGB picture of an array as `decode` makes it of a file with the same pixels.

    `pixels` are [H, W] or [H, W, C], where C is 1 (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGBA): uint8; uint16, of which the upper 8 bits
    are kept (grays use `gray_bits`); bool; or other whole numbers in 0..255.
    """
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or channels not in (1, 2, 3, 4) or 0 in pixels.shape:
        raise BadImageError(
            f"no image: an array of the shape {pixels.shape} is neither [H, W] nor [H, W, 1 to 4 channels]"
        )
    is_deep = pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2 and channels < 3
    if is_deep:
        grays = pixels if channels == 1 else pixels[..., 0]
        peak = int(grays.max())
        if peak >> gray_bits:
            raise BadImageError(
                f"deeper grays: up to {peak}, more than the {2**gray_bits - 1} of data.gray_bits={gray_bits}"
            )
    eight_bit = _to_eight_bit(pixels, gray_bits if is_deep else DEEPEST)
    if is_deep and channels == 2:
        eight_bit[..., 1] = _to_eight_bit(pixels[..., 1], DEEPEST)  # alpha uses all of its bits
    picture = _to_rgb(
        Image.fromarray(eight_bit[..., 0] if pixels.ndim == 3 and channels == 1 else eight_bit), gray_bits
    )
    if is_deep:
        picture.info[GRAY_PEAK] = peak
    return picture


def _to_eight_bit(pixels: npt.NDArray[np.generic], bits: int) -> npt.NDArray[np.uint8]:
    kind, size = pixels.dtype.kind, pixels.dtype.itemsize
    if kind == "f":
        raise BadImageError(_UNKNOWN_RANGE)
    if kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if kind not in "iu":
        raise BadImageError(f"no image: its pixels are {pixels.dtype}, not whole numbers")
    if kind == "u" and size == 2:
        return (pixels.astype(np.uint16) >> (bits - 8)).astype(np.uint8)
    if (kind, size) != ("u", 1) and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise BadImageError(f"{pixels.dtype} pixels outside of 0..255: give uint8, or uint16 for 16-bit pixels")
    return pixels.astype(np.uint8)

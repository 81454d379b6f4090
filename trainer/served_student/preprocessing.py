"""From an image file or an array to the square from which a network's input is resized.

`prepare` stores these squares; the served student makes them of each photo. Imports nothing heavy, since every process that decodes
loads it.

Shapes: H x W pixels, C channels.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF")
"""Formats that are read: those of Pillow that have a signature and start no other program (as EPS would)."""

JPEG_SCANS = 500
"""Most scans of a JPEG file: an ordinary one has up to ten, and each costs the time of a whole picture."""

LARGEST_SQUARE = 2048
"""Longest edge of a square, in pixels."""

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
}
"""EXIF orientation -> what makes the picture upright."""

_JPEG_SCAN = b"\xff\xda"
"""First bytes of a scan; they occur nowhere else in a JPEG file."""
_LONGEST_REASON = 200
"""Most characters of a decoder's message."""
_UNKNOWN_RANGE = "floating-point pixels: their range is not known"


class BadImageError(ValueError):
    """An image that cannot be used; its text is the reason, which starts with a few words that many images share."""


@dataclass(frozen=True, kw_only=True)
class Square:
    """How an upright RGB picture becomes a square."""

    fit: Fit
    """Cut the longer side's ends off, or stretch."""
    size: int
    """Edge, in pixels."""
    interpolation: Interpolation = "bicubic"
    """With antialiasing."""
    max_pixels: int
    """A file with more pixels is not decoded."""

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


def to_square(image: Image.Image, square: Square) -> Image.Image:
    """Resize an RGB picture to `square.size` x `square.size` pixels; one much larger is first averaged down to thrice that."""
    edge = min(image.size)
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    whole = (0.0, 0.0, float(image.width), float(image.height))
    box = (left, top, left + edge, top + edge) if square.fit == "crop" else whole
    resample = Image.Resampling[square.interpolation.upper()]
    return image.resize((square.size, square.size), resample, box=box, reducing_gap=3.0)


def decode(content: bytes, *, max_pixels: int, min_edge: int = 1) -> Image.Image:
    """Decode the first frame of an image file into an upright 8-bit RGB picture.

    EXIF orientation is applied. Transparent pixels are laid over white. 16-bit greys keep their upper 8 bits. Colour profiles are
    not applied. A picture with more than `max_pixels` is refused before it is decoded, as is one with an edge shorter than `min_edge`.
    """
    if not content:
        raise BadImageError("empty file")
    if is_jpeg(content) and content.count(_JPEG_SCAN) > JPEG_SCANS:
        raise BadImageError(f"too many scans: more than {JPEG_SCANS}")
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with _PILLOW.at_most(max_pixels), Image.open(io.BytesIO(content), formats=known) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise BadImageError(f"too many pixels: {width} x {height}")
            if _tile_pixels(image) > max_pixels:  # its decoder would make room for a whole one
                raise BadImageError("too many pixels: in a tile")
            if min(width, height) < min_edge:
                raise BadImageError(f"too small: {width} x {height} pixels")
            image.load()
            # Not by ImageOps.exif_transpose, which also rewrites the other tags, and fails where one of them is damaged.
            turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            return _to_rgb(image if turn is None else image.transpose(turn))
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadImageError("no image that can be read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError(f"too many pixels: more than {max_pixels:,}") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
        raise BadImageError(reason(error)) from error


def _tile_pixels(image: Image.Image) -> int:
    """Count the pixels of a tile of a TIFF file, which may be larger than the picture; 0: it has none."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return 0
    width, height = (image.tag_v2.get(tag, 0) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
    return int(width) * int(height)


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


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        greys = np.asarray(image)
        if greys.min() < 0 or greys.max() > 0xFFFF:
            raise BadImageError("32-bit pixels: their range is not known")
        return from_array(greys.astype(np.uint16))
    if image.mode == "F":
        raise BadImageError(_UNKNOWN_RANGE)
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), with_alpha).convert("RGB")
    return image.convert("RGB")


def from_array(pixels: npt.NDArray[np.generic]) -> Image.Image:
    """Make the RGB picture of an array that `decode` makes of a file with the same pixels.

    Args:
        pixels: [H, W] or [H, W, C], where C is 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA). uint8; uint16, of which the upper 8 bits
            are kept; bool; or other whole numbers in 0..255.
    """
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or channels not in (1, 2, 3, 4) or 0 in pixels.shape:
        raise BadImageError(
            f"no image: an array of the shape {pixels.shape} is neither [H, W] nor [H, W, 1 to 4 channels]"
        )
    eight_bit = _to_eight_bit(pixels)
    return _to_rgb(Image.fromarray(eight_bit[..., 0] if pixels.ndim == 3 and channels == 1 else eight_bit))


def _to_eight_bit(pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    kind, size = pixels.dtype.kind, pixels.dtype.itemsize
    if kind == "f":
        raise BadImageError(_UNKNOWN_RANGE)
    if kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if kind not in "iu":
        raise BadImageError(f"no image: its pixels are {pixels.dtype}, not whole numbers")
    if kind == "u" and size == 2:
        return (pixels.astype(np.uint16) >> 8).astype(np.uint8)
    if (kind, size) != ("u", 1) and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise BadImageError(f"{pixels.dtype} pixels outside of 0..255: give uint8, or uint16 for 16-bit pixels")
    return pixels.astype(np.uint8)

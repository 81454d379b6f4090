"""One image file: from its bytes to an upright RGB picture, its content key, and the square that is stored; and from there to pixels.

Originals are decoded once, by Pillow, which reads nearly everything. Stored squares are decoded again and again: JPEG by simplejpeg
(libjpeg-turbo straight into an array, and at a half, quarter or eighth of its size where that is enough), others by Pillow.

Whatever is wrong with a file is a `BadImageError` with the reason. Imports nothing heavy, because every process that decodes loads it.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError

from trainer import limits

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF")
"""What is read: Pillow's formats that have a signature and start no other program (as EPS would)."""

_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")

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


_JPEG_SIGNATURE = b"\xff\xd8\xff"
_JPEG_SCAN = b"\xff\xda"
"""What a scan begins with; nothing else in a JPEG file looks like it."""
_LONGEST_REASON = 200
"""Characters of what a decoder says."""


class BadImageError(ValueError):
    """An image that can not be used; its text is the reason, which starts with a few words that many images share."""


def decode(content: bytes, *, max_pixels: int, min_edge: int) -> Image.Image:
    """Decode the first frame of an image file into an upright 8-bit RGB picture.

    EXIF orientation is applied. Transparent pixels are laid over white. 16-bit greys keep their upper 8 bits. Colour profiles are
    not applied.

    Args:
        content: the file's bytes.
        max_pixels: a picture with more pixels is refused before it is decoded.
        min_edge: a picture with a shorter edge is refused, in pixels.

    Raises:
        BadImageError: with the reason.
    """
    if not content:
        raise BadImageError("empty file")
    if is_jpeg(content) and content.count(_JPEG_SCAN) > limits.JPEG_SCANS:
        raise BadImageError(f"too many scans: more than {limits.JPEG_SCANS}")
    try:
        with _at_most(max_pixels), Image.open(io.BytesIO(content), formats=_known_formats()) as image:
            _check_size(image, max_pixels, min_edge)
            image.load()
            return _to_rgb(_upright(image))
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadImageError("no image that can be read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError(f"too many pixels: more than {max_pixels:,}") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
        raise BadImageError(_reason(error)) from error


def _known_formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


@contextmanager
def _at_most(max_pixels: int) -> Iterator[None]:
    """Let Pillow itself refuse larger pictures, in any of the places where it reads a size; its other warnings are not for users."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _check_size(image: Image.Image, max_pixels: int, min_edge: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise BadImageError(f"too many pixels: {width} x {height}")
    if min(width, height) < min_edge:
        raise BadImageError(f"too small: {width} x {height} pixels")


def _upright(image: Image.Image) -> Image.Image:
    """Undo the EXIF orientation. (`ImageOps.exif_transpose` also writes the other tags anew, and fails where one of them is damaged.)"""
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def _reason(error: Exception) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x", str(error), flags=re.IGNORECASE)  # an address differs from run to run
    kind = "truncated" if re.search(r"truncated|unexpected end|broken png", text, re.IGNORECASE) else "damaged"
    return f"{kind}: {limits.printable_name(limits.cut(text, _LONGEST_REASON)) or type(error).__name__}"


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        return _from_sixteen_bit(image)
    if image.mode == "F":
        raise BadImageError("floating-point pixels: their range is not known")
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), with_alpha).convert("RGB")
    return image.convert("RGB")


def _from_sixteen_bit(image: Image.Image) -> Image.Image:
    greys = np.asarray(image)
    if greys.min() < 0 or greys.max() > 0xFFFF:
        raise BadImageError("32-bit pixels: their range is not known")
    return Image.fromarray((greys >> 8).astype(np.uint8)).convert("RGB")


def content_key(image: Image.Image) -> str:
    """SHA-256 of a decoded picture's size and RGB pixels, as hexadecimal text: equal for equal pictures, whatever their files."""
    size = f"{image.width}x{image.height}:".encode()
    return hashlib.sha256(size + image.tobytes()).hexdigest()


def to_square(image: Image.Image, size: int, fit: Literal["crop", "stretch"]) -> Image.Image:
    """Resize a picture to `size` x `size` pixels, bicubic with antialiasing; one much larger is first averaged down to thrice that.

    `crop` cuts the longer side's ends off equally; `stretch` keeps all of it and changes its proportions.
    """
    edge = min(image.size)
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    box = (left, top, left + edge, top + edge) if fit == "crop" else (0.0, 0.0, float(image.width), float(image.height))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)


def encode(image: Image.Image, encoding: Literal["jpeg", "png"], jpeg_quality: int) -> bytes:
    """Encode a picture; JPEG keeps colour at full resolution (4:4:4), since small pictures have little of it to lose."""
    buffer = io.BytesIO()
    if encoding == "jpeg":
        image.save(buffer, "JPEG", quality=jpeg_quality, subsampling=0)
    else:
        image.save(buffer, "PNG")
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Stored squares

Pixels = npt.NDArray[np.uint8]


def is_jpeg(encoded: bytes | memoryview) -> bool:
    """Whether these are the bytes of a JPEG file."""
    return bytes(encoded[:3]) == _JPEG_SIGNATURE


def decoder_of(encoded: bytes | memoryview) -> str:
    """Name and version of what `decode_square` decodes such a file with."""
    return f"simplejpeg {simplejpeg.__version__}" if is_jpeg(encoded) else f"pillow {PIL.__version__}"


def decode_square(encoded: bytes | memoryview, size: int, *, out: Pixels | None = None, shrink: int = 1) -> Pixels:
    """Decode a stored square.

    Args:
        encoded: a JPEG or PNG file's bytes.
        size: edge of the square, in pixels.
        out: where the pixels go, uint8 [size, size, 3] in one piece; a new array where not given.
        shrink: 1, 2, 4 or 8: a JPEG is decoded at this part of its size, by its DCT's lower frequencies; others are not shrunk.

    Returns:
        `out`, or RGB pixels uint8 [E, E, 3]; E is `size / shrink` rounded up for a JPEG, and `size` for others.

    Raises:
        BadImageError: it can not be decoded, or is no square of this size.
    """
    jpeg = is_jpeg(encoded)
    edge = -(-size // shrink) if jpeg else size
    try:
        pixels = _decode_jpeg(encoded, size, edge, out) if jpeg else _decode_with_pillow(encoded, size)
    except BadImageError:
        raise
    except Exception as error:  # as above
        raise BadImageError(_reason(error)) from error
    if pixels.shape != (edge, edge, 3):
        raise BadImageError(f"{pixels.shape[1]} x {pixels.shape[0]} pixels instead of {edge} x {edge}")
    if out is None:
        return pixels
    if not jpeg:
        out[:] = pixels
    return out


def _decode_jpeg(encoded: bytes | memoryview, size: int, edge: int, out: Pixels | None) -> Pixels:
    """At the smallest scale that has at least `edge` pixels; in `out`'s memory where given, which limits what is decoded."""
    if out is None:
        height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
        _check_square(width, height, size)
    pixels: Pixels = simplejpeg.decode_jpeg(encoded, min_height=edge, min_width=edge, buffer=out)
    return pixels


def _decode_with_pillow(encoded: bytes | memoryview, size: int) -> Pixels:
    with Image.open(io.BytesIO(encoded), formats=["PNG"]) as image:
        _check_square(*image.size, size)
        return np.array(image.convert("RGB"))


def _check_square(width: int, height: int, size: int) -> None:
    if (width, height) != (size, size):
        raise BadImageError(f"{width} x {height} pixels instead of {size} x {size}")

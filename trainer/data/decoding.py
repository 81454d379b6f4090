"""Content keys, and stored squares as files and as pixels.

Originals are decoded once, by Pillow (`served_student.preprocessing`), which reads nearly every format. Stored squares are decoded at
each read: JPEG by simplejpeg (libjpeg-turbo straight into an array, and at a half, quarter or eighth of its size where that is enough),
others by Pillow.

Whatever is wrong with a file is a `BadImageError` with the reason. Imports nothing heavy, since every process that decodes loads it.
"""

from __future__ import annotations

import hashlib
import io
from typing import Literal

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from PIL import Image

from trainer.served_student.preprocessing import BadImageError, is_jpeg, reason


def content_key(image: Image.Image) -> str:
    """Return the SHA-256 of a decoded picture's size and RGB pixels, as hexadecimal text: equal for equal pictures in different files."""
    size = f"{image.width}x{image.height}:".encode()
    return hashlib.sha256(size + image.tobytes()).hexdigest()


def encode(image: Image.Image, encoding: Literal["jpeg", "png"], jpeg_quality: int) -> bytes:
    """Encode a picture; JPEG keeps colour at full resolution (4:4:4), since small pictures have little of it to lose."""
    buffer = io.BytesIO()
    if encoding == "jpeg":
        image.save(buffer, "JPEG", quality=jpeg_quality, subsampling=0)
    else:
        image.save(buffer, "PNG")
    return buffer.getvalue()


Pixels = npt.NDArray[np.uint8]


def decoder_of(encoded: bytes | memoryview) -> str:
    """Return name and version of the decoder that `decode_square` uses for such a file."""
    return f"simplejpeg {simplejpeg.__version__}" if is_jpeg(encoded) else f"pillow {PIL.__version__}"


def decode_square(encoded: bytes | memoryview, size: int, *, out: Pixels | None = None, shrink: int = 1) -> Pixels:
    """Decode a stored square.

    Args:
        out: where the pixels go, contiguous uint8 [size, size, 3]; a new array where not given.
        shrink: 1, 2, 4 or 8: a JPEG is decoded at this fraction of its size, from its DCT's lower frequencies; others are not shrunk.

    Returns:
        `out`, or RGB pixels uint8 [E, E, 3]; E is `size / shrink` rounded up for a JPEG, and `size` for others.

    Raises:
        BadImageError: it cannot be decoded, or is not a square of this size.
    """
    jpeg = is_jpeg(encoded)
    edge = -(-size // shrink) if jpeg else size
    try:
        if jpeg:  # at the smallest scale that has at least `edge` pixels
            if out is None:  # where it is given, it bounds the decoded size
                height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
                _check_square(width, height, size)
            pixels: Pixels = simplejpeg.decode_jpeg(encoded, min_height=edge, min_width=edge, buffer=out)
        else:
            with Image.open(io.BytesIO(encoded), formats=["PNG"]) as image:
                _check_square(*image.size, size)
                pixels = np.array(image.convert("RGB"))
    except BadImageError:
        raise
    except Exception as error:  # decoders raise nearly anything for a damaged file
        raise BadImageError(reason(error)) from error
    if pixels.shape != (edge, edge, 3):
        raise BadImageError(f"{pixels.shape[1]} x {pixels.shape[0]} pixels instead of {edge} x {edge}")
    if out is None:
        return pixels
    if not jpeg:
        out[:] = pixels
    return out


def _check_square(width: int, height: int, size: int) -> None:
    if (width, height) != (size, size):
        raise BadImageError(f"{width} x {height} pixels instead of {size} x {size}")

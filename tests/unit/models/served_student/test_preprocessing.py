"""One image file at a time: every format and damage is really made, and the pixels are checked against NumPy."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from trainer.models.served_student.preprocessing import (
    GRAY_PEAK,
    BadImageError,
    Fit,
    Square,
    decode,
    from_array,
    to_pixels,
    to_square,
)

Pixels = npt.NDArray[np.uint8]


def noise(height: int = 12, width: int = 17, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(content: bytes) -> Pixels:
    image = decode(content, max_pixels=10_000, min_edge=4)
    assert image.mode == "RGB"
    return np.asarray(image)


def png(width: int, height: int, depth: int, color: int, rows: bytes) -> bytes:
    """A PNG file made by hand."""

    def part(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda stored: stored),
        (2, lambda stored: stored[:, ::-1]),
        (3, lambda stored: stored[::-1, ::-1]),
        (4, lambda stored: stored[::-1]),
        (5, lambda stored: stored.transpose(1, 0, 2)),
        (6, lambda stored: np.rot90(stored, -1)),
        (7, lambda stored: stored.transpose(1, 0, 2)[::-1, ::-1]),
        (8, lambda stored: np.rot90(stored, 1)),
    ],
)
def test_exif_orientation_is_applied(orientation: int, upright: Callable[[Pixels], Pixels]) -> None:
    stored, exif = noise(), Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decoded(file(Image.fromarray(stored), kind, exif=exif)), upright(stored))
    smooth = np.array(Image.linear_gradient("L").resize((40, 24)).rotate(20).convert("RGB"))
    photo = decoded(file(Image.fromarray(smooth), "JPEG", quality=100, exif=exif))
    np.testing.assert_allclose(photo.astype(int), upright(smooth).astype(int), atol=12)


def test_damage_in_other_tags_does_not_matter() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x0103] = 6, 8
    content = bytearray(file(Image.fromarray(noise()), "PNG", exif=exif))
    start = content.index(b"eXIf") - 4
    (length,) = struct.unpack(">I", content[start : start + 4])
    entry = content.index(struct.pack("<HH" if b"II*" in content else ">HH", 0x0103, 3), start)
    content[entry + 2 : entry + 4] = b"\x02\x00" if b"II*" in content else b"\x00\x02"
    end = start + 8 + length
    content[end : end + 4] = struct.pack(">I", zlib.crc32(content[start + 4 : end]))
    np.testing.assert_array_equal(decoded(bytes(content)), np.rot90(noise(), -1))


def test_colors_become_rgb() -> None:
    gray = noise()[..., 0]
    np.testing.assert_array_equal(decoded(file(Image.fromarray(gray))), np.stack([gray] * 3, -1))
    # Black and white.
    bits = noise()[..., 0] > 127
    np.testing.assert_array_equal(decoded(file(Image.fromarray(bits))), np.stack([bits * np.uint8(255)] * 3, -1))
    # Sixteen bit grays keep their upper bits.
    deep = np.random.default_rng(0).integers(0, 2**16, (9, 11)).astype(np.uint16)
    expected = np.stack([(deep // 256).astype(np.uint8)] * 3, -1)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decoded(file(Image.fromarray(deep), kind)), expected)


def test_alpha() -> None:
    rgb, alpha = noise(), noise(seed=1)[..., :1]
    share = alpha / 255
    expected = rgb * share + 255 * (1 - share)
    actual = decoded(file(Image.fromarray(np.concatenate([rgb, alpha], -1))))
    np.testing.assert_allclose(actual, expected, atol=1)
    gray_alpha = Image.merge("LA", [Image.fromarray(rgb[..., 0]), Image.fromarray(alpha[..., 0])])
    np.testing.assert_allclose(decoded(file(gray_alpha)), np.repeat(expected[..., :1], 3, -1), atol=1)
    # A transparent palette color is white.
    image = Image.new("P", (6, 5), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((2, 1), 1)
    expected = np.full((5, 6, 3), (10, 20, 30))
    expected[1, 2] = 255
    np.testing.assert_array_equal(decoded(file(image, transparency=1)), expected)
    expected[1, 2] = (200, 100, 50)
    np.testing.assert_array_equal(decoded(file(image)), expected)
    # The alpha of deep grays uses all bits.
    deep = np.stack([np.full((8, 8), 4095), np.full((8, 8), 0xFFFF)], -1).astype(np.uint16)
    np.testing.assert_array_equal(np.asarray(from_array(deep, gray_bits=12)), np.full((8, 8, 3), 255))
    # An alpha that is zero everywhere is ignored.
    rgb = noise()
    unfilled = np.concatenate([rgb, np.zeros_like(rgb[..., :1])], -1)
    np.testing.assert_array_equal(decoded(file(Image.fromarray(unfilled))), rgb)
    np.testing.assert_array_equal(np.asarray(from_array(unfilled)), rgb)


@pytest.mark.parametrize("visible", [0, 1])
def test_alpha_of_a_picture_of_several_bands(visible: int) -> None:
    """All rows count, though a band is laid over white at a time."""
    pixels = np.full((1100, 2000, 4), (10, 20, 30, 0), np.uint8)
    pixels[-1, :, 3] = 255 * visible
    expected = np.full((1100, 2000, 3), (10, 20, 30), np.uint8)
    if visible:
        expected[:-1] = 255
    picture = decode(file(Image.fromarray(pixels)), max_pixels=pixels.size)
    np.testing.assert_array_equal(np.asarray(picture), expected)


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
def test_grays_that_use_fewer_bits_keep_upper_ones_of_these(bits: int) -> None:
    deep = np.random.default_rng(0).integers(0, 2**bits, (9, 11)).astype(np.uint16)
    deep[0, 0] = 2**bits - 1
    expected = np.stack([(deep >> (bits - 8)).astype(np.uint8)] * 3, -1)
    for kind in ("PNG", "TIFF"):
        image = decode(file(Image.fromarray(deep), kind), max_pixels=10_000, gray_bits=bits)
        np.testing.assert_array_equal(np.asarray(image), expected)
        assert image.info[GRAY_PEAK] == 2**bits - 1
    np.testing.assert_array_equal(np.asarray(from_array(deep, gray_bits=bits)), expected)
    if bits > 8:
        with pytest.raises(
            BadImageError, match=f"deeper grays: up to {2**bits - 1}, more than .* data.gray_bits={bits - 1}"
        ):
            decode(file(Image.fromarray(deep)), max_pixels=10_000, gray_bits=bits - 1)


def test_photo_is_read_with_bits_of_its_square() -> None:
    deep = (np.arange(64 * 64).reshape(64, 64) % 4096).astype(np.uint16)
    for bits, levels in ((12, 256), (16, 16)):
        square = Square(fit="crop", size=64, max_pixels=10_000, gray_bits=bits)
        assert len(np.unique(to_pixels(file(Image.fromarray(deep)), square))) == levels
    with pytest.raises(ValueError, match="gray_bits must be a whole number from 8 to 16, got 7"):
        Square(fit="crop", size=64, max_pixels=10_000, gray_bits=7)


def chunk(name: bytes, content: bytes, *, crc: int | None = None) -> bytes:
    found = zlib.crc32(name + content) if crc is None else crc
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", found)


@pytest.mark.parametrize(
    "notes",
    [
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**21))),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(2**21))),
        chunk(b"tEXt", b"no separator"),
        chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(2**27))),
        chunk(b"iCCP", b"icc\0\0no profile"),
        chunk(b"pHYs", b"short"),
        chunk(b"tIME", b"", crc=1),
        chunk(b"eXIf", b"MM\0*no exif"),
        chunk(b"eXIf", b"MM\0*", crc=1),
    ],
    ids=["long text", "long xmp", "text", "large profile", "profile", "density", "checksum", "exif", "exif's checksum"],
)
def test_notes_in_a_png_file_do_not_matter(notes: bytes) -> None:
    content = file(Image.fromarray(noise()))
    header = 8 + 25
    np.testing.assert_array_equal(decoded(content[:header] + notes + content[header:]), noise())


def test_transparency_and_frames_are_no_notes() -> None:
    content = png(2, 1, 8, 2, b"\0" + bytes([9, 9, 9, 1, 2, 3]))
    header = 8 + 25
    content = content[:header] + chunk(b"tRNS", bytes([0, 1, 0, 2, 0, 3])) + content[header:]
    pixels = np.asarray(decode(content, max_pixels=10))
    np.testing.assert_array_equal(pixels, [[[9, 9, 9], [255, 255, 255]]])


def test_a_heic_photo_is_read_with_the_extra() -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    smooth = np.array(Image.linear_gradient("L").resize((64, 48)).convert("RGB"))
    photo = pillow_heif.from_pillow(Image.fromarray(smooth))
    exif = Image.Exif()
    exif[0x0112] = 6
    photo[0].info["exif"] = exif.tobytes()
    buffer = io.BytesIO()
    photo.save(buffer, quality=100)
    np.testing.assert_allclose(decoded(buffer.getvalue()).astype(int), np.rot90(smooth, -1).astype(int), atol=8)
    with pytest.raises(BadImageError, match="damaged: HEIC photo"):
        decoded(buffer.getvalue()[:200])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(decoded(content), np.full((8, 8, 3), (255, 0, 0)))


JPEG = file(Image.fromarray(noise(80, 80)), "JPEG")
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(900)
SIGNED = file(Image.fromarray(np.full((8, 8), 0xFFFB, np.uint16)), "TIFF", tiffinfo={339: 2})  # -5, by SampleFormat
DIM = np.full((8, 8, 3), 4095).astype(">u2")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"this is no image, whatever its name says\n" * 20, "no image that can be read: a text file"),
        (b"\n<!DOCTYPE HTML><html>404", "web page instead of an image: fetch the image again"),
        (b'<?xml version="1.0"?><Error>AccessDenied', "no image that can be read: XML, as a store's error is"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer: the image was not fetched"),
        (bytes(5000), "empty file: only zeros"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isom", "no image that can be read: a video"),
        (
            HEIC,
            "damaged: HEIC photo"
            if find_spec("pillow_heif")
            else "HEIC photo: needs the package pillow-heif; pip install",
        ),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n", "no image that can be read"),
        (JPEG[: len(JPEG) // 2], "truncated: "),
        (file(Image.fromarray(noise(80, 80)))[:4000], "truncated: "),
        (JPEG[:20], "no image that can be read"),
        (png(60_000, 60_000, 8, 2, b""), "too many pixels: 3600000000, more than data.max_pixels=10000"),
        (file(Image.new("RGB", (101, 100))), "too many pixels: 10100, more than data.max_pixels=10000"),
        (file(Image.new("RGB", (100, 3))), "too small: 100 x 3 pixels, below data.min_edge=4"),
        (file(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"), "floating-point pixels: "),
        (file(Image.fromarray(np.full((8, 8), 70_000, np.int32)), "TIFF"), "32-bit pixels: "),
        (file(Image.fromarray(np.full((8, 8), 200, np.int32)), "TIFF"), "32-bit pixels: "),
        (SIGNED, "negative pixels: "),
        (
            png(8, 8, 16, 2, b"".join(b"\0" + row.tobytes() for row in DIM)),
            "16-bit colors of which the upper 4 bits are unused",
        ),
    ],
    ids=[
        *("empty", "text", "web page", "xml", "git lfs", "zeros", "video", "heic"),
        *("eps", "half a jpeg", "half a png", "jpeg header"),
        *("bomb", "one row too many", "tiny", "float", "32 bit", "32 bit, small", "negative", "dim colors"),
    ],
)
def test_what_cannot_be_used_has_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as caught:
        decoded(content)
    assert str(caught.value).startswith(reason)
    assert "0x7" not in str(caught.value)


def test_damaged_file_is_bad_wherever_damage_is() -> None:
    """Any flipped byte gives a picture or a `BadImageError`, never another exception."""
    for kind in ("PNG", "GIF", "JPEG", "TIFF", "WEBP", "BMP"):
        content = file(Image.fromarray(noise(20, 20)), kind)
        for position in np.random.default_rng(0).integers(0, len(content), 60):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            with contextlib.suppress(BadImageError):
                assert decode(bytes(damaged), max_pixels=10_000, min_edge=4).mode == "RGB"


def fitted(image: Image.Image, size: int, fit: Fit) -> Pixels:
    return np.asarray(to_square(image, Square(fit=fit, size=size, max_pixels=1)))


def test_squares() -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, :10, 0] = wide[:, 10:20, 1] = wide[:, 20:, 2] = 255
    for image in (Image.fromarray(wide), Image.fromarray(wide.transpose(1, 0, 2))):
        cropped = fitted(image, 10, "crop")
        np.testing.assert_array_equal(cropped, np.full((10, 10, 3), (0, 255, 0)))
    stretched = fitted(Image.fromarray(wide), 30, "stretch")
    np.testing.assert_array_equal(stretched[:, [4, 15, 25]].argmax(-1), np.tile([0, 1, 2], (30, 1)))

    # A fine checkerboard becomes gray, where taking every fourth pixel would leave it black or white.
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    small = fitted(Image.fromarray(board).convert("RGB"), 16, "crop")
    np.testing.assert_allclose(small, 127.5, atol=3)

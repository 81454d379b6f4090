"""The server: `POST /predict` with photos, the Open Inference Protocol v2, health, metrics, and a page.

https://github.com/kserve/open-inference-protocol has the protocol; its errors have a JSON object with `error`. Everything that a client
does wrong is a 4xx. A server that is too busy says 503 at once, before it reads the photo, so that its memory has a limit: the photos in
flight, each of at most so many bytes, and what decoding takes of them on as many threads as there are cores.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import itertools
import json
import logging
import math
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
import prometheus_client as prometheus
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from trainer.io import limits
from trainer.io.errors import SettingsError
from trainer.io.host import usable_cores
from trainer.models.served_student.preprocessing import BadImageError
from trainer.models.served_student.student import Prediction
from trainer.predict.photo_classifier import PhotoClassifier
from trainer.predict.serving.micro_batcher import MicroBatcher

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAGE = Path(__file__).with_name("page.html")
TOP = 5
"""How many labels a photo is answered with, of those that the student knows, where a request does not say."""
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; img-src blob:; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    ),
    (b"x-content-type-options", b"nosniff"),
]
_CONNECTIONS = 4096
"""Further ones are refused and closed by uvicorn itself, health checks too: each may hold up to 64 KiB of a photo."""
_BACKLOG = 2048
_FIELD_BYTES = 16 * 2**10  # of a form's field that is no file, which nothing here reads
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits beyond which a server refuses."""

    batch_size: int = 16  # photos that are computed together, at most
    wait_ms: float = 2.0  # how long the first photo of a batch waits, on an idle server, for others that are being read
    in_flight: int = 64  # requests that are read, decoded or waiting; a further one is refused with 503
    body_bytes: int = 16 * 2**20
    timeout_s: float = 10.0  # from the first byte of a request to its answer
    drain_s: float = 0.0
    """From a request to end until no more connections are taken; meanwhile the server is alive and not ready."""


class RefusedRequestError(Exception):
    """A refused request, with its status and the client's message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PredictionLog:
    """Writes a sample of the predictions, a JSON object a line, for `vit-distill drift`; of photos only where a folder is given."""

    def __init__(self, stream: TextIO, *, share: float, photos: Path | None = None) -> None:
        """Take an open file; `share` of the predictions are written, chosen by chance, and their photos below `photos`."""
        self._stream, self._share, self._photos = stream, share, photos
        self._chance = random.Random()  # a sample, no secret
        self._writing = threading.Lock()

    @property
    def is_slow(self) -> bool:
        """Whether a prediction may take as long as a photo takes to write."""
        return self._photos is not None

    def add(self, said: Prediction, model: PhotoClassifier, photo: bytes = b"") -> None:
        """Write a prediction of a model, if it is drawn; by any thread."""
        if self._chance.random() >= self._share:
            return
        label, probability = next(iter(said.labels.items()))
        row: dict[str, Any] = {"time": round(time.time(), 3), "version": model.version, "student": model.student}
        row |= {"label": label, "probability": probability}
        if said.named is not None:
            row["named"] = said.named
        try:
            if photo and self._photos is not None:
                name = row["photo"] = hashlib.sha256(photo).hexdigest()
                (self._photos / name).write_bytes(photo)
            with self._writing:
                self._stream.write(f"{json.dumps(row, ensure_ascii=False)}\n")
                self._stream.flush()
        except OSError as error:  # a full disk keeps no client from its answer
            logger.warning("a prediction is not logged: %s", error)


class Metrics:
    """The metrics of `/metrics`, in a registry of their own."""

    def __init__(self, model: PhotoClassifier, name: str) -> None:
        self.registry = into = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=into)
        self.requests = prometheus.Counter(
            "serve_requests", "Requests by route and status.", ["route", "status"], registry=into
        )
        self.seconds = prometheus.Histogram(
            "serve_request_seconds", "From the first byte to the answer.", ["route"], registry=into
        )
        self.batches = prometheus.Histogram("serve_batch_photos", "Photos of a batch.", buckets=_BATCHES, registry=into)
        self.in_flight = prometheus.Gauge(
            "serve_in_flight", "Photos and tensors that are being answered.", registry=into
        )
        info = prometheus.Info("serve_model", "The model.", registry=into)
        info.info(
            {"name": name, "version": model.version, "architecture": model.architecture, "variant": model.variant}
        )


class PhotoServer:
    """The application around a model, for an ASGI server."""

    def __init__(
        self,
        model: PhotoClassifier,
        *,
        name: str,
        most: ServerLimits,
        log: PredictionLog | None = None,
        beside: Callable[[bytes, int], Prediction] | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: the student.
            name: as the protocol and the page call it.
            most: the limits.
            log: takes the predictions.
            beside: says what another model, such as the teacher, thinks of a photo: its bytes and the number of labels.
        """
        self.model, self.name, self.most, self._log, self._beside = model, name, most, log, beside
        self.is_ready = False
        self.metrics = Metrics(model, name)
        self._decoders = ThreadPoolExecutor(usable_cores(), thread_name_prefix="decode")
        self._in_flight = 0
        self.metrics.in_flight.set_function(lambda: self._in_flight)

    @cached_property
    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI(title=f"{self.name} {self.model.version}", lifespan=self._lifespan, docs_url=None, redoc_url=None)
        readable = partial(app.api_route, methods=["GET", "HEAD"])
        readable("/", response_class=HTMLResponse)(self._page)
        readable("/metrics")(self._metrics)
        readable("/v2")(self._server_metadata)
        readable("/v2/health/live")(self._live)
        readable("/v2/health/ready")(self._ready)
        app.post("/predict")(self._predict)
        app.head("/predict")(self._ready)  # whether a photo would be answered
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            readable(path)(self._model_metadata)
            readable(f"{path}/ready")(self._model_ready)
            app.post(f"{path}/infer")(self._infer)
        app.exception_handler(RequestValidationError)(_refused_parameters)
        app.exception_handler(Exception)(_failed)
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        self._batcher = MicroBatcher(
            self.model.of_squares,
            most=self.most.batch_size,
            wait_s=self.most.wait_ms / 1000,
            coming=lambda: self._in_flight,
            observed=self.metrics.batches.observe,
        )
        batching = asyncio.create_task(self._batcher.run())
        self.is_ready = True
        try:
            yield
        finally:
            batching.cancel()
            with suppress(asyncio.CancelledError):
                await batching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count and log it. One too many is refused here, which costs a tenth of what it takes in the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, state = time.monotonic(), 500, scope.setdefault("state", {})

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_HEADERS, (b"x-model-version", self.model.version.encode())]
            await send(message)

        photos = scope["method"] == "POST"
        refused = photos and self._in_flight >= self.most.in_flight
        self._in_flight += photos and not refused
        try:
            if refused:
                state["note"] = "too busy"
                await _error(503, "the server is too busy; try again", {"Retry-After": "1"})(scope, receive, observed)
            else:
                await self.app(scope, receive, observed)
        except Exception:  # a bug, or a broken graph: the application has answered with 500, and the server goes on
            logger.exception("%s %s failed", scope["method"], limits.printable_name(scope["path"][:100]))
        finally:
            self._in_flight -= photos and not refused
        seconds = time.monotonic() - start
        # Not the path, of which there are endlessly many.
        route = "refused" if refused else getattr(scope.get("route"), "path", "none")
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if not route.startswith(("/metrics", "/v2/health")):
            said = f"{scope['method']} {limits.cut(scope['path'], 100)} {status} {1000 * seconds:.1f} ms {state.get('note', '')}"
            logger.info("%s %s", limits.printable_name(said), self.model.version)

    async def _answered(self, request: Request, answer: Callable[[bytes], Awaitable[dict[str, Any]]]) -> Response:
        """Read a body within the limits and answer it."""
        try:
            async with asyncio.timeout(self.most.timeout_s):
                return JSONResponse(await answer(await self._body(request)))
        except RefusedRequestError as refusal:
            request.state.note = str(refusal)
            close = {"Connection": "close"} if refusal.status == 413 else {}  # what is left of the body is not read
            return _error(refusal.status, str(refusal), close)
        except TimeoutError:
            request.state.note = "too slow"
            return _error(
                503,
                f"not answered within {self.most.timeout_s:g} s; try again",
                {"Retry-After": "1", "Connection": "close"},
            )

    async def _body(self, request: Request) -> bytes:
        too_large = RefusedRequestError(
            413, f"the body has more than {self.most.body_bytes:,} bytes; send a smaller photo"
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self.most.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self.most.body_bytes:
                    raise too_large
        except ClientDisconnect as error:  # nobody reads the answer, but the log and the metrics
            raise RefusedRequestError(400, "the client left before its whole body had come") from error
        return bytes(body)

    async def _square(self, content: bytes) -> npt.NDArray[np.uint8]:
        return await self._decoded(self.model.square, content)

    async def _decoded(self, work: Callable[..., T], *given: Any) -> T:
        """Decode in a thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoders, work, *given)
        except BadImageError as error:
            raise RefusedRequestError(400, f"not a photo that can be used: {error}") from error
        except MemoryError as error:
            raise RefusedRequestError(413, "the photo needs more memory than there is; send a smaller one") from error

    # Photos

    async def _predict(self, request: Request, top: int | None = None) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_form = kind == "multipart/form-data"
        if not (is_form or kind.startswith("image/") or kind in {"", "application/octet-stream"}):
            return _error(
                415,
                f"content type {kind[:100]!r}: send the image file itself as the body, as image/* or application/octet-stream, "
                "or files in a form, as multipart/form-data",
            )
        if top is None:
            top = min(TOP, len(self.model.labels))
        if not 1 <= top <= len(self.model.labels):
            return _error(400, f"top must be from 1 to {len(self.model.labels)}, got {top}")

        async def answer(body: bytes) -> dict[str, Any]:
            model = {"model": self.name, "version": self.model.version}
            photos = await _files(request, body, most=self.most.batch_size) if is_form else [("", body)]
            if len(photos) > 1:
                answers = await asyncio.gather(*(self._answer_or_reason(name, photo, top) for name, photo in photos))
                request.state.note = f"{len(photos)} photos"
                return {**model, "photos": answers}
            ((_, photo),) = photos
            said, answered = await self._answer(photo, top)
            label, probability = next(iter(said.labels.items()))
            found = f"{label!r} {probability:.3f}" if said.named is None else f"named {[*said.named]}"
            request.state.note = f"{len(photo):,} bytes {found}"
            return model | answered

        return await self._answered(request, answer)

    async def _answer(self, photo: bytes, top: int) -> tuple[Prediction, dict[str, Any]]:
        """Classify one photo and log it; returns the client's answer too."""
        row = await self._batcher.submit(await self._square(photo))
        (said,) = self.model.answers(row[None].astype(np.float64), top=top)
        if self._log is not None and self._log.is_slow:
            await self._decoded(self._log.add, said, self.model, photo)
        elif self._log is not None:
            self._log.add(said, self.model)
        content = _shown(said)
        if self._beside is not None:
            content["beside"] = _shown(await self._decoded(self._beside, photo, top))
        return said, content

    async def _answer_or_reason(self, name: str, photo: bytes, top: int) -> dict[str, Any]:
        """Classify one of several photos; returns the reason for an unusable one."""
        try:
            _, content = await self._answer(photo, top)
        except RefusedRequestError as refusal:
            return {"photo": name, "error": str(refusal)}
        return {"photo": name, **content}

    # The protocol

    async def _infer(self, request: Request, name: str, version: str = "") -> Response:
        """Classify photos, or squares of them, as version 2 of the protocol has it."""
        if (refusal := self._unknown(name, version)) is not None:
            return refusal

        async def answer(body: bytes) -> dict[str, Any]:
            asked = await self._decoded(_parsed, body)
            squares = await self._asked_squares(asked)
            rows = np.stack(await asyncio.gather(*map(self._batcher.submit, squares))).astype(np.float64)
            said = self.model.answers(rows, top=1)
            if self._log is not None:
                for one in said:
                    self._log.add(one, self.model)
            request.state.note = f"{len(rows)} photos"
            outputs = [
                {"name": "probabilities", "datatype": "FP64", "shape": list(rows.shape), "data": rows.ravel().tolist()},
                {
                    "name": "label",
                    "datatype": "BYTES",
                    "shape": [len(rows)],
                    "data": [next(iter(one.labels)) for one in said],
                },
            ]
            if self.model.threshold is not None:
                named = [label in (one.named or ()) for one in said for label in self.model.labels]
                outputs.append({"name": "named", "datatype": "BOOL", "shape": list(rows.shape), "data": named})
            identity = {"id": asked["id"]} if isinstance(asked.get("id"), str) else {}
            return {"model_name": self.name, "model_version": self.model.version, **identity, "outputs": outputs}

        return await self._answered(request, answer)

    async def _asked_squares(self, asked: Mapping[str, Any]) -> Sequence[npt.NDArray[np.uint8]]:
        """Take the squares of a request, or make them of its photos."""
        inputs = asked.get("inputs")
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise RefusedRequestError(400, "inputs: give one tensor, `images` or `photo`")
        tensor, size, most = inputs[0], self.model.size, self.most.batch_size
        kind, data, shape = (tensor.get(key) for key in ("datatype", "data", "shape"))
        expected = {"images": "UINT8", "photo": "BYTES"}.get(str(tensor.get("name")))
        if expected is None or kind != expected:
            raise RefusedRequestError(400, "inputs: the tensor must be `images` of UINT8, or `photo` of BYTES")
        if not isinstance(data, list) or not isinstance(shape, list) or not all(type(one) is int for one in shape):
            raise RefusedRequestError(400, "inputs: data and shape must be lists")
        if not shape or not 1 <= shape[0] <= most:
            raise RefusedRequestError(400, f"inputs: give from 1 to {most} photos in a request")
        if kind == "BYTES":
            if shape != [len(data)] or not all(isinstance(one, str) for one in data):
                raise RefusedRequestError(
                    400, "inputs: photo must be texts, each an image file in base64, and shape their number"
                )
            try:
                contents = [base64.b64decode(one, validate=True) for one in data]
            except (binascii.Error, ValueError) as error:
                raise RefusedRequestError(400, f"inputs: a photo is not base64 ({error})") from error
            return await asyncio.gather(*map(self._square, contents))
        if shape[1:] != [size, size, 3]:
            raise RefusedRequestError(
                400, f"inputs: images must have the shape [B, {size}, {size}, 3], got {shape[:8]}"
            )
        return await self._decoded(_pixels, data, shape)

    def _unknown(self, name: str, version: str) -> Response | None:
        if name == self.name and version in ("", self.model.version):
            return None
        served = f"this server has {self.name}, version {self.model.version}"
        return _error(
            404,
            limits.printable_name(
                f"no model {name[:100]!r}{f' of version {version[:100]!r}' if version else ''}; {served}"
            ),
        )

    async def _model_metadata(self, name: str, version: str = "") -> Response:
        size, classes = self.model.size, len(self.model.labels)
        content: dict[str, Any] = {
            "name": self.name,
            "versions": [self.model.version],
            "platform": f"{self.model.runtime}_onnx",
            "inputs": [
                {"name": "images", "datatype": "UINT8", "shape": [-1, size, size, 3]},
                {"name": "photo", "datatype": "BYTES", "shape": [-1]},
            ],
            "outputs": [
                {"name": "probabilities", "datatype": "FP64", "shape": [-1, classes]},
                {"name": "label", "datatype": "BYTES", "shape": [-1]},
            ],
        }
        if self.model.threshold is not None:  # each class by itself: those above it are named
            content["parameters"] = {"threshold": self.model.threshold}
            content["outputs"].append({"name": "named", "datatype": "BOOL", "shape": [-1, classes]})
        return self._unknown(name, version) or JSONResponse(content)

    async def _model_ready(self, name: str, version: str = "") -> Response:
        ready = JSONResponse({"name": self.name, "ready": self.is_ready}, 200 if self.is_ready else 503)
        return self._unknown(name, version) or ready

    async def _server_metadata(self) -> Response:
        return JSONResponse({"name": self.name, "version": self.model.version, "extensions": []})

    async def _live(self) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self) -> Response:
        return JSONResponse({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def _metrics(self) -> Response:
        return Response(prometheus.generate_latest(self.metrics.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _page(self) -> str:
        return PAGE.read_text(encoding="utf-8")


def _pixels(data: list[Any], shape: list[int]) -> list[npt.NDArray[np.uint8]]:
    """Return the images of a tensor, nested or flat; a `RefusedRequestError` where they are none, before an array is made of them.

    NumPy makes texts of a list with one text, each as long as the longest: gigabytes of some kilobytes.
    """
    while data and all(isinstance(part, list) for part in data) and len({*map(len, data)}) == 1:
        data = list(itertools.chain.from_iterable(data))
    if len(data) != math.prod(shape) or set(map(type, data)) != {int} or min(data) < 0 or max(data) > 255:
        raise RefusedRequestError(
            400, "inputs: the data of images cannot be used: they are not whole numbers from 0 to 255 of that shape"
        )
    return list(np.array(data, dtype=np.uint8).reshape(shape))


async def _files(request: Request, body: bytes, *, most: int) -> list[tuple[str, bytes]]:
    """Return the name and content of each file in a form; a `RefusedRequestError` if it is damaged, or has no file or more than `most`."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, whole(), max_files=most, max_part_size=_FIELD_BYTES)
    parser.spool_max_size = len(body) + 1  # it is in memory already
    try:
        form = await parser.parse()
    except (MultiPartException, UnicodeError) as error:  # the client names the charset of names
        said = limits.cut(getattr(error, "message", str(error)), 200)
        raise RefusedRequestError(400, f"the form cannot be read: {said}") from error
    uploads = [field for _, field in form.multi_items() if isinstance(field, UploadFile)]
    # A name may hold half of a pair of surrogates, which no JSON carries.
    files = [((upload.filename or "").encode("utf-8", "replace").decode(), await upload.read()) for upload in uploads]
    await form.close()
    if not files:
        raise RefusedRequestError(400, "the form has no file; with curl write --form photo=@photo.jpg")
    return files


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        asked = limits.parse_json(body)
    except ValueError as error:
        raise RefusedRequestError(400, f"the body is not JSON: {limits.cut(str(error), 200)}") from error
    if not isinstance(asked, dict):
        raise RefusedRequestError(400, "the body must be a JSON object")
    return asked


def _shown(said: Prediction) -> dict[str, Any]:
    labels = [{"label": label, "probability": probability} for label, probability in said.labels.items()]
    if said.named is not None:
        return {"labels": labels, "named": said.named} | ({"attributes": said.attributes} if said.attributes else {})
    known = {"answer": said.answer, "confidence": said.confidence, "attributes": said.attributes}
    return {"labels": labels} | (known if said.confidence is not None else {})


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers=dict(headers or {}))


async def _refused_parameters(_request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


async def _failed(_request: Request, _reason: Exception) -> Response:
    return _error(500, "the server failed; its log says why")


class _Uvicorn(uvicorn.Server):
    """Uvicorn, which stays alive without being ready for a while once it is asked to end."""

    def __init__(self, settings: uvicorn.Config, server: PhotoServer) -> None:
        super().__init__(settings)
        self._photos = server
        self._asked = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End after the drain; at once where asked again."""
        self._photos.is_ready = False
        if self._asked or not self._photos.most.drain_s:
            super().handle_exit(sig, frame)
            return
        self._asked = True
        logger.info(
            "asked to end by %s: not ready from now on, ends in %g s",
            signal.Signals(sig).name,
            self._photos.most.drain_s,
        )
        asyncio.get_running_loop().call_later(self._photos.most.drain_s, super().handle_exit, sig, frame)


def serve(server: PhotoServer, *, host: str, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM, and then those in flight; a `SettingsError` if the address cannot be used."""
    # Only where the protocol is named does asyncio send at once what is small (TCP_NODELAY): else every answer takes 40 ms more.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(_BACKLOG)  # before the log says so; until the model answers, what connects waits
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--host {host} --port {port}: cannot be used ({error}); give another one") from error
        settings = uvicorn.Config(
            server,
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(server.most.timeout_s) + 1,
            timeout_keep_alive=5,
        )
        model, address = server.model, f"http://{host}:{listening.getsockname()[1]}"
        logger.info(
            "%s serves %s, version %s (%s, %s)", address, server.name, model.version, model.architecture, model.variant
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
            _Uvicorn(settings, server).run(sockets=[listening])

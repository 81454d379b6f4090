"""The API server's side of HTTP: connections, chunked streams, answers as JSON."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.stand_ins.kubernetes import requests
from tests.stand_ins.kubernetes.api import Answer, Api, Stream
from tests.stand_ins.kubernetes.faults import USER, AwayError
from tests.stand_ins.kubernetes.resources import RESOURCES
from tests.stand_ins.kubernetes.statuses import ApiError, bad_request

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.1"}


class ApiServer(ThreadingHTTPServer):
    """Serves an `Api` on a free port, until it is closed; then every connection is closed too and every thread has ended."""

    daemon_threads = False  # so that closing waits for them
    request_queue_size = 64

    def __init__(self, api: Api) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api
        self.installed = set(RESOURCES)
        """Plurals that are served; others are answered as an API that no CRD defines."""
        self.closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="api-server")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        """End all connections and threads."""
        self.closing.set()
        self.shutdown()
        self._thread.join()
        for connection in list(self._connections):
            _shut(connection)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error; all else is shown, by the base class."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ApiServer

    def _serve(self) -> None:
        split = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            answer, target, cuts = self._answer(split.path, dict(parse_qsl(split.query)), _parsed(body))
        except ApiError as refusal:
            self._send(refusal.code, json.dumps(refusal.body()), refusal.headers)
        except AwayError:
            self.close_connection = True
            _shut(self.connection)
        else:
            if isinstance(answer, Answer):
                text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                self._send(answer.code, text, {}, plain=isinstance(answer.body, str))
            else:
                self._stream(answer, target, cuts)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  # the names that the base class calls

    def _answer(
        self, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> tuple[Answer | Stream, str, int]:
        """The answer, of which target, and how often streams of that had been cut when it was asked for."""
        if path == "/version":
            return Answer(body=dict(_VERSION)), "", 0
        if path == _REVIEWS and body:
            return Answer(body=self._review(body), code=201), "", 0
        content_type = self.headers.get("Content-Type") or ""
        request = requests.parse(self.command, path, query, content_type, body)
        if request is None or request.resource.plural not in self.server.installed:
            return Answer(body="404 page not found\n", code=404), "", 0
        cuts = self.server.api.faults.cuts(request.target)
        self.server.api.faults.check(request)
        answer = self.server.api.answer(request)
        self.server.api.faults.check_answer(request)
        return answer, request.target, cuts

    def _review(self, body: Mapping[str, Any]) -> dict[str, Any]:
        wanted = body["spec"]["resourceAttributes"]
        target = "/".join(wanted[key] for key in ("resource", "subresource") if wanted.get(key))
        allowed = self.server.api.faults.permitted(wanted["verb"], target, wanted.get("group", ""))
        return {**body, "status": {"allowed": allowed, "reason": "" if allowed else f"{USER} has no such right"}}

    def _send(self, code: int, text: str, headers: Mapping[str, str], *, plain: bool = False) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if plain else "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, pieces: Stream, target: str, cuts: int) -> None:
        """Send pieces as chunks until they end, the client goes, or a fault cuts the stream, which then lacks its last chunk."""
        faults = self.server.api.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/plain" if target == "pods/log" else "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if self.server.closing.is_set() or faults.cuts(target) > cuts or _gone(self.connection):
                self.close_connection = True
                _shut(self.connection)
                return
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *arguments: Any) -> None:
        """Requests are not logged."""


def _parsed(body: bytes) -> Mapping[str, Any] | None:
    try:
        return json.loads(body) if body else None
    except ValueError as error:
        raise bad_request(f"error decoding the body: {error}") from error


def _gone(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


def _shut(connection: socket.socket) -> None:
    """End a connection under a thread that may be reading from it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was faster

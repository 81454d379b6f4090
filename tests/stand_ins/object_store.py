"""A real S3 server (moto's, a process of its own), reached over HTTP through a proxy that puts faults in between and takes notes.

    with ObjectStore() as store:
        os.environ.update(store.environment)                    # endpoint and credentials, as every S3 client reads them
        store.answer(503, times=2, method="GET")                # the next two GETs
        store.cut(after=1_000_000, path="weights")              # the connection ends in the middle of a body, once
        store.requests                                          # what came, with the bytes that went back

A request that is not signed with the store's access key is refused, as a real store would; signatures are not computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = """
import logging, os, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with the tests, however they end
print(server.port, flush=True)
server.serve_forever()
"""
ACCESS_KEY, SECRET_KEY = "stand-in-key", "stand-in-secret"
AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
"""The server wants one, and does not look at the signature."""
ERROR_CODES = {400: "RequestTimeout", 403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request that came to the store."""

    method: str
    path: str
    """/BUCKET/KEY"""
    query: str
    range: str
    """The header, such as bytes=0-99."""
    received: int
    """Bytes of the request's body."""
    status: int
    """What was answered; 0 where the connection was cut before."""
    sent: int
    """Bytes of the answer's body that went back."""


@dataclasses.dataclass(kw_only=True)
class Fault:
    """What is done to requests, to so many of them."""

    method: str
    path: str
    """Regular expression, searched in /BUCKET/KEY?QUERY."""
    times: int
    status: int = 0
    delay_s: float = 0.0
    """Waited before anything is answered."""
    after: int | None = None
    """Bytes of the body (the request's of a PUT or POST, else the answer's) after which the connection ends."""
    loses_answer: bool = False
    """Whether the connection ends when the server has done what was asked."""

    def concerns(self, method: str, target: str) -> bool:
        return self.times > 0 and self.method in ("", method) and re.search(self.path, target) is not None


class ObjectStore:
    """The server and its proxy, from `with` to its end; one bucket is there."""

    bucket = "artifacts"

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.conditional = threading.Lock()
        self.released = threading.Event()
        self.held = 0
        """Requests that a delay holds up at the moment."""
        self._port = 0
        """Of the proxy; any that is free before it has one."""
        self.page = 1000
        """Most names that a listing gives at once."""

    def __enter__(self) -> ObjectStore:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())
        self.start()
        self.make_bucket(self.bucket)
        return self

    def start(self) -> None:
        """Take requests, at the same address again after `stop`."""
        self._proxy = Proxy(self, self._port)
        self._port = self._proxy.server_port
        self._thread = threading.Thread(target=self._proxy.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        """End all connections and refuse others; what is stored stays."""
        self._proxy.shutdown()
        self._proxy.close_connections()
        self._proxy.server_close()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.clear()
        self.stop()
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the store."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def uri(self, *names: str) -> str:
        """s3:// URI of something in the bucket."""
        return "/".join((f"s3://{self.bucket}", *names))

    # Faults

    def answer(self, status: int, *, times: int = 1_000_000, method: str = "", path: str = "") -> None:
        """Answer with an error instead of asking the server."""
        self._faults.append(Fault(method=method, path=path, times=times, status=status))

    def delay(self, seconds: float, *, times: int = 1_000_000, method: str = "", path: str = "") -> None:
        self._faults.append(Fault(method=method, path=path, times=times, delay_s=seconds))

    def cut(self, after: int = 0, *, times: int = 1, method: str = "GET", path: str = "") -> None:
        """End the connection in the middle of a body."""
        self._faults.append(Fault(method=method, path=path, times=times, after=after))

    def lose_answer(self, *, times: int = 1, method: str = "", path: str = "") -> None:
        """Let the server do it, and end the connection instead of telling."""
        self._faults.append(Fault(method=method, path=path, times=times, loses_answer=True))

    def clear(self) -> None:
        """Forget all faults and requests; who is held up is let go."""
        self.released.set()
        self.released = threading.Event()
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def reset(self) -> None:
        """Forget all faults and requests, and remove all objects."""
        self.clear()
        self.page = 1000
        for key in self.keys():
            self.delete(key)

    def fault(self, method: str, target: str) -> Fault | None:
        """The fault for a request, which is used up by it."""
        with self._lock:
            for fault in self._faults:
                if fault.concerns(method, target):
                    fault.times -= 1
                    return fault
        return None

    def hold(self, seconds: float) -> None:
        released = self.released
        with self._lock:
            self.held += 1
        released.wait(seconds)
        with self._lock:
            self.held -= 1

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def sent(self, path: str = "") -> int:
        """Bytes that went back in answers to GETs of objects whose path has `path` in it."""
        return sum(one.sent for one in self.requests if one.method == "GET" and path in one.path)

    # Past the proxy

    def forward(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """Ask the server itself."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, target, body=body, headers=headers or {"Authorization": AUTHORIZATION})
            with connection.getresponse() as response:
                return Answer(status=response.status, headers=list(response.getheaders()), body=response.read())

    def make_bucket(self, name: str) -> None:
        assert self.forward("PUT", f"/{name}").status == 200

    def put(self, key: str, content: bytes) -> None:
        assert self.forward("PUT", f"/{self.bucket}/{urllib.parse.quote(key)}", content).status == 200

    def get(self, key: str) -> bytes:
        answer = self.forward("GET", f"/{self.bucket}/{urllib.parse.quote(key)}")
        assert answer.status == 200, f"{key}: {answer.status}"
        return answer.body

    def delete(self, key: str) -> None:
        assert self.forward("DELETE", f"/{self.bucket}/{urllib.parse.quote(key)}").status == 204

    def keys(self, prefix: str = "") -> list[str]:
        """Of all objects whose key starts so (up to a thousand)."""
        body = self.forward("GET", f"/{self.bucket}?list-type=2&prefix={urllib.parse.quote(prefix)}").body.decode()
        return sorted(re.findall("<Key>(.*?)</Key>", body))

    def unfinished_uploads(self) -> int:
        """Multi-part uploads that were begun and neither completed nor aborted."""
        return self.forward("GET", f"/{self.bucket}?uploads").body.count(b"<Upload>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, unless a fault concerns them."""

    daemon_threads = False  # so that closing waits for them

    def __init__(self, store: ObjectStore, port: int) -> None:
        self.store = store
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def close_connections(self) -> None:
        """End what clients keep open."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: socket.socket, client_address: object) -> None:
        """A client that went away is no error of the store."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):  # the client has gone
            super().finish()

    def log_message(self, *_: object) -> None:
        """Requests are kept, not printed."""

    def handle_any(self) -> None:
        self._length = int(self.headers.get("Content-Length", 0))
        fault = self.server.store.fault(self.command, self.path)
        if fault and fault.delay_s:
            self.server.store.hold(fault.delay_s)
        if fault and fault.after is not None and self.command in ("PUT", "POST"):
            self._note(len(self.rfile.read(min(fault.after, self._length))), 0, 0)
            self._hang_up()
            return
        body = self.rfile.read(self._length)
        if len(body) < self._length:  # the client has gone
            self.close_connection = True
            return
        answer = self._refusal(fault) or self._pass_on(body)
        if fault and fault.loses_answer:
            self._note(len(body), 0, 0)
            self._hang_up()
            return
        self._answer(body, answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815  # the names that http.server calls

    def _refusal(self, fault: Fault | None) -> Answer | None:
        signed = f"Credential={ACCESS_KEY}/" in (self.headers.get("Authorization") or "")
        status = fault.status if fault and fault.status else 0 if signed else 403
        if not status:
            return None
        code = ERROR_CODES.get(status, "InternalError") if signed else "InvalidAccessKeyId"
        body = f"<Error><Code>{code}</Code><Message>refused by the stand-in</Message></Error>".encode()
        return Answer(status=status, headers=[("Content-Type", "application/xml")], body=body)

    def _pass_on(self, body: bytes) -> Answer:
        # Of two writers that must not replace anything S3 lets one through; the server behind looks first and writes then.
        alone = self.server.store.conditional if self.headers.get("If-None-Match") else contextlib.nullcontext()
        with alone:
            return self._forward(body)

    def _forward(self, body: bytes) -> Answer:
        page = f"&max-keys={self.server.store.page}" if "list-type=2" in self.path else ""
        return self.server.store.forward(self.command, self.path + page, body, dict(self.headers.items()))

    def _answer(self, received: bytes, answer: Answer, fault: Fault | None) -> None:
        head = self.command == "HEAD"
        body = b"" if head else answer.body
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "server"):
                self.send_header(name, value)
        upstream = {name.lower(): value for name, value in answer.headers}
        self.send_header("Content-Length", upstream.get("content-length", "0") if head else str(len(body)))
        cut = fault is not None and fault.after is not None
        part = body[: fault.after] if cut else body
        self._note(len(received), answer.status, len(part))  # before the client knows
        self.end_headers()
        self.wfile.write(part)
        if cut:
            self._hang_up()

    def _note(self, received: int, status: int, sent: int) -> None:
        path, _, query = self.path.partition("?")
        self.server.store.note(
            Request(
                method=self.command,
                path=urllib.parse.unquote(path),
                query=query,
                range=self.headers.get("Range", ""),
                received=received,
                status=status,
                sent=sent,
            )
        )

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

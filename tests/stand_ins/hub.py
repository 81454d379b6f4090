"""A server that answers as the Hugging Face Hub does when it is asked about a repository.

with Hub() as hub:
    hub.revisions["models/timm/vit_tiny_patch16_224"] = "a" * 40
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Hub(ThreadingHTTPServer):
    """The server, from `with` to its end."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions: dict[str, str] = {}
        """Path of the repository -> its commit."""
        self.licenses: dict[str, str] = {}
        """Path of the repository -> its license, as its page names it."""
        self.asked: list[str] = []
        """Paths of all requests."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        sha = self.server.revisions.get(path.removeprefix("/api/"))
        answer = {"_id": "1", "id": path.removeprefix("/api/models/"), "sha": sha} if sha else {}
        if license_name := self.server.licenses.get(path.removeprefix("/api/")):
            answer["cardData"] = {"license": license_name}
        body = json.dumps(answer).encode()
        self.send_response(200 if sha else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing on the terminal."""

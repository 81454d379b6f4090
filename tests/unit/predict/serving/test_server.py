"""What the server answers, what it refuses, and that nothing that a client sends makes it fail."""

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import re
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tests.hostile import bombs
from tests.unit.stages.photos import KINDS
from trainer import load_model
from trainer.predict.serving.server import TOP, PhotoServer, PredictionLog, ServerLimits

LIMITS = ServerLimits(batch_size=8, wait_ms=0, in_flight=4, body_bytes=1_000_000, timeout_s=5)


@pytest.fixture(scope="module")
def model(exported):
    return load_model(exported, threads=1)


@pytest.fixture(scope="module")
def client(model):
    with TestClient(PhotoServer(model, name="student", most=LIMITS), raise_server_exceptions=False) as client:
        yield client


def photo(seed=0, size=(60, 48)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def shares(answer):
    return {one["label"]: one["probability"] for one in answer["labels"]}


def infer(client, **tensor):
    return client.post("/v2/models/student/infer", json={"inputs": [tensor]})


def test_photos_of_every_kind_get_what_student_itself_says(client, model, judged_run, trained_digits, tmp_path):
    student = load_model(judged_run)
    for number, write in enumerate(KINDS):
        write(trained_digits.images[number, 0].numpy(), tmp_path / str(number))
        (file,) = tmp_path.glob(f"{number}.*")
        said = client.post("/predict?top=10", content=file.read_bytes(), headers={"Content-Type": "image/any"}).json()
        (alone,) = student.predictions([str(file)], top=10)
        assert {one["label"]: one["probability"] for one in said["labels"]} == pytest.approx(
            dict(alone.labels), abs=1e-4
        )
        assert said["answer"] == alone.answer
        assert said["confidence"] == pytest.approx(alone.confidence, abs=1e-4)
        assert said["attributes"] == pytest.approx(alone.attributes, abs=1e-2)
        assert (said["model"], said["version"]) == ("student", model.version)


def test_the_protocol(client, model):
    assert client.get("/v2").json() == {"name": "student", "version": model.version, "extensions": []}
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    versioned = f"/v2/models/student/versions/{model.version}"
    for path in ("/v2/models/student", versioned):
        assert client.get(f"{path}/ready").json() == {"name": "student", "ready": True}
        described = client.get(path).json()
    assert [one["shape"] for one in described["inputs"]] == [[-1, 16, 16, 3], [-1]]
    photos = [photo(seed) for seed in range(3)]
    texts = [base64.b64encode(one).decode() for one in photos]
    asked = {"id": "one", "inputs": [{"name": "photo", "datatype": "BYTES", "shape": [3], "data": texts}]}
    of_photos = client.post(f"{versioned}/infer", json=asked).json()
    assert (of_photos["id"], of_photos["model_name"], of_photos["model_version"]) == ("one", "student", model.version)
    squares = np.stack([model.square(one) for one in photos])
    expected = model.of_squares(squares)
    for data in (squares.tolist(), squares.ravel().tolist()):  # the protocol allows both
        of_squares = infer(client, name="images", datatype="UINT8", shape=list(squares.shape), data=data).json()
        assert of_squares["outputs"] == of_photos["outputs"]
        assert "id" not in of_squares
    probabilities, label = of_photos["outputs"]
    assert probabilities["shape"] == [3, 10]
    assert probabilities["data"] == pytest.approx(expected.ravel().tolist(), abs=1e-6)
    assert label["data"] == [model.labels[index] for index in expected.argmax(axis=1)]


@pytest.mark.parametrize(
    "path", ["/v2/models/other", "/v2/models/other/ready", "/v2/models/student/versions/7", "/nothing", "/predict/x"]
)
def test_what_is_not_there_is_404(client, path):
    assert client.get(path).status_code == 404
    assert client.post("/v2/models/other/infer", json={}).status_code == 404


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({}, "must be `images` of UINT8, or `photo` of BYTES"),
        ({"name": "images", "datatype": "FP32", "shape": [1], "data": []}, "must be `images` of UINT8"),
        ({"name": "photo", "datatype": "BYTES", "shape": [1], "data": "text"}, "data and shape must be lists"),
        ({"name": "photo", "datatype": "BYTES", "shape": [0], "data": []}, "give from 1 to 8 photos"),
        ({"name": "photo", "datatype": "BYTES", "shape": [9], "data": [""] * 9}, "give from 1 to 8 photos"),
        ({"name": "photo", "datatype": "BYTES", "shape": [2], "data": ["aaaa"]}, "shape their number"),
        ({"name": "photo", "datatype": "BYTES", "shape": [1], "data": [7]}, "must be texts"),
        ({"name": "photo", "datatype": "BYTES", "shape": [1], "data": ["?"]}, "is not base64"),
        ({"name": "photo", "datatype": "BYTES", "shape": [1], "data": ["aaaa"]}, "no image that can be read"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": []}, "[B, 16, 16, 3], got [1, 8, 8, 3]"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [1, 2]}, "cannot be used"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [[1], 2]}, "cannot be used"),
        ({"name": "images", "datatype": "UINT8", "shape": [2, 16, 16, 3], "data": [[1] * 767, [1] * 769]}, "cannot be used"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [256] * 768}, "from 0 to 255"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [0.5] * 768}, "from 0 to 255"),
        ({"name": "images", "datatype": "UINT8", "shape": [True, 16, 16, 3], "data": []}, "must be lists"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": []}, "cannot be used"),
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [True] * 768}, "from 0 to 255"),
        # As an array of texts it would be of 40 GB.
        ({"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": ["a" * 100_000] + [""] * 100_000}, "cannot be used"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_one_message(client, tensor, message):
    response = infer(client, **tensor)
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"inputs": 1}', b'{"inputs": []}', b"[" * 5000, b"\xff", b'{"a": NaN}']
)
def test_what_is_no_request_of_protocol_is_400(client, body):
    response = client.post("/v2/models/student/infer", content=body)
    assert response.status_code == 400
    assert response.json()["error"]


HOSTILE = {
    "nothing": b"",
    "text": b"no photo",
    "half a PNG": photo()[:300],
    "a changed PNG": photo()[:200] + b"\0" * 50 + photo()[250:],
    "PNG of many pixels": bombs.png(100_000, 100_000, zlib.compress(bytes(10**6))),
    "PNG with a huge text": bombs.png(16, 16, b"", (b"zTXt", b"a\0\0" + bombs.squeezed(32 * 2**20))),
    "GIF of many pixels": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(3) + b"," + bytes(20),
    "TIFF with a tile of many pixels": bombs.tile(30_000),
    "JPEG of many pixels": bombs.jpeg(65_500),
    "JPEG of many scans": bombs.jpeg(16) + b"\xff\xda" * 10_000,
    "PPM of many pixels": b"P6 100000 100000 255\n" + bytes(100),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_photos_are_400_and_next_one_is_answered(client, name):
    response = client.post("/predict", content=HOSTILE[name], headers={"Content-Type": "image/png"})
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith("not a photo that can be used: ")
    assert client.post("/predict", content=photo()).status_code == 200


def test_bodies_and_parameters_beyond_the_limits(client):
    too_large = client.post("/predict", content=bytes(1_000_001))
    assert too_large.status_code == 413
    assert too_large.json() == {"error": "the body has more than 1,000,000 bytes; send a smaller photo"}
    chunked = client.post("/predict", content=iter([bytes(600_000), bytes(600_000)]))
    assert "content-length" not in chunked.request.headers
    assert chunked.status_code == 413
    assert client.post("/predict", content=photo(), headers={"Content-Type": "text/html"}).status_code == 415
    for top in ("0", "11", "x", "1e3"):
        response = client.post(f"/predict?top={top}", content=photo())
        assert response.status_code == 400
        assert "top" in response.json()["error"]


def test_a_student_of_few_classes_answers_with_all_of_them(client, monkeypatch):
    assert len(client.post("/predict", content=photo()).json()["labels"]) == TOP
    monkeypatch.setattr("trainer.predict.serving.server.TOP", 50)
    assert len(client.post("/predict", content=photo()).json()["labels"]) == 10


def test_forms(client):
    names = [("b.png", photo(1)), ("a.png", photo(2)), ("none.png", b"no photo"), ("b.png", photo(3))]
    answer = client.post("/predict?top=2", files=[("photo", file) for file in names]).json()
    assert [one["photo"] for one in answer["photos"]] == ["b.png", "a.png", "none.png", "b.png"]
    assert answer["photos"][2]["error"].startswith("not a photo that can be used: ")
    for one, seed in ((0, 1), (1, 2), (3, 3)):
        alone = client.post("/predict?top=2", content=photo(seed)).json()
        assert shares(answer["photos"][one]) == pytest.approx(shares(alone))
        assert {"model": answer["model"], "version": answer["version"]} == {
            key: alone[key] for key in ("model", "version")
        }


def test_a_name_that_no_json_carries_is_answered(client):
    part = b'--b\r\nContent-Disposition: form-data; name="p"; filename="+2AA-%d"\r\n\r\n' + photo() + b"\r\n"
    body = part.replace(b"%d", b"1") + part.replace(b"%d", b"2") + b"--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b; charset=utf-7"}
    response = client.post("/predict", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert [one["photo"] for one in response.json()["photos"]] == ["?1", "?2"]


FORM = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"--b--\r\n", FORM, "the form has no file; with curl write --form photo=@photo.jpg"),
        (
            b'--b\r\nContent-Disposition: form-data; name="photo"\r\n\r\nphoto.jpg\r\n--b--\r\n',
            FORM,
            "the form has no file; with curl write --form photo=@photo.jpg",
        ),
        (photo(), FORM, "the form cannot be read: "),
        (photo(), {"Content-Type": "multipart/form-data"}, "the form cannot be read: Missing boundary"),
        (b"", FORM, "the form has no file"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--\r\n", FORM, "the form cannot be read: "),
        (
            b"".join(
                b'--b\r\nContent-Disposition: form-data; name="p"; filename="%d"\r\n\r\n\r\n' % index
                for index in range(9)
            )
            + b"--b--\r\n",
            FORM,
            "the form cannot be read: Too many files. Maximum number of files is 8",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="p"; filename="p"\r\n\r\n\r\n--b--\r\n',
            {"Content-Type": "multipart/form-data; boundary=b; charset=undefined"},
            "the form cannot be read: ",
        ),
    ],
)
def test_form_that_cannot_be_used_is_one_message(client, body, headers, message):
    response = client.post("/predict", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith(message)
    assert client.post("/predict", files={"photo": photo()}).status_code == 200


def test_what_can_be_read_can_be_asked_for_its_head(client):
    for path in (
        "/",
        "/metrics",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/student",
        "/v2/models/student/ready",
    ):
        head, whole = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert client.head("/predict").status_code == 200
    assert client.head("/v2/models/other").status_code == 404


class Held:
    """The model, which computes nothing until it is let go."""

    def __init__(self, model):
        self._model, self.begun, self.go_on = model, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._model, name)

    def of_squares(self, squares):
        self.begun.set()
        assert self.go_on.wait(20)
        return self._model.of_squares(squares)


def test_more_requests_than_allowed_are_503_and_others_are_answered(model):
    held, statuses = Held(model), []
    with TestClient(PhotoServer(held, name="student", most=LIMITS)) as client:
        threads = [
            threading.Thread(target=lambda: statuses.append(client.post("/predict", content=photo()).status_code))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert held.begun.wait(10)
        end = time.monotonic() + 10
        while "serve_in_flight 4.0" not in client.get("/metrics").text.replace(
            "serve_in_flight 5.0", "serve_in_flight 4.0"
        ):
            assert time.monotonic() < end
        refused = client.post("/predict", content=photo())
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert client.get("/v2/health/ready").status_code == 200, "a busy server is no dead one"
        held.go_on.set()
        for thread in threads:
            thread.join(20)
    assert statuses == [200] * 4


def test_a_request_that_takes_too_long_is_503(model):
    held = Held(model)
    most = ServerLimits(batch_size=1, wait_ms=0, timeout_s=0.2)
    with TestClient(PhotoServer(held, name="student", most=most)) as client:
        response = client.post("/predict", content=photo())
        assert response.status_code == 503
        assert response.json() == {"error": "not answered within 0.2 s; try again"}
        held.go_on.set()
        assert client.post("/predict", content=photo()).status_code == 200


def test_a_model_that_fails_is_500_and_logged(model, caplog):
    class Broken(Held):
        def of_squares(self, squares):
            raise RuntimeError("the graph is broken")

    with TestClient(PhotoServer(Broken(model), name="student", most=LIMITS), raise_server_exceptions=False) as client:
        response = client.post("/predict", content=photo())
        assert response.status_code == 500
        assert 'serve_requests_total{route="/predict",status="500"} 1.0' in client.get("/metrics").text
    assert "the graph is broken" in caplog.text


def test_client_that_leaves_is_no_failure_of_server(model, caplog):
    server, sent = PhotoServer(model, name="student", most=LIMITS), []
    received = [{"type": "http.request", "body": photo()[:300], "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return received.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
    with caplog.at_level("INFO", logger="trainer.predict.serving.server"):
        asyncio.run(server(scope, receive, send))
    assert sent[0]["status"] == 400
    (record,) = [record for record in caplog.records if record.name == "trainer.predict.serving.server"]
    assert record.levelname == "INFO"
    assert "the client left before its whole body had come" in record.getMessage()


def test_metrics_and_the_log_line(client, model, caplog):
    with caplog.at_level("INFO", logger="trainer.predict.serving.server"):
        assert client.post("/predict", content=photo()).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trainer.predict.serving.server"]
    size = f"{len(photo()):,}"
    assert re.fullmatch(rf"POST /predict 200 \d+\.\d ms {size} bytes '\d' [01]\.\d+ {model.version}", line)
    shown = client.get("/metrics").text
    for part in (
        f'serve_model_info{{architecture="vit_tiny_patch16_224",name="student",variant="fp32",version="{model.version}"}} 1.0',
        "serve_batch_photos_bucket",
        'serve_request_seconds_count{route="/predict"}',
        "process_resident_memory_bytes",
    ):
        assert part in shown
    assert 'route="/nothing"' not in shown, "endless paths are one route"


def test_predictions_are_logged_by_their_share(model):
    for share, low, high in ((1.0, 40, 40), (0.5, 5, 35)):
        stream = io.StringIO()
        server = PhotoServer(model, name="student", most=LIMITS, log=PredictionLog(stream, share=share))
        with TestClient(server) as client:
            said = [client.post("/predict", content=photo(seed)).json() for seed in range(40)]
        rows = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert low <= len(rows) <= high
        known = {(one["labels"][0]["label"], one["labels"][0]["probability"]) for one in said}
        assert {(row["label"], row["probability"]) for row in rows} <= known
        assert {row["version"] for row in rows} == {model.version}


def test_photos_are_kept_only_where_folder_is_given(model, tmp_path):
    sent = [photo(seed) for seed in range(3)]
    for folder in (None, tmp_path):
        stream = io.StringIO()
        server = PhotoServer(model, name="student", most=LIMITS, log=PredictionLog(stream, share=1, photos=folder))
        with TestClient(server) as client:
            for one in sent:
                assert client.post("/predict", content=one).status_code == 200
        rows = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [row.get("photo") for row in rows] == [folder and hashlib.sha256(one).hexdigest() for one in sent]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        row["photo"]: one for row, one in zip(rows, sent, strict=True)
    }


def test_an_unwritable_log_delays_no_answer(model, tmp_path, caplog):
    with Path("/dev/full").open("w", encoding="utf-8") as stream:
        server = PhotoServer(model, name="student", most=LIMITS, log=PredictionLog(stream, share=1))
        with TestClient(server) as client:
            assert client.post("/predict", content=photo()).status_code == 200
        with contextlib.suppress(OSError):
            stream.close()
    assert "a prediction is not logged: [Errno 28] No space left on device" in caplog.text


def test_another_model_stands_beside(model, trained_digits):
    teacher = load_model(trained_digits.teacher)
    server = PhotoServer(
        model, name="student", most=LIMITS, beside=lambda content, top: teacher.predictions([content], top=top)[0]
    )
    with TestClient(server) as client:
        beside = client.post("/predict?top=2", content=photo()).json()["beside"]
    (expected,) = teacher.predictions([photo()], top=2)
    assert {one["label"]: one["probability"] for one in beside["labels"]} == pytest.approx(dict(expected.labels))
    assert "answer" not in beside, "a model directory has no tags"

"""The page in a real browser: by pointer, keyboard, drop, on a phone and in the dark; what it shows of hostile names and photos."""

import socket
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from PIL import Image

import docs.pictures
from trainer import load_model
from trainer.models.served_student.student import Prediction
from trainer.predict.serving.server import PhotoServer, ServerLimits

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(docs.pictures.browser() is None, reason="needs Chromium, such as Debian's package chromium"),
]


@contextmanager
def running(server):
    """Serve in a thread; yields the address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        web = uvicorn.Server(uvicorn.Config(server, log_config=None))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            web.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def address(exported):
    model = load_model(exported, threads=1)
    with running(PhotoServer(model, name="student", most=ServerLimits())) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with docs.pictures.chromium() as started:
        yield started


@contextmanager
def opened(browser, address, **look):
    """A page, all of whose requests go to the server, and whose script raises nothing."""
    page = browser.new_page(**look)
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert {url for url in asked if not url.startswith((address, "blob:"))} == set()
    assert failed == []


@pytest.fixture
def photo(trained_digits, tmp_path):
    """A digit of the test split, as large as a photo."""
    file = tmp_path / "photo.png"
    Image.fromarray(trained_digits.images[0].permute(1, 2, 0).numpy()).resize(
        (240, 240), Image.Resampling.NEAREST
    ).save(file)
    return file


def shown(page):
    """The labels and shares of the first list, once it is there."""
    page.wait_for_selector("#answers li")
    return [row.inner_text().split("\n") for row in page.query_selector_all("#answers section:first-child li")]


def expected(exported, photo):
    model = load_model(exported, threads=1)
    return model.predictions([photo], top=5)[0]


@pytest.mark.parametrize(
    "look",
    [
        {"viewport": {"width": 1200, "height": 800}},
        {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"},
    ],
    ids=["desktop", "phone in the dark"],
)
def test_chosen_photo_gets_its_bars_and_what_is_known(browser, address, exported, photo, look, tmp_path):
    said = expected(exported, photo)
    with opened(browser, address, **look) as page:
        page.set_input_files("#file", photo)
        rows = shown(page)
        assert [label for label, _ in rows] == list(said.labels)
        for (_, share), probability in zip(rows, said.labels.values(), strict=True):
            assert float(share.removesuffix(" %")) == pytest.approx(100 * probability, abs=0.51)
        widths = [page.evaluate("(bar) => bar.offsetWidth", bar) for bar in page.query_selector_all("#answers li i")]
        assert widths == sorted(widths, reverse=True)
        known = page.inner_text("dl").split("\n")
        assert known[known.index("answer") + 1].startswith(f"{said.answer} (")
        assert "shape" in known
        assert page.inner_text("#status").startswith("answered in ")
        assert page.is_visible("#photo")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off"
        page.screenshot(path=tmp_path / "page.png", full_page=True)


def test_photos_are_chosen(browser, address, photo):
    with opened(browser, address) as page:
        page.on("filechooser", lambda _: None)  # the browser reports none that opens before it has heard of a listener
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "file"
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        chooser.value.set_files(photo)
        assert len(shown(page)) == 5

    put = """([kind, bytes]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "photo.png", { type: "image/png" }));
        const event = kind === "drop" ? new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent(kind, { clipboardData: data, bubbles: true });
        document.body.dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        with opened(browser, address) as page:
            page.evaluate(put, [kind, list(photo.read_bytes())])
            assert len(shown(page)) == 5


def test_refusal_is_shown_and_next_photo_is_answered(browser, address, photo, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no photo")
    with opened(browser, address) as page:
        page.set_input_files("#file", tmp_path / "broken.png")
        page.wait_for_selector("#status.bad")
        assert page.inner_text("#status") == "not a photo that can be used: no image that can be read: a text file"
        assert page.is_hidden("#photo"), "the browser cannot show it either"
        page.set_input_files("#file", photo)
        assert len(shown(page)) == 5
        assert page.is_visible("#photo")


NGINX = (
    "<html>\r\n<head><title>{0}</title></head>\r\n<body>\r\n<center><h1>{0}</h1></center>\r\n"
    "<hr><center>nginx/1.22.1</center>\r\n</body>\r\n</html>\r\n"
)
"""What nginx 1.22 answers by itself, of type text/html."""


@pytest.mark.parametrize(
    ("status", "title", "shown"),
    [
        (413, "413 Request Entity Too Large", "the proxy before the server refuses photos of this size (413)"),
        (502, "502 Bad Gateway", "the proxy before the server answered instead of it (502)"),
    ],
)
def test_a_proxy_that_answers_itself_is_reported(browser, address, photo, status, title, shown):
    with opened(browser, address) as page:
        page.route(
            "**/predict", lambda route: route.fulfill(status=status, content_type="text/html", body=NGINX.format(title))
        )
        page.set_input_files("#file", photo)
        page.wait_for_selector("#status.bad")
        assert page.inner_text("#status") == shown


def test_a_server_that_is_gone_is_reported(browser, exported, photo):
    model = load_model(exported, threads=1)
    with running(PhotoServer(model, name="student", most=ServerLimits())) as address:
        page = browser.new_page()
        page.goto(address)
    page.set_input_files("#file", photo)
    page.wait_for_selector("#status.bad")
    assert page.inner_text("#status") == "the server does not answer"
    page.close()


def test_the_teacher_stands_beside_and_names_are_text(browser, exported, trained_digits, photo):
    hostile = "<img src=x onerror=document.title='hostile'>"
    model, teacher = load_model(exported, threads=1), load_model(trained_digits.teacher)

    def beside(content, top):
        (said,) = teacher.predictions([content], top=top)
        return Prediction(labels={hostile: 0.7, **said.labels})

    with (
        running(PhotoServer(model, name="student", most=ServerLimits(), beside=beside)) as address,
        opened(browser, address) as page,
    ):
        page.set_input_files("#file", photo)
        page.wait_for_selector("#answers section:nth-child(2) li")
        assert [heading.inner_text() for heading in page.query_selector_all("section > h2:first-child")] == [
            "Student",
            "Teacher",
        ]
        assert hostile in page.inner_text("#answers section:nth-child(2)")
        assert page.title() == "Ask the student"

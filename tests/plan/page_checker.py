"""What a page of the planner must be, whatever is on it."""

import contextlib
import html.parser

import chromium


class Checker(html.parser.HTMLParser):
    """Every tag is closed in order; what a page would load or run is noted."""

    VOID = ("meta", "link", "input", "line", "polyline", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.scripts, self.ids = [], [], 0, []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] if tag not in self.VOID else []
        self.scripts += tag == "script"
        for name, value in attributes:
            self.loads += [value] if name in ("src", "href", "action", "data", "srcset", "poster") else []
            self.ids += [value] if name == "id" else []
            assert not name.startswith("on")

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(page: str) -> None:
    """It is whole, asks nothing of a network and runs its own script alone."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == [] and checker.scripts == 1 and checker.loads == ["data:,"]
    assert len(set(checker.ids)) == len(checker.ids)
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page


@contextlib.contextmanager
def shown(browser: str, folder, text: str, heading: str):
    """The page in a browser, once it is whole and says what it is of."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    with chromium.browser(browser, folder / "profile") as page:
        page.open(path.as_uri())
        assert number(page, "footer") == 1
        assert page.value("document.querySelector('h1').textContent") == heading
        yield page


def number(page, selector: str) -> int:
    """How many there are of something."""
    return page.value(f"document.querySelectorAll({selector!r}).length")


def look(page) -> None:
    """No width of a window needs scrolling sideways, light and dark differ, and nothing went wrong on the way."""
    for width in (1280, 400):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        wide = "[...document.querySelectorAll('.facts dd')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert page.value(wide) == 0  # a figure that leaves its box
    colours = []
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]
    assert page.errors == [] and set(page.asked) <= {page.value("location.href"), "data:,"}

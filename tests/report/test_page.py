"""The report page, read as a browser reads it: with chromium where there is one, by html.parser everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.figures import DISTRIBUTIONS, FIGURES
from maxtext_paged.report.page import JobState, report_page
from maxtext_paged.report.recorder import Recorder
from tests.recorded_job import HOSTILE, busy_recorder

VOID = {"meta", "link", "line", "rect", "path", "br"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Element:
    """One element: what is said of it, and the text below it."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str, **wanted: str) -> list[Element]:
        """Elements of a kind below it, in order."""
        return [one for one in self.below() if one.tag == tag and wanted.items() <= one.attributes.items()]

    def below(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.below()


class Page(HTMLParser):
    """The tree of a page; an end tag that fits nothing is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert len(self._open) == 1, [one.tag for one in self._open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attributes))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:  # as chromium writes what is in an SVG
            return
        assert self._open[-1].tag == tag, (self._open[-1].tag, tag)
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


STATE = JobState(
    "interrupted",
    "SIGTERM; 50 of 150 rows </p><script>document.title='pwned'</script>",
    "run the same command with --resume",
    {"Command": {"command": "maxtext-paged generate '<b>.yml' -i \"x'>\" -o y", "<i>name": "& value"}},
)


def page_bytes() -> bytes:
    return report_page(busy_recorder(), STATE, written_at=1.7e9)


def as_chromium_has_it(page: bytes, place: Path) -> tuple[str, str]:
    """The page's tree after a browser has loaded it, and what the browser logged."""
    (place / "page.html").write_bytes(page)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]
    words += [f"--user-data-dir={place / 'profile'}", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000"]
    words += ["--dump-dom", (place / "page.html").as_uri()]
    assert CHROMIUM is not None
    ended = subprocess.run([CHROMIUM, *words], capture_output=True, check=True, timeout=120)
    return ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def raw() -> bytes:
    return page_bytes()


@pytest.fixture(scope="module", params=["parsed", "in a browser"] if CHROMIUM else ["parsed"])
def page(request: pytest.FixtureRequest, raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> Element:
    """The page as html.parser reads it, and where there is a chromium once more as it has it: one set of promises."""
    text = raw.decode()
    if request.param == "in a browser":
        text, log = as_chromium_has_it(raw, tmp_path_factory.mktemp("browser"))
        assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    return Page(text).root


def test_nothing_in_the_page_runs_or_is_fetched(page: Element) -> None:
    elements = list(page.below())
    assert not {one.tag for one in elements} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "a",
        "form",
        "base",
        "image",
    }
    for one in elements:
        for name, value in one.attributes.items():
            assert not name.lower().startswith("on"), (one.tag, name)
            assert name not in ("src", "href", "action", "xlink:href") or value == "data:,", (one.tag, name, value)
    [policy] = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert (policy.attributes["content"] or "").startswith("default-src 'none'; style-src 'unsafe-inline'")
    [style] = page.all("style")
    assert "url(" not in style.text and "@import" not in style.text
    [title] = page.all("title")[:1]
    assert title.text == "maxtext-paged report: interrupted, 121 of 150 rows"


def test_ids_and_messages_are_shown_as_the_text_that_they_are(page: Element) -> None:
    for table in ("slowest-rows", "failed-rows"):
        shown = {cell.text for cell in page.all("table", id=table)[0].all("bdi")}
        for hostile in HOSTILE:
            plain = hostile.replace("\x00", "\\u0000").replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")
            assert plain.replace("\ud800", "\\ud800") in shown, (table, hostile)
    assert "the model's logits are <not> finite" in shown
    [reason] = page.all("p", id="reason")
    assert reason.text == STATE.reason
    [table] = page.all("table", **{"class": "facts"})
    facts = {row.all("th")[0].text: row.all("td")[0].text for row in table.all("tr")}
    assert facts == STATE.facts["Command"]


def test_every_chart_is_drawn_and_named_and_has_axes_with_units(page: Element) -> None:
    charts = [one for one in page.all("figure") if one.attributes.get("id")]
    assert len(charts) == 6 + len(DISTRIBUTIONS)
    for chart in charts:
        [drawing] = chart.all("svg")
        names = {
            one.attributes["id"]: one.text for one in (*drawing.all("title"), *drawing.all("desc")) if one.attributes
        }
        assert drawing.attributes["role"] == "img"
        labels = (drawing.attributes["aria-labelledby"] or "").split()
        assert len(labels) == 2 and all(len(names[label]) > 2 for label in labels)
        assert chart.all("path") or chart.all("rect"), names
        axes = [one.text for one in drawing.all("text", **{"class": "axis"})]
        assert len(axes) == 2 and all(axes), axes
        assert len(drawing.all("text", **{"class": "tick"})) >= 4
        for text in drawing.all("text"):
            assert 0 <= float(text.attributes["x"] or "nan") <= 640 and 0 <= float(text.attributes["y"] or "nan") <= 220


def test_ids_of_elements_are_unique_and_labels_name_elements_that_are_there(page: Element) -> None:
    ids = [one.attributes["id"] for one in page.below() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    for one in page.below():
        assert set((one.attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_the_page_has_every_part_and_says_how_the_job_ended(page: Element) -> None:
    headings = [one.text for one in page.all("h2")]
    parts = ["Over time", "Distributions", "Attention and dispatch", "Failed rows", "Slowest rows", "Environment"]
    assert headings == [*parts, "All figures"]
    assert "interrupted" in page.all("h1")[0].text
    assert page.all("p", id="resumable")[0].text == "To go on: run the same command with --resume"
    assert "20 of the file's 150 rows had their record before" in page.all("p", id="earlier")[0].text
    causes = [[cell.text for cell in row.all("td")] for row in page.all("table", id="causes")[0].all("tr")[1:]]
    assert causes == [["fused", "fused", "300"], ["gather", "below paged_split_kv_min_tokens", "90"]]
    assert "150 rows: 91 ok, 10 failed, 20 before (1 failed), 29 not answered" in page.all("pre", id="summary")[0].text


def test_the_table_of_figures_holds_every_figure(page: Element) -> None:
    rows = [
        [cell.text for cell in (*row.all("th"), *row.all("td"))]
        for row in page.all("table", id="all-figures")[0].all("tr")
    ]
    assert [row[0] for row in rows[1:]] == [f"{figure.part}.{figure.name}" for figure in FIGURES]
    values = {row[0]: row[1] for row in rows}
    assert values["run.rows"] == "ok 91, failed 10" and values["run.sampled_tokens"] == "2,000"
    assert values["file.rows"] == "ok 110, failed 11, missing 29"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page is read by html.parser alone")
def test_a_script_that_ran_would_be_seen_in_what_the_browser_logs(tmp_path: Path) -> None:
    text, log = as_chromium_has_it(
        b"<!doctype html><script>document.title = 'ran'; console.log('ran')</script>", tmp_path
    )
    assert "<title>ran</title>" in text and "CONSOLE" in log


def test_tables_have_no_more_rows_than_are_kept(raw: bytes) -> None:
    slowest = Page(raw.decode()).root.all("table", id="slowest-rows")[0]
    assert len(slowest.all("tr")) == 51


def test_a_page_about_nothing_is_whole() -> None:
    page = Page(report_page(Recorder(JobCounts()), JobState(), written_at=0.0).decode()).root
    assert page.all("h1")[0].text.endswith("running")
    assert all("nothing was recorded" in one.text for one in page.all("figure") if one.attributes.get("id"))
    assert "None." in page.text and "No row ran to its end." in page.text


def test_the_page_is_not_large_however_long_the_job() -> None:
    assert len(page_bytes()) < 400_000


def test_dark_and_printed_pages_have_colours_of_their_own(raw: bytes) -> None:
    style = Page(raw.decode()).root.all("style")[0].text
    light, dark = (
        dict(re.findall(r"(--[\w]+): (#[0-9a-f]{6})", part)) for part in style.split("prefers-color-scheme")[:2]
    )
    printed = dict(re.findall(r"(--[\w]+): (#[0-9a-f]{3,6})", style.split("@media print")[1]))
    dark = dict(re.findall(r"(--[\w]+): (#[0-9a-f]{6})", style.split("prefers-color-scheme: dark")[1].split("* {")[0]))
    assert light.keys() == dark.keys() and printed.keys() >= light.keys()
    for colours, page_colour in ((light, light["--page"]), (dark, dark["--page"])):
        for name in ("--text", "--soft", "--a", "--b", "--bad", "--good"):
            assert contrast(colours[name], page_colour) >= 3.5, (name, colours[name])
        assert (
            contrast(colours["--text"], colours["--card"]) >= 7
            and contrast(colours["--soft"], colours["--card"]) >= 4.5
        )


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)

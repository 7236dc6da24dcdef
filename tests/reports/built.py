"""Helpers for tests of pages: build a small page, and read it."""

import base64
import gzip
import re
from html.parser import HTMLParser

from synthetic_runs import study_folder

from reports import build, explorer

EVIL = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync")


def build_small(place, *options, **kwargs):
    """Build the page of one system on one environment; returns both pages."""
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120, **kwargs)
    assert build.main(["small", *options]) == 0
    return pages(place, "small")


def pages(place, name="quickstart"):
    """Return the HTML page and the Markdown page of a study."""
    folder = place / "site" / name
    return [(folder / page).read_text() for page in ("index.html", "README.md")]


def own(html):
    """Return the page without its images, their data, and the library of the interactive chart."""
    text = re.sub(r'src="data:[^"]*"', "", html).replace(explorer.bundle(), "")
    return re.sub(r'(<script type="application/gzip" [^>]*>)[^<]*', r"\1", text)


def stored_data(html):
    """Return the data of the figures, by name."""
    found = re.findall(r'<script type="application/gzip" id="data-(\w+)">([^<]*)</script>', html)
    return {name: gzip.decompress(base64.b64decode(text)).decode() for name, text in found}


def texts(place, name="quickstart"):
    """Return the text of both pages that a reader sees."""
    html, markdown = pages(place, name)
    return visible_text(html), markdown


def section(markdown, title):
    """Return a section of a Markdown page."""
    return markdown.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(text):
    """Return the cells of the tables' rows in Markdown, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def visible_text(html):
    """Return the text that a browser shows, white space joined."""

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.parts, self.hidden = [], 0

        def handle_starttag(self, tag, attrs):
            self.hidden += tag in ("script", "style")

        def handle_endtag(self, tag):
            self.hidden -= tag in ("script", "style")

        def handle_data(self, data):
            if not self.hidden:
                self.parts.append(data)

    reader = Reader()
    reader.feed(html)
    return " ".join(" ".join(reader.parts).split())

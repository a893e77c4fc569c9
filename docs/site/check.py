"""Checks the built site: links and anchors lead somewhere, and search finds the functions.

The build reads links of Markdown. This reads the pages that it wrote, as a browser does:
`python docs/site/check.py [FOLDER]`.
"""

import json
import re
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

PARTS = ("layers", "layout", "moe", "schedule", "testing")
PACKAGES = ("jaxpar", *(f"jaxpar.{part}" for part in PARTS))
HOST = "http://site"
# Words that a reader types, and titles of entries that the search must then offer.
SEARCHES = {
    "all_gather_matmul": ["all_gather_matmul"],
    "reduce_scatter": ["reduce_scatter", "matmul_reduce_scatter"],
    "matmul": ["all_gather_matmul", "matmul_all_reduce", "grouped_matmul"],
    "cross_entropy": ["vocab_parallel_cross_entropy"],
    "linear": ["column_parallel_linear", "fsdp_linear", "row_parallel_linear"],
    "mesh": ["make_mesh"],
}


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        keys = ("id", "name") if tag == "a" else ("id",)
        self.anchors += [found[key] for key in keys if found.get(key)]
        self.links += [found[key] for key in ("href", "src") if found.get(key) is not None]
        loaded = found.get("href") if tag == "link" else found.get("src")
        if loaded is not None and tag not in ("a", "iframe"):
            self.loads.append(loaded)


@cache
def read(path):
    return Links(path.read_text())


def dead_links(folder):
    """Yields each link of a page that leads nowhere, and each file that is loaded from outside."""
    for page in sorted(folder.rglob("*.html")):
        name = page.relative_to(folder).as_posix()
        base = f"{HOST}/{name.removesuffix('index.html')}"
        for link in read(page).links:
            url = urlsplit(urljoin(base, link))
            if f"{url.scheme}://{url.netloc}" != HOST:
                continue
            path = folder / unquote(url.path).lstrip("/")
            if url.path.endswith("/"):
                path /= "index.html"
            if not path.is_file():
                yield f"{name}: {link} is no file"
            elif path.suffix == ".html" and not has_anchor(read(path), url.fragment):
                yield f"{name}: {link} is no anchor"
        for link in read(page).loads:
            if not urljoin(base, link).startswith((HOST, "data:")):
                yield f"{name}: {link} is loaded from outside"


def has_anchor(page, fragment):
    return fragment in ("", "top") or {fragment, unquote(fragment)} & {*page.anchors}


def missing_entries(folder):
    """Yields each public name that the pages of the API have no entry for, or two."""
    pages = folder.glob("docs/api/*/index.html")
    anchors = Counter(anchor for page in pages for anchor in read(page).anchors)
    for package in PACKAGES:
        for name in import_module(package).__all__:
            if anchors[f"{package}.{name}"] != 1:
                yield f"{package}.{name} has {anchors[f'{package}.{name}']} entries"


def failed_searches(folder):
    """Yields each word whose search does not offer the entry that it should."""
    index = json.loads((folder / "search/search_index.json").read_text())
    titles = [re.sub("<.*?>.*?</.*?>", "", entry["title"]).strip() for entry in index["docs"]]
    separator = re.compile(index["config"]["separator"])
    for word, names in SEARCHES.items():
        parts = {*separator.split(word)}
        offered = {title for title in titles if parts <= {*separator.split(title)}}
        for name in names:
            if name not in offered:
                yield f"a search for {word} does not offer {name}"


def main(folder="site"):
    folder = Path(folder)
    pages = len([*folder.rglob("*.html")])
    assert pages > 1, f"{folder} has no pages: build the site first"
    faults = [
        *dict.fromkeys(dead_links(folder)),
        *missing_entries(folder),
        *failed_searches(folder),
    ]
    print(*faults, f"{pages} pages, {len(faults)} faults", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

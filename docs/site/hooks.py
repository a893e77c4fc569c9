"""Brings the repository's pages into the site, under the paths that links between them have."""

import os
import posixpath
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File

from jaxpar.arguments import types as _types  # noqa: F401  fills SHOWN
from jaxpar.arguments.lazy_names import SHOWN
from jaxpar.axis import axis as _axis  # noqa: F401  likewise

ROOT = Path(__file__).parents[2]
# Where a page of the site is, if not where its path says.
PLACES = {"docs/index.md": "index.html", "README.md": "overview/index.html"}
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"),
    *("docs/*.md", "docs/*.png", "docs/api/*.md", "docs/questions/*.md", "docs/questions/*.png"),
    *("notebooks/*.md", "notebooks/*.ipynb"),
    *("benchmarks/*.md", "benchmarks/*/README.md", "benchmarks/*/*.png"),
    *("benchmarks/*.py", "benchmarks/language_model/*.py", "examples/*.py"),
    *("src/jaxpar/layout/README.md", "src/jaxpar/pipeline/README.md", "src/jaxpar/ring/README.md"),
    "src/jaxpar/pipeline/schedule.png",
)
log = get_plugin_logger("site")


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files, config):
    """Adds every page by its path in the repository."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            to = (config.site_dir, config.use_directory_urls)
            files.append(File(name, str(ROOT), *to, dest_uri=PLACES.get(name)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Writes what the code says in the place of a comment: help, a type, or the version."""
    if page.file.src_uri.startswith("docs/api/"):
        page.meta["search"] = {"boost": 4}  # a name finds its entry before pages that use it
    markdown = re.sub(r"<!-- help ?(\w*) -->", lambda found: _help(found[1]), markdown)
    markdown = re.sub(r"<!-- type (\w+) -->", lambda found: _type(found[1]), markdown)
    return markdown.replace("<!-- version -->", _version())


def on_page_content(html, page, config, files):
    """Lets long code in tables wrap, and repairs links and the table of contents of notebooks."""
    html = re.sub("<table>.*?</table>", _wrapping, html, flags=re.S)
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    # Headings lose their code in the table of contents that the plugin makes.
    headings = re.findall(r'<h[1-6][^>]*? id="(.*?)"[^>]*>(.*?)<a class="anchor-link"', html, re.S)
    for (anchor, text), item in zip(headings, _flat(page.toc), strict=True):
        item.id, item.title = anchor, re.sub("<.*?>", "", text).strip()

    html = html.replace('class="anchor-link"', 'class="headerlink"')  # which search leaves out

    def resolved(found):
        url = urlsplit(found[2])
        if url.scheme or url.netloc or not url.path:
            return found[0]
        folder = posixpath.dirname(page.file.src_uri)
        to = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, url.path)))
        if to is None:
            log.warning(f"{page.file.src_uri} has a link to {found[2]}, which is no page")
            return found[0]
        anchor = f"#{url.fragment}" if url.fragment else ""
        return f'{found[1]}"{to.url_relative_to(page.file)}{anchor}"'

    return re.sub(r'(<(?:a|img)\b[^>]*?\b(?:href|src)=)"([^"]*)"', resolved, html)


def _wrapping(table):
    return re.sub("<code>(?=[^<]{30,}</code>)(?=[^<]* )", '<code class="long">', table[0])


def _flat(toc):
    for item in toc:
        yield item
        yield from _flat(item.children)


def _help(command):
    words = [sys.executable, "-m", "jaxpar", *([command] if command else []), "--help"]
    env = os.environ | {"COLUMNS": "90"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    title = f"## jaxpar {command}\n" if command else "## All commands\n"
    return f"{title}\n```text\n{done.stdout}```\n"


def _type(name):
    choices = re.findall(r"'(.*?)'", SHOWN[name])
    text = " | ".join(f'"{choice}"' for choice in choices) or SHOWN[name]
    if choices:
        text = textwrap.fill(text.replace(" | ", " |\xa0"), 68, break_on_hyphens=False)
        text = "(\n" + textwrap.indent(text.replace("\xa0", " "), "    ") + "\n)"
    return f"```python\n{name} = {text}\n```\n"


def _version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

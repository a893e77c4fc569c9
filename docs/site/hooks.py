"""Brings the repository's pages into the site, under the paths that links between them have."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"),
    *("docs/*.md", "docs/*.png", "docs/api/*.md", "notebooks/README.md", "notebooks/*.ipynb"),
    *("benchmarks/*.md", "benchmarks/*/README.md", "benchmarks/*/*.png"),
    *("benchmarks/*.py", "benchmarks/language_model/*.py", "examples/*.py"),
    *("src/jaxpar/layout/README.md", "src/jaxpar/ring/README.md"),
)


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files, config):
    """Adds every page by its path in the repository."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            file = File(name, str(ROOT), config.site_dir, config.use_directory_urls)
            files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Puts what `jaxpar COMMAND --help` prints in the place of a comment that names it."""
    return re.sub(r"<!-- help ?(\w*) -->", lambda found: _help(found.group(1)), markdown)


def _help(command):
    words = [sys.executable, "-m", "jaxpar", *([command] if command else []), "--help"]
    env = os.environ | {"COLUMNS": "90"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    title = f"## jaxpar {command}\n" if command else "## All of them\n"
    return f"{title}\n```text\n{done.stdout}```\n"

"""What mkdocs does not do by itself for this site.

In: the configuration and the pages. Out: a menu without pages that do not exist yet, and the documents of the
repository's top folder as pages, their links led to where they are on the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: pages that are documents of the top folder.
TOP = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def on_config(config: Any) -> Any:
    """Leave out of the menu what is not there."""
    config.nav = _existing(config.nav, Path(config.docs_dir))
    return config


def _existing(entry: Any, docs: Path) -> Any:
    if isinstance(entry, list):
        return [found for one in entry if (found := _existing(one, docs))]
    if isinstance(entry, dict):
        return {title: found for title, inner in entry.items() if (found := _existing(inner, docs))}
    return entry if entry in TOP or (docs / entry).exists() else None


def on_files(files: Any, config: Any) -> Any:
    """Add the documents of the top folder."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for page, document in TOP.items():
        files.append(File.generated(config, page, content=linked((root / document).read_text())))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead a page's links to documents of the top folder to their pages."""
    for page, document in TOP.items():
        markdown = re.sub(rf"\]\(\.\./((?:\.\./)*){re.escape(document)}", rf"](\g<1>{page}", markdown)
    return markdown


def linked(text: str) -> str:
    """A document's links, as they are on the site."""
    text = text.replace("](docs/", "](")
    for page, document in TOP.items():
        text = text.replace(f"]({document})", f"]({page})")
    return re.sub(r"\[([^\]]+)\]\((?:LICENSE|README\.md)\)", r"\1", text)

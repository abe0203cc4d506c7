"""Hooks of mkdocs: README, CONTRIBUTING and the examples lie outside docs/, and become pages of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".ipynb": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in _PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        # In docs/, links of these pages to docs/X are links to X, and other files lie one folder up.
        text = re.sub(r"\]\((?!https?:|#|docs/)([^)]+)\)", r"](../\1)", text).replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for source in sorted((ROOT / "examples").iterdir()):
        if source.suffix in _LANGUAGES:
            code = source.read_text(encoding="utf-8")
            text = f"# {source.name}\n\n```{_LANGUAGES[source.suffix]}\n{code}```\n"
            files.append(File.generated(config, f"examples/{source.name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ at their pages. Links to other files become plain text."""
    depth = page.file.src_uri.count("/")

    def point(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        outside = "../" * (depth + 1)
        if not target.startswith(outside):
            return match[0]
        path, _, anchor = target.removeprefix(outside).partition("#")
        link = _PAGES.get(path) or (f"{path}.md" if path.startswith("examples/") and "." in path else None)
        if link is None:
            return text
        return f"[{text}]({'../' * depth}{link}{anchor and '#'}{anchor})"

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", point, markdown)

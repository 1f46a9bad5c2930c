"""Links from the docs into the repository: what they lead to becomes a page, or a file, of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# The target of a link that is neither an address nor a heading of the same page, and what follows a "#".
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".toml": "toml", "": "text"}


def uri_of(path: Path) -> str:
    """Where the site has a file of the repository, as mkdocs names its sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"source/{path.relative_to(ROOT).as_posix()}"
    return uri + ".md" if path.suffix in LANGUAGES else uri


def linked(text: str, path: Path) -> list[Path]:
    """Files of the repository outside the docs that a page's text leads to."""
    found = [(path.parent / target).resolve() for target in LINK.findall(text)]
    return [file for file in found if file.is_file() and file.is_relative_to(ROOT) and not file.is_relative_to(DOCS)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [Path(page.abs_src_path) for page in files.documentation_pages() if page.abs_src_path]
    waiting = [file for page in pages for file in linked(page.read_text(), page)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(uri_of(path)) is not None:
            continue
        if path.suffix in LANGUAGES:
            name = path.relative_to(ROOT).as_posix()
            content = f"# {name}\n\n````{LANGUAGES[path.suffix]}\n{path.read_text()}\n````\n"
            files.append(File.generated(config, uri_of(path), content=content))
        else:
            files.append(File.generated(config, uri_of(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += linked(path.read_text(), path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to where the site has its file."""
    uri = page.file.src_uri
    path = ROOT / uri.removeprefix("source/") if uri.startswith("source/") else DOCS / uri
    if path.suffix != ".md" or not path.is_file():
        return markdown  # a page of code

    def target(match: re.Match[str]) -> str:
        file = (path.parent / match[1]).resolve()
        if not file.is_file() or not file.is_relative_to(ROOT):
            return match[0]
        return "](" + posixpath.relpath(uri_of(file), posixpath.dirname(uri) or ".")

    return LINK.sub(target, markdown)

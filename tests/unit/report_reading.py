"""What a report says, read back: its page as elements and text, its table as a terminal has it, and
one section of it.
"""

from __future__ import annotations

import io
from html.parser import HTMLParser

from rich.console import Console

from trtllm_kvmap.evaluate.report.report import Report, table
from trtllm_kvmap.evaluate.report.section import Section
from trtllm_kvmap.evaluate.report.sections import sections

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input", "path", "rect", "line", "use"}


class Page(HTMLParser):
    """Keeps the text and every attribute, and counts open elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(written: str) -> Page:
    page = Page()
    page.feed(written)
    page.close()
    return page


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(report))
    return console.file.getvalue()


def section(report: Report, title: str) -> Section:
    (found,) = [each for each in sections(report) if each.title == title]
    return found

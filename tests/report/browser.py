"""Opens one page in Chromium (QtWebEngine, offscreen) and asks it questions; runs as a process of
its own, so that a browser that dies is an exit status.

    python browser.py REQUEST      REQUEST is JSON: {"page", "widths", "dark", "script", "pdf"}

Prints JSON: the browser's version, what the console said, which addresses were asked for, the
value of ``script`` at each width, and of each printed sheet its size, its text, how high the first
line is and how far all reaches (points). No network: only the page's own file may be read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # it may not be had in a container, as root
HEIGHT = 900
PATIENCE_MS = 120_000


def main() -> None:
    request = json.loads(sys.argv[1])
    flags = ["--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    if request["dark"]:
        flags.append("--blink-settings=preferredColorScheme=0")
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(flags)

    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtPdf import QPdfDocument
    from PySide6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineUrlRequestInterceptor,
        qWebEngineChromiumVersion,
        qWebEngineVersion,
    )
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    said: list[str] = []
    asked: list[str] = []
    found: dict[str, Any] = {}

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802
            said.append(f"{level.name}: {message} (line {line})")

    class Watch(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info):  # noqa: N802
            url = info.requestUrl().toString()
            asked.append(url[:200])
            if not url.startswith(("file:", "data:")):
                info.block(True)

    application = QApplication(sys.argv[:1])
    view, watch = QWebEngineView(), Watch()
    page = Page(view)
    page.profile().setUrlRequestInterceptor(watch)
    view.setPage(page)
    widths = list(request["widths"])

    def next_width() -> None:
        if not widths:
            if request["pdf"]:
                page.pdfPrintingFinished.connect(lambda *_: finish())
                page.printToPdf(request["pdf"])
            else:
                finish()
            return
        width = widths.pop(0)
        view.resize(width, HEIGHT)

        def measured(value: Any) -> None:
            found[str(width)] = json.loads(value)
            next_width()

        # A layout at the new width needs a turn of the event loop of the page's own process.
        QTimer.singleShot(500, lambda: page.runJavaScript(request["script"], 0, measured))

    def sheets() -> list[dict[str, Any]]:
        document = QPdfDocument()
        document.load(request["pdf"])
        printed = []
        for number in range(document.pageCount()):
            size, said = document.pagePointSize(number), document.getAllText(number)
            boxes = [polygon.boundingRect() for polygon in said.bounds()]
            printed.append(
                {
                    "sheet": [size.width(), size.height()],
                    "first_line": boxes[0].height(),
                    "left": min(box.left() for box in boxes),
                    "reached": [max(b.right() for b in boxes), max(b.bottom() for b in boxes)],
                    "text": said.text(),
                }
            )
        return printed

    def finish() -> None:
        answer = {
            "version": f"Chromium {qWebEngineChromiumVersion()} in QtWebEngine "
            f"{qWebEngineVersion()}",
            "console": said,
            "asked": asked,
            "found": found,
            "sheets": sheets() if request["pdf"] else [],
        }
        print(json.dumps(answer), flush=True)
        os._exit(0)  # Qt's teardown of a browser may crash, which would say nothing of the page

    page.loadFinished.connect(lambda ok: next_width() if ok else sys.exit("The page did not load."))
    QTimer.singleShot(PATIENCE_MS, lambda: os._exit(3))
    view.resize(widths[0], HEIGHT)
    view.show()
    page.load(QUrl.fromLocalFile(request["page"]))
    application.exec()


if __name__ == "__main__":
    main()

"""A real browser without a window, for pages that people will look at.

Chromium is asked over two pipes (the DevTools protocol: JSON, ended by a zero byte), so nothing but
the browser itself has to be installed. Everything that a page says on its console or asks from a
network is kept.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def find_browser() -> str | None:
    """The path of a Chromium: that of the environment variable CHROMIUM, or one on the PATH."""
    return next(filter(None, map(shutil.which, [os.environ.get("CHROMIUM", ""), *NAMES])), None)


class Page:
    """A tab. `said` is what its console got, `asked` what it asked from somewhere."""

    def __init__(self, browser: str, folder: str) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.loaded = False
        self._numbers = itertools.count(1)
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--force-device-scale-factor=1",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The browser reads from 3 and writes to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', browser, *options],
            pass_fds=[theirs_in, theirs_out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self.said, self.asked, self.loaded = [], [], False
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + SECONDS
        while not self.loaded:
            self._hear(deadline)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, theme: str) -> None:
        """What the system says of itself: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        place = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def point(self, selector: str) -> dict[str, float]:
        """Move the mouse to the middle of an element."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        place = self.run(script)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        return place

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds, by the keyboard."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.focus(); e.select(); })()"
        )
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Backspace", 8)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._hear(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _hear(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "The browser ended, or doesn't answer."
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self.loaded = True
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.said.append(str([value.get("value") for value in params["args"]]))
        elif event == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def open_page(browser: str) -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Page(browser, folder)
        try:
            yield page
        finally:
            page.close()

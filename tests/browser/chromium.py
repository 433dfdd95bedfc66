"""A headless Chromium, driven through a pair of pipes in its own protocol: no driver, no package.

Everything that a page says to the console, every error and every request is kept. Nothing waits for ever.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
DEADLINE_S = 60.0


class Chromium:
    """A running browser; leave the `with` and it is gone."""

    def __init__(self, folder: Path) -> None:
        assert COMMAND is not None
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        # The protocol wants the descriptors 3 and 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" {flags} "$1" about:blank 3<&{to_browser} 4>&{from_browser}',
             COMMAND, f"--user-data-dir={folder}"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._read, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            told = self._next(end - time.monotonic())
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])
            self.events.append(told)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(timeout_s, 0))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        first, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(first))

    def open(
        self, path: Path, *, width: int, height: int = 900, dark: bool = False, script: bool = True
    ) -> Page:
        """Show a file in a window of that width."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.call("Emulation.setScriptExecutionDisabled", value=not script)
        page.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + DEADLINE_S
        while not page.heard("Page.loadEventFired"):
            self.events.append(self._next(end - time.monotonic()))
        return page


@dataclass(slots=True)
class Page:
    """A tab."""

    browser: Chromium
    target: str
    session: str
    _seen: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def heard(self, method: str) -> list[dict[str, Any]]:
        """What the page told of one kind."""
        own = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [event["params"] for event in own if event.get("method") == method]

    def complaints(self) -> list[str]:
        """Whatever it said to the console, threw or was refused."""
        told = self.heard("Runtime.consoleAPICalled") + self.heard("Runtime.exceptionThrown")
        return [json.dumps(one) for one in told + self.heard("Log.entryAdded")]

    def requests(self) -> list[str]:
        """Addresses that it asked for."""
        return [one["request"]["url"] for one in self.heard("Network.requestWillBeSent")]

    def value(self, code: str) -> Any:
        """What an expression is in the page."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def pointer(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element, which is brought into view."""
        code = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        x, y = self.value(code)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode={"Tab": 9, "Escape": 27}[key],
            )

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save what it looks like."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

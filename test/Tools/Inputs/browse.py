"""Opens a page in headless Chromium, acts on it and prints what it then shows.

    python browse.py PAGE [--eval EXPRESSION]… [--screenshot FILE] [--dark] [--width N] [--height N]

Expressions are evaluated one after the other in the page, once it is ready; each result is a line
of JSON. Messages on the page's console, exceptions and requests beyond the page are lines of their
own. Speaks Chromium's DevTools protocol over a pipe.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ["chromium-headless-shell", "chromium", "google-chrome"]
DEADLINE = 120  # seconds, for a loaded machine


class Browser:
    """A Chromium process and the one page in it."""

    def __init__(self, profile: str, width: int, height: int) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if not program:
            raise SystemExit(f"expected one of {', '.join(NAMES)} in PATH; run make setup")
        read_commands, self._commands = os.pipe()
        self._replies, write_replies = os.pipe()
        # The protocol's pipe is on file descriptors 3 and 4.
        redirect = f'exec 3<&{read_commands} 4>&{write_replies}; exec "$@"'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", program, *flags, "--remote-debugging-pipe"],
            pass_fds=[read_commands, write_replies],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_replies)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; keeps the events that come before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise SystemExit(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self.events.append(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._replies, 1 << 20)
            if not chunk:
                raise SystemExit(f"the browser ended with status {self._process.wait()}")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            return {"exception": details.get("exception", {}).get("description", details["text"])}
        return done["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def complaints(events: list[dict[str, Any]], page: str) -> list[str]:
    """Console messages, exceptions and requests for anything but the page."""
    lines = []
    for event in events:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                shown = [arg.get("value", arg.get("description")) for arg in params["args"]]
                lines.append(f"console {params['type']}: {shown}")
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                lines.append(f"exception: {details.get('exception', details).get('description')}")
            case "Log.entryAdded":
                lines.append(f"log {params['entry']['level']}: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if url != page and not url.startswith("data:"):
                    lines.append(f"request: {url}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--eval", action="append", default=[])
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1200)
    options = parser.parse_args()
    page = options.page.resolve().as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile, options.width, options.height)
        try:
            for domain in ["Runtime", "Log", "Network", "Page"]:
                browser.call(f"{domain}.enable")
            scheme = "dark" if options.dark else "light"
            browser.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": scheme}],
            )
            browser.call("Page.navigate", url=page)
            deadline = time.monotonic() + DEADLINE
            while browser.evaluate("document.body?.dataset.ready") != "true":
                if time.monotonic() > deadline:
                    print("the page is not ready")
                    break
                time.sleep(0.1)
            for expression in options.eval:
                print(json.dumps(browser.evaluate(expression), ensure_ascii=False))
            if options.screenshot:
                shot = browser.call("Page.captureScreenshot", format="png")
                options.screenshot.write_bytes(base64.b64decode(shot["data"]))
            for line in complaints(browser.events, page):
                print(line)
        finally:
            browser.close()


if __name__ == "__main__":
    main()

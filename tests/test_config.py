# SPDX-License-Identifier: Apache-2.0
"""EngramConfig takes what config.json says and refuses, in one line, what it cannot mean."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from golden_config import golden_config
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_engram.builder import EngramConfig
from trtllm_engram.plugins.errors import InputError

FULL = golden_config("hash_full")
BAD_VALUES = [
    *(True, None, "8", 2.5, math.nan, math.inf, -1, -0.5, 10**400),
    *([], ["8"], [2.5], {"a": 1}, "x" * 9999),
]


def error_of(data: Any) -> str:
    with pytest.raises(InputError) as caught:
        EngramConfig.from_dict(data, where="here")
    text = str(caught.value)
    assert text.startswith("here: ")
    assert "\n" not in text
    return text


def test_true_size() -> None:
    config = EngramConfig.from_dict(FULL)
    assert config.layer_ids == (1, 14)
    assert config.num_embeddings == (384006168, 384016682)
    assert (config.num_layers, config.num_columns) == (2, 24)
    assert (config.row_dim, config.kv_dim) == (6144, 25600)
    assert config.compressed_vocab_size == 99092


def test_dict_round_trip() -> None:
    config = EngramConfig.from_dict(FULL)
    assert config.to_dict() == FULL
    assert EngramConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_order_of_layers_is_kept() -> None:
    data = FULL | {"engram_layer_ids": [14, 1]}
    assert EngramConfig.from_dict(data).layer_ids == (14, 1)


def test_whole_epsilon_becomes_a_float() -> None:
    epsilon = EngramConfig.from_dict(FULL | {"rms_norm_eps": 1}).rms_norm_eps
    assert type(epsilon) is float


def test_other_keys_of_the_model_are_ignored() -> None:
    data = FULL | {"num_hidden_layers": 43, "vocab_size": 129280, "text_config": "odd", "": None}
    assert EngramConfig.from_dict(data) == EngramConfig.from_dict(FULL)


class TestTextConfig:
    def test_nested(self) -> None:
        data = {"hidden_size": 1, "text_config": FULL}
        assert EngramConfig.from_dict(data) == EngramConfig.from_dict(FULL)

    def test_top_level_wins(self) -> None:
        data = FULL | {"text_config": FULL | {"engram_n_heads": 4, "engram_odd": 1}}
        assert EngramConfig.from_dict(data).n_heads == 8

    def test_mixed_is_refused(self) -> None:
        data = FULL | {"text_config": {"hc_mult": FULL["hc_mult"]}}
        del data["hc_mult"]
        text = error_of(data)
        assert "hc_mult: missing" in text
        assert "text_config" in text

    def test_missing_key_names_the_place(self) -> None:
        nested = {key: value for key, value in FULL.items() if key != "engram_n_heads"}
        assert "engram_n_heads: missing under text_config" in error_of({"text_config": nested})


@pytest.mark.parametrize("key", FULL)
def test_missing_key(key: str) -> None:
    data = {name: value for name, value in FULL.items() if name != key}
    assert f"{key}: missing" in error_of(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, id=f"{key}={value!r:.12}")
        for key in FULL
        for value in BAD_VALUES
        if (key, value) != ("rms_norm_eps", 2.5)
    ],
)
def test_bad_value(key: str, value: Any) -> None:
    text = error_of(FULL | {key: value})
    assert key in text
    assert "found" in text
    assert len(text) < 300


@pytest.mark.parametrize("key", [key for key in FULL if key != "engram_pad_token_id"])
def test_zero(key: str) -> None:
    assert key in error_of(FULL | {key: 0})


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("engram_layer_ids", [1, 1], "[1, 1]"),
        ("engram_layer_ids", [1, -14], "engram_layer_ids[1]"),
        ("engram_layer_ids", [1, True], "found true"),
        ("engram_layer_ids", [], "found 0"),
        ("engram_layer_ids", list(range(1025)), "found 1025"),
        ("engram_num_embeddings", [384006168], "found 1"),
        ("engram_num_embeddings", [384006168, 0], "engram_num_embeddings[1]"),
        ("engram_max_ngram_size", 1, "from 2 to 8, found 1"),
        ("engram_max_ngram_size", 9, "from 2 to 8, found 9"),
        ("engram_n_heads", 257, "from 1 to 256, found 257"),
        ("engram_head_dim", 48, "multiple of 32, found 48"),
        ("rms_norm_eps", 1e-300, "found 1e-300"),
    ],
)
def test_value_outside_the_limits(key: str, value: Any, found: str) -> None:
    text = error_of(FULL | {key: value})
    assert key in text
    assert found in text


@pytest.mark.parametrize(
    ("changes", "product", "value"),
    [
        ({"engram_vocab_size": 2**27}, "engram_n_heads * engram_vocab_size", 24 * 2**27),
        ({"engram_head_dim": 2**27}, "engram_n_heads * engram_head_dim", 24 * 2**27),
        ({"hidden_size": 2**30}, "(hc_mult + 1) * hidden_size", 5 * 2**30),
    ],
    ids=lambda value: str(value)[:24],
)
def test_product_overflows(changes: dict[str, int], product: str, value: int) -> None:
    text = error_of(FULL | changes)
    assert product in text
    assert f"found {value}" in text


def test_unknown_key_names_the_nearest() -> None:
    text = error_of(FULL | {"engram_n_head": 8})
    assert "unknown key 'engram_n_head'" in text
    assert "nearest known one is engram_n_heads" in text


def test_pad_token_outside_the_vocabulary() -> None:
    text = error_of(FULL | {"engram_pad_token_id": 129280, "vocab_size": 129280})
    assert "engram_pad_token_id: expected an id below vocab_size 129280, found 129280" in text


@pytest.mark.parametrize("data", [{}, {"hidden_size": 5120}, {"text_config": {"hc_mult": 4}}])
def test_no_engram_keys(data: dict[str, Any]) -> None:
    assert "expected engram_* keys, found none" in error_of(data)


@pytest.mark.parametrize("data", [[], "engram", None, 3])
def test_not_an_object(data: object) -> None:
    assert "expected a JSON object" in error_of(data)


class TestFile:
    def test_folder_or_file(self, tmp_path: Path) -> None:
        folder = tmp_path / "with spaces and ümlaut"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(FULL))
        expected = EngramConfig.from_dict(FULL)
        assert EngramConfig.from_pretrained(folder) == expected
        assert EngramConfig.from_pretrained(str(folder / "config.json")) == expected

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000, b'{"a": 1}', b"[]"],
        ids=lambda content: repr(content[:8]),
    )
    def test_bad_content(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"config\.json: expected") as caught:
            EngramConfig.from_pretrained(file)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["", "absent", "nul\0", "a" * 300])
    def test_unreadable(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(InputError, match=r"cannot read: |regular file"):
            EngramConfig.from_pretrained(f"{tmp_path}/{name}")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
CONFIG_CHANGES = st.dictionaries(
    st.sampled_from([*FULL, "text_config", "engram_odd", "vocab_size"]) | st.text(), JSON_VALUES
)


class TestFuzz:
    @settings(max_examples=100)
    @given(CONFIG_CHANGES, st.sets(st.sampled_from(list(FULL)), max_size=2), st.booleans())
    def test_dicts(self, changes: dict[str, Any], missing: set[str], nested: bool) -> None:
        data = {key: value for key, value in FULL.items() if key not in missing} | changes
        _take_or_refuse(json.dumps({"text_config": data} if nested else data).encode())

    @settings(max_examples=100)
    @given(st.binary(max_size=8), st.integers(0, 500), st.integers(0, 8))
    def test_bytes(self, patch: bytes, start: int, length: int) -> None:
        content = json.dumps(FULL).encode()
        _take_or_refuse(content[:start] + patch + content[start + length :])


def _take_or_refuse(content: bytes) -> None:
    try:
        data = json.loads(content)
    except ValueError:
        return
    try:
        config = EngramConfig.from_dict(data)
    except InputError as error:
        message = str(error)
    else:
        message = ""
        assert EngramConfig.from_dict(config.to_dict()) == config
    assert "\n" not in message

# SPDX-License-Identifier: Apache-2.0
"""`run --engine` by a stand-in for the engine: what it hands in, and what it refuses."""

import numpy as np
import pytest
from engines import bits
from fake_engine import FakeEngine, use_fake_tensorrt
from safetensors.numpy import load_file, save_file

from trtllm_engram.builder.dtypes import numpy_dtype
from trtllm_engram.builder.model import HIDDEN_DTYPES, ModelOptions
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.cli import run as command
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.session import EngramSession

pytest_plugins = "engine_fixtures"

MAX_TOKENS = 7
IDS = list(range(20))


@pytest.fixture
def run(store, tmp_path, monkeypatch):
    """run(options of the model, words) of an engine that takes MAX_TOKENS; its exit code."""
    use_fake_tensorrt(monkeypatch)
    (tmp_path / "fake.plan").touch()
    (tmp_path / "ids").write_text(" ".join(map(str, IDS)))
    files = ["--engine", tmp_path / "fake.plan", "--ids", tmp_path / "ids"]
    files += ["--output", tmp_path / "out.safetensors"]

    def run(options, *words):
        made = FakeEngine(store, options, max_tokens=MAX_TOKENS)
        monkeypatch.setattr(command, "Engine", lambda _plan, _device: made)
        return main(["run", str(store.path), *map(str, [*files, *words])])

    return run


@pytest.mark.parametrize("chunk", [[], ["--chunk", "3"]], ids=["default", "3"])
@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
def test_streams_of_every_dtype(store, run, tmp_path, dtype, chunk):
    """Made of the seed, in chunks that the engine takes."""
    assert run(ModelOptions(dtype, check_outputs=True), "--rows", "--seed", "5", *chunk) == 0
    found = load_file(tmp_path / "out.safetensors")
    hidden = SeededHidden(store.config, 5, dtype)
    assert hidden(1, 0, 1).dtype == numpy_dtype(dtype)
    (expected,) = EngramSession(store).run(IDS, hidden)
    for layer_id in store.config.layer_ids:
        for name, array in (("hidden", expected.hidden), ("rows", expected.rows)):
            same = bits(found[f"layers.{layer_id}.{name}"])
            np.testing.assert_array_equal(same, bits(array[layer_id]), err_msg=name)


def test_streams_of_a_file_have_the_engines_dtype(store, run, tmp_path, capsys):
    hidden = {"hidden": SeededHidden(store.config)(1, 0, len(IDS)).astype(np.float32)}
    save_file(hidden, tmp_path / "hidden.safetensors")
    of_file = ["--hidden", tmp_path / "hidden.safetensors"]
    assert run(ModelOptions("float32"), *of_file) == 0
    assert run(ModelOptions("float16"), *of_file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "layers.1.hidden: expected float16, as the engine takes, found float32" in line


@pytest.mark.parametrize("words", [[], ["--chunk", "3"]])
def test_whole_prompts_come_in_one_piece(run, capsys, words):
    assert run(ModelOptions(history="whole_prompt"), *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = words[1] if words else MAX_TOKENS
    said = f"chunk: expected all 20 tokens, as this engine takes no lookback, found {found} (it "
    assert f"{said}takes at most 7)" in line


def test_rows_of_an_engine_without_them(run, capsys):
    assert run(ModelOptions(), "--rows") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("fake.plan: expected rows, built with --check-outputs, for --rows")

# SPDX-License-Identifier: Apache-2.0
"""Models on a real tritonserver come and go; configurations and Pythons that it takes."""

from __future__ import annotations

import os
import re
import signal
import site
import time
from pathlib import Path

import numpy as np
import pytest
from triton_asking import ALL, IDS, LAYERS, ask, check, hidden_of, ids_of, table_bytes, write_model
from triton_server import MARKS, client, make_python, serve
from waiting import wait_until

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
MODELS = ("engram",)


def test_unload_and_reload_leak_nothing(server, store, folder):
    write_model(store, folder / "models", "--name", "again", "--instances", "2")
    connection = server.connect("http")
    others = set(server.stubs())
    process = Path(f"/proc/{server.process.pid}")
    used = set()

    def regions():
        """Of memory, between the server and its stubs."""
        maps = (process / "maps").read_text(encoding="utf-8")
        return set(re.findall(r"/dev/shm/triton_python_backend_shm_\S+", maps))

    def state():
        """Stubs, files and regions of the server, which it gives back one by one."""
        return set(server.stubs()) - others, len(list((process / "fd").iterdir())), len(regions())

    def use():
        connection.load_model("again")
        wanted = ask(connection, {"token_ids": IDS}, ["hash_ids"], "again")["hash_ids"]
        assert wanted.shape == (1, 4, 2, 4)
        used.update(regions())
        connection.unload_model("again")

    def at_rest():
        before = state()
        time.sleep(1)
        return state() == before and not before[0]

    def no_more_than(first):
        stubs, *rest = state()
        return not stubs and all(now <= then for now, then in zip(rest, first[1:], strict=True))

    use()
    wait_until(at_rest, state)
    first = state()
    pss = [server.pss()]
    for _ in range(3):
        use()
        wait_until(lambda: no_more_than(first), lambda: (first, state()))
        pss.append(server.pss())
    assert used > regions()
    assert not [region for region in used - regions() if Path(region).exists()]
    # A leak grows with every turn; what pages the kernel has mapped may change in one.
    assert min(np.diff(pss)) < table_bytes(store) / 10


def test_a_reload_meets_while_the_old_one_serves(server):
    """Triton starts a model's new instances before the old ones end."""
    connection = server.connect("http")
    connection.load_model("engram")
    assert ask(connection, {"token_ids": IDS}, ["hash_ids"])["hash_ids"].shape == (1, 4, 2, 4)


def test_a_killed_instance_fails_its_own_requests(server, store, folder):
    """Others are answered, the server lives, and the model loaded again serves with both."""
    write_model(store, folder / "models", "--name", "killed", "--instances", "2")
    connection = server.connect("grpc")
    others = set(server.stubs())
    connection.load_model("killed")
    wanted = ask(connection, {"token_ids": IDS}, ["hash_ids"], "killed")["hash_ids"]
    os.kill(min(set(server.stubs()) - others), signal.SIGKILL)

    def errors():
        """Of requests one after the other, which the instances take in turn."""
        found = []
        for _ in range(8):
            try:
                answer = ask(connection, {"token_ids": IDS}, ["hash_ids"], "killed")
            except client("grpc").InferenceServerException as error:
                found.append(str(error))
            else:
                assert np.array_equal(answer["hash_ids"], wanted)
        return found

    failed = errors()
    assert 0 < len(failed) < 8
    assert all("is not healthy" in error for error in failed)
    assert server.process.poll() is None
    connection.unload_model("killed")
    connection.load_model("killed")
    assert not errors()
    connection.unload_model("killed")


@pytest.mark.parametrize(
    ("options", "num_states"),
    [((), 0), (("--sequences",), 1)],
    ids=["alone", "sequences"],
)
def test_the_server_understands_the_tensorrt_form(server, store, folder, options, num_states):
    """Without its TensorRT backend and a GPU: what a server checks of a configuration itself (batch
    inputs and outputs, states, graphs) is checked as a Python model's."""
    name = "".join(["plan", *options])
    (folder / "no.plan").write_bytes(b"")
    words = ["--name", name, "--form", "tensorrt", "--engine", str(folder / "no.plan")]
    words += ["--max-tokens", "131", *options]
    write_model(store, folder / "models", *words)
    config = folder / "models" / name / "config.pbtxt"
    text = config.read_text().replace('"tensorrt"', '"python"').replace("KIND_GPU", "KIND_CPU")
    text = re.sub(r".*(gpus|profile|default_model_filename): .*\n", "", text)
    config.write_text(text)
    (config.parent / "1/model.py").write_text("class TritonPythonModel:\n    pass\n")
    (config.parent / "batchstrategy.so").unlink(missing_ok=True)  # it would bind tables
    connection = server.connect("http")
    connection.load_model(name)
    understood = connection.get_model_config(name)
    assert understood["batch_input"][0]["target_name"] == ["cu_seqlens"]
    assert [one["target_name"] for one in understood["batch_output"]] == [
        [f"layers.{layer}.hidden_out"] for layer in LAYERS
    ]
    assert len(understood["optimization"]["cuda"]["graph_spec"]) == 2
    states = understood.get("sequence_batching", {}).get("state", [])
    assert [one["initial_state"][0]["data_file"] for one in states] == ["no_past"] * num_states
    connection.unload_model(name)


@pytest.mark.skipif(np.__version__.startswith("1."), reason="numpy 1 is installed")
def test_numpy_2(folder, store, expected, tmp_path):
    """Its Python backend dies of text: a model that takes text is refused, token ids pass."""
    python = make_python(tmp_path / "python", site_packages=Path(site.getsitepackages()[0]))
    write_model(store, tmp_path / "models", "--name", "words")
    write_model(store, tmp_path / "models", "--name", "engram", "--no-text")
    ids = ids_of(expected, store)
    inputs = {"token_ids": ids[None], **hidden_of(store, 0, ids.size)}
    with serve(tmp_path / "models", python, tmp_path / "log") as server:
        check(ask(server.connect("grpc"), inputs, ALL), expected, 0, ids.size)
        assert not server.connect("http").is_model_ready("words")
        assert "text: expected numpy below 2" in server.log()

# SPDX-License-Identifier: Apache-2.0
"""`trtllm-checkpoint` and `trtllm-model-file`: what is written, and what is refused in one line."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import names_below, small_checkpoint
from command_line import only_line
from safetensors.numpy import load_file
from trtllm_checkpoints import STORE, base_checkpoint

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.trtllm import MODEL_FILE
from trtllm_engram.builder.weight_layout import lay_weight
from trtllm_engram.runtime import Tables, open_store
from trtllm_engram.runtime.cli import main

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/trtllm_build"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trtllm files ✓")
    prepare(small_checkpoint(folder / "checkpoint", **STORE), folder / "store")
    return folder


@pytest.fixture
def write(folder, tmp_path, capsys):
    """Runs the command on a base whose config.json has these changes."""

    def run(*options, change=lambda base: None, **changes):
        base = base_checkpoint(tmp_path / "base", open_store(folder / "store"), **changes)
        change(base)
        argv = ["trtllm-checkpoint", folder / "store", "--base", base, *options]
        code = main([str(word) for word in [*argv, "--output", tmp_path / "output"]])
        return code, *capsys.readouterr()

    return run


def test_model_file(capsys):
    assert main(["trtllm-model-file"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == MODEL_FILE
    assert "EngramForCausalLM" in path.read_text()


def test_what_is_written(write, folder, tmp_path):
    store = open_store(folder / "store")
    code, out, _ = write("--json", "--history", "whole_prompt", rotary_base=7.0)
    assert code == 0
    config = json.loads((tmp_path / "output/config.json").read_text())
    base = json.loads((tmp_path / "base/config.json").read_text())
    assert (
        config.pop("engram")
        == json.loads(out)["engram"]
        == {
            "format_version": 1,
            "base_architecture": "LlamaForCausalLM",
            "history": "whole_prompt",
            "fingerprint": store.manifest.fingerprint,
            "tables": {"1": "engram_1", "2": "engram_2"},
            "weight_layout": "row_major",
            "projection_ranks": 1,
            "config": store.config.to_dict(),
        }
    )
    assert config == base | {"architecture": "EngramForCausalLM"}
    assert names_below(tmp_path / "output") == ["config.json", "rank0.safetensors"]
    tensors, weights = load_file(tmp_path / "output/rank0.safetensors"), store.weights(2)
    np.testing.assert_array_equal(tensors["engram.token_map"], store.token_map)
    words = tensors["engram.layer_2.words"].view(np.uint8)
    np.testing.assert_array_equal(words, weights.wkv_weight)
    scales = tensors["engram.layer_2.scales"].view(np.uint8)
    np.testing.assert_array_equal(scales[: weights.wkv_scale.size], weights.wkv_scale.reshape(-1))
    for name, value in (("query", weights.q_weight), ("key", weights.k_weight)):
        np.testing.assert_array_equal(tensors[f"engram.layer_2.{name}"], value)


def test_a_projection_split_among_ranks(write, folder, tmp_path):
    """Each rank's file has its part, in the layout that was asked for."""
    options = ("--split-projection", "--weight-layout", "sm90_v1")
    code, out, _ = write(*options, mapping={"tp_size": 2, "world_size": 2})
    assert code == 0
    assert "sm90_v1, split among 2 ranks" in out
    files = [load_file(tmp_path / f"output/rank{rank}.safetensors") for rank in range(2)]
    words = [file["engram.layer_2.words"].view(np.uint8) for file in files]
    laid = lay_weight(open_store(folder / "store").weights(2).wkv_weight, "sm90_v1")
    np.testing.assert_array_equal(np.concatenate(words), laid)


def test_ranks_that_do_not_divide_a_projection(write, tmp_path):
    code, _, err = write("--split-projection", mapping={"tp_size": 3, "world_size": 3})
    assert code == 2
    assert "tensor-parallel ranks: expected a number that cuts 128 outputs" in only_line(err)
    assert not (tmp_path / "output").exists()


def test_a_mixed_precision_base_keeps_its_second_config(write, tmp_path):
    assert write(change=lambda base: (base / "quant_cfg.json").write_text("{}"))[0] == 0
    assert (tmp_path / "output/quant_cfg.json").read_text() == "{}"


def no_rank(base):
    (base / "rank0.safetensors").unlink()


def no_json(base):
    (base / "config.json").write_text("{")


def with_engram(base):
    set_keys(base, engram={})


def no_stage(base):
    set_keys(base, mapping={"pp_size": 0})


def set_keys(base, **keys):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **keys}))


REFUSED = {
    "no checkpoint": ({"change": no_json}, "config.json: expected JSON"),
    "no rank": ({"change": no_rank}, "rank0.safetensors: cannot read: No such file"),
    "twice": ({"change": with_engram}, "expected a base checkpoint, found one with Engram layers"),
    "no architecture": ({"architecture": None}, "architecture: expected a name"),
    "dtype": ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32, found 'int8'"),
    "hidden size": ({"hidden_size": 65}, "hidden_size: expected 64 (hidden_size of the store)"),
    "vocabulary": (
        {"vocab_size": 99},
        "vocab_size: expected 43 (entries of the store's token map)",
    ),
    "copies": ({"hc_mult": 4}, "hc_mult: expected 1, of the store, found a residual stream of 4"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers: expected more than 2, the store's"),
    "mapping": (
        {"change": no_stage},
        "mapping: expected tp_size and pp_size above 0, found [1, 0]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(write, tmp_path, case):
    changes, text = REFUSED[case]
    code, out, err = write(**changes)
    assert (code, out) == (2, "")
    assert text in only_line(err)
    assert not (tmp_path / "output").exists()


def test_an_output_that_is_there(write, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output/precious").touch()
    code, _, err = write()
    assert code == 2
    assert "expected a new or empty folder" in only_line(err)
    assert names_below(tmp_path / "output") == ["precious"]


# What stands for programs that are not here: trtllm-build over the fake front end, a launcher that
# runs its command, and a server that says what it was given.
TRTLLM_BUILD = """
import sys; sys.path.insert(0, {tests!r})
from argparse import ArgumentParser
from pathlib import Path
import fake_trtllm_build, pytest
parser = ArgumentParser()
for name in ("checkpoint_dir", "output_dir", "model_cls_file", "model_cls_name", "max_batch_size"):
    parser.add_argument("--" + name)
args = parser.parse_args()
with pytest.MonkeyPatch.context() as patch:
    fake_trtllm_build.install(patch, "1.2")
    model = (args.model_cls_file, args.model_cls_name)
    net = fake_trtllm_build.build("1.2", args.checkpoint_dir, *model)
Path(args.output_dir).mkdir()
Path(args.output_dir, "layers").write_text("\\n".join(layer.name for layer in net.layers))
"""
MPIRUN = 'shift 2; "$@"'
SERVER = 'echo "$LD_PRELOAD $TRTLLM_ENGRAM_TABLES" > served'


@pytest.fixture
def programs(tmp_path):
    """A PATH with them, and with our own command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = shlex.quote(sys.executable)
    (folder / "trtllm-build.py").write_text(TRTLLM_BUILD.format(tests=str(Path(__file__).parent)))
    scripts = {
        "python": f'exec {python} "$@"',
        "trtllm-engram": f'exec {python} -m trtllm_engram.runtime.cli "$@"',
        "trtllm-build": f'exec {python} {shlex.quote(str(folder))}/trtllm-build.py "$@"',
        "mpirun": MPIRUN,
        "SERVER": SERVER,
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "trt/lib").mkdir(parents=True)
    (tmp_path / "trt/lib/libnvinfer.so.10").touch()
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TENSORRT_ROOT": str(tmp_path / "trt"),
    }


def commands(text):
    """The indented blocks of a README, lines joined where they end in a backslash."""
    lines = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    return lines.replace("\\\n", " ").splitlines()


def test_the_example(programs, tmp_path):
    """Every command of examples/trtllm_build/README.md, in its order."""
    work = tmp_path / "work"
    shutil.copytree(EXAMPLE, work)
    (work / "tables.toml").chmod(0o600)  # a checkout's umask may let others write it
    done = []
    for command in commands((EXAMPLE / "README.md").read_text()):
        done.append(subprocess.run(command, shell=True, cwd=work, env=programs, check=True))
    assert len(done) == 9
    for engine in ("engine", "gpt_engine"):
        layers = (work / engine / "layers").read_text().splitlines()
        assert sum(name.startswith("engram/") for name in layers) == 7
    assert str(work / "tables.toml") in (work / "served").read_text()
    with Tables.from_toml(work / "tables.toml") as tables:
        assert set(tables.describe()) == {"engram_1", "engram_3"}

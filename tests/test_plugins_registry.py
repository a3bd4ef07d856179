# SPDX-License-Identifier: Apache-2.0
"""The built library in real TensorRT registries, each in a process of its own. No GPU needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_probe import RIGHT
from tensorrt_installs import Install, each_install

from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.registration import plugin_fields

PROBE = Path(__file__).with_name("plugin_probe.py")
WAYS = [
    "load",
    "load_twice",
    "dlopen",
    "dlopen_and_load",
    "load_and_dlopen",
    "dlopen_first",
    "register",
    "preload",
]
EXPECTED = [[name, "1", ""] for name in sorted(RIGHT)]

pytestmark = pytest.mark.trt


def probe(install: Install, way: str, action: str) -> tuple[Any, str]:
    """The action's result, and what went to standard error."""
    environment = install.environment()
    if way == "preload":
        environment["LD_PRELOAD"] = f"{install.library} {library_path()}"
    done = subprocess.run(
        [sys.executable, str(PROBE), way, action, install.module],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"] == install.version
    return answer["result"], done.stderr


@each_install
@pytest.mark.parametrize("way", WAYS)
def test_each_plugin_is_registered_once(install: Install, way: str) -> None:
    creators, errors = probe(install, way, "creators")
    assert creators == EXPECTED
    assert errors == ""


@each_install
def test_fields_are_those_that_the_library_describes(install: Install) -> None:
    fields, _ = probe(install, "load", "fields")
    assert fields == {
        plugin: {name: field.type for name, field in declared.items()}
        for plugin, declared in plugin_fields().items()
    }


@each_install
@pytest.mark.parametrize("way", ["register", "not_yet"])
def test_create(install: Install, way: str) -> None:
    """Plugins that TensorRT does not know yet are registered."""
    made, errors = probe(install, way, "create")
    assert made == {name: [True, True, True] for name in RIGHT}
    assert errors == ""


@each_install
def test_wrong_fields_are_refused_by_name(install: Install) -> None:
    texts, errors = probe(install, "register", "refuse")
    assert texts == [
        "InputError: EngramGate: eps: expected a value, found none (rms_norm_eps of the model)",
        "InputError: EngramGate: eps: expected FLOAT32, found '1'",
        "InputError: EngramGate: expected fields of eps, has_token_mask, in_place, format_version; "
        "found 'epsilon'",
        "EngramError: EngramGate: refused its fields {'eps': 1.0, 'in_place': 2}; "
        "TensorRT's log says why",
        "BUILD: False",
        "RUNTIME: True",  # a plugin that refuses whatever it is asked
    ]
    assert "EngramGate.createPlugin: field 'in_place': expected 0 or 1, found 2" in errors
    assert (
        errors.count("EngramGate.createPlugin: field 'eps': expected a value of type FLOAT32") == 2
    )


@each_install
def test_a_second_copy_of_the_library_refuses(install: Install) -> None:
    said, errors = probe(install, "register", "second_copy")
    assert said["creators_unchanged"]
    assert said["first"] == [1, 0]
    assert said["register"] != 0
    assert said["bind"] != 0
    assert said["text"] == (
        "libtrtllm_engram.so: expected one copy in this process, found "
        f"{library_path()} loaded before {said['copy']}"
    )
    assert said["text"] in errors


def test_every_plugin_is_probed() -> None:
    assert set(plugin_fields()) == set(RIGHT)

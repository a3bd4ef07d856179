# SPDX-License-Identifier: Apache-2.0
"""`triton`: a model repository for Triton Inference Server, and how to launch it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder.files import reading, stat_regular
from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.triton import MODEL_PY, Serving, python_config, write_model
from trtllm_engram.builder.triton_tensorrt import (
    BATCHER_FILE,
    FRONT_FILE,
    MAX_TOKENS,
    NO_PAST_FILE,
    PLAN_FILE,
    TABLES,
    TABLES_FILE,
    VOCAB_SIZE,
    no_past,
    tensorrt_config,
)
from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError, InputError

from .. import _native
from ..devices import AUTO, choose_device, parse_device
from ..engine import Engine
from ..group import Group
from ..store import Store, open_store
from ..tables import to_toml
from ..triton.plans import check_fingerprint, check_flat_engine
from ..triton.settings import Settings
from . import console, shared_options

EXAMPLE = "trtllm-engram triton STORE --model-repository models"

_MAX_TOKENS = 8192
_MAX_BATCH = 64
_MAX_BATCH_OF_ENGINES = 4096  # their config.pbtxt has a line of all sizes of a batch
# Of glibc: the server's many threads give large buffers back when they are done with them.
_MALLOC = "MALLOC_ARENA_MAX=4 MALLOC_MMAP_THRESHOLD_=262144"
_TABLE_CHOICES = {
    "placement": shared_options.PLACEMENTS,
    "scales": shared_options.SCALES,
    "memory": ("memfd", "shm", "cumem", "private", "keeper"),
    "pages": ("auto", "4k", "2m"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model of Triton Inference Server that runs a store's Engram layers, and print\n"
        "how to launch it. It runs in Triton's Python backend, by eager ops or an engine; its\n"
        "instances share one copy of the tables. Text or token ids come in; row ids, rows and\n"
        "residual streams go out, as DIR/NAME/config.pbtxt says."
    )
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--model-repository", metavar="DIR", type=Path, required=True)
    parser.add_argument("--name", default="engram", help="of the model (default: engram)")
    parser.add_argument(
        "--engine", metavar="PLAN", type=Path, help="run an engine of `build` instead of the ops"
    )
    parser.add_argument(
        "--form",
        choices=("python", "tensorrt"),
        default="python",
        help="tensorrt: an engine of `build --flat-hidden` in Triton's TensorRT backend, with "
        "CUDA graphs (default: python)",
    )
    parser.add_argument(
        "--sequences",
        action="store_true",
        help="the server keeps each text's past, by Triton's sequence ids; without, requests may "
        "bring lookback_ids and a position",
    )
    parser.add_argument(
        "--no-text",
        action="store_true",
        help="token ids alone, for a Python backend with numpy 2 that reads no text",
    )
    parser.add_argument(
        "--device",
        metavar="D,...",
        default=AUTO,
        help="auto (default), cpu, or GPUs: cuda:0,cuda:1",
    )
    parser.add_argument(
        "--instances",
        metavar="N",
        type=shared_options.integer(1),
        default=1,
        help="on each device (default: 1)",
    )
    parser.add_argument(
        "--max-batch",
        metavar="N",
        type=shared_options.integer(1),
        help=f"requests at a time (default: {_MAX_BATCH}, or those that the engine of --form "
        "tensorrt takes, if fewer)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=shared_options.integer(1),
        help=f"tokens of a request, and of what runs side by side (default: {_MAX_TOKENS}; an "
        "engine's own hold)",
    )
    shared_options.add_hidden_dtype(parser)
    tables = parser.add_argument_group("tables (README, Tables at run time)")
    for name, choices in _TABLE_CHOICES.items():
        tables.add_argument(f"--{name}", choices=choices, help=f"default: {choices[0]}")
    shared_options.add_hot_rows(tables)
    tables.add_argument("--numa", metavar="POLICY", help="default, local, interleave, node:N, gpu")
    tables.add_argument("--keeper", metavar="NAME", help="which keeper (default: any that has it)")
    shared_options.add_checkpoint(parser)
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    shared_options.check_keeper(args)
    if args.engine is not None:
        stat_regular(args.engine)
    write = {"python": _write_python, "tensorrt": _write_tensorrt}[args.form]
    store = open_store(args.store, checkpoint=args.checkpoint)
    _check_tables(args, store)
    written = write(args, store)
    if args.json:
        console.print_json({"model": args.name, **written})
    else:
        model, launch = written.pop("folder"), written.pop("launch")
        console.print_pairs([("model", model), *written.items(), ("launch", launch)])
    return 0


def _check_tables(args: argparse.Namespace, store: Store) -> None:
    """Refuses options that binding would refuse, as far as that is told without tables."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TABLES_FILE
        file.touch(mode=0o600)
        file.write_text(_tables_toml(args, store), encoding="utf-8")
        try:
            _native.check_tables_file(str(file))
        except InputError as error:
            raise InputError(str(error).removeprefix(f"tables: {file}: ")) from None


def _write_python(args: argparse.Namespace, store: Store) -> dict[str, str]:
    """The new model's folder, how it is launched, and notes."""
    gpus = _gpus(args.device)
    if args.engine is not None and not gpus:
        raise InputError(f"--engine: expected a GPU for --device, found {args.device}")
    settings = Settings(
        store=str(store.path.absolute()),
        checkpoint=None if args.checkpoint is None else str(Path(args.checkpoint).absolute()),
        engine=None if args.engine is None else str(args.engine.absolute()),
        max_tokens=args.max_tokens or _MAX_TOKENS,
        keeper=args.keeper,
        table=_table_options(args),
    )
    max_batch = args.max_batch or _MAX_BATCH
    config = python_config(store.config, _serving(args, gpus, max_batch, settings.parameters()))
    files = {"1/model.py": MODEL_PY.encode()}
    folder = write_model(args.model_repository, args.name, config, files)
    python = shlex.quote(str(Path(sys.executable).absolute().parent))
    launch = f'{_MALLOC} PATH={python}:"$PATH" {_tritonserver(args)}'
    written = {"folder": str(folder), "launch": launch}
    if not args.no_text and not np.__version__.startswith("1."):
        written["text"] = (
            f"needs numpy below 2 in the Python of the launch line, which has {np.__version__}; "
            "--no-text takes any"
        )
    return written


def _write_tensorrt(args: argparse.Namespace, store: Store) -> dict[str, str]:
    """As _write_python."""
    if args.engine is None:
        raise InputError("--form tensorrt: expected --engine PLAN, found none")
    if args.no_text:
        raise InputError("--no-text: expected with --form python")
    if args.max_batch is not None and args.max_batch > _MAX_BATCH_OF_ENGINES:
        raise InputError(
            f"--max-batch: expected at most {_MAX_BATCH_OF_ENGINES} with --form tensorrt, found "
            f"{args.max_batch}"
        )
    found = [parse_device("cuda:0" if one == AUTO else one) for one in args.device.split(",")]
    gpus = [ordinal for ordinal in found if ordinal is not None]
    if len(gpus) != len(found):
        raise InputError(f"--device: expected GPUs with --form tensorrt, found {args.device}")
    _check_devices(args.device, gpus)
    with reading(args.engine):
        plan = args.engine.read_bytes()
    check_fingerprint(args.engine, plan, store)
    max_batch, max_tokens, unchecked = _check_engine(args, store)
    parameters = {
        MAX_TOKENS: str(max_tokens),
        VOCAB_SIZE: str(store.token_map.size),
        TABLES: ",".join(map(table_name, store.config.layer_ids)),
    }
    config = tensorrt_config(store.config, _serving(args, gpus, max_batch, parameters))
    links = {FRONT_FILE if args.sequences else BATCHER_FILE: library_path()}
    files = {
        f"1/{PLAN_FILE}": plan,
        NO_PAST_FILE: no_past(store.config),
        TABLES_FILE: _tables_toml(args, store).encode(),
    }
    folder = write_model(args.model_repository, args.name, config, files, links)
    tables_file = shlex.quote(str((folder / TABLES_FILE).absolute()))
    plugins = shlex.quote(f"tensorrt,plugins={library_path()}")
    launch = f"TRTLLM_ENGRAM_TABLES={tables_file} {_tritonserver(args)} --backend-config={plugins}"
    notes = {} if unchecked is None else {"engine": f"not checked: {unchecked}"}
    return {"folder": str(folder), "launch": launch, **notes}


def _check_engine(args: argparse.Namespace, store: Store) -> tuple[int, int, str | None]:
    """Requests and tokens at a time: those given, or of the engine, whose largest profile takes the
    most tokens; and why the engine cannot be looked at, where that is so."""
    try:
        engine = Engine(args.engine)
    except EngramError as error:
        if args.max_tokens is None:
            raise InputError(
                f"--max-tokens: expected `build`'s, where the engine cannot be read: {error}"
            ) from error
        return args.max_batch or _MAX_BATCH, args.max_tokens, str(error)
    most_requests = check_flat_engine(args.engine, engine, store, args.hidden_dtype)
    (most_tokens,) = engine.shape_range("token_ids", engine.num_profiles - 1)[1]
    for name, given, most in (
        ("--max-batch", args.max_batch, most_requests),
        ("--max-tokens", args.max_tokens, most_tokens),
    ):
        if given is not None and given > most:
            raise InputError(f"{name}: expected at most {args.engine}'s {most}, found {given}")
    max_batch = args.max_batch or min(_MAX_BATCH, most_requests)
    return max_batch, args.max_tokens or most_tokens, None


def _tables_toml(args: argparse.Namespace, store: Store) -> str:
    options = _table_options(args)
    tables = {
        table_name(layer): {"store": store, "layer": layer, **options}
        for layer in store.config.layer_ids
    }
    return to_toml(tables, None if args.keeper is None else Group(keeper=args.keeper))


def _serving(
    args: argparse.Namespace, gpus: Sequence[int], max_batch: int, parameters: dict[str, str]
) -> Serving:
    return Serving(
        gpus=gpus,
        instances=args.instances,
        max_batch=max_batch,
        sequences=args.sequences,
        text=not args.no_text,
        hidden_dtype=args.hidden_dtype,
        parameters=parameters,
    )


def _table_options(args: argparse.Namespace) -> dict[str, Any]:
    names = (*_TABLE_CHOICES, "hot_rows", "hot_gib", "hot_adaptive", "numa")
    options = {name: getattr(args, name) for name in names}
    if args.hot_rows is not None:
        options["hot_rows"] = str(args.hot_rows.absolute())
    return {name: value for name, value in options.items() if value is not None}


def _tritonserver(args: argparse.Namespace) -> str:
    repository = shlex.quote(str(args.model_repository.absolute()))
    return f"tritonserver --model-repository={repository}"


def _gpus(devices: str) -> tuple[int, ...]:
    """CUDA ordinals; none for the CPU."""
    found = [parse_device(choose_device(one)) for one in devices.split(",")]
    gpus = tuple(ordinal for ordinal in found if ordinal is not None)
    if len(gpus) != len(found) and len(found) > 1:
        raise InputError(f"--device: expected cpu alone or GPUs alone, found {devices}")
    _check_devices(devices, gpus)
    return gpus


def _check_devices(devices: str, gpus: Sequence[int]) -> None:
    if len(set(gpus)) < len(gpus):
        raise InputError(
            f"--device: expected each GPU once, found {devices}; --instances sets how many "
            "instances each has"
        )

# SPDX-License-Identifier: Apache-2.0
"""`polygraphy run --engram-ref`: entry point group polygraphy.run.plugins, name engram-ref."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import (
    ComparatorCompareArgs,
    ComparatorRunArgs,
    DataLoaderArgs,
    RunnerSelectArgs,
)
from polygraphy.tools.args import util as args_util
from polygraphy.tools.args.base import BaseRunnerArgs
from polygraphy.tools.script import make_invocable, safe

from trtllm_engram.builder.model import HIDDEN_DTYPES, HISTORIES
from trtllm_engram.plugins.errors import InputError

from ..cli.shared_options import MAX_SEED, integer, number
from .report import HIDDEN_LIMIT_BF16_ULPS
from .sizes import DEFAULT_SIZES, falling, parse_size

_RUNNER_MODULE = "trtllm_engram.runtime.compare.polygraphy_runner"
_OPTIONS = (
    "store",
    "checkpoint",
    "sizes",
    "seed",
    "limit",
    "hidden_dtype",
    "history",
    "placement",
    "hidden_only",
    "png",
)
_SCRIPT = Path(__file__).with_name("polygraphy_script.py")


def argument_groups() -> list[Any]:
    """What the entry point names."""
    return [EngramReferenceArgs()]


class EngramReferenceArgs(BaseRunnerArgs):  # type: ignore[misc]
    """
    Engram Reference: comparing an engine with Engram layers to the reference.

    Selecting the runner also chooses data (pieces of real text) and the comparison (row ids and
    rows bit by bit, hidden states in BF16 ulps), unless scripts for them are given.

    Depends on:

        - DataLoaderArgs
        - ComparatorCompareArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        return "Engram's reference on the CPU", "engram-ref"

    def add_parser_args_impl(self) -> None:
        add = self.group.add_argument
        add("--engram-store", metavar="STORE", help="the store whose layers the engine has")
        add("--engram-checkpoint", metavar="DIR", help="where the store's checkpoint lies now")
        add(
            "--engram-sizes",
            metavar="TxB",
            nargs="+",
            type=parse_size,
            default=list(DEFAULT_SIZES),
            help="tokens x requests of each iteration, the largest first (default: 1x1 37x3)",
        )
        add(
            "--engram-seed",
            metavar="N",
            type=integer(0, MAX_SEED),
            default=0,
            help="of the data (default: 0)",
        )
        add(
            "--engram-limit",
            metavar="ULPS",
            type=number(0, 1e6),
            default=HIDDEN_LIMIT_BF16_ULPS,
            help=f"bound of hidden states (default: {HIDDEN_LIMIT_BF16_ULPS:g} BF16 ulps)",
        )
        add(
            "--engram-hidden-dtype",
            choices=HIDDEN_DTYPES,
            default="bfloat16",
            help="of the engine's residual streams (default: bfloat16)",
        )
        add(
            "--engram-history",
            choices=HISTORIES,
            default="explicit",
            help="the engine's: explicit has lookback_ids (default), whole_prompt no past",
        )
        add(
            "--engram-placement",
            choices=("host", "device", "none"),
            default="host",
            help="where the tables are bound; none: as TRTLLM_ENGRAM_TABLES says (default: host)",
        )
        add(
            "--engram-hidden-only",
            action="store_true",
            help="accept an engine whose outputs have no rows",
        )
        add("--engram-png", metavar="FILE", help="write the histogram of ulps")

    def parse_impl(self, args: argparse.Namespace) -> None:
        self.setup = {name: args_util.get(args, f"engram_{name}") for name in _OPTIONS}
        try:
            self.setup["sizes"] = falling(self.setup["sizes"])
        except InputError as error:
            G_LOGGER.critical(f"--engram-{error}")
        self.is_in_script = False

    def add_to_script_impl(self, script: Any) -> None:
        if self.setup["store"] is None:
            G_LOGGER.critical("--engram-ref: expected --engram-store STORE, found none")
        data, comparison = (
            self.arg_groups[group] for group in (DataLoaderArgs, ComparatorCompareArgs)
        )
        self._require_another(comparison)
        if data.is_using_random_data():
            data.data_loader_script = str(_SCRIPT)
            data.data_loader_func_name = "load_data"
        if comparison.compare_func_script is None:
            comparison.compare_func_script = str(_SCRIPT)
            comparison.compare_func_name = "compare_outputs"
        script.add_runner(make_invocable("EngramReferenceRunner"))
        if self.is_in_script:
            return
        self.is_in_script = True
        script.append_preimport(
            safe(f"from {_RUNNER_MODULE} import EngramReferenceRunner, configure")
        )
        script.append_preimport(make_invocable("configure", **self.setup))

    def _require_another(self, comparison: Any) -> None:
        """polygraphy passes a runner that it has nothing to compare with."""
        saved = self.arg_groups[ComparatorRunArgs].save_outputs_path
        if len(self.arg_groups[RunnerSelectArgs].runners) < 2 and not (
            comparison.load_outputs_paths or saved
        ):
            G_LOGGER.critical(
                "--engram-ref: expected another runner, such as --trt, or --load-outputs or "
                "--save-outputs, found none"
            )

# SPDX-License-Identifier: Apache-2.0
"""`tables`: load a store's tables as a server would, hold them for servers, see who holds any.

An action is one module of this folder, with SUMMARY, DESCRIPTION and EXAMPLE for its --help, and
add_arguments() and run() as a command's.
"""

from __future__ import annotations

import argparse

from .. import common_options, console
from . import count, load, serve, status, stop

EXAMPLE = load.EXAMPLE

_ACTIONS = {"load": load, "status": status, "serve": serve, "stop": stop, "count": count}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tables in memory that the processes of a node share."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, module in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common_options()],
        )
        module.add_arguments(action)
        console.add_json_option(action)


def run(args: argparse.Namespace) -> int:
    code: int = _ACTIONS[args.action].run(args)
    return code

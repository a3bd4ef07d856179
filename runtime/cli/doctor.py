# SPDX-License-Identifier: Apache-2.0
"""`doctor`: prints what runtime/doctor.py found."""

from __future__ import annotations

import argparse

from rich.text import Text

from .. import doctor
from . import console

EXAMPLE = "trtllm-engram doctor --strict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="exit 1 where there is a problem")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    checks = doctor.examine()
    if args.json:
        console.print_json({"checks": [_as_json(check) for check in checks]})
    else:
        _print(checks)
    return 1 if args.strict and any(check.problem for check in checks) else 0


def _as_json(check: doctor.Check) -> dict[str, object]:
    problem = check.problem
    return {
        "name": check.name,
        "text": check.text,
        "data": console.as_json_types(check.data),
        "problem": problem and problem.text,
        "fix": problem and problem.fix,
    }


def _print(checks: list[doctor.Check]) -> None:
    out = console.stdout()
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = Text("!", style="bold yellow") if check.problem else Text(" ")
        line = Text.assemble(mark, " ", (f"{check.name:<{width}}  ", "dim"), check.text)
        out.print(line)
    problems = [check.problem for check in checks if check.problem]
    out.print()
    out.print(f"{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}")
    for problem in problems:
        out.print(Text.assemble(("! ", "bold yellow"), problem.text))
        out.print(Text(f"      {problem.fix}", style="bold"))

# SPDX-License-Identifier: Apache-2.0
"""`verify`: is every byte of a store still what it was?"""

from __future__ import annotations

import argparse

from trtllm_engram.builder.verify import verify

from . import console, shared_options

EXAMPLE = "trtllm-engram verify STORE --restamp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check a store and the checkpoint files it refers to against their checksums. Exit code 1\n"
        "where something differs, with one line for each file and block."
    )
    parser.add_argument("store", metavar="STORE")
    shared_options.add_checkpoint(parser)
    parser.add_argument(
        "--restamp", action="store_true", help="accept new time stamps once all sums hold"
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with console.progress(args, "verify") as report:
        problems = verify(args.store, args.checkpoint, restamp=args.restamp, progress=report)
    restamped = args.restamp and not problems
    if args.json:
        document = {"store": args.store, "problems": problems, "restamped": restamped}
        console.print_json(document)
    elif problems:
        for problem in problems:
            console.stdout().print(problem)
    else:
        done = "all sums hold, time stamps renewed" if restamped else "all sums hold"
        console.stdout().print(f"{args.store}: {done}")
    return 1 if problems else 0

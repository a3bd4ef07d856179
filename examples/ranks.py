# SPDX-License-Identifier: Apache-2.0
"""What shared_tables.py and sharded_tables.py need beside tables: the ranks as processes."""

import argparse
import json
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.plugins.errors import EngramError, InputError


class Rank:
    """A rank as its parent sees it: this script again, one line of JSON for each question."""

    def __init__(self, rank, words):
        self.rank = rank
        command = [sys.executable, sys.argv[0], "--rank", str(rank), *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise EngramError(f"rank {self.rank}: expected an answer, found exit code {code}")
        return {"rank": self.rank, **json.loads(line)}

    def ask(self):
        print("again", file=self.process.stdin, flush=True)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def answers(ranks):
    """All ranks' answers; a rank that ends without one is an error at once."""
    waiting = {rank.process.stdout: rank for rank in ranks}
    told = {}
    while waiting:
        for pipe in select.select(list(waiting), [], [])[0]:
            rank = waiting.pop(pipe)
            told[rank] = rank.answer()
    return [told[rank] for rank in ranks]


def events(args, store, made_up, options=()):
    """Yields (what happened, all ranks' answers), "loaded" first. `options` of args go to ranks."""
    words = ["--ranks", str(args.ranks), "--store", store, "--group", secrets.token_hex(8)]
    words += ["--timeout", str(args.timeout), *(["--made-up"] if made_up else [])]
    for option in options:
        if getattr(args, option) is not None:
            words += [f"--{option}", getattr(args, option)]
    ranks = [Rank(rank, words) for rank in range(args.ranks)]
    try:
        yield "loaded", answers(ranks)
        if args.kill is not None:
            victim = ranks.pop(args.kill)
            victim.process.send_signal(signal.SIGKILL)
            victim.end()
            for rank in ranks:
                rank.ask()
            yield f"rank {args.kill} killed", answers(ranks)
    except EngramError:
        for rank in ranks:  # which may wait for the one that has ended
            rank.process.terminate()
        raise
    finally:
        for rank in ranks:
            rank.end()


def new_parser(description):
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--ranks", metavar="N", type=int, required=True)
    parser.add_argument("--kill", metavar="RANK", type=int, help="kill -9 it once all have loaded")
    parser.add_argument("--store", metavar="DIR", help="default: made-up tables")
    parser.add_argument("--gb", type=float, default=1.0, help="of the made-up tables (default: 1)")
    parser.add_argument("--timeout", metavar="S", type=float, default=120.0)
    for hidden in ("--rank", "--group", "--made-up"):  # what a rank is told by its parent
        kind = {"action": "store_true"} if hidden == "--made-up" else {}
        parser.add_argument(hidden, help=argparse.SUPPRESS, **kind)
    return parser


def run(parser, rank_main, parent_main):
    """rank_main(args) in a rank, else parent_main(args, store, made_up)."""
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"--ranks: expected 1 or more, found {args.ranks}")
    if args.kill not in (None, *range(args.ranks)):
        parser.error(f"expected --kill RANK below --ranks N, found {args.kill} and {args.ranks}")
    try:
        if args.rank is not None:
            args.rank = int(args.rank)
            rank_main(args)
        elif args.store is not None:
            parent_main(args, args.store, made_up=False)
        else:
            with tempfile.TemporaryDirectory() as folder:
                write_made_up_store(folder, config_of_size(int(args.gb * 1e9)))
                parent_main(args, folder, made_up=True)
    except (EngramError, InputError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")

# SPDX-License-Identifier: Apache-2.0
"""The command `trtllm-engram`.

A command is one line in COMMANDS and one module of that name (dashes as underscores) in this
folder, with

    EXAMPLE: str                                       printed at the end of its --help
    def add_arguments(parser: ArgumentParser) -> None
    def run(args: Namespace) -> int                    the exit code

Exit codes: 0 done; 1 checked and different, or failed at run time; 2 bad input or usage; 130
interrupted. A failure is one line on stderr; only a bug in this package shows a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from trtllm_engram.plugins.env import log_level
from trtllm_engram.plugins.errors import EngramError, InputError

from .streams import set_up_streams

PROGRAM = "trtllm-engram"

COMMANDS: dict[str, str] = {
    "demo": "make a small model, run text through it, check every step",
    "synthesize": "write a checkpoint in the V4.1 layout with made-up weights",
    "prepare": "make a store of a checkpoint: manifest, checksums, token map",
    "inspect": "describe a checkpoint, store, config or tokenizer",
    "verify": "check a store against its checksums",
    "hash": "text or token ids in, table row ids out",
    "run": "run all Engram layers of a store over a text",
    "build": "build an engine, or an ONNX model, of a store's layers",
    "compare": "hold an engine's outputs against the reference",
    "bench": "measure speed on this machine",
    "tables": "load, hold and list tables that a node's processes share",
    "triton": "write a model repository for Triton Inference Server",
    "trtllm-model-file": "print what trtllm-build needs to know Engram models",
    "trtllm-checkpoint": "add a store's layers to a TensorRT-LLM checkpoint",
    "size": "which placement of the tables fits where",
    "env": "print what makes programs with TensorRT know the plugins",
    "library-path": "print where libtrtllm_engram.so lies",
    "cache": "list or clear what this package has cached",
    "doctor": "what this machine offers a deployment, and what to fix",
}

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: no usage text around them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    prog = PROGRAM
    try:
        set_up_streams()
        with _interrupted_at_once():
            parser = build_parser(argv)
        args, unknown = parser.parse_known_args(argv)
        prog = f"{PROGRAM} {args.command}"
        if unknown:
            return _fail(
                prog, f"unrecognized arguments: {' '.join(unknown)} (see {prog} --help)", 2
            )
        _set_up_logging(args.verbose - args.quiet)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as exit_request:  # argparse: --help, --version, usage errors
        return exit_request.code if isinstance(exit_request.code, int) else 2
    except BrokenPipeError:  # the reader has left, as `head` does: no one to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", INTERRUPTED)
    except InputError as error:
        return _fail(prog, str(error), 2)
    except OSError as error:
        return _fail(prog, describe_os_error(error), 2)
    except EngramError as error:
        return _fail(prog, str(error), 1)
    except MemoryError as error:
        return _fail(prog, f"out of memory {error}", 1)


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser for argv: every command is listed, only the chosen one's module is imported."""
    common = common_options()
    parser = Parser(
        prog=PROGRAM,
        description="DeepSeek V4.1's Engram memory for TensorRT.",
        epilog=_list_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(verbose=0, quiet=0)
    parser.add_argument("--version", action=_Version, nargs=0, help="print all versions and exit")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser, help="see below"
    )
    chosen = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(
            name,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        if name == chosen:
            module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.epilog = f"example:\n  {module.EXAMPLE}"
            command.set_defaults(run=module.run)
    return parser


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """For imports, which leave nothing behind: in numpy Ctrl-C would become an ImportError."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def leave(*_: object) -> None:
        os._exit(_fail(PROGRAM, "interrupted", INTERRUPTED))

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _list_commands() -> str:
    lines = [f"  {name:<17} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["commands:", *lines, "", f"Start with: {PROGRAM} demo"])


def describe_os_error(error: OSError) -> str:
    """`path: reason`, or the error's own text where it names no path."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def common_options() -> Parser:
    """The parent of every command's parser, and of the actions' of those that have some."""
    # Suppressed defaults: an option before the command must not be reset by the command's parser.
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-v", "--verbose", action="count", help="say more (-vv: debug)")
    common.add_argument("-q", "--quiet", action="count", help="say less, no progress bars")
    return common


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .version import version_lines

        print("\n".join(version_lines()))
        parser.exit()


def _set_up_logging(verbosity: int) -> None:
    """Logs go to stderr, at $TRTLLM_ENGRAM_LOG's level unless -v or -q say otherwise."""
    levels = [logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG]
    level = levels[max(0, min(4, 2 + verbosity))] if verbosity else log_level()
    logger = logging.getLogger("trtllm_engram")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _fail(prog: str, message: str, code: int) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return code

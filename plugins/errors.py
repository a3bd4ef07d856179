# SPDX-License-Identifier: Apache-2.0
"""The two errors that users meet. Their text is one line: what, where, expected, found."""


class InputError(ValueError):
    """Bad input or usage. The command line prints the text alone and exits 2."""


class EngramError(RuntimeError):
    """A failure at run time, such as a GPU or disk error. The command line exits 1."""

# SPDX-License-Identifier: Apache-2.0
"""Keepers for tests of shared tables: processes of `tables serve`, and who attaches to them."""

import json
import time

from table_ranks import Job, group_name
from waiting import PATIENCE, wait_until


class Keeper:
    """`tables serve` in a process of its own."""

    def __init__(self, node, folder, store, *options, stop=None, name=None):
        self.name = name or group_name()
        self.output = folder / f"{self.name}-{time.monotonic_ns()}.txt"
        self.process = node.start("keeper", stop.environment if stop else None)
        self.process.do("warm_up")
        arguments = ["tables", "serve", str(store.path), "--name", self.name, "--json", *options]
        self.process.ask("command", arguments=arguments, output=str(self.output))

    def is_ready(self):
        """Waits until tables can be had; what it says of them."""
        wait_until(
            lambda: self.text().endswith("}\n"), lambda: f"{self.text()}; {self.process.where()}"
        )
        return json.loads(self.text())

    def text(self):
        return self.output.read_text() if self.output.exists() else ""


def attaching(folder, store, keeper, size=2, layers=(1,), **group):
    return Job(
        folder, store, size, layers=layers, group={"keeper": keeper.name, **group}, memory="keeper"
    )


def status(node, folder, processes):
    """What `tables status` says of some processes: other tests have theirs."""
    output = folder / f"status-{time.monotonic_ns()}.json"
    process = node.start()
    process.ask("command", arguments=["tables", "status", "--json"], output=str(output))
    assert process.result() == 0
    process.end()
    holders = json.loads(output.read_text())["holders"]
    return [one for one in holders if one["pid"] in [process.pid for process in processes]]


def stop(node, folder, keeper):
    output = folder / f"stop-{time.monotonic_ns()}.json"
    process = node.start()
    arguments = ["tables", "stop", keeper.name, "--timeout", str(PATIENCE)]
    process.ask("command", arguments=arguments, output=str(output))
    assert keeper.process.result() == 0, keeper.text()
    keeper.process.end()  # which the command waits for
    assert process.result() == 0, output.read_text()

# SPDX-License-Identifier: Apache-2.0
"""A table in host memory to look up in."""

import pytest

from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.runtime import Tables, gpus


@pytest.fixture(scope="module")
def made_up_store(tmp_path_factory):
    """(config, folder): a table of about 20 MB in name alone."""
    config = config_of_size(20_000_000, layers=(1,))
    folder = tmp_path_factory.mktemp("paths")
    write_made_up_store(folder, config)
    return config, folder


@pytest.fixture(scope="module")
def host_table(made_up_store):
    """(config, tables): that table, which the GPU reads in host memory; the CPU's threads gather
    those of names that say so."""
    config, folder = made_up_store
    with Tables() as tables:
        for scales in ("with_rows", "device") if gpus.probe_driver().gpus else ("with_rows",):
            how = {"scales": scales, "formula_seed": 3}
            tables.bind(scales, folder, layer=1, gather_threads=0, **how)
            tables.bind(f"{scales}, gathered", folder, layer=1, gather_threads=4, **how)
        yield config, tables

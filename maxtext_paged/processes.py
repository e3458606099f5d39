"""A mesh over several processes: each runs the same loop over the same requests, so all must agree before any starts.

For:        refusing, at the start, what would make processes run different programs and wait for each other for ever.
Not for:    starting processes or ``jax.distributed`` (the caller does).
May import: kv_common, jax.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from kv_common.errors import ConfigError


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own a device of the mesh."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def require_one_process(command: str) -> None:
    """Refuse a command whose every process would read and write the same files.

    Raises:
      ConfigError: this is one of several processes.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"{command} runs in one process, and this is one of {jax.process_count()}: start it without "
            "jax.distributed (skip_jax_distributed_system=true), one replica for each part of the input; or drive "
            "OfflineEngine in every process with the same prompts"
        )


def check_agreement(mesh: Mesh, facts: Mapping[str, int]) -> None:
    """Compare what each process decided for itself; nothing to do where one process owns the mesh.

    Args:
      facts: numbers that shape the programs or the schedule, by the name of the option that sets them.

    Raises:
      ConfigError: processes differ, and in what; or the mesh leaves a process out, which would wait for ever.
    """
    owners = processes_of(mesh)
    if owners == (jax.process_index(),):
        return
    if owners != tuple(range(jax.process_count())):
        raise ConfigError(
            f"the mesh has devices of processes {', '.join(map(str, owners))} of {jax.process_count()}: a mesh over "
            "several processes must have devices of all"
        )
    gathered = np.asarray(multihost_utils.process_allgather(np.array(list(facts.values()), np.int64)))
    different = [
        f"{name} is {', '.join(map(str, column.tolist()))}"
        for name, column in zip(facts, gathered.T, strict=True)
        if len(set(column.tolist())) > 1
    ]
    if different:
        raise ConfigError(
            f"the {len(owners)} processes of this mesh decided differently: {'; '.join(different)} (in order of "
            "processes): give all of them the same options, and set paged_num_pages"
        )

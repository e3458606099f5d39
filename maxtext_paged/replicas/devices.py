"""How a machine is shared out among replicas: device groups and processor cores.

For:        how many replicas there are, and the environment and cores of each.
Not for:    starting them (group.py). No device is touched here: a process that ends again is asked for them.
May import: the standard library, omegaconf in a function, maxtext_paged.cli.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.configuration import given_values

AUTO = "auto"
_PROBE = """\
import jax
devices = jax.devices()
print("devices", devices[0].platform, "rocm" in devices[0].client.platform_version.lower(), len(devices))
"""
_FILLS = -1
_AXES = "ici_"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one replica runs.

    Attributes:
      environment: variables that name its devices. cores: of the processor. share: one of how many replicas it is.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    share: int = 1


def place_replicas(wanted: str, config: str, overrides: Sequence[str]) -> list[Placement]:
    """One placement for each replica.

    Args:
      wanted: a number, or ``auto``: one replica for each group of devices of the configuration's mesh; on CPUs one.
      config, overrides: of the command.

    Raises:
      CommandError: there are fewer devices or cores than that takes.
    """
    platform, rocm, num_devices = _devices()
    cores = sorted(os.sched_getaffinity(0))
    if platform == "cpu":
        num = 1 if wanted == AUTO else int(wanted)
        if num > len(cores):
            raise CommandError(f"--replicas {num}: this process may use {len(cores)} cores, and each needs one")
        return [Placement({}, share, num) for share in _shares(cores, num)]
    known, fills = mesh_devices(given_values(config, overrides))
    num = num_devices // known if wanted == AUTO else int(wanted)
    group = num_devices // max(num, 1) // known * known if fills else known
    if num < 1 or group < 1 or num * group > num_devices:
        raise CommandError(
            f"--replicas {wanted}: {num_devices} devices are visible, and the configuration's mesh takes {known}"
        )
    name = "CUDA_VISIBLE_DEVICES" if not rocm else "ROCR_VISIBLE_DEVICES"
    if platform == "tpu":
        name = "TPU_VISIBLE_CHIPS"
    visible = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
    names = visible if len(visible) >= num_devices else list(map(str, range(num_devices)))
    return [
        Placement({name: ",".join(names[i * group : (i + 1) * group])}, share, num)
        for i, share in enumerate(_shares(cores, num))
    ]


def mesh_devices(values: Mapping[str, object]) -> tuple[int, bool]:
    """Devices that a configuration's mesh names, and whether one of its axes takes all there are.

    >>> mesh_devices({"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 4}), mesh_devices({})
    ((8, False), (1, True))
    """
    axes = {"ici_fsdp_parallelism": _FILLS}  # MaxText's own default
    axes |= {name: int(str(value)) for name, value in values.items() if name.startswith(_AXES) and _is_whole(value)}
    known = 1
    for size in axes.values():
        known *= size if size > 0 else 1
    return known, _FILLS in axes.values()


def _is_whole(value: object) -> bool:
    return str(value).lstrip("-").isdigit()


def _shares(cores: Sequence[int], num: int) -> list[tuple[int, ...]]:
    """The cores in ``num`` parts that differ by one at most; several replicas share one where there are too few."""
    if num > len(cores):
        return [(cores[i % len(cores)],) for i in range(num)]
    ends = [len(cores) * i // num for i in range(num + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(ends)]


def _devices() -> tuple[str, bool, int]:
    """Platform, whether it is ROCm's, and the number of devices that jax would see here."""
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return "cpu", False, 1
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    for line in probe.stdout.splitlines():
        words = line.split()
        if words[:1] == ["devices"] and len(words) == 4:
            return words[1], words[2] == "True", int(words[3])
    last = probe.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    raise CommandError(f"--replicas: jax finds no device: {last[0]}")

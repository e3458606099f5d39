"""``maxtext-paged plan``: what a configuration costs, and what fits.

For:        bytes of pages, weights and workspace per device and in all, and how many requests of which length fit.
Not for:    running anything: no weights are loaded and no pool is allocated.
May import: maxtext_paged, rich; jax and MaxText inside functions.
"""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from maxtext_paged.cli import ExitCode
from maxtext_paged.cli.configuration import check_arguments, load_configuration
from maxtext_paged.cli.environment import import_maxtext, prepare_environment

LENGTHS = (128, 512, 1024, 4096, 16384)
"""Request lengths shown, as far as the context goes; the full context always is."""


def run(arguments: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    check_arguments(arguments.config, arguments.overrides)
    prepare_environment(logging.WARNING)
    import_maxtext()
    from maxtext_paged.assembly import assemble

    plan = plan_of(assemble(load_configuration(arguments.config, arguments.overrides)))
    if arguments.json:
        print(json.dumps(plan))
    else:
        show(plan)
    return ExitCode.OK


def plan_of(assembly: Any) -> dict[str, Any]:
    """The plan of a ``PagedAssembly`` as plain values; every ``*_bytes`` is in bytes.

    ``device`` holds one device's part, ``total`` all devices', replicas included.
    """
    from maxtext_paged.sizing import requests_at_once

    groups, step_tokens = assembly.model.window_groups, assembly.options.paged_max_num_batched_tokens
    layout, pool, context = assembly.model.layout, assembly.pool, int(assembly.config.max_target_length)
    layouts = [layout, *(group.layout for group in groups)]
    device = {
        "page_bytes": layout.page_bytes(),
        "pool_bytes": sum(one.device_pool_bytes() for one in layouts),
        "workspace_bytes": pool.workspace_bytes,
        "weight_bytes": pool.weight_bytes,
    }
    total = {name: value * layout.num_devices for name, value in device.items()}
    total["pool_bytes"] = sum(one.total_pool_bytes() for one in layouts)
    lengths = [length for length in LENGTHS if length < context] + [context]
    return {
        "num_pages": layout.num_pages,
        "tokens_per_page": layout.tokens_per_page,
        "kv_dtype": layout.dtype,
        "decided_by": pool.reason,
        "backend": assembly.backend.name,
        "devices": layout.num_devices,
        "head_shards": layout.head_shards,
        "pool_replicas": layout.pool_replicas,
        "max_num_seqs": assembly.max_num_seqs,
        "max_target_length": context,
        "windows_charged_in_full": not groups and any(window is not None for window in assembly.decode.windows),
        "windows": [
            {
                "window": group.window,
                "layers": group.layout.num_layers,
                "num_pages": group.layout.num_pages,
                "page_bytes": group.layout.page_bytes(),
                "pages_each": group.row_pages,
            }
            for group in groups
        ],
        "device": device,
        "total": total,
        "requests": [
            {
                "tokens": length,
                "pages": layout.pages_for(length),
                "at_once": requests_at_once(layout, length, assembly.max_num_seqs, groups, step_tokens),
            }
            for length in lengths
        ],
    }


def show(plan: dict[str, Any]) -> None:
    """Print a plan as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    devices = "1 device" if plan["devices"] == 1 else f"{plan['devices']} devices"
    memory = Table("bytes", title=f"{devices}, {plan['kv_dtype']} pages, {plan['backend']} backend")
    memory.add_column("a device", justify="right")
    memory.add_column("in all", justify="right")
    names = {"page_bytes": "one page", "pool_bytes": "pool", "workspace_bytes": "split-KV workspace"}
    for name, title in (names | {"weight_bytes": "weights"}).items():
        memory.add_row(title, f"{plan['device'][name]:,}", f"{plan['total'][name]:,}")
    fits = Table(title="requests that fit at once")
    for title in ("tokens", "pages each", "at once"):
        fits.add_column(title, justify="right")
    for entry in plan["requests"]:
        fits.add_row(*(f"{entry[name]:,}" for name in ("tokens", "pages", "at_once")))
    console.print(memory)
    console.print(f"{plan['num_pages']} pages of {plan['tokens_per_page']} tokens ({plan['decided_by']})")
    for window in plan["windows"]:
        console.print(
            f"{window['num_pages']} pages for {window['layers']} layers with a window of {window['window']} tokens, "
            f"{window['page_bytes']:,} bytes each a device, at most {window['pages_each']} a request that decodes"
        )
    console.print(fits)
    console.print(f"at most {plan['max_num_seqs']} requests run at once (paged_max_num_seqs)")
    if plan["windows_charged_in_full"]:
        console.print("layers with a sliding window are charged at full length")
    if not plan["requests"][-1]["at_once"]:
        console.print(
            f"no request of max_target_length={plan['max_target_length']} tokens fits: those longer than "
            f"{plan['num_pages'] * plan['tokens_per_page']} are refused when they are submitted"
        )

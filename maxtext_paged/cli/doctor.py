"""``maxtext-paged doctor``: what would run here, and why.

For:        the device, the versions, the attention backend; with a configuration its pool, end tokens and weights.
Not for:    running anything: no weights are loaded and no pool is allocated.
May import: maxtext_paged; jax and MaxText inside functions.
"""

from __future__ import annotations

import argparse
import logging
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from maxtext_paged.cli import CommandError, ExitCode, one_line
from maxtext_paged.cli.configuration import check_arguments, keep_every_program, load_configuration
from maxtext_paged.cli.environment import import_maxtext, prepare_environment
from maxtext_paged.window_sizing import describe_group

if TYPE_CHECKING:
    from maxtext_paged.assembly import PagedAssembly

PACKAGES = ("maxtext-paged", "maxtext", "jax", "jaxlib", "flax", "orbax-checkpoint", "tokenizers")
_MIB = 2**20


def run(arguments: argparse.Namespace) -> int:
    """Print the report on stdout."""
    if arguments.config is not None:
        check_arguments(arguments.config, arguments.overrides)
    prepare_environment(logging.WARNING)
    for line in machine():
        print(line)
    import_maxtext()
    if arguments.config is None:
        for line in nominal_backend():
            print(line)
        return ExitCode.OK
    config = load_configuration(arguments.config, arguments.overrides)
    for line in model(config):
        print(line)
    print(_line("programs", keep_every_program()))
    return ExitCode.OK


def machine() -> Iterator[str]:
    """``machine_facts`` as lines."""
    yield from (_line(*fact) for fact in machine_facts())


def machine_facts() -> Iterator[tuple[str, str]]:
    """Versions and devices, each with its name.

    Raises:
      CommandError: jax finds no device for the platform it was told to use.
    """
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        yield package, _version(package)
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise CommandError(f"jax finds no device: {one_line(error)}") from error
    kinds = [device.device_kind for device in devices]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield "platform", devices[0].platform
    yield "devices", f"{counted} (jax process {jax.process_index()} of {jax.process_count()})"


def nominal_backend() -> Iterator[str]:
    """The backend of a common geometry: without a configuration there is no other."""
    import jax

    from kv_common.layout import KvStorageLayoutV1
    from kv_execution.attention.select import choose_backend
    from maxtext_paged.config import PagedOptions

    native = PagedOptions.from_config(None).paged_attention_native  # the environment's kill switch
    layout = KvStorageLayoutV1(1, 1, 16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    switch = None if native == "auto" else int(native)
    choice = choose_backend("auto", jax.default_backend(), layout, native_switch=switch)
    yield _line("backend", f"{choice.name}: {choice.reason} (for heads of 128; give CONFIG.yml for a model's own)")


def model(config: Any) -> Iterator[str]:
    """What a configuration comes to on this machine.

    Raises:
      ConfigError, UnsupportedError: it cannot run.
    """
    from maxtext_paged.assembly import assemble
    from maxtext_paged.tokenizer import load_tokenizer

    yield from (_line(*fact) for fact in assembly_facts(assemble(config)))
    tokenizer = load_tokenizer(config)
    yield _line("tokenizer", f"{config.tokenizer_path}, end tokens {sorted(tokenizer.eos_ids) or 'none'}")


def assembly_facts(assembly: PagedAssembly) -> Iterator[tuple[str, str]]:
    """Backend, model and pool, each with its name."""
    config, layout, groups = assembly.config, assembly.model.layout, assembly.model.window_groups
    num_layers = layout.num_layers + sum(group.layout.num_layers for group in groups)
    yield "backend", f"{assembly.backend.name}: {assembly.backend.reason}"
    for line in assembly.decode.describe():
        yield "decode", line
    yield "products", assembly.model.products.describe()
    yield (
        "model",
        f"{config.decoder_block.value}, {num_layers} attention layers, {layout.num_kv_heads} KV heads of "
        f"{layout.head_dim}, context {config.max_target_length}",
    )
    yield (
        "KV pool",
        f"{layout.num_pages} pages of {layout.tokens_per_page} tokens, {layout.dtype}, "
        f"{layout.device_pool_bytes() / _MIB:.1f} MiB a device, {layout.total_pool_bytes() / _MIB:.1f} MiB in all "
        f"({assembly.pool.reason})",
    )
    for group in groups:
        yield "KV pool", describe_group(group)
    yield "requests", f"{assembly.max_num_seqs} at once (paged_max_num_seqs)"
    yield "weights", config.load_parameters_path or "random (load_parameters_path is empty)"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _line(name: str, value: str) -> str:
    return f"{name + ':':<18}{value}"

"""A configuration given as the path of its file.

For:        Python callers who have what ``maxtext-paged convert`` writes and want an engine of it.
Not for:    the command (cli/configuration.py has the reading, and defaults for a job on this machine).
May import: the standard library, kv_common, maxtext_paged.cli.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from kv_common.errors import ConfigError

logger = logging.getLogger(__name__)


def read_config(config: Any, overrides: Mapping[str, Any] | None = None) -> Any:
    """MaxText's configuration: the one that is given, or the one that a file holds.

    Where it is a file's, what that leaves open has the command's defaults (``attention=gpu_paged`` among them), and
    compiled programs are kept as the command keeps them; one INFO line says where.

    Args:
      config: MaxText's configuration, or a path.
      overrides: options that win over the file's.

    Raises:
      ConfigError: the file or an option is unusable, or there are overrides beside a configuration that is made.
    """
    if not isinstance(config, str | os.PathLike):
        if overrides:
            raise ConfigError("overrides go with the path of a configuration; this one is made: set them in it")
        return config
    from maxtext_paged.cli import CommandError
    from maxtext_paged.cli.configuration import keep_every_program, load_configuration

    words = [f"{name}={json.dumps(value)}" for name, value in (overrides or {}).items()]
    try:
        loaded = load_configuration(os.fspath(config), words)
    except CommandError as error:
        raise ConfigError(str(error)) from error
    logger.info("%s", keep_every_program())
    return loaded

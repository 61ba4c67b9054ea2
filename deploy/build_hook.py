"""Puts the compiled books into a wheel, if OCTAVO_COMPILED=1 asks for it; hatchling runs this (ADR 38)."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledCore(BuildHookInterface[Any]):
    """Compiles in a folder of its own. An editable install stays as it is: its source changes."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What pip installs into the build's own environment."""
        return list(self._compiled_core().REQUIREMENTS) if _is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have what was compiled packed beside its source, for this interpreter and platform alone."""
        if not _is_asked_for() or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        target = Path(self._folder.name)
        for path in self._compiled_core().compile_core(Path(self.root), target):
            build_data["force_include"][str(target / path)] = str(path)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _compiled_core(self) -> Any:
        """The project is not installed where it is built."""
        sys.path.insert(0, self.root)
        from deploy import compiled_core

        return compiled_core


def _is_asked_for() -> bool:
    return os.environ.get("OCTAVO_COMPILED") == "1"

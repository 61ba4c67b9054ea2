"""Generate octavo/v1 from the schemas. Run after editing a .proto; `--check` fails when the committed code differs.

The folder path of a schema is its Python package, so the generated imports are right as they are; and it is its proto
package, but for a protocol of others. The gRPC plugin runs only on schemas that define a service: it would write
empty modules for the rest.
"""

import argparse
import filecmp
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
CHECKOUT = PROTO.parent
PACKAGE = "octavo/v1"


def generate(target: Path) -> None:
    """Write the generated modules below `target`."""
    schemas = sorted((PROTO / PACKAGE).glob("*.proto"))
    services = [path for path in schemas if "\nservice " in path.read_text()]
    _protoc(schemas, f"--python_out={target}", f"--mypy_out=quiet:{target}")
    _protoc(services, f"--grpc_python_out={target}", f"--mypy_grpc_out=quiet:{target}")
    (target / PACKAGE / "__init__.py").write_text('"""Generated from proto/octavo/v1; see proto/generate.py."""\n')


def _protoc(schemas: list[Path], *outputs: str) -> None:
    os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # the mypy plugins
    if protoc.main(["protoc", f"-I{PROTO}", *outputs, *map(str, schemas)]) != 0:
        sys.exit(1)


def drift(fresh: Path) -> list[str]:
    """Names of generated files that differ between `fresh` and the checkout, missing and superfluous ones included."""
    ours = {path.name for path in (CHECKOUT / PACKAGE).iterdir() if path.is_file()}
    theirs = {path.name for path in (fresh / PACKAGE).iterdir()}
    _, different, odd = filecmp.cmpfiles(fresh / PACKAGE, CHECKOUT / PACKAGE, ours & theirs, shallow=False)
    return sorted({*different, *odd, *(ours ^ theirs)})


def main() -> None:
    """Generate, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        (fresh / PACKAGE).mkdir(parents=True)
        generate(fresh)
        if check:
            if stale := drift(fresh):
                sys.exit(f"octavo/v1 differs from the schemas in {', '.join(stale)}: run python proto/generate.py")
            return
        shutil.rmtree(CHECKOUT / PACKAGE, ignore_errors=True)
        shutil.copytree(fresh / PACKAGE, CHECKOUT / PACKAGE)


if __name__ == "__main__":
    main()

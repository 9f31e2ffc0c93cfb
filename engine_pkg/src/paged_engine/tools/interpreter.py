"""Says whether a Python interpreter can run the engine inside Triton's Python backend.

Run as a script by `build.sh`, on interpreters that have nothing installed and may be too old, so it is plain Python
that needs the standard library only:

    python3.11 -I interpreter.py     prints what is missing, one word each, nothing when all is there
"""

import ctypes
import importlib.util
import os
import sys
import sysconfig

OLDEST = (3, 10)
NEWEST = (3, 12)  # the last one that numpy 1.26 has wheels for, which the packaged server's stub needs


def libpython_folder() -> "str | None":
    """Return the folder of the shared libpython, "" when the loader finds it by itself, None when there is none.

    Triton's Python stub embeds the interpreter, so it links the library; a Debian python3 comes without it.
    """
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if not name.startswith("libpython") or ".so" not in name:
        return None
    folder = sysconfig.get_config_var("LIBDIR") or ""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for candidate in (folder, os.path.join(folder, multiarch)):  # noqa: PTH118
        if os.path.isfile(os.path.join(candidate, name)):  # noqa: PTH113, PTH118
            return candidate
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return ""


def missing() -> "list[str]":
    """Return what this interpreter lacks, of: version, venv, libpython."""
    lacks = []
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        lacks.append("version")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        lacks.append("venv")
    if libpython_folder() is None:
        lacks.append("libpython")
    return lacks


if __name__ == "__main__":
    print("\n".join(missing()))

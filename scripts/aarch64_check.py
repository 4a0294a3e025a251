"""Run tests of the CPU kernels for aarch64 in QEMU's user emulation, on an x86_64 machine with Debian's apt.

    python scripts/build_wheels.py --python python3.11 --arch aarch64 --out dist
    python scripts/aarch64_check.py dist/foreword-*-cp311-*aarch64.whl [tests and options of pytest]

The emulator, an arm64 Python and the wheels of arm64 go below build/aarch64; nothing is installed. What passes
here has the right bits; speed, and what depends on it, an ARM machine alone can show.
"""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "aarch64"
PYTHON = "3.11"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
TORCH = "torch==2.8.0"  # PyPI's builds for aarch64 of later versions are linked with CUDA's libraries
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "transformers", "fsspec", "networkx", "sympy")
TESTS = (
    "tests/unit/kernels/test_kernels.py",
    "tests/unit/kernels/test_native_arguments.py",
    "tests/unit/kernels/test_factors.py",
)


def main() -> None:
    """Fetch what is missing, unpack the wheel, and end as pytest ends."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("aarch64_check: usage: aarch64_check.py WHEEL [tests and options of pytest]")
    WORK.mkdir(parents=True, exist_ok=True)
    emulator, root, packages = fetch_emulator(), fetch_root(), fetch_packages()
    shutil.rmtree(packages / "foreword", ignore_errors=True)
    zipfile.ZipFile(sys.argv[1]).extractall(packages)
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-q"]
    paths = f"{packages}:{ROOT / 'tests'}"
    # -P: src/ has no kernels for aarch64, and must not hide the wheel.
    python = [
        str(emulator),
        "-L",
        str(root),
        "-E",
        f"PYTHONPATH={paths}",
        f"{root}/usr/bin/python{PYTHON}",
        "-P",
    ]
    done = subprocess.run([*python, *pytest, *(sys.argv[2:] or TESTS)], cwd=ROOT, check=False)
    sys.exit(done.returncode)


def fetch_emulator() -> Path:
    """Return QEMU's static emulator of aarch64."""
    folder = WORK / "emulator"
    if not folder.exists():
        run("apt-get", "download", "qemu-user-static", cwd=WORK)
        unpack(WORK.glob("qemu-user-static*.deb"), folder)
    return folder / "usr/bin/qemu-aarch64-static"


def fetch_root() -> Path:
    """Return a folder with Python for arm64 and the libraries that it loads."""
    root = WORK / "root"
    if not root.exists():
        state = WORK / "apt"
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        # A state of its own: the machine's packages and their architecture stay as they are.
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::Cache": state / "cache",
        }
        options = [f"-o{name}={value}" for name, value in settings.items()]
        run("apt-get", *options, "update")
        wanted = (f"python{PYTHON}", "libstdc++6", "libgomp1")
        run("apt-get", *options, "install", "--yes", "--download-only", "--no-install-recommends", *wanted)
        unpack((state / "cache/archives").glob("*.deb"), root)
    return root


def fetch_packages() -> Path:
    """Return a folder with the packages of arm64 that the tests import."""
    folder = WORK / "packages"
    if not folder.exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
        needed = [one for one in needed if not one.startswith("torch")]
        platforms = [option for name in PLATFORMS for option in ("--platform", name)]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary=:all:",
            "--python-version",
            PYTHON,
        ]
        pip += [*platforms, "--target", str(folder)]
        run(*pip, "--no-deps", TORCH)
        run(*pip, *TOOLS, *needed)
    return folder


def unpack(files: Iterable[Path], folder: Path) -> None:
    """Extract Debian packages into a folder that is complete or not there."""
    partial = folder.with_name(f"{folder.name}.partial")
    for file in sorted(files):
        run("dpkg-deb", "-x", file, partial)
    partial.rename(folder)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; its failure ends the script."""
    if subprocess.run(command, cwd=cwd, check=False).returncode != 0:
        sys.exit(f"aarch64_check: {' '.join(map(str, command[:2]))} failed")


if __name__ == "__main__":
    main()

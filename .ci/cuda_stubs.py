"""Replace the CUDA libraries that a CUDA build of torch links by empty ones, so that it runs on CPUs without them.

    python .ci/cuda_stubs.py SITE_PACKAGES

The libraries have every symbol that torch links, and each function returns the error "no driver", as a number or, if
it returns a text, as that. Import, autograd, gloo and the profiler need no more. The packages of the libraries are
registered as installed, so that pip downloads none of them: they have several GB. Needs gcc and readelf.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import Distribution, distributions
from pathlib import Path

_CUDA_PACKAGES = re.compile(r"(nvidia|cuda)-|triton\b")
_CUDA_SYMBOLS = re.compile(r"(cu|nccl|nvrtc|nv|__cuda|__nv)")
_TEXTS = re.compile(r"(Error|Status)(String|Name)$|^ncclGetLastError$")
"""Functions that return a text."""
_NO_DRIVER = 35
"""The error cudaErrorInsufficientDriver."""


def register_packages(site: Path, torch: Distribution) -> None:
    """Register the CUDA packages that torch requires on this system as installed, without files."""
    for requirement in torch.requires or []:
        name, _, condition = requirement.partition(";")
        if "extra" in condition or not _CUDA_PACKAGES.match(name):
            continue
        package = re.match(r"[\w.-]+", name)[0]
        version = re.search(r"[=>~]=\s*([\w.]+)", name)
        folder = site / f"{package.replace('-', '_')}-{version[1] if version else '0'}.dist-info"
        folder.mkdir(exist_ok=True)
        extras = re.search(r"\[(.*)\]", name)
        lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version[1] if version else '0'}"]
        lines += [f"Provides-Extra: {extra.strip()}" for extra in (extras[1].split(",") if extras else ())]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "INSTALLER").write_text("cuda_stubs\n")
        (folder / "RECORD").write_text("")


def build_libraries(torch: Path) -> list[str]:
    """Build the libraries that torch links and that are not there, and return their names."""
    own = {file.name: file for file in [*torch.glob("lib/*.so*"), *torch.glob("*.so")]}
    stubs = {name for name, file in own.items() if _is_stub(file)}
    missing: set[str] = set()
    versioned: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    undefined: set[str] = set()
    defined: set[str] = set()
    for name, file in own.items():
        if name in stubs:
            continue
        missing |= {needed for needed in _needed(file) if (needed not in own or needed in stubs) and _is_cuda(needed)}
        sources = _version_sources(file)
        for symbol, version, is_defined in _symbols(file):
            if is_defined:
                defined.add(symbol)
            elif not version:
                undefined.add(symbol)
            elif sources.get(version) and _is_cuda(sources[version]):
                missing.add(sources[version])
                versioned[sources[version]][version].add(symbol)
    if missing:
        # A symbol without a version is found in any library that is loaded.
        rest = {symbol for symbol in undefined - defined if _CUDA_SYMBOLS.match(symbol)}
        versioned[min(missing)][""] |= rest
    for library in sorted(missing):
        _build(torch / "lib" / library, versioned[library])
    return sorted(missing)


def _is_cuda(library: str) -> bool:
    return re.match(r"lib(cu|nccl|nv)", library) is not None


def _is_stub(file: Path) -> bool:
    return _is_cuda(file.name) and file.stat().st_size < 200_000 and b"accel_nb_stub" in file.read_bytes()


def _read(file: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, file], capture_output=True, text=True, check=True).stdout


def _needed(file: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _read(file, "-d"))


def _version_sources(file: Path) -> dict[str, str]:
    """Return the library of each version of symbols that a file needs."""
    sources, library = {}, ""
    for line in _read(file, "-V").splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and library:
            sources[found[1]] = library
    return sources


def _symbols(file: Path) -> list[tuple[str, str, bool]]:
    """Return name, version and whether it is defined here, of each symbol that must be there."""
    found = []
    for line in _read(file, "--dyn-syms").splitlines():
        parts = line.split()
        if len(parts) >= 8 and parts[0].rstrip(":").isdigit():
            name, _, version = parts[7].partition("@")
            if parts[6] != "UND" or parts[4] != "WEAK":
                found.append((name, version.strip("@"), parts[6] != "UND"))
    return found


def _build(library: Path, symbols: dict[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "stub.c"), Path(work, "stub.map")
        names = sorted({name for group in symbols.values() for name in group})
        functions = [
            f'const char *{name}(void) {{ return "no driver"; }}'
            if _TEXTS.search(name)
            else f"int {name}(void) {{ return {_NO_DRIVER}; }}"
            for name in names
        ]
        source.write_text("\n".join(['const char accel_nb_stub[] = "accel_nb_stub";', *functions]) + "\n")
        groups = [
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(group))} }};"
            for version, group in symbols.items()
            if version and group
        ]
        command = [
            "gcc",
            "-w",
            "-fno-builtin",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{library.name}",
            "-o",
            library,
            source,
        ]
        if groups:
            script.write_text("\n".join(groups) + "\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main() -> None:
    """Make stubs for the torch of a site-packages folder."""
    site = Path(sys.argv[1])
    [torch] = [found for found in distributions(path=[str(site)]) if found.metadata["Name"] == "torch"]
    if not any(_CUDA_PACKAGES.match(requirement) for requirement in torch.requires or []):
        return
    register_packages(site, torch)
    built = build_libraries(site / "torch")
    print(f"torch {torch.version}: {len(built)} CUDA libraries are empty ones ({', '.join(built)})")


if __name__ == "__main__":
    main()

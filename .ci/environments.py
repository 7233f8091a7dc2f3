"""Build the environments of users (Colab, Kaggle, oldest and newest versions, a plain install) and run tests in them.

    python .ci/environments.py run NAME... [--tests ARGUMENT...] build what has changed, and test (arguments of pytest)
    python .ci/environments.py check NAME...                     test what users do where the environment is built,
                                                                 and record nothing
    python .ci/environments.py refresh NAME [FREEZE]             write NAME's list of packages anew; FREEZE is a file or
                                                                 URL with the output of `pip freeze` there

An environment is a venv in the cache folder, built anew when its list or the project's requirements change.
The tests use the wheel, from a folder without the source.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "environments"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel_nb" / "environments"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "scikit-learn", "transformers")
"""What the tests need beside the package."""
WHEEL_TOOLS = ("twine==7.0.0", "check-wheel-contents==0.6.3", "uv==0.13.9")


@dataclass(frozen=True)
class Environment:
    """One environment: its Python (None: the one that runs this), and how its kernels differ from a plain one."""

    title: str
    python: str | None
    variables: dict[str, str] = field(default_factory=dict)
    keeps_packages: bool = False
    """Whether the listed packages are there before, so that an installation may replace none of them."""


ENVIRONMENTS = {
    "colab": Environment("Google Colab", "3.13", {"COLAB_RELEASE_TAG": "release-colab"}, keeps_packages=True),
    "kaggle": Environment("Kaggle", "3.12", {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, keeps_packages=True),
    "oldest": Environment("lowest versions", "3.10"),
    "newest": Environment("newest versions", "3.13"),
    "laptop": Environment("`pip install` into an empty venv", None),
}


class NotHere(Exception):
    """The environment cannot be built on this machine."""


def find_python(version: str | None) -> str:
    """Return an interpreter of a version (major and minor), from the path or from pyenv."""
    if version is None:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for candidate in [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]:
        answer = shutil.which(candidate) and subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if answer and answer.stdout.strip() == version:
            return candidate
    raise NotHere(f"Python {version} is not installed")


def read_list(name: str) -> dict[str, str]:
    """Return the versions that an environment's list names, by package."""
    lines = (LISTS / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements() -> list[str]:
    """Return the project's requirements."""
    command = [sys.executable, ROOT / ".ci" / "requirements.py"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def pip(python: Path | str, *arguments: object, read: bool = False) -> str:
    """Run pip for an interpreter."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if read else None).stdout or ""


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the packages of an environment, by normalized name."""
    return {_normal(row["name"]): row["version"] for row in json.loads(pip(python, "list", "--format=json", read=True))}


def find_fingerprint(name: str) -> str:
    """Return a hash of what decides the packages of an environment, versions of the requirements aside."""
    names = sorted(map(_name, requirements()))
    inputs = [(ROOT / ".ci" / "cuda_stubs.py").read_text(), json.dumps([read_list(name), TOOLS, names])]
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()


def is_built(name: str) -> bool:
    """Return whether an environment stands, has its list, and satisfies the requirements."""
    record = CACHE / name / "built.json"
    if not record.exists() or json.loads(record.read_text())["fingerprint"] != find_fingerprint(name):
        return False
    command = [CACHE / name / "bin" / "python", "-m", "pip", "install", "--quiet", "--dry-run", "--no-index"]
    return subprocess.run([*command, "--no-deps", *requirements()], capture_output=True).returncode == 0


def build(name: str) -> Path:
    """Build an environment unless it is up to date, and return its interpreter."""
    environment, folder = ENVIRONMENTS[name], CACHE / name
    pins = read_list(name)
    python, record = folder / "bin" / "python", folder / "built.json"
    fingerprint = find_fingerprint(name)
    if is_built(name):
        return python
    base = find_python(environment.python)
    if shutil.which("gcc") is None or shutil.which("readelf") is None:
        raise NotHere("gcc and readelf are needed to replace the CUDA libraries")
    print(f"building {name} in {folder}", flush=True)
    subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
    _install_torch(python, pins["torch"])
    with tempfile.TemporaryDirectory() as work:
        listed = Path(work, "listed.txt")
        listed.write_text("".join(f"{package}=={version}\n" for package, version in pins.items()))
        wanted = Path(work, "wanted.txt")
        wanted.write_text("\n".join(requirements()) + "\n")
        if environment.keeps_packages:
            pip(python, "install", "--quiet", "--requirement", listed)
        before = installed(python)
        options = () if environment.keeps_packages else ("--constraint", listed)
        pip(python, "install", "--quiet", *options, "--requirement", wanted)
        after = installed(python)
        replaced = [package for package in before if after.get(package) != before[package]]
        added = sorted(set(after) - set(before))
        pip(python, "install", "--quiet", "--constraint", listed, *TOOLS)
    facts = {"fingerprint": fingerprint, "replaced": replaced if environment.keeps_packages else None, "added": added}
    if facts["replaced"]:
        raise SystemExit(f"{name}: `pip install accel_nb` replaces {', '.join(replaced)}")
    record.write_text(json.dumps(facts, indent=1))
    return python


def _install_torch(python: Path, version: str) -> None:
    """Install a version of torch from the cache of wheels, without CUDA libraries."""
    wheels = CACHE / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    tag = subprocess.run(
        [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not any(wheels.glob(f"torch-{version}*-{tag}-*.whl")):
        pip(python, "download", "--no-cache-dir", "--no-deps", "--dest", wheels, f"torch=={version}")
    [wheel, *_] = wheels.glob(f"torch-{version}*-{tag}-*.whl")
    pip(python, "install", "--quiet", "--no-deps", "--no-compile", wheel)
    find_site = "import sysconfig; print(sysconfig.get_path('platlib'))"
    site = subprocess.run([python, "-c", find_site], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([sys.executable, ROOT / ".ci" / "cuda_stubs.py", site], check=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the working tree into a folder."""
    (ROOT / "accel_nb" / "labextension" / "install.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return next(folder.glob("*.whl"))


def check_wheel(wheel: Path, work: Path) -> None:
    """Check metadata and contents of the wheel, and that uv installs it too."""
    folder = CACHE / "tools"
    tools = folder / "bin"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip(tools / "python", "install", "--quiet", *WHEEL_TOOLS)
        (folder / "complete").touch()
    subprocess.run([tools / "twine", "check", "--strict", wheel], check=True)
    subprocess.run([tools / "check-wheel-contents", wheel], check=True)
    place = work / "uv"
    subprocess.run([tools / "uv", "venv", "--quiet", "--python", sys.executable, place], check=True)
    environment = {**os.environ, "VIRTUAL_ENV": str(place)}
    command = [tools / "uv", "pip", "install", "--quiet", "--offline", "--no-deps", wheel]
    subprocess.run(command, check=True, env=environment)
    script = "import importlib.metadata as m; print('uv installed', m.version('accel_nb'))"
    subprocess.run([place / "bin" / "python", "-c", script], check=True)


def test(name: str, wheel: Path, tests: list[str], work: Path, *, records: bool) -> bool:
    """Install the wheel in an environment, run tests there and record the result; return whether they passed."""
    python = build(name)
    pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    report = work / f"{name}.json"
    # The folder has the tests and no source, and no link to where the source is: what is imported is the wheel.
    folder = work / "checkout"
    if not folder.exists():
        for part in ("tests", "notebooks", "docs"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables = {"ENVIRONMENT_NAME": name, "ENVIRONMENT_REPORT": str(report), "OMP_WAIT_POLICY": "passive"}
    variables |= ENVIRONMENTS[name].variables
    path = os.pathsep.join([str(python.parent), "/usr/bin", "/bin"])
    options = ["-p", "no:cacheprovider", "-p", "tests.environments.report", "--rootdir", folder, "--timeout", "600"]
    command = [python, "-m", "pytest", *options, *tests]
    print(f"{name}: {' '.join(tests)}", flush=True)
    done = subprocess.run(command, cwd=folder, env={**plain, **variables, "PATH": path})
    if records and report.exists():
        _write_result(name, json.loads(report.read_text()))
    return done.returncode == 0


def _write_result(name: str, result: dict[str, Any]) -> None:
    """Write a result beside those of earlier runs; of parts that did not run now, the earlier result stays."""
    facts = json.loads((CACHE / name / "built.json").read_text())
    place = LISTS / "results" / f"{name}.json"
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        before = json.loads(place.read_text())
        result["counts"] = {**before["counts"], **result["counts"]}
        if not result["results"]:
            result |= {"results": before["results"], "load_s": before["load_s"]}
    result |= {"replaced": facts["replaced"], "added": facts["added"]}
    place.write_text(json.dumps(result, indent=1) + "\n")


def refresh(name: str, source: str | None) -> None:
    """Write the list of an environment anew, with the versions of a `pip freeze` for the packages that it lists."""
    if name == "oldest":
        found = {_normal(_name(line)): re.search(r">=([\w.]+)", line)[1] for line in requirements()}
        names = list(map(_name, requirements()))
        origin = "the lower bounds of pyproject.toml"
    elif name == "newest":
        with tempfile.TemporaryDirectory() as work:
            report = Path(work, "report.json")
            options = ("install", "--quiet", "--dry-run", "--ignore-installed", "--report", report)
            pip(find_python(ENVIRONMENTS[name].python), *options, *requirements())
            rows = json.loads(report.read_text())["install"]
        found = {_normal(row["metadata"]["name"]): row["metadata"]["version"] for row in rows}
        names = [*map(_name, requirements()), "ipython", "jupyter_client"]
        origin = "the package index"
    elif source is None:
        raise SystemExit(f"refresh {name} takes a file or URL with the output of `pip freeze` there")
    else:
        text = urllib.request.urlopen(source).read().decode() if "://" in source else Path(source).read_text()
        found = {_normal(line.split("==")[0]): line.split("==")[1] for line in text.split() if "==" in line}
        names = [*read_list(name), *map(_name, requirements())]
        origin = "`pip freeze` there"
    kept = {package: found[_normal(package)].split("+")[0] for package in names if _normal(package) in found}
    environment = ENVIRONMENTS[name]
    head = f"# {environment.title}, {date.today()}, Python {environment.python}. From {origin}, by\n"
    head += f"# `python .ci/environments.py refresh {name}`.\n"
    rows = sorted(kept.items(), key=lambda row: row[0].lower())
    (LISTS / f"{name}.txt").write_text(head + "".join(f"{package}=={version}\n" for package, version in rows))


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("names", nargs="+", choices=ENVIRONMENTS)
    run.add_argument("--tests", nargs=argparse.REMAINDER, default=["tests/environments"])
    check = commands.add_parser("check")
    check.add_argument("names", nargs="+", choices=ENVIRONMENTS)
    again = commands.add_parser("refresh")
    again.add_argument("name", choices=ENVIRONMENTS)
    again.add_argument("source", nargs="?")
    given = parser.parse_args()
    if given.command == "refresh":
        refresh(given.name, given.source)
        return 0
    names, checks = given.names, given.command == "check"
    if checks:
        names = [name for name in names if is_built(name)]
        if missing := sorted(set(given.names) - set(names)):
            print(
                f"The environments {', '.join(missing)} were not tested: `make test-environments` has not built them.",
                file=sys.stderr,
            )
        if not names:
            return 0
    failed = []
    with tempfile.TemporaryDirectory() as work:
        wheel = build_wheel(Path(work, "dist"))
        check_wheel(wheel, Path(work))
        for name in names:
            try:
                tests = ["tests/environments"] if checks else given.tests
                if not test(name, wheel, tests, Path(work), records=not checks):
                    failed.append(name)
            except NotHere as why:
                print(f"{name} was not tested: {why}", file=sys.stderr)
    if failed:
        print(f"tests failed in: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

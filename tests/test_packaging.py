"""What a distribution of the project promises."""

import importlib
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("host_allocator", "pallas_kernels", "kvjax")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_typed_and_has_what_it_lists(name):
  assert (ROOT / name / "py.typed").is_file()
  package = importlib.import_module(name)
  assert package.__doc__
  names = getattr(package, "__all__", [])
  assert [name for name in names if not hasattr(package, name)] == []
  assert list(names) == sorted(names)


def test_all_three_packages_are_distributed():
  wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
  assert set(wheel["packages"]) == set(PACKAGES)


def test_the_host_side_comes_without_jax():
  code = "import host_allocator, sys; sys.exit('jax' in sys.modules)"
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_changelog_has_this_version():
  changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
  assert PROJECT["project"]["version"] in changelog


def test_no_file_names_a_place_on_one_machine():
  suffixes = {".py", ".md", ".toml", ".ipynb", ".jsonl", ".txt"}
  folders = (*PACKAGES, "configs", "colabs", "tests", ".ci")
  files = [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci" / "run"]
  for folder in folders:
    files += [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
  place = re.compile(r"(?<![\w.])/(?:work|root|home)/\w")
  named = [
    str(path.relative_to(ROOT))
    for path in files
    if path.is_file() and place.search(path.read_text(encoding="utf-8"))
  ]
  assert named == []

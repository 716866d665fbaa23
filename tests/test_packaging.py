"""The repository is a package however it is installed, and the names of its folders disturb nobody."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("strategies", "kernels", "calibration", "samples")  # folders beside cachedit/ that are installed inside it
DATA = (".json", ".safetensors", ".md", ".txt", ".typed", ".css")


def python(code: str, cwd: Path = ROOT, executable: str | Path = sys.executable, path: Path | None = None) -> str:
    """Standard output of ``python -c code`` in a fresh interpreter; PYTHONPATH is ``path`` alone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [str(executable), "-W", "ignore", "-c", textwrap.dedent(code)]
    return output(command, cwd=cwd, env=environment)


def output(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


# -- the wheel ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean and no stale ``build`` folder leaks in."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", ".git", "build", "dist", "*.egg-info", ".*_cache")
    for name in ("cachedit", *MAPPED):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(copy),
    ]
    output(pip, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment that holds the wheel, and finds the dependencies of this one behind it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    output([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    executable = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(executable), "install", "-q", "--no-deps", "--no-index"]
    output([*pip, str(wheel)])
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a path alone: .pth files in it sleep
    return executable


def in_wheel(path: Path) -> str:
    """Where a file of the repository lies in the wheel."""
    inside = path.relative_to(ROOT).as_posix()
    return inside if inside.split("/")[0] == "cachedit" else f"cachedit/{inside}"


def test_the_wheel_holds_every_file_of_the_folders(wheel: Path) -> None:
    files = [path for name in ("cachedit", *MAPPED) for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {in_wheel(path) for path in files if path.suffix in (".py", *DATA)}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == wanted
    assert "cachedit/py.typed" in names
    assert "cachedit/calibration/profiles/flux-dev.json" in names


def test_the_package_list_equals_the_folders() -> None:
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [init.parent for name in ("cachedit", *MAPPED) for init in (ROOT / name).rglob("__init__.py")]
    assert sorted(setuptools["packages"]) == sorted(in_wheel(folder).replace("/", ".") for folder in packages)
    assert setuptools["package-dir"] == {"cachedit": "cachedit"} | {f"cachedit.{name}": name for name in MAPPED}


def test_the_installed_package_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    printed = python(
        """
        import cachedit, cachedit.calibration, cachedit.kernels, cachedit.samples, cachedit.strategies
        from cachedit.shipped import shipped
        print(cachedit.__file__)
        print(len(cachedit.__path__), sorted(cachedit.strategies()), "flux-dev" in shipped())
        """,
        cwd=tmp_path,
        executable=installed,
    ).splitlines()
    assert Path(printed[0]).is_relative_to(installed.parent.parent)
    assert printed[1].startswith("1 [")  # one folder: the path extension of a checkout has nothing to do
    assert "'mag_cache'" in printed[1]
    assert printed[1].endswith("True")


def test_the_installed_command_lists_the_strategies_and_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    command = str(installed.with_name("cachedit"))
    assert "mag_cache" in output([command, "strategies"], cwd=tmp_path)
    if not list((ROOT / "samples").rglob("*.safetensors")):
        pytest.skip("the sample model has not been trained yet")
    folder = tmp_path / "demo"
    output([command, "demo", "--num-prompts", "1", "--steps", "8", "--out", str(folder)], cwd=tmp_path)
    assert list(tmp_path.rglob("*.html"))


def test_the_installed_app_tells_its_options(installed: Path, tmp_path: Path) -> None:
    told = output([str(installed.with_name("cachedit")), "app", "--help"], cwd=tmp_path)
    assert "--share" in told
    # app.py is no part of the wheel, and works with it from wherever it lies.
    shutil.copy(ROOT / "app.py", tmp_path)
    assert output([str(installed), "app.py", "--help"], cwd=tmp_path) == told


# -- the checkout -------------------------------------------------------------------------------------------------


def test_the_checkout_works_beside_diffusers_and_transformers() -> None:
    # transformers probes for a package called "kernels", which in the root is ours.
    code = (
        "import diffusers, transformers, cachedit; from diffusers import DiTTransformer2DModel as Model; print(Model)"
    )
    assert "DiTTransformer2DModel" in python(code)


def test_the_app_of_the_checkout_tells_its_options(tmp_path: Path) -> None:
    assert "--share" in output([sys.executable, str(ROOT / "app.py"), "--help"], cwd=tmp_path)


@pytest.mark.parametrize("name", ["strategies", "calibration"])
def test_the_bare_name_of_a_folder_is_refused(name: str) -> None:
    code = f"""
        try:
            import {name}
        except ImportError as error:
            print(error)
    """
    assert f"cachedit.{name}" in python(code)


def test_kernels_hands_over_to_an_installed_distribution(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from .deep import get_kernel\n")
    (tmp_path / "kernels" / "deep.py").write_text("def get_kernel():\n    return 'the real one'\n")
    code = """
        import kernels, cachedit.kernels
        from kernels import get_kernel
        import kernels.deep
        print(get_kernel(), cachedit.kernels.__file__)
    """
    assert python(code, path=tmp_path) == f"the real one {ROOT / 'kernels' / '__init__.py'}"


def test_kernels_is_empty_without_another_distribution() -> None:
    printed = python("import kernels; print([name for name in vars(kernels) if not name.startswith('_')])")
    assert printed == "[]"


# -- the import ---------------------------------------------------------------------------------------------------


def test_the_import_is_light() -> None:
    code = """
        import sys, time, torch
        start = time.process_time()  # of this process alone, so a busy machine does not count
        import cachedit
        print(time.process_time() - start, [name for name in NAMES if name in sys.modules])
    """.replace("NAMES", '("diffusers", "transformers", "gradio", "triton", "accelerate", "cachedit.strategies")')
    printed = [python(code).split(" ", 1) for _ in range(3)]
    assert [loaded for _, loaded in printed] == ["[]"] * 3
    assert statistics.median(float(seconds) for seconds, _ in printed) < 0.3


def test_it_works_without_triton_and_gradio(tmp_path: Path) -> None:
    # A file, because the core reads the source of the blocks.
    code = """
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("triton", "gradio"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        import torch
        import cachedit

        class Block(torch.nn.Module):
            def forward(self, x):
                return x + 1

        class Tiny(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

            def forward(self, x, timestep):
                for block in self.blocks:
                    x = block(x)
                return x

        flat = cachedit.Profile.from_ratios([1.0] * 10)
        model = cachedit.wrap(Tiny().eval(), "magcache", profile=flat, num_inference_steps=10)
        with torch.no_grad():
            print(sum(float(model(torch.zeros(1), torch.tensor(1 - step / 10))) for step in range(10)))
        print(cachedit.last_run(model).strip())
    """
    (tmp_path / "without.py").write_text(textwrap.dedent(code))
    assert python("import without", path=tmp_path).splitlines() == ["30.0", "■■□□□■□□□■"]


def test_every_module_imports_on_its_own() -> None:
    # A cycle shows only when another module of it comes first.
    names = [in_wheel(path)[:-3].replace("/", ".") for path in (ROOT / "cachedit" / "feature").glob("*.py")]
    names += ["cachedit.profile", "cachedit.wrap", "cachedit.strategies.mag_cache", "cachedit.kernels.forecast"]
    code = """
        import importlib, sys
        for name in NAMES:
            for loaded in [known for known in sys.modules if known.partition(".")[0] == "cachedit"]:
                del sys.modules[loaded]
            importlib.import_module(name)
        print("ok")
    """.replace("NAMES", repr([re.sub(r"\.__init__$", "", name) for name in names]))
    assert python(code) == "ok"

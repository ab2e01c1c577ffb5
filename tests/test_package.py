"""Tests the wheel, imports between packages, and the README and documentation pages."""

import ast
import builtins
import os
import re
import subprocess
import symtable
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import coat_jax
from experiments.pages import readme as pages

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def _declared(requirements):
    """Returns requirements as import names: "orbax" for "orbax-checkpoint>=0.11"."""
    imports = {"orbax-checkpoint": "orbax", "pillow": "PIL", "scikit-learn": "sklearn"}
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    return {imports.get(name, name.replace("-", "_")) for name in names}


_CORE = _declared(_PROJECT["dependencies"])
_MAY_IMPORT = {
    "pallas_kernels": {"jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy"},
    "coat_jax": _CORE
    | _declared(_PROJECT["optional-dependencies"]["hf"])
    | _declared(_PROJECT["optional-dependencies"]["qwix"])
    | {"pallas_kernels"},
    # A benchmark measures tunix if it is installed.
    "experiments": _CORE
    | _declared(_PROJECT["optional-dependencies"]["experiments"])
    | {"pallas_kernels", "coat_jax", "tunix"},
}


def _imports(path):
    """Yields the top-level names of the packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def _undefined(table, names):
    """Yields global names that functions and classes read but `names` does not have."""
    for scope in table.get_children():
        for symbol in scope.get_symbols():
            is_read = symbol.is_global() and symbol.is_referenced()
            if is_read and symbol.get_name() not in names:
                yield symbol.get_name()
        yield from _undefined(scope, names)


@pytest.mark.parametrize("package", [*_MAY_IMPORT, "tests"])
def test_names_are_defined(package):
    # Linters take the axes in annotations, such as "b s", for names.
    for path in sorted((_ROOT / package).rglob("*.py")):
        table = symtable.symtable(path.read_text(), str(path), "exec")
        symbols = [x for x in table.get_symbols() if x.is_assigned() or x.is_imported()]
        names = {x.get_name() for x in symbols} | {*dir(builtins), "__file__"}
        assert not sorted(_undefined(table, names)), path


@pytest.mark.parametrize("package", _MAY_IMPORT)
def test_arrows_point_one_way(package):
    allowed = _MAY_IMPORT[package] | {package} | sys.stdlib_module_names
    files = sorted((_ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(_ROOT)} imports {name}"
        for path in files
        for name in sorted(set(_imports(path)) - allowed)
    ]
    assert not wrong


# The folders of experiments by floor: each imports itself and lower floors alone.
_FLOORS = (
    {"common"},
    {"activations", "bench", "kernels", "optimizer", "rewrites"},
    {"estimate"},
    {"training"},
    {"finetune", "pretrain", "vlm"},
    {"studies"},
    {"pages"},
)
_WITHOUT_TRAINING = ("activations", "bench", "estimate", "kernels", "optimizer")
_TRAINERS = {"finetune", "pretrain", "studies", "training", "vlm"}


def _experiments_imports():
    """Returns, for each folder of experiments, the folders that its modules import."""
    actual = {name: set() for floor in _FLOORS for name in floor}
    for path in sorted((_ROOT / "experiments").glob("*/**/*.py")):
        folder = path.relative_to(_ROOT / "experiments").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            parts = (name.split(".") for name in names)
            actual[folder] |= {piece[1] for piece in parts if piece[0] == "experiments"}
    return actual


def test_folders_of_experiments_import_lower_floors_alone():
    lower, imports = set(), _experiments_imports()
    for floor in _FLOORS:
        for folder in floor:
            assert imports[folder] <= lower | {folder}, folder
        lower |= floor


def test_benchmarks_need_no_training():
    imports = _experiments_imports()
    for folder in _WITHOUT_TRAINING:
        assert not imports[folder] & _TRAINERS, folder


def test_library_does_not_need_what_experiments_need():
    extras = {"grain", "orbax", "matplotlib", "tqdm", "rich"}
    assert not extras & (_MAY_IMPORT["coat_jax"] | _MAY_IMPORT["pallas_kernels"])
    assert extras <= _MAY_IMPORT["experiments"]


def test_public_names_exist():
    assert len(coat_jax.__all__) == len(set(coat_jax.__all__))
    assert [name for name in coat_jax.__all__ if not hasattr(coat_jax, name)] == []


def test_the_api_reference_is_complete():
    pages = (_ROOT / "docs" / "pages" / "api").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    entries = re.findall(r"^::: coat_jax\.(\w+)$", text, re.M)
    assert sorted(entries) == sorted(coat_jax.__all__)
    assert "\n::: pallas_kernels\n" in text


# Whole models, which other tests train and load, too.
_SLOW_BLOCKS = {
    "experts-0", "experts-1", "finetuning-0", "gpus-0", "gpus-1", "gpus-2", "layers-5",
    "models-hf-0",
}  # fmt: skip


def _blocks():
    """Yields the Python code of the README and of each guide, each block once."""
    blocks = {}
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs" / "pages").glob("*.md"))):
        code = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
        for number, block in enumerate(code):
            blocks.setdefault(block, f"{page.stem}-{number}")
    assert set(blocks.values()) >= _SLOW_BLOCKS
    for block, name in blocks.items():
        marks = [pytest.mark.slow] if name in _SLOW_BLOCKS else []
        yield pytest.param(block, id=name, marks=marks)


def _printed_figures(text):
    """Returns the words of a text, with numbers replaced by 0, and the numbers."""
    number = r"\d[\d,]*\.?\d*"
    values = [float(x.replace(",", "")) for x in re.findall(number, text)]
    return re.sub(number, "0", text).split(), values


@pytest.mark.parametrize("block", list(_blocks()))
def test_examples_of_readme_and_guides_run(block, capsys):
    """Comments at the end of a block show what the block prints."""
    exec(block, {"__name__": "example"})
    comments = re.search(r"\n((?:# .*\n)+)\Z", block)
    if comments:
        printed = re.sub("^# ", "", comments[1], flags=re.M)
        words, values = _printed_figures(capsys.readouterr().out)
        expected_words, expected = _printed_figures(printed)
        assert words == expected_words
        assert values == pytest.approx(expected, rel=0.02)


def test_results_on_pages_are_those_of_the_results_files():
    assert pages.readme(_README) == _README
    home = pages.HOME.read_text()
    assert pages.home(home, _README) == home
    release = pages.RELEASE.read_text()
    assert pages.released(release) == release
    models = pages.MODELS.read_text()
    assert pages.models(models) == models
    experts = pages.EXPERTS.read_text()
    assert pages.of_experts(experts) == experts
    ecosystem = pages.ECOSYSTEM.read_text()
    assert pages.trainings(ecosystem) == ecosystem
    results = (_ROOT / "experiments" / "README.md").read_text()
    assert pages.results() == results


def test_the_readme_is_short():
    assert len(_README.splitlines()) <= 200


_PAGES = (
    *_ROOT.glob("*.md"),
    _ROOT / "experiments" / "README.md",
    *(_ROOT / "docs" / "pages").glob("*.md"),
)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_citation_names_the_version():
    citation = (_ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {coat_jax.__version__}" in citation


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns a folder with the files that the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=_ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_wheel_holds_the_library_and_nothing_else(installed):
    info = f"coat_jax-{coat_jax.__version__}.dist-info"
    assert {p.name for p in installed.iterdir()} == {"coat_jax", "pallas_kernels", info}
    assert (installed / info / "licenses" / "LICENSE").exists()
    sources = {
        path.relative_to(_ROOT)
        for package in ("coat_jax", "pallas_kernels")
        for path in (_ROOT / package).rglob("*.py")
    }
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == sources


def test_wheel_imports(installed):
    program = (
        "import coat_jax as coat, pallas_kernels, sys\n"
        "assert [getattr(coat, name) for name in coat.__all__]\n"
        "import coat_jax.models.hf\n"
        "optional = {'grain', 'jinja2', 'matplotlib', 'tokenizers'}\n"
        "assert not optional & set(sys.modules)\n"
        "print(coat.__file__, pallas_kernels.__file__, sep='\\n')"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )
    files = [Path(line) for line in run.stdout.splitlines()]
    assert files == [
        installed / package / "__init__.py"
        for package in ("coat_jax", "pallas_kernels")
    ]

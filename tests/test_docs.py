"""The documentation builds without a warning, and every public name is in it."""

import ast
import functools
import importlib.util
import os
import pkgutil
import re
import shlex
import shutil
import sys
import urllib.parse
from pathlib import Path

import pytest
import warm
from commands import run_command
from documents import PROGRAMS, ROOT, cells_of, run_script
from documents import TUTORIALS as NOTEBOOKS

import wds_pipes
import wds_pipes.datapipes
import wds_pipes.stages
from wds_pipes.codecs.table import TABLE
from wds_pipes.core.stage import functional_name
from wds_pipes.testing import make_shards

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PUBLIC_WITHOUT_LISTS = ("checkpoint", "lightning", "testing")  # modules without __all__ that users import from


def public():
    """Every public name with its object."""
    names = ["wds_pipes", *(f"wds_pipes.{module.name}" for module in pkgutil.iter_modules(wds_pipes.__path__))]
    for module in map(importlib.import_module, names):
        own = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
        for name in getattr(
            module, "__all__", own if module.__name__.rpartition(".")[2] in PUBLIC_WITHOUT_LISTS else []
        ):
            yield f"{module.__name__}.{name}", getattr(module, name)


PAGES = sorted({*TUTORIALS.glob("docs/**/*.md"), *TUTORIALS.glob("*.md"), ROOT / "README.md"})


def text_of(page):
    """A page, or the text of a tutorial, as Markdown."""
    return page.read_text() if page.suffix == ".md" else "\n\n".join(cells_of(page, "markdown"))


def fences(text):
    """The language of each block of code, and the code; that of a directive is in braces."""
    return re.findall(r"(?ms)^```(.*?)$(.*?)^```$", text)


def test_every_block_of_code_names_its_language():
    """So that a command is not coloured as Python, and has a button that copies it."""
    for page in [*PAGES, *NOTEBOOKS]:
        for language, _ in fences(text_of(page)):
            assert language.startswith("{") or language in {"python", "sh", "text", "toml", "yaml", "json"}, page


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS, *PROGRAMS], ids=lambda page: page.stem)
def test_code_is_not_wider_than_the_site_shows(page):
    """The README's two lines that install and test are one command each."""
    if page.suffix == ".py":
        code = [page.read_text()]
    else:
        wide = {"python"} if page.name == "README.md" else {"python", "sh"}
        code = [code for language, code in fences(text_of(page)) if language in wide]
        code += cells_of(page, "code") if page.suffix == ".ipynb" else []
    assert [line for text in code for line in text.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.stem)
def test_links_work_in_a_clone(page):
    """They name the file with its extension, which the site understands, too."""
    text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", text_of(page))
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", link)]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).is_file()] == []


def test_a_tutorial_is_linked_where_a_page_speaks_of_it():
    for page in [*PAGES, *NOTEBOOKS]:
        assert not re.search(r"`\d\d_\w+`", text_of(page)), page


GROUPS = ("tutorials", "guides", "reference", "explanation")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_a_line_about_each_of_its_pages(group):
    page = (TUTORIALS / "docs" / f"{group}.md").read_text()
    [listed] = re.findall(r"(?s)```{toctree}\n:hidden:\n\n(.*?)```", page)
    linked = re.findall(r"(?m)^- \[[^]]+\]\((\S+)\.(?:md|ipynb)\): \S", page.replace("\n  ", " "))
    assert linked == listed.split()


def test_a_page_says_in_a_clone_that_the_site_fills_it():
    """In the words that conf.py takes away."""
    conf = (TUTORIALS / "docs" / "conf.py").read_text()
    for page in (page for page in PAGES if re.search(r"(?m)\{eval-rst\}|^COMMANDS$|^CODECS$", page.read_text())):
        line = page.read_text().split("\n\n")[1]
        assert line.startswith("> This page is filled in"), page
        assert f"{line}\n" in conf, page


def test_every_step_is_in_the_table():
    table = (TUTORIALS / "docs" / "reference.md").read_text().split("## All steps")[1]
    for name in wds_pipes.stages.__all__:
        step = name if name in ("ShardList", "SampleList") else functional_name(getattr(wds_pipes.stages, name))
        assert f"`{step}(" in table, f"add {step}() to the table in tutorials/docs/reference.md, 'All steps'"


@pytest.mark.slow
def test_the_code_of_the_first_pages_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for page in ("docs/brief.md", "index.md"):
        for block in re.findall(r"(?s)```python\n(.*?)```", (TUTORIALS / page).read_text()):
            local = block.replace("s3://bucket/train-{000000..000999}", "data/*")
            exec(local.replace("num_workers=8", "num_workers=0"), names)
        os.remove("run.pt")
    assert "'cu_seqlens': torch.Size(" in capsys.readouterr().out
    assert names["images"].shape[1:] == (3, 224, 224)


BUILD = """
import sys
from sphinx.cmd.build import main

sys.exit(main(sys.argv[1:]))
"""


LEFT_OUT = {"sphinx.ext.viewcode"}  # the pages of the source code, on which nothing of ours can warn
if importlib.util.find_spec("sphinx_copybutton") is None:
    LEFT_OUT.add("sphinx_copybutton")
NO_DOCUMENTS = {"genindex", "py-modindex", "search"}


def extensions():
    """Those that conf.py lists."""
    (found,) = re.findall(r"(?ms)^extensions = (\[.*?\])$", (TUTORIALS / "docs" / "conf.py").read_text())
    return ast.literal_eval(found)


def located(name):
    """What a package exports by a name, not a module of the same name; None: there is nothing."""
    first, *parts = name.split(".")
    return functools.reduce(lambda found, part: getattr(found, part, None), parts, sys.modules.get(first))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of the built pages."""
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    directory = tmp_path_factory.mktemp("site")
    arguments = [
        "-W",
        "--keep-going",
        "-q",
        "-D",
        f"extensions={','.join(name for name in extensions() if name not in LEFT_OUT)}",
        "-d",
        directory / "trees",
        "-c",
        TUTORIALS / "docs",
        TUTORIALS,
        directory / "docs",
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    built = warm.run(BUILD, *arguments, directory=directory, environment=environment)
    assert built.returncode == 0, built.stderr
    return directory / "docs"


@pytest.mark.slow
def test_it_builds_without_a_warning_and_has_every_public_name(site):
    sphinx = pytest.importorskip("sphinx.util.inventory")
    with open(site / "objects.inv", "rb") as file:
        inventory = sphinx.InventoryFile.load(file, "", lambda *parts: "/".join(parts))
    described = [name for kind, names in inventory.items() if kind.startswith("py:") for name in names]
    exported = list(public())  # which imports what it names
    known = {id(located(name)) for name in described}
    steps = {functional_name(getattr(wds_pipes.stages, name)): name for name in wds_pipes.stages.__all__}
    for name in (name for name in steps if f"pipe.{name}" in described):
        known.add(id(getattr(wds_pipes.stages, steps[name])))
        known.add(id(getattr(wds_pipes.datapipes, steps[name])))
    # these are described as wds_pipes.ShardList, SampleList, mix and join
    sources = ("ShardList", "SampleList", "Mix", "Join")
    known |= {id(getattr(wds_pipes.stages, name)) for name in sources}
    missing = sorted(name for name, value in exported if id(value) not in known)
    assert not missing, (
        f"not in the reference: add it to a page in tutorials/docs/reference/ (a step to a line STEPS): {missing}"
    )
    assert len(exported) > 60
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    order = " ".join(re.sub(r"<[^>]*>", "", pages["docs/reference/order.html"]).split())
    assert "pipe.shuffle_buffer(size, *, seed=None)" in order
    assert order.index("pipe.interleave_shards(count)") < order.index("pipe.shuffle_buffer(size")
    assert '"shuffle_buffer() (pipe method)"' in (site / "searchindex.js").read_text()
    table = " ".join(re.sub(r"<[^>]*>", " ", pages["docs/reference/codecs.html"]).split())
    for row in TABLE:
        assert f"{' '.join(row.names)} {row.gives} " in table, "tutorials/docs/conf.py lists the table of codecs"
    assert "Stream training data into PyTorch" in pages["index.html"]
    shown = "".join(text for name, text in pages.items() if name.startswith("docs/"))
    assert "This page is filled in" not in shown
    assert "STEPS" not in shown
    assert "CODECS" not in shown
    assert "Rules:" not in shown


@pytest.mark.slow
def test_it_has_one_way_through_all_pages_and_lists_them_for_programs(site):
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    documents = {name.removesuffix(".html") for name in pages if not name.startswith("_")} - NO_DOCUMENTS
    assert {path.with_suffix("").relative_to(TUTORIALS).as_posix() for path in TUTORIALS.glob("*.ipynb")} < documents
    order, name = [], "index"
    while name not in order:  # each page leads to the next one
        order.append(name)
        for following in re.findall(r'<link rel="next"[^>]* href="([^"]*).html"', pages[f"{name}.html"]):
            name = os.path.normpath(os.path.join(os.path.dirname(name), following))
    assert sorted(order) == sorted(documents)
    for_programs = (site / "llms.txt").read_text()
    linked = set(re.findall(r"(?m)^- \[[^]]+\]\((\S+).md\): \S", for_programs))
    assert documents - linked == {"index", "docs/brief", *(f"docs/{name}" for name in GROUPS)}
    for target in re.findall(r"\]\(([^)#]+)", for_programs):
        assert (site / target).is_file(), target
    everything = (site / "llms-full.txt").read_text()
    assert all(words in everything for words in ("# Resume after a crash", "pipe.shuffle_buffer(size", "--dry-run"))


SEEN = """() => ({
    wide: [document.documentElement, ...document.querySelectorAll('.content')]
        .filter(part => part.scrollWidth > part.clientWidth + 1).length,
    broken: [...document.images]
        .filter(image => !image.naturalWidth || !image.alt)
        .map(image => image.src),
    links: [...document.links].map(link => link.href).filter(link => link.startsWith('file:')),
})"""


@pytest.mark.slow
def test_no_page_scrolls_sideways_has_a_broken_link_or_asks_another_host(site):
    """In Chromium, as wide as a phone and as screens on which one and both sidebars just fit."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    faults = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda said: faults.append((page.url, said.text)) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append((page.url, str(error))))
        page.on("request", lambda sent: None if sent.url[:5] in ("file:", "data:") else faults.append(sent.url))
        for path in site.rglob("*.html"):
            if "_modules" in path.parts:  # the sources of modules
                continue
            page.goto(path.as_uri())
            for width in (390, 1024, 1313, 1407):
                page.set_viewport_size({"width": width, "height": 900})
                seen = page.evaluate(SEEN)
                faults += [(path.name, width)] * seen["wide"]
            faults += [(path.name, image) for image in seen["broken"]]
            linked = {Path(urllib.parse.unquote(urllib.parse.urlsplit(link).path)) for link in seen["links"]}
            faults += [(path.name, target) for target in linked if not target.is_file()]
        browser.close()
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_the_program_with_tasks_runs(engine, tmp_path):
    page = (TUTORIALS / "docs/reference/writing.md").read_text().partition("## Jobs of your own")[2]
    program, threads = re.findall(r"(?s)```python\n(.*?)```", page)
    if engine == "threads":
        program = program.replace("print(tools.run(job, jobs=4))", threads.replace("\n", "\n    "))
    (tmp_path / "program.py").write_text(program)
    make_shards(str(tmp_path / "shards"), shards=4, samples=3)
    done = run_script(tmp_path / "program.py", "forkserver", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(wds_pipes.IndexedShards(f"{tmp_path}/merged/*.tar")) == 12


@pytest.mark.slow
def test_the_short_answers_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, block in fences((TUTORIALS / "docs/how_to.md").read_text()):
        if language == "python":
            exec(block, names)
    shown = capsys.readouterr().out
    assert "5 images; {'delivered': 5, 'filtered': 0, 'skipped': 1, 'dropped': 0}" in shown
    assert "2 images, None\n1 images, a caption\n" in shown
    assert "{'cat': 100, 'dog': 101}" in shown
    assert shown.count("400 samples\n") == 4
    assert "started at None and made 12 steps" in shown


@pytest.mark.slow
def test_the_page_about_resuming_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (TUTORIALS / "docs/resume.md").read_text()
    names, shown = {"__name__": "__main__"}, 0
    for kind, block in re.findall(r"(?ms)^```(python|sh|text)\n(.*?)^```", page):
        if kind == "python":
            exec(block, names)
        elif kind == "sh":
            program, *arguments = shlex.split(block)
            assert program == "wds-pipes"
            print(run_command(*arguments).output, end="")
        else:
            assert capsys.readouterr().out == block
            shown += 1
    assert shown == 6

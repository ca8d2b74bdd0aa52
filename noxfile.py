# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.2.9"]
# ///
"""What can be done here. `nox` alone runs the main job; `nox -s NAME -- ARGS` passes ARGS on to a session."""

# One environment serves every session that needs torch. nox gives each session an environment of its own, and
# torch takes gigabytes; so the session `env` owns the shared one, and the others say `requires=["env"]`, have
# none themselves (`venv_backend="none"`), and run the programs that `env` installed. nox runs `env` first,
# and once, whichever sessions were named. Sessions that need no torch keep a small environment of their own.

import datetime
import os
import pathlib

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["parity"]
nox.options.error_on_missing_interpreters = True

PINS = ("-c", "requirements/pins.txt")
HOMES = {"retrograd": "./packages/retrograd", "gradparity": "./harness"}
DISTRIBUTIONS = tuple(word for home in HOMES.values() for word in ("-e", home))
SOURCES = os.pathsep.join(("packages/retrograd/src", "harness/src"))
TORCH_VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
DOCSTRINGS = "DOC102,DOC202,DOC403"  # pydoclint's: no parameter, return or yield that the signature lacks
SPELLED = (
    "packages",
    "harness",
    "suites",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
)
JOBS = str(min(os.cpu_count() or 1, 8))
# A worker that dies ends the run: pytest-xdist 3.8 would start another, and wait for ever at the end.
SPREAD = ("-n", JOBS, "--dist", "loadgroup", "--max-worker-restart", "0")
FIXED = ("--device", "auto", "-n", JOBS, "--expected", "suites/parity/expected.toml")

FINDINGS = "suites/unit/gradparity/test_findings.py"

# The main job, as (subjects, corpora, at most so many cases a corpus). The exact lowering takes everything.
# What compiles takes seconds a case, so of the large corpora it sees a sample, spread evenly; stock compiled
# autograd would take minutes for each of the models.
Leg = tuple[tuple[str, ...], tuple[str, ...], int | None]
EXACT = ("retrograd-live:eager",)
INDUCTOR = ("retrograd-live:inductor",)
STOCK = ("stock-ca:eager",)
STOCK_FORWARD = ("stock-compile:aot_eager",)
BEHIND_STOCK = ("retrograd-live+aot_eager:eager",)
REGIONS = ("retrograd-live:aten+regions",)
REGIONS_INDUCTOR = ("retrograd-live:inductor+regions",)
GRAPHS = ("retrograd-live:inductor+cudagraphs", "retrograd-aot:inductor+cudagraphs")
AHEAD = ("retrograd-aot:eager",)
AHEAD_DYNAMIC = ("retrograd-aot+dynamic:eager",)
AHEAD_INDUCTOR = ("retrograd-aot:inductor",)
BACKEND = ("retrograd-compile:eager",)
BACKEND_INDUCTOR = ("retrograd-compile:inductor",)
STEP = ("retrograd-step:eager",)
PROGRAMS = ("scenarios", "autograd_function_db")
MODELS = ("models",)
SAMPLES = ("op_db", "module_db")
COTANGENTS = (
    "op_db_cotangents",
    "module_db_cotangents",
    "op_db_cotangents:bfloat16",
    "op_db_cotangents:complex64",
)
DTYPES = ("op_db:float64", "op_db:bfloat16", "op_db:complex64", "module_db:float64")
WHOLE_RUN: tuple[Leg, ...] = (
    (EXACT, PROGRAMS + MODELS + SAMPLES, None),
    (INDUCTOR, PROGRAMS + MODELS, 120),
    (REGIONS, PROGRAMS + MODELS, None),
    (REGIONS_INDUCTOR, PROGRAMS + MODELS, 60),
    (GRAPHS, PROGRAMS, 30),
    (STOCK + STOCK_FORWARD, PROGRAMS, 150),
    (INDUCTOR + STOCK, SAMPLES, 40),
    (EXACT, DTYPES, 1500),
    (BEHIND_STOCK, PROGRAMS, None),
    (BEHIND_STOCK, SAMPLES, 40),
    (AHEAD, (*PROGRAMS, *MODELS, "hop_db"), None),
    (AHEAD, SAMPLES, 600),
    (AHEAD + EXACT, COTANGENTS, 400),
    (AHEAD_DYNAMIC, PROGRAMS, None),
    (AHEAD_INDUCTOR, PROGRAMS, 60),
    (BACKEND, (*PROGRAMS, *MODELS), None),
    (BACKEND_INDUCTOR, PROGRAMS, None),
    ((*EXACT, *BACKEND, *STEP), ("zoo",), None),
)
MAIN_RUN: tuple[Leg, ...] = (
    (EXACT, PROGRAMS + MODELS, None),
    (EXACT, SAMPLES, 400),
    (INDUCTOR, PROGRAMS + MODELS, 24),
    (REGIONS, PROGRAMS + MODELS, 100),
    (AHEAD, PROGRAMS + MODELS, 340),
    (AHEAD_DYNAMIC, PROGRAMS, 60),
    (BACKEND, PROGRAMS, 100),
    (BACKEND_INDUCTOR, PROGRAMS, 40),
    (STEP, ("zoo",), 6),
)


def install(session: nox.Session, *torch: str) -> None:
    """Install torch by exact pin, then both distributions with all that the sessions use."""
    session.install(*PINS, *torch, "-r", "requirements/build.txt")
    session.install(*PINS, "--no-build-isolation", *DISTRIBUTIONS, "-r", "requirements/dev.txt")


def settings(session: nox.Session) -> dict[str, str]:
    """Environment variables for programs that run torch: one thread a process, one Inductor cache for all."""
    return {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(session.cache_dir.absolute() / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(session: nox.Session, program: str, *arguments: str, silent: bool = False) -> str:
    """Run a program of the shared environment; what it starts finds that environment first on PATH too.

    Returns what the program printed, if `silent`.
    """
    programs = session.cache_dir.absolute().parent / "env" / "bin"
    path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))
    variables = {**settings(session), "PATH": path}
    printed = session.run(str(programs / program), *arguments, env=variables, external=True, silent=silent)
    return printed if isinstance(printed, str) else ""


def words(leg: Leg) -> list[str]:
    """The arguments of `gradparity run` for one leg of the main job."""
    subjects, corpora, limit = leg
    named = [word for subject in subjects for word in ("--subject", subject)]
    named += [word for corpus in corpora for word in ("--corpus", corpus)]
    return named if limit is None else [*named, "--limit-per-corpus", str(limit)]


@nox.session(venv_backend="none", requires=["env"])
def parity(session: nox.Session) -> None:
    """The main job: run real programs eager and compiled, compare gradients and hook order, say a verdict.

    Uses a GPU where there is one. `-- --full` runs everything; other arguments are a run of your own, for
    instance `-- --subject stock-ca:inductor --corpus scenarios`.
    """
    own = [argument for argument in session.posargs if argument != "--full"]
    legs, order = MAIN_RUN, ()
    if "--full" in session.posargs:  # each day in another order, which the line of its command names
        legs, order = WHOLE_RUN, ("--shuffle", str(datetime.date.today().toordinal()))
    failed = 0
    for arguments in [own] if own else map(words, legs):
        try:
            run(session, "gradparity", "run", *FIXED, *order, *arguments)
        except nox.command.CommandFailed:
            failed += 1  # the other legs have something to say too
    if failed:
        session.error(f"{failed} of the runs above found an unexpected divergence, or could not run")


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """The tests, in parallel (`-- suites/unit -k hooks` narrows)."""
    run(session, "python", "-m", "pytest", *SPREAD, *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def programs(session: nox.Session) -> None:
    """Tests that start other programs: command lines, ranks, compilers, the code of documents (10 min)."""
    run(session, "python", "-m", "pytest", *SPREAD, "-m", "programs and not slow", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def long(session: nox.Session) -> None:
    """Tests that take minutes: 5,000 cases without a false alarm, all faults, threads for a minute."""
    slow = ("-n", JOBS, "-m", "slow", "suites", "--deselect", FINDINGS)
    run(session, "python", "-m", "pytest", *slow, *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def findings(session: nox.Session) -> None:
    """Each program of docs/findings on the installed torch; fails where one no longer differs (10 min)."""
    run(session, "python", "-m", "pytest", "-n", JOBS, "-m", "slow", FINDINGS, *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Lint, formatting, docstrings, spelling, English, workflows (`-- --fix` repairs what it can)."""
    session.install(*PINS, "-r", "requirements/lint.txt")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check"]))
    session.run("ruff", "check", "--preview", "--select", DOCSTRINGS, "packages", "harness")
    session.run("codespell", *SPELLED)
    session.run("python", "suites/whole_repo/prose.py")
    workflows = sorted(str(path) for path in pathlib.Path(".github/workflows").glob("*.yml"))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("zizmor", "--offline", "--no-progress", "--config", ".github/zizmor.yml", *workflows)


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Types of both packages, mypy strict."""
    run(session, "mypy", *session.posargs)


@nox.session(reuse_venv=True)
def imports(session: nox.Session) -> None:
    """Import contracts: the layers of both packages, and who may know whom."""
    session.install(*PINS, "import-linter")
    session.run("lint-imports", "--no-cache", *session.posargs, env={"PYTHONPATH": SOURCES})


@nox.session(venv_backend="none", requires=["env"])
def bench(session: nox.Session) -> None:
    """Benchmarks of this checkout, with asv (`-- --quick` is a smoke run that saves nothing)."""
    run(session, "asv", "machine", "--yes", silent=True)
    commit = [] if "--quick" in session.posargs else ["--set-commit-hash", "HEAD"]
    run(session, "asv", "run", "--python=same", "--show-stderr", *commit, *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def page(session: nox.Session) -> None:
    """The results that the documents quote, as a page of asv (`asv preview` opens it)."""
    run(session, "python", "-m", "suites.benchmarks.published")


@nox.session(venv_backend="none", requires=["env"])
def bench_compare(session: nox.Session) -> None:
    """Benchmarks of two commits (`-- main HEAD`), compared in `.asv/comparison.txt`."""
    base, tip = session.posargs or ("main", "HEAD")
    run(session, "asv", "machine", "--yes", silent=True)
    failed = False
    try:
        run(session, "asv", "continuous", "--show-stderr", base, tip)
    except nox.command.CommandFailed:
        failed = True  # something is slower, or a benchmark failed: the comparison says which
    text = run(session, "asv", "compare", "--split", base, tip, silent=True)
    pathlib.Path(".asv/comparison.txt").write_text(text)
    session.log(text)
    if failed:
        session.error("something is slower than before, or a benchmark failed")


@nox.session(reuse_venv=True)
def changes(session: nox.Session) -> None:
    """What the files of docs/changes add to CHANGELOG.md (`-- --version 0.2.0 --yes` writes it there)."""
    session.install(*PINS, "towncrier")
    draft = () if session.posargs else ("--draft",)
    session.run("towncrier", "build", *draft, *session.posargs)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """The pages of `docs`, built strictly into `site` (`-- serve` shows them while you write)."""
    session.install(*PINS, "-r", "requirements/docs.txt")
    session.run("mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none", requires=["env"])
def house(session: nox.Session) -> None:
    """The measures of the code, as a table (`-- --details` lists what was counted)."""
    run(session, "python", "suites/whole_repo/house.py", *session.posargs)


@nox.session
@nox.parametrize("torch", TORCH_VERSIONS, ids=TORCH_VERSIONS)
def tests_torch(session: nox.Session, torch: str) -> None:
    """The tests under another supported torch, in an environment of its own (several GB)."""
    install(session, f"torch=={torch}")
    session.run("pytest", *SPREAD, "-m", "not slow", *session.posargs, env=settings(session))


@nox.session(reuse_venv=True)
def ray(session: nox.Session) -> None:
    """Campaigns on a Ray cluster of two nodes, one of which is killed; Ray is too large for everybody."""
    install(session, "-r", "requirements/torch.txt")
    session.install(*PINS, "ray")
    session.run("pytest", "suites/cluster", *session.posargs, env=settings(session))


@nox.session(venv_backend="none", requires=["env"])
def distributed(session: nox.Session) -> None:
    """Fifty ways to train on two and four gloo ranks, in eager and compiled; ranks that fail (15 min)."""
    with session.chdir("suites"):
        run(session, "python", "-m", "distributed.faults", "--runs", "40")
        run(session, "python", "-m", "distributed.cells", *session.posargs)
        run(session, "python", "-m", "distributed.trainers")


@nox.session(reuse_venv=True)
def browser(session: nox.Session) -> None:
    """The pages in a headless browser: reports, benchmarks; skipped, with the reason, where there is none."""
    install(session, "-r", "requirements/torch.txt")
    session.install(*PINS, "playwright")
    session.run("pytest", "suites/browser", *session.posargs, env=settings(session))


@nox.session(reuse_venv=True)
def zoo(session: nox.Session) -> None:
    """Models of other packages, trained for three steps under all exact subjects (GBs of packages)."""
    install(session, "-r", "requirements/torch.txt")
    session.install(*PINS, "-r", "requirements/torch.txt", "-e", "./harness[zoo]")
    subjects = [word for name in (*EXACT, *BACKEND, *STEP) for word in ("--subject", name)]
    own = session.posargs or [*subjects, "--corpus", "zoo", "--timeout", "300"]
    session.run("gradparity", "run", *FIXED, *own, env=settings(session))


@nox.session(reuse_venv=True)
def ecosystem(session: nox.Session) -> None:
    """The examples of docs/ecosystem: trainers, adapters, privacy, forces; as in eager (4 min)."""
    install(session, "-r", "requirements/torch.txt")
    session.install(*PINS, "-r", "requirements/torch.txt", "-r", "requirements/ecosystem.txt")
    own = ("-n", JOBS, "suites/ecosystem", *session.posargs)
    session.run("pytest", *own, env=settings(session))


@nox.session(reuse_venv=True)
def architectures(session: nox.Session) -> None:
    """A small model of every architecture of timm and transformers, trained for three steps (hours).

    Those of transformers take other branches under Dynamo: a comparison with eager says nothing there.
    """
    install(session, "-r", "requirements/torch.txt")
    session.install(*PINS, "-r", "requirements/torch.txt", "-e", "./harness[zoo]")
    own = ("--corpus", "architectures", "--timeout", "300", *session.posargs)
    for subjects, match in (((*EXACT, *AHEAD), "*"), (BACKEND, "timm/*")):
        named = [word for name in subjects for word in ("--subject", name)]
        session.run("gradparity", "run", *FIXED, *named, *own, "--match", match, env=settings(session))


def wheel_user(session: nox.Session, name: str, *others: str) -> str:
    """Build the wheel of one distribution by way of its sdist, and install it into an empty environment.

    Returns the environment's folder of programs. It holds what the wheel declares, and `others`.
    """
    folder = session.create_tmp()
    session.install(*PINS, "-r", "requirements/build.txt", "build")
    built = ("--no-isolation", "--outdir", f"{folder}/dist", HOMES[name])
    session.run("python", "-m", "build", *built, silent=True)
    session.run("python", "-m", "venv", "--clear", f"{folder}/{name}")
    programs = os.path.abspath(f"{folder}/{name}/bin")
    pip = (f"{programs}/python", "-m", "pip")
    (wheel,) = pathlib.Path(folder, "dist").glob(f"{name}-*.whl")
    install = ("install", "--quiet", *PINS, "-r", "requirements/torch.txt", str(wheel), *others)
    session.run(*pip, *install, external=True)
    session.run(*pip, "check", external=True)
    return programs


@nox.session
def wheels(session: nox.Session) -> None:
    """Both wheels, each in an environment with what it declares and nothing else: imported, used (3 min)."""
    for name, optional in (("retrograd", ()), ("gradparity", ("pytest",))):
        python = f"{wheel_user(session, name)}/python"
        for program in (("modules.py", name, *optional), (f"use_{name}.py",)):
            script = os.path.abspath(f"suites/wheels/{program[0]}")
            session.run(python, "-I", script, *program[1:], env=settings(session), external=True)


@nox.session
def first_user(session: nox.Session) -> None:
    """gradparity's README, step by step: the wheel in an empty environment, demo, a test, fuzz (5 min)."""
    session.install(*PINS, "pytest", "pytest-timeout")
    variables = {**settings(session), "GRADPARITY_USER_BIN": wheel_user(session, "gradparity", "pytest")}
    own = ("--noconftest", "-p", "no:cacheprovider", "--timeout", "900", "suites/first_user")
    session.run("pytest", *own, *session.posargs, env=variables)


@nox.session(reuse_venv=True)
def env(session: nox.Session) -> None:
    """Only build or refresh the environment that the sessions with torch share."""
    install(session, "-r", "requirements/torch.txt")

"""The production image, as far as it can be tried without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import ROOT, read_stages, stage_named

PIP_INSTALL = re.compile(r'"\$VIRTUAL_ENV/bin/pip" install (.*?)(?:&&|$)')
OPTIONS_WITH_A_VALUE = {"--target", "--index-url"}


def installed_names(command: str) -> list[str]:
    """What the pip calls of one RUN install, without options."""
    names: list[str] = []
    for match in PIP_INSTALL.finditer(command):
        words = shlex.split(match.group(1).replace('${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}', ""))
        while words:
            word = words.pop(0)
            if word in OPTIONS_WITH_A_VALUE:
                words.pop(0)
            elif not word.startswith("-"):
                names.append(word)
    return names


def test_every_package_is_pinned() -> None:
    """By the constraints, by a version of its own, or it is one of ours."""
    pinned = {
        line.partition("==")[0] for line in (ROOT / "engine_pkg/constraints.txt").read_text().splitlines()
    }
    names = [
        name
        for stage in read_stages()
        for command in stage.values("RUN")
        for name in installed_names(command)
    ]
    assert {"torch", "flashinfer-python==$FLASHINFER_VERSION"} <= set(names)
    assert [
        name for name in names if "==" not in name and not name.startswith("./") and name not in pinned
    ] == []


def test_the_context_has_what_is_copied() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for stage in read_stages():
        for value in stage.values("COPY"):
            *sources, _ = value.split()
            if sources[0].startswith("--from="):
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(line.startswith(f"!{source}") for line in ignored), source


def test_the_image_serves_without_privileges_and_says_how_it_is() -> None:
    image = read_stages()[-1]
    (user,) = image.values("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that a cluster can see that it is not root"
    assert len(image.values("HEALTHCHECK")) == 1
    assert json.loads(image.values("VOLUME")[0]) == ["/models", "/cache"]
    assert image.values("EXPOSE") == ["8000 8001 8002"]
    (check,) = image.values("HEALTHCHECK")
    compile(json.loads(check.partition("CMD ")[2])[2], "health check", "exec")


@pytest.fixture
def fake_triton(tmp_path: Path) -> dict[str, str]:
    """An environment whose tritonserver prints its arguments and the configuration that it was given."""
    server = tmp_path / "bin/tritonserver"
    server.parent.mkdir()
    server.write_text(
        '#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\ncat "${1#*=}/llm/config.pbtxt"\n'
    )
    server.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{server.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "engine_pkg/src"),
        "MODEL_REPOSITORY": str(ROOT / "model_repository"),
    }


def run_container(
    environment: dict[str, str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """What the image's ENTRYPOINT and CMD do."""
    image = read_stages()[-1]
    _, *entrypoint = json.loads(image.values("ENTRYPOINT")[0])
    command = [python, *entrypoint, *json.loads(image.values("CMD")[0])]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_container_becomes_triton(fake_triton: dict[str, str]) -> None:
    before = (ROOT / "model_repository/llm/config.pbtxt").read_text()
    result = run_container(
        {**fake_triton, "MODEL": "/check point", "PARAMETERS": "page_size=32 dtype=float16"}
    )
    assert result.returncode == 0, result.stderr
    repository, timeout, config = result.stdout.split("\n", 2)
    assert repository.startswith("--model-repository=/")
    assert timeout == "--exit-timeout-secs=600"
    for key, value in {"model": "/check point", "page_size": "32", "dtype": "float16"}.items():
        assert re.search(rf'key: "{key}"\s+value {{\s+string_value: "{value}"', config), key
    assert (ROOT / "model_repository/llm/config.pbtxt").read_text() == before


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PARAMETERS": "page_size"}, "write key=value"),
        ({"MODEL_REPOSITORY": "/nowhere"}, "there is no model repository at /nowhere"),
    ],
)
def test_the_container_says_what_is_wrong(
    fake_triton: dict[str, str], variables: dict[str, str], message: str
) -> None:
    result = run_container({**fake_triton, **variables})
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_install_steps_in_a_clean_environment(tmp_path: Path, fake_triton: dict[str, str]) -> None:
    """The stage for all images, run as it stands except for apt; then what the image does with the result."""
    stage = stage_named("packages")
    context = tmp_path / "src"
    for source in ("engine_pkg", "client"):
        shutil.copytree(
            ROOT / source, context / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    virtual_environment = tmp_path / "environment"
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_CONSTRAINT", "PYTHONPATH"))
        },
        **{name: os.environ.get(name, default) for name, default in stage.arguments.items()},
        "VIRTUAL_ENV": str(virtual_environment),
        "PIP_CONSTRAINT": str(context / "engine_pkg/constraints.txt"),
    }
    for command in stage.values("RUN"):
        if "apt-get" not in command:
            subprocess.run(["sh", "-e", "-c", command], cwd=context, env=environment, check=True)
    python = str(virtual_environment / "bin/python3")
    clean = {name: value for name, value in fake_triton.items() if name != "PYTHONPATH"}
    imports = "import paged_client, paged_engine.loading, paged_engine.serving.service, paged_engine.kernels.build as build"
    built = f"{imports}\nassert (build.INSTALLED / build.library_name()).exists()"
    subprocess.run([python, "-c", built], cwd=tmp_path, env=clean, check=True)
    assert run_container({**clean, "MODEL": "/checkpoint"}, python).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_packages_for_gpus_go_together(tmp_path: Path) -> None:
    """Resolved for the Python of the base image, without downloading the gigabytes that they are."""
    common, gpu = stage_named("packages"), stage_named("packages-gpu")
    versions = {**common.arguments, **gpu.arguments}
    names = [
        name
        for stage in (common, gpu)
        for command in stage.values("RUN")
        for name in installed_names(command)
    ]
    names = [
        re.sub(r"\$(\w+)", lambda match: versions[match.group(1)], name) for name in names if name[0] != "."
    ]
    assert any(name.startswith("cuda-toolkit[") for name in names)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--python-version", "3.12", "--only-binary=:all:", "--target", str(tmp_path / "nowhere")]
    command += [
        "--constraint",
        str(ROOT / "engine_pkg/constraints.txt"),
        "--report",
        str(tmp_path / "report.json"),
    ]
    subprocess.run([*command, *names], check=True)
    report = json.loads((tmp_path / "report.json").read_text())
    chosen = {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}
    assert chosen["flashinfer-python"] == versions["FLASHINFER_VERSION"]
    # The toolkit that compiles the kernels is the one that torch is built with.
    assert chosen["cuda-toolkit"].startswith(versions["CUDA_TOOLKIT_VERSION"])

"""The container's files. There is no engine to build them here: what they use is looked up."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from outrider.cli.serve import serve
from outrider.system.saved import __file__ as saved_file
from outrider_export import export_bundle  # noqa: F401 - the package that `outrider export` needs

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "samples/docker/Dockerfile"
COMPOSE = ROOT / "samples/docker/compose.yaml"


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def parsed(command: click.Command, arguments: list[str]) -> dict[str, Any]:
    """The parameters that click reads. Raises for an option that there is not."""
    with command.make_context("outrider", arguments) as context:
        return context.params


def test_the_package_builds_from_what_is_copied() -> None:
    """All that pyproject.toml names for the build is copied before pip runs."""
    copied = {source for line in of("COPY") if not line.startswith("--") for source in line.split()[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "runtime", "export", "bench", "configs"} == copied
    assert all((ROOT / source).exists() for source in copied)
    extras = set(re.findall(r'"\.\[(\w+)\]"', " ".join(of("RUN"))))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras == {"server", "export"}
    assert all(f"\n{extra} = [" in text for extra in extras)


def test_the_server_s_options_exist() -> None:
    entry, command = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[-1])
    assert entry[:2] == ["outrider", "serve"]
    for arguments in (command, yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["outrider"]["command"]):
        params = parsed(serve, [*entry[2:], *arguments])
        assert (params["host"], params["port"]) == ("0.0.0.0", 8000)  # noqa: S104
        assert params["bundles"][0].endswith("/models/model")
    key = next(param for param in serve.params if param.name == "api_key")
    assert key.envvar == "OUTRIDER_API_KEY"
    assert "OUTRIDER_CACHE" in Path(saved_file).read_text(encoding="utf-8")


def test_the_export_s_options_exist() -> None:
    from outrider.cli.export import export

    (line,) = (line for line in of("RUN") if "outrider export" in line)
    params = parsed(export, shlex.split(line.split("outrider export", 1)[1].replace("$WEIGHTS", "int8")))
    assert str(params["output"]) == "/models/model"


@pytest.mark.parametrize("commented", [False, True], ids=["as it is", "with Open WebUI"])
def test_the_compose_file(commented: bool) -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    if commented:
        text = re.sub(r"^  # (?!A chat)", "  ", text, flags=re.MULTILINE)
    read = yaml.safe_load(text)
    services, volumes = read["services"], read["volumes"]
    assert set(services) == ({"outrider", "open-webui"} if commented else {"outrider"})
    outrider = services["outrider"]
    assert (COMPOSE.parent / outrider["build"]["context"] / outrider["build"]["dockerfile"]).samefile(DOCKERFILE)
    assert outrider["environment"]["OUTRIDER_API_KEY"].startswith("${OUTRIDER_API_KEY:?")
    assert int(outrider["stop_grace_period"].removesuffix("s")) > int(outrider["command"][-1])
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        named = {volume.split(":")[0] for volume in service["volumes"]} - {""}
        assert {name for name in named if re.fullmatch(r"[\w-]+", name)} <= set(volumes)

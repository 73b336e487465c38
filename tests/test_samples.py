"""Every sample, run as a user runs it; ray_serve.py in test_ray_serve.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[1] / "samples"
PROMPT = "Correct the spelling: Teh quick brown fox jmups over the lazy dog."


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(SAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["generate.py", "json_schema.py"])
def test_samples_on_a_real_model(name: str, smollm2: Path) -> None:
    output = run(name, str(smollm2), PROMPT)
    assert "tokens/s" in output
    assert len(output.split()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stream.py", "prompt_lookup.py", "compare_plain.py", "sampling.py"])
def test_samples_on_a_tiny_model(name: str, tiny: Path) -> None:
    output = run(name, str(tiny), PROMPT)
    assert "tokens/s" in output
    assert "same tokens: False" not in output


@pytest.mark.slow
def test_the_pair_sample(tiny_pair: Path) -> None:
    output = run("draft_and_main.py", str(tiny_pair), PROMPT, "--main-device", "CPU", "--draft-device", "CPU")
    assert "draft tokens accepted" in output


@pytest.mark.slow
def test_the_chat_sample(tiny: Path, tmp_path: Path) -> None:
    output = run("chat_session.py", str(tiny), str(tmp_path / "chat.json"))
    assert "Another answer: " in output
    assert "tokens/s" in output
    assert "\n(0 of " in output  # the first turn reads its prompt
    assert output.count("(0 of ") == 1


def test_the_sample_of_answers_from_documents(smollm2_pair: Path) -> None:
    output = run("rag.py", str(smollm2_pair), "--drafts", "2", "--ask", "Who was the engineer of Lindmark's harbour?")
    assert output.count("→") == 1
    assert len(output.splitlines()) == 2


@pytest.mark.parametrize(("name", "package", "command"), [
    ("json_schema.py", "llguidance", 'pip install ".[structured]"'),
    ("openai_client.py", "openai", "pip install openai"),
    ("rag.py", "bm25s", 'pip install ".[rag]"'),
])  # fmt: skip
def test_a_missing_package_is_said_before_a_model_is_loaded(name: str, package: str, command: str) -> None:
    missing = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['x', 'no-bundle', 'Hi']"
    code = f"{missing}; runpy.run_path({str(SAMPLES / name)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"Run: {command}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_client_sample(tiny: Path) -> None:
    serving = pytest.importorskip("serving", reason="needs the extra [server] and openai")
    with serving.served(f"tiny={tiny}") as (_, printed):
        output = run("openai_client.py", printed["url"], PROMPT)
    assert "draft tokens accepted" in output


def test_every_sample_is_run() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(path.name in tested for path in SAMPLES.glob("*.py"))

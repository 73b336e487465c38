"""Measures what a new user waits for: from a GGUF file to the first token, the second start, memory.

    python bench/scripts/first_contact.py MODEL.gguf [DRAFT.gguf] [LLAMA_SERVER]

Each row is a runtime; each figure comes from processes of their own, one after the other, which begin with empty
caches: seconds from a process's start to its first token, beside two busy processes, and idle; then of the second start
to its first token, its tokens per second, and its memory (GB of its own, and of mapped files). Below a row of
Outrider's is when each step of the idle first start began.
Outrider runs the model as a new user has it, and if that is installed, in int4 on ONNX Runtime. LLAMA_SERVER is
llama.cpp's program `llama-server`; without it that runtime is left out, and without DRAFT.gguf the pair is. For an idle
machine, so it is run by hand.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NUM_TOKENS = 33
PROMPT = "Explain in a few sentences why the sky is blue."

# Each is a program that prints the time of each token. MODEL, DRAFT and CACHE are in the environment.
_COMMON = """
import json, os, sys, time
times, steps = [], []
def note(line):
    if not line.endswith("%."):
        steps.append((time.time(), line))
def finish(pid="self"):
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if line.startswith("Rss"))
    memory = {name: int(value.split()[0]) / 1e6 for name, value in fields.items()}
    print(json.dumps({"times": times, "steps": steps, "memory": memory}), flush=True)
    if pid == "self":
        os._exit(0)
"""
_STREAM = """
for chunk in engine.stream(PROMPT, max_new_tokens=NUM, min_new_tokens=NUM):
    times.extend([time.time()] * len(chunk.tokens))
engine.draft_models  # a second start begins when all of the first is done
finish()
"""
_OUTRIDER = (
    """
import outrider
engine = outrider.load(os.environ["MODEL"], draft=os.environ.get("DRAFT"), progress=note)
"""
    + _STREAM
)
_ONNX = (
    """
import outrider, outrider_export
bundle = os.path.join(os.environ["CACHE"], "onnx")
if not os.path.exists(bundle):
    options = {"output": bundle, "format": "onnx", "weights": "int4"}
    outrider_export.export_bundle(os.environ["MODEL"], os.environ.get("DRAFT"), **options)
engine = outrider.load(bundle)
"""
    + _STREAM
)
_GENAI = """
import openvino_genai
pipeline = openvino_genai.LLMPipeline(os.environ["MODEL"], "CPU", CACHE_DIR=os.environ["CACHE"])
pipeline.start_chat()
def note(_):
    times.append(time.time())
    return openvino_genai.StreamingStatus.RUNNING
pipeline.generate(PROMPT, max_new_tokens=NUM, min_new_tokens=NUM, streamer=note)
finish()
"""
_LLAMA = """
import socket, subprocess, urllib.error, urllib.request
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
sizes = ["-c", "2048", "-np", "1", "-t", str(os.cpu_count()), "--port", str(port)]
command = [os.environ["LLAMA"], "-m", os.environ["MODEL"], "--no-ui", *sizes]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        break
    except OSError:
        time.sleep(0.02)
asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM, "temperature": 0, "stream": True}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(asked).encode(), headers)
for line in urllib.request.urlopen(request):
    if b'"content":"' in line:
        times.append(time.time())
try:
    finish(server.pid)
finally:
    server.kill()
"""


def run(program: str, environment: dict[str, str]) -> tuple[list[float], dict[str, Any]]:
    """Start a program: the seconds of its tokens since then, and what it printed."""
    code = _COMMON + program.replace("PROMPT", repr(PROMPT)).replace("NUM", str(NUM_TOKENS))
    began = time.time()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"A program failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    found["steps"] = [(at - began, line) for at, line in found["steps"]]
    return [at - began for at in found["times"]], found


def run_busy(program: str, environment: dict[str, str]) -> float:
    """The seconds to the first token beside two busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        return run(program, environment)[0][0]
    finally:
        for each in busy:
            each.kill()


def main(model: str, draft: str | None, llama: str | None) -> None:
    """Print the table."""
    runs: list[tuple[str, str, dict[str, str]]] = []
    programs = [("outrider", _OUTRIDER)] + ([("outrider, ONNX", _ONNX)] if find_spec("onnxruntime") else [])
    for name, program in programs:
        runs.append((name, program, {}))
        if draft:
            runs.append((f"{name}, pair", program, {"DRAFT": draft}))
    runs.append(("openvino-genai", _GENAI, {}))
    if llama:
        runs.append(("llama.cpp", _LLAMA, {"LLAMA": llama}))
    print(f"{Path(model).name}" + (f" with {Path(draft).name}" if draft else ""))
    columns = "busy", "first token", "again", "a second", "own GB", "mapped GB"
    print(f"{'':20}" + "".join(f"{column:>13}" for column in columns))
    for name, program, options in runs:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "MODEL": model, "CACHE": cache, "OUTRIDER_CACHE": cache, **options}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
            busy = run_busy(program, environment | {"CACHE": first, "OUTRIDER_CACHE": first})
            (begin, *_), idle = run(program, environment)
            times, found = run(program, environment)
        figures = [busy, begin, times[0], (len(times) - 1) / (times[-1] - times[0])]
        figures += [found["memory"]["RssAnon"], found["memory"]["RssFile"]]
        print(f"{name:20}" + "".join(f"{figure:13.2f}" for figure in figures), flush=True)
        for at, line in idle["steps"]:
            print(f"{at:33.1f}  {line}")


if __name__ == "__main__":
    given = sys.argv[1:]
    if not given:
        raise SystemExit(__doc__)
    ggufs = [name for name in given if name.endswith(".gguf")]
    others = [name for name in given if not name.endswith(".gguf")]
    main(ggufs[0], ggufs[1] if len(ggufs) > 1 else None, others[0] if others else None)

"""llama.cpp on GGUF files, by its server `llama-server`: one request at a time, or several.

Plain decoding, its `ngram-simple` drafts, and those of a draft model. It gets the bundle's token ids, so the file must
have the bundle's vocabulary. The program is the user's: the one on the PATH, built for this processor or not.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

from outrider.config import GenerationConfig
from outrider.errors import OutriderError
from outrider_bench.modes.mode import AnsweredLoad, BatchMode, Load, Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import check_vocabulary, follow_options
from outrider_bench.modes.setup import Setup

PROGRAM = "llama-server"
NUM_SLOTS = 8  # requests at the same time, where several are compared
CONTEXT = 4096  # tokens of each: prompt and answer
DEFAULT_LENGTH = 3  # of its drafts, as of `--spec-draft-n-max`
_START_SECONDS = 120.0


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names for one request at a time, each with a server of its own: drafts are its options.

    Raises:
        OutriderError: when a server does not start.
        OptionError: when the file has too few tokens.
    """
    return [_Alone(name, setup, 1) for name in names]


def load_together(names: list[ModeName], setup: Setup) -> list[BatchMode]:
    """The same for several requests at a time. Raises as `load`."""
    return [_Together(name, setup, NUM_SLOTS) for name in names]


class _Server:
    """A server that is started, and ended with this object."""

    runtime = "llama.cpp"

    def __init__(self, name: ModeName, setup: Setup, num_slots: int) -> None:
        self.name = name.text
        path, threads = setup.peer_models["llamacpp"], setup.config.device.num_threads
        command = [*_command(path, threads, num_slots), *_drafting(name, setup)]
        self._address = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603
        weakref.finalize(self, _end, process)
        self._wait(process)
        model = _ask(f"{self._address}/v1/models")["data"][0]
        check_vocabulary(path, model["meta"]["n_vocab"], setup, "a file")
        build = _ask(f"{self._address}/props")["build_info"]
        self.description = (
            f"{path.name}, its own weights and kernels, cache f16; {threads or 'the default number of'} threads; "
            f"{PROGRAM} {build}, {num_slots} slot{'s' * (num_slots > 1)}, through HTTP"
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until the model is loaded."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None:
                raise OutriderError(f"{PROGRAM} ended with status {process.returncode}.")
            try:
                _ask(f"{self._address}/health")
            except OSError:  # nobody listens yet, or 503 while it loads
                time.sleep(0.1)
            else:
                return
        raise OutriderError(f"{PROGRAM} was not ready after {_START_SECONDS:.0f} s.")

    def _answer(self, prompt_token_ids: list[int], config: GenerationConfig) -> Any:
        given = follow_options("llamacpp", self.runtime, self.name, config)
        return _ask(f"{self._address}/completion", _request(prompt_token_ids, config) | given)


class _Alone(_Server):
    num_parallel = 1

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt. Seconds after the first token are the server's own: HTTP is not charged to decoding."""
        began = time.perf_counter()
        answer = self._answer(prompt_token_ids, config)
        seconds = time.perf_counter() - began
        return Run(answer["tokens"], max(seconds - answer["timings"]["predicted_ms"] / 1000, 0.0), seconds)


class _Together(_Server):
    def run(self, load: Load, config: GenerationConfig) -> AnsweredLoad:
        """Decode these prompts, so many at a time."""
        if load.at_once > NUM_SLOTS:
            raise OutriderError(f"{PROGRAM} has {NUM_SLOTS} slots here, and {load.at_once} requests would wait.")
        return load.run(lambda prompt: self._answer(prompt, config)["tokens"])


def _command(path: Path, threads: int, num_slots: int) -> list[str]:
    """Starts the server. Nothing is kept between requests, as in the other modes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ["--parallel", str(num_slots), "--ctx-size", str(num_slots * CONTEXT)]
    slots = [*sizes, "--no-kv-unified", "--cache-ram", "0"]
    limits = ["--threads", str(threads), "--threads-batch", str(threads)] if threads else []
    program = shutil.which(PROGRAM) or PROGRAM
    return [program, "--model", str(path), "--host", "127.0.0.1", "--port", str(port), "--no-ui", *slots, *limits]


def _drafting(name: ModeName, setup: Setup) -> list[str]:
    if name.kind == "llamacpp":
        return []
    length = str(name.num_assistant_tokens or DEFAULT_LENGTH)
    limit = ["--spec-draft-n-max", length]
    if name.kind == "llamacpp-draft":
        return ["--spec-type", "draft-simple", "--model-draft", str(setup.peer_models["llamacpp-draft"]), *limit]
    size = str(setup.config.generation.max_ngram_size)
    sizes = ["--spec-ngram-simple-size-n", size, "--spec-ngram-simple-size-m", length]
    return ["--spec-type", "ngram-simple", *limit, *sizes]


def _request(prompt_token_ids: list[int], config: GenerationConfig) -> dict[str, Any]:
    ends = {"ignore_eos": config.ignore_eos, "n_predict": config.max_new_tokens, "seed": config.seed or 0}
    return {"prompt": prompt_token_ids, "cache_prompt": False, "return_tokens": True, **ends}


def _ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer of a server. Raises OSError without one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as error:
        if body is None:
            raise
        raise OutriderError(
            f"{PROGRAM} answered {error.code}: {error.read().decode(errors='replace')[:200]}"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()

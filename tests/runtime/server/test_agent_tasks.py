"""The last request of a whole task, as coding agents sent it to this server: a file was read, edited and run.

Recorded from the programs themselves, which a scripted model answered; long texts and most of the tools are cut.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import serving
from outrider.server.app import DIALECTS
from serving import choice_of

TASKS = [
    json.loads(line)
    for line in Path(serving.__file__).with_name("agent_tasks.jsonl").read_text(encoding="utf-8").splitlines()
]
ENDS = {
    "/v1/chat/completions": "data: [DONE]", "/v1/messages": '"type":"message_stop"',
    "/v1/responses": "event: response.incomplete",
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["client"])
def test_an_agent_s_whole_task_is_laid_out(task: dict[str, Any]) -> None:
    (dialect,) = (each for each in DIALECTS if each.path == task["path"])
    choice = choice_of(dialect, **task["body"])
    turns: Any = choice.prompt
    kinds = [turn["role"] for turn in turns]
    assert kinds.index("user") == 1  # after one system message, as templates need it
    assert kinds[-6:] == ["assistant", "tool"] * 3
    for call, result in zip(turns[-6::2], turns[-5::2], strict=True):
        (made,) = call["tool_calls"]
        assert made["id"] == result["tool_call_id"]
        assert made["function"]["arguments"].keys() & {"cmd", "command", "filePath", "file_path"}
        assert result["content"]
    assert turns[-4]["content"] == "I change it."
    assert "Change hello to goodbye" in turns[-7]["content"]
    assert {tool["type"] for tool in choice.options["tools"]} == {"function"}  # others are skipped


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["client"])
def test_an_agent_s_whole_task_is_answered(caller: Any, task: dict[str, Any]) -> None:
    length = "max_output_tokens" if "input" in task["body"] else "max_tokens"
    url = str(caller.base_url).removesuffix("/v1/")
    answer = httpx.post(url + task["path"], json=task["body"] | {"model": "tiny", length: 4}, timeout=300)
    assert answer.status_code == 200, answer.text
    assert ENDS[task["path"]] in answer.text

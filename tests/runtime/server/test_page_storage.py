"""What the page keeps in the browser and sends of files: its modules without a document, run by Node where it is."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.server import app

FOLDER = Path(app.__file__).with_name("page_files")
# A storage as browsers have it, of which the names are the keys.
BEFORE = """
globalThis.localStorage = Object.create({
    getItem(name) { return this[name] ?? null; },
    setItem(name, text) { if (text.length > 5000) throw new Error("full"); this[name] = text; },
    removeItem(name) { delete this[name]; },
});
const kept = await import(FOLDER + "kept.js"), files = await import(FOLDER + "files.js");
const talk = (title, changed) => ({ title, changed, exchanges: [{ text: title }] });
const file = (name, bytes) => ({ name, size: bytes.length, arrayBuffer: async () => new Uint8Array(bytes).buffer });
const failure = (promise) => promise.then(() => null, (error) => error.message);
"""


pytestmark = pytest.mark.needs("node")


def run(script: str) -> Any:
    """The value that a script gives, in a storage of its own."""
    head = f"const FOLDER = {json.dumps(FOLDER.as_uri() + '/')};{BEFORE}"
    body = f"{head}\nconst made = await (async () => {{ {script} }})();\nconsole.log(JSON.stringify(made));"
    done = subprocess.run(["node", "--input-type=module", "-"], input=body, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_conversations_are_listed_renamed_and_deleted() -> None:
    script = """
        kept.keepConversation("1", talk("One", 1)); kept.keepConversation("2", talk("Two", 2));
        kept.keepConversation("1", { ...talk("Uno", 3), exchanges: [1, 2] });
        const all = kept.listed(), first = kept.keptConversation("1").exchanges;
        kept.forget("1"); kept.forget("none");
        return [all, first, kept.listed(), kept.keptConversation("1")];
    """
    two = {"id": "2", "title": "Two"}
    assert run(script) == [[{"id": "1", "title": "Uno"}, two], [1, 2], [two], None]


def test_damaged_storage_is_not_shown() -> None:
    script = """
        kept.keepConversation("good", talk("Good", 1)); kept.keepConversation("bad", talk("Bad", 2));
        kept.keepSettings({ chat: "good" });
        const names = Object.keys(localStorage), bad = names.find((name) => name.endsWith("bad"));
        localStorage[bad] = localStorage[bad].replace("Bad", "Baf");
        localStorage["outrider-conversation-text"] = "x"; localStorage["outrider-conversation-"] = "";
        for (const odd of [null, [], { title: 1 }]) kept.keepConversation(`${odd}`, odd);
        const all = [kept.listed(), kept.keptConversation("bad"), kept.keptSettings()];
        const hasRoom = kept.keepConversation("long", talk("a".repeat(9000), 4));
        for (const name of Object.keys(localStorage)) localStorage[name] = "00000000 {}";
        const none = [kept.listed(), kept.keptSettings()];
        globalThis.localStorage = undefined; // as where cookies are blocked
        return [...all, hasRoom, ...none, kept.listed(), kept.keepSettings({}), kept.forget("good") ?? null];
    """
    good = [{"id": "good", "title": "Good"}]
    assert run(script) == [good, None, {"chat": "good"}, False, [], None, [], False, None]


def test_files_are_sent_as_blocks_of_code() -> None:
    script = """
        const [a] = await files.readFiles([file("a.md", new TextEncoder().encode("```\\nx\\n```\\n"))], []);
        const big = [file("big", new Uint8Array(200001))], half = [file("half", new Uint8Array(100001))];
        return [
            files.contentOf("Look", [a]), files.contentOf("", [a]), files.contentOf("Look"), files.inWords(a),
            await failure(files.readFiles(big, [])), await failure(files.readFiles(half, half)),
            await failure(files.readFiles([file("b.png", [0x89, 0x50, 0xff])], [])),
            await failure(files.readFiles([file("zeros", [65, 0])], [])),
        ];
    """
    block = "a.md:\n````\n```\nx\n```\n````"
    made = run(script)
    assert made[:4] == [f"Look\n\n{block}", block, "Look", "a.md, 10 bytes"]
    assert made[4] == made[5] == "The text files of a message may have 200 kB together. Leave some out, or send a part."
    assert made[6:] == [
        f"{name} is not a text file in UTF-8. Only text and images can be sent." for name in ("b.png", "zeros")
    ]


def test_the_page_says_the_limit_of_files() -> None:
    limit = re.search(r"MOST_KILOBYTES = (\d+)", (FOLDER / "files.js").read_text(encoding="utf-8"))
    assert limit
    assert f"{limit[1]} kB at most" in (FOLDER / "index.html").read_text(encoding="utf-8")

"""Talk in turns, try another answer, and go on tomorrow from a file.

python samples/chat_session.py my-pair chat.json
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, path = sys.argv[1:]
with outrider.load(bundle, max_new_tokens=60) as engine:
    chat = engine.chat("You are a helpful assistant. Answer in one sentence.", temperature=0.7)
    for question in ("Name a city by the sea.", "What is it known for?"):
        print(f"\n> {question}")
        for chunk in chat.stream(question):
            print(chunk.text, end="", flush=True)
        stats = chunk.stats
        print(f"\n({stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens cached)")

    other = chat.fork()  # goes on apart from the first
    print(f"\nAnother answer: {other.retry(seed=1).text}")
    chat.save(path)

    again = engine.load_chat(path)
    result = again.send("Thank you.")
    accepted = sum(token.source == "accepted" for token in result.tokens)
    print(f"\n> Thank you.\n{result.text}")
    print(f"{accepted} of {len(result.tokens)} tokens were drafted, {result.stats.tokens_per_second:.1f} tokens/s")

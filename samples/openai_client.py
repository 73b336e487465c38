"""Ask a server with OpenAI's own client.

outrider serve my-pair
pip install openai
python samples/openai_client.py http://127.0.0.1:8000 "Why is the sky blue?"
"""

import os
import sys

try:
    from openai import OpenAI
except ImportError as error:
    sys.exit(f"{error}. Run: pip install openai")

if len(sys.argv) != 3:
    sys.exit(__doc__)
url, prompt = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": prompt}],
    max_tokens=100,
    stream=True,
    extra_body={"drafter": "auto"},  # or the name of a drafter, or "none"
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
timings = (chunk.model_extra or {})["timings"]
print(f"\n\n{timings['predicted_per_second']:.1f} tokens/s, ", end="")
print(f"{timings['draft_n_accepted']} of {timings['draft_n']} draft tokens accepted")

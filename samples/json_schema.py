"""Print an answer in JSON by a schema, and how many tokens each round gave.

python samples/json_schema.py my-pair "How is the weather in Paris?"

Needs: pip install ".[structured]"
"""

import json
import sys

try:
    import llguidance  # noqa: F401
except ImportError as error:
    sys.exit(f'{error}. Run: pip install ".[structured]"')

import outrider

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "kind_of_weather": {"enum": ["sunny", "cloudy", "rainy", "snowy"]},
        "temperature_in_celsius": {"type": "integer", "minimum": -60, "maximum": 60},
    },
    "required": ["city", "kind_of_weather", "temperature_in_celsius"],
    "additionalProperties": False,
}

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle)
messages = [{"role": "user", "content": f"{prompt} Answer in JSON, by this schema: {json.dumps(SCHEMA)}"}]
result = engine.generate(messages, json_schema=SCHEMA, max_new_tokens=200)
for key, value in json.loads(result.text).items():
    print(f"{key}: {value!r}")
print(f"\n{result.stats.tokens_per_round:.1f} tokens a round, {result.stats.tokens_per_second:.1f} tokens/s")

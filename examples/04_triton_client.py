"""Ask a Triton server that runs a repository of `trtllm-kvmap triton`, whole and as a stream.

python examples/04_triton_client.py [--url http://127.0.0.1:8000] [--prompt TEXT] [--validate]
"""

import argparse
import json
import sys
import urllib.error
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument(
    "--prompt", default="<bos> " + "after anna ben near old mill " * 40 + "so first"
)
parser.add_argument("--validate", action="store_true", help="fail when stream and whole differ")
options = parser.parse_args()


def post(endpoint, body):
    """The lines of Triton's answer. The request is one string tensor that holds OpenAI JSON."""
    sent = json.dumps({"request": json.dumps(body)}).encode()
    url = f"{options.url}/v2/models/kvmap_pipeline/{endpoint}"
    try:
        kind = {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(url, data=sent, headers=kind))
    except urllib.error.HTTPError as error:  # a request that cannot be carried out
        sys.exit(f"FAILED: the server refuses: {error.read().decode().strip()}")
    except OSError as error:
        sys.exit(f"FAILED: no server answers at {options.url} ({error}); docs/triton.md starts one")


body = {"prompt": options.prompt, "max_tokens": 8, "temperature": 0, "conversation": "example"}
whole = json.loads(json.load(post("generate", body))["response"])
print("whole: ", whole["choices"][0]["text"])
print("status:", whole["kv_status"], whole["kv_reason"])
print("usage: ", whole["usage"])

streamed = ""
for line in post("generate_stream", {**body, "stream": True}):
    if line.startswith(b"data:"):
        piece = json.loads(json.loads(line.removeprefix(b"data:"))["response"])
        streamed += piece["choices"][0]["text"]
print("stream:", streamed)

if options.validate and streamed != whole["choices"][0]["text"]:
    sys.exit("FAILED: the stream says something else than the whole answer")
mapped, prompt = whole["usage"]["mapped_tokens"], whole["usage"]["prompt_tokens"]
print(f"OK: {mapped} of {prompt} prompt tokens were mapped ({whole['kv_status']})")

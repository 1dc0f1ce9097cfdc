"""OpenVINO GenAI, for outside_engines.py: it runs in an environment of its own, with `pip install openvino-genai`.

usage: python genai_worker.py MODEL THREADS TOKENS; reads JSON lines with `mode` and `ids`, writes one for each.
"""

import json
import sys
import time

import openvino as ov
import openvino_genai as genai

model, threads, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = {"INFERENCE_NUM_THREADS": threads}
if len(sys.argv) > 4:  # the precision of the exact graph
    options |= json.loads(sys.argv[4])
pipelines = {
    "plain": genai.LLMPipeline(model, "CPU", **options),
    "lookup": genai.LLMPipeline(model, "CPU", prompt_lookup=True, **options),
}
for line in sys.stdin:
    asked = json.loads(line)
    config = genai.GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=asked["eos"])
    config.stop_token_ids = {asked["eos"]}
    if asked["mode"] == "lookup":
        config.num_assistant_tokens, config.max_ngram_size = 3, 3
    ids = ov.Tensor([asked["ids"]])
    begin = time.perf_counter()
    found = pipelines[asked["mode"]].generate(ids, config)
    print(json.dumps({"tokens": list(found.tokens[0]), "seconds": time.perf_counter() - begin}), flush=True)

"""``openvino_engine.py FOLDER THREADS``: greedy decoding by OpenVINO, in an environment of its own.
Lines of standard input and output are those of ``llama_cpp.mjs``."""

import json
import sys
import time

import numpy as np
import openvino

FOLDER, THREADS = sys.argv[1:]
OPTIONS = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS}
model = openvino.Core().compile_model(f"{FOLDER}/openvino_model.xml", "CPU", OPTIONS)
request = model.create_infer_request()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids, past, count = np.array(asked["prompts"]), 0, asked["new"]
    rows = len(ids)
    request.reset_state()
    found, times = [], [time.perf_counter()]
    for _ in range(count):
        end = past + ids.shape[1]
        given = {"input_ids": ids, "attention_mask": np.ones((rows, end), np.int64)}
        given["position_ids"] = np.arange(past, end)[None].repeat(rows, 0)
        request.infer(given | {"beam_idx": np.arange(rows, dtype=np.int32)})
        ids, past = request.get_output_tensor(0).data[:, -1:].argmax(-1), end
        found.append(ids[:, 0].tolist())
        times.append(time.perf_counter())
    first, token = times[1] - times[0], (times[-1] - times[1]) / max(count - 1, 1)
    answer = {"first": 1e3 * first, "token": 1e3 * token, "found": np.transpose(found).tolist()}
    print(json.dumps(answer), flush=True)

// Serves greedy decoding by llama.cpp: node llama_cpp.mjs FILE.gguf THREADS SEQUENCES CONTEXT
// A line of standard input is {"prompts": [[token, ...], ...], "new": tokens}; the answer is a line
// {"first": ms to the first new tokens, "token": ms per later token, "found": [[token, ...], ...]}.
import readline from "node:readline";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [file, ...numbers] = process.argv.slice(2);
const [threads, sequences, contextSize] = numbers.map(Number);
const logLevel = LlamaLogLevel.error;
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel});
const model = await llama.loadModel({modelPath: file, useMmap: false});
const ideal = {ideal: threads, min: threads};
const context = await model.createContext({contextSize, sequences, batchSize: 512, threads: ideal});
const slots = Array.from({length: sequences}, () => context.getSequence());

async function generate(prompt, slot, count) {
  const found = [], times = [];
  for await (const token of slot.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    found.push(token);
    times.push(performance.now());
    if (found.length === count) break;
  }
  return {found, times};
}

console.log("ready");
for await (const line of readline.createInterface({input: process.stdin})) {
  const {prompts, new: count} = JSON.parse(line);
  for (const slot of slots) await slot.clearHistory();
  const begin = performance.now();
  const all = await Promise.all(prompts.map((prompt, i) => generate(prompt, slots[i], count)));
  const first = Math.max(...all.map(({times}) => times[0]));
  const last = Math.max(...all.map(({times}) => times[count - 1]));
  const token = count > 1 ? (last - first) / (count - 1) : 0;
  console.log(JSON.stringify({first: first - begin, token, found: all.map(({found}) => found)}));
}
process.exit(0);

// Plain decoding by llama.cpp, and its drafts looked up in the prompt, for outside_engines.py.
// usage: node llama_cpp.mjs MODEL.gguf THREADS TOKENS; reads one JSON list of token ids a line, writes one JSON a line.
import readline from "node:readline";
import {getLlama, InputLookupTokenPredictor} from "node-llama-cpp";

const [path, threads, limit] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 2048, threads, sequences: 2});
const predictor = new InputLookupTokenPredictor({patternLength: {min: 1}, predictionLength: {max: 3}});
const sequences = {plain: context.getSequence(), lookup: context.getSequence({tokenPredictor: predictor})};

async function write(sequence, ids) {
  await sequence.clearHistory();
  const begin = performance.now();
  const tokens = [];
  for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    tokens.push(token);
    if (tokens.length === limit || model.isEogToken(token)) break;
  }
  return {tokens, seconds: (performance.now() - begin) / 1000};
}

for await (const line of readline.createInterface({input: process.stdin})) {
  const {mode, ids} = JSON.parse(line);
  console.log(JSON.stringify(await write(sequences[mode], ids)));
}
process.exit(0);

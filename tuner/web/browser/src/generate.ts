/** The page of text generation: `prefill` reads the prompt, `decode` adds tokens; the caches stay on the device. */

import { type Opened, element, onSubmit, open, say } from "./page.js";
import { type Model, ModelError, Session, type Tensor, tensor } from "./relax-tune.js";

/** Return the logits of the last position. */
function lastLogits({ shape, data, dtype }: Tensor): Float32Array {
  if (dtype !== "float32") throw new ModelError(`This page reads logits of float32, and the model gives ${dtype}.`);
  const vocabulary = shape[shape.length - 1];
  return (data as Float32Array).subarray(data.length - vocabulary);
}

/** Choose a token: the likeliest at temperature 0, else drawn from softmax(logits / temperature). */
function choose(logits: Float32Array, temperature: number): number {
  let best = 0;
  for (let k = 1; k < logits.length; k++) if (logits[k] > logits[best]) best = k;
  if (temperature <= 0) return best;
  const weights = logits.map((x) => Math.exp((x - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((sum, x) => sum + x, 0);
  for (let k = 0; k < weights.length; k++) {
    left -= weights[k];
    if (left < 0) return k;
  }
  return best;
}

/** Yield the tokens that follow a prompt, as soon as each is known. Free of errors it ends after `most` tokens. */
export async function* generate(model: Model, prompt: readonly number[], most: number, temperature: number): AsyncGenerator<number> {
  const prefill = model.executor("prefill").program;
  const decode = model.executor("decode").program;
  const [ids, ...caches] = decode.inputs.map((index) => decode.buffers[index].name);
  const first = prefill.buffers[prefill.inputs[0]].name;
  const given = { [first]: tensor("int64", [1, prompt.length], prompt) };
  const [start, ...state] = await model.run("prefill", given);
  const named = Object.fromEntries(caches.map((name, at) => [name, state[at]]));
  const session = new Session(model, "decode", named, Object.fromEntries(caches.map((name, at) => [name, at + 1])));
  try {
    let logits = lastLogits(start);
    for (let added = 0; added < most; added++) {
      const token = choose(logits, temperature);
      yield token;
      if (added + 1 < most) {
        const [found] = await session.run({ [ids]: tensor("int64", [1, 1], [token]) });
        logits = lastLogits(found);
      }
    }
  } finally {
    session.close();
  }
}

let stopped = false;

async function complete({ model, codec, ends }: Opened): Promise<void> {
  const prompt = codec.encode(element<HTMLTextAreaElement>("prompt").value);
  if (!prompt.length) throw new ModelError("Write a beginning to go on with.");
  const most = Number(element<HTMLInputElement>("most").value);
  const temperature = Number(element<HTMLInputElement>("temperature").value);
  const room = model.executor("decode").positions() - prompt.length + 1;
  const limit = Math.max(Math.min(most, room), 1);
  const added: number[] = [];
  const output = element("output");
  stopped = false;
  output.textContent = "";
  say("Reading the prompt");
  for await (const token of generate(model, prompt, limit, temperature)) {
    if (stopped || ends.has(token)) break;
    added.push(token);
    output.textContent = codec.decode(added);
    say(`${added.length} of at most ${limit} tokens`);
  }
  const why = stopped ? "stopped" : added.length === limit && limit < most ? "the model has no more positions" : "done";
  say(`${added.length} tokens, ${why}`);
}

element("stop").addEventListener("click", () => {
  stopped = true;
});
void open((opened) => onSubmit(element<HTMLFormElement>("form"), () => complete(opened)));
